"""Dataclasses of NumPy arrays as compressed .npz files, read without unpickling anything."""

import io
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import jaxtyped

from fst.data.errors import DataError, reading, writing
from fst.io import write_atomically

Array = np.ndarray
Saved = TypeVar("Saved")
# Figures of larger numbers take for ever; anchors and their scales lie in about a unit square.
LARGEST = {"anchors": 1e6, "length_scales": 1e6}


def save_fields(path: Path, saved: Any) -> None:
    """Replace the file by the arrays of a dataclass, whole or not at all."""
    buffer = io.BytesIO()
    arrays = {each.name: getattr(saved, each.name) for each in fields(saved)}
    np.savez_compressed(buffer, **arrays)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, buffer.getvalue())


def read_arrays(path: Path, kind: type[Saved]) -> Saved:
    """A dataclass of arrays from a file, each of the kind and shape that its annotation says.

    Letters stand for one size in all arrays.
    """
    with reading(path, "saved fields (.npz)"), np.load(path, allow_pickle=False) as file:
        arrays = {each.name: file[each.name] for each in fields(kind)}  # type: ignore[arg-type]
    with jaxtyped("context"):
        for each in fields(kind):  # type: ignore[arg-type]
            array: Array = arrays[each.name]
            expected: Any = each.type
            if not isinstance(array, expected):
                kind_name, _, shape = expected.__name__.partition("[")
                raise DataError(
                    f"{path}: {each.name} must have shape {shape[:-1]} of {kind_name} like the "
                    f"other arrays, got {array.dtype} of shape {array.shape}"
                )
            largest = LARGEST.get(each.name, 1e30)
            if array.dtype.kind == "f" and not (np.abs(array) <= largest).all():
                raise DataError(f"{path}: {each.name} must be finite and at most {largest:g}")
    return kind(**arrays)


def stored_names(path: Path) -> set[str]:
    """Which arrays a file holds."""
    with reading(path, "saved fields (.npz)"), np.load(path, allow_pickle=False) as file:
        return set(file.files)
