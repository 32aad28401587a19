"""Training samples moved by the exact symmetries of their equation. Off in the paper's recipes.

Enters: what `Samples.batch` takes, and a symmetry for each row, drawn by `augmentations`. Leaves:
the batch that the moved solution would give if it had been stored: the same observed places, the
same queries, other values. Nothing is interpolated, so a moved sample is as accurate as a stored
one; every value is one gather from the whole solution, which therefore stays on the device.
"""

from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fst.data.samples import Batch, BurgersSamples, GridSamples, Samples, Statistics, random_subsets
from fst.data.views import (
    boundary_observation_indices,
    index_coordinates,
    index_product,
    subset_indices,
)
from fst.types import Domain, Observations


def _draw(
    choices: Int[Tensor, " a"], solutions: int, generator: torch.Generator
) -> Int[Tensor, "b a"]:
    """A uniform whole number below each of `choices`, for each solution."""
    # A 62-bit number modulo the range: one draw for all, with a bias below 1e-15.
    shape, device = (solutions, len(choices)), choices.device
    return torch.randint(2**62, shape, generator=generator, device=device) % choices


class PeriodicSamples(Samples):
    """Burgers moved by u(t, x) → u(t, x + s) and u(t, x) → −u(t, −x).

    Both map solutions of the periodic equation to solutions. On cell centres a shift by whole cells
    is i → i + s mod n and the reflection i → n−1−i, so both are exact on the grid as well. (The law
    of the initial conditions is not quite invariant: its waves do not close exactly at the seam of
    the interval, and its window stands in the left half. Moved samples solve the same equation, but
    are drawn from a slightly wider law.)
    """

    value_channels = 1
    output_channels = 1

    def __init__(self, whole: BurgersSamples, supervision: tuple[int, ...] | None = None) -> None:
        if whole.grid_shape != whole.grid:
            raise ValueError(
                f"whole must hold the whole {whole.grid} grid, it holds {whole.grid_shape}"
            )
        self.whole = whole
        self.supervision = whole.grid if supervision is None else supervision
        axes = tuple(map(subset_indices, whole.grid, self.supervision))
        self.supervised = index_product(axes).to(whole.device)
        self.observed = boundary_observation_indices(*whole.grid).to(whole.device)
        self.queries = index_coordinates(self.supervised, whole.grid)
        self.choices = torch.tensor([whole.grid[1], 2], device=whole.device)
        self.domain = whole.domain
        self.condition_channels = whole.condition_channels

    def __len__(self) -> int:
        return len(self.whole)

    @property
    def device(self) -> torch.device:
        return self.whole.device

    def to(self, device: torch.device | str) -> Self:
        return type(self)(self.whole.to(device), self.supervision)

    def choose(
        self, solutions: int, count: int | None, generator: torch.Generator
    ) -> Int[Tensor, "b k"] | None:
        if count is None or count >= len(self.supervised):
            return None
        return random_subsets(solutions, count, len(self.supervised), generator)

    def augmentations(self, solutions: int, generator: torch.Generator) -> Int[Tensor, "b 2"]:
        """For each row a shift in whole cells, and 1 where the shifted solution is reflected."""
        return _draw(self.choices, solutions, generator)

    def batch(
        self,
        rows: Int[Tensor, " b"],
        chosen: Int[Tensor, "b k"] | None = None,
        augmentation: Int[Tensor, "b 2"] | None = None,
    ) -> Batch:
        if augmentation is None:
            augmentation = torch.zeros(len(rows), 2, dtype=torch.long, device=self.device)
        places = self.supervised if chosen is None else self.supervised[chosen]
        queries = self.queries if chosen is None else self.queries[chosen]
        whole = self.whole
        observations = Observations(
            whole.observed_positions.expand(len(rows), -1, -1),
            self._moved(rows, self.observed, augmentation)[..., None],
            None if whole.condition is None else whole.condition[rows],
        )
        targets = self._moved(rows, places, augmentation)[..., None]
        return Batch(observations, queries.expand(len(rows), -1, -1), targets)

    def _moved(
        self, rows: Int[Tensor, " b"], places: Int[Tensor, "*b k 2"], augmentation: Tensor
    ) -> Float[Tensor, "b k"]:
        """The moved solutions at (time, cell) places."""
        shift, reflected = augmentation[:, :1], augmentation[:, 1:]
        time, cell = places.unbind(dim=-1)
        cells = self.whole.grid[1]
        mirrored = cell + reflected * (cells - 1 - 2 * cell)
        stored = self.whole.targets[rows[:, None], time, (mirrored + shift) % cells]
        return stored * (1 - 2 * reflected)

    def conditions(self) -> Float[Tensor, "n c"]:
        return self.whole.conditions()

    def statistics(self) -> Statistics:
        return self.whole.on_grid(self.supervision).statistics()


class SquareSamples(Samples):
    """Darcy moved by the symmetries of the square, which leave −∇·(a∇u) = 1 as it is.

    Swapping the axes is exact on any square grid. A reflection is not, if it only reverses the
    indices: the data set keeps the nodes (1 + jk)/N, k = N/resolution, of a fine grid, and
    reflected they are (N−1−jk)/N, off by (k−2)/N. At resolution 128 of N = 1,024 that is three
    quarters of a cell; measured, it moves the solution by 0.026 in relative L2 for one axis and
    0.039 for both, as much as the error of a trained model. So reflections are taken on the fine
    grid, when the sample is made, and stored: `coefficients` and `solutions` hold each sample `f`
    times, either once (f = 1: two symmetries, identity and swap) or once for each reflection
    (f = 4: all eight, exactly).
    """

    value_channels = 1
    output_channels = 1
    condition_channels = 0

    def __init__(
        self, coefficients: Float[Tensor, "n f r r"], solutions: Float[Tensor, "n f r r"]
    ) -> None:
        if coefficients.shape != solutions.shape or solutions.ndim != 4:
            raise ValueError(
                "coefficients and solutions must have one shape (n, f, r, r), "
                f"got {tuple(coefficients.shape)} and {tuple(solutions.shape)}"
            )
        self.coefficients = coefficients
        self.solutions = solutions
        self.plain = GridSamples.fully_observed(coefficients[:, 0], solutions[:, 0])
        size = solutions.shape[-1]
        order = torch.arange(size**2, device=solutions.device).reshape(size, size)
        self.orders = torch.stack([order.flatten(), order.mT.flatten()])
        self.choices = torch.tensor([solutions.shape[1], 2], device=solutions.device)
        self.domain = Domain.unit(2)

    def __len__(self) -> int:
        return len(self.solutions)

    @property
    def device(self) -> torch.device:
        return self.solutions.device

    def to(self, device: torch.device | str) -> Self:
        return type(self)(self.coefficients.to(device), self.solutions.to(device))

    def choose(
        self, solutions: int, count: int | None, generator: torch.Generator
    ) -> Int[Tensor, "b k"] | None:
        return self.plain.choose(solutions, count, generator)

    def augmentations(self, solutions: int, generator: torch.Generator) -> Int[Tensor, "b 2"]:
        """For each row the number of a stored reflection, and 1 where the axes are swapped."""
        return _draw(self.choices, solutions, generator)

    def batch(
        self,
        rows: Int[Tensor, " b"],
        chosen: Int[Tensor, "b k"] | None = None,
        augmentation: Int[Tensor, "b 2"] | None = None,
    ) -> Batch:
        if augmentation is None:
            augmentation = torch.zeros(len(rows), 2, dtype=torch.long, device=self.device)
        reflection, swapped = augmentation[:, :1], augmentation[:, 1]
        order = self.orders[swapped]  # b r²: where each place of the moved field is stored
        asked = order if chosen is None else order.gather(1, chosen)
        values = self.coefficients.flatten(2)[rows[:, None], reflection, order]
        targets = self.solutions.flatten(2)[rows[:, None], reflection, asked]
        queries = self.plain.queries if chosen is None else self.plain.queries[chosen]
        observations = Observations(
            self.plain.observed_positions.expand(len(rows), -1, -1), values[..., None]
        )
        return Batch(observations, queries.expand(len(rows), -1, -1), targets[..., None])

    def conditions(self) -> Float[Tensor, "n c"]:
        return self.plain.conditions()

    def statistics(self) -> Statistics:
        return self.plain.statistics()
