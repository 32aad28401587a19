"""Symmetries of a problem: maps of its domain that take solutions to solutions.

Each is its own inverse. So the mean of a prediction G(a) and of what G predicts for the image of
the observations, mapped back,

    ½ (G(a) + S G(S a)),

has the symmetry exactly, whatever G has learned, and the parts of both errors that differ cancel.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fst.types import DOMAIN_TOLERANCE, Domain, Observations

SymmetryName = Literal["none", "odd-reflection", "even-reflection", "transpose"]


@dataclass(frozen=True)
class Symmetry:
    """u(t, x) → sign · u(t, −x), the last axis reversed; or u(x, y) → u(y, x)."""

    reverse: bool = False
    swap: bool = False
    sign: float = 1.0

    def check(self, domain: Domain, grid: tuple[int, ...] | None = None) -> None:
        """Raise unless this maps the domain onto itself, and the grid of a model that has one."""
        edges = set(zip(domain.low, domain.high, strict=True))
        if self.swap and (domain.axes != 2 or len(edges) > 1):
            raise ValueError(
                f"prediction_symmetry 'transpose' needs two axes with the same ends, got the "
                f"domain {domain.low} to {domain.high}"
            )
        if self.swap and grid is not None and len(set(grid)) > 1:
            raise ValueError(
                f"prediction_symmetry 'transpose' needs as many points on both axes, got the grid "
                f"{grid}"
            )

    def positions(
        self, positions: Float[Tensor, "b p s"], domain: Domain
    ) -> Float[Tensor, "b p s"]:
        if self.swap:
            positions = positions.flip(-1)
        if self.reverse:
            low, high = domain.low[-1], domain.high[-1]
            reversed_axis = (low + high - positions[..., -1:]).clamp(low, high)
            positions = torch.cat((positions[..., :-1], reversed_axis), dim=-1)
        return positions

    def observations(self, observations: Observations, domain: Domain) -> Observations:
        """The image of the observations.

        Where their positions are mapped to one another, as on a regular grid, the values change
        places and the positions keep theirs: models with fixed sensors or a grid take them too.
        """
        before, values = observations.positions, self.sign * observations.values
        after = self.positions(before, domain)
        if observations.mask is None or bool(observations.mask.all()):
            tolerance = DOMAIN_TOLERANCE * (
                before.new_tensor(domain.high) - before.new_tensor(domain.low)
            )
            old, new = _order(before, tolerance), _order(after, tolerance)
            distance = (_taken(before, old) - _taken(after, new)).abs()
            if bool((distance <= tolerance).all()):
                back = old.argsort(dim=1)  # where each position comes in the order
                values, after = _taken(_taken(values, new), back), before
        return replace(observations, positions=after, values=values)


SYMMETRIES: dict[SymmetryName, Symmetry] = {
    "odd-reflection": Symmetry(reverse=True, sign=-1.0),
    "even-reflection": Symmetry(reverse=True),
    "transpose": Symmetry(swap=True),
}


def _order(positions: Float[Tensor, "b p s"], tolerance: Float[Tensor, " s"]) -> Int[Tensor, "b p"]:
    """By the first axis, where that is equal to rounding by the second, and so on."""
    order = positions[..., -1].argsort(dim=1, stable=True)
    for axis in reversed(range(positions.shape[-1] - 1)):
        ranked = _ranks(positions[..., axis], tolerance[axis]).gather(1, order)
        order = order.gather(1, ranked.argsort(dim=1, stable=True))
    return order


def _ranks(numbers: Float[Tensor, "b p"], tolerance: Float[Tensor, ""]) -> Int[Tensor, "b p"]:
    """From 0; numbers no farther apart than the tolerance share one."""
    ascending, order = numbers.sort(dim=1)
    steps = torch.nn.functional.pad(ascending.diff(dim=1) > tolerance, (1, 0))
    return torch.empty_like(order).scatter_(1, order, steps.cumsum(dim=1))


def _taken(points: Float[Tensor, "b p k"], order: Int[Tensor, "b p"]) -> Float[Tensor, "b p k"]:
    return points.gather(1, order.unsqueeze(-1).expand_as(points))
