"""Darcy samples in NeuralOperator's layout: `darcy_{train,test}_{resolution}.pt`.

A PyTorch file holding a dictionary: `x` (samples, r, r) bool, True where the coefficient is high,
and `y` (samples, r, r) float32, the solution. A file made here also has its `law` as JSON text.
Files are opened memory-mapped and without unpickling (`weights_only=True`): a file from elsewhere
cannot run code, and only the rows asked for are read.

`darcy_train_{resolution}_reflected.pt` is our own addition for augmentation: `x` and `y` are
(samples, 4, r, r), each sample reflected on no axis, the first, the second and both, and `rows`
says which rows of the training file they are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fst.data.errors import DataError, reading, reading_hdf5, writing
from fst.data.row_writer import Law, Plan, first_not_finite, law_text, read_law
from fst.io import publish

LAYOUT = "a NeuralOperator .pt file with x (samples, r, r) bool and y (samples, r, r) float32"
REFLECTED = "a .pt file with x (samples, 4, r, r) bool, y (samples, 4, r, r) float32 and rows"
_BLOCK_ROWS = 64


def file_name(which: Literal["train", "test"], resolution: int) -> str:
    return f"darcy_{which}_{resolution}.pt"


def reflected_name(resolution: int) -> str:
    return f"darcy_train_{resolution}_reflected.pt"


@dataclass(frozen=True)
class FieldFile:
    """Memory-mapped coefficients and solutions. The layout has been checked, the numbers not."""

    path: Path
    inputs: Bool[Tensor, "n *r"]
    solutions: Float[Tensor, "n *r"]
    rows: Int[Tensor, " n"] | None
    law: Law | None

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def resolution(self) -> int:
        return self.inputs.shape[-1]

    def blocks(self, rows: Int[np.ndarray, " n"]) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """The given rows in order, as (where they go, inputs, solutions), a block at a time."""
        for start in range(0, len(rows), _BLOCK_ROWS):
            index = torch.from_numpy(rows[start : start + _BLOCK_ROWS])
            solutions = self.solutions[index]
            bad = first_not_finite(solutions.numpy())
            if bad is not None:
                raise DataError(
                    f"{self.path}: solution {int(index[bad])} holds NaN or infinity; "
                    "expected finite numbers"
                )
            yield slice(start, start + len(index)), self.inputs[index], solutions


def open_fields(path: Path) -> FieldFile:
    """Check a NeuralOperator file's layout and map it into memory."""
    return _open(path, LAYOUT, axes=3)


def open_reflected(path: Path) -> FieldFile:
    """Check a file of reflected samples and map it into memory."""
    file = _open(path, REFLECTED, axes=4)
    rows = file.rows
    if rows is None or rows.shape != (len(file),) or file.inputs.shape[1] != 4:
        raise DataError(f"{path}: expected {REFLECTED}, got x {tuple(file.inputs.shape)}")
    return file


def _open(path: Path, layout: str, axes: int) -> FieldFile:
    with reading(path, layout):
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected {layout}, got a {type(content).__name__}")
    inputs = _tensor(path, content, "x", torch.bool, axes, layout)
    solutions = _tensor(path, content, "y", torch.float32, axes, layout)
    if inputs.shape != solutions.shape:
        raise DataError(
            f"{path}: x and y must have one shape, "
            f"got {tuple(inputs.shape)} and {tuple(solutions.shape)}"
        )
    rows = None if "rows" not in content else _tensor(path, content, "rows", torch.int64, 1, layout)
    return FieldFile(path, inputs, solutions, rows, read_law(path, content.get("law")))


def _tensor(
    path: Path, content: dict[object, object], key: str, dtype: torch.dtype, axes: int, layout: str
) -> Tensor:
    value = content.get(key)
    if not isinstance(value, Tensor):
        keys = ", ".join(map(str, content)) or "nothing"
        raise DataError(f"{path}: has no tensor {key}, only {keys}; expected {layout}")
    plain = value.layout == torch.strided and value.device.type == "cpu" and not value.is_nested
    if not plain or value.untyped_storage().nbytes() < value.numel() * value.element_size():
        raise DataError(f"{path}: the numbers of {key} are not all stored; expected {layout}")
    right_shape = value.ndim == axes and (axes == 1 or value.shape[-1] == value.shape[-2])
    if value.dtype != dtype or not right_shape or value.numel() == 0:
        raise DataError(
            f"{path}: {key} is {value.dtype} of shape {tuple(value.shape)}; expected {layout}"
        )
    return value


def convert_part(plan: Plan) -> None:
    """Make the `.pt` file of a complete part, atomically, and remove the part."""
    with reading_hdf5(plan.part, "an unfinished file of fst") as file:
        # The part's arrays are contiguous, so they can be mapped and copied without being loaded.
        content: dict[str, object] = {
            name: torch.from_numpy(
                np.memmap(plan.part, stored.dtype, "c", stored.id.get_offset(), stored.shape)
            )
            for name, stored in file.items()
        }
    content["law"] = law_text(plan.law)
    saving = plan.part.with_name(plan.part.name + ".pt")
    with writing(plan.path):
        torch.save(content, saving)
        publish(saving, plan.path)
        plan.part.unlink()
