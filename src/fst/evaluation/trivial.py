"""Predictors without parameters, scored like a model: what any model must beat on Burgers.

Zero everywhere, û = 0, and the initial condition held in time, û(t, x) = u(0, x).
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from rich.console import Console
from torch import Tensor

from fst.data.samples import Samples
from fst.data.splits import TestSplit
from fst.evaluation.protocol import EvaluationSettings, full_precision, make_rows, measure
from fst.evaluation.rows import Origin, Row
from fst.operators import Output
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


class HeldInitial(Output):
    """û(t, x) = u(0, x), linear between the observations at the first time."""

    def __init__(self, observations: Observations) -> None:
        self.domain = Domain.unit(2)
        self.observations = observations
        times = observations.positions[..., 0]
        initial = (times == times.amin()).all(dim=0)  # observed at the same places in each sample
        places = observations.positions[:, initial, 1]
        self.places, order = places.sort(dim=1)  # b k
        self.values = observations.values[:, initial, 0].gather(1, order)  # b k

    @property
    def like(self) -> Tensor:
        return self.observations.positions

    def decode(self, queries: Float[Tensor, "b q 2"]) -> Float[Tensor, "b q 1"]:
        x = queries[..., 1].contiguous()
        right = torch.searchsorted(self.places, x).clamp(1, self.places.shape[1] - 1)
        left_place, right_place = self.places.gather(1, right - 1), self.places.gather(1, right)
        left, right_value = self.values.gather(1, right - 1), self.values.gather(1, right)
        share = ((x - left_place) / (right_place - left_place)).clamp(0, 1)
        return torch.lerp(left, right_value, share)[..., None]


TRIVIAL: dict[str, type[Zero] | type[HeldInitial]] = {
    "zero": Zero,
    "initial condition held": HeldInitial,
}


def trivial_rows(
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
    for name, predictor in TRIVIAL.items():
        with full_precision(), torch.inference_mode():
            found = measure(predictor, test, settings, label=name, console=console)
        source = Origin(origin.run, origin.recipe, origin.task, name, git_hash=origin.git_hash)
        rows += make_rows(found, test, settings, source, 0, protocol, test.samples.device)
    return rows
