"""The files of `fst predict`: observations and queries that enter, predictions that leave.

.npz files hold `positions` and `values` (and `condition`, `mask`), or `queries`; nothing in them is
unpickled. .csv files hold one sample and begin with a line that names their columns. Which columns
of a table, channels of a point file (.h5), point data of a mesh (.vtu) or variables of a netCDF
file (.nc) are those of a model, the labels of its run say by name; columns under other names are
the axes, then the values, and point files without names are taken as they come. A prediction is
written as .csv with one line a query, as .npz or .h5 with all arrays, as .vtu with one mesh, or as
.nc with a grid; with names and units where they are known.
"""

import csv
import io
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fst import pretrained
from fst.data.conversion import optional_package, read_mesh, read_netcdf
from fst.data.files import DataError, blame, reading
from fst.data.point_files import Label, Labels, PointFile, check_resolution, read_points
from fst.data.point_samples import Ragged
from fst.io import read_object, write_file
from fst.operators import Operator
from fst.terminal import spreadsheet
from fst.types import Domain, Observations, check_queries

GRID = re.compile(r"\d+(x\d+)*")
UNNAMED = re.compile(r"values \d+")

Array = np.ndarray
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Given:
    """The points that a file holds: a set for each sample, or one set of queries (a = 1) for all.

    Of queries the positions count alone. `mask` is False where a point only pads, and `grid` folds
    the points of a grid. The rest is for the answer: the point file or the mesh that was read, and
    the coordinate of a netCDF file that counts its samples.
    """

    positions: Float[Tensor, "a n s"]
    values: Tensor | None = None  # a n v, once they are checked
    condition: Tensor | None = None  # a c
    mask: Tensor | None = None  # a n
    grid: tuple[int, ...] | None = None
    file: PointFile | None = None
    mesh: Any = None
    samples: Any = None

    @property
    def observations(self) -> Observations:
        assert self.values is not None
        return Observations(self.positions, self.values, self.condition, self.mask)


@dataclass(frozen=True)
class Prediction:
    """Predictions at queries; anchors and length scales for models that have them."""

    queries: Given
    predictions: Float[Array, "b q c"]
    anchors: Float[Array, "b m s"] | None = None
    length_scales: Float[Array, "b m s"] | None = None

    def arrays(self) -> Arrays:
        found = {
            "queries": self.queries.positions,
            "predictions": self.predictions,
            "grid": self.queries.grid,
            "mask": self.queries.mask,
            "anchors": self.anchors,
            "length_scales": self.length_scales,
        }
        return {name: np.asarray(array) for name, array in found.items() if array is not None}


def read_observations(
    path: Path, model: Operator, condition: tuple[float, ...], labels: Labels | None = None
) -> Given:
    """Observations, checked against the model; `condition` serves a file that holds none."""
    with blame(path):
        check_resolution(model.domain)
        given = _read(path, model.domain.axes, model.value_channels, labels)
        if condition and given.condition is not None:
            raise ValueError("holds a condition, and another one was given")
        if condition:
            every = torch.tensor([condition], dtype=torch.float32).expand(len(given.positions), -1)
            given = replace(given, condition=every)
        model.check(given.observations)
    return given


def read_queries(source: Path | str, domain: Domain, labels: Labels | None = None) -> Given:
    """The queries in a file, or the points of a grid over the domain, such as 201x1024."""
    with blame(source):
        check_resolution(domain)
        if GRID.fullmatch(str(source)) and not Path(source).is_file():
            return _grid_queries(str(source), domain)
        asked = _read(Path(source), domain.axes, 0, labels)
        check_queries(asked.positions, domain, asked.positions)
    return asked


def _grid_queries(text: str, domain: Domain) -> Given:
    """Evenly spaced points from one end of each axis to the other, the last axis fastest."""
    counts = tuple(map(int, text.split("x")))
    if len(counts) != domain.axes or not 1 <= min(counts) <= max(counts) < 2**31:
        raise ValueError(
            f"a grid must give a positive number for each of the {domain.axes} axes, "
            f"such as {'x'.join(['64'] * domain.axes)}"
        )
    axes = [torch.linspace(0, 1, count) for count in counts]
    unit = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)
    return Given(domain.from_unit(unit[None]), grid=counts)


def _read(path: Path, axes: int, channels: int, labels: Labels | None) -> Given:
    """Observations of so many channels or, of none, queries."""
    if labels is not None and not channels:
        labels = replace(labels, values=())
    if path.suffix in (".h5", ".hdf5"):
        return _read_points(path, channels, labels)
    if path.suffix == ".npz":
        return _read_npz(path, channels)
    if path.suffix == ".csv":
        return _read_csv(path, axes, channels, labels)
    if path.suffix not in (".vtu", ".nc"):
        what = "observations" if channels else "queries"
        grid = "" if channels else ", or a grid such as 201x1024"
        raise ValueError(f"{what} must be an .h5, .npz, .csv, .vtu or .nc file{grid}")
    if labels is None:
        raise ValueError("only a run folder knows the names by which such a file is read")
    return _read_vtu(path, labels) if path.suffix == ".vtu" else _read_netcdf(path, labels)


def _read_points(path: Path, channels: int, labels: Labels | None) -> Given:
    file = read_points(path)
    rows = np.arange(len(file))
    points = file.observations(rows) if channels else file.queries(rows)
    positions, values, mask = Ragged.of(*points).take()
    positions = positions[..., _channel_order(file, "axes", labels)]
    if not channels:
        return Given(positions, mask=mask, file=file)
    values, condition = values[..., _channel_order(file, "values", labels)], None
    if file.condition:
        order = _channel_order(file, "condition", labels)
        condition = torch.from_numpy(file.conditions(rows)[:, order])
    return Given(positions, values, condition, mask, file=file)


def _channel_order(file: PointFile, kind: str, labels: Labels | None) -> list[int]:
    """Where a point file has the axes or channels of a run; as they come where one of the two has
    no names for them, and where the model will refuse their number."""
    found: tuple[Label, ...] = getattr(file, kind)
    count = len(found)
    if labels is None or len(getattr(labels, kind)) != count:
        return [*range(count)]
    known = labels.complete(kind, count)
    spelled = _spelling(_names(known))
    names, theirs = ([spelled(label.name) for label in part] for part in (known, found))
    if {*names} == {*theirs}:
        order = [theirs.index(name) for name in names]
        _check_units(known, [found[channel].unit for channel in order])
        return order
    if Labels().complete(kind, count) in (known, found):
        return [*range(count)]
    wanted, got = (", ".join(_names(part)) for part in (known, found))
    raise ValueError(f"{kind} must be {wanted} as in the run, got {got}")


def _check_units(known: Sequence[Label | str], units: Sequence[str]) -> None:
    for label, unit in zip(known, units, strict=True):
        if isinstance(label, Label) and label.unit and unit and label.unit != unit:
            raise ValueError(f"{label.name} must be in {label.unit} as in the run, got {unit}")


def _read_npz(path: Path, channels: int) -> Given:
    names = ("positions", "values") if channels else ("queries",)
    more = ("condition", "mask") if channels else ()
    expected = f"an .npz file with {' and '.join(names)}"
    with reading(path, expected), np.load(path, allow_pickle=False) as file:
        missing = [name for name in names if name not in file]
        if missing:
            raise DataError(f"{path}: has no array {' or '.join(missing)}")
        arrays = {name: file[name] for name in (*names, *more) if name in file}
    mask, condition = arrays.get("mask"), arrays.get("condition")
    if mask is not None and mask.dtype != np.bool_:
        raise ValueError(f"mask must be bool, got {mask.dtype}")
    return Given(
        _batched(names[0], arrays[names[0]]),
        _batched("values", arrays["values"]) if channels else None,
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
    tensor = _float32(name, array)
    return tensor if array.ndim == rank else tensor[None]


def _float32(name: str, array: Array) -> Tensor:
    with np.errstate(over="ignore"):
        numbers = array.astype(np.float32)
    large = np.isinf(numbers) & np.isfinite(array)
    if large.any():
        largest = np.finfo(np.float32).max
        raise ValueError(
            f"{name} must be at most {largest:.3g} in size, got {array[large][0]:.3g}, "
            "which is too large for float32"
        )
    return torch.from_numpy(numbers)


def _read_csv(path: Path, axes: int, channels: int, labels: Labels | None) -> Given:
    columns, meaning = axes + channels, "the axes, then the values" if channels else "the axes"
    with reading(path, f"a .csv file of {columns} columns ({meaning})"):
        names, *lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines() or [""]
    if not names or all(map(_is_number, names.split(","))):
        raise ValueError(f"the first line must name the columns, got {names[:80]!r}")
    table = np.zeros((0, 0))
    if any(line.strip() for line in lines):
        table = np.loadtxt(lines, delimiter=",", ndmin=2)
    if table.shape[1] != columns:
        found = table.shape[1] or "none"
        raise ValueError(f"expected lines of {columns} numbers ({meaning}), got {found}")
    if labels is not None:
        header = next(csv.reader([names], skipinitialspace=True))
        table = table[:, _column_order(header, [*labels.axes, *labels.values])]
    numbers = _float32("numbers", table)[None]
    return Given(numbers[..., :axes], numbers[..., axes:])


def _column_order(header: Sequence[str], labels: Sequence[Label | str]) -> list[int]:
    """Where a table has the columns of a run; as they come where it has none of their names.

    Capitals count where they alone tell names apart. Values that the run has no names for may be
    called anything.
    """
    names = _names(labels)
    spelled = _spelling(names)
    names = [spelled(name) for name in names]
    plain = dict(zip([spelled(str(label)) for label in labels], names, strict=True))  # no units
    titles = [spelled(title.strip()) for title in header]
    bare = [title.partition(" [")[0] for title in titles]
    found = [plain.get(*pair) for pair in zip(titles, map(plain.get, bare, titles), strict=True)]
    if found == names or not {*found, *bare} & {*names}:
        return [*range(len(names))]
    missing = {name for name in names if name not in found and not UNNAMED.fullmatch(name)}
    if missing or len({*found}) != len(names):
        raise ValueError(f"the columns must be {', '.join(names)}, got {', '.join(found)}")
    others = iter([column for column, name in enumerate(found) if name not in names])
    return [found.index(name) if name in found else next(others) for name in names]


def _spelling(names: Sequence[str]) -> Callable[[str], str]:
    """How names are compared: without capitals, unless they alone tell some apart."""
    return str if len({name.casefold() for name in names}) < len({*names}) else str.casefold


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _names(labels: Sequence[Label | str]) -> list[str]:
    return [label if isinstance(label, str) else label.name for label in labels]


def _read_vtu(path: Path, labels: Labels) -> Given:
    """One sample; axes that were not trained on, as z in a plane, are left out."""
    mesh, axes = read_mesh(path), _names(labels.axes)
    named = [*map("xyz".index, axes)] if set(axes) <= {*"xyz"} else [*range(len(axes))]
    positions = _float32("positions", mesh.points[:, named])[None]
    columns = [_point_data(path, mesh, name) for name in _names(labels.values)]
    values = _float32("values", np.stack(columns, axis=-1))[None] if columns else None
    return Given(positions, values, mesh=mesh)


def _point_data(path: Path, mesh: Any, name: str) -> Float[Array, " n"]:
    """One channel; of a vector it is called by the vector's name and its number."""
    vector, _, number = name.rpartition(" ")
    for known, column in ((name, 0), (vector, int(number) if number.isdigit() else 0)):
        if known in mesh.point_data:
            table = np.reshape(mesh.point_data[known], (len(mesh.points), -1))
            if column < table.shape[1]:
                return np.asarray(table[:, column])
    there = ", ".join(mesh.point_data) or "none"
    raise DataError(f"{path}: has no point data {name!r}; it has {there}")


def _read_netcdf(path: Path, labels: Labels) -> Given:
    """Points of a grid, the last axis fastest; of its values NaN is left out."""
    data, axes, channels = read_netcdf(path), _names(labels.axes), _names(labels.values)
    missing = [f"coordinate {name}" for name in axes if name not in data.indexes]
    missing += [f"variable {name!r}" for name in channels if name not in data]
    if missing:
        there = ", ".join(map(str, data.variables)) or "none"
        raise DataError(f"{path}: has no {missing[0]}; it has {there}")
    units = {name: str(data[name].attrs.get("units", "")) for name in map(str, data.variables)}
    _check_units([*labels.axes, *labels.values], [units[name] for name in axes + channels])
    lines = [np.asarray(data[name]) for name in axes]
    points = np.stack(np.meshgrid(*lines, indexing="ij"), axis=-1)
    positions, shape = _float32("positions", points.reshape(1, -1, len(axes))), points.shape[:-1]
    if not channels:
        return Given(positions, grid=shape)
    counted = [name for name in data[channels[0]].dims if name not in axes]
    if len(counted) > 1:
        names = ", ".join(map(str, counted))
        raise DataError(f"{path}: more than one dimension counts samples: {names}")
    arrays = [data[name].transpose(*counted, *axes).values for name in channels]
    values = np.stack(arrays, axis=-1).reshape(-1, positions.shape[1], len(arrays))
    empty = np.flatnonzero(np.isnan(values).all(axis=(1, 2)))
    if len(empty):
        where = f" at {counted[0]} {data[counted[0]].values[empty[0]]}" if counted else ""
        raise DataError(f"{path}: all values{where} are NaN")
    real = np.isfinite(values).all(axis=-1)
    conditions, condition = _names(labels.condition), None
    if conditions and all(name in data for name in conditions):
        _check_units(labels.condition, [units[name] for name in conditions])
        numbers = [np.atleast_1d(data[name].values) for name in conditions]
        condition = _float32("condition", np.stack(numbers, axis=-1))
    return Given(
        positions.expand(len(values), -1, -1),
        _float32("values", np.where(real[..., None], values, 0)),
        condition,
        None if real.all() else torch.from_numpy(real),
        samples=data[counted[0]] if counted else None,
    )


@dataclass(frozen=True)
class PredictionLabels:
    """Names and units of axes and predicted channels, and what the inputs lend to the answer."""

    axes: tuple[Label, ...]
    targets: tuple[Label, ...]
    found: bool = True
    cells: Array | None = None
    mesh: Any = None
    samples: Any = None

    @property
    def counted(self) -> str:
        """The dimension of a netCDF file that counts samples."""
        return "sample" if self.samples is None else str(self.samples.dims[0])


def run_labels(run: Path | str) -> Labels | None:
    """The names and units that a run or shipped weights were trained with; None where nothing is
    known."""
    best = Path(run) / "best"
    folder = (best if best.is_dir() else pretrained.find(run)).resolve()
    source = folder / pretrained.CONFIG
    if folder.name == "best" and "labels" not in read_object(source):
        source = folder.parent / "run.json"
    described = read_object(source).get("labels")
    if not isinstance(described, dict) or not described:
        return None
    try:
        return Labels(**{kind: [Label(*each) for each in described[kind]] for kind in described})
    except (TypeError, ValueError) as error:
        raise DataError(f"{source}: labels are not understood: {error}") from None


def find_labels(
    given: Given, asked: Given, channels: int, known: Labels | None = None
) -> PredictionLabels:
    """What the run says or, where it has no names, the point file of the observations; else
    numbers."""
    count, file, found = asked.positions.shape[-1], given.file, True
    if known is not None and (len(known.axes), len(known.targets)) == (count, channels):
        axes, targets = known.complete("axes", count), known.complete("targets", channels)
    elif file is not None and (file.domain.axes, file.output_channels) == (count, channels):
        axes, targets = file.axes, file.targets
    else:
        axes = tuple(Label(f"axis {number}") for number in range(count))
        targets, found = tuple(Label(f"prediction {k}") for k in range(channels)), False
    cells = None if asked.file is None else asked.file.cells(0)
    return PredictionLabels(axes, targets, found, cells, asked.mesh, given.samples)


def check_output(path: Path, endings: Collection[str], force: bool) -> None:
    """Raise before any work is done if the answer could not be written."""
    if path.suffix not in endings:
        several = "one of " * (len(endings) > 1)
        raise DataError(f"{path}: the answer is written as {several}{', '.join(endings)}")
    if path.is_dir():
        raise DataError(f"{path}: is a folder; name a file")
    if path.exists() and not force:
        raise DataError(f"{path}: exists; use --force to replace it")


def check_format(path: Path, asked: Given, labels: PredictionLabels) -> None:
    """Raise before the prediction is computed if a file of its format could not hold it."""
    with blame(path):
        if path.suffix == ".vtu" and len(asked.positions) > 1:
            raise ValueError(
                f"a .vtu file holds one mesh, but these are {len(asked.positions)} samples with "
                "queries of their own; write .h5, or ask for one sample"
            )
        if path.suffix == ".nc" and asked.grid is None:
            raise ValueError("a .nc file holds a grid: ask for one, such as --queries 64x64")
        names = [labels.counted, *_names(labels.axes), *_names(labels.targets)]
        for name in names if path.suffix == ".nc" else ():
            if not name or "/" in name or names.count(name) > 1:
                raise ValueError(
                    "names in a .nc file must be without / and all different, "
                    f"got {', '.join(names)}; write .h5 or .csv"
                )


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


def _csv(arrays: Arrays, labels: PredictionLabels) -> bytes:
    predictions = arrays["predictions"]
    queries = np.broadcast_to(arrays["queries"], (*predictions.shape[:2], len(labels.axes)))
    real = np.broadcast_to(arrays.get("mask", True), predictions.shape[:2])
    titles = map(str, (*labels.axes, *labels.targets))
    text = io.StringIO()
    for row, (where, found) in enumerate(zip(queries, predictions, strict=True)):
        lines = np.concatenate([where, found], axis=1)[real[row]]
        np.savetxt(text, np.insert(lines, 0, row, axis=1), "%d" + ",%.9g" * lines.shape[1])
    return csv_table(["sample", *titles], ()) + text.getvalue().encode()


def _npz(arrays: Arrays, labels: PredictionLabels) -> bytes:
    buffer = io.BytesIO()
    named = {"axes_names": labels.axes, "channel_names": labels.targets} if labels.found else {}
    names: Arrays = {key: np.array([*map(str, known)]) for key, known in named.items()}
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
    points = np.zeros((queries.shape[1], 3))
    points[:, : queries.shape[2]] = queries[0]
    fields = {  # escaped, because meshio writes names into XML as they are
        escape(str(label)) + f" sample {row}" * (len(predictions) > 1): found[:, channel]
        for row, found in enumerate(predictions)
        for channel, label in enumerate(labels.targets)
    }
    cells = [("triangle", labels.cells)]
    if labels.mesh is not None:
        points, cells = labels.mesh.points, labels.mesh.cells
    elif labels.cells is None:
        cells = [("vertex", np.arange(len(points))[:, None])]
    return _written(meshio.Mesh(points, cells, fields).write, ".vtu")


def _netcdf(arrays: Arrays, labels: PredictionLabels) -> bytes:
    xarray = optional_package("xarray", "netcdf")
    shape = tuple(int(size) for size in arrays["grid"])
    points = arrays["queries"][0].reshape(*shape, len(shape))
    coordinates = {
        label.name: (label.name, np.moveaxis(points[..., k], k, -1)[(0,) * (len(shape) - 1)],
                     {"units": label.unit})
        for k, label in enumerate(labels.axes)
    }  # fmt: skip
    folded = arrays["predictions"].reshape(-1, *shape, len(labels.targets))
    if labels.samples is not None:
        coordinates |= {labels.counted: labels.samples}
    dimensions = (labels.counted, *(label.name for label in labels.axes))
    fields = {
        label.name: (dimensions, folded[..., channel], {"units": label.unit})
        for channel, label in enumerate(labels.targets)
    }
    return _written(xarray.Dataset(fields, coordinates).to_netcdf, ".nc")


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
