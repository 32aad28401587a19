"""Predictors without parameters, scored like a model: what any model must beat on Burgers.

Zero everywhere, û = 0; the initial condition held in time, û(t, x) = u(0, x); its mean, which
Burgers conserves and ends at; and linear diffusion, u_t = (ν/π) u_xx from the initial condition.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from rich.console import Console
from torch import Tensor

from fst.data.burgers_data import BurgersData
from fst.data.samples import Samples
from fst.data.splits import TestSplit
from fst.evaluation.protocol import EvaluationSettings, make_rows, measure
from fst.evaluation.rows import Origin, Row
from fst.operators import Output
from fst.precision import full_precision
from fst.types import Domain, Observations


class Zero(Output):
    """û = 0."""

    def __init__(self, observations: Observations) -> None:
        self.domain = Domain.unit(observations.positions.shape[-1])
        self.observations = observations

    @property
    def like(self) -> Tensor:
        return self.observations.positions

    def decode(self, queries: Float[Tensor, "b q s"]) -> Float[Tensor, "b q 1"]:
        return torch.zeros_like(queries[..., :1])


class FromInitial(Output):
    """Predictors from the observations at the first time, sorted by position."""

    def __init__(self, observations: Observations) -> None:
        self.domain = Domain.unit(2)
        self.observations = observations
        times = observations.positions[..., 0]
        initial = (times == times.amin()).all(dim=0)  # observed at the same cells in each sample
        self.positions, order = observations.positions[:, initial, 1].sort(dim=1)  # b k
        self.values = observations.values[:, initial, 0].gather(1, order)  # b k

    @property
    def like(self) -> Tensor:
        return self.observations.positions


class MeanInitial(FromInitial):
    """û(t, x) = ∫ u(0, x) dx."""

    def decode(self, queries: Float[Tensor, "b q 2"]) -> Float[Tensor, "b q 1"]:
        return self.values.mean(dim=1)[:, None, None].expand(-1, queries.shape[1], 1)


class LinearDiffusion(FromInitial):
    """The heat equation on periodic cells, by its Fourier series: û_k(t) = û_k(0) exp(-D (2πk)² t).

    `diffusion` is D over the whole time, for times from 0 to 1: (ν/π) times the last saved time.
    """

    def __init__(self, observations: Observations, diffusion: float) -> None:
        super().__init__(observations)
        self.series = torch.fft.rfft(self.values.double(), norm="forward")  # b k
        order = torch.arange(self.series.shape[1], device=self.values.device)
        self.decay = diffusion * (2 * torch.pi * order.double()).square()  # k

    def decode(self, queries: Float[Tensor, "b q 2"]) -> Float[Tensor, "b q 1"]:
        cells = self.values.shape[1]
        parts = [self._sum(part, cells) for part in queries.split(QUERIES_AT_ONCE, dim=1)]
        return torch.cat(parts, dim=1).to(queries.dtype)

    def _sum(self, queries: Float[Tensor, "b q 2"], cells: int) -> Float[Tensor, "b q 1"]:
        time, along = queries.double().unbind(dim=2)
        position = along * (cells - 1) / cells  # from the centre of the first cell
        order = torch.arange(self.series.shape[1], device=queries.device)
        # Of a real function: every frequency but the first and the last stands for two.
        twice = torch.where((order == 0) | (2 * order == cells), 1.0, 2.0)
        phase = 2 * torch.pi * position[..., None] * order
        size = twice * torch.exp(-self.decay * time[..., None])
        real, imaginary = self.series.real[:, None], self.series.imag[:, None]
        waves = size * (real * phase.cos() - imaginary * phase.sin())
        total: Tensor = waves.sum(dim=2, keepdim=True)
        return total


class HeldInitial(FromInitial):
    """û(t, x) = u(0, x), linear between the observations at the first time."""

    def decode(self, queries: Float[Tensor, "b q 2"]) -> Float[Tensor, "b q 1"]:
        x = queries[..., 1].contiguous()
        right = torch.searchsorted(self.positions, x).clamp(1, self.positions.shape[1] - 1)
        (low, high), (below, above) = (
            (each.gather(1, right - 1), each.gather(1, right))
            for each in (self.positions, self.values)
        )
        share = ((x - low) / (high - low)).clamp(0, 1)
        return torch.lerp(below, above, share)[..., None]


# Queries whose Fourier sums are held at once.
QUERIES_AT_ONCE = 2**12


def predictors(data: BurgersData) -> dict[str, Callable[[Observations], Output]]:
    """By name, those that make sense for these data."""
    found: dict[str, Callable[[Observations], Output]] = {
        "zero": Zero,
        "initial condition held": HeldInitial,
        "mean of the initial condition": MeanInitial,
    }
    if len(data.viscosities) == 1:
        diffusion = data.viscosities[0] / math.pi * data.final_time
        found["linear diffusion"] = partial(LinearDiffusion, diffusion=diffusion)
    return found


def trivial_rows(
    data: BurgersData,
    test: TestSplit[Samples],
    settings: EvaluationSettings,
    origin: Origin,
    *,
    protocol: str = "",
    console: Console | None = None,
) -> list[Row]:
    """Rows of the trivial predictors on the test grids of a run, to stand beside the run's own."""
    rows = []
    settings = replace(settings, paper_errors=(), paper_groups=())  # the paper has no such numbers
    for name, predictor in predictors(data).items():
        with full_precision(), torch.inference_mode():
            found = measure(predictor, test, settings, label=name, console=console)
        source = Origin(origin.run, origin.recipe, origin.task, name, git_hash=origin.git_hash)
        rows += make_rows(found, test, settings, source, 0, protocol, test.samples.device)
    return rows
