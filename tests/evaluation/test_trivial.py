"""The trivial predictors, whose errors follow with pen and paper."""

import math

import numpy as np
import pytest
import torch

from evaluation_fakes import ORIGIN, SETTINGS, burgers_test, waves
from fst.data import BurgersData
from fst.evaluation.protocol import EvaluationSettings
from fst.evaluation.trivial import (
    HeldInitial,
    LinearDiffusion,
    MeanInitial,
    predictors,
    trivial_rows,
)
from fst.types import Observations

DATA = BurgersData(viscosities=(0.3,), final_time=0.5)
NAMES = [
    "zero", "initial condition held", "mean of the initial condition", "linear diffusion"
]  # fmt: skip


def errors(fields):
    settings = EvaluationSettings(grids=(tuple(fields.shape[1:]),), paper_errors=(0.1,))
    rows = trivial_rows(DATA, burgers_test(fields), settings, ORIGIN, protocol="p")
    assert [row.model for row in rows] == NAMES
    zero, held = rows[:2]
    assert zero.paper_error is held.paper_error is None  # the paper has no such numbers
    assert zero.parameters == held.parameters == 0
    assert zero.protocol == held.protocol == "p"
    assert zero.training is None
    return np.array(zero.errors), np.array(held.errors)


def test_zero_is_wrong_by_everything():
    zero, _ = errors(waves(5))
    np.testing.assert_allclose(zero, 1, rtol=1e-6)


def test_a_steady_solution_is_held_exactly():
    steady = waves(3)[:, :1].expand(-1, 11, -1).contiguous()
    _, held = errors(steady)
    np.testing.assert_array_equal(held, 0)


def test_a_growing_solution_has_the_error_of_its_growth():
    # u(t, x) = (1 + t) g(x): the error is (Σ t² / Σ (1 + t)²)^½, whatever g is.
    times = torch.linspace(0, 1, 21)
    shapes = waves(3, (21, 40))[:, :1]
    _, held = errors(shapes * (1 + times)[:, None])
    expected = (times.square().sum() / (1 + times).square().sum()).sqrt()
    np.testing.assert_allclose(held, expected, rtol=1e-5)


def test_every_grid_is_scored():
    rows = trivial_rows(DATA, burgers_test(waves(3)), SETTINGS, ORIGIN)
    assert [(row.model, row.grid) for row in rows] == [
        (name, grid) for name in NAMES for grid in SETTINGS.grids
    ]


def test_several_viscosities_have_no_one_diffusion():
    assert list(predictors(BurgersData(viscosities=(0.1, 0.2)))) == NAMES[:3]


@pytest.mark.parametrize("cells", [16, 17])
def test_linear_diffusion_is_the_heat_equation(cells):
    """Two modes and a mean on cell centres: each decays by its own rate, between cells too."""
    diffusion, centres = 0.02, (torch.arange(cells) + 0.5) / cells

    def exact(time, x):
        parts = [0.3 * torch.ones_like(x)]
        for k, size, phase in ((1, 1.0, 0.4), (3, 0.5, 1.1)):
            decay = torch.exp(-diffusion * (2 * math.pi * k) ** 2 * time)
            parts.append(size * decay * torch.sin(2 * math.pi * k * x + phase))
        return sum(parts)

    along = torch.linspace(0, 1, cells)
    positions = torch.stack((torch.zeros(cells), along), dim=-1)[None]
    values = exact(torch.zeros(cells), centres)[None, :, None]
    found = LinearDiffusion(Observations(positions, values), diffusion)
    mean = MeanInitial(Observations(positions, values))
    queries = torch.rand(1, 40, 2)
    x = (queries[..., 1] * (cells - 1) + 0.5) / cells
    expected = exact(queries[..., 0], x)[..., None]
    torch.testing.assert_close(found(queries), expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(mean(queries), torch.full((1, 40, 1), 0.3), atol=1e-5, rtol=0)


def test_between_observations_the_initial_condition_is_linear():
    order = torch.randperm(9)
    places = torch.linspace(0, 1, 9)[order]
    initial = torch.stack([torch.zeros(9), places], dim=-1)
    later = torch.tensor([[0.5, 0.0], [0.5, 1.0]])
    positions = torch.cat([initial, later])[None]
    values = torch.cat([3 * places - 1, torch.tensor([7.0, 7.0])])[None, :, None]
    held = HeldInitial(Observations(positions, values))
    queries = torch.rand(1, 30, 2)
    expected = 3 * queries[..., 1:] - 1
    torch.testing.assert_close(held(queries), expected, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="queries must lie in the domain"):
        held(queries + 1)
