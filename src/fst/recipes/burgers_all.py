"""Burgers at twelve viscosities, with the viscosity as condition (paper, Section 4.1)."""

from fst.baselines import FNOConfig, PerceiverIOConfig
from fst.config import FunctionSpaceConfig
from fst.data import BurgersData
from fst.data.burgers import VISCOSITIES
from fst.evaluation.protocol import EvaluationSettings
from fst.recipes import paper
from fst.recipes.recipe import ModelConfig, Recipe
from fst.training.schedules import Stages, burgers_all, burgers_all_constant
from fst.training.settings import TrainingSettings


def _recipe(
    model_name: str,
    paper_name: str,
    model: ModelConfig,
    learning_rate: float,
    schedule: Stages,
    parameters: int,
    predictor_learning_rate: float | None = None,
    whole_grid: bool = False,
) -> Recipe:
    error = paper.BURGERS_ALL[paper_name]
    return Recipe(
        name=f"burgers-all/{model_name}",
        task="burgers-all",
        model_name=paper_name,
        model=model,
        data=BurgersData(
            viscosities=VISCOSITIES,
            test=1_000,
            condition=True,
            supervision_grid=None if whole_grid else (100, 100),
        ),
        training=TrainingSettings(
            schedule=schedule,
            learning_rate=learning_rate,
            predictor_learning_rate=predictor_learning_rate,
            queries=None if whole_grid else 2_500,
            clip=None,
            validate_every=5_000,
        ),
        evaluation=EvaluationSettings(
            grids=paper.BURGERS_GRIDS[-1:],
            paper_errors=(error,),
            paper_groups=paper.viscosity_groups(paper_name),
        ),
        standardization=(-0.012048, 0.621534),
        paper_parameters=parameters,
        paper_error=error,
    )


def fst() -> Recipe:
    """The paper's all-viscosity FST.

    Command: fst train burgers-all/fst --out runs/burgers-all
    Cost: 250,000 to 1,000,000 steps; the paper stopped at 500,000 after 30.5 hours on one A100.
    Data: 26,200 trajectories, 22 GB on disk, 1 GB on the device.
    Paper: relative L2 0.018180 on the full 201×1024 grid.
    """
    model = FunctionSpaceConfig(condition_channels=1, log_condition=True)
    return _recipe("fst", "FST", model, 1e-3, burgers_all(), 2_900_721, 1e-5)


def fno() -> Recipe:
    """FNO with the viscosity as a constant channel, supervised on the whole grid.

    Command: fst train burgers-all/fno --out runs/burgers-all-fno
    Cost: the paper stopped at 400,000 steps, 32.9 hours on three A100s.
    Needs: function-space-transformer[baselines].
    Data: 26,200 trajectories, 22 GB on disk, 20 GB on the device.
    Paper: relative L2 0.018528 on the full 201×1024 grid.
    """
    model = FNOConfig(condition_channels=1, log_condition=True)
    return _recipe("fno", "FNO", model, 5e-3, burgers_all(), 2_978_257, whole_grid=True)


def perceiver_io() -> Recipe:
    """Perceiver IO with the viscosity added to its latents.

    Command: fst train burgers-all/perceiver-io --out runs/burgers-all-perceiver-io
    Cost: the paper stopped at 900,000 steps, 18.6 hours on three A100s.
    Paper: relative L2 0.073293 on the full 201×1024 grid.
    """
    model = PerceiverIOConfig(condition_channels=1, log_condition=True)
    schedule = burgers_all_constant()
    return _recipe("perceiver-io", "Perceiver IO", model, 1e-5, schedule, 2_995_201)
