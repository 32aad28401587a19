"""The Burgers data of a recipe: which viscosities, how many samples, which grids.

Enters: a folder of PDEBench files, made here where they are missing. Leaves: the training and
validation splits, or, by a separate call, the test split. The published files drop in: they name
no splits, so theirs are drawn by seed, with the same rows for every viscosity.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from fst.data import burgers
from fst.data.atomic import Law, package_version, publish, settle_existing, write_rows
from fst.data.augmentation import PeriodicSamples
from fst.data.errors import DataError
from fst.data.pdebench import TrajectoryFile, file_name, open_trajectories, plan_trajectories
from fst.data.samples import BurgersSamples, Samples
from fst.data.source import DataSource
from fst.data.splits import Partition, TestSplit, TrainingSplit, ValidationSplit, looked_at
from fst.data.views import boundary_observation_indices, index_coordinates, subset_indices
from fst.terminal import Terminal
from fst.types import check_fields

# Coordinates stored in float32, or computed in another order, differ by less than this.
_COORDINATE_TOLERANCE = 1e-5
_CPU_BATCH = 32


@dataclass(frozen=True)
class BurgersData(DataSource):
    """Trajectories of u_t + (u²/2)_x = (ν/π) u_xx, observed at t = 0 and at both end cells."""

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
        check_fields(self)
        if not self.viscosities or any(not nu > 0 for nu in self.viscosities):
            raise ValueError(f"viscosities must be positive numbers, got {self.viscosities}")
        if len(set(self.viscosities)) != len(self.viscosities):
            raise ValueError(f"viscosities must differ, got {self.viscosities}")
        if self.seed < 0 or self.split_seed < 0:
            raise ValueError(
                f"seed and split_seed must be at least 0, got {self.seed} and {self.split_seed}"
            )
        if self.points < 2 or self.times < 2:
            raise ValueError(
                f"points and times must be at least 2, got {self.points} and {self.times}"
            )
        if not self.final_time > 0:
            raise ValueError(f"final_time must be positive, got {self.final_time}")
        if min(self.training, self.validation, self.test) < 0 or self.training == 0:
            raise ValueError(
                "training must be positive, validation and test not negative, "
                f"got {self.training}, {self.validation} and {self.test}"
            )

    @property
    def grid(self) -> tuple[int, int]:
        return self.times, self.points

    @property
    def diffusion(self) -> float | None:
        one = len(self.viscosities) == 1
        return self.viscosities[0] / math.pi * self.final_time if one else None

    def files(self, folder: Path) -> list[Path]:
        """The files of this recipe, whether they exist or not."""
        return [find_file(folder, viscosity) for viscosity in self.viscosities]

    @property
    def test_counts(self) -> tuple[int, ...]:
        each, left = divmod(self.test, len(self.viscosities))
        return tuple(each + (place < left) for place in range(len(self.viscosities)))

    def prepare(
        self, folder: Path, device: torch.device | str = "cpu", console: Console | None = None
    ) -> None:
        """Make the files that are missing. A file that is there is checked and kept."""
        console = console or Terminal()
        for viscosity, test in zip(self.viscosities, self.test_counts, strict=True):
            path = find_file(folder, viscosity)
            if not path.exists():
                self.make(path, viscosity, test, device=device, console=console)
                continue
            file = self._open(path, viscosity)
            self._partition(file, test)
            if file.law is not None and file.law.get("seed") != self.seed:
                console.print(f"{path.name}: kept, made with seed {file.law.get('seed')}")

    def make(
        self,
        path: Path,
        viscosity: float,
        test: int,
        *,
        device: torch.device | str,
        console: Console,
        batch_size: int | None = None,
        force: bool = False,
    ) -> bool:
        """Make one file, going on from an unfinished one; False if it was there already."""
        partition = Partition.consecutive(self.training, self.validation, test)
        law = self._law(viscosity, test)
        if path.exists() and settle_existing(path, law, _law_of(path, force), force=force):
            return False
        device = torch.device(device)
        moments = burgers.saved_times(self.times, self.final_time)
        times = torch.as_tensor(moments, dtype=torch.float64, device=device)
        cells = torch.as_tensor(burgers.cell_centers(self.points), dtype=torch.float64)
        plan = plan_trajectories(
            path, law, partition, times.cpu().numpy(), cells.cpu().numpy(), viscosity
        )

        def produce(start: int, stop: int) -> dict[str, np.ndarray]:
            initial = burgers.sample_initial(stop - start, self.points, self.seed, start=start)
            solution = burgers.solve(initial.to(device), viscosity, times)
            return {"tensor": solution.float().cpu().numpy()}

        batch_size = batch_size or self._rows_at_once(device)
        part = write_rows(plan, produce, batch_size=batch_size, console=console, force=force)
        publish(part, path)
        return True

    def _rows_at_once(self, device: torch.device) -> int:
        """On a CPU few, so that little is lost when it is stopped; on a GPU what fits well."""
        if device.type != "cuda":
            return _CPU_BATCH
        free, _ = torch.cuda.mem_get_info(device)
        # The solution in float64 and in float32, and as much again for the solver.
        return max(1, free // (4 * 12 * self.times * self.points))

    def load(
        self,
        folder: Path,
        device: torch.device | str = "cpu",
        *,
        augment: bool = False,
        console: Console | None = None,
    ) -> tuple[TrainingSplit[Samples], ValidationSplit[Samples]]:
        """Training and validation, on the device. Rows of the test split are not read.

        With `augment`, training samples can be shifted and reflected; they then hold the whole
        grid on the device.
        """
        opened = self._open_all(folder)
        training = [partition.training for _, partition in opened]
        validation = [partition.validation for _, partition in opened]
        files = [file for file, _ in opened]
        samples: Samples
        if augment:
            whole = self._read(zip(files, training, strict=True), self.grid, device)
            samples = PeriodicSamples(whole, self.supervision_grid)
        else:
            grid = self.supervision_grid or self.grid
            samples = self._read(zip(files, training, strict=True), grid, device)
        return TrainingSplit(samples), ValidationSplit(
            self._read(zip(files, validation, strict=True), self.validation_grid, device)
        )

    def fingerprint(self, folder: Path) -> dict[str, Any]:
        """By which the data of a run are known again: their splits, and the size of a few rows.

        It tells other samples, and another solver, but not the rounding of another device.
        """
        opened = self._open_all(folder)
        sizes: list[float] = []
        for file, partition in opened:
            for rows in (partition.training, partition.validation):
                blocks = file.blocks(looked_at(rows))
                sizes += [u.double().square().mean().sqrt().item() for _, b in blocks for u in b]
        return {"splits": [partition.digest for _, partition in opened], "sizes": sizes}

    def load_test(self, folder: Path, device: torch.device | str = "cpu") -> TestSplit[Samples]:
        """The test split on the whole grid, grouped by viscosity."""
        opened = self._open_all(folder)
        samples = self._read([(file, rows.test) for file, rows in opened], self.grid, device)
        groups = tuple(
            f"{viscosity:g}"
            for viscosity, (_, rows) in zip(self.viscosities, opened, strict=True)
            for _ in rows.test
        )
        return TestSplit(samples, groups, values=(("u", ""),), targets=(("u", ""),))

    def _law(self, viscosity: float, test: int) -> Law:
        return {
            "equation": "u_t + (u^2/2)_x = (nu/pi) u_xx, periodic on (0, 1)",
            "initial": "PDEBench: sums of sine modes, some absolute, some windowed",
            "solver": "fst.data.burgers.solve, float64",
            "viscosity": viscosity,
            "seed": self.seed,
            "training": self.training,
            "validation": self.validation,
            "test": test,
            "points": self.points,
            "times": self.times,
            "final_time": self.final_time,
            "version": package_version(),
        }

    def _open_all(self, folder: Path) -> list[tuple[TrajectoryFile, Partition]]:
        opened = []
        for viscosity, test in zip(self.viscosities, self.test_counts, strict=True):
            file = self._open(find_file(folder, viscosity), viscosity)
            opened.append((file, self._partition(file, test)))
        return opened

    def _open(self, path: Path, viscosity: float) -> TrajectoryFile:
        """A file of this viscosity on exactly this grid, so that files cannot be mixed."""
        file = open_trajectories(path)
        if file.grid != self.grid:
            raise DataError(
                f"{path}: holds trajectories on a {file.grid} grid (times, cells), "
                f"expected {self.grid}"
            )
        times = np.linspace(0, self.final_time, self.times)
        cells = (np.arange(self.points) + 0.5) / self.points
        for name, found, wanted in (("t", file.times, times), ("x", file.cells, cells)):
            if np.abs(found - wanted).max() > _COORDINATE_TOLERANCE * max(1, self.final_time):
                raise DataError(
                    f"{path}: {name}-coordinate runs {found[0]:g}, {found[1]:g} to {found[-1]:g}, "
                    f"expected {wanted[0]:g}, {wanted[1]:g} to {wanted[-1]:g}"
                )
        if file.law is not None and file.law.get("viscosity") != viscosity:
            raise DataError(
                f"{path}: was made for viscosity {file.law.get('viscosity')}, expected {viscosity}"
            )
        return file

    def _partition(self, file: TrajectoryFile, test: int) -> Partition:
        """Which of its rows this recipe uses: the first of those named, or drawn by seed."""
        wanted = {"training": self.training, "validation": self.validation, "test": test}
        if file.partition is None:
            if sum(wanted.values()) > file.rows:
                raise DataError(
                    f"{file.path}: holds {file.rows} trajectories, "
                    f"expected at least {sum(wanted.values())}"
                )
            return Partition.drawn(file.rows, **wanted, seed=self.split_seed)
        for name, count in wanted.items():
            there = len(getattr(file.partition, name))
            if there < count:
                raise DataError(
                    f"{file.path}: holds {there} {name} trajectories, expected at least {count}"
                )
        return Partition(
            **{name: getattr(file.partition, name)[:count] for name, count in wanted.items()}
        )

    def _read(
        self,
        parts: Iterable[tuple[TrajectoryFile, np.ndarray]],
        counts: tuple[int, int],
        device: torch.device | str,
    ) -> BurgersSamples:
        """The given rows of the given files at a subset of the grid, a block at a time."""
        parts = list(parts)
        total = sum(len(rows) for _, rows in parts)
        held = tuple(map(subset_indices, self.grid, counts))
        time, cell = boundary_observation_indices(*self.grid).unbind(dim=1)
        targets = torch.empty(total, *counts, device=device)
        observed = torch.empty(total, len(time), device=device)
        start = 0
        for file, rows in parts:
            for where, block in file.blocks(rows):
                place = slice(start + where.start, start + where.stop)
                targets[place] = block[:, held[0]][:, :, held[1]].to(device)
                observed[place] = block[:, time, cell].to(device)
            start += len(rows)
        return BurgersSamples(
            grid=self.grid,
            held=held,
            targets=targets,
            observed_positions=index_coordinates(torch.stack([time, cell], dim=1), self.grid),
            observed_values=observed,
            condition=self._condition(parts) if self.condition else None,
        )

    def _condition(self, parts: list[tuple[TrajectoryFile, np.ndarray]]) -> Tensor:
        counts = torch.tensor([len(rows) for _, rows in parts])
        return torch.tensor(self.viscosities).repeat_interleave(counts)[:, None]


def find_file(folder: Path, viscosity: float) -> Path:
    """The viscosity's file: PDEBench's name, or the same with a whole number written short."""
    short = folder / f"1D_Burgers_Sols_Nu{viscosity:g}.hdf5"
    return short if short.exists() else folder / file_name(viscosity)


def _law_of(path: Path, force: bool) -> Law | None:
    return None if force else open_trajectories(path).law
