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
    names                  (samples)                       text, optional
    split/training, split/validation, split/test           row numbers, optional

Sample i has the points offsets[i] to offsets[i + 1]. Positions are in the domain's own units, and
float32 must resolve them there (`check_resolution`).
`read_points` gives what such a file holds, and of its samples those asked for. `write_points` takes
samples, one at a time, and leaves a file that appears under its name only when it is complete.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from fst.data import files
from fst.data.files import DataError, blame, runs
from fst.data.source import SPLITS, Partition, stored_partition
from fst.io import publish
from fst.types import DOMAIN_TOLERANCE, Domain, check_argument

FORMAT = "fst-points"
VERSION = 1
# So many numbers of float32 must fit into the domain on every axis: rounding a position, by half a
# step at most, then moves it by less than DOMAIN_TOLERANCE and cannot take it out of the domain.
LEAST_STEPS = 2**16
# Samples, and points, read at once where a whole file is looked through.
BLOCK, BLOCK_POINTS = 256, 2**22
LAYOUT = f"an fst point file (HDF5 with attribute format = {FORMAT!r}, see docs/data.md)"

# What else users have, and what makes points of it.
CONVERTED = {".csv": "from_table", ".nc": "from_xarray", ".vtu": "from_meshes"}
CONVERTED |= dict.fromkeys((".npy", ".npz"), "from_grid")

# The two groups of points, and what a sample calls their positions and numbers.
GROUPS = {"observations": ("positions", "values"), "queries": ("queries", "targets")}
KINDS = ("axes", "values", "targets", "condition")
_CHUNK_POINTS = 4096
_FLUSH_POINTS = 2**18
# Kinds of numbers that could be taken for others, and the way out.
REFUSED = {
    "c": "give real and imaginary parts as two channels",
    "M": "give the time since a first one: (t - t[0]) / np.timedelta64(1, 's')",
    "m": "divide it by a unit: t / np.timedelta64(1, 's')",
}


class Label(NamedTuple):
    """What an axis or channel is called, and the unit it is measured in."""

    name: str
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.name} [{self.unit}]" if self.unit else self.name


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
    name: str | None = None  # by which you know it, for pictures; its number when not given


class Points(NamedTuple):
    """Some samples' points laid end to end."""

    positions: Float[np.ndarray, "p s"]
    values: Float[np.ndarray, "p v"]
    sizes: Int[np.ndarray, " n"]

    @classmethod
    def of(cls, samples: Sequence[PointSample], group: str) -> "Points":
        positions, values = (
            [np.asarray(getattr(sample, name)) for sample in samples] for name in GROUPS[group]
        )
        sizes = np.array([len(each) for each in positions])
        return cls(np.concatenate(positions), np.concatenate(values), sizes)


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
        check_argument("row", row, int)
        if not 0 <= row < len(self):
            raise IndexError(f"row must lie between 0 and {len(self) - 1}, got {row}")
        rows = np.array([row])
        observed, queried = self.observations(rows), self.queries(rows)
        condition = self.conditions(rows)[0] if self.condition else None
        cells, names = self.cells(row), self.names(rows)
        name = names[0] if names else None
        return PointSample(*observed[:2], *queried[:2], condition, cells=cells, name=name)

    def cells(self, row: int) -> Int[np.ndarray, "t 3"] | None:
        """The triangles between a sample's queries, where the file knows them."""
        with files.reading_hdf5(self.path, LAYOUT) as file:
            if "cells" not in file:
                return None
            first, last = file["cells/offsets"][row : row + 2].tolist()
            triangles: np.ndarray = file["cells/triangles"][first:last].astype(np.int64)
        queries = int(np.diff(self.query_offsets)[row])
        if triangles.ndim != 2 or triangles.shape[1] != 3 or _outside(triangles, queries):
            raise DataError(f"{self.path}: cells of sample {row} must number its {queries} queries")
        return triangles

    def names(self, rows: Int[np.ndarray, " n"]) -> tuple[str, ...] | None:
        """By which the user knows samples, where the file says so."""
        with files.reading_hdf5(self.path, LAYOUT) as file:
            if "names" not in file:
                return None
            if file["names"].shape != (len(self),):
                raise DataError(f"{self.path}: names must be one for each of {len(self)} samples")
            first = rows.min()
            found = file["names"].asstr()[first : rows.max() + 1]
        return tuple(found[rows - first].tolist())

    def __iter__(self) -> Iterator[PointSample]:
        return (self[row] for row in range(len(self)))

    def blocks(self, rows: Int[np.ndarray, " n"] | None = None) -> Iterator[Int[np.ndarray, " k"]]:
        """Rows, so few at a time that a file larger than the memory can be looked through."""
        rows = np.arange(len(self)) if rows is None else rows
        points = (np.diff(self.observation_offsets) + np.diff(self.query_offsets))[rows].cumsum()
        first = 0
        while first < len(rows):
            read = points[first - 1] if first else 0
            fits = int(np.searchsorted(points, read + BLOCK_POINTS, side="right"))
            last = min(max(fits, first + 1), first + BLOCK)
            yield rows[first:last]
            first = last

    def bytes_of(self, rows: Int[np.ndarray, " n"]) -> int:
        """What the points of the given rows take in memory."""
        both = (self.observation_offsets, self.values), (self.query_offsets, self.targets)
        points = [(int(np.diff(offsets)[rows].sum()), len(labels)) for offsets, labels in both]
        return sum(4 * count * (self.domain.axes + channels) for count, channels in points)

    def observations(self, rows: Int[np.ndarray, " n"], opened: h5py.File | None = None) -> Points:
        """The observations of the given rows; who reads often gives the file opened."""
        return self._points("observations", self.observation_offsets, rows, opened)

    def queries(self, rows: Int[np.ndarray, " n"], opened: h5py.File | None = None) -> Points:
        return self._points("queries", self.query_offsets, rows, opened)

    def conditions(self, rows: Int[np.ndarray, " n"]) -> Float[np.ndarray, "n c"]:
        """Without channels where there are none."""
        if not self.condition:
            return np.empty((len(rows), 0), np.float32)
        # Conditions are a few numbers a sample: all of them are read, and the rows taken.
        with files.reading_hdf5(self.path, LAYOUT) as file:
            conditions: np.ndarray = file["condition"][:].astype(np.float32)[rows]
        files.check_rows_finite(self.path, "condition of sample", conditions, rows)
        return conditions

    def _points(
        self, group: str, offsets: np.ndarray, rows: np.ndarray, opened: h5py.File | None
    ) -> Points:
        sizes = offsets[rows + 1] - offsets[rows]
        ends = np.cumsum(sizes)
        source_of = files.reading_hdf5(self.path, LAYOUT) if opened is None else nullcontext(opened)
        with source_of as file:
            read = []
            for name in ("positions", GROUPS[group][1]):
                stored = file[group][name]
                numbers = np.empty((ends[-1], stored.shape[1]), np.float32)
                for run in runs(rows):
                    first, last = run.start, run.stop - 1
                    source = np.s_[offsets[rows[first]] : offsets[rows[last] + 1]]
                    target = np.s_[ends[first] - sizes[first] : ends[last]]
                    stored.read_direct(numbers, source, target)
                samples = np.repeat(rows, sizes)
                files.check_rows_finite(self.path, f"{group}/{name} of sample", numbers, samples)
                read.append(numbers)
        if not inside(read[0], self.domain):
            raise DataError(
                f"{self.path}: {group}/positions leave the domain "
                f"{self.domain.low} to {self.domain.high}"
            )
        return Points(read[0], read[1], sizes)


def _outside(triangles: np.ndarray, queries: int) -> bool:
    return bool(triangles.size) and not 0 <= triangles.min() <= triangles.max() < queries


def read_points(path: Path | str) -> PointFile:
    """Check a file's layout; samples are read when asked for: `read_points(path)[3]`."""
    check_argument("path", path, Path | str)
    path = Path(path)
    if path.suffix in CONVERTED and path.is_file():
        raise DataError(
            f"{path}: is no fst point file; make one in Python by write_points('my.h5', "
            f"fst.data.{CONVERTED[path.suffix]}(...)), see docs/data.md"
        )
    with files.reading_hdf5(path, LAYOUT) as file:
        if _text(file.attrs.get("format")) != FORMAT:
            raise DataError(f"{path}: has no attribute format = {FORMAT!r}; expected {LAYOUT}")
        version = file.attrs.get("version")
        if version != VERSION:
            raise DataError(f"{path}: has format version {version}, expected {VERSION}")
        low, high = (tuple(file.attrs[edge].tolist()) for edge in ("low", "high"))
        labels = {kind: _labels(file, kind) for kind in KINDS}
        with blame(path):
            domain = Domain(low, high)
            check_resolution(domain)
            labels["axes"] = Labels(**labels).complete("axes", domain.axes)
            observed, queried = (_offsets(file, group) for group in GROUPS)
            seen, samples = len(observed) - 1, len(queried) - 1
            if seen != samples:
                raise ValueError(f"observations are of {seen} samples, queries of {samples}")
            for group, (_, channel) in GROUPS.items():
                _check_channels(file[group]["positions"], domain.axes)
                _check_channels(file[group][channel], len(labels[channel]))
            if labels["condition"]:
                _check_channels(file["condition"], len(labels["condition"]), samples)
        splits = stored_partition(path, file, samples)
        axes, values, targets, condition = labels.values()
        return PointFile(path, domain, axes, values, targets, condition, observed, queried, splits)


def _offsets(file: h5py.File, group: str) -> Int[np.ndarray, " m"]:
    channel = GROUPS[group][1]
    for name in ("positions", channel, "offsets"):
        if not isinstance(file.get(f"{group}/{name}"), h5py.Dataset):
            raise ValueError(f"has no {group}/{name}; expected {LAYOUT}")
    stored = file[group]["offsets"]
    offsets: np.ndarray = stored[:]
    points, values = len(file[group]["positions"]), len(file[group][channel])
    right = offsets.ndim == 1 and len(offsets) > 1 and offsets.dtype.kind in "iu"
    if not right or offsets[0] != 0 or (np.diff(offsets) < 1).any() or offsets[-1] != points:
        raise ValueError(
            f"{group}/offsets must rise from 0 to the {points} points, at least one a sample, "
            f"got {stored.dtype} of shape {stored.shape}"
        )
    if points != values:
        raise ValueError(f"{group} has {points} positions but {values} {channel}")
    return offsets.astype(np.int64)


def _labels(file: h5py.File, kind: str) -> tuple[Label, ...]:
    stored = (np.atleast_1d(file.attrs[f"{kind}_{what}"]) for what in ("names", "units"))
    return tuple(Label(*map(_text, label)) for label in zip(*stored, strict=True))


def _text(stored: object) -> str:
    return stored.decode() if isinstance(stored, bytes) else str(stored)


def _check_channels(stored: h5py.Dataset, channels: int, rows: int | None = None) -> None:
    expected = (len(stored) if rows is None else rows, channels)
    if stored.shape != expected or stored.dtype.kind != "f":
        raise ValueError(
            f"{stored.name[1:]} must be floating-point of shape ({rows or 'n'}, {channels}), "
            f"got {stored.dtype} of shape {stored.shape}"
        )


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
    box = domain.widened(DOMAIN_TOLERANCE)
    return bool(((points >= np.asarray(box.low)) & (points <= np.asarray(box.high))).all())


@dataclass(frozen=True)
class Labels:
    """Names and units of everything a file holds; axes without names are x, y and z, and other
    things are numbered."""

    axes: Sequence[Label | str] = ()
    values: Sequence[Label | str] = ()
    targets: Sequence[Label | str] = ()
    condition: Sequence[Label | str] = ()

    def __post_init__(self) -> None:
        for kind in KINDS:
            given = getattr(self, kind)
            check_argument(f"labels.{kind}", given, Sequence)
            for entry in given:
                check_argument(f"labels.{kind}", entry, Label | str)
            names = [entry if isinstance(entry, str) else entry.name for entry in given]
            if len({*names}) < len(names):
                raise ValueError(f"labels.{kind} must not repeat a name, got {', '.join(names)}")

    def complete(self, kind: str, count: int) -> tuple[Label, ...]:
        given: Sequence[Label | str] = getattr(self, kind)
        if not given:
            if kind == "axes":
                return tuple(map(Label, "xyz"[:count]))
            return tuple(Label(f"{kind} {number}") for number in range(count))
        if len(given) != count:
            raise ValueError(f"labels.{kind} must name {count} of them, got {len(given)}")
        return tuple(Label(entry) if isinstance(entry, str) else entry for entry in given)

    def of_samples(self, first: Any, domain: Domain) -> dict[str, tuple[Label, ...]]:
        """Complete labels of checked samples, of which one is given."""
        counts = {
            "axes": domain.axes,
            "values": first.values.shape[1],
            "targets": first.targets.shape[1],
            "condition": 0 if first.condition is None else len(first.condition),
        }
        return {kind: self.complete(kind, count) for kind, count in counts.items()}


@dataclass(frozen=True)
class PointFunctions:
    """Samples with the box that holds all of their points, and names and units."""

    samples: Sequence[PointSample]
    domain: Domain
    labels: Labels


def write_points(
    path: Path | str,
    samples: Iterable[PointSample] | PointFunctions,
    domain: Domain | None = None,
    *,
    labels: Labels | None = None,
    splits: Mapping[str, Sequence[int]] | None = None,
    force: bool = False,
) -> None:
    """Write samples, one at a time, to a file that appears only when it is complete.

    The domain and labels of `PointFunctions`, as `from_grid` and its like make them, are their own.
    `splits` names row numbers as training, validation and test; without it they are drawn by seed
    when the file is used. Errors of the samples' own making pass through as they are.
    """
    check_argument("path", path, Path | str)
    check_argument("labels", labels, Labels | None)
    if isinstance(samples, PointFunctions):
        domain, labels = domain or samples.domain, labels or samples.labels
        samples = samples.samples
    check_argument("domain", domain, Domain)
    assert domain is not None
    check_argument("splits", splits, Mapping | None)
    path = Path(path)
    with blame(path):
        check_resolution(domain)
    if path.exists() and not force:
        files.check_existing(path, None, {})
    part = path.with_name(path.name + ".part")
    try:
        with files.writing_hdf5(part, path, "w") as file:
            checked = checked_samples(samples, domain)
            _write(file, path, checked, domain, labels or Labels(), splits)
        publish(part, path)
    except BaseException:
        part.unlink(missing_ok=True)  # samples come from the caller: nothing here could go on
        raise


def _write(
    file: h5py.File,
    path: Path,
    samples: Iterator[PointSample],
    domain: Domain,
    labels: Labels,
    splits: Mapping[str, Sequence[int]] | None,
) -> None:
    """Append the points of some samples at a time; what a sample has one of follows at the end."""
    sizes: dict[str, list[int]] = {group: [0] for group in GROUPS}
    rest: list[tuple[Any, Any, str | None]] = []
    first: PointSample | None = None
    for block in _in_blocks(samples):
        first = first or block[0]
        with files.writing(path):
            for group, (_, channel) in GROUPS.items():
                points = Points.of(block, group)
                _append(file, f"{group}/positions", points.positions)
                _append(file, f"{group}/{channel}", points.values)
                sizes[group] += points.sizes.tolist()
        rest += [(each.condition, each.cells, each.name) for each in block]
    assert first is not None
    conditions, cells, names = zip(*rest, strict=True)
    with files.writing(path):
        for group, counted in sizes.items():
            file[f"{group}/offsets"] = np.cumsum(counted, dtype=np.int64)
        if conditions[0] is not None:
            file["condition"] = np.stack(conditions)
        if cells[0] is not None:
            file["cells/triangles"] = np.concatenate(cells)
            file["cells/offsets"] = np.cumsum([0, *map(len, cells)])
        if any(name is not None for name in names):
            named = [str(row) if name is None else name for row, name in enumerate(names)]
            file.create_dataset("names", data=named, dtype=h5py.string_dtype())
        for kind, complete in labels.of_samples(first, domain).items():
            file.attrs[f"{kind}_names"] = [label.name for label in complete]
            file.attrs[f"{kind}_units"] = [label.unit for label in complete]
        if splits is not None:
            partition = Partition.named(splits, len(rest))
            check_trainable(path, partition, len(rest))
            for name in SPLITS:
                file[f"split/{name}"] = getattr(partition, name)
        file.attrs["low"], file.attrs["high"] = domain.low, domain.high
        file.attrs["format"], file.attrs["version"] = FORMAT, VERSION


def _in_blocks(samples: Iterator[PointSample]) -> Iterator[list[PointSample]]:
    block: list[PointSample] = []
    points = 0
    for sample in samples:
        block.append(sample)
        points += np.shape(sample.positions)[0] + np.shape(sample.queries)[0]
        if points > _FLUSH_POINTS:
            yield block
            block, points = [], 0
    if block:
        yield block


def _append(file: h5py.File, name: str, block: np.ndarray) -> None:
    if name not in file:
        size = block.shape[1]
        chunks, most = (_CHUNK_POINTS, size), (None, size)
        file.create_dataset(name, (0, size), "float32", chunks=chunks, maxshape=most)
    before = len(file[name])
    file[name].resize(before + len(block), axis=0)
    file[name][before:] = block


def checked_samples(samples: Iterable[Any], domain: Domain) -> Iterator[PointSample]:
    """Samples as a file holds them: float32, without masked points; or an error that says why not.

    Channels must be as many as those of the first sample.
    """
    first: PointSample | None = None
    for row, sample in enumerate(samples):
        check_argument(f"sample {row}", sample, PointSample)
        check_argument(f"name of sample {row}", sample.name, str | None)
        with blame(f"sample {row}"):
            observed, queried = (_checked_points(sample, group, domain, first) for group in GROUPS)
            condition = _checked_condition(sample, first)
            cells = _checked_cells(sample, len(queried[0]), first)
        checked = PointSample(*observed, *queried, condition, cells=cells, name=sample.name)
        first = first or checked
        yield checked
    if first is None:
        raise ValueError("samples must hold at least one sample, got none")


def _checked_condition(sample: PointSample, first: PointSample | None) -> np.ndarray | None:
    """None where there are no numbers."""
    given: ArrayLike = [] if sample.condition is None else sample.condition
    condition = _real_numbers("condition", given)
    expected = condition.size
    if first is not None:
        expected = 0 if first.condition is None else np.size(first.condition)
    flaw = "" if np.isfinite(np.ma.getdata(condition)).all() else " with NaN or infinity"
    flaw = " with masked ones" if np.ma.is_masked(condition) else flaw
    if condition.shape != (expected,) or flaw:
        raise ValueError(
            f"condition must hold {expected} finite numbers like the first sample's, "
            f"got shape {condition.shape}{flaw}"
        )
    return np.ma.getdata(condition) if expected else None


def _checked_cells(
    sample: PointSample, queries: int, first: PointSample | None
) -> Int[np.ndarray, "t 3"] | None:
    if first is not None and (first.cells is None) != (sample.cells is None):
        raise ValueError("cells must be given for all samples or none")
    if sample.cells is None:
        return None
    cells, whole = np.asarray(sample.cells), len(np.ma.asarray(sample.queries)) == queries
    if not whole or cells.dtype.kind not in "iu" or cells.ndim != 2 or cells.shape[1] != 3:
        raise ValueError(
            "cells must be whole numbers of shape (t, 3), for samples without masked queries, "
            f"got {cells.dtype} of shape {cells.shape}"
        )
    if _outside(cells, queries):
        raise ValueError(f"cells must number its {queries} queries from 0")
    return cells.astype(np.int64)


def _real_numbers(field: str, given: ArrayLike, dtype: type = np.float32) -> np.ma.MaskedArray:
    """A sample's numbers as floats, in memory of their own: the caller may reuse its arrays.

    What a masked array hides, as netCDF readers return them, stays hidden.
    """
    try:
        numbers: np.ma.MaskedArray = np.ma.asarray(given)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{field} must be an array of numbers ({error})") from None
    if numbers.dtype.kind not in "fiub":
        way_out = REFUSED.get(numbers.dtype.kind)
        hint = f"; {way_out}" if way_out else ""
        raise ValueError(f"{field} must be real numbers, got {numbers.dtype}{hint}")
    return np.ma.asarray(numbers.astype(dtype))


def real_points(
    sample: PointSample, group: str, dtype: type = np.float32
) -> tuple[Float[np.ndarray, "n s"], Float[np.ndarray, "n v"]]:
    """Positions and values without masked points."""
    where, channel = GROUPS[group]
    mask = sample.mask if group == "observations" else sample.query_mask
    positions, values = (
        _real_numbers(name, getattr(sample, name), dtype) for name in (where, channel)
    )
    flat = positions.ndim != 2 or values.ndim != 2 or values.shape[1] == 0
    if flat or len(positions) != len(values):
        raise ValueError(
            f"{group} must be positions (n, axes) and values (n, channels), "
            f"got {positions.shape} and {values.shape}"
        )
    real = ~(np.ma.getmaskarray(positions).any(axis=1) | np.ma.getmaskarray(values).any(axis=1))
    if mask is not None:
        given = np.asarray(mask)
        if given.dtype != np.bool_ or given.shape != (len(positions),):
            raise ValueError(f"{group}: mask must be bool of shape ({len(positions)},)")
        real &= given
    return np.ma.getdata(positions)[real], np.ma.getdata(values)[real]


def _checked_points(
    sample: PointSample, group: str, domain: Domain, first: PointSample | None
) -> tuple[Float[np.ndarray, "n s"], Float[np.ndarray, "n v"]]:
    points, numbers = real_points(sample, group)
    channel = GROUPS[group][1]
    if points.shape[1] != domain.axes:
        raise ValueError(f"{group} must have {domain.axes} axes, got {points.shape[1]}")
    channels = numbers.shape[1] if first is None else getattr(first, channel).shape[1]
    if numbers.shape[1] != channels:
        raise ValueError(
            f"{group}/{channel} must have {channels} channels like the samples before, "
            f"got {numbers.shape[1]}"
        )
    if len(points) == 0:
        raise ValueError(f"{group} must hold at least one point")
    if not (np.isfinite(points).all() and np.isfinite(numbers).all()):
        raise ValueError(f"{group} must be finite, got NaN or infinity")
    if not inside(points, domain):
        raise ValueError(f"{group} must lie in the domain {domain.low} to {domain.high}")
    return points, numbers
