"""Writing the `fst` file of a user's own points (layout: `point_files`).

Enters: samples, one at a time, and the domain they lie in. Leaves: a file that appears under its
name only when it is complete.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from fst.data.errors import DataError, writing
from fst.data.point_files import (
    FORMAT,
    VERSION,
    Label,
    PointSample,
    check_resolution,
    check_trainable,
    inside,
)
from fst.data.row_writer import settle_existing
from fst.data.splits import SPLITS, Partition
from fst.io import publish
from fst.types import Domain, check_argument

_CHUNK_POINTS = 4096
_FLUSH_POINTS = 2**18
# Kinds of numbers that could be taken for others, and the way out.
_REFUSED = {
    "c": "give real and imaginary parts as two channels",
    "M": "give the time since a first one: (t - t[0]) / np.timedelta64(1, 's')",
    "m": "divide it by a unit: t / np.timedelta64(1, 's')",
}


@dataclass(frozen=True)
class Labels:
    """Names and units of everything a file holds; what is left empty is numbered."""

    axes: Sequence[Label | str] = ()
    values: Sequence[Label | str] = ()
    targets: Sequence[Label | str] = ()
    condition: Sequence[Label | str] = ()

    def complete(self, kind: str, count: int) -> tuple[Label, ...]:
        given: Sequence[Label | str] = getattr(self, kind)
        if not given:
            return tuple(Label(f"{kind} {number}") for number in range(count))
        if len(given) != count:
            raise ValueError(f"labels.{kind} must name {count} of them, got {len(given)}")
        return tuple(Label(entry) if isinstance(entry, str) else entry for entry in given)


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
    try:
        check_resolution(domain)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None
    if path.exists():
        settle_existing(path, {}, None, force=force)
    part = path.with_name(path.name + ".part")
    try:
        with _created(part, path) as file:
            writer = _Writer(file, domain, path)
            for sample in samples:
                writer.add(sample)
            writer.finish(labels or Labels(), splits)
        publish(part, path)
    except BaseException:
        part.unlink(missing_ok=True)  # samples come from the caller: nothing here could go on
        raise


@contextmanager
def _created(part: Path, path: Path) -> Iterator[h5py.File]:
    """A new HDF5 file. Only what fails in opening and closing it is blamed on it, not the body."""
    with writing(path):
        file = h5py.File(part, "w")
    try:
        yield file
    finally:
        with writing(path):
            file.close()


class _Writer:
    """Collects samples and appends them to the file some at a time."""

    def __init__(self, file: h5py.File, domain: Domain, path: Path) -> None:
        self.file = file
        self.domain = domain
        self.path = path  # what the file will be called
        self.pending: dict[str, list[np.ndarray]] = {}
        self.pending_points = 0
        self.sizes: dict[str, list[int]] = {"observations": [], "queries": []}
        self.conditions: list[np.ndarray] = []
        self.cells: list[np.ndarray] = []

    def add(self, sample: PointSample) -> None:
        row = len(self.conditions)
        check_argument(f"sample {row}", sample, PointSample)
        rows = (
            ("observations", "positions", "values", sample.mask),
            ("queries", "queries", "targets", sample.query_mask),
        )
        for group, where, channel, mask in rows:
            positions = real_numbers(row, where, getattr(sample, where))
            values = real_numbers(row, channel, getattr(sample, channel))
            place = f"sample {row}: {group}"
            points, numbers = checked_points(place, positions, values, mask, self.domain)
            self._append(f"{group}/positions", points)
            self._append(f"{group}/{channel}", numbers)
            self.sizes[group].append(len(points))
            self.pending_points += len(points)
        condition = real_numbers(
            row, "condition", [] if sample.condition is None else sample.condition
        )
        first = self.conditions[0] if self.conditions else condition
        hidden = np.ma.is_masked(condition)
        if condition.shape != (first.size,) or hidden or not _finite(condition):
            raise ValueError(
                f"sample {row}: condition must hold {first.size} finite numbers like the first "
                f"sample's, got shape {condition.shape}{' with masked ones' if hidden else ''}"
            )
        self._add_cells(row, sample)
        self.conditions.append(np.ma.getdata(condition))
        if self.pending_points > _FLUSH_POINTS:
            with writing(self.path):
                self._flush()

    def _add_cells(self, row: int, sample: PointSample) -> None:
        if sample.cells is None:
            return
        cells, queries = np.asarray(sample.cells), len(np.ma.asarray(sample.queries))
        whole = self.sizes["queries"][-1] == queries and len(self.cells) == row
        if not whole or cells.dtype.kind not in "iu" or cells.ndim != 2 or cells.shape[1] != 3:
            raise ValueError(
                f"sample {row}: cells must be whole numbers of shape (t, 3), for all samples or "
                f"none, without masked queries, got {cells.dtype} of shape {cells.shape}"
            )
        if cells.size and not 0 <= cells.min() <= cells.max() < queries:
            raise ValueError(f"sample {row}: cells must number its {queries} queries from 0")
        self.cells.append(cells.astype(np.int64))

    def _append(self, name: str, block: np.ndarray) -> None:
        earlier = self.pending.setdefault(name, [])
        channels = earlier[0].shape[1] if earlier else block.shape[1]
        if name in self.file:
            channels = self.file[name].shape[1]
        if block.shape[1] != channels:
            raise ValueError(
                f"{name} of sample {len(self.conditions)} must have {channels} channels like the "
                f"samples before, got {block.shape[1]}"
            )
        earlier.append(block)

    def _flush(self) -> None:
        for name, blocks in self.pending.items():
            block = np.concatenate(blocks)
            if name not in self.file:
                channels = block.shape[1]
                chunks, shape = (_CHUNK_POINTS, channels), (None, channels)
                self.file.create_dataset(
                    name, (0, channels), "float32", chunks=chunks, maxshape=shape
                )
            stored = self.file[name]
            before = len(stored)
            stored.resize(before + len(block), axis=0)
            stored[before:] = block
        self.pending = {}
        self.pending_points = 0

    def finish(self, labels: Labels, splits: Mapping[str, Sequence[int]] | None) -> None:
        if not self.conditions:
            raise ValueError("samples must hold at least one sample, got none")
        with writing(self.path):
            self._flush()
            self._describe(labels, splits)

    def _describe(self, labels: Labels, splits: Mapping[str, Sequence[int]] | None) -> None:
        file, count = self.file, len(self.conditions)
        for group, sizes in self.sizes.items():
            file[f"{group}/offsets"] = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        if self.cells:
            if len(self.cells) != count:
                raise ValueError("cells must be given for all samples or none")
            file["cells/triangles"] = np.concatenate(self.cells)
            file["cells/offsets"] = np.cumsum([0, *map(len, self.cells)])
        if self.conditions[0].size:
            file["condition"] = np.stack(self.conditions)
        counts = {
            "axes": self.domain.axes,
            "values": file["observations/values"].shape[1],
            "targets": file["queries/targets"].shape[1],
            "condition": self.conditions[0].size,
        }
        for kind, size in counts.items():
            complete = labels.complete(kind, size)
            file.attrs[f"{kind}_names"] = [label.name for label in complete]
            file.attrs[f"{kind}_units"] = [label.unit for label in complete]
        if splits is not None:
            partition = Partition.named({k: np.asarray(v) for k, v in splits.items()}, count)
            check_trainable(self.path, partition, count)
            for name in SPLITS:
                file[f"split/{name}"] = getattr(partition, name)
        file.attrs["low"], file.attrs["high"] = self.domain.low, self.domain.high
        file.attrs["format"], file.attrs["version"] = FORMAT, VERSION


def _finite(numbers: np.ndarray) -> bool:
    return bool(np.isfinite(np.ma.getdata(numbers)).all())


def real_numbers(row: int, field: str, given: ArrayLike) -> np.ma.MaskedArray:
    """A sample's numbers as float32, in memory of their own: the caller may reuse its arrays.

    What a masked array hides, as netCDF readers return them, stays hidden.
    """
    try:
        numbers: np.ma.MaskedArray = np.ma.asarray(given)
    except (ValueError, TypeError) as error:
        raise ValueError(f"sample {row}: {field} must be an array of numbers ({error})") from None
    if numbers.dtype.kind in _REFUSED:
        raise ValueError(
            f"sample {row}: {field} must be real numbers, got {numbers.dtype}; "
            f"{_REFUSED[numbers.dtype.kind]}"
        )
    if numbers.dtype.kind not in "fiub":
        raise ValueError(f"sample {row}: {field} must be real numbers, got {numbers.dtype}")
    return np.ma.asarray(numbers.astype(np.float32))


def checked_points(
    place: str,
    positions: np.ma.MaskedArray,
    values: np.ma.MaskedArray,
    mask: ArrayLike | None,
    domain: Domain,
) -> tuple[Float[np.ndarray, "n s"], Float[np.ndarray, "n v"]]:
    """Positions and values without masked points, or an error that says why not."""
    if positions.ndim != 2 or values.ndim != 2 or len(positions) != len(values):
        raise ValueError(
            f"{place} must be positions (n, axes) and values (n, channels), "
            f"got {positions.shape} and {values.shape}"
        )
    if positions.shape[1] != domain.axes:
        raise ValueError(f"{place} must have {domain.axes} axes, got {positions.shape[1]}")
    real = ~(np.ma.getmaskarray(positions).any(axis=1) | np.ma.getmaskarray(values).any(axis=1))
    if mask is not None:
        given = np.asarray(mask)
        if given.dtype != np.bool_ or given.shape != (len(positions),):
            raise ValueError(f"{place}: mask must be bool of shape ({len(positions)},)")
        real &= given
    points, numbers = np.ma.getdata(positions)[real], np.ma.getdata(values)[real]
    if len(points) == 0:
        raise ValueError(f"{place} must hold at least one point")
    if not (_finite(points) and _finite(numbers)):
        raise ValueError(f"{place} must be finite, got NaN or infinity")
    if not inside(points, domain):
        raise ValueError(f"{place} must lie in the domain {domain.low} to {domain.high}")
    return points, numbers
