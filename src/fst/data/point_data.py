"""A user's own points as the data of a recipe: `fst train own/fst --data my.h5`.

Enters: an `fst` point file (`write_points`), or the folder it lies in. Leaves: the splits that the
file names or, where it names none, splits drawn by seed. Channels, axes and domain are the file's:
`PointData.describe` gives them to whoever builds the model.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from rich.console import Console

from fst.data.errors import DataError
from fst.data.images import listed
from fst.data.point_files import Label, PointFile, Points, check_trainable, read_points
from fst.data.point_samples import PointSamples, Ragged
from fst.data.samples import Samples
from fst.data.source import DataSource, Recipe
from fst.data.splits import Partition, TestSplit, TrainingSplit, ValidationSplit
from fst.types import check_fields

# ‖target‖² in float32, in which errors are measured, must leave room above for a first prediction
# and below for a small error; and a sample so much smaller than the typical one would overflow the
# first gradient.
LEAST_SQUARE, LARGEST_SQUARE = 1e-30, 1e34
LEAST_SHARE = 1e-16
# A channel so much smaller adds a hundredth to the squared relative error if it is not learned.
LARGEST_RATIO = 10.0
# A mean beyond so many standard deviations hides what varies.
LARGEST_OFFSET = 5.0
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
        return file.queries(self.partition(file).training)

    def prepare(
        self, folder: Path, device: torch.device | str = "cpu", console: Console | None = None
    ) -> None:
        """Nothing can be made for the user; the file is checked, so that errors come early."""
        del device, console
        self.partition(self.describe(folder))

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
        partition = self.partition(file)
        training = load_points(file, partition.training, learned=True)
        validation = load_points(file, partition.validation)
        return TrainingSplit(training.to(device)), ValidationSplit(validation.to(device))

    def fingerprint(self, folder: Path) -> dict[str, Any]:
        """The user's own points to the last digit: unlike others', they are never made again."""
        file = self.describe(folder)
        partition = self.partition(file)
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
        if hasattr(model, "modes"):
            decided["modes"] = tuple(min(16, max(2, size // 2)) for size in decided["grid"])
        changed: Any = recipe
        decided |= anchor_layout(model, file.domain.axes)
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
        rows = self.partition(file).test
        if len(rows) == 0:
            raise DataError(f"{file.path}: its test split is empty")
        return TestSplit(
            load_points(file, rows).to(device),
            numbers=tuple(rows.tolist()),
            axes=file.axes,
            values=file.values,
            targets=file.targets,
            cells=file.cells,
        )

    def partition(self, file: PointFile) -> Partition:
        """The splits that a file names, or those drawn by seed."""
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


def anchor_layout(model: Any, axes: int) -> dict[str, Any]:
    """The anchors of a model whose default has another number of axes than the data."""
    if not hasattr(model, "rows") or len(model.low) == axes:
        return {}
    rows, per_row, from_anchors = LAYOUTS[axes]
    return {
        "rows": rows,
        "anchors_per_row": per_row,
        "adaptive_axis": axes - 1,
        "points_from_anchors": from_anchors,
    }


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


def load_points(file: PointFile, rows: np.ndarray, *, learned: bool = False) -> PointSamples:
    """The given rows of a file, on the CPU, if their relative errors are defined.

    Targets that are `learned` together must also be of similar sizes.
    """
    condition = file.conditions(rows)
    observed, queried = file.observations(rows), file.queries(rows)
    check = TargetCheck(file)
    check.see(rows, queried)
    check.finish(learned=learned, warn=learned)
    if learned:
        warn_of_large_means(file.path, file.targets, queried.values)
    return PointSamples(
        file.domain,
        Ragged.of(*map(torch.from_numpy, observed)),
        Ragged.of(*map(torch.from_numpy, queried)),
        None if condition is None else torch.from_numpy(condition),
    )


class TargetCheck:
    """What the relative error asks of targets: not all zero, and channels of similar sizes.

    It sees targets a block at a time. The relative error of a sample (paper, Equation 7) is
    ‖prediction − target‖ / ‖target‖, over all of its targets and all channels in their own units.
    """

    def __init__(self, file: PointFile) -> None:
        self.file = file
        self.norms: dict[int, tuple[float, int]] = {}  # ‖target‖² and targets, by row
        self.squares = np.zeros(file.output_channels)

    def see(self, rows: Int[np.ndarray, " n"], queried: Points) -> None:
        with np.errstate(over="ignore", under="ignore"):
            squares = np.einsum("pc,pc->p", queried.values, queried.values)
            norms = np.add.reduceat(squares, np.cumsum(queried.sizes) - queried.sizes)
        found = zip(norms.tolist(), queried.sizes.tolist(), strict=True)
        self.norms |= dict(zip(rows.tolist(), found, strict=True))
        # In float64 and without a float64 copy.
        self.squares += np.einsum("pc,pc->c", queried.values, queried.values, dtype=np.float64)

    def finish(self, *, learned: bool = False, warn: bool = True) -> None:
        """Raise where a relative error is undefined; warn where a channel would hardly count."""
        points = sum(size for _, size in self.norms.values())
        bad = [
            r for r, (norm, _) in self.norms.items() if not LEAST_SQUARE <= norm <= LARGEST_SQUARE
        ]
        if learned and not bad:
            typical = LEAST_SHARE * self.squares.sum() / points
            bad = [row for row, (norm, size) in self.norms.items() if norm < typical * size]
        if bad:
            raise DataError(
                f"{self.file.path}: the relative error is undefined for targets that are all zero, "
                "or too small or too large to be squared in float32 or beside the others, as they "
                f"are in sample{'s' if len(bad) > 1 else ''} {listed([*map(str, bad)])}; leave "
                "such samples out, or measure the targets in another unit"
            )
        sizes = np.sqrt(self.squares / points)
        filled = sizes[sizes > 0]  # a channel of zeros cannot be brought to another size
        if warn and len(filled) and filled.max() > LARGEST_RATIO * filled.min():
            pairs = zip(self.file.targets, sizes, strict=True)
            named = listed([f"{label.name}: {size:.3g}" for label, size in pairs])
            warnings.warn(
                f"{self.file.path}: the target channels' root mean squares differ by a factor of "
                f"{filled.max() / filled.min():.3g} ({named}); loss and score are one relative "
                "error over all channels, in which the small ones count little: bring them to "
                "similar sizes",
                stacklevel=3,
            )


def offsets(targets: Float[np.ndarray, "p c"]) -> Float[np.ndarray, " c"]:
    """|mean| / standard deviation of each channel; 0 for one that is constant."""
    wide = targets.astype(np.float64)
    mean, std = np.abs(wide.mean(axis=0)), wide.std(axis=0)
    return np.where(std > 0, mean / np.where(std > 0, std, 1.0), 0.0)


def warn_of_large_means(
    path: Path, labels: Sequence[Label], targets: Float[np.ndarray, "p c"]
) -> None:
    """Warn where a constant would already have a small relative error."""
    ratios = offsets(targets)
    large = [n for n, ratio in enumerate(ratios) if ratio > LARGEST_OFFSET]
    if large:
        wide = targets.astype(np.float64)
        named = listed(
            [f"{labels[n].name}: {wide[:, n].mean():.4g} ± {wide[:, n].std():.2g}" for n in large]
        )
        warnings.warn(
            f"{path}: the mean of the targets is far larger than their standard deviation "
            f"({named}), so that a constant already has a relative error of about "
            f"{1 / ratios[large].min():.2g}; --training.objective.channels standardized measures "
            "in standard deviations instead",
            stacklevel=3,
        )
