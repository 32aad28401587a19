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
from jaxtyping import Float, Int
from rich.console import Console

from fst.data import point_files
from fst.data.files import DataError, UnfitError
from fst.data.image_decoding import default_threads
from fst.data.point_files import BLOCK, BLOCK_POINTS, KINDS, PointFile, Points
from fst.data.point_samples import PointSamples, StreamedPoints
from fst.data.samples import Samples, Storage, stays_resident
from fst.data.source import DataSource, Partition, Recipe, TestSplit, looked_at
from fst.types import Device, check_fields

_MOST_WORKERS = 8
_DIGESTED_BYTES = 8 * 2**30  # of a split that is read whole to be known again
# By the number of axes: about a thousand anchors on two and three, and as many as a line can use.
LAYOUTS: dict[int, dict[str, Any]] = {
    1: {"rows": (), "anchors_per_row": 128, "adaptive_axis": 0, "points_from_anchors": 64},
    2: {"rows": (32,), "anchors_per_row": 32, "adaptive_axis": 1, "points_from_anchors": 256},
    3: {"rows": (10, 10), "anchors_per_row": 10, "adaptive_axis": 2, "points_from_anchors": 256},
}


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
    storage: Storage = "auto"
    """resident keeps all points on the device; streamed reads them from the file in background
    processes at every use; auto is resident where a split takes at most a quarter of the GPU's
    memory (4 GiB without a GPU)."""
    workers: int | None = None
    """Background processes that read streamed points; None is one a core, up to eight."""

    def __post_init__(self) -> None:
        check_fields(self, workers=1)
        fractions = self.validation_fraction, self.test_fraction
        if not (fractions[0] > 0 and fractions[1] >= 0 and sum(fractions) < 1):
            raise ValueError(
                "validation_fraction must be positive, test_fraction not negative, and both "
                f"together below 1, got {fractions[0]} and {fractions[1]}"
            )

    def describe(self, folder: Path | str) -> PointFile:
        """Domain, channels, names and units of the file, given by its path or its folder."""
        folder = Path(folder)
        return point_files.read_points(folder / self.file if folder.is_dir() else folder)

    def channel_names(self, folder: Path) -> tuple[tuple[tuple[str, str], ...], ...]:
        file = self.describe(folder)
        return file.values, file.targets

    def labels(self, folder: Path) -> dict[str, list[list[str]]]:
        file = self.describe(folder)
        return {kind: [list(label) for label in getattr(file, kind)] for kind in KINDS}

    def training_targets(self, folder: Path) -> tuple[Int[np.ndarray, " n"], Points]:
        """How many targets each training sample has; and those of some samples, evenly chosen."""
        file = self.describe(folder)
        rows = self.partition(file).training
        sizes = np.diff(file.query_offsets)[rows]
        fitting = max(1, BLOCK_POINTS // int(sizes.max(initial=1)))
        some = np.linspace(0, len(rows) - 1, min(BLOCK, fitting, len(rows))).astype(int)
        return sizes, file.queries(rows[some])

    def conditions(self, folder: Path) -> Float[np.ndarray, "n c"]:
        """Those of training and validation; without channels where there are none."""
        file = self.describe(folder)
        partition = self.partition(file)
        return file.conditions(np.concatenate((partition.training, partition.validation)))

    def prepare(self, folder: Path, device: Device = "cpu", console: Console | None = None) -> None:
        """Nothing can be made for the user; the file is checked, so that errors come early."""
        self.partition(self.describe(folder))

    def splits(
        self, folder: Path, device: torch.device, augment: bool, console: Console | None
    ) -> tuple[Samples, Samples]:
        """Rows of the test split are not read."""
        if augment:
            raise ValueError("augment must be off: the symmetries of these points are not known")
        file = self.describe(folder)
        partition = self.partition(file)
        training = self._samples(file, partition.training, device, learned=True)
        return training, self._samples(file, partition.validation, device)

    def _samples(
        self, file: PointFile, rows: np.ndarray, device: torch.device, learned: bool = False
    ) -> Samples:
        what = f"{file.path}: the points of {len(rows):,} samples"
        if stays_resident(self.storage, file.bytes_of(rows), device, what):
            return PointSamples.read(file, rows, learned=learned).to(device)
        workers = self.workers or min(_MOST_WORKERS, default_threads())
        return StreamedPoints(file, rows, workers=workers, device=device, learned=learned)

    def fingerprint(self, folder: Path) -> dict[str, Any]:
        """The user's own points to the last digit: unlike others', they are never made again.

        Of a split too large to be read again and again, a few samples stand for all.
        """
        file = self.describe(folder)
        partition = self.partition(file)
        found: dict[str, Any] = {}
        for split in ("training", "validation"):
            rows = getattr(partition, split)
            found[f"{split}_samples"] = len(rows)
            if file.bytes_of(rows) > _DIGESTED_BYTES:
                found["splits"] = [partition.digest]
            found[f"{split}_digest"] = self._digest(file, rows)
        return found

    def _digest(self, file: PointFile, rows: np.ndarray) -> str:
        large = file.bytes_of(rows) > _DIGESTED_BYTES
        return PointSamples.read(file, looked_at(rows) if large else rows).digest()

    def fit(self, recipe: Recipe, folder: Path) -> Recipe:
        """Channels and domain are the file's, and the layout of anchors follows its axes.

        A model that was fitted before must fit as it is: what the file decides is not for options.
        """
        changed: Any = recipe
        model, file = changed.model, self.describe(folder)
        decided, default = _decided(file, model), type(model)()
        if all(getattr(model, name) == getattr(default, name) for name in decided):
            fitted: Recipe = replace(changed, model=replace(model, **settings_for(model, file)))
            return fitted
        words = "model.{} cannot be {}: it comes from this file, which has {}"
        _require_same(model, decided, f"{file.path}:", words)
        return recipe

    def on_domain(self, model: Any, folder: Path) -> Any:
        """Weights know the unit box alone: they serve any domain with as many axes."""
        file = self.describe(folder)
        if model.domain.axes != file.domain.axes:
            raise DataError(
                f"{file.path}: has {file.domain.axes} axes, the weights {model.domain.axes}"
            )
        return replace(model, low=file.domain.low, high=file.domain.high)

    def check_fits(self, recipe: Any, run: Path, folder: Path) -> None:
        file = self.describe(folder)
        start = f"{file.path}: is of another kind than the data that {run} was started with:"
        _require_same(recipe.model, _decided(file, recipe.model), start, "{} was {}, is {}")

    def check_test(self, folder: Path) -> None:
        file = self.describe(folder)
        if len(self.partition(file).test) == 0:
            raise DataError(
                f"{file.path}: its test split is empty; the file holds {len(file)} samples"
            )

    def load_test(self, folder: Path | str, device: Device = "cpu") -> TestSplit[Samples]:
        self.check_test(Path(folder))
        file = self.describe(folder)
        rows = self.partition(file).test
        return TestSplit(
            self._samples(file, rows, torch.device(device)),
            numbers=tuple(rows.tolist()),
            names=file.names(rows),
            axes=file.axes,
            values=file.values,
            targets=file.targets,
            cells=file.cells,
            digest=self._digest(file, rows),
        )

    def partition(self, file: PointFile) -> Partition:
        """The splits that a file names, or those drawn by seed."""
        partition = file.partition or self.drawn(len(file))
        point_files.check_trainable(file.path, partition, len(file))
        return partition

    def drawn(self, samples: int) -> Partition:
        """The splits of a file that names none; of few samples, some are empty."""
        validation = max(1, round(self.validation_fraction * samples))
        test = min(round(self.test_fraction * samples), samples - validation)
        counts = {"training": samples - validation - test, "validation": validation, "test": test}
        return Partition.drawn(samples, **counts, seed=self.split_seed)


# How far from a grid point, in grid steps, a point may be and still mean that one.
GRID_TOLERANCE = 1e-2
# What a model without such a setting takes.
FIXED = {"value_channels": 1, "output_channels": 1, "condition_channels": 0}


def settings_for(model: Any, file: PointFile) -> dict[str, Any]:
    """The settings of a model's configuration that follow from functions."""
    decided = _decided(file, model)
    if hasattr(model, "modes"):
        decided["modes"] = tuple(min(16, max(2, size // 2)) for size in decided["grid"])
    if hasattr(model, "rows") and len(model.low) != file.domain.axes:
        decided |= LAYOUTS[file.domain.axes]
    return decided


def _decided(file: PointFile, model: Any) -> dict[str, Any]:
    """The settings of a model that a file decides; an error where the model cannot take it."""
    name = type(model).__name__.removesuffix("Config")
    found: dict[str, Any] = {"low": file.domain.low, "high": file.domain.high}
    for setting, taken in FIXED.items():
        count = getattr(file, setting)
        if hasattr(model, setting):
            found[setting] = count
        elif count != taken:
            words = setting.removesuffix("s").replace("_", " ")
            raise UnfitError(
                f"{file.path}: {name} takes {taken or 'no'} {words}, these data have {count}; "
                "own/fst takes any number"
            )
    if hasattr(model, "grid"):
        found["grid"] = _grid(file, name)
    if hasattr(model, "observations"):
        found["observations"] = _shared_observations(file, name)
    return found


def _shared_observations(file: PointFile, name: str) -> int:
    """How many observations every sample has, if they lie at the same points."""
    first = file.observations(np.arange(1)).positions
    counts = np.diff(file.observation_offsets)
    if (counts == len(first)).all() and all(
        np.allclose(file.observations(rows).positions.reshape(-1, *first.shape), first, atol=1e-6)
        for rows in file.blocks()
    ):
        return len(first)
    raise UnfitError(
        f"{file.path}: {name} needs every sample to be observed at the same points, and these "
        "differ; own/fst takes any points"
    )


def _grid(file: PointFile, name: str) -> tuple[int, ...]:
    """The regular grid over the whole domain on which all points of the file lie."""
    low, high = np.array(file.domain.low), np.array(file.domain.high)
    first = np.asarray(file[0].queries)
    shape = tuple(len(np.unique(first[:, axis])) for axis in range(first.shape[1]))
    whole = len(first) == np.prod(shape) and min(shape) > 1

    def on_grid(points: Float[np.ndarray, "p s"]) -> bool:
        steps = (points - low) / (high - low) * (np.array(shape) - 1)
        return bool(np.abs(steps - steps.round()).max() <= GRID_TOLERANCE)

    if not whole or not all(
        on_grid(file.queries(rows).positions) and on_grid(file.observations(rows).positions)
        for rows in file.blocks()
    ):
        raise UnfitError(
            f"{file.path}: {name} needs all points on one regular grid over the whole domain, and "
            "these are scattered; own/fst takes any points"
        )
    return shape


def _require_same(model: Any, decided: dict[str, Any], start: str, words: str) -> None:
    """Raise where a model has other settings than a file decides; `words` are for each of them."""
    found = [(name, getattr(model, name), value) for name, value in decided.items()]
    different = [words.format(*each) for each in found if each[1] != each[2]]
    if different:
        raise DataError(f"{start} {'; '.join(different)}")
