"""A user's own points: every sample may have its own positions and its own number of them.

All points of a split lie end to end in a few tensors; a batch gathers each row's stretch, padded to
the longest row of the split. Padding repeats a row's first point, so it is finite and inside the
domain, and is False in the masks. A split whose rows are all of one length needs no masks.
"""

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fst.data.errors import DataError
from fst.data.images import listed
from fst.data.point_files import Label, PointFile, Points
from fst.data.samples import Batch, Samples, Statistics, moments, random_subsets
from fst.types import Domain, Observations

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
    """Rows of unequal length laid end to end: row i is points `starts[i]` to `+ sizes[i]`."""

    positions: Float[Tensor, "p s"]
    values: Float[Tensor, "p v"]
    starts: Int[Tensor, " n"]
    sizes: Int[Tensor, " n"]
    shortest: int
    longest: int

    @classmethod
    def of(
        cls, positions: Float[Tensor, "p s"], values: Float[Tensor, "p v"], sizes: Int[Tensor, " n"]
    ) -> Self:
        starts = sizes.cumsum(dim=0) - sizes
        return cls(positions, values, starts, sizes, int(sizes.min()), int(sizes.max()))

    def to(self, device: torch.device | str) -> Self:
        return replace(
            self,
            positions=self.positions.to(device),
            values=self.values.to(device),
            starts=self.starts.to(device),
            sizes=self.sizes.to(device),
        )

    def take(
        self, rows: Int[Tensor, " b"], chosen: Int[Tensor, "b k"] | None
    ) -> tuple[Float[Tensor, "b k s"], Float[Tensor, "b k v"], Bool[Tensor, "b k"] | None]:
        """Positions and values of the rows' points `chosen`, and which of those points exist."""
        if chosen is None:
            chosen = torch.arange(self.longest, device=rows.device).expand(len(rows), -1)
        real = None
        if self.shortest < self.longest:
            real = chosen < self.sizes[rows, None]
            chosen = chosen.where(real, 0)
        places = self.starts[rows, None] + chosen
        return self.positions[places], self.values[places], real


class PointSamples(Samples):
    """One split of a file of points."""

    def __init__(
        self,
        domain: Domain,
        observed: Ragged,
        queried: Ragged,
        condition: Float[Tensor, "n c"] | None = None,
    ) -> None:
        if len(observed.sizes) != len(queried.sizes) or (
            condition is not None and len(condition) != len(queried.sizes)
        ):
            raise ValueError("observed, queried and condition must have one row for each sample")
        self.domain = domain
        self.observed = observed
        self.queried = queried
        self.condition = condition
        self.value_channels = observed.values.shape[1]
        self.output_channels = queried.values.shape[1]
        self.condition_channels = 0 if condition is None else condition.shape[1]

    def __len__(self) -> int:
        return len(self.queried.sizes)

    @property
    def device(self) -> torch.device:
        return self.queried.values.device

    def to(self, device: torch.device | str) -> Self:
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
        return random_subsets(solutions, width, max(width, self.queried.longest), generator)

    def batch(
        self,
        rows: Int[Tensor, " b"],
        chosen: Int[Tensor, "b k"] | None = None,
        augmentation: Int[Tensor, "b a"] | None = None,
    ) -> Batch:
        if augmentation is not None:
            raise ValueError("augmentation was given, but these samples are used as stored")
        if chosen is not None and self._spare:
            absent = chosen >= self.queried.sizes[rows, None]
            # Stable: targets that exist come first and keep their random order.
            order = absent.argsort(dim=1, stable=True)
            chosen = chosen.gather(1, order[:, : chosen.shape[1] - self._spare])
        positions, values, mask = self.observed.take(rows, None)
        queries, targets, target_mask = self.queried.take(rows, chosen)
        condition = None if self.condition is None else self.condition[rows]
        return Batch(
            Observations(positions, values, condition, mask), queries, targets, target_mask
        )

    def conditions(self) -> Float[Tensor, "n c"]:
        if self.condition is None:
            return self.queried.values.new_empty(len(self), 0)
        return self.condition

    def statistics(self) -> Statistics:
        """One mean and deviation for each channel; a constant channel has deviation 1."""
        value_mean, value_deviation = moments(self.observed.values)
        output_mean, output_deviation = moments(self.queried.values)
        return Statistics(
            value_mean,
            value_deviation.where(value_deviation > 0, 1.0),
            output_mean,
            output_deviation.where(output_deviation > 0, 1.0),
        )


class TargetCheck:
    """What the relative error asks of targets: not all zero, and channels of similar sizes.

    It sees targets a block at a time. The relative error of a sample (paper, Equation 7) is
    ‖prediction − target‖ / ‖target‖, over all of its targets and all channels in their own units.
    """

    def __init__(self, file: PointFile) -> None:
        self.file = file
        self.norms: dict[int, tuple[float, int]] = {}  # ‖target‖² and targets, by row
        self.squares = np.zeros(file.output_channels)

    def see(self, rows: Int[np.ndarray, " n"], queried: Points) -> None:
        with np.errstate(over="ignore", under="ignore"):
            squares = np.einsum("pc,pc->p", queried.values, queried.values)
            norms = np.add.reduceat(squares, np.cumsum(queried.sizes) - queried.sizes)
        found = zip(norms.tolist(), queried.sizes.tolist(), strict=True)
        self.norms |= dict(zip(rows.tolist(), found, strict=True))
        # In float64 and without a float64 copy.
        self.squares += np.einsum("pc,pc->c", queried.values, queried.values, dtype=np.float64)

    def finish(self, *, learned: bool = False, warn: bool = True) -> None:
        """Raise where a relative error is undefined; warn where a channel would hardly count."""
        points = sum(size for _, size in self.norms.values())
        bad = [
            r for r, (norm, _) in self.norms.items() if not LEAST_SQUARE <= norm <= LARGEST_SQUARE
        ]
        if learned and not bad:
            typical = LEAST_SHARE * self.squares.sum() / points
            bad = [row for row, (norm, size) in self.norms.items() if norm < typical * size]
        if bad:
            raise DataError(
                f"{self.file.path}: the relative error is undefined for targets that are all zero, "
                "or too small or too large to be squared in float32 or beside the others, as they "
                f"are in sample{'s' if len(bad) > 1 else ''} {listed([*map(str, bad)])}; leave "
                "such samples out, or measure the targets in another unit"
            )
        sizes = np.sqrt(self.squares / points)
        filled = sizes[sizes > 0]  # a channel of zeros cannot be brought to another size
        if warn and len(filled) and filled.max() > LARGEST_RATIO * filled.min():
            pairs = zip(self.file.targets, sizes, strict=True)
            named = listed([f"{label.name}: {size:.3g}" for label, size in pairs])
            warnings.warn(
                f"{self.file.path}: the target channels' root mean squares differ by a factor of "
                f"{filled.max() / filled.min():.3g} ({named}); loss and score are one relative "
                "error over all channels, in which the small ones count little: bring them to "
                "similar sizes",
                stacklevel=3,
            )


def offsets(targets: Float[np.ndarray, "p c"]) -> Float[np.ndarray, " c"]:
    """|mean| / standard deviation of each channel; 0 for one that is constant."""
    wide = targets.astype(np.float64)
    mean, std = np.abs(wide.mean(axis=0)), wide.std(axis=0)
    return np.where(std > 0, mean / np.where(std > 0, std, 1.0), 0.0)


def warn_of_large_means(
    path: Path, labels: Sequence[Label], targets: Float[np.ndarray, "p c"]
) -> None:
    """Warn where a constant would already have a small relative error."""
    ratios = offsets(targets)
    large = [n for n, ratio in enumerate(ratios) if ratio > LARGEST_OFFSET]
    if large:
        wide = targets.astype(np.float64)
        named = listed(
            [f"{labels[n].name}: {wide[:, n].mean():.4g} ± {wide[:, n].std():.2g}" for n in large]
        )
        warnings.warn(
            f"{path}: the mean of the targets is far larger than their standard deviation "
            f"({named}), so that a constant already has a relative error of about "
            f"{1 / ratios[large].min():.2g}; --training.objective.channels standardized measures "
            "in standard deviations instead",
            stacklevel=3,
        )
