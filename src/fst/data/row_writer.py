"""Files that are whole or absent: rows are written to NAME.part, which is renamed when complete.

The part is an HDF5 file that records its law (what the rows are, as JSON) and how many rows are on
the disk (`complete_rows`, raised only after the rows themselves were forced there). A killed
writer therefore leaves a part that the next one continues, and never a half file under the final
name. A part of another law is refused: continuing it would mix two data sets.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fst.data.errors import DataError, is_locked, reading_hdf5, writing
from fst.io import parse_json, sync
from fst.version import __version__

Law = dict[str, object]
Produce = Callable[[int, int], dict[str, np.ndarray]]


def package_version() -> str:
    """Part of every law: another version may make other data from the same seed."""
    return __version__


@dataclass(frozen=True)
class Column:
    """One dataset of a part: the shape of one row of it, and its dtype."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Plan:
    """A file to be made: its rows, the arrays stored beside them, and the law they follow."""

    path: Path
    law: Law
    rows: int
    columns: Mapping[str, Column]
    constants: Mapping[str, np.ndarray]
    attributes: Mapping[str, object]

    @property
    def part(self) -> Path:
        return self.path.with_name(self.path.name + ".part")

    @property
    def bytes(self) -> int:
        return self.rows * sum(column.row_bytes for column in self.columns.values())


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
    with _open_part(plan) as file, _progress(console) as progress:
        task = progress.add_task(plan.path.name, total=plan.rows, completed=done)
        for start in range(done, plan.rows, batch_size):
            stop = min(start + batch_size, plan.rows)
            block = produce(start, stop)
            _check_finite(plan, block, start)
            with writing(plan.path):
                _append(file, block, start, stop)
            progress.advance(task, stop - start)
    return plan.part


def settle_existing(path: Path, law: Law, existing: Law | None, *, force: bool) -> bool:
    """What to do about a file that is there: True keeps it, False lets it be replaced.

    A file of the same law is what was asked for. Any other is somebody's data.
    """
    if force:
        return False
    if existing == law:
        return True
    if existing is None:
        raise DataError(
            f"{path}: exists and names no law; use --force (in Python force=True) to replace it"
        )
    raise DataError(
        f"{path}: exists and follows another law ({_difference(existing, law)}); "
        "use --force to replace it"
    )


def read_law(path: Path, text: object) -> Law | None:
    """The law stored in a file, or None where there is none."""
    if text is None:
        return None
    try:
        law = parse_json(text if isinstance(text, str | bytes) else "")
    except ValueError as error:
        raise DataError(f"{path}: its law is not JSON") from error
    if not isinstance(law, dict):
        raise DataError(f"{path}: its law must be a JSON object, got {type(law).__name__}")
    return law


def law_text(law: Law) -> str:
    return json.dumps(law, sort_keys=True)


def _check_unlocked(part: Path) -> None:
    """Raise if another process is writing the part; force must not pull it from under it."""
    if not part.exists():
        return
    try:
        h5py.File(part, "r+").close()
    except OSError as error:
        if is_locked(error):
            raise


def _rows_to_resume(plan: Plan) -> int:
    if not plan.part.exists():
        return 0
    hint = "delete it or use --force"
    expected = f"an unfinished file of fst; {hint}"
    with reading_hdf5(plan.part, expected) as file:
        law = read_law(plan.part, file.attrs.get("law"))
        done = int(file.attrs.get("complete_rows", -1))
    if law != plan.law:
        raise DataError(
            f"{plan.part}: is an unfinished file of another law "
            f"({_difference(law or {}, plan.law)}); {hint}"
        )
    if not 0 <= done <= plan.rows:
        raise DataError(f"{plan.part}: claims {done} of {plan.rows} rows; {hint}")
    return done


def _create_part(plan: Plan) -> None:
    # Made under a third name first, so that a part is never caught without its law.
    fresh = plan.part.with_name(plan.part.name + ".new")
    with h5py.File(fresh, "w") as file:
        for name, column in plan.columns.items():
            shape = (plan.rows, *column.shape)
            file.create_dataset(name, shape, dtype=column.dtype, dcpl=_placed_at_once())
        for name, constant in plan.constants.items():
            file.create_dataset(name, data=constant)
        for name, value in plan.attributes.items():
            file.attrs[name] = value
        file.attrs["law"] = law_text(plan.law)
        file.attrs["complete_rows"] = np.int64(0)
    sync(fresh)
    fresh.replace(plan.part)


def _placed_at_once() -> h5py.h5p.PropDCID:
    """Contiguous, with its place in the file fixed now and never filled with zeros.

    Writing rows then changes nothing but their own bytes: a writer may be killed at any point.
    """
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    return properties


@contextmanager
def _open_part(plan: Plan) -> Iterator[h5py.File]:
    """Open while rows are made: HDF5 locks the file, so a second writer is turned away."""
    with writing(plan.path):
        file = h5py.File(plan.part, "r+")
    try:
        yield file
    finally:
        with writing(plan.path):
            file.close()


def _append(file: h5py.File, block: Mapping[str, np.ndarray], start: int, stop: int) -> None:
    for name, rows in block.items():
        file[name][start:stop] = rows
    file.flush()
    sync(Path(file.filename))
    file.attrs.modify("complete_rows", np.int64(stop))
    file.flush()


def _check_finite(plan: Plan, block: Mapping[str, np.ndarray], start: int) -> None:
    for name, rows in block.items():
        bad = first_not_finite(rows)
        if bad is not None:
            raise DataError(
                f"{plan.path}: the solver gave NaN or infinity for row {start + bad} of {name}; "
                "nothing of this block was written"
            )


def first_not_finite(rows: np.ndarray) -> int | None:
    """The first row that holds NaN or infinity, if any."""
    if rows.dtype.kind != "f":
        return None
    # A float64 sum of float32 numbers is finite exactly when they all are; it is the cheap test.
    if np.isfinite(rows.sum(dtype=np.float64)):
        return None
    finite = np.isfinite(rows.reshape(len(rows), -1)).all(axis=1)
    return None if finite.all() else int(np.argmin(finite))


def _check_space(plan: Plan) -> None:
    free = shutil.disk_usage(plan.path.parent).free
    if plan.part.exists():
        free += plan.part.stat().st_size
    if plan.bytes > free:
        raise DataError(
            f"{plan.path}: needs {_size(plan.bytes)}, but its disk has {_size(free)} free"
        )


def _size(count: float) -> str:
    """Bytes with a unit in which they are a number to read; to the byte they might look equal."""
    units = ("bytes", "kB", "MB", "GB", "TB")
    power = min(len(units) - 1, int(math.log10(max(count, 1)) // 3))
    return f"{count / 1000**power:.6g} {units[power]}"


def _difference(existing: Law, wanted: Law) -> str:
    names = sorted(set(existing) | set(wanted))
    differing = [name for name in names if existing.get(name) != wanted.get(name)]
    shown = [f"{n}: {existing.get(n)!r} there, {wanted.get(n)!r} asked" for n in differing[:3]]
    return "; ".join(shown)


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        yield progress
