"""The shortest way to the lowest error: optimiser, schedule and augmentation as we see fit.

These are ours, not the paper's: same model, data and test protocol.
"""

from dataclasses import replace

from fst.recipes import burgers_all, burgers_single, darcy
from fst.recipes.recipe import Recipe
from fst.training.schedules import WarmupCosine
from fst.training.settings import TrainingSettings


def burgers_single_fst() -> Recipe:
    """Single-viscosity Burgers in minutes: Muon, exact symmetries, one cosine to zero.

    Command: fst train fast/burgers-single/fst --out runs/fast
    Cost: under ten minutes on one H200, data generation and compilation included.
    """
    base = burgers_single.fst()
    return base.derive("fast/burgers-single/fst", training=_fast(base, steps=13_000))


def burgers_all_fst() -> Recipe:
    """All viscosities in an hour or two instead of a day.

    Command: fst train fast/burgers-all/fst --out runs/fast-all
    Cost: 100,000 steps.
    """
    base = burgers_all.fst()
    return base.derive("fast/burgers-all/fst", training=_fast(base, steps=100_000))


def darcy_fst() -> Recipe:
    """Darcy with one cosine to zero and a random subset of the grid at each step.

    Command: fst train fast/darcy/fst --out runs/fast-darcy
    Cost: 20,000 steps.
    """
    base = darcy.fst()
    training = replace(_fast(base, steps=20_000), queries=4_096)
    return base.derive("fast/darcy/fst", training=training)


def _fast(base: Recipe, steps: int) -> TrainingSettings:
    """Muon at one rate for all parameters, and every exact symmetry of the data."""
    return replace(
        base.training,
        schedule=WarmupCosine(warmup=300, maximum=steps),
        optimizer="muon",
        learning_rate=1e-3,
        predictor_learning_rate=None,
        clip=1.0,
        augment=True,
        checkpoint_every=5_000,
    )
