"""The files of `fst predict`: observations and queries that enter, predictions that leave.

.npz files are read without unpickling; .csv files begin with a line that names their columns.
"""

import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fst.commands.prediction_formats import FORMATS, PredictionLabels
from fst.data.files import DataError, reading, writing
from fst.data.point_files import check_resolution, read_points
from fst.data.point_samples import Ragged
from fst.io import write_atomically
from fst.operators import Operator
from fst.types import Domain, Observations, check_queries

GRID = re.compile(r"\d+(x\d+)*")
POINT_FILES = (".h5", ".hdf5")
OUTPUTS = tuple(FORMATS)

Array = np.ndarray


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

    def arrays(self) -> dict[str, Any]:
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


def read_observations(path: Path, model: Operator, condition: tuple[float, ...]) -> Observations:
    """The observations in a file, checked against the model.

    `condition` serves every sample of a file that holds none.
    """
    with blame(path):
        check_resolution(model.domain)
    if path.suffix in POINT_FILES:
        observations = _point_observations(path)
    elif path.suffix == ".npz":
        observations = _npz_observations(path)
    elif path.suffix == ".csv":
        axes = model.domain.axes
        table = _read_csv(path, axes + model.value_channels, "the axes, then the values")
        observations = Observations(table[None, :, :axes], table[None, :, axes:])
    else:
        raise DataError(f"{path}: observations must be an .h5, .npz or .csv file")
    with blame(path):
        if condition and observations.condition is not None:
            raise ValueError("holds a condition, and another one was given")
        if condition:
            every = torch.tensor([condition], dtype=torch.float32).expand(len(observations), -1)
            observations = Observations(
                observations.positions, observations.values, every, observations.mask
            )
        model.check(observations)
    return observations


def read_queries(source: Path | str, domain: Domain) -> Queries:
    """The queries in a file, or the points of a grid over the domain, such as 201x1024."""
    with blame(source):
        check_resolution(domain)
    if GRID.fullmatch(str(source)) and not Path(source).is_file():
        return grid_queries(str(source), domain)
    path, mask = Path(source), None
    if path.suffix in POINT_FILES:
        file = read_points(path)
        rows = np.arange(len(file))
        positions, _, mask = _padded(file.queries(rows))
    elif path.suffix == ".npz":
        positions = _batched(path, "queries", _read_npz(path, ("queries",))["queries"])
    elif path.suffix == ".csv":
        positions = _read_csv(path, domain.axes, "the axes")[None]
    else:
        raise DataError(
            f"{source}: queries must be an .h5, .npz or .csv file, or a grid such as 201x1024"
        )
    with blame(path):
        check_queries(positions, domain, positions)
    return Queries(positions, mask=mask)


def grid_queries(text: str, domain: Domain) -> Queries:
    """Evenly spaced points from one end of each axis to the other, the last axis fastest."""
    counts = tuple(map(int, text.split("x")))
    if len(counts) != domain.axes or not 1 <= min(counts) <= max(counts) < 2**31:
        raise DataError(
            f"{text}: a grid must give a positive number for each of the {domain.axes} axes, "
            f"such as {'x'.join(['64'] * domain.axes)}"
        )
    axes = [torch.linspace(0, 1, count) for count in counts]
    unit = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)
    return Queries(domain.from_unit(unit[None]), grid=counts)


def check_output(path: Path, force: bool) -> None:
    """Raise before any work is done if the prediction could not be written."""
    if path.suffix not in OUTPUTS:
        raise DataError(f"{path}: predictions are written as one of {', '.join(OUTPUTS)}")
    if path.exists() and not force:
        raise DataError(f"{path}: exists; use --force to replace it")


def write_prediction(path: Path, prediction: Prediction, labels: PredictionLabels) -> None:
    """Write all arrays in the format of the path's ending, whole or not at all."""
    with blame(path):
        content = FORMATS[path.suffix](prediction.arrays(), labels)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)


@contextmanager
def blame(source: Path | str) -> Iterator[None]:
    """Name the file whose contents an error is about."""
    try:
        yield
    except DataError:
        raise
    except (ValueError, TypeError) as error:
        raise DataError(f"{source}: {error}") from None


def _point_observations(path: Path) -> Observations:
    file = read_points(path)
    rows = np.arange(len(file))
    condition = file.conditions(rows)
    positions, values, mask = _padded(file.observations(rows))
    given = None if condition is None else torch.from_numpy(condition)
    return Observations(positions, values, given, mask)


def _padded(points: tuple[Array, Array, Array]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows of unequal length as one batch, with a mask where they are unequal."""
    ragged = Ragged.of(*map(torch.from_numpy, points))
    return ragged.take(torch.arange(len(ragged.sizes)), None)


def _npz_observations(path: Path) -> Observations:
    arrays = _read_npz(path, ("positions", "values"), ("condition", "mask"))
    mask, condition = arrays.get("mask"), arrays.get("condition")
    if mask is not None and mask.dtype != np.bool_:
        raise DataError(f"{path}: mask must be bool, got {mask.dtype}")
    with blame(path):
        return Observations(
            _batched(path, "positions", arrays["positions"]),
            _batched(path, "values", arrays["values"]),
            None if condition is None else _batched(path, "condition", condition, rank=2),
            None if mask is None else torch.from_numpy(np.atleast_2d(mask)),
        )


def _batched(path: Path, name: str, array: Array, rank: int = 3) -> Tensor:
    """A float32 tensor of the given rank; a single sample may come without its batch axis."""
    if array.dtype.kind not in "fiu" or array.ndim not in (rank - 1, rank):
        raise DataError(
            f"{path}: {name} must be numbers with {rank - 1} or {rank} axes, "
            f"got {array.dtype} of shape {array.shape}"
        )
    tensor = torch.from_numpy(array.astype(np.float32))
    return tensor if array.ndim == rank else tensor[None]


def _read_npz(path: Path, names: tuple[str, ...], more: tuple[str, ...] = ()) -> dict[str, Array]:
    with reading(path, f"an .npz file with {' and '.join(names)}"):
        try:
            with np.load(path, allow_pickle=False) as file:
                missing = [name for name in names if name not in file]
                if missing:
                    raise DataError(f"{path}: has no array {' or '.join(missing)}")
                return {name: file[name] for name in (*names, *more) if name in file}
        except (ValueError, zipfile.BadZipFile, zlib.error, AttributeError, TypeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{path}: is no readable .npz file ({error})") from None


def _read_csv(path: Path, columns: int, meaning: str) -> Float[Tensor, "n k"]:
    with reading(path, f"a .csv file of {columns} columns ({meaning})"):
        names, *lines = path.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    if not names or all(_is_number(name) for name in names.split(",")):
        raise DataError(f"{path}: the first line must name the columns, got {names[:80]!r}")
    if not any(line.strip() for line in lines):
        raise DataError(f"{path}: expected lines of {columns} numbers ({meaning}), got none")
    try:
        table = np.loadtxt(lines, delimiter=",", ndmin=2, dtype=np.float32)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None
    if table.shape[1] != columns:
        raise DataError(
            f"{path}: expected lines of {columns} numbers ({meaning}), got {table.shape[1]}"
        )
    return torch.from_numpy(table)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
