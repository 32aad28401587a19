"""The files of `fst predict`: observations and queries that enter, predictions that leave.

.npz files are read without unpickling; .csv files begin with a line that names their columns. A
prediction is written as .csv with one line a query, as .npz or .h5 with all arrays, as .vtu with
one mesh, or as .nc with a grid; with names and units where they are known.
"""

import csv
import io
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fst.commands.meshes_and_grids import GRID as GRID_FILE
from fst.commands.meshes_and_grids import (
    MESH,
    grid_observations,
    grid_positions,
    grid_samples,
    mesh_observations,
    mesh_positions,
    read_grid,
    read_mesh,
)
from fst.data.conversion import optional_package
from fst.data.files import DataError, reading
from fst.data.point_files import Label, Labels, check_resolution, read_points
from fst.data.point_samples import Ragged
from fst.io import FileError, read_object, write_file
from fst.operators import Operator
from fst.terminal import spreadsheet
from fst.types import Domain, Observations, check_queries

NAMED = (MESH, GRID_FILE)
GRID = re.compile(r"\d+(x\d+)*")
POINT_FILES = (".h5", ".hdf5")

Array = np.ndarray
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Queries:
    """Where to predict: a set of queries for each sample, or one set (a = 1) for all of them.

    `grid` folds the queries of a grid; `mask` is False where a query only pads.
    """

    positions: Float[Tensor, "a q s"]
    grid: tuple[int, ...] | None = None
    mask: Bool[Tensor, "a q"] | None = None


@dataclass(frozen=True)
class Prediction:
    """Predictions at queries; anchors and length scales for models that have them."""

    queries: Queries
    predictions: Float[Array, "b q c"]
    anchors: Float[Array, "b m s"] | None = None
    length_scales: Float[Array, "b m s"] | None = None

    def arrays(self) -> Arrays:
        mask = self.queries.mask
        found = {
            "queries": self.queries.positions.numpy(),
            "predictions": self.predictions,
            "grid": None if self.queries.grid is None else np.array(self.queries.grid),
            "mask": None if mask is None else mask.numpy(),
            "anchors": self.anchors,
            "length_scales": self.length_scales,
        }
        return {name: array for name, array in found.items() if array is not None}


@contextmanager
def blame(source: Path | str) -> Iterator[None]:
    """Name the file whose contents an error is about."""
    try:
        yield
    except FileError:
        raise
    except (ValueError, TypeError) as error:
        raise DataError(f"{source}: {error}") from None


def read_observations(
    path: Path, model: Operator, condition: tuple[float, ...], labels: Labels | None = None
) -> Observations:
    """The observations in a file, checked against the model.

    `condition` serves every sample of a file that holds none. `labels` name what is the model's in
    a mesh or a netCDF file.
    """
    with blame(path):
        check_resolution(model.domain)
        if path.suffix in POINT_FILES:
            file = read_points(path)
            rows = np.arange(len(file))
            positions, values, mask = Ragged.of(*file.observations(rows)).take()
            given = torch.from_numpy(file.conditions(rows)) if file.condition else None
            observations = Observations(positions, values, given, mask)
        elif path.suffix == ".npz":
            observations = _npz_observations(path)
        elif path.suffix == ".csv":
            axes = model.domain.axes
            table = _read_csv(path, axes + model.value_channels, "the axes, then the values")
            observations = Observations(table[None, :, :axes], table[None, :, axes:])
        elif path.suffix in NAMED:
            read = mesh_observations if path.suffix == MESH else grid_observations
            observations = read(path, _needed(labels))
        else:
            raise DataError(f"{path}: observations must be an .h5, .npz, .csv, .vtu or .nc file")
        if condition and observations.condition is not None:
            raise ValueError("holds a condition, and another one was given")
        if condition:
            every = torch.tensor([condition], dtype=torch.float32).expand(len(observations), -1)
            observations = replace(observations, condition=every)
        model.check(observations)
    return observations


def _needed(labels: Labels | None) -> Labels:
    if labels is None:
        raise ValueError("only a run folder knows the names by which such a file is read")
    return labels


def read_queries(source: Path | str, domain: Domain, labels: Labels | None = None) -> Queries:
    """The queries in a file, or the points of a grid over the domain, such as 201x1024."""
    path, mask, grid = Path(source), None, None
    with blame(source):
        check_resolution(domain)
        if GRID.fullmatch(str(source)) and not path.is_file():
            return grid_queries(str(source), domain)
        if path.suffix in POINT_FILES:
            file = read_points(path)
            positions, _, mask = Ragged.of(*file.queries(np.arange(len(file)))).take()
        elif path.suffix == ".npz":
            positions = _batched("queries", _read_npz(path, ("queries",))["queries"])
        elif path.suffix == ".csv":
            positions = _read_csv(path, domain.axes, "the axes")[None]
        elif path.suffix == MESH:
            positions = mesh_positions(read_mesh(path), _needed(labels))
        elif path.suffix == GRID_FILE:
            positions, grid = grid_positions(path, read_grid(path), _needed(labels))
        else:
            raise ValueError(
                "queries must be an .h5, .npz, .csv, .vtu or .nc file, or a grid such as 201x1024"
            )
        check_queries(positions, domain, positions)
    return Queries(positions, grid, mask)


def grid_queries(text: str, domain: Domain) -> Queries:
    """Evenly spaced points from one end of each axis to the other, the last axis fastest."""
    counts = tuple(map(int, text.split("x")))
    if len(counts) != domain.axes or not 1 <= min(counts) <= max(counts) < 2**31:
        raise ValueError(
            f"a grid must give a positive number for each of the {domain.axes} axes, "
            f"such as {'x'.join(['64'] * domain.axes)}"
        )
    axes = [torch.linspace(0, 1, count) for count in counts]
    unit = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)
    return Queries(domain.from_unit(unit[None]), grid=counts)


def _npz_observations(path: Path) -> Observations:
    arrays = _read_npz(path, ("positions", "values"), ("condition", "mask"))
    mask, condition = arrays.get("mask"), arrays.get("condition")
    if mask is not None and mask.dtype != np.bool_:
        raise ValueError(f"mask must be bool, got {mask.dtype}")
    return Observations(
        _batched("positions", arrays["positions"]),
        _batched("values", arrays["values"]),
        None if condition is None else _batched("condition", condition, rank=2),
        None if mask is None else torch.from_numpy(np.atleast_2d(mask)),
    )


def _batched(name: str, array: Array, rank: int = 3) -> Tensor:
    """A float32 tensor of the given rank; a single sample may come without its batch axis."""
    if array.dtype.kind not in "fiu" or array.ndim not in (rank - 1, rank):
        raise ValueError(
            f"{name} must be numbers with {rank - 1} or {rank} axes, "
            f"got {array.dtype} of shape {array.shape}"
        )
    tensor = torch.from_numpy(array.astype(np.float32))
    return tensor if array.ndim == rank else tensor[None]


def _read_npz(path: Path, names: tuple[str, ...], more: tuple[str, ...] = ()) -> dict[str, Array]:
    expected = f"an .npz file with {' and '.join(names)}"
    with reading(path, expected), np.load(path, allow_pickle=False) as file:
        missing = [name for name in names if name not in file]
        if missing:
            raise DataError(f"{path}: has no array {' or '.join(missing)}")
        return {name: file[name] for name in (*names, *more) if name in file}


def _read_csv(path: Path, columns: int, meaning: str) -> Float[Tensor, "n k"]:
    with reading(path, f"a .csv file of {columns} columns ({meaning})"):
        names, *lines = path.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    if not names or all(map(_is_number, names.split(","))):
        raise ValueError(f"the first line must name the columns, got {names[:80]!r}")
    table = np.zeros((0, 0), np.float32)
    if any(line.strip() for line in lines):
        table = np.loadtxt(lines, delimiter=",", ndmin=2, dtype=np.float32)
    if table.shape[1] != columns:
        found = table.shape[1] or "none"
        raise ValueError(f"expected lines of {columns} numbers ({meaning}), got {found}")
    return torch.from_numpy(table)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class PredictionLabels:
    """Names and units of axes and predicted channels; triangles between the queries.

    `mesh` is the one that the queries were read from, and `samples` the coordinate of a netCDF file
    that counts them.
    """

    axes: tuple[Label, ...]
    targets: tuple[Label, ...]
    cells: Array | None = None
    found: bool = True
    mesh: Any = None
    samples: Any = None


def run_labels(run: Path | str) -> Labels | None:
    """The names and units that a run was trained with; None where nothing is known."""
    described = read_object(Path(run) / "run.json").get("labels")
    if not isinstance(described, dict) or not described:
        return None
    try:
        return Labels(**{kind: [Label(*each) for each in described[kind]] for kind in described})
    except TypeError as error:
        raise DataError(f"{Path(run) / 'run.json'}: labels are not understood: {error}") from None


def find_labels(
    observations: Path, queries: Path | str, axes: int, channels: int, known: Labels | None = None
) -> PredictionLabels:
    """What the point files among the inputs say, or the run; numbers where nothing is known."""
    for path in (Path(queries), observations):
        if path.suffix in POINT_FILES and path.is_file():
            file = read_points(path)
            if (file.domain.axes, file.output_channels) == (axes, channels):
                cells = file.cells(0) if path == Path(queries) else None
                return PredictionLabels(file.axes, file.targets, cells)
    if known is not None and (len(known.axes), len(known.targets)) == (axes, channels):
        mesh = read_mesh(Path(queries)) if Path(queries).suffix == MESH else None
        samples = None
        if observations.suffix == GRID_FILE:
            samples = grid_samples(observations, read_grid(observations), known)
        parts = known.complete("axes", axes), known.complete("targets", channels)
        return PredictionLabels(*parts, mesh=mesh, samples=samples)
    names = tuple(Label(f"axis {number}") for number in range(axes))
    targets = tuple(Label(f"prediction {k}") for k in range(channels))
    return PredictionLabels(names, targets, found=False)


def check_output(path: Path, endings: Iterable[str], force: bool) -> None:
    """Raise before any work is done if the answer could not be written."""
    endings = tuple(endings)
    if path.suffix not in endings:
        several = "one of " * (len(endings) > 1)
        raise DataError(f"{path}: the answer is written as {several}{', '.join(endings)}")
    if path.is_dir():
        raise DataError(f"{path}: is a folder; name a file")
    if path.exists() and not force:
        raise DataError(f"{path}: exists; use --force to replace it")


def write_prediction(path: Path, prediction: Prediction, labels: PredictionLabels) -> None:
    """Write all arrays in the format of the path's ending, whole or not at all."""
    with blame(path):
        write_file(path, FORMATS[path.suffix](prediction.arrays(), labels))


def csv_table(header: Iterable[str], lines: Iterable[Iterable[object]]) -> bytes:
    """A table whose words no spreadsheet takes for a formula."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    for line in (header, *lines):
        table.writerow([spreadsheet(cell) if isinstance(cell, str) else cell for cell in line])
    return text.getvalue().encode()


def _title(label: Label) -> str:
    return f"{label.name} [{label.unit}]" if label.unit else label.name


def _csv(arrays: Arrays, labels: PredictionLabels) -> bytes:
    predictions = arrays["predictions"]
    queries = np.broadcast_to(arrays["queries"], (*predictions.shape[:2], len(labels.axes)))
    titles = [_title(label) for label in (*labels.axes, *labels.targets)]
    text = io.StringIO()
    for row, (where, found) in enumerate(zip(queries, predictions, strict=True)):
        real = slice(None)
        if "mask" in arrays:
            real = arrays["mask"][row if len(arrays["mask"]) > 1 else 0]
        lines = np.concatenate([where, found], axis=1)[real]
        np.savetxt(text, np.insert(lines, 0, row, axis=1), "%d" + ",%.9g" * lines.shape[1])
    return csv_table(["sample", *titles], ()) + text.getvalue().encode()


def _npz(arrays: Arrays, labels: PredictionLabels) -> bytes:
    buffer = io.BytesIO()
    named = {"axes_names": labels.axes, "channel_names": labels.targets} if labels.found else {}
    names: Arrays = {
        key: np.array([_title(each) for each in known]) for key, known in named.items()
    }
    np.savez_compressed(buffer, **arrays, **names)
    return buffer.getvalue()


def _hdf5(arrays: Arrays, labels: PredictionLabels) -> bytes:
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array)
        for name, known in (("queries", labels.axes), ("predictions", labels.targets)):
            file[name].attrs["names"] = [label.name for label in known]
            file[name].attrs["units"] = [label.unit for label in known]
    return buffer.getvalue()


def _vtu(arrays: Arrays, labels: PredictionLabels) -> bytes:
    meshio = optional_package("meshio", "mesh")
    queries, predictions = arrays["queries"], arrays["predictions"]
    if len(queries) != 1 and len(predictions) != 1:
        raise ValueError(
            f"a .vtu file holds one mesh, but these are {len(predictions)} samples with queries of "
            "their own; write .h5, or ask for one sample"
        )
    points = np.zeros((queries.shape[1], 3))
    points[:, : queries.shape[2]] = queries[0]
    fields = {
        _title(label) + f" sample {row}" * (len(predictions) > 1): found[:, channel]
        for row, found in enumerate(predictions)
        for channel, label in enumerate(labels.targets)
    }
    cells = [("triangle", labels.cells)]
    if labels.mesh is not None:
        points, cells = labels.mesh.points, labels.mesh.cells
    elif labels.cells is None:
        cells = [("vertex", np.arange(len(points))[:, None])]
    mesh = meshio.Mesh(points, cells, fields)
    return _written(lambda path: mesh.write(path), ".vtu")


def _netcdf(arrays: Arrays, labels: PredictionLabels) -> bytes:
    xarray = optional_package("xarray", "netcdf")
    if "grid" not in arrays:
        raise ValueError("a .nc file holds a grid: ask for one, such as --queries 64x64")
    shape = tuple(int(size) for size in arrays["grid"])
    points = arrays["queries"][0].reshape(*shape, len(shape))
    coordinates = {
        label.name: (label.name, np.moveaxis(points[..., k], k, -1)[(0,) * (len(shape) - 1)],
                     {"units": label.unit})
        for k, label in enumerate(labels.axes)
    }  # fmt: skip
    folded = arrays["predictions"].reshape(-1, *shape, len(labels.targets))
    counted = "sample"
    if labels.samples is not None:
        counted = str(labels.samples.dims[0])
        coordinates |= {counted: labels.samples}
    dimensions = (counted, *(label.name for label in labels.axes))
    fields = {
        label.name: (dimensions, folded[..., channel], {"units": label.unit})
        for channel, label in enumerate(labels.targets)
    }
    data = xarray.Dataset(fields, coordinates)
    return _written(lambda path: data.to_netcdf(path), ".nc")


def _written(write: Callable[[Path], object], suffix: str) -> bytes:
    """What a library that writes to paths alone would write."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"prediction{suffix}"
        write(path)
        return path.read_bytes()


FORMATS: dict[str, Callable[[Arrays, PredictionLabels], bytes]] = {
    ".npz": _npz,
    ".h5": _hdf5,
    ".hdf5": _hdf5,
    ".csv": _csv,
    ".vtu": _vtu,
    ".nc": _netcdf,
}
