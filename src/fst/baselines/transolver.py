"""Transolver (Wu et al., 2024), irregular-mesh form, with the adapters of Appendices B and C.

Enters: observations. Leaves: values at queries. The network (`physics_attention`) maps a set of
points to a value at each; two operators decide what the points are:

- `Transolver` (Burgers): observations (x, v, 1) and queries (q, 0, 0) form one point set, and only
  the queries' values are kept. The queries of one group therefore see each other.
- `GridTransolver` (Darcy): the points are the observations (x, v) on a grid, and the solution is
  predicted where the coefficient was given.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fst.baselines.inputs import without_padding
from fst.baselines.outputs import GridOutput, check_observed_once, observed_cells, place_on_grid
from fst.baselines.physics_attention import PointNetwork
from fst.config import check_heads, check_sizes
from fst.evaluation_points import PointDraws
from fst.operators import Operator, Output
from fst.types import Domain, Observations, check_fields, check_queries

# The paper's grouped evaluation: queries in a random order, so that each group spans the domain.
GROUP_SEED, GROUP_SIZE = 2026091601, 2_500


@dataclass(frozen=True)
class TransolverConfig:
    """Everything that shapes the model. The defaults are the paper's, for Burgers and Darcy."""

    low: tuple[float, ...] = (0.0, 0.0)
    """Lower end of the domain on each axis."""
    high: tuple[float, ...] = (1.0, 1.0)
    """Upper end of the domain on each axis."""
    value_channels: int = 1
    """Channels of the observed values."""
    output_channels: int = 1
    """Channels of the predicted field."""
    width: int = 328
    """Features of a token."""
    layers: int = 5
    """Blocks of the network."""
    heads: int = 8
    """Heads of every attention."""
    slices: int = 32
    """Slices into which points are gathered in each layer."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_sizes(self, value_channels=1, output_channels=1, width=1, heads=1, layers=1, slices=1)
        check_heads(self, "width", "heads")
        _ = self.domain  # low and high are checked here, not when the model is built

    @property
    def domain(self) -> Domain:
        return Domain(self.low, self.high)


def build_network(config: TransolverConfig, inputs: int) -> PointNetwork:
    outputs, width = config.output_channels, config.width
    return PointNetwork(inputs, outputs, width, config.layers, config.heads, config.slices)


class Transolver(Operator):
    """One point set of observations and queries."""

    config_type = TransolverConfig

    def __init__(self, config: TransolverConfig) -> None:
        super().__init__(config.domain, config.value_channels, config.output_channels, 0)
        self.config = config
        self.network = build_network(config, config.domain.axes + config.value_channels + 1)

    def represent(
        self, observations: Observations, draws: PointDraws | None = None
    ) -> "PointSetOutput":
        del draws
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
        self.network = build_network(config, config.domain.axes + config.value_channels)

    def represent(self, observations: Observations, draws: PointDraws | None = None) -> GridOutput:
        del draws
        positions, values = without_padding(observations, self.domain)
        points = torch.cat((positions, self.standardize_values(values)), dim=-1)
        predicted = self.network(points, observations.mask)  # b n c
        cells = observed_cells(observations, self.domain, self.config.grid)
        restored = self.standardize_outputs.restore(predicted)
        placed = place_on_grid(restored, cells, self.config.grid)
        return GridOutput(self.domain, self.config.grid, placed)

    def check(self, observations: Observations) -> None:
        super().check(observations)
        check_observed_once(observations, self.domain, self.config.grid, everywhere=True)
