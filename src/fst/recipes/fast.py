"""The shortest way to the lowest error: schedule, augmentation and averaging as we see fit.

These are ours, not the paper's: same model, data and test protocol.
"""

from dataclasses import replace

from fst.recipes import burgers_all, burgers_single, darcy
from fst.recipes.recipe import Recipe
from fst.training.schedules import WarmupCosine


def burgers_single_fst() -> Recipe:
    """Single-viscosity Burgers in minutes: exact symmetries, one cosine to zero.

    Command: fst train fast/burgers-single/fst --out runs/fast
    Cost: under ten minutes on one H200, data generation and compilation included.
    """
    base = burgers_single.fst()
    return base.derive(
        "fast/burgers-single/fst",
        training=replace(
            base.training,
            schedule=WarmupCosine(warmup=1_000, maximum=13_000),
            clip=1.0,
            augment=True,
            checkpoint_every=5_000,
        ),
    )


def burgers_all_fst() -> Recipe:
    """All viscosities in an hour or two instead of a day.

    Command: fst train fast/burgers-all/fst --out runs/fast-all
    Cost: 100,000 steps.
    """
    base = burgers_all.fst()
    return base.derive(
        "fast/burgers-all/fst",
        training=replace(
            base.training,
            schedule=WarmupCosine(warmup=1_000, maximum=100_000),
            predictor_learning_rate=None,
            clip=1.0,
            augment=True,
            checkpoint_every=5_000,
        ),
    )


def darcy_fst() -> Recipe:
    """Darcy with one cosine to zero and a random subset of the grid at each step.

    Command: fst train fast/darcy/fst --out runs/fast-darcy
    Cost: 20,000 steps.
    """
    base = darcy.fst()
    return base.derive(
        "fast/darcy/fst",
        training=replace(
            base.training,
            schedule=WarmupCosine(warmup=1_000, maximum=20_000),
            queries=4_096,
            augment=True,
            checkpoint_every=5_000,
        ),
    )
