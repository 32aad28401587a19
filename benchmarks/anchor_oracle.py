"""Anchors along the rows of Burgers from the true solution, and length scales tied to their gaps.

The rows stand at fixed times and run along space. In each row the positions x_1 < … < x_k
equidistribute a monitor of the solution u at the row's time,

    ∫ from x_j to x_{j+1} of m dx = const,   m = sqrt(1 + (β ∂u/∂x)²),

by the inverse of its running integral. The monitor is averaged over times near the row (`window`,
in row spacings) and smoothed along space (`width`), so that neighbouring gaps and neighbouring rows
differ little. The length scale of an anchor is a learned multiple of its own gap.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import huber_loss

from fst.ablations import StaggeredCoordinates
from fst.types import Anchors

SHORTEST, LONGEST = 0.003, 0.30
# Solutions whose monitor is computed at once.
CHUNK = 64


@dataclass(frozen=True)
class Rule:
    """How positions follow the solution, and where the learned factors of the gaps start."""

    beta: float = 1.0
    width: float = 0.015
    """Standard deviation of the monitor's smoothing along space; 0 for none."""
    window: float = 1.0
    """Half the base of the hat that averages the monitor over time, in row spacings."""
    gap: str = "least"
    """Which of its two gaps an anchor's scale follows: their mean, geometric mean or least."""
    factor: float = 0.6
    """Length scale along space, in local gaps."""
    time_factor: float = 0.5
    """Length scale along time, in row spacings."""


def time_weights(rows: int, times: int, window: float) -> Tensor:
    """How much each saved time counts in each row: (rows, times), rows sum to one.

    A hat around the row's time. The narrowest one interpolates between the two nearest times.
    """
    at = torch.linspace(0, 1, rows, dtype=torch.float64)[:, None]
    saved = torch.linspace(0, 1, times, dtype=torch.float64)
    half = max(window / max(rows - 1, 1), 1 / (times - 1))
    hat = (1 - (at - saved).abs() / half).clamp(min=0)
    return (hat / hat.sum(dim=1, keepdim=True)).float()


def monitor(solution: Tensor, rows: int, rule: Rule) -> Tensor:
    """The density of anchors at the cells, from solutions (n, times, cells): (n, rows, cells)."""
    _, times, cells = solution.shape
    weights = time_weights(rows, times, rule.window).to(solution.device)
    frequency = torch.arange(cells // 2 + 1, device=solution.device) * (2 * math.pi * rule.width)
    damping = torch.exp(-0.5 * frequency.square())
    parts = []
    for part in solution.float().split(CHUNK):
        slope = (part.roll(-1, dims=2) - part.roll(1, dims=2)) * (cells / 2)
        density = weights @ (1 + (rule.beta * slope).square()).sqrt()  # n rows cells
        smooth = torch.fft.irfft(torch.fft.rfft(density) * damping, n=cells)
        parts.append(smooth.clamp(min=0.5))  # at least one by nature; this is for rounding
    return torch.cat(parts)


def moved(density: Tensor, augmentation: Tensor) -> Tensor:
    """Densities (b, rows, cells) of solutions that are shifted, then reflected where asked."""
    cells = density.shape[2]
    cell = torch.arange(cells, device=density.device)
    shift, reflected = augmentation[:, :1], augmentation[:, 1:]
    stored = (cell + reflected * (cells - 1 - 2 * cell) + shift) % cells  # b cells
    return density.gather(2, stored[:, None].expand_as(density))


def equidistributed(density: Tensor, count: int) -> Tensor:
    """`count` positions in [0, 1] with equal integrals of a density given at i / (cells - 1)."""
    cells = density.shape[-1]
    running = (0.5 * (density[..., 1:] + density[..., :-1])).double().cumsum(dim=-1)
    running = torch.cat((torch.zeros_like(running[..., :1]), running), dim=-1)
    wanted = torch.linspace(0, 1, count, dtype=running.dtype, device=density.device)[1:-1]
    wanted = (wanted * running[..., -1:]).contiguous()
    after = torch.searchsorted(running, wanted).clamp(1, cells - 1)
    low, high = running.gather(-1, after - 1), running.gather(-1, after)
    inside = (after - 1 + (wanted - low) / (high - low)) / (cells - 1)
    ends = torch.zeros_like(running[..., :1])
    return torch.cat((ends, inside, ends + 1), dim=-1).float()


def even(batch: int, rows: int, count: int, device: torch.device) -> Tensor:
    return torch.linspace(0, 1, count, device=device).expand(batch, rows, -1)


def staggered(batch: int, rows: int, count: int, device: torch.device) -> Tensor:
    """Even positions, neighbouring rows half a gap apart, as `StaggeredCoordinates` has them."""
    tokens = torch.empty(batch, count - 1, 1, device=device)
    along: Tensor = StaggeredCoordinates((rows,)).to(device)(tokens)
    return along


def local_gaps(along: Tensor, kind: str) -> Tensor:
    """The gap of each anchor of a row: of its two where it has two."""
    gaps = along.diff(dim=-1)
    left, right = gaps[..., :-1], gaps[..., 1:]
    between = {
        "mean": lambda: 0.5 * (left + right),
        "geometric": lambda: (left * right).sqrt(),
        "least": lambda: torch.minimum(left, right),
    }[kind]()
    return torch.cat((gaps[..., :1], between, gaps[..., -1:]), dim=-1)


def spread(along: Tensor) -> Tensor:
    """Positions (b, rows, k) along space as anchors (b, m, 2) in time and space."""
    batch, rows, count = along.shape
    time = torch.linspace(0, 1, rows, device=along.device)[:, None].expand(batch, -1, count)
    return torch.stack((time, along), dim=-1).flatten(1, 2)


def tied_scales(along: Tensor, rule: Rule, factor: Tensor, time_factor: Tensor) -> Tensor:
    """Length scales (b, m, 2) as multiples of the row spacing and of the local gap."""
    gaps = local_gaps(along, rule.gap).flatten(1)
    space = (factor * gaps).clamp(SHORTEST, LONGEST)
    time = (time_factor / max(along.shape[1] - 1, 1)).clamp(SHORTEST, LONGEST).expand_as(space)
    return torch.stack((time, space), dim=-1)


class TiedScales(nn.Module):
    """Two learned factors each for refinement and decoding, the same for all anchors."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule = rule
        start = torch.tensor([rule.factor, rule.time_factor]).log()
        self.refinement, self.decoding = (nn.Parameter(start.clone()) for _ in range(2))

    def forward(self, along: Tensor) -> tuple[Tensor, Tensor]:
        refinement, decoding = (
            tied_scales(along, self.rule, *logarithms.exp().unbind())
            for logarithms in (self.refinement, self.decoding)
        )
        return refinement, decoding

    def report(self) -> dict[str, list[float]]:
        return {
            "refinement_factors": self.refinement.exp().tolist(),
            "decoding_factors": self.decoding.exp().tolist(),
        }


class FixedScales(nn.Module):
    """One length for every anchor and axis."""

    def __init__(self, length: float) -> None:
        super().__init__()
        self.length = length

    def forward(self, along: Tensor) -> tuple[Tensor, Tensor]:
        scales = torch.full_like(spread(along), self.length)
        return scales, scales

    def report(self) -> dict[str, list[float]]:
        return {}


class GivenAnchors(nn.Module):
    """In place of the model's predictor: anchors where `along` says, whatever the input."""

    along: Tensor
    """Positions (b, rows, k) along space, set before the model is called."""

    def __init__(self, scales: TiedScales | FixedScales) -> None:
        super().__init__()
        self.scales = scales

    def forward(self, inputs: Tensor, mask: Tensor | None) -> Anchors:
        refinement, decoding = self.scales(self.along)
        return Anchors(spread(self.along), decoding, refinement)

    def teaching(self) -> Tensor:
        return self.along.new_zeros(())


class ToldAnchors(GivenAnchors):
    """Even anchors that are told the oracle's positions: what the oracle reveals, without placing.

    The oracle's positions give away where the fronts will be. Here each anchor's initial feature
    has an embedding of the position that the oracle would have given it.
    """

    told: Tensor
    """The oracle's positions (b, rows, k), set before the model is called."""

    def __init__(self, scales: TiedScales | FixedScales, fourier: nn.Module, width: int) -> None:
        super().__init__(scales)
        self.embed = nn.Linear(fourier.size + 2, width, bias=False)
        self._fourier = (fourier,)  # no module of this one

    def hint(self, module: nn.Module, given: object, features: Tensor) -> Tensor:
        """A forward hook of the layer that makes the initial features."""
        told = spread(self.told)  # b m 2
        gaps = local_gaps(self.told, "least").flatten(1)[..., None]
        away = told[..., 1:] - spread(self.along)[..., 1:]
        return features + self.embed(torch.cat((self._fourier[0](told), away, gaps), dim=-1))


class LearnedAnchors(nn.Module):
    """The model's own predictor with tied scales; `along` is what a teacher would have it say."""

    along: Tensor

    def __init__(self, predictor: nn.Module, scales: TiedScales | FixedScales) -> None:
        super().__init__()
        self.predictor, self.scales = predictor, scales

    def forward(self, inputs: Tensor, mask: Tensor | None) -> Anchors:
        positions = self.predictor(inputs, mask).positions
        self.predicted = positions[..., 1].reshape(self.along.shape)
        refinement, decoding = self.scales(self.predicted)
        return Anchors(positions, decoding, refinement)

    def teaching(self) -> Tensor:
        """How far the last call's positions were from the teacher's, in even gaps."""
        gaps = self.along.shape[-1] - 1
        return huber_loss(self.predicted * gaps, self.along * gaps)
