"""Transolver (Wu et al., 2024), irregular-mesh form, with the adapters of Appendices B and C.

Enters: observations. Leaves: values at queries. The network maps a set of points to a value at
each, and lets them talk through a few slices. Each head spreads every point x over the slices g,
w_g(x) = softmax_g(W x / temperature), averages the points of a slice into a token,

    token_g = Σ_x w_g(x) V x / (Σ_x w_g(x) + 1e-5),

lets the tokens attend to each other, and hands them back to the points with the same weights. Two
operators decide what the points are:

- `Transolver` (Burgers): observations (x, v, 1) and queries (q, 0, 0) form one point set, and only
  the queries' values are kept. The queries of one group therefore see each other.
- `GridTransolver` (Darcy): the points are the observations (x, v) on a grid, and the solution is
  predicted where the coefficient was given.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from fst.baselines.shared import (
    GridOutput,
    InputLinear,
    check_observed_once,
    initialize,
    observed_cells,
    scatter_to_grid,
    without_padding,
)
from fst.config import ChannelConfig
from fst.evaluation_points import PointDraws
from fst.nn import MLP
from fst.operators import Operator, Output
from fst.types import Domain, Observations, check_queries

# The paper's grouped evaluation: queries in a random order, so that each group spans the domain.
GROUP_SEED, GROUP_SIZE = 2026091601, 2_500


@dataclass(frozen=True)
class TransolverConfig(ChannelConfig):
    """Everything that shapes the model. The defaults are the paper's, for Burgers and Darcy."""

    width: int = 328
    """Features of a token."""
    layers: int = 5
    """Blocks of the network."""
    heads: int = 8
    """Heads of every attention."""
    slices: int = 32
    """Slices into which points are gathered in each layer."""


class PhysicsAttention(nn.Module):
    """Attention among the slices of a point set; `mask` is True where a point is real."""

    def __init__(self, width: int, heads: int, slices: int) -> None:
        super().__init__()
        self.heads, head = heads, width // heads
        self.temperature = nn.Parameter(torch.full((heads, 1, 1), 0.5))
        self.assign = nn.Linear(width, width)
        self.assign_slice = nn.Linear(head, slices)
        self.value = nn.Linear(width, width)
        self.slice_query = nn.Linear(head, head, bias=False)
        self.slice_key = nn.Linear(head, head, bias=False)
        self.slice_value = nn.Linear(head, head, bias=False)
        self.output = nn.Linear(width, width)

    def _split(self, points: Float[Tensor, "b p w"]) -> Float[Tensor, "b h p k"]:
        per_head: Tensor = points.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return per_head

    def forward(
        self, points: Float[Tensor, "b p d"], mask: Bool[Tensor, "b p"] | None
    ) -> Float[Tensor, "b p d"]:
        states = self._split(self.assign(points))
        weights = (self.assign_slice(states) / self.temperature).softmax(dim=-1)  # b h p g
        shares = weights if mask is None else weights * mask[:, None, :, None]
        values = self._split(self.value(points))
        total = shares.sum(dim=2).unsqueeze(-1)  # b h g 1
        tokens = torch.einsum("bhpg,bhpk->bhgk", shares, values) / (total + 1e-5)
        mixed = nn.functional.scaled_dot_product_attention(
            self.slice_query(tokens), self.slice_key(tokens), self.slice_value(tokens)
        )
        spread = torch.einsum("bhpg,bhgk->bhpk", weights, mixed)
        attended: Tensor = self.output(spread.transpose(1, 2).flatten(-2))
        return attended


class Block(nn.Module):
    """x + attention(LN x), then x + MLP(LN x), without widening."""

    def __init__(self, width: int, heads: int, slices: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = PhysicsAttention(width, heads, slices)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_forward = MLP(width, width, width)

    def forward(
        self, points: Float[Tensor, "b p d"], mask: Bool[Tensor, "b p"] | None
    ) -> Float[Tensor, "b p d"]:
        points = points + self.attention(self.norm(points), mask)
        points = points + self.feed_forward(self.feed_norm(points))
        return points


class PointNetwork(nn.Module):
    """Transolver proper: point features in, values out."""

    def __init__(self, config: TransolverConfig, inputs: int) -> None:
        super().__init__()
        width = config.width
        self.embed = nn.Sequential(
            InputLinear(inputs, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.placeholder = nn.Parameter(torch.rand(width) / width)
        self.blocks = nn.ModuleList(
            Block(width, config.heads, config.slices) for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, config.output_channels)
        # The authors' code first makes the slice assignment orthogonal, then overwrites it so.
        self.apply(initialize)

    def forward(
        self, points: Float[Tensor, "b p i"], mask: Bool[Tensor, "b p"] | None
    ) -> Float[Tensor, "b p c"]:
        points = self.embed(points) + self.placeholder
        for block in self.blocks:
            points = block(points, mask)
        predicted: Tensor = self.output(self.norm(points))
        return predicted


class Transolver(Operator):
    """One point set of observations and queries."""

    config_type = TransolverConfig

    def __init__(self, config: TransolverConfig) -> None:
        super().__init__(config.domain, config.value_channels, config.output_channels, 0)
        self.config = config
        self.network = PointNetwork(config, config.domain.axes + config.value_channels + 1)

    def represent(
        self, observations: Observations, draws: PointDraws | None = None
    ) -> "PointSetOutput":
        positions, values = without_padding(observations, self.domain)
        values = self.standardize_values(values)
        points = torch.cat((positions, values, torch.ones_like(values[..., :1])), dim=-1)
        return PointSetOutput(self.domain, self, points, observations.mask)


@dataclass(frozen=True)
class PointSetOutput(Output):
    """The observed half of a point set, which every group of queries completes."""

    domain: Domain
    model: Transolver
    points: Float[Tensor, "b n i"]
    mask: Bool[Tensor, "b n"] | None

    @property
    def like(self) -> Tensor:
        return self.points

    def decode(self, queries: Float[Tensor, "b q s"]) -> Float[Tensor, "b q c"]:
        """Values at one group of queries."""
        queries = self.domain.to_unit(queries)
        batch, count, axes = queries.shape
        blank = queries.new_zeros(batch, count, self.points.shape[-1] - axes)
        points = torch.cat((self.points, torch.cat((queries, blank), dim=-1)), dim=1)
        mask = self.mask
        if mask is not None:
            mask = torch.cat((mask, mask.new_ones(batch, count)), dim=1)
        predicted = self.model.network(points, mask)[:, self.points.shape[1] :]
        return self.model.standardize_outputs.restore(predicted)

    def __call__(self, queries: Float[Tensor, "b q s"]) -> Float[Tensor, "b q c"]:
        queries = check_queries(queries, self.domain, self.like)
        generator = torch.Generator().manual_seed(GROUP_SEED)
        order = torch.randperm(queries.shape[1], generator=generator).to(queries.device)
        parts = [self.decode(queries[:, group]) for group in order.split(GROUP_SIZE)]
        return torch.cat(parts, dim=1)[:, order.argsort()]


@dataclass(frozen=True)
class GridTransolverConfig(TransolverConfig):
    """The same sizes, and the grid on which coefficient and solution live (the paper's Darcy)."""

    grid: tuple[int, ...] = (128, 128)
    """Points on each axis of the grid."""

    def __post_init__(self) -> None:
        super().__post_init__()
        axes = self.domain.axes
        if len(self.grid) != axes or any(size < 2 for size in self.grid):
            raise ValueError(f"grid must give {axes} numbers of at least 2, got {self.grid}")


class GridTransolver(Operator):
    """The solution at the very points where the input was observed."""

    config_type = GridTransolverConfig

    def __init__(self, config: GridTransolverConfig) -> None:
        super().__init__(config.domain, config.value_channels, config.output_channels, 0)
        self.config = config
        self.network = PointNetwork(config, config.domain.axes + config.value_channels)

    def represent(self, observations: Observations, draws: PointDraws | None = None) -> GridOutput:
        positions, values = without_padding(observations, self.domain)
        points = torch.cat((positions, self.standardize_values(values)), dim=-1)
        predicted = self.network(points, observations.mask)  # b n c
        cells = observed_cells(observations, self.domain, self.config.grid)
        restored = self.standardize_outputs.restore(predicted)
        on_grid = scatter_to_grid(restored, cells, self.config.grid)
        return GridOutput(self.domain, self.config.grid, on_grid)

    def check(self, observations: Observations) -> None:
        super().check(observations)
        check_observed_once(observations, self.domain, self.config.grid, everywhere=True)
