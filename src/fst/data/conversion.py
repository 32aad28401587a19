"""Grids, tables and meshes as the samples that `write_points` takes.

Enters: NumPy arrays with axes, an xarray `Dataset` or netCDF file, a pandas table, meshio meshes.
Leaves: `PointFunctions`: samples with their domain, names and units. The packages are imported when
they are needed, and named where they are missing.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from fst.data.files import DataError, blame, reading
from fst.data.point_files import (
    GROUPS,
    REFUSED,
    Label,
    Labels,
    PointFunctions,
    PointSample,
    real_points,
)
from fst.types import Domain, check_argument


def from_grid(
    values: Mapping[str, ArrayLike],
    targets: Mapping[str, ArrayLike],
    axes: Mapping[str, ArrayLike],
    condition: Mapping[str, ArrayLike] | None = None,
    units: Mapping[str, str] | None = None,
) -> PointFunctions:
    """Functions on one grid: each of `values` and `targets` is (samples, *axes), by name.

    `axes` are the coordinates of the grid's axes, in their order, and `condition` holds one number
    a sample. What a masked array hides is left out of its sample.
    """
    for argument, named in (("values", values), ("targets", targets), ("axes", axes)):
        check_argument(argument, named, Mapping)
    _check_named(values=values, targets=targets, axes=axes)
    lines = {name: _numbers(f"axis {name}", line) for name, line in axes.items()}
    bad = [name for name, line in lines.items() if line.ndim != 1 or len(line) == 0]
    if bad:
        what = f"axis {bad[0]} has shape {lines[bad[0]].shape}"
        raise ValueError(f"axes must hold numbers of one dimension; {what}")
    points = np.stack(np.meshgrid(*lines.values(), indexing="ij"), axis=-1)
    shape, points = points.shape[:-1], points.reshape(-1, len(lines))
    count = len(np.ma.asarray(next(iter(targets.values()))))
    stacked = [
        np.ma.stack([_shaped(name, field, (count, *shape)) for name, field in fields.items()], -1)
        for fields in (values, targets)
    ]
    given = [_shaped(name, numbers, (count,)) for name, numbers in (condition or {}).items()]
    conditions = np.stack(given, axis=-1) if given else [None] * count
    flat = len(points), -1
    samples = [
        PointSample(points, seen.reshape(flat), points, asked.reshape(flat), given)
        for seen, asked, given in zip(*stacked, conditions, strict=True)
    ]
    domain = bounding_box([PointSample(points, points, points, points)])  # of hidden ones, too
    return _functions(samples, lines, values, targets, condition or {}, units or {}, domain)


def from_xarray(
    data: Any,
    values: Sequence[str],
    targets: Sequence[str],
    *,
    sample: str = "sample",
    condition: Sequence[str] = (),
) -> PointFunctions:
    """Functions on the grid of an xarray `Dataset`, or of a netCDF file, with its units. `sample`
    is the dimension that counts functions; the others are the axes."""
    if isinstance(data, str | Path):
        data = read_netcdf(Path(data))
    if not isinstance(data, optional_package("xarray", "netcdf").Dataset):
        raise TypeError(f"data must be an xarray Dataset or a path, got {type(data).__name__}")
    _check_named(values=values, targets=targets)
    names = [*values, *targets, *condition]
    missing = [name for name in names if name not in data]
    if missing or sample not in data[targets[0]].dims:
        what = f"no variable {missing[0]!r}" if missing else f"no dimension {sample!r} in targets"
        raise DataError(f"the data set has {what}; it has {', '.join(map(str, data.variables))}")
    order = [sample, *(axis for axis in data[targets[0]].dims if axis != sample)]

    def read(name: str) -> np.ma.MaskedArray:
        found, wanted = data[name], order if name not in condition else [sample]
        if {*found.dims} != {*wanted}:
            expected, got = (", ".join(map(str, dims)) for dims in (wanted, found.dims))
            raise DataError(
                f"variable {name!r} must have dimensions {expected}, got {got or 'none'}"
            )
        # netCDF readers give NaN where nothing is
        return np.ma.masked_invalid(found.transpose(*wanted).values)

    found = from_grid(
        {name: read(name) for name in values},
        {name: read(name) for name in targets},
        {axis: data[axis].values for axis in order[1:]},
        {name: np.ma.getdata(read(name)) for name in condition},
        {str(name): str(data[name].attrs.get("units", "")) for name in [*names, *order[1:]]},
    )
    if sample not in data.coords:
        return found
    known = zip(found.samples, data[sample].values, strict=True)
    return replace(found, samples=[replace(each, name=str(label)) for each, label in known])


def from_table(
    table: Any,
    coordinates: Sequence[str],
    values: Sequence[str],
    targets: Sequence[str],
    *,
    sample: str = "sample",
    observed: str | None = None,
    condition: Sequence[str] = (),
    units: Mapping[str, str] | None = None,
) -> PointFunctions:
    """Functions from a pandas table or CSV file with one row a point.

    A row is an observation where all of `values` are there and, if named, the column `observed` is
    true; it is a query where all of `targets` are there. `condition` columns hold one number a
    sample.
    """
    if isinstance(table, str | Path):
        pandas = optional_package("pandas", "tables")
        with reading(Path(table), "a CSV table"):
            table = pandas.read_csv(table)
    _check_named(coordinates=coordinates, values=values, targets=targets)
    names = [sample, *coordinates, *values, *targets, *condition, *([observed] if observed else [])]
    missing = [name for name in names if name not in table]
    if missing:
        raise DataError(
            f"the table has no column {missing[0]!r}; it has {', '.join(map(str, table))}"
        )
    for name in (*coordinates, *values, *targets, *condition):
        _numbers(f"column {name}", table[name])
    if observed and not set(table[observed].dropna()) <= {True, False}:
        raise DataError(f"column {observed} must hold true and false, or 1 and 0")
    samples = []
    for label, rows in table.groupby(sample, sort=False):
        seen = rows[[*coordinates, *values]].notna().all(axis=1)
        if observed:
            seen &= rows[observed].eq(True)
        asked = rows[[*coordinates, *targets]].notna().all(axis=1)
        given = rows[list(condition)].to_numpy(np.float64)
        if not np.array_equal(given, np.broadcast_to(given[0], given.shape), equal_nan=True):
            raise DataError(f"sample {label}: {', '.join(condition)} must not change within it")
        sample_points = PointSample(
            rows.loc[seen, [*coordinates]].to_numpy(np.float64),
            rows.loc[seen, [*values]].to_numpy(np.float64),
            rows.loc[asked, [*coordinates]].to_numpy(np.float64),
            rows.loc[asked, [*targets]].to_numpy(np.float64),
            given[0] if condition else None,
            name=str(label),
        )
        samples.append(sample_points)
    return _functions(samples, coordinates, values, targets, condition, units or {})


def from_meshes(
    meshes: Sequence[Any],
    values: Sequence[str],
    targets: Sequence[str],
    condition: Mapping[str, ArrayLike] | None = None,
    units: Mapping[str, str] | None = None,
) -> PointFunctions:
    """Functions at the points of meshio meshes, or of files that meshio reads, one a sample.

    `values` and `targets` name the meshes' point data; vectors become several channels. An axis on
    which all points of all meshes agree, as z in a plane, is left out. Triangles (quadrilaterals
    are divided) are kept for pictures.
    """
    if isinstance(meshes, str | Path):
        raise TypeError(f"meshes must be a sequence with one a sample, got {meshes!r}")
    _check_named(values=values, targets=targets)
    opened = [read_mesh(Path(m)) if isinstance(m, str | Path) else m for m in meshes]
    if not opened:
        raise ValueError("meshes must hold at least one mesh, got none")
    everywhere = np.concatenate([mesh.points for mesh in opened])
    kept = np.flatnonzero(np.ptp(everywhere, axis=0) > 0)
    given = [_shaped(name, field, (len(opened),)) for name, field in (condition or {}).items()]
    samples = []
    for row, mesh in enumerate(opened):
        points = mesh.points[:, kept]
        seen, asked = (_channels(row, mesh, names) for names in (values, targets))
        sample = PointSample(
            points,
            np.stack([*seen.values()], axis=-1),
            points,
            np.stack([*asked.values()], axis=-1),
            [float(field[row]) for field in given] or None,
            cells=_triangles(mesh) if len(kept) == 2 else None,
            name=Path(meshes[row]).stem if isinstance(meshes[row], str | Path) else None,
        )
        samples.append(sample)
    axes = ["xyz"[axis] for axis in kept]
    return _functions(samples, axes, seen, asked, condition or {}, units or {})


def _check_named(**given: Sequence[str] | Mapping[str, Any]) -> None:
    for argument, names in given.items():
        if len(names) == 0:
            raise ValueError(f"{argument} must name at least one, got none")


def _channels(row: int, mesh: Any, names: Sequence[str]) -> dict[str, Float[np.ndarray, " n"]]:
    """Channels by name; of a vector they are called by its name and their numbers."""
    found: dict[str, np.ndarray] = {}
    for name in names:
        if name not in mesh.point_data:
            there = ", ".join(mesh.point_data) or "none"
            raise DataError(f"mesh {row} has no point data {name!r}; it has {there}")
        columns = np.reshape(mesh.point_data[name], (len(mesh.points), -1)).T
        parts = [name] if len(columns) == 1 else [f"{name} {part}" for part in range(len(columns))]
        found |= zip(parts, columns, strict=True)
    return found


def _triangles(mesh: Any) -> np.ndarray | None:
    found = [block.data for block in mesh.cells if block.type == "triangle"]
    for block in mesh.cells:
        if block.type == "quad":
            found += [block.data[:, [0, 1, 2]], block.data[:, [0, 2, 3]]]
    return np.concatenate(found) if found else None


def _numbers(name: str, given: ArrayLike) -> Float[np.ndarray, "..."]:
    """As float64; a `DataError` where they could be taken for others, or are none."""
    array = np.asarray(given)
    if array.dtype.kind in REFUSED:
        raise DataError(
            f"{name} must hold real numbers, got {array.dtype}; {REFUSED[array.dtype.kind]}"
        )
    try:
        return array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} must hold numbers ({error})") from None


def _shaped(name: str, field: ArrayLike, shape: tuple[int, ...]) -> np.ma.MaskedArray:
    array: np.ma.MaskedArray = np.ma.asarray(field)
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
    return array


def _functions(
    samples: Sequence[PointSample],
    axes: Sequence[str] | Mapping[str, Any],
    values: Sequence[str] | Mapping[str, Any],
    targets: Sequence[str] | Mapping[str, Any],
    condition: Sequence[str] | Mapping[str, Any],
    units: Mapping[str, str],
    domain: Domain | None = None,
) -> PointFunctions:
    if not samples:
        raise ValueError("there must be at least one sample, got none")
    parts = (axes, values, targets, condition)
    labels = Labels(*([Label(name, units.get(name, "")) for name in part] for part in parts))
    return PointFunctions(samples, domain or bounding_box(samples), labels)


def bounding_box(samples: Sequence[PointSample]) -> Domain:
    """The smallest box that holds all points but masked ones, and those that are not finite."""
    edges: list[np.ndarray] = []
    for row, sample in enumerate(samples):
        check_argument(f"sample {row}", sample, PointSample)
        for group in GROUPS:
            with blame(f"sample {row}"):
                points, _ = real_points(sample, group, np.float64)
            points = points[np.isfinite(points).all(axis=1)]
            if len(points):
                edges += [points.min(axis=0), points.max(axis=0)]
    axes = {len(edge) for edge in edges}
    if len(axes) != 1:
        raise ValueError(f"samples must have points of as many axes, got {axes or 'none'}")
    low, high = np.min(edges, axis=0), np.max(edges, axis=0)
    return Domain(tuple(low.tolist()), tuple(high.tolist()))


def read_mesh(path: Path) -> Any:
    meshio = optional_package("meshio", "mesh")
    with reading(path, "a mesh that meshio reads"):
        return meshio.read(path)


def read_netcdf(path: Path) -> Any:
    """A netCDF file as an xarray `Dataset`, in memory."""
    xarray = optional_package("xarray", "netcdf")
    with reading(path, "a netCDF file"), xarray.open_dataset(path) as opened:
        return opened.load()


def optional_package(name: str, extra: str) -> Any:
    """A package that only some users need, or how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(
            f"this needs {name}: pip install 'function-space-transformer[{extra}]'"
        ) from error
