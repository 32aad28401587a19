"""What baselines share: padding and first layers, outputs answered in chunks or on one grid.

A grid of N points on an axis has the unit coordinates index / (N - 1), so a coordinate x of the
unit box stands for the index round(x (N - 1)).
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from fst.operators import Output, queries_at_once
from fst.types import Domain, Observations, check_queries, product_dtype

INITIAL_STD = 0.02  # of truncated normal weights, as usual for transformers

# How far from a grid point, in grid steps, a coordinate may be and still mean that point: well
# above float32 rounding on a thousand points, well below a point that someone meant otherwise.
ON_GRID_TOLERANCE = 1e-2


def without_padding(
    observations: Observations, domain: Domain
) -> tuple[Float[Tensor, "b n s"], Float[Tensor, "b n v"]]:
    """Positions in the unit box, and values, with zeros where the mask says padding.

    Padding may hold anything, NaN included, and zero times NaN is NaN.
    """
    positions, values = domain.to_unit(observations.positions), observations.values
    if observations.mask is None:
        return positions, values
    padding = ~observations.mask.unsqueeze(-1)
    return positions.masked_fill(padding, 0.0), values.masked_fill(padding, 0.0)


def initialize(module: nn.Module) -> None:
    """Give a linear layer the usual first weights of a transformer."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=INITIAL_STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


class InputLinear(nn.Linear):
    """A first layer, which reads coordinates and values as they are.

    bfloat16 would leave 513 of 1,024 evenly spaced coordinates distinct. So under autocast the
    products run in the dtype of the weights, and only the result is rounded.
    """

    def forward(self, inputs: Float[Tensor, "... i"]) -> Float[Tensor, "... o"]:
        with torch.autocast(inputs.device.type, enabled=False):
            outputs = super().forward(inputs)
        return outputs.to(product_dtype(outputs))


@dataclass(frozen=True)
class ModelOutput(Output):
    """What a model has made of the observations, for `model.decode` to answer queries from.

    Queries do not see each other, so that they can be answered in chunks.
    """

    domain: Domain
    model: Any
    state: Tensor
    positions: Float[Tensor, "b n s"]
    numbers_per_query: int
    """About how many numbers `decode` holds at once for one query of one sample."""

    @property
    def like(self) -> Tensor:
        # Not the state: under autocast it is bfloat16, which queries need not be.
        return self.positions

    def decode(self, queries: Float[Tensor, "b q s"]) -> Float[Tensor, "b q c"]:
        values: Tensor = self.model.decode(self.state, queries)
        return values

    def __call__(self, queries: Float[Tensor, "b q s"]) -> Float[Tensor, "b q c"]:
        queries = check_queries(queries, self.domain, self.like)
        size = queries_at_once(queries, len(queries) * self.numbers_per_query)
        return torch.cat([self.decode(part) for part in queries.split(size, dim=1)], dim=1)


def grid_coordinates(
    positions: Float[Tensor, "b p s"], grid: tuple[int, ...]
) -> Float[Tensor, "b p s"]:
    """Unit positions in grid steps: whole numbers at the grid's points."""
    # Axis by axis: a tensor of the sizes would have to travel to the GPU each time.
    return torch.stack(
        [positions[..., axis] * (size - 1) for axis, size in enumerate(grid)], dim=-1
    )


def flat_indices(positions: Float[Tensor, "b p s"], grid: tuple[int, ...]) -> Int[Tensor, "b p"]:
    """The nearest grid point of each unit position, the last axis running fastest."""
    steps = grid_coordinates(positions, grid).round().long()
    index = steps[..., 0]
    for axis, size in enumerate(grid[1:], start=1):
        index = index * size + steps[..., axis]
    return index


def check_on_grid(
    name: str,
    positions: Float[Tensor, "b p s"],
    grid: tuple[int, ...],
    mask: Bool[Tensor, "b p"] | None = None,
) -> None:
    """Raise unless every unit position is a point of the grid."""
    steps = grid_coordinates(positions, grid)
    on_grid = ((steps - steps.round()).abs() <= ON_GRID_TOLERANCE).all(dim=-1)
    if mask is not None:
        on_grid = on_grid | ~mask
    if not bool(on_grid.all()):
        where = tuple((~on_grid).nonzero()[0].tolist())
        raise ValueError(
            f"{name} must be points of the {' x '.join(map(str, grid))} grid, which is all this "
            f"model knows; index {where} is {steps[where].tolist()} grid steps from the corner"
        )


def observed_cells(
    observations: Observations, domain: Domain, grid: tuple[int, ...]
) -> Int[Tensor, "b n"]:
    """The grid point of each observation; padding goes to one more cell behind the last."""
    index = flat_indices(domain.to_unit(observations.positions), grid)
    if observations.mask is not None:
        index = index.where(observations.mask, prod(grid))
    return index


def scatter_to_grid(
    values: Float[Tensor, "b n c"], cells: Int[Tensor, "b n"], grid: tuple[int, ...]
) -> Float[Tensor, "b g c"]:
    """Values at their grid points and zero elsewhere."""
    batch, _, channels = values.shape
    empty = values.new_zeros(batch, prod(grid) + 1, channels)
    return empty.scatter(1, cells.unsqueeze(-1).expand_as(values), values)[:, :-1]


def check_observed_once(
    observations: Observations, domain: Domain, grid: tuple[int, ...], everywhere: bool
) -> None:
    """Raise unless each observation has a grid point of its own and, if asked, each point one."""
    check_on_grid("positions", domain.to_unit(observations.positions), grid, observations.mask)
    cells = observed_cells(observations, domain, grid)
    seen = torch.zeros(len(cells), prod(grid) + 1, dtype=torch.int32, device=cells.device)
    seen.scatter_add_(1, cells, torch.ones_like(cells, dtype=torch.int32))
    seen = seen[:, :-1]
    if bool((seen > 1).any()):
        sample, cell = (seen > 1).nonzero()[0].tolist()
        raise ValueError(f"positions names grid point {cell} of sample {sample} more than once")
    if everywhere and bool((seen == 0).any()):
        sample, cell = (seen == 0).nonzero()[0].tolist()
        raise ValueError(
            f"positions must cover all {prod(grid)} points of the grid; "
            f"sample {sample} has no observation at grid point {cell}"
        )


@dataclass(frozen=True)
class GridOutput(Output):
    """A prediction on one grid, in original units. It answers by index, without interpolation."""

    domain: Domain
    grid: tuple[int, ...]
    values: Float[Tensor, "b g c"]

    @property
    def like(self) -> Tensor:
        return self.values

    def decode(self, queries: Float[Tensor, "b q s"]) -> Float[Tensor, "b q c"]:
        index = flat_indices(self.domain.to_unit(queries), self.grid)
        return self.values.gather(1, index.unsqueeze(-1).expand(-1, -1, self.values.shape[-1]))

    def __call__(self, queries: Float[Tensor, "b q s"]) -> Float[Tensor, "b q c"]:
        queries = check_queries(queries, self.domain, self.like)
        check_on_grid("queries", self.domain.to_unit(queries), self.grid)
        return self.decode(queries)
