"""A split of a point file that is too large for the device: read when it is needed.

Enters: rows of an open file. Leaves: the batches that `PointSamples` would give, but for which
targets a training step draws: those are a function of the step's seed and the row.
"""

import os
from collections.abc import Iterable, Iterator
from typing import Any, Self

import h5py
import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fst.data.errors import reading
from fst.data.point_files import BLOCK, LAYOUT, PointFile, Points
from fst.data.point_samples import TargetCheck
from fst.data.samples import Batch, RunningMoments, Samples, Statistics
from fst.data.streaming import Asked, stream
from fst.types import Observations


class StreamedPoints(Samples):
    """Rows of a file of points, each batch read by itself."""

    def __init__(
        self,
        file: PointFile,
        rows: Int[np.ndarray, " n"],
        *,
        workers: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.file = file
        self.rows = rows
        self.workers = workers
        self._device = torch.device(device)
        self.domain = file.domain
        self.value_channels = file.value_channels
        self.output_channels = file.output_channels
        self.condition_channels = file.condition_channels
        self._observed = np.diff(file.observation_offsets)[rows]
        self._queried = np.diff(file.query_offsets)[rows]
        self._conditions = file.conditions(rows)
        self._statistics: Statistics | None = None
        self._opened: tuple[int, h5py.File] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}  # a worker opens the file for itself

    @property
    def device(self) -> torch.device:
        """Where `batch` puts samples."""
        return self._device

    def to(self, device: torch.device | str) -> Self:
        moved = type(self)(self.file, self.rows, workers=self.workers, device=device)
        moved._statistics = self._statistics
        return moved

    def batch(
        self,
        rows: Int[Tensor, " b"],
        chosen: Int[Tensor, "b k"] | None = None,
        augmentation: Tensor | None = None,
    ) -> Batch:
        """The given rows with all of their targets."""
        if chosen is not None or augmentation is not None:
            raise ValueError("chosen and augmentation must be None: streamed points have neither")
        return self.read(Asked(rows)).to(self._device)

    def iterate(self, plan: Iterable[Asked]) -> Iterator[Batch]:
        """A batch on the host for each entry of the plan, in its order."""
        return stream(self.read, plan, self.workers, self._device)

    def read(self, asked: Asked) -> Batch:
        """One batch on the host."""
        where = asked.rows.cpu().numpy()
        rows, file = self.rows[where], self._open()
        observed = _padded(self.file.observations(rows, file), self._observed)
        points = self.file.queries(rows, file)
        if asked.seed is None or asked.queries is None or asked.queries >= self._queried.max():
            queried = _padded(points, self._queried)
        else:
            queried = _drawn(points, self._queried, where, asked.queries, asked.seed)
        condition = None
        if self._conditions is not None:
            condition = torch.from_numpy(self._conditions[where])
        return Batch(Observations(observed[0], observed[1], condition, observed[2]), *queried)

    def _open(self) -> h5py.File:
        """The file, opened once in every process: HDF5's handles do not survive a fork."""
        if self._opened is None or self._opened[0] != os.getpid():
            with reading(self.file.path, LAYOUT):
                self._opened = os.getpid(), h5py.File(self.file.path, "r")
        return self._opened[1]

    def conditions(self) -> Float[Tensor, "n c"]:
        if self._conditions is None:
            return torch.empty(len(self), 0)
        return torch.from_numpy(self._conditions)

    def statistics(self) -> Statistics:
        return self.look_through(learned=False) if self._statistics is None else self._statistics

    def look_through(self, *, learned: bool) -> Statistics:
        """Statistics, from one pass over the split; raise where a relative error is undefined."""
        values = RunningMoments(self.value_channels)
        targets = RunningMoments(self.output_channels)
        check = TargetCheck(self.file)
        for first in range(0, len(self), BLOCK):
            rows = self.rows[first : first + BLOCK]
            values.see(self.file.observations(rows, self._open()).values)
            queried = self.file.queries(rows, self._open())
            targets.see(queried.values)
            check.see(rows, queried)
        check.finish(learned=learned, warn=learned)
        self._statistics = Statistics(*values.result(), *targets.result())
        return self._statistics


def _padded(points: Points, sizes: np.ndarray) -> tuple[Tensor, Tensor, Tensor | None]:
    """All points of each row, padded to the longest row of the split with the row's first."""
    index = np.arange(sizes.max())
    real = index < points.sizes[:, None]
    return _taken(points, index * real, real if sizes.min() < sizes.max() else None)


def _drawn(
    points: Points, sizes: np.ndarray, rows: np.ndarray, count: int, seed: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`count` points of each row, drawn by the seed and the row; all of a row that has no more."""
    index = np.zeros((len(rows), count), np.int64)
    real = np.arange(count) < points.sizes[:, None]
    for number, (row, size) in enumerate(zip(rows.tolist(), points.sizes.tolist(), strict=True)):
        random = np.random.default_rng((seed, row))
        drawn = random.choice(size, min(count, size), replace=False)
        index[number, : len(drawn)] = drawn
    return _taken(points, index, real if sizes.min() < count else None)


def _taken(
    points: Points, index: np.ndarray, real: np.ndarray | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    where = (np.cumsum(points.sizes) - points.sizes)[:, None] + index
    taken = torch.from_numpy(points.positions[where]), torch.from_numpy(points.values[where])
    return *taken, None if real is None else torch.from_numpy(real)
