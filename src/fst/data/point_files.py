"""The `fst` file of a user's own points: HDF5, one file for all samples, any number of points each.

    attributes             format = "fst-points", version, low, high (the domain), and names and
                           units of axes, values, targets and condition
    observations/positions (all observations, axes)        float32
    observations/values    (all observations, channels)    float32
    observations/offsets   (samples + 1)                   int64
    queries/positions      (all queries, axes)             float32
    queries/targets        (all queries, channels)         float32
    queries/offsets        (samples + 1)                   int64
    condition              (samples, channels)             float32, optional
    cells/triangles        (all triangles, 3)              int64, optional: numbers of queries
    cells/offsets          (samples + 1)                   int64, optional
    split/training, split/validation, split/test           row numbers, optional

Sample i has the points offsets[i] to offsets[i + 1]. Positions are in the domain's own units, and
float32 must resolve them there (`check_resolution`).
Enters: a file that `write_points` made. Leaves: what it holds, and of its samples those asked for.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from fst.data.errors import DataError, reading_hdf5
from fst.data.row_writer import first_not_finite
from fst.data.splits import Partition
from fst.types import DOMAIN_TOLERANCE, Domain, check_argument

FORMAT = "fst-points"
VERSION = 1
# So many numbers of float32 must fit into the domain on every axis: rounding a position, by half a
# step at most, then moves it by less than DOMAIN_TOLERANCE and cannot take it out of the domain.
LEAST_STEPS = 2**16
BLOCK = 256  # samples read at once where a whole file is looked through
LAYOUT = f"an fst point file (HDF5 with attribute format = {FORMAT!r}, see docs/data.md)"


class Label(NamedTuple):
    """What an axis or channel is called, and the unit it is measured in."""

    name: str
    unit: str = ""


@dataclass(frozen=True)
class PointSample:
    """One function: where it was observed, and where its values are asked for and known.

    Points whose mask is False (padding) are not written, nor those that a masked array hides.
    """

    positions: ArrayLike  # n s
    values: ArrayLike  # n v
    queries: ArrayLike  # q s
    targets: ArrayLike  # q c
    condition: ArrayLike | None = None  # c
    mask: ArrayLike | None = None  # n
    query_mask: ArrayLike | None = None  # q
    cells: ArrayLike | None = None  # triangles as numbers of queries (t 3), for pictures


class Points(NamedTuple):
    """Some samples' points laid end to end."""

    positions: Float[np.ndarray, "p s"]
    values: Float[np.ndarray, "p v"]
    sizes: Int[np.ndarray, " n"]


@dataclass(frozen=True)
class PointFile:
    """What a file says it holds. Its layout has been checked; points are read when asked for."""

    path: Path
    domain: Domain
    axes: tuple[Label, ...]
    values: tuple[Label, ...]
    targets: tuple[Label, ...]
    condition: tuple[Label, ...]
    observation_offsets: Int[np.ndarray, " m"]
    query_offsets: Int[np.ndarray, " m"]
    partition: Partition | None

    def __len__(self) -> int:
        return len(self.query_offsets) - 1

    @property
    def value_channels(self) -> int:
        return len(self.values)

    @property
    def output_channels(self) -> int:
        return len(self.targets)

    @property
    def condition_channels(self) -> int:
        return len(self.condition)

    def __getitem__(self, row: int) -> PointSample:
        if not 0 <= row < len(self):
            raise IndexError(f"row must lie between 0 and {len(self) - 1}, got {row}")
        rows = np.array([row])
        observed, queried = self.observations(rows), self.queries(rows)
        condition = self.conditions(rows)
        return PointSample(
            observed.positions,
            observed.values,
            queried.positions,
            queried.values,
            None if condition is None else condition[0],
            cells=self.cells(row),
        )

    def cells(self, row: int) -> Int[np.ndarray, "t 3"] | None:
        """The triangles between a sample's queries, where the file knows them."""
        with reading_hdf5(self.path, LAYOUT) as file:
            if "cells" not in file:
                return None
            first, last = file["cells/offsets"][row : row + 2].tolist()
            triangles: np.ndarray = file["cells/triangles"][first:last].astype(np.int64)
        queries = int(np.diff(self.query_offsets)[row])
        if triangles.ndim != 2 or triangles.shape[1] != 3 or _outside(triangles, queries):
            raise DataError(f"{self.path}: cells of sample {row} must number its {queries} queries")
        return triangles

    def __iter__(self) -> Iterator[PointSample]:
        return (self[row] for row in range(len(self)))

    def bytes_of(self, rows: Int[np.ndarray, " n"]) -> int:
        """What the points of the given rows take in memory."""
        observed = int(np.diff(self.observation_offsets)[rows].sum())
        queried = int(np.diff(self.query_offsets)[rows].sum())
        axes = self.domain.axes
        wide = observed * (axes + len(self.values)) + queried * (axes + len(self.targets))
        return 4 * wide

    def observations(self, rows: Int[np.ndarray, " n"], opened: h5py.File | None = None) -> Points:
        """The observations of the given rows; who reads often gives the file opened."""
        return self._points("observations", "values", self.observation_offsets, rows, opened)

    def queries(self, rows: Int[np.ndarray, " n"], opened: h5py.File | None = None) -> Points:
        """The queries and targets of the given rows."""
        return self._points("queries", "targets", self.query_offsets, rows, opened)

    def conditions(self, rows: Int[np.ndarray, " n"]) -> Float[np.ndarray, "n c"] | None:
        if not self.condition:
            return None
        # Conditions are a few numbers a sample: all of them are read, and the rows taken.
        with reading_hdf5(self.path, LAYOUT) as file:
            conditions: np.ndarray = file["condition"][:].astype(np.float32)[rows]
        _check_rows_finite(self.path, "condition", conditions, rows)
        return conditions

    def _points(
        self,
        group: str,
        channel: str,
        offsets: np.ndarray,
        rows: np.ndarray,
        opened: h5py.File | None,
    ) -> Points:
        sizes = offsets[rows + 1] - offsets[rows]
        ends = np.cumsum(sizes)
        source_of = reading_hdf5(self.path, LAYOUT) if opened is None else nullcontext(opened)
        with source_of as file:
            read = []
            for name in ("positions", channel):
                stored = file[group][name]
                numbers = np.empty((ends[-1], stored.shape[1]), np.float32)
                for first, last in _runs(rows):
                    source = np.s_[offsets[rows[first]] : offsets[rows[last] + 1]]
                    place = np.s_[ends[first] - sizes[first] : ends[last]]
                    stored.read_direct(numbers, source, place)
                _check_rows_finite(self.path, f"{group}/{name}", numbers, np.repeat(rows, sizes))
                read.append(numbers)
        if not inside(read[0], self.domain):
            raise DataError(
                f"{self.path}: {group}/positions leave the domain "
                f"{self.domain.low} to {self.domain.high}"
            )
        return Points(read[0], read[1], sizes)


def _outside(triangles: np.ndarray, queries: int) -> bool:
    return bool(triangles.size) and not 0 <= triangles.min() <= triangles.max() < queries


def _runs(rows: Int[np.ndarray, " n"]) -> Iterator[tuple[int, int]]:
    """First and last place of each stretch of neighbouring rows."""
    breaks = np.flatnonzero(np.diff(rows) != 1)
    firsts = np.concatenate([[0], breaks + 1])
    lasts = np.concatenate([breaks, [len(rows) - 1]])
    return zip(firsts.tolist(), lasts.tolist(), strict=True)


def _check_rows_finite(path: Path, name: str, numbers: np.ndarray, rows: np.ndarray) -> None:
    bad = first_not_finite(numbers)
    if bad is not None:
        raise DataError(
            f"{path}: {name} of sample {rows[bad]} holds NaN or infinity; expected finite numbers"
        )


def read_points(path: Path | str) -> PointFile:
    """Check a file's layout; samples are read when asked for: `read_points(path)[3]`."""
    check_argument("path", path, Path | str)
    path = Path(path)
    with reading_hdf5(path, LAYOUT) as file:
        if file.attrs.get("format") != FORMAT:
            raise DataError(f"{path}: has no attribute format = {FORMAT!r}; expected {LAYOUT}")
        if file.attrs.get("version") != VERSION:
            raise DataError(
                f"{path}: has format version {file.attrs.get('version')}, expected {VERSION}"
            )
        observed = _offsets(path, file, "observations", "values")
        queried = _offsets(path, file, "queries", "targets")
        if len(observed) != len(queried):
            raise DataError(
                f"{path}: observations are of {len(observed) - 1} samples, "
                f"queries of {len(queried) - 1}"
            )
        try:
            domain = Domain(tuple(file.attrs["low"].tolist()), tuple(file.attrs["high"].tolist()))
            check_resolution(domain)
            partition = _partition(file, len(queried) - 1)
        except ValueError as error:
            raise DataError(f"{path}: {error}") from error
        labels = {kind: _labels(file, kind) for kind in ("axes", "values", "targets", "condition")}
        shapes = {
            "observations/positions": domain.axes,
            "queries/positions": domain.axes,
            "observations/values": len(labels["values"]),
            "queries/targets": len(labels["targets"]),
        }
        for name, channels in shapes.items():
            _check_channels(path, file[name], channels)
        if labels["condition"]:
            stored = file["condition"]
            _check_channels(path, stored, len(labels["condition"]))
            if len(stored) != len(queried) - 1:
                raise DataError(
                    f"{path}: condition has {len(stored)} rows for {len(queried) - 1} samples"
                )
        return PointFile(
            path,
            domain,
            **labels,
            observation_offsets=observed,
            query_offsets=queried,
            partition=partition,
        )


def _offsets(path: Path, file: h5py.File, group: str, channel: str) -> np.ndarray:
    for name in ("positions", channel, "offsets"):
        if not isinstance(file.get(f"{group}/{name}"), h5py.Dataset):
            raise DataError(f"{path}: has no {group}/{name}; expected {LAYOUT}")
    stored = file[group]["offsets"]
    offsets: np.ndarray = stored[:]
    points, values = len(file[group]["positions"]), len(file[group][channel])
    right = offsets.ndim == 1 and len(offsets) > 1 and offsets.dtype.kind in "iu"
    if not right or offsets[0] != 0 or (np.diff(offsets) < 1).any() or offsets[-1] != points:
        raise DataError(
            f"{path}: {group}/offsets must rise from 0 to the {points} points, at least one a "
            f"sample, got {stored.dtype} of shape {stored.shape}"
        )
    if points != values:
        raise DataError(f"{path}: {group} has {points} positions but {values} {channel}")
    return offsets.astype(np.int64)


def _labels(file: h5py.File, kind: str) -> tuple[Label, ...]:
    names, units = file.attrs[f"{kind}_names"], file.attrs[f"{kind}_units"]
    return tuple(Label(str(name), str(unit)) for name, unit in zip(names, units, strict=True))


def _check_channels(path: Path, stored: h5py.Dataset, channels: int) -> None:
    if stored.ndim != 2 or stored.shape[1] != channels or stored.dtype.kind != "f":
        raise DataError(
            f"{path}: {stored.name[1:]} must be floating-point of shape (n, {channels}), "
            f"got {stored.dtype} of shape {stored.shape}"
        )


def _partition(file: h5py.File, samples: int) -> Partition | None:
    if "split" not in file:
        return None
    return Partition.named({name: file["split"][name][:] for name in file["split"]}, samples)


def check_trainable(path: Path, partition: Partition, samples: int) -> None:
    """Raise unless there is something to learn from and something to select a checkpoint by."""
    for name in ("training", "validation"):
        if len(getattr(partition, name)) == 0:
            raise DataError(f"{path}: its {name} split is empty; the file holds {samples} samples")


def check_resolution(domain: Domain) -> None:
    """Raise where positions in float32 are too coarse for the domain, as far from 0 they are."""
    for axis, (low, high) in enumerate(zip(domain.low, domain.high, strict=True)):
        with np.errstate(all="ignore"):  # an edge beyond float32 has no neighbours: NaN
            spacing = float(np.spacing(np.float32(max(abs(low), abs(high)))))
        if not LEAST_STEPS * spacing <= high - low:
            raise ValueError(
                f"float32 cannot resolve positions in the domain {domain.low} to {domain.high}: on "
                f"axis {axis}, which is {high - low:g} wide, its numbers are {spacing:g} apart, "
                f"and at least {LEAST_STEPS:,} of them must fit; subtract an offset from the "
                "positions and the domain, so that the axis begins at 0"
            )


def inside(points: Float[np.ndarray, "n s"], domain: Domain) -> bool:
    low, high = np.asarray(domain.low), np.asarray(domain.high)
    slack = DOMAIN_TOLERANCE * (high - low)
    return bool(((points >= low - slack) & (points <= high + slack)).all())
