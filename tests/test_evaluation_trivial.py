"""The trivial predictors, whose errors follow with pen and paper."""

import numpy as np
import pytest
import torch

from evaluation_fakes import ORIGIN, SETTINGS, burgers_test, waves
from fst.evaluation.protocol import EvaluationSettings
from fst.evaluation.trivial import HeldInitial, trivial_rows
from fst.types import Observations


def errors(fields):
    settings = EvaluationSettings(grids=(tuple(fields.shape[1:]),), paper_errors=(0.1,))
    zero, held = trivial_rows(burgers_test(fields), settings, ORIGIN, protocol="p")
    assert (zero.model, held.model) == ("zero", "initial condition held")
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
    rows = trivial_rows(burgers_test(waves(3)), SETTINGS, ORIGIN)
    assert [(row.model, row.grid) for row in rows] == [
        (name, grid) for name in ("zero", "initial condition held") for grid in SETTINGS.grids
    ]


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
