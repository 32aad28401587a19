"""Predictors without parameters, which any model must beat, and what to say of a model beside them.

Of any data: zero, the mean of the training targets and, where the observations are of the target's
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
from fst.types import Domain, Observations

Queries = Float[Tensor, "b q s"]
Values = Float[Tensor, "b q c"]
Answers = Callable[[Queries], Values]
"""Values at queries: an `Output`, or what a trivial predictor makes of observations."""
Predictor = Callable[[Observations], Answers]
# Observations that an interpolation is made of.
NEAREST = 8
# Distances held at once: few enough for the cache of a CPU, enough to keep a GPU busy.
DISTANCES_ON_CPU, DISTANCES_ON_GPU = 2**22, 2**26
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


def constant(given: Observations, queries: Queries, values: tuple[float, ...]) -> Values:
    """One number for each target channel."""
    return torch.tensor(values, device=queries.device).expand(*queries.shape[:2], -1)


def observed_mean(given: Observations, queries: Queries, channels: tuple[int, ...]) -> Values:
    targets = given.values[..., list(channels)]  # b n c
    real = torch.ones_like(targets[..., 0]) if given.mask is None else given.mask.float()
    mean = (targets * real[..., None]).sum(1) / real.sum(1)[:, None]
    return mean[:, None].expand(-1, queries.shape[1], -1)


def inverse_distance(
    given: Observations, queries: Queries, channels: tuple[int, ...], domain: Domain
) -> Values:
    """Shepard's interpolation: weights 1 / distance², in the unit box, of the nearest few."""
    # Samples on one grid share their distances: those of the first sample serve the batch.
    shared = given.mask is None and _shared(given.positions) and _shared(queries)
    located = (given.positions[:1], queries[:1]) if shared else (given.positions, queries)
    positions, asked = map(domain.to_unit, located)
    targets = given.values[..., list(channels)]
    batch = torch.arange(len(queries), device=queries.device)[:, None, None]

    def interpolated(part: Float[Tensor, "#b p s"]) -> Float[Tensor, "b p c"]:
        # By differences: the expanded square would give points that coincide a distance.
        distances = torch.cdist(
            part, positions, compute_mode="donot_use_mm_for_euclid_dist"
        )  # b p n
        if given.mask is not None:
            distances = distances.masked_fill(~given.mask[:, None], torch.inf)
        nearest, which = distances.topk(min(NEAREST, distances.shape[2]), largest=False)
        weights = nearest.clamp(min=1e-7).square().reciprocal()
        weights = weights / weights.sum(dim=2, keepdim=True)
        return (weights[..., None] * targets[batch, which]).sum(dim=2)

    at_once = DISTANCES_ON_GPU if queries.is_cuda else DISTANCES_ON_CPU
    size = max(1, at_once // positions[..., 0].numel())
    return torch.cat([interpolated(part) for part in asked.split(size, dim=1)], dim=1)


def _shared(points: Float[Tensor, "b p s"]) -> bool:
    """Whether all samples of a batch have the same points, in the same memory."""
    return points.stride(0) == 0


def initial_condition(given: Observations) -> tuple[Float[Tensor, "b k"], Float[Tensor, "b k"]]:
    """Positions and first values of the observations at the first time, sorted by position."""
    times = given.positions[..., 0]
    initial = (times == times.amin()).all(dim=0)  # observed at the same cells in each sample
    positions, order = given.positions[:, initial, 1].sort(dim=1)
    return positions, given.values[:, initial, 0].gather(1, order)


def mean_initial(given: Observations, queries: Float[Tensor, "b q 2"]) -> Float[Tensor, "b q 1"]:
    """û(t, x) = ∫ u(0, x) dx."""
    _, values = initial_condition(given)
    return values.mean(dim=1)[:, None, None].expand(-1, queries.shape[1], 1)


def held_initial(given: Observations, queries: Float[Tensor, "b q 2"]) -> Float[Tensor, "b q 1"]:
    """û(t, x) = u(0, x), linear between the observations at the first time."""
    positions, values = initial_condition(given)
    x = queries[..., 1].contiguous()
    right = torch.searchsorted(positions, x).clamp(1, positions.shape[1] - 1)
    (low, high), (below, above) = (
        (each.gather(1, right - 1), each.gather(1, right)) for each in (positions, values)
    )
    share = ((x - low) / (high - low)).clamp(0, 1)
    return torch.lerp(below, above, share)[..., None]


def linear_diffusion(
    given: Observations, queries: Float[Tensor, "b q 2"], diffusion: float
) -> Float[Tensor, "b q 1"]:
    """The heat equation on periodic cells, by its Fourier series: û_k(t) = û_k(0) exp(-D (2πk)² t).

    `diffusion` is D over the whole time, for times from 0 to 1: (ν/π) times the last saved time.
    """
    values = initial_condition(given)[1].double()
    cells = values.shape[1]
    series = torch.fft.rfft(values, norm="forward")[:, None]  # b 1 k
    order = torch.arange(series.shape[2], device=values.device)
    frequency = 2 * torch.pi * order.double()
    # Of a real function: every frequency but the first and the last stands for two.
    twice = torch.where((order == 0) | (2 * order == cells), 1.0, 2.0)

    def summed(part: Float[Tensor, "b p 2"]) -> Float[Tensor, "b p 1"]:
        time, along = part.double()[..., None].unbind(dim=2)  # b p 1
        position = along * (cells - 1) / cells  # from the centre of the first cell
        waves = torch.complex(-diffusion * frequency.square() * time, frequency * position).exp()
        total: Tensor = (twice * series * waves).real.sum(dim=2, keepdim=True)
        return total

    parts = [summed(part) for part in queries.split(QUERIES_AT_ONCE, dim=1)]
    return torch.cat(parts, dim=1).to(queries.dtype)


def predictors(
    test: TestSplit[Samples], facts: TrainingFacts, *, initial: bool
) -> dict[str, Predictor]:
    """By name, those that make sense; `initial`: the first axis is time, u(0, x) is observed."""
    domain, found = test.samples.domain, dict[str, Callable[..., Tensor]]()
    if len(facts.mean) == test.samples.output_channels:
        found["mean of the training targets"] = partial(constant, values=facts.mean)
    if (channels := observed_targets(test)) is not None:
        found["mean of the observations"] = partial(observed_mean, channels=channels)
        interpolation = partial(inverse_distance, channels=channels, domain=domain)
        found["inverse-distance interpolation"] = interpolation
        if initial:
            found["initial condition held"] = held_initial
            found["mean of the initial condition"] = mean_initial
        if initial and facts.diffusion is not None:
            found["linear diffusion"] = partial(linear_diffusion, diffusion=facts.diffusion)
    found["zero"] = partial(constant, values=(0.0,) * test.samples.output_channels)
    # Given observations, each becomes a function of queries.
    return {name: partial(partial, predict) for name, predict in found.items()}


def observed_targets(test: TestSplit[Samples]) -> tuple[int, ...] | None:
    """Which observed channel is each target, by name; None where some target is not observed.

    Channels with the names of those without a name (values 0, targets 0) are taken to be the same
    where there are as many of them.
    """
    values, targets = [name for name, _ in test.values], [name for name, _ in test.targets]
    if targets and set(targets) <= set(values):
        return tuple(map(values.index, targets))
    channels = tuple(range(test.samples.output_channels))
    unnamed = targets == [f"targets {index}" for index in channels]
    return channels if unnamed and values == [f"values {index}" for index in channels] else None


def compared(error: float, others: Mapping[str, float], measure: Metric) -> str:
    """How good an error is beside those of trivial predictors, as the end of a sentence."""
    if not others:
        return ""
    name, best = min(others.items(), key=lambda item: item[1])
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
        if spread is not None and abs(middle) > LARGE_MEAN * spread
    ]
    if not large:
        return None
    return (
        f"the mean of {', '.join(large)} dwarfs the standard deviation, so that even a constant "
        "has a small relative error: look at RMSE / std, or subtract the mean from the targets"
    )
