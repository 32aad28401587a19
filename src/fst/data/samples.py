"""One split of one data set, resident on one device, and the batches that steps are made of.

Enters: row numbers and, for a training step, which targets to ask for. Leaves: a `Batch` of
observations, queries and targets in the data's own units. A batch is a few gathers on the device:
nothing loops over samples and nothing waits for the host.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fst.data.views import (
    boundary_observation_indices,
    index_coordinates,
    index_product,
    subset_indices,
)
from fst.types import Domain, Observations

# Burgers runs that supervise the whole grid still take their statistics from this one.
STATISTICS_GRID = 100

# Numbers that `moments` widens to float64 at once.
_BLOCK = 2**24


@dataclass(frozen=True)
class Batch:
    """What one training or validation step needs. `mask` is True at real targets."""

    observations: Observations
    queries: Float[Tensor, "b q s"]
    targets: Float[Tensor, "b q c"]
    mask: Bool[Tensor, "b q"] | None = None

    def to(self, device: torch.device | str) -> Self:
        """On a device; without waiting where the batch is pinned."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        """As PyTorch's loader asks for it."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        def some(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        given = self.observations
        observations = Observations(
            change(given.positions), change(given.values), some(given.condition), some(given.mask)
        )
        return type(self)(observations, change(self.queries), change(self.targets), some(self.mask))


@dataclass(frozen=True)
class Statistics:
    """Means and standard deviations, float64 on the CPU: scalars, or one for each channel."""

    value_mean: Tensor
    value_deviation: Tensor
    output_mean: Tensor
    output_deviation: Tensor


class Rows(ABC):
    """Numbered samples on one device: all that the training loop needs to know of data.

    What a batch holds is between the data and the training objective.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def to(self, device: torch.device | str) -> Self:
        """The same rows on a device, as a new object."""

    def choose(
        self, solutions: int, count: int | None, generator: torch.Generator
    ) -> Int[Tensor, "b k"] | None:
        """Random targets for each of `solutions` rows, without replacement; None asks for all.

        The generator lives on the samples' device. The result is for `batch` alone to interpret.
        """
        del solutions, count, generator
        return None

    def augmentations(self, solutions: int, generator: torch.Generator) -> Tensor | None:
        """A random change for each of `solutions` rows; None where data are used as stored."""
        del solutions, generator
        return None

    @abstractmethod
    def batch(
        self,
        rows: Int[Tensor, " b"],
        chosen: Int[Tensor, "b k"] | None = None,
        augmentation: Tensor | None = None,
    ) -> Any:
        """The given rows, at the `chosen` targets (all of them when None)."""

    def describe(self) -> dict[str, Any]:
        """Enough of training data to notice when others have taken their place, as JSON values."""
        return {"training_samples": len(self)}

    def left_out(self) -> dict[str, Any]:
        """What could not be read and did not stop a run, which keeps it."""
        return {}


class Samples(Rows):
    """One split of one data set of solutions."""

    domain: Domain
    value_channels: int
    output_channels: int
    condition_channels: int

    @property
    def grid_shape(self) -> tuple[int, ...] | None:
        """How many points of each axis are held, where they lie on a grid."""
        return None

    def on_grid(self, counts: tuple[int, ...]) -> Self:
        """The same samples at fewer points of their grid."""
        raise ValueError(f"a {counts} grid was asked for, but these samples lie on no grid")

    @abstractmethod
    def batch(
        self,
        rows: Int[Tensor, " b"],
        chosen: Int[Tensor, "b k"] | None = None,
        augmentation: Int[Tensor, "b a"] | None = None,
    ) -> Batch: ...

    @abstractmethod
    def conditions(self) -> Float[Tensor, "n c"]:
        """The condition of every sample; without channels where there is none."""

    @abstractmethod
    def statistics(self) -> Statistics:
        """For standardisation. Ask the training split only."""

    def describe(self) -> dict[str, Any]:
        found = dict(vars(self.statistics()))
        mean, deviation = moments(self.conditions())
        found |= {"condition_mean": mean, "condition_deviation": deviation}
        numbers = {name: numbers.reshape(-1).tolist() for name, numbers in found.items()}
        return {"training_samples": len(self), **numbers}


def random_subsets(
    solutions: int, count: int, total: int, generator: torch.Generator
) -> Int[Tensor, "b k"]:
    """`count` of `total` indices for each solution, without replacement, in random order."""
    # The order of independent uniform numbers is a uniform permutation; its start a uniform subset.
    keys = torch.rand(solutions, total, generator=generator, device=generator.device)
    return keys.argsort(dim=1)[:, :count]


def random_moves(
    choices: tuple[int, ...], solutions: int, generator: torch.Generator
) -> Int[Tensor, "b a"]:
    """A uniform whole number below each of `choices`, for each solution."""
    # A 62-bit number modulo the range: one draw for all, with a bias below 1e-15.
    shape, device = (solutions, len(choices)), generator.device
    drawn = torch.randint(2**62, shape, generator=generator, device=device)
    return torch.stack([drawn[:, k] % below for k, below in enumerate(choices)], dim=1)


def moments(values: Float[Tensor, "n c"]) -> tuple[Float[Tensor, " c"], Float[Tensor, " c"]]:
    """Mean and standard deviation of each column, in float64 and without a float64 copy."""
    step = max(1, _BLOCK // max(1, values.shape[1]))
    zero = torch.zeros(values.shape[1], dtype=torch.float64, device=values.device)
    mean = sum((block.sum(dim=0, dtype=torch.float64) for block in values.split(step)), zero)
    mean = mean / len(values)
    squares = sum(((b.double() - mean).square().sum(dim=0) for b in values.split(step)), zero)
    return mean.cpu(), (squares / len(values)).sqrt().cpu()


class RunningMoments:
    """Mean and standard deviation of each channel of numbers seen a block at a time, in float64."""

    def __init__(self, channels: int) -> None:
        self.count, self.mean, self.squares = 0, np.zeros(channels), np.zeros(channels)

    def see(self, block: Float[np.ndarray, "n c"]) -> None:
        count, mean = len(block), block.mean(axis=0, dtype=np.float64)
        shift = mean - self.mean
        self.squares += np.square(block - mean).sum(axis=0)
        self.squares += shift**2 * (self.count * count / (self.count + count))
        self.count += count
        self.mean += shift * (count / self.count)

    def result(self) -> tuple[Float[Tensor, " c"], Float[Tensor, " c"]]:
        """A constant channel has standard deviation 1."""
        std = np.sqrt(self.squares / self.count)
        return torch.from_numpy(self.mean), torch.from_numpy(np.where(std > 0, std, 1.0))


def scalar_moments(values: Tensor) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """One mean and one standard deviation for all numbers of a tensor."""
    mean, deviation = moments(values.reshape(-1, 1))
    return mean.squeeze(0), deviation.squeeze(0)


class GridSamples(Samples):
    """One scalar field per sample on a tensor-product grid, observed at the same points.

    `targets` holds the values at `held`, the kept indices of each axis of the original `grid`.
    """

    value_channels = 1
    output_channels = 1

    def __init__(
        self,
        *,
        grid: tuple[int, ...],
        held: tuple[Int[Tensor, " _"], ...],
        targets: Float[Tensor, "n *held"],
        observed_positions: Float[Tensor, "o s"],
        observed_values: Float[Tensor, "n o"],
        condition: Float[Tensor, "n c"] | None = None,
    ) -> None:
        device = targets.device
        self.grid = grid
        self.held = tuple(indices.to(device) for indices in held)
        if targets.shape[1:] != self.grid_shape or len(grid) != len(held):
            raise ValueError(
                f"targets must have shape (n, {', '.join(map(str, self.grid_shape))}) for grid "
                f"{grid}, got {tuple(targets.shape)}"
            )
        if len(observed_values) != len(targets) or (
            condition is not None and len(condition) != len(targets)
        ):
            raise ValueError(f"observed_values and condition must have {len(targets)} rows")
        self.targets = targets
        self.observed_positions = observed_positions.to(device)
        self.observed_values = observed_values.to(device)
        self.condition = None if condition is None else condition.to(device)
        self.queries = index_coordinates(index_product(self.held), grid)
        self.domain = Domain.unit(len(grid))
        self.condition_channels = 0 if condition is None else condition.shape[1]

    @classmethod
    def fully_observed(
        cls, values: Float[Tensor, "n *grid"], targets: Float[Tensor, "n *grid"]
    ) -> Self:
        """Samples whose values are observed at every point of the grid that holds the targets."""
        grid = tuple(targets.shape[1:])
        held = tuple(torch.arange(size) for size in grid)
        positions = index_coordinates(index_product(held), grid)
        return cls(
            grid=grid,
            held=held,
            targets=targets,
            observed_positions=positions,
            observed_values=values.flatten(1),
        )

    def _parts(self) -> dict[str, Any]:
        names = ("grid", "held", "targets", "observed_positions", "observed_values", "condition")
        return {name: getattr(self, name) for name in names}

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def device(self) -> torch.device:
        return self.targets.device

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """How many points of each axis are held, to fold a batch's targets into a field."""
        return tuple(len(indices) for indices in self.held)

    def to(self, device: torch.device | str) -> Self:
        return type(self)(**self._parts() | {"targets": self.targets.to(device)})

    def choose(
        self, solutions: int, count: int | None, generator: torch.Generator
    ) -> Int[Tensor, "b k"] | None:
        total = len(self.queries)
        if count is None or count >= total:
            return None
        return random_subsets(solutions, count, total, generator)

    def batch(
        self,
        rows: Int[Tensor, " b"],
        chosen: Int[Tensor, "b k"] | None = None,
        augmentation: Int[Tensor, "b a"] | None = None,
    ) -> Batch:
        values, targets = self._gather(rows, chosen, augmentation)
        queries = self.queries if chosen is None else self.queries[chosen]
        observations = Observations(
            self.observed_positions.expand(len(rows), -1, -1),
            values[..., None],
            None if self.condition is None else self.condition[rows],
        )
        return Batch(observations, queries.expand(len(rows), -1, -1), targets[..., None])

    def _gather(
        self, rows: Tensor, chosen: Tensor | None, augmentation: Tensor | None
    ) -> tuple[Float[Tensor, "b o"], Float[Tensor, "b k"]]:
        """Observed values and targets."""
        if augmentation is not None:
            raise ValueError("augmentation was given, but these samples are used as stored")
        flat = self.targets.flatten(1)
        return self.observed_values[rows], flat[rows if chosen is None else (rows[:, None], chosen)]

    def on_grid(self, counts: tuple[int, ...]) -> Self:
        """The same samples at a rounded-linspace subset of the original grid."""
        if len(counts) != len(self.grid):
            raise ValueError(f"counts must give one number for each of {len(self.grid)} axes")
        wanted = tuple(map(subset_indices, self.grid, counts))
        targets = self.targets
        for axis, (indices, held) in enumerate(zip(wanted, self.held, strict=True)):
            indices = indices.to(self.device)
            where = torch.searchsorted(held, indices).clamp(max=len(held) - 1)
            if not torch.equal(held[where], indices):
                raise ValueError(
                    f"these samples hold {self.grid_shape} points of the {self.grid} grid, "
                    f"which do not contain the {counts} grid"
                )
            targets = targets.index_select(axis + 1, where)
        return type(self)(**self._parts() | {"held": wanted, "targets": targets})

    def conditions(self) -> Float[Tensor, "n c"]:
        return self.targets.new_empty(len(self), 0) if self.condition is None else self.condition

    def statistics(self) -> Statistics:
        return Statistics(*scalar_moments(self.observed_values), *scalar_moments(self.targets))


class BurgersSamples(GridSamples):
    """Burgers: inputs and targets are the same quantity and share one mean and deviation."""

    @classmethod
    def from_solutions(
        cls, solutions: Float[Tensor, "n t x"], condition: Float[Tensor, "n c"] | None = None
    ) -> Self:
        """Whole solutions, observed where those of the recipes are: at t = 0 and in both ends."""
        grid = (solutions.shape[1], solutions.shape[2])
        where = boundary_observation_indices(*grid).to(solutions.device)
        return cls(
            grid=grid,
            held=tuple(torch.arange(size) for size in grid),
            targets=solutions,
            observed_positions=index_coordinates(where, grid),
            observed_values=solutions[:, where[:, 0], where[:, 1]],
            condition=condition,
        )

    def statistics(self) -> Statistics:
        subset = self
        if self.grid_shape == self.grid:
            subset = self.on_grid(tuple(min(STATISTICS_GRID, size) for size in self.grid))
        return Statistics(*scalar_moments(subset.targets) * 2)
