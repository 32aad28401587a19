"""What the page can ask about: what is observed, where the field is shown, what is true there.

Enters: a request from the page, which is checked before anything is computed. Leaves: observations
for the model, queries, and the reference solution at these queries. Coordinates of the page are
those of the unit box; `describe` says what its axes mean.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import grid_sample

from fst.data import BurgersData, DarcyData, burgers, darcy
from fst.data.cole_hopf import exact_trajectory
from fst.data.point_samples import PointSamples
from fst.data.samples import (
    Batch,
    boundary_observation_indices,
    index_coordinates,
    index_product,
    subset_indices,
)
from fst.data.source import TestSplit
from fst.evaluation.protocol import labels_with_units
from fst.types import Observations

Proceed = Callable[[], None]
"""Called now and then; raises when nobody waits for the answer any more."""

# Random inputs lie this far down the stream of samples, behind all that a run trains on.
FIRST_DRAW = 10**9
LARGEST_DRAW = 10**6
LARGEST_VALUE = 10.0
_DISTANCES_AT_ONCE = 2**22
# Intervals of the solver's grid, for each of Darcy's grids. The painted coefficient has the steps
# of the data's grid: finer intervals bring its solution no nearer to that of a smooth interface.
_INTERVALS = (128, 512)


@dataclass(frozen=True)
class Given:
    """A checked input: all numbers that the page sent, and the viscosity where there is one."""

    numbers: tuple[float, ...]
    viscosity: float | None = None


def whole_number(asked: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = asked.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be a whole number from {low} to {high}")
    return value


def real_number(value: object, name: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low:g} to {high:g}")  # nor is NaN
    return float(value)


class Problem(ABC):
    """One kind of data: what the page draws, the model observes and the solver solves."""

    grids: tuple[tuple[int, int], ...]
    """Where the field is shown: coarse while the input is dragged, then finer. The points of all
    grids are among those of the last."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What the page must know."""

    @abstractmethod
    def draw(self, number: int) -> str | list[float]:
        """A random input from the data's distribution, as the page sends it back."""

    @abstractmethod
    def read(self, asked: Mapping[str, Any]) -> Given:
        """The input of a request; ValueError where it is not one."""

    @abstractmethod
    def observe(self, given: Given) -> Observations:
        """What the model is told."""

    @abstractmethod
    def reference(self, given: Given, level: int, proceed: Proceed) -> Float[Tensor, "h w"]:
        """The solution on `grids[level]`."""

    def targets(self, given: Given) -> Batch | None:
        """Where the truth is known, if that is not on the grids."""
        return None

    def queries(self) -> Float[Tensor, "1 q 2"]:
        """The points of the finest grid, the last axis running fastest."""
        everywhere = tuple(torch.arange(size) for size in self.grids[-1])
        return index_coordinates(index_product(everywhere), self.grids[-1])[None]

    def rows_and_columns(self, level: int) -> tuple[Int[Tensor, " h"], Int[Tensor, " w"]]:
        """The lines of the finest grid that `grids[level]` keeps."""
        rows, columns = map(subset_indices, self.grids[-1], self.grids[level])
        return rows, columns

    def points(self, level: int) -> Int[Tensor, " q"]:
        """The numbers of its points among `queries`."""
        rows, columns = self.rows_and_columns(level)
        return (rows[:, None] * self.grids[-1][1] + columns).flatten()


class BurgersProblem(Problem):
    """Draw u at time 0; the ends of the interval are observed as well, as in the data."""

    def __init__(self, data: BurgersData) -> None:
        self.data = data
        sizes = ((41, 96), (101, 256), (201, 512), data.grid)
        smaller = ((min(t, data.times), min(x, data.points)) for t, x in sizes)
        self.grids = tuple(dict.fromkeys(smaller))
        self.times = burgers.saved_times(data.times, data.final_time)
        self.cells = burgers.cell_centers(data.points)
        self._solution = lru_cache(maxsize=1)(self._solve)

    def describe(self) -> dict[str, Any]:
        low, high = min(self.data.viscosities), max(self.data.viscosities)
        return {
            "kind": "burgers",
            "title": "Burgers",
            "reference": "Exact (Cole–Hopf)",
            "value": "u",
            "axes": [
                {"name": "time t", "low": 0, "high": self.data.final_time},
                {"name": "space x", "low": self.cells[0].item(), "high": self.cells[-1].item()},
            ],
            "points": self.data.points,
            "viscosity": {"low": low, "high": high, "free": self.data.condition},
        }

    def draw(self, number: int) -> list[float]:
        points, first = self.data.points, FIRST_DRAW + number
        initial = burgers.sample_initial(1, points, self.data.seed, start=first)
        return [round(value, 6) for value in initial[0].tolist()]

    def read(self, asked: Mapping[str, Any]) -> Given:
        values, points = asked.get("input"), self.data.points
        if not isinstance(values, list) or len(values) != points:
            raise ValueError(f"input must be a list of {points} numbers")
        checked = tuple(real_number(v, "input", -LARGEST_VALUE, LARGEST_VALUE) for v in values)
        low, high = min(self.data.viscosities), max(self.data.viscosities)
        return Given(checked, real_number(asked.get("viscosity"), "viscosity", low, high))

    def observe(self, given: Given) -> Observations:
        where = boundary_observation_indices(*self.data.grid)
        ends = self._solution(given)[1:, [0, -1]]  # t 2
        values = torch.cat([torch.tensor(given.numbers), ends.flatten().float()])
        condition = torch.tensor([[given.viscosity]]) if self.data.condition else None
        positions = index_coordinates(where, self.data.grid)[None]
        return Observations(positions, values[None, :, None], condition)

    def reference(self, given: Given, level: int, proceed: Proceed) -> Float[Tensor, "h w"]:
        proceed()
        rows, columns = self.rows_and_columns(level)
        return self._solution(given)[rows][:, columns]

    def _solve(self, given: Given) -> Float[Tensor, "t x"]:
        """The solution on the grid of the data."""
        assert given.viscosity is not None
        initial = torch.tensor(given.numbers, dtype=torch.float64)
        return exact_trajectory(initial, given.viscosity, self.times)


class DarcyProblem(Problem):
    """Paint where the coefficient is high, on the grid of the data."""

    def __init__(self, data: DarcyData) -> None:
        self.data = data
        coarse = min(48, data.resolution)
        self.grids = ((coarse, coarse), data.grid)
        # The data's grid among the nodes i/fine: i = 1 + j · fine/resolution.
        self.stride = data.fine / data.resolution
        self.nodes = (1 + self.stride * torch.arange(data.resolution).double()) / data.fine

    def describe(self) -> dict[str, Any]:
        low, high = self.nodes[0].item(), self.nodes[-1].item()
        return {
            "kind": "darcy",
            "title": "Darcy flow",
            "reference": "Exact (solver)",
            "value": "u",
            "axes": [{"name": name, "low": low, "high": high} for name in "yx"],
            "points": self.data.resolution,
            "coefficient": [darcy.LOW, darcy.HIGH],
        }

    def draw(self, number: int) -> str:
        nodes, first = self.data.fine + 1, FIRST_DRAW + number
        fine = darcy.sample_coefficient(1, nodes, self.data.seed, start=first)
        high = darcy.subsample(fine == darcy.HIGH, self.data.resolution)
        return "".join("1" if cell else "0" for cell in high.flatten().tolist())

    def read(self, asked: Mapping[str, Any]) -> Given:
        text, count = asked.get("input"), math.prod(self.data.grid)
        if not isinstance(text, str) or len(text) != count or set(text) - {"0", "1"}:
            raise ValueError(f"input must be a text of {count} digits 0 and 1")
        return Given(tuple(darcy.HIGH if digit == "1" else darcy.LOW for digit in text))

    def observe(self, given: Given) -> Observations:
        return Observations(self.queries(), torch.tensor(given.numbers)[None, :, None])

    def reference(self, given: Given, level: int, proceed: Proceed) -> Float[Tensor, "h w"]:
        proceed()
        intervals = _INTERVALS[level]
        painted = torch.tensor(given.numbers, dtype=torch.float64).reshape(self.data.grid)
        nodes = torch.arange(intervals + 1) / intervals * self.data.fine
        nearest = ((nodes - 1) / self.stride).round().long().clamp(0, self.data.resolution - 1)
        solution = darcy.solve(painted[nearest][:, nearest][None], tolerance=1e-6)[0]
        rows, columns = (2 * self.nodes[kept] - 1 for kept in self.rows_and_columns(level))
        where = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), dim=-1)  # h w 2
        return grid_sample(solution[None, None], where[None], align_corners=True)[0, 0]  # linear


class PointsProblem(Problem):
    """A test sample of the user's own points on two axes: its sensors can be moved and removed.

    An input is the sample's number, then position (in the unit box) and values of each sensor.
    """

    grids = ((48, 48), (128, 128))

    def __init__(self, test: TestSplit[PointSamples]) -> None:
        samples = test.samples
        if samples.domain.axes != 2:
            raise ValueError(
                f"fst explore shows points on two axes, these have {samples.domain.axes}"
            )
        self.test, self.samples = test, samples
        self.numbers_each = 2 + samples.value_channels

    def describe(self) -> dict[str, Any]:
        samples, test = self.samples, self.test
        names = labels_with_units(test.axes, "axis", 2).tolist()
        ends = zip(names, samples.domain.low, samples.domain.high, strict=True)
        return {
            "kind": "points",
            "title": "Own points",
            "reference": "Nearest target",
            "axes": [{"name": name, "low": low, "high": high} for name, low, high in ends],
            "sensed": str(labels_with_units(test.values, "value", samples.value_channels)[0]),
            "value": str(labels_with_units(test.targets, "target", samples.output_channels)[0]),
            "each": self.numbers_each,
            "numbers": test.numbers or tuple(range(len(samples))),
        }

    def draw(self, number: int) -> list[float]:
        row = number % len(self.samples)
        given = self._batch(row).observations
        sensors = torch.cat([self.samples.domain.to_unit(given.positions), given.values], dim=2)[0]
        sensors = sensors if given.mask is None else sensors[given.mask[0]]
        return [row, *sensors.flatten().tolist()]

    def read(self, asked: Mapping[str, Any]) -> Given:
        values, each = asked.get("input"), self.numbers_each
        most = self.samples.observed.longest
        counts = range(1 + each, 2 + most * each, each)  # of numbers
        if not isinstance(values, list) or len(values) not in counts:
            raise ValueError(f"input must hold a sample and 1 to {most} sensors")
        whole_number({"input": values[0]}, "input", 0, len(self.samples) - 1)
        for index, value in enumerate(values[1:]):
            low, high = (0.0, 1.0) if index % each < 2 else (-1e30, 1e30)
            real_number(value, "input", low, high)
        return Given(tuple(map(float, values)))

    def observe(self, given: Given) -> Observations:
        sensors = torch.tensor(given.numbers[1:]).reshape(1, -1, self.numbers_each)
        condition = self._batch(int(given.numbers[0])).observations.condition
        positions = self.samples.domain.from_unit(sensors[..., :2])
        return Observations(positions, sensors[..., 2:], condition)

    def queries(self) -> Float[Tensor, "1 q 2"]:
        return self.samples.domain.from_unit(super().queries())

    def reference(self, given: Given, level: int, proceed: Proceed) -> Float[Tensor, "h w"]:
        batch = self.targets(given)
        known = self.samples.domain.to_unit(batch.queries)[0]
        asked = super().queries()[0, self.points(level)]
        nearest = []
        for part in asked.split(max(1, _DISTANCES_AT_ONCE // len(known))):
            proceed()
            nearest.append(torch.cdist(part, known).argmin(dim=1))
        return batch.targets[0, torch.cat(nearest), 0].reshape(self.grids[level])

    def targets(self, given: Given) -> Batch:
        batch = self._batch(int(given.numbers[0]))
        if batch.mask is None:
            return batch
        real = batch.mask[0]
        return Batch(batch.observations, batch.queries[:, real], batch.targets[:, real])

    def _batch(self, row: int) -> Batch:
        batch: Batch = self.samples.batch(torch.tensor([row]))
        return batch
