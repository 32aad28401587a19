"""A small test set, models and rows that the tests of evaluation share."""

import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from fst.data.point_samples import PointSamples, Ragged
from fst.data.samples import BurgersSamples, boundary_observation_indices, index_coordinates
from fst.data.source import TestSplit
from fst.evaluation.protocol import EvaluationSettings, evaluate
from fst.evaluation.rows import GroupError, Origin, Row, TrainingCost
from fst.evaluation_points import PointDraws
from fst.model import FunctionSpaceTransformer
from fst.operators import Operator, Output
from fst.types import Domain, Observations
from small import small_config, small_model

GRID = (11, 24)
SIZES = [5, 8, 3, 6, 4, 7]
"""Queries of each sample of `some_points`; backwards, its observations."""
SETTINGS = EvaluationSettings(grids=((5, 6), GRID), batch_size=4)
COST = TrainingCost(1_200, 90.0, 13.5, "NVIDIA H200", 1_000, 6.7)
ORIGIN = Origin("run-one", "burgers-single/fst", "burgers-single", "FST", 7, "abc123", COST)
SCORED = replace(ORIGIN, protocol="p")


def waves(count: int, grid: tuple[int, int] = GRID) -> Tensor:
    """Different smooth functions of time and space, none of them zero."""
    times, cells = torch.linspace(0, 1, grid[0])[:, None], torch.linspace(0, 1, grid[1])
    fields = [
        (1 + 0.2 * number) * torch.sin(2 * math.pi * (cells - 0.3 * times) + number) + 0.1
        for number in range(count)
    ]
    return torch.stack(fields)


def burgers_test(
    fields: Tensor, groups: tuple[str, ...] | None = None, condition: Tensor | None = None
) -> TestSplit:
    """Fields on a whole grid, observed at the first time and at both ends of every later one."""
    grid = (fields.shape[1], fields.shape[2])
    time, cell = boundary_observation_indices(*grid).unbind(dim=1)
    samples = BurgersSamples(
        grid=grid,
        held=tuple(map(torch.arange, grid)),
        targets=fields,
        observed_positions=index_coordinates(torch.stack([time, cell], dim=1), grid),
        observed_values=fields[:, time, cell],
        condition=condition,
    )
    return TestSplit(samples, groups, values=(("u", ""),), targets=(("u", ""),))


def some_test(count: int = 10) -> TestSplit:
    """Ten samples make two batches of four and one of two."""
    return burgers_test(waves(count))


def some_points() -> TestSplit:
    """Points at random, in rows of unequal length, each with 1 + the sum of its coordinates."""

    def ragged(sizes: list[int]) -> Ragged:
        positions = torch.rand(sum(sizes), 2, generator=torch.Generator().manual_seed(0))
        return Ragged.of(positions, 1 + positions.sum(dim=1, keepdim=True), torch.tensor(sizes))

    return TestSplit(PointSamples(Domain.unit(2), ragged(SIZES[::-1]), ragged(SIZES)))


def some_model(**changes: Any) -> FunctionSpaceTransformer:
    return small_model(small_config(**changes)).float()


def some_rows(model: Operator | None = None, **changes: Any) -> list[Row]:
    test = burgers_test(waves(10), ("0.01",) * 6 + ("1.0",) * 4)
    return evaluate(model or some_model(), test, SETTINGS, Origin(**{**vars(ORIGIN), **changes}))


def made_row(**changes: Any) -> Row:
    """A row with chosen contents; the means follow the errors unless they are given."""
    errors = changes.get("errors", (0.1, 0.2, 0.6))
    fields: dict[str, Any] = {
        "run": "run-one",
        "recipe": "burgers-all/fst",
        "task": "burgers-all",
        "model": "FST",
        "seed": 7,
        "git_hash": "0123456789abcdef",
        "parameters": 2_900_721,
        "split": "test",
        "grid": (201, 1024),
        "neighbors": None,
        "samples": len(errors),
        "error": fmean(errors),
        "paper_error": None,
        "errors": errors,
        "groups": (),
        "protocol": "p",
        "fst_version": "0.1.0",
        "torch_version": "2.13.0",
        "device": "NVIDIA H200",
        "training": COST,
    }
    return Row(**{**fields, **changes})


def grouped_row(errors: dict[str, float], **changes: Any) -> Row:
    """A row with one sample in each group."""
    groups = tuple(GroupError(name, 1, error) for name, error in errors.items())
    return made_row(errors=tuple(errors.values()), **{"groups": groups, **changes})


class Constant(Output):
    """One number everywhere."""

    def __init__(self, observations: Observations, value: Tensor) -> None:
        self.domain, self.observations, self.value = Domain.unit(2), observations, value

    @property
    def like(self) -> Tensor:
        return self.observations.positions

    def decode(self, queries: Tensor) -> Tensor:
        return self.value.expand(*queries.shape[:2], 1)


class ConstantModel(Operator):
    """A model without anchors or evaluation points, which notes how it was called."""

    config_type = Domain  # it is never saved

    def __init__(self, value: float = 0.5) -> None:
        super().__init__(Domain.unit(2), 1, 1, 0)
        self.value = nn.Parameter(torch.tensor(value))
        self.calls: list[dict[str, object]] = []

    def represent(self, observations: Observations, draws: PointDraws | None = None) -> Output:
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        self.calls.append(
            {
                "draws": draws,
                "training": self.training,
                "inference": torch.is_inference_mode_enabled(),
                "product": product.dtype,
                "matmul": torch.get_float32_matmul_precision(),
                "convolution": torch.backends.cudnn.allow_tf32,
            }
        )
        return Constant(observations, self.value.detach())


def parts_left(folder: Path) -> list[str]:
    """Files that an unfinished write left behind."""
    return [path.name for path in folder.rglob("*.part")]
