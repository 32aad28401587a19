"""Your own points: sizes, channels and domain come from the file (see docs/data.md)."""

from dataclasses import replace
from typing import Any

from fst.config import FunctionSpaceConfig
from fst.data import PointData
from fst.data.errors import DataError
from fst.data.point_files import PointFile
from fst.evaluation.protocol import EvaluationSettings
from fst.recipes.recipe import Recipe
from fst.training.schedules import WarmupCosine
from fst.training.settings import TrainingSettings

# Fixed positions on the other axes, anchors a row, and evaluation points taken from anchors:
# about a thousand anchors on two and three axes, and as many as a line can use on one.
LAYOUTS = {1: ((), 128, 64), 2: ((32,), 32, 256), 3: ((10, 10), 10, 256)}


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
        training=TrainingSettings(
            schedule=WarmupCosine(warmup=300),
            optimizer="muon",
            clip=1.0,
            batch_size=16,
            validate_every=500,
        ),
        evaluation=EvaluationSettings(grids=()),
    )


def taken(file: PointFile) -> dict[str, Any]:
    """The settings of a model that a file decides."""
    return {
        "low": file.domain.low,
        "high": file.domain.high,
        "value_channels": file.value_channels,
        "output_channels": file.output_channels,
        "condition_channels": file.condition_channels,
    }


def differences(recipe: Recipe, file: PointFile) -> dict[str, tuple[Any, Any]]:
    """Where a model does not fit a file: by name, what the model has and what the file has."""
    pairs = {name: (getattr(recipe.model, name), value) for name, value in taken(file).items()}
    return {name: (ours, theirs) for name, (ours, theirs) in pairs.items() if ours != theirs}


def fitted(recipe: Recipe, file: PointFile) -> Recipe:
    """The recipe with its model fitted to a file: channels, domain and, if need be, axes.

    A model that was fitted before must fit as it is: what the file decides is not for options.
    """
    model, axes = recipe.model, file.domain.axes
    assert isinstance(model, FunctionSpaceConfig)
    default, decided = FunctionSpaceConfig(), taken(file)
    if any(getattr(model, name) != getattr(default, name) for name in decided):
        different = differences(recipe, file)
        if different:
            shown = (
                f"model.{name} cannot be {given}: it comes from this file, which has {found}"
                for name, (given, found) in different.items()
            )
            raise DataError(f"{file.path}: {'; '.join(shown)}")
        return recipe
    layout: dict[str, Any] = {}
    if len(model.low) != axes:
        rows, per_row, from_anchors = LAYOUTS[axes]
        layout = {
            "rows": rows,
            "anchors_per_row": per_row,
            "adaptive_axis": axes - 1,
            "points_from_anchors": from_anchors,
        }
    return replace(recipe, model=replace(model, **decided, **layout))
