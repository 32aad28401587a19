"""Small baselines, and the exact solutions that their tests learn and look at."""

from typing import Any

import torch
from torch import Tensor, nn

from fst import Observations
from fst.base import build_model as build
from fst.baselines import (
    DeepONetConfig,
    FNOConfig,
    GridTransolverConfig,
    PerceiverIOConfig,
    TransolverConfig,
)
from fst.data.samples import boundary_observation_indices, index_coordinates, index_product
from fst.operators import Operator

GRID = (9, 16)
OBSERVED = 16 + 2 * 8

SMALL: dict[str, Any] = {
    "fno": FNOConfig(grid=GRID, width=8, layers=2, modes=(4, 6)),
    "mended-fno": FNOConfig(grid=GRID, width=8, layers=2, modes=(4, 6), odd_axes="mended"),
    "perceiver-io": PerceiverIOConfig(width=16, heads=2, latents=8, layers=2, fourier_bands=4),
    "transolver": TransolverConfig(width=16, layers=2, heads=2, slices=4),
    "deeponet": DeepONetConfig(observations=OBSERVED, branch=(24, 24), trunk=(24, 24)),
}
SMALL_ON_GRID: dict[str, Any] = {
    "grid-fno": FNOConfig(grid=GRID, width=8, layers=2, modes=(4, 6), mask_channel=False),
    "grid-transolver": GridTransolverConfig(grid=GRID, width=16, layers=2, heads=2, slices=4),
}


def stirred_baseline(config: Any) -> Operator:
    """A model with every parameter, zeros and ones included, and all statistics off their start."""
    model = build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.standardize_values.set(0.3, 1.7)
    model.standardize_outputs.set(-0.4, 2.5)
    condition: nn.Module | None = getattr(model, "condition", None)
    if condition is not None:
        condition.standardize.set(-2.0, 1.5)
    return model


def heat_solutions(count: int, grid: tuple[int, int], seed: int = 0) -> Tensor:
    """Exact solutions u = Σ a_k exp(-k² t / 4) cos(πkx) of an insulated heat equation, (b t x)."""
    generator = torch.Generator().manual_seed(seed)
    amplitude = 2 * torch.rand(count, 3, 1, 1, generator=generator) - 1
    wave = torch.arange(3)[:, None, None]
    time, space = torch.linspace(0, 1, grid[0])[:, None], torch.linspace(0, 1, grid[1])
    modes = torch.exp(-(wave**2) / 4 * time) * torch.cos(torch.pi * wave * space)
    return (amplitude * modes).sum(dim=1)


def grid_queries(count: int, grid: tuple[int, ...]) -> Tensor:
    """Every point of the grid, for each of `count` samples."""
    indices = index_product(tuple(torch.arange(size) for size in grid))
    return index_coordinates(indices, grid).expand(count, -1, -1)


def observe_boundary(solutions: Tensor, condition: Tensor | None = None) -> Observations:
    """What Burgers observes of (b t x): the initial time and both ends of every later one."""
    grid = (solutions.shape[1], solutions.shape[2])
    indices = boundary_observation_indices(*grid)
    positions = index_coordinates(indices, grid).to(solutions.dtype)
    values = solutions[:, indices[:, 0], indices[:, 1], None]
    return Observations(positions.expand(len(solutions), -1, -1), values, condition)


def observe_everywhere(solutions: Tensor) -> Observations:
    """What Darcy observes: a value at every point of the grid."""
    positions = grid_queries(len(solutions), tuple(solutions.shape[1:])).to(solutions.dtype)
    return Observations(positions, solutions.flatten(1).unsqueeze(-1))
