"""A small Burgers problem with shocks for a laptop: what `make demo` and `fst compare demo` run."""

from dataclasses import replace
from typing import Any

from fst.baselines import FNOConfig, PerceiverIOConfig
from fst.config import FunctionSpaceConfig
from fst.data import BurgersData
from fst.evaluation.protocol import EvaluationSettings, View
from fst.recipes.recipe import Recipe
from fst.training.schedules import WarmupCosine
from fst.training.settings import TrainingSettings

GRID = (51, 128)
TRAINING = TrainingSettings(
    schedule=WarmupCosine(warmup=100, maximum=4_500),
    batch_size=8,
    clip=1.0,
    precision="fp32",
    compile=False,
    validate_every=250,
    checkpoint_every=500,
    log_every=10,
    augment=True,
)


def _recipe(name: str, model_name: str, model: Any, training: TrainingSettings) -> Recipe:
    return Recipe(
        name=f"demo/{name}",
        task="demo",
        model_name=model_name,
        model=replace(model, prediction_symmetry="odd-reflection"),
        data=BurgersData(
            viscosities=(0.02,),
            training=512,
            validation=16,
            test=32,
            points=GRID[1],
            times=GRID[0],
            final_time=1.0,
            supervision_grid=None,
            validation_grid=GRID,
        ),
        training=training,
        evaluation=EvaluationSettings(
            grids=(GRID,),
            view=View(axis_ends=(1.0, 1.0), profiles=(0.0, 0.1, 0.2, 0.4, 0.7, 1.0)),
        ),
        data_folder="demo",
    )


def burgers() -> Recipe:
    """A small FST on small Burgers solutions with shocks, ν = 0.02.

    Command: fst demo --out runs/demo, or fst train demo/burgers --out runs/demo
    Cost: about three minutes on one CPU core.
    """
    model = FunctionSpaceConfig(
        width=48,
        heads=4,
        fourier_bands=8,
        # Many anchors in space and two rows in time: 8 rows of 16 take longer and learn no faster.
        rows=(2,),
        anchors_per_row=32,
        predictor_width=48,
        predictor_blocks=1,
        refinement_steps=2,
        # With so few anchors all of them can be used, and none need be drawn at random.
        points_from_anchors=64,
        points_from_sobol=0,
        length_scales="spacing",
    )
    training = replace(TRAINING, queries=256, optimizer="muon", learning_rate=4e-3, momentum=0.9)
    return _recipe("burgers", "FST", model, training)


def fno() -> Recipe:
    """A small FNO on the same solutions.

    Command: fst compare demo --budget 4m --out runs/compare-demo
    Cost: what the budget says.
    Needs: function-space-transformer[baselines].
    """
    # The grid has an odd number of times: see `odd_axes`.
    model = FNOConfig(grid=GRID, width=24, modes=(12, 24), odd_axes="mended")
    training = replace(TRAINING, queries=None, learning_rate=6e-3)
    return _recipe("fno", "FNO", model, training)


def perceiver_io() -> Recipe:
    """A small Perceiver IO on the same solutions.

    Command: fst compare demo --budget 4m --out runs/compare-demo
    Cost: what the budget says.
    """
    model = PerceiverIOConfig(width=64, heads=4, latents=64, layers=4, fourier_bands=8)
    training = replace(TRAINING, queries=256, optimizer="muon", learning_rate=8e-3)
    return _recipe("perceiver-io", "Perceiver IO", model, training)
