"""Your own points: sizes, channels and domain come from the file (see docs/data.md).

`choose` adds what follows from the number of samples, their points and the device: the size of the
model, the batch, the loss, the steps and the regularisation, each with its reason.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from fst.baselines import DeepONetConfig, FNOConfig, PerceiverIOConfig, TransolverConfig
from fst.config import FunctionSpaceConfig
from fst.data import PointData
from fst.data.point_samples import LARGEST_OFFSET, LARGEST_RATIO
from fst.data.samples import RunningMoments
from fst.evaluation.protocol import EvaluationSettings
from fst.recipes.recipe import ModelConfig, Recipe, short_name
from fst.training.schedules import WarmupCosine
from fst.training.settings import RelativeL2, TrainingSettings

TASK = "own"
Size = Literal["paper", "small"]
# Sizes that two CPU cores can train in minutes.
SMALL: dict[type, dict[str, Any]] = {
    FunctionSpaceConfig: {
        "width": 48, "heads": 4, "fourier_bands": 8, "predictor_width": 48, "predictor_blocks": 1,
        "refinement_steps": 2, "points_from_anchors": 32, "points_from_sobol": 32,
    },
    PerceiverIOConfig: {"width": 48, "heads": 4, "latents": 64, "layers": 2, "fourier_bands": 8},
    TransolverConfig: {"width": 48, "heads": 4, "layers": 2, "slices": 16},
    DeepONetConfig: {"branch": (128, 128), "trunk": (128, 128)},
    FNOConfig: {"width": 16},
}  # fmt: skip
# Fixed positions on the other axes and anchors per row of a small FST, by the number of axes.
SMALL_LAYOUTS = {
    axes: {"rows": (count,) * (axes - 1), "anchors_per_row": count}
    for axes, count in ((1, 32), (2, 12), (3, 5))
}
# How long a run on a CPU takes unless something else is asked for.
CPU_MINUTES = 10.0
COST = "ten minutes on a CPU, at most 20,000 steps on a GPU; set --minutes or --steps."
# Every sample is seen at most so often, in no fewer and no more steps than these.
MOST_EPOCHS, FEWEST_STEPS, MOST_STEPS = 1_000, 2_000, 20_000
# With fewer training samples than this, weights decay and are averaged.
FEW_SAMPLES, WEIGHT_DECAY, AVERAGE = 1_000, 0.1, 0.999
# A model sees the logarithm of conditions that are positive and span at least this factor.
WIDE_RANGE = 10.0


def _recipe(paper_name: str, model: ModelConfig, learning_rate: float) -> Recipe:
    return Recipe(
        name=f"own/{short_name(paper_name)}",
        task=TASK,
        model_name=paper_name,
        model=model,
        data=PointData(),
        data_folder="",
        training=TrainingSettings(
            schedule=WarmupCosine(warmup=300),
            learning_rate=learning_rate,
            optimizer="muon",
            clip=1.0,
            batch_size=16,
            validate_every=500,
        ),
        evaluation=EvaluationSettings(grids=()),
    )


def fst() -> Recipe:
    """FST on a file of your own."""
    return _recipe("FST", FunctionSpaceConfig(), 1e-3)


def fno() -> Recipe:
    """FNO on a file of your own, whose points must all lie on one regular grid.

    Needs: function-space-transformer[baselines].
    """
    recipe = _recipe("FNO", FNOConfig(odd_axes="mended"), 3e-3)
    return replace(recipe, training=replace(recipe.training, queries=None))


def perceiver_io() -> Recipe:
    """Perceiver IO on a file of your own."""
    return _recipe("Perceiver IO", PerceiverIOConfig(), 3e-4)


def transolver() -> Recipe:
    """Transolver on a file of your own, without conditions."""
    return _recipe("Transolver", TransolverConfig(), 3e-4)


def deeponet() -> Recipe:
    """DeepONet on a file of your own: one channel in and out, observed at the same points."""
    return _recipe("DeepONet", DeepONetConfig(), 3e-4)


RECIPES: list[Callable[[], Recipe]] = [fst, fno, perceiver_io, transolver, deeponet]


@dataclass(frozen=True)
class Choice:
    """A recipe fitted to data and device; `minutes` limits it where only a measurement can."""

    recipe: Recipe
    minutes: float | None
    reasons: dict[str, str]
    """Why model, loss, batch, steps and regularisation are what they are."""

    def with_weights(self, model: ModelConfig, source: str) -> "Choice":
        """The same for a model that is trained already."""
        own = f"as the weights of {source} have it; --from"
        recipe = replace(self.recipe, model=model)
        return replace(self, recipe=recipe, reasons=self.reasons | {"model": own, "condition": own})

    def explain(self, recipe: Recipe) -> dict[str, str]:
        """The reasons of a recipe of which the user may have asked for other parts."""
        chosen, asked = (_by_reason(each.data.shown(each)) for each in (self.recipe, recipe))
        return {
            name: reason if chosen.get(name) == asked.get(name) else "as asked"
            for name, reason in self.reasons.items()
        }


def _by_reason(recipe: Recipe) -> dict[str, Any]:
    """What each reason is given for."""
    model: Any = recipe.model
    training = recipe.training
    smoothing = getattr(training.objective, "label_smoothing", None)
    return {
        "model": replace(model, log_condition=False) if hasattr(model, "log_condition") else model,
        "condition": getattr(model, "log_condition", None),
        "loss": training.objective,
        "batch": (training.batch_size, training.queries),
        "steps": training.schedule,
        "regularisation": (training.weight_decay, training.average, training.augment, smoothing),
    }


def small(recipe: Recipe, **changes: Any) -> Recipe:
    """A recipe with other sizes, and named so."""
    names = {"name": f"{recipe.name}, small", "model_name": f"{recipe.model_name}, small"}
    return replace(recipe, **names | changes)


def choose(recipe: Recipe, path: Path, device: torch.device, size: Size | None = None) -> Choice:
    """Fit a recipe to a file of points and to a device."""
    assert isinstance(recipe.data, PointData)
    fitted = recipe.data.fit(recipe, path)
    sizes, targets = recipe.data.training_targets(path)
    samples, points = len(sizes), int(sizes.max())
    moments = RunningMoments(targets.values.shape[1])
    moments.see(targets.values)
    far = bool((moments.offsets > LARGEST_OFFSET).any())
    uneven = moments.size_ratio > LARGEST_RATIO
    cpu = device.type == "cpu"
    size = size or ("small" if cpu else "paper")
    conditions = recipe.data.conditions(path)
    wide = (conditions > 0).all() and (conditions.max(0) >= WIDE_RANGE * conditions.min(0)).any()
    model: Any = fitted.model
    if wide:
        model = replace(model, log_condition=True)
        fitted = replace(fitted, model=model)
    if size == "small":
        layout = SMALL_LAYOUTS[model.domain.axes] if hasattr(model, "rows") else {}
        fitted = small(fitted, model=replace(model, **SMALL[type(model)], **layout))
    few, queries = samples < FEW_SAMPLES, recipe.training.queries
    batch = min(8 if cpu else 16 if few else 48, samples)
    steps = max(FEWEST_STEPS, min(MOST_STEPS, MOST_EPOCHS * samples // batch))
    training = replace(
        fitted.training,
        objective=RelativeL2(channels="standardized" if far or uneven else "original"),
        schedule=WarmupCosine(warmup=min(300, steps // 10), maximum=steps),
        learning_rate=recipe.training.learning_rate * (2 if size == "small" else 1),
        batch_size=batch,
        queries=None if queries is None or queries >= points else 512 if cpu else queries,
        precision="fp32" if cpu else "bf16",
        weight_decay=WEIGHT_DECAY if few else 0.0,
        average=AVERAGE if few else None,
        validate_every=max(1, steps // 20),
    )
    spread = f"means {'' if far else 'not '}far larger than standard deviations"
    if uneven and not far:
        spread = f"channels differ by a factor of {moments.size_ratio:.2g}"
    elif not far and (moments.std == 0).any():
        spread = "a constant target has no standard deviation"
    where = "a CPU" if cpu else "a GPU"
    number = f"{samples:,} training samples"
    reasons = {
        "loss": f"{spread}; --training.objective.channels",
        "model": f"{size} size, for {where}; --size paper or small",
        "condition": f"{'all positive' if wide else 'not all positive, or not'} over a factor of "
        f"{WIDE_RANGE:g} or more; --model.{'no-' if wide else ''}log-condition",
        "batch": f"{number} on {where}; --batch-size",
        "steps": f"at most {MOST_EPOCHS:,} epochs and {MOST_STEPS:,} steps; --steps or --minutes",
        "regularisation": f"{number}, {'fewer than' if few else 'not fewer than'} {FEW_SAMPLES:,}",
    }
    return Choice(replace(fitted, training=training), CPU_MINUTES if cpu else None, reasons)
