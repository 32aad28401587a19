"""Burgers trajectories in PDEBench's HDF5 layout: `1D_Burgers_Sols_Nu{ν}.hdf5`.

`tensor` (samples, time, space) float32, `x-coordinate` (cell centres), `t-coordinate` (one entry
more than there are saved times, as PDEBench stores it). A file made here also has the index lists
`split/training`, `split/validation`, `split/test` and its law as a JSON attribute; PDEBench's own
files have neither, and their readers ignore both.

Enters: a file. Leaves: what it holds (`open_trajectories`, which reads no trajectory), and blocks
of the wanted rows (`TrajectoryFile.blocks`), so that memory never holds more than one block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fst.data.errors import DataError, reading_hdf5
from fst.data.row_writer import Column, Law, Plan, first_not_finite, read_law
from fst.data.splits import SPLITS, Partition

LAYOUT = "a PDEBench HDF5 file with tensor (samples, time, space), x-coordinate and t-coordinate"
_BLOCK_BYTES = 2**24


def file_name(viscosity: float) -> str:
    """PDEBench's name: whole numbers keep their `.0`."""
    return f"1D_Burgers_Sols_Nu{float(viscosity)}.hdf5"


@dataclass(frozen=True)
class TrajectoryFile:
    """What a file says it holds. Its layout has been checked, its trajectories not yet read."""

    path: Path
    rows: int
    times: Float[np.ndarray, " t"]
    cells: Float[np.ndarray, " x"]
    partition: Partition | None
    law: Law | None

    @property
    def grid(self) -> tuple[int, int]:
        return len(self.times), len(self.cells)

    def blocks(self, rows: Int[np.ndarray, " n"]) -> Iterator[tuple[slice, Float[Tensor, "k t x"]]]:
        """The given sorted rows in order, as (where they go, trajectories), a block at a time.

        The trajectories lie in one buffer that the next block overwrites.
        """
        times, cells = self.grid
        size = max(1, _BLOCK_BYTES // (4 * times * cells))
        buffer = np.empty((size, times, cells), dtype=np.float32)
        with reading_hdf5(self.path, LAYOUT) as file:
            stored = file["tensor"]
            for where, first, count in _runs(rows, size):
                stored.read_direct(buffer, np.s_[first : first + count], np.s_[:count])
                bad = first_not_finite(buffer[:count])
                if bad is not None:
                    raise DataError(
                        f"{self.path}: trajectory {first + bad} holds NaN or infinity; "
                        "expected finite numbers"
                    )
                yield slice(where, where + count), torch.from_numpy(buffer[:count])


def _runs(rows: Int[np.ndarray, " n"], size: int) -> Iterator[tuple[int, int, int]]:
    """Neighbouring rows joined into runs of at most `size`: (position, first row, count)."""
    position = 0
    while position < len(rows):
        ahead = rows[position : position + size]
        count = int(np.argmin(np.append(ahead == ahead[0] + np.arange(len(ahead)), False)))
        yield position, int(ahead[0]), count
        position += count


def open_trajectories(path: Path) -> TrajectoryFile:
    """Check a file's layout and read all but its trajectories."""
    with reading_hdf5(path, LAYOUT) as file:
        names = ("tensor", "x-coordinate", "t-coordinate")
        missing = [name for name in names if not isinstance(file.get(name), h5py.Dataset)]
        if missing:
            raise DataError(f"{path}: has no {', '.join(missing)}; expected {LAYOUT}")
        tensor = file["tensor"]
        if tensor.ndim != 3 or tensor.dtype.kind != "f" or 0 in tensor.shape:
            raise DataError(
                f"{path}: tensor must be floating-point of shape (samples, time, space), "
                f"got {tensor.dtype} of shape {tensor.shape}"
            )
        rows, times, cells = tensor.shape
        complete = int(file.attrs.get("complete_rows", rows))
        if complete != rows:
            raise DataError(f"{path}: is unfinished, {complete} of {rows} trajectories are written")
        x_coordinate = _axis(path, file["x-coordinate"], (cells,))
        t_coordinate = _axis(path, file["t-coordinate"], (times, times + 1))[:times]
        law = read_law(path, file.attrs.get("law"))
        return TrajectoryFile(
            path, rows, t_coordinate, x_coordinate, _partition(path, file, rows), law
        )


def _axis(path: Path, stored: h5py.Dataset, lengths: tuple[int, ...]) -> np.ndarray:
    if stored.ndim != 1 or stored.dtype.kind != "f" or len(stored) not in lengths:
        wanted = " or ".join(map(str, lengths))
        raise DataError(
            f"{path}: {stored.name[1:]} must hold {wanted} numbers to match tensor, "
            f"got {stored.dtype} of shape {stored.shape}"
        )
    axis: np.ndarray = stored[:].astype(np.float64)
    if not np.isfinite(axis).all() or (np.diff(axis) <= 0).any():
        raise DataError(f"{path}: {stored.name[1:]} must increase and be finite")
    return axis


def _partition(path: Path, file: h5py.File, rows: int) -> Partition | None:
    group = file.get("split")
    if group is None:
        return None
    if not isinstance(group, h5py.Group):
        raise DataError(f"{path}: split must be a group of index lists")
    try:
        return Partition.named({name: group[name][:] for name in group}, rows)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error


def plan_trajectories(
    path: Path,
    law: Law,
    partition: Partition,
    times: Float[np.ndarray, " t"],
    cells: Float[np.ndarray, " x"],
    viscosity: float,
) -> Plan:
    """The file to be made: its rows are the partition's, its layout PDEBench's."""
    step = times[1] - times[0]
    return Plan(
        path=path,
        law=law,
        rows=sum(len(getattr(partition, name)) for name in SPLITS),
        columns={"tensor": Column((len(times), len(cells)), "float32")},
        constants={
            "x-coordinate": cells.astype(np.float32),
            "t-coordinate": np.append(times, times[-1] + step).astype(np.float32),
            **{f"split/{name}": getattr(partition, name) for name in SPLITS},
        },
        attributes={"Nu": viscosity},
    )
