"""Meshes (.vtu) and grids (.nc) that `fst predict` takes as they are, as observations or queries.

Which axes, point data or variables are those of a model, the labels of its run say by name. What
was read is kept, so that the answer can be written in the same form.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fst.data.conversion import optional_package
from fst.data.files import DataError, reading
from fst.data.point_files import Label, Labels
from fst.types import Observations

MESH, GRID = ".vtu", ".nc"


def read_mesh(path: Path) -> Any:
    """One mesh, by meshio."""
    meshio = optional_package("meshio", "mesh")
    with reading(path, "a mesh that meshio reads"):
        return meshio.read(path)


def mesh_positions(mesh: Any, labels: Labels) -> Float[Tensor, "1 n s"]:
    """The points on the axes that were trained on; others, as z in a plane, are left out."""
    names = _names(labels.axes)
    known = [name for name in names if name in ("x", "y", "z")]
    axes = ["xyz".index(name) for name in known] if known == names else range(len(names))
    return torch.from_numpy(mesh.points[:, list(axes)].astype(np.float32))[None]


def mesh_observations(path: Path, labels: Labels) -> Observations:
    """The values at the points of a mesh: one sample."""
    mesh = read_mesh(path)
    columns = [_point_data(path, mesh, name) for name in _names(labels.values)]
    values = torch.from_numpy(np.stack(columns, axis=-1).astype(np.float32))
    return Observations(mesh_positions(mesh, labels), values[None])


def _point_data(path: Path, mesh: Any, name: str) -> Float[np.ndarray, " n"]:
    """One channel; of a vector it is called by the vector's name and its number."""
    vector, _, number = name.rpartition(" ")
    for known, column in ((name, 0), (vector, int(number) if number.isdigit() else 0)):
        if known in mesh.point_data:
            table = np.reshape(mesh.point_data[known], (len(mesh.points), -1))
            if column < table.shape[1]:
                return np.asarray(table[:, column])
    raise DataError(f"{path}: has no point data {name!r}; it has {_listed(mesh.point_data)}")


def read_grid(path: Path) -> Any:
    """A netCDF file as an xarray `Dataset`, in memory."""
    xarray = optional_package("xarray", "netcdf")
    with reading(path, "a netCDF file"), xarray.open_dataset(path) as opened:
        return opened.load()


def grid_positions(
    path: Path, data: Any, labels: Labels
) -> tuple[Float[Tensor, "1 n s"], tuple[int, ...]]:
    """The points of the grid, the last axis fastest, and its shape."""
    lines = [np.asarray(_variable(path, data, name)) for name in _names(labels.axes)]
    points = np.stack(np.meshgrid(*lines, indexing="ij"), axis=-1).astype(np.float32)
    return torch.from_numpy(points.reshape(1, -1, len(lines))), points.shape[:-1]


def grid_samples(path: Path, data: Any, labels: Labels) -> Any:
    """The coordinate that counts samples; None where the file holds one."""
    dimensions = _variable(path, data, _names(labels.values)[0]).dims
    others = [name for name in dimensions if name not in _names(labels.axes)]
    if len(others) > 1:
        raise DataError(f"{path}: more than one dimension counts samples: {_listed(others)}")
    return data[others[0]] if others else None


def grid_observations(path: Path, labels: Labels) -> Observations:
    """The values on a grid, of one sample or of several; NaN is left out."""
    data = read_grid(path)
    positions, _ = grid_positions(path, data, labels)
    samples = grid_samples(path, data, labels)
    order = [] if samples is None else list(samples.dims)
    arrays = [
        _variable(path, data, name).transpose(*order, *_names(labels.axes)).values
        for name in _names(labels.values)
    ]
    values = np.stack(arrays, axis=-1).reshape(-1, positions.shape[1], len(arrays))
    real = np.isfinite(values).all(axis=-1)
    condition = None
    if labels.condition and all(name in data for name in _names(labels.condition)):
        numbers = [np.atleast_1d(data[name].values) for name in _names(labels.condition)]
        condition = torch.from_numpy(np.stack(numbers, axis=-1).astype(np.float32))
    return Observations(
        positions.expand(len(values), -1, -1),
        torch.from_numpy(np.where(real[..., None], values, 0).astype(np.float32)),
        condition,
        None if real.all() else torch.from_numpy(real),
    )


def _variable(path: Path, data: Any, name: str) -> Any:
    if name not in data and name not in data.dims:
        raise DataError(f"{path}: has no variable {name!r}; it has {_listed(data.variables)}")
    return data[name]


def _names(labels: Sequence[Label | str]) -> list[str]:
    return [label if isinstance(label, str) else label.name for label in labels]


def _listed(names: Any) -> str:
    return ", ".join(map(str, names)) or "none"
