"""Data files: the one error a user meets, and rows that are written whole or not at all.

`reading` and `writing` turn what the operating system, HDF5 and PyTorch raise into a `DataError`.

`write_rows` fills NAME.part, an HDF5 file that records its provenance (what the rows are, as JSON)
and how many rows are on the disk (`complete_rows`, raised only after the rows themselves were
forced there). A killed writer therefore leaves a part that the next one continues, and never a half
file under the final name. A part of another provenance is refused: continuing it would mix two data
sets.
"""

import errno
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
from jaxtyping import Int
from rich.console import Console

from fst.io import FileError, parse_json, sync
from fst.terminal import progress_bar

Provenance = dict[str, object]
Produce = Callable[[int, int], dict[str, np.ndarray]]
# What provenance is called in files: the first of them had this name.
STORED = "law"


class DataError(FileError):
    """A data file is missing, damaged, of another layout, or cannot be written."""


class UnfitError(DataError):
    """Data that a model cannot take; another model may."""


@contextmanager
def reading(path: Path, expected: str) -> Iterator[None]:
    """Name the file, and what it was expected to be, when reading it fails."""
    try:
        yield
    except (DataError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file; expected {expected}") from error
    # A damaged file can make HDF5, zip and pickle readers raise almost anything.
    except Exception as error:
        raise DataError(f"{path}: cannot be read as {expected} ({first_line(error)})") from error


@contextmanager
def blame(source: Path | str) -> Iterator[None]:
    """Name the file whose contents an error is about."""
    try:
        yield
    except FileError:
        raise
    except (ValueError, TypeError) as error:
        raise DataError(f"{source}: {error}") from None


@contextmanager
def reading_hdf5(path: Path, expected: str) -> Iterator[h5py.File]:
    """An HDF5 file to read, if all that it holds lies in it.

    HDF5 would follow links to other files, and read data from any file that a given one names.
    """
    with reading(path, expected):
        if path.exists() and not path.is_file():  # a pipe would be waited for without end
            raise DataError(f"{path}: is not a regular file; expected {expected}")
        with h5py.File(path, "r") as file:
            outside = file.visititems_links(_if_outside) or file.visititems(_if_outside)
            if outside is not None:
                raise DataError(f"{path}: {outside} lies in another file, which is not read")
            yield file


def _if_outside(name: str, item: object) -> str | None:
    """The name of what is not in the file itself; an answer ends the visit."""
    stored = isinstance(item, h5py.Dataset) and (item.external or item.is_virtual)
    return name if stored or isinstance(item, h5py.ExternalLink) else None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file when the disk is full, read-only, or lost."""
    try:
        yield
    except DataError:
        raise
    # HDF5 reports a failed write as OSError or RuntimeError, with the system's reason in its text.
    except (OSError, RuntimeError) as error:
        reason = first_line(error)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            reason = "no space left on the disk"
        elif _is_locked(error):
            reason = "another process is writing it"
        raise DataError(f"{path}: cannot be written ({reason})") from error


@contextmanager
def writing_hdf5(part: Path, path: Path, mode: str) -> Iterator[h5py.File]:
    """The HDF5 file `part` of `path`; HDF5 locks it, so a second writer is turned away.

    Only what fails in opening and closing it is blamed on the file, not the body.
    """
    with writing(path):
        file = h5py.File(part, mode)
    try:
        yield file
    finally:
        with writing(path):
            file.close()


def _is_locked(error: Exception) -> bool:
    """Whether HDF5 found the file in another writer's hands."""
    return isinstance(error, BlockingIOError) or "unable to lock file" in str(error)


def first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


@dataclass(frozen=True)
class Plan:
    """A file to be made: its rows, the arrays stored beside them, and its provenance.

    A column is the type of one of its rows, such as `np.dtype(("float32", (201, 1024)))`.
    """

    path: Path
    provenance: Provenance
    rows: int
    columns: Mapping[str, np.dtype]
    constants: Mapping[str, np.ndarray]
    attributes: Mapping[str, object]

    @property
    def part(self) -> Path:
        return self.path.with_name(self.path.name + ".part")


def write_rows(
    plan: Plan, produce: Produce, *, batch_size: int, console: Console, force: bool = False
) -> Path:
    """Fill the plan's part from where it stands; returns the part, complete and on the disk.

    `produce(start, stop)` gives those rows of every column; it must depend on the row numbers
    alone. The caller makes the final file of the part, by `publish` where the part is already it.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    with writing(plan.path):
        plan.path.parent.mkdir(parents=True, exist_ok=True)
        _check_unlocked(plan.part)
        done = 0 if force else _rows_to_resume(plan)
        if not done:
            _check_space(plan)
            _create_part(plan)
    with writing_hdf5(plan.part, plan.path, "r+") as file, progress_bar(console) as progress:
        task = progress.add_task(plan.path.name, total=plan.rows, completed=done)
        for start in range(done, plan.rows, batch_size):
            stop = min(start + batch_size, plan.rows)
            block = produce(start, stop)
            for name, rows in block.items():
                bad = first_not_finite(rows)
                if bad is not None:
                    raise DataError(
                        f"{plan.path}: the solver gave NaN or infinity for row {start + bad} of "
                        f"{name}; nothing of this block was written"
                    )
            with writing(plan.path):
                for name, rows in block.items():
                    file[name][start:stop] = rows
                file.flush()
                sync(plan.part)
                file.attrs.modify("complete_rows", np.int64(stop))
                file.flush()
            progress.advance(task, stop - start)
    return plan.part


def check_existing(path: Path, existing: Provenance | None, wanted: Provenance) -> None:
    """Raise unless a file that is there is what was asked for: any other is somebody's data."""
    what = "names no provenance"
    if existing is not None:
        what = f"is of another provenance ({_difference(existing, wanted)})"
    if existing != wanted:
        raise DataError(
            f"{path}: exists and {what}; use --force (in Python force=True) to replace it"
        )


def read_provenance(path: Path, text: object) -> Provenance | None:
    """The provenance stored in a file, or None where there is none."""
    if text is None:
        return None
    try:
        found = parse_json(text if isinstance(text, str | bytes) else "")
    except ValueError as error:
        raise DataError(f"{path}: its provenance is not JSON") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: its provenance must be a JSON object, got {type(found).__name__}")
    return found


def first_not_finite(rows: np.ndarray) -> int | None:
    # A float64 sum of float32 numbers is finite exactly when they all are; it is the cheap test.
    if rows.dtype.kind != "f" or np.isfinite(rows.sum(dtype=np.float64)):
        return None
    finite = np.isfinite(rows.reshape(len(rows), -1)).all(axis=1)
    return None if finite.all() else int(np.argmin(finite))


def check_rows_finite(
    path: Path, what: str, numbers: np.ndarray, rows: Int[np.ndarray, " n"]
) -> None:
    """Raise where one of the numbered `rows` holds NaN or infinity; `what` says what a row is."""
    bad = first_not_finite(numbers)
    if bad is not None:
        raise DataError(
            f"{path}: {what} {rows[bad]} holds NaN or infinity; expected finite numbers"
        )


def runs(rows: Int[np.ndarray, " n"], most: int | None = None) -> Iterator[slice]:
    """Positions of neighbouring rows, which can be read at once, so many at most."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    for first, last in pairwise([0, *breaks.tolist(), len(rows)]):
        step = most or max(1, last - first)
        for start in range(first, last, step):
            yield slice(start, min(start + step, last))


def _check_unlocked(part: Path) -> None:
    """Raise if another process is writing the part; force must not pull it from under it."""
    try:
        h5py.File(part, "r+").close()
    except OSError as error:  # also where there is no part
        if _is_locked(error):
            raise


def _rows_to_resume(plan: Plan) -> int:
    if not plan.part.exists():
        return 0
    hint = "delete it or use --force"
    with reading_hdf5(plan.part, f"an unfinished file of fst; {hint}") as file:
        found = read_provenance(plan.part, file.attrs.get(STORED))
        done = int(file.attrs.get("complete_rows", -1))
    if found != plan.provenance:
        raise DataError(
            f"{plan.part}: is an unfinished file of another provenance "
            f"({_difference(found or {}, plan.provenance)}); {hint}"
        )
    if not 0 <= done <= plan.rows:
        raise DataError(f"{plan.part}: claims {done} of {plan.rows} rows; {hint}")
    return done


def _create_part(plan: Plan) -> None:
    # Contiguous, with its position in the file fixed now and never filled with zeros: writing rows
    # then changes nothing but their own bytes, and a writer may be killed at any point.
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    # Made under a third name first, so that a part is never caught without its provenance.
    fresh = plan.part.with_name(plan.part.name + ".new")
    with h5py.File(fresh, "w") as file:
        for name, column in plan.columns.items():
            shape = (plan.rows, *column.shape)
            file.create_dataset(name, shape, dtype=column.base, dcpl=properties)
        for name, constant in plan.constants.items():
            file.create_dataset(name, data=constant)
        for name, value in plan.attributes.items():
            file.attrs[name] = value
        file.attrs[STORED] = json.dumps(plan.provenance, sort_keys=True)
        file.attrs["complete_rows"] = np.int64(0)
    sync(fresh)
    fresh.replace(plan.part)


def _check_space(plan: Plan) -> None:
    needed = plan.rows * sum(column.itemsize for column in plan.columns.values())
    free = shutil.disk_usage(plan.path.parent).free
    if plan.part.exists():
        free += plan.part.stat().st_size
    if needed > free:
        raise DataError(f"{plan.path}: needs {_size(needed)}, but its disk has {_size(free)} free")


def _size(count: float) -> str:
    """Bytes with a unit in which they are a number to read; to the byte they might look equal."""
    units = ("bytes", "kB", "MB", "GB", "TB")
    power = min(len(units) - 1, int(math.log10(max(count, 1)) // 3))
    return f"{count / 1000**power:.6g} {units[power]}"


def _difference(existing: Provenance, wanted: Provenance) -> str:
    names = sorted(set(existing) | set(wanted))
    differing = [name for name in names if existing.get(name) != wanted.get(name)]
    shown = [f"{n}: {existing.get(n)!r} there, {wanted.get(n)!r} asked" for n in differing[:3]]
    return "; ".join(shown)
