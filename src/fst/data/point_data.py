"""A user's own points as the data of a recipe: `fst train own/fst --data my.h5`.

Enters: an `fst` point file (`write_points`), or the folder it lies in. Leaves: the splits that the
file names or, where it names none, splits drawn by seed. Channels, axes and domain are the file's:
`PointData.describe` gives them to whoever builds the model.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from fst.data.errors import DataError
from fst.data.point_files import PointFile, Points, check_trainable, read_points
from fst.data.point_samples import PointSamples, Ragged
from fst.data.point_targets import (
    channel_squares,
    refuse_undefined,
    undefined_rows,
    warn_of_large_means,
    warn_of_unequal_channels,
)
from fst.data.samples import Samples
from fst.data.source import DataSource, Recipe
from fst.data.splits import Partition, TestSplit, TrainingSplit, ValidationSplit
from fst.types import check_fields

# Fixed positions on the other axes, anchors per row, and evaluation points taken from anchors, by
# the number of axes: about a thousand anchors on two and three, and as many as a line can use.
LAYOUTS = {1: ((), 128, 64), 2: ((32,), 32, 256), 3: ((10, 10), 10, 256)}


@dataclass(frozen=True)
class PointData(DataSource):
    """Points from one file. The fractions and the seed matter only where it names no splits."""

    own = "a file of yours: add --data FILE"
    shapes_options = True

    file: str = "points.h5"
    """The file's name, where the data are given as a folder."""
    validation_fraction: float = 0.1
    """Part of the samples kept for validation."""
    test_fraction: float = 0.1
    """Part of the samples kept for the test."""
    split_seed: int = 0
    """Of the splits of a file that names none."""

    def __post_init__(self) -> None:
        check_fields(self)
        fractions = self.validation_fraction, self.test_fraction
        if not (fractions[0] > 0 and fractions[1] >= 0 and sum(fractions) < 1):
            raise ValueError(
                "validation_fraction must be positive, test_fraction not negative, and both "
                f"together below 1, got {fractions[0]} and {fractions[1]}"
            )

    def locate(self, folder: Path) -> Path:
        return folder / self.file if folder.is_dir() else folder

    def describe(self, folder: Path) -> PointFile:
        """Domain, channels, names and units of the file."""
        return read_points(self.locate(folder))

    def training_targets(self, folder: Path) -> Points:
        """The targets of the training split, with their positions."""
        file = self.describe(folder)
        return file.queries(self._partition(file).training)

    def prepare(
        self, folder: Path, device: torch.device | str = "cpu", console: Console | None = None
    ) -> None:
        """Nothing can be made for the user; the file is checked, so that errors come early."""
        del device, console
        self._partition(self.describe(folder))

    def load(
        self,
        folder: Path,
        device: torch.device | str = "cpu",
        *,
        augment: bool = False,
        console: Console | None = None,
    ) -> tuple[TrainingSplit[Samples], ValidationSplit[Samples]]:
        """Training and validation, on the device. Rows of the test split are not read."""
        if augment:
            raise ValueError("augment must be off: the symmetries of these points are not known")
        file = self.describe(folder)
        partition = self._partition(file)
        training = load_points(file, partition.training)
        validation = load_points(file, partition.validation)
        queried = training.queried
        targets = queried.values.numpy()
        squares = channel_squares(targets)
        points = Points(queried.positions.numpy(), targets, queried.sizes.numpy())
        small = undefined_rows(partition.training, points, typical=squares.sum() / len(targets))
        refuse_undefined(file.path, small)
        warn_of_unequal_channels(file.path, file.targets, squares, len(targets))
        warn_of_large_means(file.path, file.targets, targets)
        return TrainingSplit(training.to(device)), ValidationSplit(validation.to(device))

    def fingerprint(self, folder: Path) -> dict[str, Any]:
        """The user's own points to the last digit: unlike others', they are never made again."""
        file = self.describe(folder)
        partition = self._partition(file)
        return {
            "training_samples": len(partition.training),
            "validation_samples": len(partition.validation),
            "training_digest": load_points(file, partition.training).digest(),
            "validation_digest": load_points(file, partition.validation).digest(),
        }

    def fit(self, recipe: Recipe, folder: Path) -> Recipe:
        """Channels and domain are the file's, and the layout of anchors follows its axes.

        A model that was fitted before must fit as it is: what the file decides is not for options.
        """
        model: Any = getattr(recipe, "model")  # noqa: B009 (any dataclass with a model)
        file, default = self.describe(folder), type(model)()
        decided = _decided(file, model)
        if any(getattr(model, name) != getattr(default, name) for name in decided):
            shown = [
                f"model.{name} cannot be {given}: it comes from this file, which has {found}"
                for name, (given, found) in _differences(model, file).items()
            ]
            if shown:
                raise DataError(f"{file.path}: {'; '.join(shown)}")
            return recipe
        axes = file.domain.axes
        if hasattr(model, "modes"):
            decided["modes"] = tuple(min(16, max(2, size // 2)) for size in decided["grid"])
        elif hasattr(model, "rows") and len(model.low) != axes:
            rows, per_row, from_anchors = LAYOUTS[axes]
            decided |= {
                "rows": rows,
                "anchors_per_row": per_row,
                "adaptive_axis": axes - 1,
                "points_from_anchors": from_anchors,
            }
        changed: Any = recipe
        fitted: Recipe = replace(changed, model=replace(model, **decided))
        return fitted

    def check_fits(self, recipe: Any, run: Path, folder: Path) -> None:
        file = self.describe(folder)
        different = _differences(recipe.model, file)
        if different:
            shown = (f"{name} was {before}, is {now}" for name, (before, now) in different.items())
            raise DataError(
                f"{file.path}: is of another kind than the data that {run} was started with: "
                f"{'; '.join(shown)}"
            )

    def load_test(self, folder: Path, device: torch.device | str = "cpu") -> TestSplit[Samples]:
        file = self.describe(folder)
        rows = self._partition(file).test
        if len(rows) == 0:
            raise DataError(f"{file.path}: its test split is empty")
        return TestSplit(load_points(file, rows).to(device))

    def _partition(self, file: PointFile) -> Partition:
        partition = file.partition or self._drawn(file)
        check_trainable(file.path, partition, len(file))
        return partition

    def _drawn(self, file: PointFile) -> Partition:
        samples = len(file)
        validation = max(1, round(self.validation_fraction * samples))
        test = min(round(self.test_fraction * samples), samples - validation)
        training = samples - validation - test
        counts = {"training": training, "validation": validation, "test": test}
        return Partition.drawn(samples, **counts, seed=self.split_seed)


# How far from a grid point, in grid steps, a point may be and still mean that one.
GRID_TOLERANCE = 1e-2
# What a model without such a setting takes.
FIXED = {"value_channels": 1, "output_channels": 1, "condition_channels": 0}


def _decided(file: PointFile, model: Any) -> dict[str, Any]:
    """The settings of a model that a file decides; an error where the model cannot take it."""
    name = type(model).__name__.removesuffix("Config")
    found: dict[str, Any] = {"low": file.domain.low, "high": file.domain.high}
    for setting, taken in FIXED.items():
        count = getattr(file, setting)
        if hasattr(model, setting):
            found[setting] = count
        elif count != taken:
            words = setting.replace("_", " ")
            raise DataError(f"{file.path}: {name} takes {taken} {words}, this file has {count}")
    if hasattr(model, "grid"):
        found["grid"] = _grid(file, name)
    if hasattr(model, "observations"):
        found["observations"] = _shared_observations(file, name)
    return found


def _shared_observations(file: PointFile, name: str) -> int:
    """How many observations every sample has, if they lie at the same points."""
    observed = file.observations(np.arange(len(file)))
    count = int(observed.sizes[0])
    if (observed.sizes == count).all():
        places = observed.positions.reshape(len(file), count, -1)
        if np.allclose(places, places[:1], atol=1e-6):
            return count
    raise DataError(
        f"{file.path}: {name} needs every sample to be observed at the same points, and those of "
        "this file differ; own/fst takes any points"
    )


def _grid(file: PointFile, name: str) -> tuple[int, ...]:
    """The regular grid over the whole domain on which all points of the file lie."""
    low, high = np.array(file.domain.low), np.array(file.domain.high)
    first = np.asarray(file[0].queries)
    shape = tuple(len(np.unique(first[:, axis])) for axis in range(first.shape[1]))
    rows = np.arange(len(file))
    points = np.concatenate((file.queries(rows).positions, file.observations(rows).positions))
    steps = (points - low) / (high - low) * (np.array(shape) - 1)
    whole = len(first) == np.prod(shape) and min(shape) > 1
    if not whole or np.abs(steps - steps.round()).max() > GRID_TOLERANCE:
        raise DataError(
            f"{file.path}: {name} needs all points on one regular grid over the whole domain, and "
            "those of this file are scattered; own/fst takes any points"
        )
    return shape


def _differences(model: Any, file: PointFile) -> dict[str, tuple[Any, Any]]:
    """Where a model does not fit a file: by name, what the model has and what the file has."""
    pairs = {name: (getattr(model, name), value) for name, value in _decided(file, model).items()}
    return {name: (ours, theirs) for name, (ours, theirs) in pairs.items() if ours != theirs}


def load_points(file: PointFile, rows: np.ndarray) -> PointSamples:
    """The given rows of a file, on the CPU, if their relative errors are defined."""
    condition = file.conditions(rows)
    queried = file.queries(rows)
    refuse_undefined(file.path, undefined_rows(rows, queried))
    return PointSamples(
        file.domain,
        _ragged(file.observations(rows)),
        _ragged(queried),
        None if condition is None else torch.from_numpy(condition),
    )


def _ragged(points: Points) -> Ragged:
    return Ragged.of(
        torch.from_numpy(points.positions),
        torch.from_numpy(points.values),
        torch.from_numpy(points.sizes),
    )
