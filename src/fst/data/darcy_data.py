"""The Darcy data of a recipe: coefficient fields in, solution fields out, on one square grid.

Enters: a folder with NeuralOperator's `darcy_train_{r}.pt` and `darcy_test_{r}.pt`, made here where
they are missing. Leaves: training and validation, both drawn by seed from the training file, or,
by a separate call, the test split. Inputs are the coefficient's values (0.36 and 0.02), not the
stored truth values; standardised, the two are the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from fst.data import darcy
from fst.data.atomic import Column, Law, Plan, package_version, settle_existing, write_rows
from fst.data.augmentation import SquareSamples
from fst.data.errors import DataError
from fst.data.neuraloperator_files import (
    FieldFile,
    convert_part,
    file_name,
    open_fields,
    open_reflected,
    reflected_name,
)
from fst.data.samples import GridSamples, Samples
from fst.data.source import DataSource
from fst.data.splits import Partition, TestSplit, TrainingSplit, ValidationSplit, looked_at
from fst.terminal import Terminal
from fst.types import check_fields

_BATCH = {"cpu": 16, "cuda": 256}
# Fine-grid samples solved at once for reflections: some 20 float64 arrays of their size.
_CHUNK_NODES = {"cpu": 2**21, "cuda": 2**25}


@dataclass(frozen=True)
class DarcyData(DataSource):
    """Solutions of −∇·(a∇u) = 1 on the unit square, zero on its boundary, a of two values."""

    resolution: int = 128
    """Points of each axis of the stored grid."""
    fine: int = 1024
    """Intervals of each axis of the grid that samples are solved on."""
    training: int = 2000
    """Training samples."""
    validation: int = 100
    """Validation samples."""
    test: int = 1000
    """Test samples."""
    training_file: int = 5000
    """Samples of the training file, from which training and validation are drawn."""
    seed: int = 0
    """Of the samples."""
    split_seed: int = 2026092001
    """Of the draw of training and validation."""
    validation_grid: tuple[int, int] = (100, 100)
    """Where the validation error is measured."""
    symmetries: Literal["transpose", "square"] = "transpose"
    """What augmentation uses, where training asks for it: swapping the axes (exact on any file),
    or all eight symmetries of the square, which needs a file of reflected samples and therefore
    data made here."""

    def __post_init__(self) -> None:
        check_fields(self)
        if min(self.training, self.validation, self.test) < 0 or self.training == 0:
            raise ValueError(
                "training must be positive, validation and test not negative, "
                f"got {self.training}, {self.validation} and {self.test}"
            )
        if self.seed < 0 or self.split_seed < 0:
            raise ValueError(
                f"seed and split_seed must be at least 0, got {self.seed} and {self.split_seed}"
            )
        if self.training + self.validation > self.training_file:
            raise ValueError(
                f"training and validation must fit into training_file = {self.training_file}, "
                f"got {self.training} + {self.validation}"
            )

    @property
    def _needed(self) -> int:
        # A published training file may be longer or shorter than one made here.
        return self.training + self.validation

    @property
    def grid(self) -> tuple[int, int]:
        return self.resolution, self.resolution

    def files(self, folder: Path) -> list[Path]:
        """The files of this recipe, whether they exist or not."""
        return [folder / file_name(which, self.resolution) for which in ("train", "test")]

    def prepare(
        self, folder: Path, device: torch.device | str = "cpu", console: Console | None = None
    ) -> None:
        """Make the files that are missing. A file that is there is checked and kept."""
        console = console or Terminal()
        for which in ("train", "test"):
            path = folder / file_name(which, self.resolution)
            if not path.exists():
                self.make(path, which, device=device, console=console)
                continue
            file = self._open(path, self._needed if which == "train" else self.test)
            if file.law is not None and file.law.get("seed") != self.seed:
                console.print(f"{path.name}: kept, made with seed {file.law.get('seed')}")
        reflected = folder / reflected_name(self.resolution)
        if self.symmetries == "square" and not reflected.exists():
            self.make_reflected(reflected, device=device, console=console)

    def make(
        self,
        path: Path,
        which: Literal["train", "test"],
        *,
        device: torch.device | str,
        console: Console,
        batch_size: int | None = None,
        force: bool = False,
    ) -> bool:
        """Make one file, going on from an unfinished one; False if it was there already."""
        if not 1 <= self.resolution < self.fine or self.fine % self.resolution:
            raise DataError(
                f"{path}: cannot be made, resolution {self.resolution} must divide fine "
                f"{self.fine} and be smaller"
            )
        # The test file continues where the training file ends: no sample is in both.
        start = 0 if which == "train" else self.training_file
        count = self.training_file if which == "train" else self.test
        law = self._law(start, count)
        if path.exists() and settle_existing(path, law, _law_of(path, force), force=force):
            return False

        def produce(first: int, stop: int) -> dict[str, np.ndarray]:
            inputs, solutions = darcy.generate(
                stop - first,
                self.resolution,
                self.seed,
                start=start + first,
                fine=self.fine,
                device=device,
            )
            return {"x": inputs.cpu().numpy(), "y": solutions.cpu().numpy()}

        shape = (self.resolution, self.resolution)
        plan = _plan(path, law, count, shape, {})
        return _make(plan, produce, device, console, batch_size, force)

    def make_reflected(
        self,
        path: Path,
        *,
        device: torch.device | str,
        console: Console,
        batch_size: int | None = None,
        force: bool = False,
    ) -> bool:
        """Make the training rows again with their reflections, taken on the fine grid."""
        train = self._open(path.with_name(file_name("train", self.resolution)), self._needed)
        if train.law != self._law(0, len(train)):
            raise DataError(
                f"{train.path}: was not made by these settings, so its samples cannot be made "
                'again with reflections; use symmetries "transpose", which needs none'
            )
        rows = self._partition(train).training
        law = {**train.law, "rows": "training", "reflections": 4, "split_seed": self.split_seed}
        law["training"] = self.training
        if path.exists() and settle_existing(path, law, _law_of(path, force), force=force):
            return False

        def produce(first: int, stop: int) -> dict[str, np.ndarray]:
            return self._reflected(rows[first:stop], device)

        shape = (4, self.resolution, self.resolution)
        plan = _plan(path, law, len(rows), shape, {"rows": rows})
        return _make(plan, produce, device, console, batch_size, force)

    def _reflected(self, rows: np.ndarray, device: torch.device | str) -> dict[str, np.ndarray]:
        """Samples reflected on no axis, the first, the second and both; then put on the grid."""
        nodes = _CHUNK_NODES.get(torch.device(device).type, 2**21)
        at_once = max(1, nodes // self.fine**2)
        inputs, solutions = [], []
        for first in range(0, len(rows), at_once):
            fields = [
                darcy.sample_coefficient(1, self.fine + 1, self.seed, start=int(row), device=device)
                for row in rows[first : first + at_once]
            ]
            coefficient = torch.cat(fields)
            high = self._reflections(coefficient) == darcy.HIGH
            inputs.append(high.cpu().numpy())
            solutions.append(self._reflections(darcy.solve(coefficient)).float().cpu().numpy())
        return {"x": np.concatenate(inputs), "y": np.concatenate(solutions)}

    def _reflections(self, field: Tensor) -> Tensor:
        axes: tuple[tuple[int, ...], ...] = ((), (1,), (2,), (1, 2))
        moved = [darcy.subsample(field.flip(flipped), self.resolution) for flipped in axes]
        return torch.stack(moved, dim=1)

    def load(
        self,
        folder: Path,
        device: torch.device | str = "cpu",
        *,
        augment: bool = False,
        console: Console | None = None,
    ) -> tuple[TrainingSplit[Samples], ValidationSplit[Samples]]:
        """Training and validation, on the device. The test file is not opened."""
        train = self._open(folder / file_name("train", self.resolution), self._needed)
        partition = self._partition(train)
        inputs, solutions = _read(train, partition.validation, device)
        validation = GridSamples.fully_observed(inputs, solutions).on_grid(self.validation_grid)
        inputs, solutions = _read(train, partition.training, device)
        samples: Samples = GridSamples.fully_observed(inputs, solutions)
        if augment:
            samples = self._movable(train, partition, inputs, solutions)
        return TrainingSplit(samples), ValidationSplit(validation)

    def _movable(
        self, train: FieldFile, partition: Partition, inputs: Tensor, solutions: Tensor
    ) -> SquareSamples:
        """Training samples with their symmetries, and a check that reflections are of them."""
        if self.symmetries == "transpose":
            return SquareSamples(inputs[:, None], solutions[:, None])
        path = train.path.with_name(reflected_name(self.resolution))
        reflected = open_reflected(path)
        stored_rows = reflected.rows
        if stored_rows is None or not np.array_equal(stored_rows.numpy(), partition.training):
            raise DataError(f"{path}: holds other rows than the training split of {train.path}")
        inputs_4, solutions_4 = _read(reflected, np.arange(len(reflected)), inputs.device)
        if not torch.equal(inputs_4[:, 0], inputs):
            raise DataError(f"{path}: holds reflections of other samples than {train.path}")
        return SquareSamples(inputs_4, solutions_4)

    def fingerprint(self, folder: Path) -> dict[str, Any]:
        """By which the data of a run are known again: their splits, and the size of a few rows."""
        train = self._open(folder / file_name("train", self.resolution), self._needed)
        partition = self._partition(train)
        rows = np.concatenate([looked_at(partition.training), looked_at(partition.validation)])
        sizes = [
            u.double().square().mean().sqrt().item() for _, _, b in train.blocks(rows) for u in b
        ]
        return {"splits": [partition.digest], "sizes": sizes}

    def load_test(self, folder: Path, device: torch.device | str = "cpu") -> TestSplit[Samples]:
        """The first `test` samples of the test file on the whole grid."""
        file = self._open(folder / file_name("test", self.resolution), self.test)
        inputs, solutions = _read(file, np.arange(self.test), device)
        samples = GridSamples.fully_observed(inputs, solutions)
        return TestSplit(samples, values=(("a", ""),), targets=(("u", ""),))

    def _law(self, start: int, count: int) -> Law:
        return {
            "equation": "-div(a grad u) = 1 on the unit square, u = 0 on its boundary",
            "coefficient": f"{darcy.HIGH} where a Gaussian field is positive, else {darcy.LOW}",
            "field": f"covariance (-Laplace + {darcy.TAU}^2)^-{darcy.ALPHA}, Neumann, mean zero",
            "solver": "fst.data.darcy.solve, float64",
            "seed": self.seed,
            "start": start,
            "samples": count,
            "resolution": self.resolution,
            "fine": self.fine,
            "version": package_version(),
        }

    def _open(self, path: Path, at_least: int) -> FieldFile:
        file = open_fields(path)
        if file.resolution != self.resolution:
            raise DataError(
                f"{path}: holds a {file.resolution} × {file.resolution} grid, "
                f"expected {self.resolution} × {self.resolution}"
            )
        if len(file) < at_least:
            raise DataError(f"{path}: holds {len(file)} samples, expected at least {at_least}")
        return file

    def _partition(self, train: FieldFile) -> Partition:
        counts = {"training": self.training, "validation": self.validation, "test": 0}
        return Partition.drawn(len(train), **counts, seed=self.split_seed)


def _plan(
    path: Path, law: Law, rows: int, shape: tuple[int, ...], constants: dict[str, np.ndarray]
) -> Plan:
    columns = {"x": Column(shape, "bool"), "y": Column(shape, "float32")}
    return Plan(path, law, rows, columns, constants, {})


def _make(
    plan: Plan,
    produce: Callable[[int, int], dict[str, np.ndarray]],
    device: torch.device | str,
    console: Console,
    batch_size: int | None,
    force: bool,
) -> bool:
    batch_size = batch_size or _BATCH.get(torch.device(device).type, 16)
    write_rows(plan, produce, batch_size=batch_size, console=console, force=force)
    convert_part(plan)
    return True


def _read(file: FieldFile, rows: np.ndarray, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Coefficients and solutions of the given rows, a block at a time."""
    shape = (len(rows), *file.inputs.shape[1:])
    coefficients = torch.empty(shape, device=device)
    solutions = torch.empty(shape, device=device)
    for where, high, block in file.blocks(rows):
        coefficients[where] = torch.where(high, darcy.HIGH, darcy.LOW).to(device)
        solutions[where] = block.to(device)
    return coefficients, solutions


def _law_of(path: Path, force: bool) -> Law | None:
    if force:
        return None
    reflected = path.stem.endswith("reflected")
    return (open_reflected(path) if reflected else open_fields(path)).law
