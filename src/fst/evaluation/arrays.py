"""Dataclasses of NumPy arrays as compressed .npz files, read without unpickling anything."""

import io
import zipfile
import zlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from fst.data.errors import DataError, reading, writing
from fst.pretrained import write_atomically

Array = np.ndarray


def save_fields(path: Path, saved: Any) -> None:
    """Replace the file by the arrays of a dataclass, whole or not at all."""
    buffer = io.BytesIO()
    arrays = {each.name: getattr(saved, each.name) for each in fields(saved)}
    np.savez_compressed(buffer, **arrays)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, buffer.getvalue())


def read_arrays(path: Path, kind: type) -> dict[str, Array]:
    """The arrays of a file that hold the fields of a dataclass."""
    names = [each.name for each in fields(kind)]
    with reading(path, "saved fields (.npz)"):
        try:
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in names}
        except (ValueError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"{path}: is no file of saved fields: {error}") from None


def stored_names(path: Path) -> set[str]:
    """Which arrays a file holds."""
    with reading(path, "saved fields (.npz)"), np.load(path, allow_pickle=False) as file:
        return set(file.files)


def check_shapes(
    path: Path, arrays: dict[str, Array], expected: dict[str, tuple[int, ...]]
) -> None:
    for name, shape in expected.items():
        if arrays[name].shape != shape:
            raise DataError(f"{path}: {name} must have shape {shape}, got {arrays[name].shape}")
