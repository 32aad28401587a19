"""One split of one data set, and the batches that steps are made of.

Enters: row numbers and, for a training step, which targets to ask for. Leaves: a `Batch` of
observations, queries and targets in the data's own units. Where a split is resident on a device, a
batch is a few gathers: nothing loops over samples and nothing waits for the host. Where it is too
large for that, worker processes read batches in the order of a plan while the device computes.

A grid's axis of N points has the indices 0..N−1 and the coordinates index / (N−1), so every grid
lies in the unit box. A smaller grid keeps round(linspace(0, N−1, n)) of each axis (paper,
Appendix B).
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.data import DataLoader

from fst.data.files import DataError
from fst.types import Device, Domain, Observations

Storage = Literal["auto", "resident", "streamed"]

# "auto" keeps a split on the device where it takes at most this.
_CPU_BYTES = 4 * 2**30
_GPU_SHARE = 0.25
_PREFETCHED = 4  # batches that a worker may have ready

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

    def to(self, target: Device | torch.dtype) -> Self:
        """On a device, without waiting where the batch is pinned; or in another floating dtype."""
        # Masks stay boolean whatever dtype the numbers take.
        kept = torch.bool if isinstance(target, torch.dtype) else None
        return self._each(lambda t: t if t.dtype == kept else t.to(target, non_blocking=True))

    def pin_memory(self) -> Self:
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        observations, mask = self.observations.each(change), self.mask
        mask = None if mask is None else change(mask)
        return type(self)(observations, change(self.queries), change(self.targets), mask)


@dataclass(frozen=True)
class Statistics:
    """Means and standard deviations, float64 on the CPU: scalars, or one for each channel."""

    value_mean: Tensor
    value_std: Tensor
    output_mean: Tensor
    output_std: Tensor


class Asked(NamedTuple):
    """One batch of a plan: rows, the seed of what is random (None: nothing), targets a row.

    What a batch holds is a function of these alone, so neither the number of workers nor where a
    run was resumed changes it.
    """

    rows: Int[Tensor, " b"]
    seed: int | None = None
    queries: int | None = None


class Rows(ABC):
    """Numbered samples on one device: all that the training loop needs to know of data.

    What a batch holds is between the data and the training objective.
    """

    streamed: ClassVar[bool] = False
    """Whether training reads batches by `iterate`, and lets the plan say what is random."""

    augmented: bool = False
    """Whether samples can be changed at random."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def to(self, device: Device) -> Self:
        """The same rows on a device, as a new object."""

    def choose(
        self, solutions: int, count: int | None, generator: torch.Generator
    ) -> Int[Tensor, "b k"] | None:
        """Random targets for each of `solutions` rows, without replacement; None asks for all.

        The generator lives on the samples' device. The result is for `batch` alone to interpret.
        """
        return None

    def augmentations(self, solutions: int, generator: torch.Generator) -> Tensor | None:
        """A random change for each of `solutions` rows; None where data are used as stored."""
        return None

    def batch(
        self,
        rows: Int[Tensor, " b"],
        chosen: Int[Tensor, "b k"] | None = None,
        augmentation: Tensor | None = None,
    ) -> Any:
        """The given rows, at the `chosen` targets (all of them when None).

        `chosen` and `augmentation` come from the two methods above.
        """
        if augmentation is not None and not self.augmented:
            raise ValueError("augmentation was given, but these samples are used as stored")
        return self.gather(rows, chosen, augmentation)

    @abstractmethod
    def gather(self, rows: Tensor, chosen: Tensor | None, augmentation: Tensor | None) -> Any:
        """What `batch` returns, once it is known that the augmentation is these samples' own."""

    def iterate(self, plan: Iterable[tuple[Any, ...]]) -> Generator[Any, None, None]:
        """A batch on the device for each entry of the plan (see `Asked`), in its order."""
        for entry in plan:
            yield self.batch(Asked(*entry).rows.to(self.device))

    def in_order(self, parts: Iterable[Int[Tensor, " b"]]) -> Generator[Any, None, None]:
        """The given rows as they are, one batch for each part."""
        return self.iterate(Asked(part) for part in parts)

    def describe(self) -> dict[str, Any]:
        """Enough of training data to notice when they are replaced by others, as JSON values."""
        return {"training_samples": len(self)}

    def left_out(self) -> dict[str, Any]:
        """What could not be read and did not stop a run, which keeps it."""
        return {}


class Streamed(Rows):
    """Rows that worker processes read ahead of time, in the order of a plan.

    What a row becomes is a function of the row and the seed alone, and nothing is drawn from the
    generator of the whole process: a resumed run starts its stream anew.
    """

    streamed = True
    workers: int
    _device: torch.device

    @property
    def device(self) -> torch.device:
        return self._device

    def to(self, device: Device) -> Self:
        moved = copy.copy(self)
        moved._device = torch.device(device)
        return moved

    @abstractmethod
    def __getitem__(self, asked: Asked) -> Any:
        """One batch on the host, as a worker reads it."""

    def received(self, batch: Any) -> Any:
        """What a worker has read, as this process hands it on."""
        return batch

    def gather(self, rows: Tensor, chosen: Tensor | None, augmentation: Tensor | None) -> Any:
        """The given rows with all of their targets, read at once."""
        if chosen is not None:
            raise ValueError("chosen must be None: streamed rows are read with all their targets")
        return self.received(self[Asked(rows)]).to(self._device)

    def iterate(self, plan: Iterable[tuple[Any, ...]]) -> Generator[Any, None, None]:
        source: Any = self
        loader: DataLoader[Any] = DataLoader(
            source,
            sampler=(Asked(*entry) for entry in plan),
            batch_size=None,
            num_workers=self.workers,
            prefetch_factor=_PREFETCHED if self.workers else None,
            collate_fn=_as_it_is,
            pin_memory=self._device.type == "cuda",
            generator=torch.Generator(),  # or the loader draws from everyone's
        )
        for batch in loader:
            yield self.received(batch).to(self._device)


def _as_it_is(batch: Any) -> Any:
    return batch


def device_memory(device: torch.device) -> int | None:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def stays_resident(storage: Storage, size: int, device: torch.device, what: str) -> bool:
    """Whether so many bytes are kept on the device; an error where it is asked to and cannot."""
    memory = device_memory(device)
    if storage == "auto":
        return size <= (_CPU_BYTES if memory is None else _GPU_SHARE * memory)
    if storage == "resident" and memory is not None and size > memory:
        raise DataError(
            f"{what} take {size / 2**30:.1f} GiB, and {device} has {memory / 2**30:.1f} GiB; "
            'use storage "streamed" or, for images, a smaller stored_size'
        )
    return storage == "resident"


class Samples(Rows):
    """One split of one data set of solutions."""

    domain: Domain
    value_channels: int
    output_channels: int
    condition: Float[Tensor, "n c"] | None = None
    moves: tuple[int, ...] = ()
    """How many symmetries of each kind can move samples; number 0 leaves them as they are."""

    @property
    def grid_shape(self) -> tuple[int, ...] | None:
        """How many points of each axis are held, where they lie on a grid."""
        return None

    def on_grid(self, counts: tuple[int, ...]) -> Self:
        """The same samples at fewer points of their grid."""
        raise ValueError(f"a {counts} grid was asked for, but these samples lie on no grid")

    def conditions(self) -> Float[Tensor, "n c"]:
        """The condition of every sample; without channels where there is none."""
        none = torch.empty(len(self), 0, device=self.device)
        return none if self.condition is None else self.condition

    @property
    def condition_channels(self) -> int:
        return self.conditions().shape[1]

    @abstractmethod
    def statistics(self) -> Statistics:
        """For standardisation. Ask the training split only."""

    def describe(self) -> dict[str, Any]:
        mean, std = moments(self.conditions())
        found = vars(self.statistics()) | {"condition_mean": mean, "condition_std": std}
        # What a standard deviation is called in runs: the first of them had this name.
        stored = {name.replace("_std", "_deviation"): each for name, each in found.items()}
        numbers = {name: numbers.reshape(-1).tolist() for name, numbers in stored.items()}
        return {"training_samples": len(self), **numbers}


def random_subsets(
    solutions: int, count: int, total: int, generator: torch.Generator
) -> Int[Tensor, "b k"]:
    """`count` of `total` indices for each solution, without replacement, in random order."""
    # The order of independent uniform numbers is a uniform permutation; its start a uniform subset.
    keys = torch.rand(solutions, total, generator=generator, device=generator.device)
    return keys.topk(count, dim=1, largest=False).indices


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

    @property
    def std(self) -> Float[np.ndarray, " c"]:
        return np.sqrt(self.squares / self.count)

    @property
    def mean_square(self) -> Float[np.ndarray, " c"]:
        return self.squares / self.count + self.mean**2

    @property
    def size_ratio(self) -> float:
        """Of the largest root mean square of a channel to the smallest that is not zero."""
        sizes = np.sqrt(self.mean_square)
        filled = sizes[sizes > 0]
        return float(filled.max() / filled.min()) if len(filled) else 1.0

    @property
    def offsets(self) -> Float[np.ndarray, " c"]:
        """|mean| / standard deviation of each channel; 0 for one that is constant."""
        constant = self.std == 0
        return np.where(constant, 0.0, np.abs(self.mean) / np.where(constant, 1.0, self.std))

    def result(self) -> tuple[Float[Tensor, " c"], Float[Tensor, " c"]]:
        return torch.from_numpy(self.mean), torch.from_numpy(self.std)


def scalar_moments(values: Tensor) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """One mean and one standard deviation for all numbers of a tensor."""
    mean, std = moments(values.reshape(-1, 1))
    return mean.squeeze(0), std.squeeze(0)


def subset_indices(size: int, count: int) -> Int[Tensor, " count"]:
    """`count` of the `size` indices of an axis, as evenly spaced as whole numbers allow."""
    if not 1 <= count <= size:
        raise ValueError(f"count must lie between 1 and the axis' size {size}, got {count}")
    return torch.linspace(0, size - 1, count, dtype=torch.float64).round().long()


def index_product(axes: tuple[Int[Tensor, " _"], ...]) -> Int[Tensor, "q s"]:
    """All combinations of the axes' indices, the last axis running fastest."""
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)


def index_coordinates(indices: Int[Tensor, "q s"], grid: tuple[int, ...]) -> Float[Tensor, "q s"]:
    """index / (N−1) on each axis, float32. Divided in float64, so that rounding happens once."""
    last = torch.tensor(grid, dtype=torch.float64, device=indices.device) - 1
    return (indices / last.clamp(min=1)).float()


def boundary_observation_indices(times: int, points: int) -> Int[Tensor, "n 2"]:
    """Where Burgers is observed, as (time, cell): all of t = 0, then both end cells of each time.

    For the paper's 201 × 1,024 grid these are 1,024 + 2·200 = 1,424 points.
    """
    initial = index_product((torch.zeros(1, dtype=torch.long), torch.arange(points)))
    ends = torch.tensor([0, points - 1])
    return torch.cat([initial, index_product((torch.arange(1, times), ends))])


@dataclass(eq=False, repr=False, kw_only=True)
class GridSamples(Samples):
    """One scalar field per sample on a tensor-product grid, observed at the same points. `targets`
    holds the values at `held`, the kept indices of each axis of the original `grid`."""

    value_channels = 1
    output_channels = 1

    grid: tuple[int, ...]
    held: tuple[Int[Tensor, " _"], ...]
    targets: Float[Tensor, "n *held"]
    observed_positions: Float[Tensor, "o s"]
    observed_values: Float[Tensor, "n o"]
    condition: Float[Tensor, "n c"] | None = None

    def __post_init__(self) -> None:
        targets, condition, device = self.targets, self.condition, self.targets.device
        self.held = tuple(indices.to(device) for indices in self.held)
        if targets.shape[1:] != self.grid_shape or len(self.grid) != len(self.held):
            raise ValueError(
                f"targets must have shape (n, {', '.join(map(str, self.grid_shape))}) for grid "
                f"{self.grid}, got {tuple(targets.shape)}"
            )
        if len(self.observed_values) != len(targets) or (
            condition is not None and len(condition) != len(targets)
        ):
            raise ValueError(f"observed_values and condition must have {len(targets)} rows")
        self.observed_positions = self.observed_positions.to(device)
        self.observed_values = self.observed_values.to(device)
        self.condition = None if condition is None else condition.to(device)
        self.queries = index_coordinates(index_product(self.held), self.grid)
        self.domain = Domain.unit(len(self.grid))

    @classmethod
    def fully_observed(
        cls, values: Float[Tensor, "n *grid"], targets: Float[Tensor, "n *grid"]
    ) -> Self:
        """Samples whose values are observed at every point of the grid that holds the targets."""
        everywhere = index_product(tuple(map(torch.arange, targets.shape[1:])))
        return cls.observed_at(everywhere, values.flatten(1), targets)

    @classmethod
    def observed_at(
        cls,
        where: Int[Tensor, "o s"],
        values: Float[Tensor, "n o"],
        targets: Float[Tensor, "n *grid"],
        condition: Float[Tensor, "n c"] | None = None,
    ) -> Self:
        """Samples that hold the whole grid of the targets, observed at these indices of it."""
        grid = tuple(targets.shape[1:])
        return cls(
            grid=grid,
            held=tuple(map(torch.arange, grid)),
            targets=targets,
            observed_positions=index_coordinates(where, grid),
            observed_values=values,
            condition=condition,
        )

    def _parts(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(GridSamples)}

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def device(self) -> torch.device:
        return self.targets.device

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """How many points of each axis are held, to fold a batch's targets into a field."""
        return tuple(len(indices) for indices in self.held)

    def to(self, device: Device) -> Self:
        return type(self)(**self._parts() | {"targets": self.targets.to(device)})

    def choose(
        self, solutions: int, count: int | None, generator: torch.Generator
    ) -> Int[Tensor, "b k"] | None:
        total = len(self.queries)
        if count is None or count >= total:
            return None
        return random_subsets(solutions, count, total, generator)

    def augmentations(
        self, solutions: int, generator: torch.Generator
    ) -> Int[Tensor, "b a"] | None:
        """For each row a uniform move of each kind."""
        if not self.moves:
            return None
        # A 62-bit number modulo the range: one draw for all, with a bias below 1e-15.
        shape, device = (solutions, len(self.moves)), generator.device
        drawn = torch.randint(2**62, shape, generator=generator, device=device)
        return torch.stack([drawn[:, k] % below for k, below in enumerate(self.moves)], dim=1)

    def gather(self, rows: Tensor, chosen: Tensor | None, augmentation: Tensor | None) -> Batch:
        values, targets = self.numbers(rows, chosen, augmentation)
        queries = self.queries if chosen is None else self.queries[chosen]
        positions = self.observed_positions.expand(len(rows), -1, -1)
        condition = None if self.condition is None else self.condition[rows]
        observations = Observations(positions, values[..., None], condition)
        return Batch(observations, queries.expand(len(rows), -1, -1), targets[..., None])

    def numbers(
        self, rows: Tensor, chosen: Tensor | None, augmentation: Tensor | None
    ) -> tuple[Float[Tensor, "b o"], Float[Tensor, "b k"]]:
        """Observed values and targets, of moved samples where an augmentation says how."""
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

    def statistics(self) -> Statistics:
        return Statistics(*scalar_moments(self.observed_values), *scalar_moments(self.targets))


class BurgersSamples(GridSamples):
    """Burgers: inputs and targets are one quantity, with one mean and standard deviation."""

    @classmethod
    def from_solutions(
        cls, solutions: Float[Tensor, "n t x"], condition: Float[Tensor, "n c"] | None = None
    ) -> Self:
        """Whole solutions, observed where those of the recipes are: at t = 0 and in both ends."""
        where = boundary_observation_indices(*solutions.shape[1:]).to(solutions.device)
        return cls.observed_at(where, solutions[:, where[:, 0], where[:, 1]], solutions, condition)

    def statistics(self) -> Statistics:
        subset = self
        if self.grid_shape == self.grid:
            subset = self.on_grid(tuple(min(STATISTICS_GRID, size) for size in self.grid))
        return Statistics(*scalar_moments(subset.targets) * 2)
