"""The Burgers data of a recipe: which viscosities, how many samples, which grids.

Enters: a folder of PDEBench files, made here where they are missing. Leaves: the training and
validation splits, or, by a separate call, the test split. The published files drop in: they name
no splits, so theirs are drawn by seed, with the same rows for every viscosity.

PDEBench's layout, `1D_Burgers_Sols_Nu{ν}.hdf5`: `tensor` (samples, time, space) float32,
`x-coordinate` (cell centres), `t-coordinate` (one entry more than there are saved times). A file
made here also has the index lists `split/training`, `split/validation` and `split/test` and its
provenance as a JSON attribute, which PDEBench's readers ignore.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import h5py
import numpy as np
import torch
from jaxtyping import Float, Int
from rich.console import Console
from torch import Tensor

from fst.data import burgers, files
from fst.data.files import Plan, Produce, Provenance
from fst.data.samples import (
    BurgersSamples,
    Samples,
    Statistics,
    boundary_observation_indices,
    index_product,
)
from fst.data.source import SPLITS, MadeData, Partition, TestSplit, stored_partition
from fst.types import Device, check_fields
from fst.version import __version__

LAYOUT = "a PDEBench HDF5 file with tensor (samples, time, space), x-coordinate and t-coordinate"
_BLOCK_BYTES = 2**24
# Coordinates stored in float32, or computed in another order, differ by less than this.
_COORDINATE_TOLERANCE = 1e-5
_CPU_BATCH = 32  # so that little is lost when it is stopped


@dataclass(frozen=True)
class BurgersData(MadeData):
    """Trajectories of u_t + (u²/2)_x = (ν/π) u_xx, observed at t = 0 and at both end cells."""

    value_names = (("u", ""),)
    target_names = (("u", ""),)
    limits = (
        "Solutions of PDEBench's initial conditions on the periodic unit interval, to the final "
        "time above, at the viscosities above; values observed at t = 0 and at both end cells. "
        "Positions are (time, space), each scaled to [0, 1]. Other viscosities, other initial "
        "conditions, longer times and other positions of observations were not tested."
    )

    viscosities: tuple[float, ...] = (0.01,)
    """The viscosities ν, one file each."""
    training: int = 2000
    """Training samples of each viscosity."""
    validation: int = 100
    """Validation samples of each viscosity."""
    test: int = 84
    """Test samples of all viscosities together; the first ones take what does not divide."""
    points: int = 1024
    """Cells of the stored grid."""
    times: int = 201
    """Saved times of the stored grid."""
    final_time: float = 2.0
    """The last saved time."""
    seed: int = 0
    """Of the initial conditions, which all viscosities share, as in PDEBench."""
    split_seed: int = 0
    """Of the splits of files that name none."""
    supervision_grid: tuple[int, int] | None = (100, 100)
    """Where training asks for targets (time, space); None for the whole grid."""
    validation_grid: tuple[int, int] = (100, 100)
    """Where the validation error is measured."""
    condition: bool = False
    """Whether the viscosity is given to the model."""

    def __post_init__(self) -> None:
        least = {"training": 1, "validation": 0, "test": 0, "points": 2, "times": 2}
        check_fields(self, **least, seed=0, split_seed=0)
        if not self.viscosities or any(not nu > 0 for nu in self.viscosities):
            raise ValueError(f"viscosities must be positive numbers, got {self.viscosities}")
        if len(set(self.viscosities)) != len(self.viscosities):
            raise ValueError(f"viscosities must differ, got {self.viscosities}")
        if not self.final_time > 0:
            raise ValueError(f"final_time must be positive, got {self.final_time}")

    @property
    def grid(self) -> tuple[int, int]:
        return self.times, self.points

    @property
    def diffusion(self) -> float | None:
        one = len(self.viscosities) == 1
        return self.viscosities[0] / math.pi * self.final_time if one else None

    @property
    def test_counts(self) -> tuple[int, ...]:
        each, left = divmod(self.test, len(self.viscosities))
        return tuple(each + (number < left) for number in range(len(self.viscosities)))

    def parts(self, folder: Path) -> dict[Path, tuple[float, int]]:
        counted = zip(self.viscosities, self.test_counts, strict=True)
        return {find_file(folder, viscosity): (viscosity, test) for viscosity, test in counted}

    def plan(self, path: Path, device: torch.device, *part: Any) -> tuple[Plan, Produce, int]:
        viscosity, test = part
        times = burgers.saved_times(self.times, self.final_time)
        saved = times.numpy()
        partition = Partition.consecutive(self.training, self.validation, test)
        plan = Plan(
            path=path,
            provenance=self._provenance(viscosity, test),
            rows=self.training + self.validation + test,
            columns={"tensor": np.dtype(("float32", self.grid))},
            constants={
                "x-coordinate": burgers.cell_centers(self.points).float().numpy(),
                "t-coordinate": np.append(saved, saved[-1] + saved[1]).astype(np.float32),
                **{f"split/{name}": getattr(partition, name) for name in SPLITS},
            },
            attributes={"Nu": viscosity},
        )

        def produce(start: int, stop: int) -> dict[str, np.ndarray]:
            initial = burgers.sample_initial(stop - start, self.points, self.seed, start=start)
            solution = burgers.solve(initial.to(device), viscosity, times.to(device))
            return {"tensor": solution.float().cpu().numpy()}

        if device.type != "cuda":
            return plan, produce, _CPU_BATCH
        free, _ = torch.cuda.mem_get_info(device)
        # The solution in float64 and in float32, and as much again for the solver.
        return plan, produce, max(1, free // (4 * 12 * self.times * self.points))

    def splits(
        self, folder: Path, device: torch.device, augment: bool, console: Console | None
    ) -> tuple[Samples, Samples]:
        """Rows of the test split are not read.

        With `augment`, training samples can be shifted and reflected; they then hold the whole
        grid on the device.
        """
        opened = self.for_training(folder)
        grid = self.grid if augment else self.supervision_grid or self.grid
        samples = self._read(opened, "training", grid, device)
        if augment:
            samples = PeriodicSamples(samples, self.supervision_grid)
        return samples, self._read(opened, "validation", self.validation_grid, device)

    def load_test(self, folder: Path, device: Device = "cpu") -> TestSplit[Samples]:
        """The test split on the whole grid, grouped by viscosity."""
        opened = self.for_training(folder)
        samples = self._read(opened, "test", self.grid, device)
        counted = zip(self.viscosities, opened, strict=True)
        groups = tuple(f"{nu:g}" for nu, (_, rows) in counted for _ in rows.test)
        return TestSplit(samples, groups, values=self.value_names, targets=self.target_names)

    def _provenance(self, viscosity: float, test: int) -> Provenance:
        settings = ("seed", "training", "validation", "points", "times", "final_time")
        return {name: getattr(self, name) for name in settings} | {
            "equation": "u_t + (u^2/2)_x = (nu/pi) u_xx, periodic on (0, 1)",
            "initial": "PDEBench: sums of sine modes, some absolute, some windowed",
            "solver": "fst.data.burgers.solve, float64",
            "viscosity": viscosity,
            "test": test,
            "version": __version__,
        }

    def layout(self, path: Path) -> "TrajectoryFile":
        return open_trajectories(path)

    def rows_of(self, file: "TrajectoryFile", *part: Any) -> Partition:
        """The first rows of those that a file names, or rows drawn by seed; of a file for this
        viscosity on exactly this grid, so that files cannot be mixed."""
        viscosity, test = part
        if file.grid != self.grid:
            raise ValueError(
                f"holds trajectories on a {file.grid} grid (times, cells), expected {self.grid}"
            )
        times = np.linspace(0, self.final_time, self.times)
        cells = (np.arange(self.points) + 0.5) / self.points
        for name, found, wanted in (("t", file.times, times), ("x", file.cells, cells)):
            if np.abs(found - wanted).max() > _COORDINATE_TOLERANCE * max(1, self.final_time):
                raise ValueError(
                    f"{name}-coordinate runs {found[0]:g}, {found[1]:g} to {found[-1]:g}, "
                    f"expected {wanted[0]:g}, {wanted[1]:g} to {wanted[-1]:g}"
                )
        made_for = viscosity if file.provenance is None else file.provenance.get("viscosity")
        if made_for != viscosity:
            raise ValueError(f"was made for viscosity {made_for}, expected {viscosity}")
        counts = {"training": self.training, "validation": self.validation, "test": test}
        if file.partition is None:
            total = sum(counts.values())
            if total > file.rows:
                raise ValueError(f"holds {file.rows} trajectories, expected at least {total}")
            return Partition.drawn(file.rows, **counts, seed=self.split_seed)
        used = {name: getattr(file.partition, name)[:count] for name, count in counts.items()}
        for name, rows in used.items():
            if len(rows) < counts[name]:
                least = f"expected at least {counts[name]}"
                raise ValueError(f"holds {len(rows)} {name} trajectories, {least}")
        return Partition(**used)

    def _read(
        self, opened: list[tuple[Any, Partition]], split: str, grid: tuple[int, int], device: Device
    ) -> BurgersSamples:
        """A split of the given files at a subset of the grid, a block at a time."""
        parts = [(file, getattr(partition, split)) for file, partition in opened]
        rows_of_files = torch.tensor([len(rows) for _, rows in parts])
        total = int(rows_of_files.sum())
        empty = torch.empty(0, *self.grid, device=device)
        none = BurgersSamples.from_solutions(empty).on_grid(grid)
        targets = torch.empty(total, *grid, device=device)
        values = torch.empty(total, none.observed_values.shape[1], device=device)
        stop = 0
        for (block,) in (block for file, rows in parts for block in file.blocks(rows)):
            start, stop = stop, stop + len(block)
            # A GPU takes subsets much faster.
            some = BurgersSamples.from_solutions(block.to(device)).on_grid(grid)
            targets[start:stop], values[start:stop] = some.targets, some.observed_values
        condition = None
        if self.condition:
            condition = torch.tensor(self.viscosities).repeat_interleave(rows_of_files)[:, None]
        return replace(none, targets=targets, observed_values=values, condition=condition)


class PeriodicSamples(BurgersSamples):
    """Training samples moved by u(t, x) → u(t, x + s) and u(t, x) → −u(t, −x).

    Both map solutions of the periodic equation to solutions. On cell centres a shift by whole cells
    is i → i + s mod n and the reflection i → n−1−i: exact, without interpolation. (The
    distribution of initial conditions is not quite invariant: its waves do not close exactly at the
    seam of the interval, and its window stands in the left half. Moved samples are drawn from a
    slightly wider distribution.) Every value is one gather from the whole solution, which therefore
    stays on the device.
    """

    augmented = True

    def __init__(self, whole: BurgersSamples, supervision: tuple[int, ...] | None = None) -> None:
        if whole.grid_shape != whole.grid:
            raise ValueError(
                f"whole must hold the whole {whole.grid} grid, it holds {whole.grid_shape}"
            )
        supervised = whole.on_grid(supervision or whole.grid)
        super().__init__(**supervised._parts())
        self.whole = whole
        self.moves = whole.grid[1], 2  # a shift in whole cells, and 1 where it is then reflected
        self.supervised = index_product(self.held)
        self.observed = boundary_observation_indices(*whole.grid).to(whole.device)

    def to(self, device: Device) -> Self:
        return type(self)(self.whole.to(device), self.grid_shape)

    def numbers(
        self, rows: Tensor, chosen: Tensor | None, augmentation: Int[Tensor, "b 2"] | None
    ) -> tuple[Float[Tensor, "b o"], Float[Tensor, "b k"]]:
        if augmentation is None:
            return super().numbers(rows, chosen, None)
        asked = self.supervised if chosen is None else self.supervised[chosen]
        observed = self._moved(rows, self.observed, augmentation)
        return observed, self._moved(rows, asked, augmentation)

    def _moved(
        self, rows: Int[Tensor, " b"], where: Int[Tensor, "*b k 2"], augmentation: Tensor
    ) -> Float[Tensor, "b k"]:
        """The moved solutions at (time, cell)."""
        shift, reflected = augmentation[:, :1], augmentation[:, 1:]
        time, cell = where.unbind(dim=-1)
        cells = self.grid[1]
        mirrored = cell + reflected * (cells - 1 - 2 * cell)
        stored = self.whole.targets[rows[:, None], time, (mirrored + shift) % cells]
        return stored * (1 - 2 * reflected)

    def statistics(self) -> Statistics:
        return self.whole.on_grid(self.grid_shape).statistics()


def file_name(viscosity: float) -> str:
    """PDEBench's name: whole numbers keep their `.0`."""
    return f"1D_Burgers_Sols_Nu{float(viscosity)}.hdf5"


def find_file(folder: Path, viscosity: float) -> Path:
    """The viscosity's file: PDEBench's name, or the same with a whole number written short."""
    short = folder / f"1D_Burgers_Sols_Nu{viscosity:g}.hdf5"
    return short if short.exists() else folder / file_name(viscosity)


@dataclass(frozen=True)
class TrajectoryFile:
    """What a file says it holds. Its layout has been checked, its trajectories not yet read."""

    path: Path
    rows: int
    times: Float[np.ndarray, " t"]
    cells: Float[np.ndarray, " x"]
    partition: Partition | None
    provenance: Provenance | None

    @property
    def grid(self) -> tuple[int, int]:
        return len(self.times), len(self.cells)

    def blocks(self, rows: Int[np.ndarray, " n"]) -> Iterator[tuple[Float[Tensor, "k t x"]]]:
        """The given sorted rows, some at a time, in one buffer that the next block overwrites."""
        times, cells = self.grid
        size = max(1, _BLOCK_BYTES // (4 * times * cells))
        buffer = np.empty((size, times, cells), dtype=np.float32)
        with files.reading_hdf5(self.path, LAYOUT) as file:
            stored = file["tensor"]
            for run in files.runs(rows, size):
                first, count = int(rows[run.start]), run.stop - run.start
                stored.read_direct(buffer, np.s_[first : first + count], np.s_[:count])
                files.check_rows_finite(self.path, "trajectory", buffer[:count], rows[run])
                yield (torch.from_numpy(buffer[:count]),)


def open_trajectories(path: Path) -> TrajectoryFile:
    """Check a file's layout and read all but its trajectories."""
    with files.reading_hdf5(path, LAYOUT) as file, files.blame(path):
        names = ("tensor", "x-coordinate", "t-coordinate")
        missing = [name for name in names if not isinstance(file.get(name), h5py.Dataset)]
        if missing:
            raise ValueError(f"has no {', '.join(missing)}; expected {LAYOUT}")
        tensor = file["tensor"]
        if tensor.ndim != 3 or tensor.dtype.kind != "f" or 0 in tensor.shape:
            raise ValueError(
                "tensor must be floating-point of shape (samples, time, space), "
                f"got {tensor.dtype} of shape {tensor.shape}"
            )
        rows, times, cells = tensor.shape
        complete = int(file.attrs.get("complete_rows", rows))
        if complete != rows:
            raise ValueError(f"is unfinished, {complete} of {rows} trajectories are written")
        x_coordinate = _axis(file["x-coordinate"], (cells,))
        t_coordinate = _axis(file["t-coordinate"], (times, times + 1))[:times]
        partition = stored_partition(path, file, rows)
        provenance = files.read_provenance(path, file.attrs.get(files.STORED))
        return TrajectoryFile(path, rows, t_coordinate, x_coordinate, partition, provenance)


def _axis(stored: h5py.Dataset, lengths: tuple[int, ...]) -> np.ndarray:
    name, wanted = stored.name[1:], " or ".join(map(str, lengths))
    if stored.ndim != 1 or stored.dtype.kind != "f" or len(stored) not in lengths:
        got = f"{stored.dtype} of shape {stored.shape}"
        raise ValueError(f"{name} must hold {wanted} numbers to match tensor, got {got}")
    axis: np.ndarray = stored[:].astype(np.float64)
    if not np.isfinite(axis).all() or (np.diff(axis) <= 0).any():
        raise ValueError(f"{name} must increase and be finite")
    return axis
