"""The shortest way to the lowest error: optimiser, schedule and augmentation as we see fit.

These are ours, not the paper's: same models, data and test protocol. Every model of a task has the
same steps, warm-up, cosine to zero, clipping and exact symmetries, so that they can be compared.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from fst.baselines import FNOConfig, GridTransolverConfig
from fst.evaluation.protocol import EvaluationSettings
from fst.recipes import burgers_all, burgers_single, darcy
from fst.recipes.recipe import Recipe
from fst.training.schedules import WarmupCosine

WARMUP, CLIP = 300, 1.0


@dataclass(frozen=True)
class Task:
    """What all models of a task share."""

    title: str
    steps: int
    queries: int | None = None
    """Targets drawn at each step; None leaves them as they are in the paper's recipe."""
    note: str = ""
    """A line for the descriptions."""


TASKS = {
    "burgers-single": Task("Single-viscosity Burgers", steps=34_500),
    "burgers-all": Task(
        "Burgers at twelve viscosities",
        steps=100_000,
        # To be moved by the symmetries, solutions must lie on the device as a whole.
        note="Data: 26,200 trajectories, 22 GB on disk, 20 GB on the device.",
    ),
    "darcy": Task("Darcy flow", steps=20_000, queries=4_096),
}


@dataclass(frozen=True)
class Variant:
    """A recipe of the paper, and the optimiser and learning rate that it gets here."""

    paper: Callable[[], Recipe]
    optimizer: Literal["adam", "adamw", "muon"]
    learning_rate: float
    note: str = ""
    """Added to the cost."""
    matrix_rate: float = 1.0
    weight_decay: float = 0.0


def mended(paper: Callable[[], Recipe]) -> Callable[[], Recipe]:
    """FNO without neuraloperator's frequency shift on odd axes (docs/decisions/0004)."""

    def make() -> Recipe:
        base = paper()
        assert isinstance(base.model, FNOConfig)
        assert isinstance(base.evaluation, EvaluationSettings)
        return base.derive(
            f"{base.name}-mended",
            model_name=f"{base.model_name}, mended",
            model=replace(base.model, odd_axes="mended"),
            evaluation=replace(base.evaluation, paper_errors=(), paper_groups=()),
        )

    return make


NEEDS = "Needs fst[baselines]."
# Optimisers and rates are to be chosen by a search on validation: for each model the better of
# Muon and its own optimiser, at its best rate. Until then every model has Muon at a rate that the
# paper uses for it, because Muon's updates have the size of Adam's.
VARIANTS = (
    Variant(
        burgers_single.fst, "muon", 1e-3,
        "Ten minutes of updates on one H200.",
        matrix_rate=1.5,
        weight_decay=0.02,
    ),
    Variant(burgers_single.fno, "muon", 3e-3, NEEDS),
    Variant(mended(burgers_single.fno), "muon", 3e-3, NEEDS),
    Variant(burgers_single.perceiver_io, "muon", 3e-4),
    Variant(burgers_single.transolver, "muon", 3e-4),
    Variant(burgers_single.deeponet, "muon", 3e-4),
    Variant(burgers_all.fst, "muon", 1e-3),
    Variant(burgers_all.fno, "muon", 5e-3, NEEDS),
    Variant(mended(burgers_all.fno), "muon", 5e-3, NEEDS),
    Variant(burgers_all.perceiver_io, "muon", 3e-4),
    Variant(darcy.fst, "muon", 1e-3),
    Variant(darcy.fno, "muon", 5e-3, NEEDS),
    Variant(darcy.perceiver_io, "muon", 3e-4),
    Variant(darcy.transolver, "muon", 1e-3),
    Variant(darcy.deeponet, "muon", 1e-3),
)  # fmt: skip


def fast(variant: Variant) -> Recipe:
    """The recipe of one row of the table."""
    base = variant.paper()
    task = TASKS[base.task]
    # A model that predicts its whole grid anyway learns from all of it.
    whole_grid = isinstance(base.model, FNOConfig | GridTransolverConfig)
    training = replace(
        base.training,
        schedule=WarmupCosine(warmup=WARMUP, maximum=task.steps),
        optimizer=variant.optimizer,
        learning_rate=variant.learning_rate,
        matrix_rate=variant.matrix_rate,
        weight_decay=variant.weight_decay,
        predictor_learning_rate=None,
        clip=CLIP,
        queries=base.training.queries if whole_grid or not task.queries else task.queries,
        augment=True,
        checkpoint_every=5_000,
    )
    return base.derive(f"fast/{base.name}", training=training)


def described(variant: Variant) -> Callable[[], Recipe]:
    """A function that returns the recipe, with the docstring that `fst recipes` shows."""
    recipe = fast(variant)
    task = TASKS[recipe.task]
    optimizer = {"adam": "Adam", "adamw": "AdamW", "muon": "Muon"}[variant.optimizer]

    def make() -> Recipe:
        return fast(variant)

    lines = (
        f"{task.title} with {recipe.model_name}: {optimizer}, exact symmetries, a cosine to zero.",
        "",
        f"Command: fst train {recipe.name} --out runs/{recipe.name.replace('/', '-')}",
        f"Cost: {task.steps:,} steps. {variant.note}".rstrip(),
        task.note,
    )
    make.__doc__ = "\n".join(lines).rstrip()
    return make


def recipes() -> list[Callable[[], Recipe]]:
    """Every row of the table."""
    return [described(variant) for variant in VARIANTS]
