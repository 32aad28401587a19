"""Your own points: sizes, channels and domain come from the file (see docs/data.md)."""

from fst.config import FunctionSpaceConfig
from fst.data import PointData
from fst.evaluation.protocol import EvaluationSettings
from fst.recipes.recipe import Recipe
from fst.training.schedules import WarmupCosine
from fst.training.settings import TrainingSettings


def fst() -> Recipe:
    """FST on a file of your own.

    Command: fst train own/fst --data my.h5 --out runs/mine
    Cost: 20,000 steps by default; set --training.schedule.maximum.
    """
    return Recipe(
        name="own/fst",
        task="own",
        model_name="FST",
        model=FunctionSpaceConfig(),
        data=PointData(),
        data_folder="",
        training=TrainingSettings(
            schedule=WarmupCosine(warmup=300),
            optimizer="muon",
            clip=1.0,
            batch_size=16,
            validate_every=500,
        ),
        evaluation=EvaluationSettings(grids=()),
    )
