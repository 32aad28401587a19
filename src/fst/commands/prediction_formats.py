"""The formats in which `fst predict` writes its answer, with names and units where they are known.

Enters: the arrays of a prediction, and labels. Leaves: the bytes of a file. .csv has one line a
query, .npz and .h5 all arrays, .vtu one mesh, .nc a grid.
"""

import io
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from fst.data.conversion import optional_package
from fst.data.point_files import Label, read_points
from fst.terminal import spreadsheet

Arrays = dict[str, Any]
POINT_FILES = (".h5", ".hdf5")


@dataclass(frozen=True)
class PredictionLabels:
    """Names and units of axes and predicted channels; triangles between the queries."""

    axes: tuple[Label, ...]
    targets: tuple[Label, ...]
    cells: np.ndarray | None = None
    found: bool = True


def find_labels(
    observations: Path, queries: Path | str, axes: int, channels: int
) -> PredictionLabels:
    """What the point files among the inputs say; numbers where there is none."""
    for path in (Path(queries), observations):
        if path.suffix in POINT_FILES and path.is_file():
            file = read_points(path)
            if (file.domain.axes, file.output_channels) == (axes, channels):
                cells = file.cells(0) if path == Path(queries) else None
                return PredictionLabels(file.axes, file.targets, cells)
    names = tuple(Label(f"axis {number}") for number in range(axes))
    targets = tuple(Label(f"prediction {k}") for k in range(channels))
    return PredictionLabels(names, targets, found=False)


def _title(label: Label) -> str:
    return f"{label.name} [{label.unit}]" if label.unit else label.name


def _csv(arrays: Arrays, labels: PredictionLabels) -> bytes:
    predictions = arrays["predictions"]
    queries = np.broadcast_to(arrays["queries"], (*predictions.shape[:2], len(labels.axes)))
    text = io.StringIO()
    titles = [spreadsheet(_title(label)) for label in (*labels.axes, *labels.targets)]
    quoted = ('"' + title.replace('"', '""') + '"' if set(title) & set(',"\n') else title
              for title in titles)  # fmt: skip
    text.write(",".join(("sample", *quoted)) + "\n")
    for row, (where, found) in enumerate(zip(queries, predictions, strict=True)):
        real = slice(None)
        if "mask" in arrays:
            real = arrays["mask"][row if len(arrays["mask"]) > 1 else 0]
        lines = np.concatenate([where, found], axis=1)[real]
        np.savetxt(text, np.insert(lines, 0, row, axis=1), "%d" + ",%.9g" * lines.shape[1])
    return text.getvalue().encode()


def _npz(arrays: Arrays, labels: PredictionLabels) -> bytes:
    buffer = io.BytesIO()
    names: Arrays = (
        {}
        if not labels.found
        else {
            "axes_names": np.array([_title(label) for label in labels.axes]),
            "channel_names": np.array([_title(label) for label in labels.targets]),
        }
    )
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
    fields = {}
    for row, found in enumerate(predictions):
        for channel, label in enumerate(labels.targets):
            name = _title(label) + (f" sample {row}" if len(predictions) > 1 else "")
            fields[name] = found[:, channel]
    cells = ("triangle", labels.cells)
    if labels.cells is None:
        cells = ("vertex", np.arange(len(points))[:, None])
    mesh = meshio.Mesh(points, [cells], fields)
    return _written(lambda path: mesh.write(path), ".vtu")


def _netcdf(arrays: Arrays, labels: PredictionLabels) -> bytes:
    xarray = optional_package("xarray", "netcdf")
    if "grid" not in arrays:
        raise ValueError("a .nc file holds a grid: ask for one, such as --queries 64x64")
    shape = tuple(int(size) for size in arrays["grid"])
    points = arrays["queries"][0].reshape(*shape, len(shape))
    lines = [
        np.moveaxis(points[..., k], k, 0).reshape(size, -1)[:, 0] for k, size in enumerate(shape)
    ]
    dimensions = [label.name for label in labels.axes]
    coordinates = {
        label.name: (label.name, line, {"units": label.unit})
        for label, line in zip(labels.axes, lines, strict=True)
    }
    folded = arrays["predictions"].reshape(-1, *shape, len(labels.targets))
    fields = {
        label.name: (("sample", *dimensions), folded[..., channel], {"units": label.unit})
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
