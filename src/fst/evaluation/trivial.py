"""Predictors without parameters, which any model must beat, and what to say of a model beside them.

Of any data: the mean of the training targets and, where the observations are of the target's
quantities, their mean and their interpolation. Of solutions on a grid that begins with time: the
initial condition held, û(t, x) = u(0, x); its mean, which Burgers conserves and ends at; and linear
diffusion, u_t = (ν/π) u_xx from the initial condition.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from fst.data.samples import Samples
from fst.data.source import TestSplit
from fst.evaluation.rows import Metric
from fst.operators import Output
from fst.types import Domain, Observations

Predictor = Callable[[Observations], Output]
# Observations that an interpolation is made of, and distances held at once.
NEAREST, DISTANCES_AT_ONCE = 8, 2**22
# Queries whose Fourier sums are held at once.
QUERIES_AT_ONCE = 2**12
# Beyond this, |mean| / std, the mean alone has a small relative error.
LARGE_MEAN = 5.0
# A model whose error is this much of a trivial predictor's has hardly learned anything.
NEAR = 0.9


@dataclass(frozen=True)
class TrainingFacts:
    """What predictors without parameters may know; empty or None where it is not known."""

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    diffusion: float | None = None
    frequent_class: str | None = None


class Trivial(Output):
    """Knows the observations, and of their values those `channels` that are targets."""

    def __init__(
        self, observations: Observations, domain: Domain, channels: Sequence[int] = (0,)
    ) -> None:
        self.domain, self.observations = domain, observations
        self.targets = observations.values[..., list(channels)]  # b n c

    @property
    def like(self) -> Tensor:
        return self.observations.positions


class Constant(Trivial):
    """One number for each target channel."""

    def __init__(
        self, observations: Observations, domain: Domain, values: tuple[float, ...]
    ) -> None:
        super().__init__(observations, domain, ())
        self.values = torch.tensor(values, device=self.like.device)

    def decode(self, queries: Float[Tensor, "b q s"]) -> Float[Tensor, "b q c"]:
        return self.values.expand(*queries.shape[:2], -1)


class ObservedMean(Trivial):
    """The mean of a sample's own observations."""

    def decode(self, queries: Float[Tensor, "b q s"]) -> Float[Tensor, "b q c"]:
        mask = self.observations.mask
        real = torch.ones_like(self.targets[..., 0]) if mask is None else mask.float()
        mean = (self.targets * real[..., None]).sum(1) / real.sum(1)[:, None]
        return mean[:, None].expand(-1, queries.shape[1], -1)


class InverseDistance(Trivial):
    """Shepard's interpolation: weights 1 / distance², in the unit box, of the nearest few."""

    def decode(self, queries: Float[Tensor, "b q s"]) -> Float[Tensor, "b q c"]:
        batch, count = self.targets.shape[:2]
        size = max(1, DISTANCES_AT_ONCE // (batch * count))
        parts = [self._interpolated(part) for part in queries.split(size, dim=1)]
        return torch.cat(parts, dim=1)

    def _interpolated(self, queries: Float[Tensor, "b q s"]) -> Float[Tensor, "b q c"]:
        positions = self.domain.to_unit(self.observations.positions)
        distances = torch.cdist(self.domain.to_unit(queries), positions)  # b q n
        if self.observations.mask is not None:
            distances = distances.masked_fill(~self.observations.mask[:, None], torch.inf)
        nearest, which = distances.topk(min(NEAREST, distances.shape[2]), largest=False)
        weights = nearest.clamp(min=1e-7).square().reciprocal()
        weights = weights / weights.sum(dim=2, keepdim=True)
        batch = torch.arange(len(queries), device=queries.device)[:, None, None]
        return (weights[..., None] * self.targets[batch, which]).sum(dim=2)


class FromInitial(Trivial):
    """Predictors from the observations at the first time, sorted by position."""

    def __init__(self, observations: Observations, domain: Domain) -> None:
        super().__init__(observations, domain)
        times = observations.positions[..., 0]
        initial = (times == times.amin()).all(dim=0)  # observed at the same cells in each sample
        self.positions, order = observations.positions[:, initial, 1].sort(dim=1)  # b k
        self.values = self.targets[:, initial, 0].gather(1, order)  # b k


class MeanInitial(FromInitial):
    """û(t, x) = ∫ u(0, x) dx."""

    def decode(self, queries: Float[Tensor, "b q 2"]) -> Float[Tensor, "b q 1"]:
        return self.values.mean(dim=1)[:, None, None].expand(-1, queries.shape[1], 1)


class LinearDiffusion(FromInitial):
    """The heat equation on periodic cells, by its Fourier series: û_k(t) = û_k(0) exp(-D (2πk)² t).

    `diffusion` is D over the whole time, for times from 0 to 1: (ν/π) times the last saved time.
    """

    def __init__(self, observations: Observations, domain: Domain, diffusion: float) -> None:
        super().__init__(observations, domain)
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


def predictors(
    test: TestSplit[Samples], facts: TrainingFacts, *, initial: bool
) -> dict[str, Predictor]:
    """By name, those that make sense for these data.

    `initial` says that the first of two axes is time and the whole initial condition is observed.
    """
    domain, found = test.samples.domain, dict[str, Predictor]()
    if len(facts.mean) == test.samples.output_channels:
        found["mean of the training targets"] = partial(Constant, domain=domain, values=facts.mean)
    channels = observed_targets(test)
    if channels is None:
        return found
    known: tuple[tuple[str, type[Trivial]], ...] = (
        ("mean of the observations", ObservedMean),
        ("inverse-distance interpolation", InverseDistance),
    )
    found |= {name: partial(kind, domain=domain, channels=channels) for name, kind in known}
    if initial:
        found["initial condition held"] = partial(HeldInitial, domain=domain)
        found["mean of the initial condition"] = partial(MeanInitial, domain=domain)
    if initial and facts.diffusion is not None:
        found["linear diffusion"] = partial(
            LinearDiffusion, domain=domain, diffusion=facts.diffusion
        )
    return found


def observed_targets(test: TestSplit[Samples]) -> tuple[int, ...] | None:
    """Which observed channel is each target, by name; None where some target is not observed.

    Channels without names of their own are taken to be the same where there are as many of them.
    """
    values, targets = [name for name, _ in test.values], [name for name, _ in test.targets]
    if targets and set(targets) <= set(values):
        return tuple(map(values.index, targets))
    unnamed = all(name == f"values {index}" for index, name in enumerate(values)) and all(
        name == f"targets {index}" for index, name in enumerate(targets)
    )
    same = test.samples.value_channels == test.samples.output_channels
    return tuple(range(test.samples.output_channels)) if unnamed and same else None


def compared(error: float, beside: Mapping[str, float], measure: Metric) -> str:
    """How good an error is beside those of trivial predictors, as the end of a sentence."""
    if not beside:
        return ""
    name, best = min(beside.items(), key=lambda item: item[1])
    shown = f"the best trivial predictor, {name} ({measure.text(best)})"
    if error >= best:
        return f"which is no better than {shown}"
    if error > NEAR * best:
        return f"which is hardly better than {shown}"
    return f"{measure.better(error, best)} {shown}"


def large_means(
    names: Sequence[str], mean: Sequence[float], std: Sequence[float | None]
) -> str | None:
    """A warning where the mean of some target dwarfs its standard deviation."""
    large = [
        f"{name} (mean {middle:.4g}, standard deviation {spread:.3g})"
        for name, middle, spread in zip(names, mean, std, strict=True)
        if spread and abs(middle) > LARGE_MEAN * spread
    ]
    if not large:
        return None
    return (
        f"the mean of {', '.join(large)} dwarfs the standard deviation, so that even a constant "
        "has a small relative error: look at RMSE / std, or subtract the mean from the targets"
    )
