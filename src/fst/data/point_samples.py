"""A user's own points: every sample may have its own positions and its own number of them.

Points of several samples lie end to end (`Ragged`); a batch gathers each row's stretch, padded to
the longest row of the split. Padding repeats a row's first point, so it is finite and inside the
domain, and is False in the masks. A split whose rows are all of one length needs no masks.
`PointSamples` holds a split on the device; `StreamedPoints` reads each batch from the file.
"""

import hashlib
import os
import warnings
from dataclasses import dataclass, replace
from typing import Any, Self

import h5py
import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fst.data import samples
from fst.data.files import DataError, reading
from fst.data.images import listed
from fst.data.point_files import LAYOUT, PointFile, Points
from fst.data.samples import Asked, Batch, RunningMoments, Samples, Statistics, Streamed
from fst.types import Device, Domain, Observations

# ‖target‖² in float32, in which errors are measured, must leave room above for a first prediction
# and below for a small error; and a sample so much smaller than the typical one would overflow the
# first gradient.
LEAST_SQUARE, LARGEST_SQUARE = 1e-30, 1e34
LEAST_SHARE = 1e-16
# A channel so much smaller adds a hundredth to the squared relative error if it is not learned.
LARGEST_RATIO = 10.0
# A mean beyond so many standard deviations hides what varies.
LARGEST_OFFSET = 5.0


@dataclass(frozen=True)
class Ragged:
    """Rows of unequal length laid end to end: row i is points `starts[i]` to `+ sizes[i]`.

    `shortest` and `longest` are those of the whole split, by which every batch of it is padded.
    """

    positions: Float[Tensor, "p s"]
    values: Float[Tensor, "p v"]
    starts: Int[Tensor, " n"]
    sizes: Int[Tensor, " n"]
    shortest: int
    longest: int

    @classmethod
    def of(cls, *points: Tensor | np.ndarray, limits: tuple[int, int] | None = None) -> Self:
        """Of the positions, values and sizes of `Points`, or of the same as tensors."""
        positions, values, sizes = map(torch.as_tensor, points)
        limits = limits or (int(sizes.min()), int(sizes.max()))
        return cls(positions, values, sizes.cumsum(dim=0) - sizes, sizes, *limits)

    def to(self, device: Device) -> Self:
        tensors: Any = {n: t.to(device) for n, t in vars(self).items() if isinstance(t, Tensor)}
        return replace(self, **tensors)

    def take(
        self, rows: Int[Tensor, " b"] | None = None, chosen: Int[Tensor, "b k"] | None = None
    ) -> tuple[Float[Tensor, "b k s"], Float[Tensor, "b k v"], Bool[Tensor, "b k"] | None]:
        """Positions and values of the rows' points `chosen`, and which of those points exist.

        Without `rows` or `chosen` all of them.
        """
        if rows is None:
            rows = torch.arange(len(self.sizes), device=self.sizes.device)
        if chosen is None:
            chosen = torch.arange(self.longest, device=rows.device).expand(len(rows), -1)
        real = None
        if self.shortest < self.longest:
            real = chosen < self.sizes[rows, None]
            chosen = chosen.where(real, 0)
        index = self.starts[rows, None] + chosen
        return self.positions[index], self.values[index], real


@dataclass(eq=False, repr=False)
class PointSamples(Samples):
    """One split of a file of points."""

    domain: Domain
    observed: Ragged
    queried: Ragged
    condition: Float[Tensor, "n c"] | None = None

    def __post_init__(self) -> None:
        self.value_channels = self.observed.values.shape[1]
        self.output_channels = self.queried.values.shape[1]

    @classmethod
    def read(cls, file: PointFile, rows: np.ndarray, *, learned: bool = False) -> Self:
        """The given rows of a file, on the CPU, if their relative errors are defined.

        Targets that are `learned` together must also be of similar sizes.
        """
        observed, queried = file.observations(rows), file.queries(rows)
        check = TargetCheck(file)
        check.see(rows, queried)
        check.finish(learned=learned)
        condition = torch.from_numpy(file.conditions(rows)) if file.condition else None
        return cls(file.domain, Ragged.of(*observed), Ragged.of(*queried), condition)

    def __len__(self) -> int:
        return len(self.queried.sizes)

    @property
    def device(self) -> torch.device:
        return self.queried.values.device

    def to(self, device: Device) -> Self:
        condition = None if self.condition is None else self.condition.to(device)
        return type(self)(self.domain, self.observed.to(device), self.queried.to(device), condition)

    def digest(self) -> str:
        """Of all samples in their order: the same on every device."""
        found = hashlib.sha256(repr(self.domain).encode())
        for points in (self.observed, self.queried):
            for tensor in (points.positions, points.values, points.sizes):
                found.update(tensor.reshape(-1).cpu().numpy().data)
        found.update(self.conditions().reshape(-1).cpu().numpy().data)
        return found.hexdigest()[:16]

    @property
    def _spare(self) -> int:
        return self.queried.longest - self.queried.shortest

    def choose(
        self, solutions: int, count: int | None, generator: torch.Generator
    ) -> Int[Tensor, "b k"] | None:
        """As many candidates as leave `count` real targets in the shortest row.

        Which row a choice will serve is not known yet. Of a random order of the longest row's
        targets, the entries that exist in a shorter row are a random order of that row's targets;
        at most `longest − shortest` entries do not exist.
        """
        if count is None or count >= self.queried.longest:
            return None
        width = count + self._spare
        return samples.random_subsets(solutions, width, max(width, self.queried.longest), generator)

    def gather(self, rows: Tensor, chosen: Tensor | None, augmentation: Tensor | None) -> Batch:
        if chosen is not None and self._spare:
            absent = chosen >= self.queried.sizes[rows, None]
            # Stable: targets that exist come first and keep their random order.
            order = absent.argsort(dim=1, stable=True)
            chosen = chosen.gather(1, order[:, : chosen.shape[1] - self._spare])
        positions, values, mask = self.observed.take(rows)
        condition = None if self.condition is None else self.condition[rows]
        observations = Observations(positions, values, condition, mask)
        return Batch(observations, *self.queried.take(rows, chosen))

    def statistics(self) -> Statistics:
        """One mean and standard deviation for each channel."""
        observed, queried = self.observed.values, self.queried.values
        return Statistics(*samples.moments(observed), *samples.moments(queried))


class StreamedPoints(Streamed, Samples):
    """Rows of a file of points, each batch read by itself.

    Batches are those of `PointSamples`, but for which targets a training step draws: those are a
    function of the step's seed and the row.
    """

    def __init__(
        self,
        file: PointFile,
        rows: Int[np.ndarray, " n"],
        *,
        workers: int,
        device: Device = "cpu",
        learned: bool = False,
    ) -> None:
        """Looks through all rows once: relative errors must be defined, as in `PointSamples`."""
        self.file = file
        self.rows = rows
        self.workers = workers
        self._device = torch.device(device)
        self.domain = file.domain
        self.value_channels = file.value_channels
        self.output_channels = file.output_channels
        self._observed = _limits(file.observation_offsets, rows)
        self._queried = _limits(file.query_offsets, rows)
        self.condition = torch.from_numpy(file.conditions(rows)) if file.condition else None
        self._opened: tuple[int, h5py.File] | None = None
        check = TargetCheck(file)
        self._statistics = check.look_through(rows, self._open())
        check.finish(learned=learned)

    def __len__(self) -> int:
        return len(self.rows)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}  # a worker opens the file for itself

    def __getitem__(self, asked: Asked) -> Batch:
        index = asked.rows.cpu().numpy()
        rows, file = self.rows[index], self._open()
        observed, queried = self.file.observations(rows, file), self.file.queries(rows, file)
        limits, chosen = self._queried, None
        if asked.seed is not None and asked.queries is not None and asked.queries < limits[1]:
            limits = min(limits[0], asked.queries), asked.queries
            chosen = _drawn(queried.sizes, index, asked.queries, asked.seed)
        positions, values, mask = Ragged.of(*observed, limits=self._observed).take()
        condition = None if self.condition is None else self.condition[index]
        observations = Observations(positions, values, condition, mask)
        return Batch(observations, *Ragged.of(*queried, limits=limits).take(chosen=chosen))

    def _open(self) -> h5py.File:
        """The file, opened once in every process: HDF5's handles do not survive a fork."""
        if self._opened is None or self._opened[0] != os.getpid():
            with reading(self.file.path, LAYOUT):
                self._opened = os.getpid(), h5py.File(self.file.path, "r")
        return self._opened[1]

    def statistics(self) -> Statistics:
        return self._statistics


def _limits(offsets: np.ndarray, rows: np.ndarray) -> tuple[int, int]:
    sizes = np.diff(offsets)[rows]
    return int(sizes.min()), int(sizes.max())


def _drawn(sizes: np.ndarray, rows: np.ndarray, count: int, seed: int) -> Int[Tensor, "b k"]:
    """`count` points of each row, by the seed and the row; of a row with fewer, all of them."""
    chosen = np.repeat(sizes[:, None], count, axis=1)  # no point has the number of the row's size
    for number, (row, size) in enumerate(zip(rows.tolist(), sizes.tolist(), strict=True)):
        drawn = np.random.default_rng((seed, row)).choice(size, min(count, size), replace=False)
        chosen[number, : len(drawn)] = drawn
    return torch.from_numpy(chosen)


class TargetCheck:
    """What the relative error asks of targets: not all zero, and channels of similar sizes.

    It sees targets a block at a time. The relative error of a sample (paper, Equation 7) is
    ‖prediction − target‖ / ‖target‖, over all of its targets and all channels in their own units.
    """

    def __init__(self, file: PointFile) -> None:
        self.file = file
        self.norms: dict[int, tuple[float, int]] = {}  # ‖target‖² and targets, by row
        self.targets = RunningMoments(file.output_channels)

    def see(self, rows: Int[np.ndarray, " n"], queried: Points) -> None:
        with np.errstate(over="ignore", under="ignore"):
            squares = np.einsum("pc,pc->p", queried.values, queried.values)
            norms = np.add.reduceat(squares, np.cumsum(queried.sizes) - queried.sizes)
        found = zip(norms.tolist(), queried.sizes.tolist(), strict=True)
        self.norms |= dict(zip(rows.tolist(), found, strict=True))
        self.targets.see(queried.values)

    def look_through(
        self, rows: Int[np.ndarray, " n"], opened: h5py.File | None = None
    ) -> Statistics:
        """See all targets of the given rows; statistics of their values and targets."""
        values = RunningMoments(self.file.value_channels)
        for block in self.file.blocks(rows):
            values.see(self.file.observations(block, opened).values)
            self.see(block, self.file.queries(block, opened))
        return Statistics(*values.result(), *self.targets.result())

    def finish(self, *, learned: bool) -> None:
        """Raise where a relative error is undefined; of `learned` targets, warn of what hides."""
        bad = [
            r for r, (norm, _) in self.norms.items() if not LEAST_SQUARE <= norm <= LARGEST_SQUARE
        ]
        if learned and not bad:
            typical = LEAST_SHARE * self.targets.mean_square.sum()
            bad = [row for row, (norm, size) in self.norms.items() if norm < typical * size]
        if bad:
            raise DataError(
                f"{self.file.path}: the relative error is undefined for targets that are all zero, "
                "or too small or too large to be squared in float32 or beside the others, as they "
                f"are in sample{'s' if len(bad) > 1 else ''} {listed(bad)}; leave "
                "such samples out, or measure the targets in another unit"
            )
        if learned:
            self.warn()

    def warn(self) -> None:
        """Warn of what one relative error hides: a small channel, and what varies about a mean."""
        seen, labels = self.targets, self.file.targets
        if seen.size_ratio > LARGEST_RATIO:
            pairs = zip(labels, np.sqrt(seen.mean_square), strict=True)
            named = listed([f"{label.name}: {size:.3g}" for label, size in pairs])
            warnings.warn(
                f"{self.file.path}: the target channels' root mean squares differ by a factor of "
                f"{seen.size_ratio:.3g} ({named}), so that the small ones count little in "
                "one relative error over all channels, which is the score: look at the error of "
                "each channel. --training.objective.channels standardized, which own/... recipes "
                "then choose, lets all count alike in the loss",
                stacklevel=3,
            )
        constant = [label.name for label, std in zip(labels, seen.std, strict=True) if std == 0]
        if constant:
            warnings.warn(
                f"{self.file.path}: there is nothing to learn in targets that are constant: "
                f"{listed(constant)}; leave them out",
                stacklevel=3,
            )
        large = np.flatnonzero(seen.offsets > LARGEST_OFFSET).tolist()
        if large:
            named = listed(
                [f"{labels[n].name}: {seen.mean[n]:.4g} ± {seen.std[n]:.2g}" for n in large]
            )
            warnings.warn(
                f"{self.file.path}: the mean of the targets is far larger than their standard "
                f"deviation ({named}), so that a constant already has a relative error of about "
                f"{1 / seen.offsets[large].min():.2g}; --training.objective.channels standardized, "
                "which own/... recipes then choose, measures in standard deviations instead",
                stacklevel=3,
            )
