"""The Darcy data of a recipe: coefficient fields in, solution fields out, on one square grid.

Enters: a folder with NeuralOperator's `darcy_train_{r}.pt` and `darcy_test_{r}.pt`, made here where
they are missing. Leaves: training and validation, both drawn by seed from the training file, or,
by a separate call, the test split. Inputs are the coefficient's values (0.36 and 0.02), not the
stored truth values; standardised, the two are the same.

NeuralOperator's layout is a PyTorch file with a dictionary: `x` (samples, r, r) bool, True where
the coefficient is high, and `y` (samples, r, r) float32, the solution. A file made here also has
its provenance as JSON text under `law`. Files are opened memory-mapped and without unpickling
(`weights_only=True`): a file from elsewhere cannot run code, and only the rows asked for are read.
Our own `darcy_train_{r}_reflected.pt`, for augmentation, has `x` and `y` of shape (samples, 4, r,
r), each sample reflected on no axis, the first, the second and both, and in `rows` the rows of the
training file that they are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from rich.console import Console
from torch import Tensor

from fst.data import darcy, files
from fst.data.files import DataError, Plan, Produce, Provenance
from fst.data.samples import GridSamples, Samples
from fst.data.source import MadeData, Partition, TestSplit
from fst.io import publish
from fst.types import Device, check_fields
from fst.version import __version__

LAYOUT = "a NeuralOperator .pt file with x (samples, r, r) bool and y (samples, r, r) float32"
REFLECTED = "a .pt file with x (samples, 4, r, r) bool, y (samples, 4, r, r) float32 and rows"
ENDING = "_reflected"  # of the names of such files
_BLOCK_ROWS = 64
_BATCH = {"cpu": 16, "cuda": 256}
# Fine-grid samples solved at once for reflections: some 20 float64 arrays of their size.
_CHUNK_NODES = {"cpu": 2**21, "cuda": 2**25}


@dataclass(frozen=True)
class DarcyData(MadeData):
    """Solutions of −∇·(a∇u) = 1 on the unit square, zero on its boundary, a of two values."""

    value_names = (("a", ""),)
    target_names = (("u", ""),)
    limits = (
        "The pressure of piecewise constant coefficients with two values and a constant source on "
        "the unit square, zero on its boundary; the coefficient observed on the whole grid. Other "
        "coefficients, sources and boundary values were not tested."
    )

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
        check_fields(self, training=1, validation=0, test=0, seed=0, split_seed=0)
        if self.training + self.validation > self.training_file:
            raise ValueError(
                f"training and validation must fit into training_file = {self.training_file}, "
                f"got {self.training} + {self.validation}"
            )

    @property
    def grid(self) -> tuple[int, int]:
        return self.resolution, self.resolution

    def parts(self, folder: Path) -> dict[Path, tuple[str]]:
        """A training and a test file, and where it is needed one of reflected samples."""
        kinds = ("train", "test") + (("reflected",) if self.symmetries == "square" else ())
        return {self._path(folder, which): (which,) for which in kinds}

    def _path(self, folder: Path, which: str) -> Path:
        """NeuralOperator's name; that of reflected training samples has an ending."""
        if which == "reflected":
            return folder / f"darcy_train_{self.resolution}{ENDING}.pt"
        return folder / f"darcy_{which}_{self.resolution}.pt"

    def plan(self, path: Path, device: torch.device, *part: Any) -> tuple[Plan, Produce, int]:
        if not 1 <= self.resolution < self.fine or self.fine % self.resolution:
            raise DataError(
                f"{path}: cannot be made, resolution {self.resolution} must divide fine "
                f"{self.fine} and be smaller"
            )
        if part == ("reflected",):
            return self._plan_reflected(path, device)
        # The test file continues where the training file ends: no sample is in both.
        start = 0 if part == ("train",) else self.training_file
        count = self.training_file if part == ("train",) else self.test

        def produce(first: int, stop: int) -> dict[str, np.ndarray]:
            settings = {"start": start + first, "fine": self.fine}
            inputs, solutions = darcy.generate(
                stop - first, self.resolution, self.seed, device=device, **settings
            )
            return {"x": inputs.cpu().numpy(), "y": solutions.cpu().numpy()}

        plan = Plan(path, self._provenance(start, count), count, _columns(self.grid), {}, {})
        return plan, produce, _BATCH.get(device.type, 16)

    def _plan_reflected(self, path: Path, device: torch.device) -> tuple[Plan, Produce, int]:
        """The training rows again with their reflections, taken on the fine grid."""
        train, partition = self.opened(self._path(path.parent, "train"), "train")
        wanted = self._provenance(0, len(train))
        # Another version of fst may have made it: loading compares the samples themselves.
        if (train.provenance or {}) | {"version": wanted["version"]} != wanted:
            raise DataError(
                f"{train.path}: was not made by these settings, so its samples cannot be made "
                'again with reflections; use symmetries "transpose", which needs none'
            )
        rows = partition.training
        drawn = {"rows": "training", "split_seed": self.split_seed, "training": self.training}
        provenance = wanted | drawn | {"reflections": 4}

        def produce(first: int, stop: int) -> dict[str, np.ndarray]:
            fields = [
                darcy.sample_coefficient(1, self.fine + 1, self.seed, start=int(row), device=device)
                for row in rows[first:stop]
            ]
            coefficient = torch.cat(fields)
            high = self._reflections(coefficient) == darcy.HIGH
            solutions = self._reflections(darcy.solve(coefficient)).float()
            return {"x": high.cpu().numpy(), "y": solutions.cpu().numpy()}

        plan = Plan(path, provenance, len(rows), _columns((4, *self.grid)), {"rows": rows}, {})
        return plan, produce, max(1, _CHUNK_NODES.get(device.type, 2**21) // self.fine**2)

    def _reflections(self, field: Tensor) -> Tensor:
        """Reflected on no axis, the first, the second and both; then put on the grid."""
        axes: tuple[tuple[int, ...], ...] = ((), (1,), (2,), (1, 2))
        moved = [darcy.subsample(field.flip(flipped), self.resolution) for flipped in axes]
        return torch.stack(moved, dim=1)

    def splits(
        self, folder: Path, device: torch.device, augment: bool, console: Console | None
    ) -> tuple[Samples, Samples]:
        """The test file is not opened."""
        ((train, partition),) = self.for_training(folder)
        fields = _read(train, partition.validation, device)
        validation = GridSamples.fully_observed(*fields).on_grid(self.validation_grid)
        fields = _read(train, partition.training, device)
        if not augment:
            return GridSamples.fully_observed(*fields), validation
        if self.symmetries == "transpose":
            return SquareSamples(*(field[:, None] for field in fields)), validation
        path = self._path(folder, "reflected")
        reflected = open_fields(path)
        if reflected.rows is None or not np.array_equal(reflected.rows, partition.training):
            raise DataError(f"{path}: holds other rows than the training split of {train.path}")
        moved = _read(reflected, np.arange(len(reflected)), device)
        if not torch.equal(moved[0][:, 0], fields[0]):
            raise DataError(f"{path}: holds reflections of other samples than {train.path}")
        return SquareSamples(*moved), validation

    def load_test(self, folder: Path, device: Device = "cpu") -> TestSplit[Samples]:
        """The first `test` samples of the test file on the whole grid."""
        file, partition = self.opened(self._path(folder, "test"), "test")
        samples = GridSamples.fully_observed(*_read(file, partition.test, device))
        return TestSplit(samples, values=self.value_names, targets=self.target_names)

    def _provenance(self, start: int, count: int) -> Provenance:
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
            "version": __version__,
        }

    def for_training(self, folder: Path) -> list[tuple["FieldFile", Partition]]:
        return [self.opened(self._path(folder, "train"), "train")]

    def layout(self, path: Path) -> "FieldFile":
        return open_fields(path)

    def rows_of(self, file: "FieldFile", *part: Any) -> Partition:
        if part == ("reflected",):
            return Partition.consecutive(len(file), 0, 0)
        found, wanted = file.resolution, self.resolution
        if found != wanted:
            raise ValueError(f"holds a {found} × {found} grid, expected {wanted} × {wanted}")
        # A published training file may be longer or shorter than one made here.
        at_least = self.training + self.validation if part == ("train",) else self.test
        if len(file) < at_least:
            raise ValueError(f"holds {len(file)} samples, expected at least {at_least}")
        if part == ("test",):
            return Partition.consecutive(0, 0, self.test)
        counts = {"training": self.training, "validation": self.validation, "test": 0}
        return Partition.drawn(len(file), **counts, seed=self.split_seed)

    def finish(self, plan: Plan) -> None:
        """Make the `.pt` file of the part, atomically, and remove the part."""
        with files.reading_hdf5(plan.part, "an unfinished file of fst") as file:
            # The part's arrays are contiguous, so they can be mapped and copied, not loaded.
            content: dict[str, object] = {
                name: torch.from_numpy(
                    np.memmap(plan.part, stored.dtype, "c", stored.id.get_offset(), stored.shape)
                )
                for name, stored in file.items()
            }
            content[files.STORED] = file.attrs[files.STORED]
        saving = plan.part.with_name(plan.part.name + ".pt")
        with files.writing(plan.path):
            torch.save(content, saving)
            publish(saving, plan.path)
            plan.part.unlink()


class SquareSamples(GridSamples):
    """Training samples moved by the symmetries of the square, under which the equation is the same.

    Swapping the axes is exact on any square grid. A reflection is not, if it only reverses the
    indices: the data set keeps the nodes (1 + jk)/N, k = N/resolution, of a fine grid, and
    reflected they are (N−1−jk)/N, off by (k−2)/N. At resolution 128 of N = 1,024 that is three
    quarters of a cell; measured, it moves the solution by 0.026 in relative L2 for one axis and
    0.039 for both, as much as the error of a trained model. So reflections are taken on the fine
    grid, when the sample is made, and stored: `coefficients` and `solutions` hold each sample `f`
    times, either once (f = 1: two symmetries, identity and swap) or once for each reflection
    (f = 4: all eight, exactly).
    """

    augmented = True

    def __init__(
        self, coefficients: Float[Tensor, "n f r r"], solutions: Float[Tensor, "n f r r"]
    ) -> None:
        plain = GridSamples.fully_observed(coefficients[:, 0], solutions[:, 0])
        super().__init__(**plain._parts())
        self.coefficients = coefficients
        self.solutions = solutions
        self.moves = solutions.shape[1], 2  # a stored reflection, and 1 where the axes are swapped

    def to(self, device: Device) -> Self:
        return type(self)(self.coefficients.to(device), self.solutions.to(device))

    def numbers(
        self, rows: Tensor, chosen: Tensor | None, augmentation: Int[Tensor, "b 2"] | None
    ) -> tuple[Float[Tensor, "b o"], Float[Tensor, "b k"]]:
        if augmentation is None:
            return super().numbers(rows, chosen, None)
        reflection, swapped = augmentation.unbind(dim=1)
        stored = (field[rows, reflection] for field in (self.coefficients, self.solutions))
        unmoved = (swapped == 0)[:, None, None]
        values, targets = (field.where(unmoved, field.mT).flatten(1) for field in stored)
        return values, targets if chosen is None else targets.gather(1, chosen)


@dataclass(frozen=True)
class FieldFile:
    """Memory-mapped coefficients and solutions. The layout has been checked, the numbers not."""

    path: Path
    inputs: Bool[Tensor, "n *r"]
    solutions: Float[Tensor, "n *r"]
    rows: Int[Tensor, " n"] | None
    provenance: Provenance | None

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def resolution(self) -> int:
        return self.inputs.shape[-1]

    def blocks(self, rows: Int[np.ndarray, " n"]) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and solutions of the given rows in order, some at a time."""
        for start in range(0, len(rows), _BLOCK_ROWS):
            some = rows[start : start + _BLOCK_ROWS]
            inputs, solutions = self.inputs[some], self.solutions[some]
            files.check_rows_finite(self.path, "solution", solutions.numpy(), some)
            yield inputs, solutions


def _read(file: FieldFile, rows: np.ndarray, device: Device) -> tuple[Tensor, Tensor]:
    """Coefficients and solutions of the given rows, a block at a time."""
    shape = len(rows), *file.inputs.shape[1:]
    coefficients, solutions = (torch.empty(shape, device=device) for _ in range(2))
    stop = 0
    for high, block in file.blocks(rows):
        start, stop = stop, stop + len(block)
        coefficients[start:stop] = torch.where(high, darcy.HIGH, darcy.LOW).to(device)
        solutions[start:stop] = block.to(device)
    return coefficients, solutions


def open_fields(path: Path) -> FieldFile:
    """Check a file's layout, NeuralOperator's or that of reflected samples; map it into memory."""
    reflected = path.stem.endswith(ENDING)
    layout, axes = (REFLECTED, 4) if reflected else (LAYOUT, 3)
    with files.reading(path, layout):
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    with files.blame(path):
        if not isinstance(content, dict):
            raise ValueError(f"expected {layout}, got a {type(content).__name__}")
        inputs = _tensor(content, "x", torch.bool, axes, layout)
        solutions = _tensor(content, "y", torch.float32, axes, layout)
        if inputs.shape != solutions.shape:
            shapes = f"{tuple(inputs.shape)} and {tuple(solutions.shape)}"
            raise ValueError(f"x and y must have one shape, got {shapes}")
        rows = _tensor(content, "rows", torch.int64, 1, layout) if reflected else None
        if rows is not None and (len(rows) != len(inputs) or inputs.shape[1] != 4):
            raise ValueError(f"expected {layout}, got x {tuple(inputs.shape)}")
    provenance = files.read_provenance(path, content.get(files.STORED))
    return FieldFile(path, inputs, solutions, rows, provenance)


def _tensor(
    content: dict[object, object], key: str, dtype: torch.dtype, axes: int, layout: str
) -> Tensor:
    value = content.get(key)
    if not isinstance(value, Tensor):
        keys = ", ".join(map(str, content)) or "nothing"
        raise ValueError(f"has no tensor {key}, only {keys}; expected {layout}")
    plain = value.layout == torch.strided and value.device.type == "cpu" and not value.is_nested
    if not plain or value.untyped_storage().nbytes() < value.numel() * value.element_size():
        raise ValueError(f"the numbers of {key} are not all stored; expected {layout}")
    shape = tuple(value.shape)
    right_shape = len(shape) == axes and (axes == 1 or shape[-1] == shape[-2])
    if value.dtype != dtype or not right_shape or value.numel() == 0:
        raise ValueError(f"{key} is {value.dtype} of shape {shape}; expected {layout}")
    return value


def _columns(shape: tuple[int, ...]) -> dict[str, np.dtype]:
    return {"x": np.dtype(("bool", shape)), "y": np.dtype(("float32", shape))}
