"""A recipe: everything that decides a run, as one immutable object that survives JSON.

Model, data, training and evaluation each keep their own settings; a recipe puts four of them
together under a name, with what the paper reports beside it.
"""

from dataclasses import dataclass, replace
from typing import Any

from cattrs.strategies import configure_tagged_union
from tyro.conf import Suppress

from fst.baselines import (
    CNNViTConfig,
    DeepONetConfig,
    FNOConfig,
    GridTransolverConfig,
    PerceiverIOConfig,
    TransolverConfig,
    ViTConfig,
)
from fst.config import FunctionSpaceConfig
from fst.data import BurgersData, DarcyData, ImageData, PointData
from fst.evaluation.classification import ClassificationSettings
from fst.evaluation.protocol import EvaluationSettings
from fst.pretrained import converter, from_json, to_json
from fst.training.schedules import Plateau, Stages, WarmupCosine
from fst.training.settings import CrossEntropy, RelativeL2, TrainingSettings
from fst.vision import ImageClassifierConfig

ModelConfig = (
    FunctionSpaceConfig
    | FNOConfig
    | PerceiverIOConfig
    | TransolverConfig
    | GridTransolverConfig
    | DeepONetConfig
    | ImageClassifierConfig
    | ViTConfig
    | CNNViTConfig
)
RecipeData = BurgersData | DarcyData | PointData | ImageData
Evaluation = EvaluationSettings | ClassificationSettings

for union in (ModelConfig, RecipeData, RelativeL2 | CrossEntropy, Stages | Plateau | WarmupCosine):
    configure_tagged_union(union, converter, tag_name="kind")
# Recipes stored before there were classifiers do not say which of the two they hold.
configure_tagged_union(Evaluation, converter, tag_name="kind", default=EvaluationSettings)


@dataclass(frozen=True)
class Recipe:
    """A complete run description."""

    name: Suppress[str]
    task: Suppress[str]
    model_name: Suppress[str]
    model: ModelConfig
    data: RecipeData
    training: TrainingSettings
    evaluation: Evaluation
    data_folder: Suppress[str] = "burgers"
    """Where the data lie under ./data unless --data says otherwise; empty: --data must say it."""
    standardization: tuple[float, float] | None = None
    """Mean and standard deviation of all values; None takes them from the training targets."""
    paper_parameters: Suppress[int | None] = None
    paper_error: Suppress[float | None] = None
    """As the paper reports it: test relative L2 on the full grid, or 1 - top-1 accuracy."""

    def derive(self, name: str, **changes: Any) -> "Recipe":
        """A variant. What the paper reports does not carry over unless it is given anew."""
        fresh = {"paper_parameters": None, "paper_error": None}
        return replace(self, name=name, **{**fresh, **changes})

    def to_json(self) -> dict[str, Any]:
        return to_json(self)


def short_name(model_name: str) -> str:
    """What a model is called in the names of recipes."""
    return model_name.lower().replace(" ", "-")


def recipe_from_json(data: object, source: str) -> Recipe:
    """A stored recipe; `source` names the file in errors."""
    return from_json(data, Recipe, source)
