"""The trivial predictors, whose errors follow with pen and paper."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from evaluation_fakes import ORIGIN, SCORED, SETTINGS, burgers_test, waves
from fst.data.point_samples import PointSamples, Ragged
from fst.data.source import TestSplit
from fst.evaluation.protocol import EvaluationSettings, View, trivial_rows
from fst.evaluation.rows import METRICS
from fst.evaluation.trivial import (
    TrainingFacts,
    compared,
    held_initial,
    inverse_distance,
    large_means,
    linear_diffusion,
    mean_initial,
    observed_mean,
    observed_targets,
)
from fst.types import Domain, Observations

FACTS = TrainingFacts((0.1,), (2.0,), diffusion=0.05)
SQUARE = Domain.unit(2)
NAMES = [
    "mean of the training targets", "mean of the observations", "inverse-distance interpolation",
    "initial condition held", "mean of the initial condition", "linear diffusion", "zero",
]  # fmt: skip


def errors(fields):
    settings = EvaluationSettings(grids=(tuple(fields.shape[1:]),), paper_errors=(0.1,))
    rows = trivial_rows(burgers_test(fields), settings, SCORED, FACTS)
    assert [row.model for row in rows] == NAMES
    for row in rows:
        assert row.paper_error is None  # the paper has no such numbers
        assert (row.parameters, row.protocol, row.training) == (0, "p", None)
        assert row.trivial
    return rows[0], np.array(rows[3].errors)


def test_the_mean_of_the_training_targets_has_the_error_of_the_definition():
    fields = waves(5)
    row, _ = errors(fields)
    difference = (fields - 0.1).flatten(1)
    expected = difference.norm(dim=1) / fields.flatten(1).norm(dim=1)
    np.testing.assert_allclose(row.errors, expected, rtol=1e-5)
    (channel,) = row.channels
    assert channel.rmse == pytest.approx(difference.square().mean().sqrt().item(), rel=1e-5)
    assert row.std_error == pytest.approx(channel.rmse / 2)


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
    rows = trivial_rows(burgers_test(waves(3)), SETTINGS, ORIGIN, FACTS)
    assert [(row.model, row.grid) for row in rows] == [
        (name, grid) for name in NAMES for grid in SETTINGS.grids
    ]


def test_predictors_are_those_that_make_sense():
    several = TrainingFacts((0.1,), (2.0,))
    names = [row.model for row in trivial_rows(burgers_test(waves(3)), SETTINGS, ORIGIN, several)]
    # Several viscosities have no one diffusion.
    assert list(dict.fromkeys(names)) == [*NAMES[:5], "zero"]
    unknown = TrainingFacts((0.1, 0.2), (1.0, 1.0))  # not of these targets
    names = [row.model for row in trivial_rows(burgers_test(waves(3)), SETTINGS, ORIGIN, unknown)]
    assert list(dict.fromkeys(names)) == [*NAMES[1:5], "zero"]
    still = replace(SETTINGS, view=View(axis_names=("y", "x")))
    test = burgers_test(waves(3))
    names = [row.model for row in trivial_rows(test, still, ORIGIN, several)]
    assert list(dict.fromkeys(names)) == [*NAMES[:3], "zero"]
    other = replace(test, values=(("a", ""),), targets=(("u", ""),))
    names = [row.model for row in trivial_rows(other, still, ORIGIN, several)]
    assert set(names) == {NAMES[0], "zero"}


def test_channels_are_matched_by_name():
    points = Ragged.of(torch.rand(4, 2), torch.ones(4, 2), torch.tensor([2, 2]))
    samples = PointSamples(SQUARE, points, points)
    named = (("T", "K"), ("v", "m/s"))
    assert observed_targets(TestSplit(samples, values=named, targets=named[::-1])) == (1, 0)
    assert observed_targets(TestSplit(samples, values=named, targets=(("p", ""),) * 2)) is None
    unnamed = {kind: ((f"{kind} 0", ""), (f"{kind} 1", "")) for kind in ("values", "targets")}
    assert observed_targets(TestSplit(samples, **unnamed)) == (0, 1)
    assert observed_targets(TestSplit(samples)) is None  # nobody said what they are


def test_interpolation_is_exact_at_observations_and_ignores_padding():
    positions = torch.rand(2, 20, 2)
    values = torch.rand(2, 20, 1)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, 5:] = False
    given = Observations(positions, values, None, mask)
    interpolate = partial(inverse_distance, channels=(0,), domain=SQUARE)
    found = partial(interpolate, given)
    torch.testing.assert_close(found(positions)[0], values[0], atol=1e-4, rtol=0)
    few = partial(interpolate, Observations(positions[1:, :5], values[1:, :5]))
    queries = torch.rand(1, 30, 2)
    torch.testing.assert_close(found(queries.expand(2, -1, -1))[1:], few(queries))
    mean = observed_mean(given, queries.expand(2, -1, -1), (0,))
    torch.testing.assert_close(mean[1, 0], values[1, :5].mean(dim=0))


@pytest.mark.parametrize("size", [1, 3])
def test_samples_with_the_same_points_share_their_distances(monkeypatch, size):
    positions, queries = torch.rand(1, 20, 2), torch.rand(1, 50, 2)
    shared = [points.expand(size, -1, -1) for points in (positions, queries)]
    values, measured, cdist = torch.rand(size, 20, 1), [], torch.cdist
    interpolate = partial(inverse_distance, channels=(0,), domain=SQUARE)
    expected = interpolate(Observations(shared[0].clone(), values), shared[1].clone())

    def counted(asked, given, **settings):
        measured.append(len(asked) * len(given))
        return cdist(asked, given, **settings)

    monkeypatch.setattr(torch, "cdist", counted)
    assert torch.equal(interpolate(Observations(shared[0], values), shared[1]), expected)
    assert measured == [1]


def test_words_say_whether_anything_was_learned():
    beside, measure = {"a": 0.4, "b": 0.2}, METRICS["relative_l2"]
    assert compared(0.05, beside, measure).startswith("4.0 times lower than the best trivial")
    assert "hardly better than the best trivial predictor, b" in compared(0.19, beside, measure)
    assert "no better than" in compared(0.2, beside, measure)
    assert compared(0.2, {}, measure) == ""


def test_a_mean_that_dwarfs_the_standard_deviation_is_told():
    assert large_means(["T"], [20.0], [5.0]) is None
    warning = large_means(["T", "v"], [293.0, 0.0], [4.0, 1.0])
    assert "T (mean 293, standard deviation 4)" in warning
    assert "v (" not in warning


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
    given = Observations(positions, values)
    queries = torch.rand(1, 40, 2)
    x = (queries[..., 1] * (cells - 1) + 0.5) / cells
    expected = exact(queries[..., 0], x)[..., None]
    found, mean = linear_diffusion(given, queries, diffusion), mean_initial(given, queries)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(mean, torch.full((1, 40, 1), 0.3), atol=1e-5, rtol=0)


def test_between_observations_the_initial_condition_is_linear():
    order = torch.randperm(9)
    along = torch.linspace(0, 1, 9)[order]
    initial = torch.stack([torch.zeros(9), along], dim=-1)
    later = torch.tensor([[0.5, 0.0], [0.5, 1.0]])
    positions = torch.cat([initial, later])[None]
    values = torch.cat([3 * along - 1, torch.tensor([7.0, 7.0])])[None, :, None]
    queries = torch.rand(1, 30, 2)
    expected = 3 * queries[..., 1:] - 1
    held = held_initial(Observations(positions, values), queries)
    torch.testing.assert_close(held, expected, atol=1e-5, rtol=0)


def test_points_that_coincide_are_no_distance_apart():
    # More points than PyTorch takes differences of by itself.
    positions = torch.rand(1, 400, 2)
    values = torch.randn(1, 400, 1)
    given = Observations(positions, values)
    found = inverse_distance(given, positions, (0,), SQUARE)
    torch.testing.assert_close(found, values, atol=1e-6, rtol=1e-6)


def test_zero_has_an_error_of_one():
    rows = trivial_rows(burgers_test(waves(3)), SETTINGS, ORIGIN, FACTS)
    assert {row.error for row in rows if row.model == "zero"} == {1.0}
