"""A small Burgers problem for a laptop: what `make demo` runs."""

from fst.config import FunctionSpaceConfig
from fst.data import BurgersData
from fst.evaluation.protocol import EvaluationSettings, View
from fst.recipes.recipe import Recipe
from fst.training.schedules import WarmupCosine
from fst.training.settings import TrainingSettings


def burgers() -> Recipe:
    """A small FST on small Burgers solutions, ν = 0.1.

    Command: fst demo --out runs/demo, or fst train demo/burgers --out runs/demo
    Cost: under five minutes on two CPU cores, data included.
    """
    return Recipe(
        name="demo/burgers",
        task="demo",
        model_name="FST",
        model=FunctionSpaceConfig(
            width=48,
            heads=4,
            fourier_bands=8,
            rows=(12,),
            anchors_per_row=12,
            predictor_width=48,
            predictor_blocks=1,
            refinement_steps=2,
            points_from_anchors=32,
            points_from_sobol=32,
        ),
        data=BurgersData(
            viscosities=(0.1,),
            training=256,
            validation=16,
            test=32,
            points=128,
            times=41,
            final_time=0.5,  # at this viscosity little is left to see later
            supervision_grid=None,
            validation_grid=(41, 128),
        ),
        training=TrainingSettings(
            schedule=WarmupCosine(warmup=100, maximum=2_000),
            batch_size=8,
            queries=256,
            optimizer="muon",
            learning_rate=2e-3,
            clip=1.0,
            precision="fp32",
            compile=False,
            validate_every=250,
            checkpoint_every=500,
            log_every=10,
            augment=True,
        ),
        evaluation=EvaluationSettings(
            grids=((41, 128),),
            view=View(axis_ends=(0.5, 1.0), profiles=(0.0, 0.05, 0.1, 0.2, 0.35, 0.5)),
        ),
        data_folder="demo",
    )
