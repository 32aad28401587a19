"""Evaluation points: reproducible, resumable, well spread."""

import pytest
import torch

from fst.base import build_model as build
from fst.evaluation_points import FixedPoints, ResampledPoints
from small import small_config, small_model, some_observations, some_queries


def stream(kind=ResampledPoints, anchor_seed=1, sobol_seed=2, **changes):
    sizes = {"steps": 4, "anchors": 100, "from_anchors": 25, "from_sobol": 64, "axes": 2}
    return kind(**{**sizes, **changes}, anchor_seed=anchor_seed, sobol_seed=sobol_seed)


def test_subsets_are_drawn_without_replacement():
    draws = stream().draw()
    assert draws.anchor_indices.shape == (4, 25)
    for subset in draws.anchor_indices:
        assert len(subset.unique()) == 25
        assert 0 <= subset.min() <= subset.max() < 100


def test_every_anchor_has_the_same_chance():
    points = stream()
    counts = torch.zeros(100)
    for _ in range(500):
        counts += torch.bincount(points.draw().anchor_indices.flatten(), minlength=100)
    # 2,000 subsets of a quarter: mean 500, standard deviation sqrt(2000 * 3/16) = 19.4.
    assert counts.sum() == 50_000
    assert (counts - 500).abs().max() < 5 * 19.4


def test_sobol_blocks_are_balanced():
    """Every aligned block of 64 points has one point in each of 64 equal strips of either axis,
    and in each of the 8 x 8 squares: the property that sets Sobol points apart from random."""
    points = stream()
    for _ in range(5):
        for block in points.draw().uniform:
            for axis in range(2):
                assert len((block[:, axis] * 64).floor().unique()) == 64
            squares = (block * 8).floor()
            assert len((squares[:, 0] * 8 + squares[:, 1]).unique()) == 64


def test_seeds_decide_everything():
    first, second = stream().draw(), stream().draw()
    assert torch.equal(first.anchor_indices, second.anchor_indices)
    assert torch.equal(first.uniform, second.uniform)
    other_anchors, other_sobol = stream(anchor_seed=9).draw(), stream(sobol_seed=9).draw()
    assert not torch.equal(other_anchors.anchor_indices, first.anchor_indices)
    assert torch.equal(other_anchors.uniform, first.uniform)
    assert torch.equal(other_sobol.anchor_indices, first.anchor_indices)
    assert not torch.equal(other_sobol.uniform, first.uniform)


def test_steps_and_passes_differ():
    points = stream()
    first, second = points.draw(), points.draw()
    assert not torch.equal(first.uniform[0], first.uniform[1])
    assert not torch.equal(first.uniform, second.uniform)
    assert not torch.equal(first.anchor_indices[0], second.anchor_indices[0])


def test_a_stream_resumes_from_its_position():
    points = stream()
    for _ in range(3):
        points.draw()
    state = points.state()
    expected = points.draw()
    resumed = stream()
    resumed.restore(state)
    drawn = resumed.draw()
    assert torch.equal(drawn.uniform, expected.uniform)
    assert torch.equal(drawn.anchor_indices, expected.anchor_indices)
    resumed.restore({"position": 0})
    assert torch.equal(resumed.draw().uniform, stream().draw().uniform)


def test_fixed_points_never_change():
    points = stream(FixedPoints)
    first, second = points.draw(), points.draw()
    assert torch.equal(first.uniform, second.uniform)
    assert torch.equal(first.uniform[0], first.uniform[3])
    assert torch.equal(first.anchor_indices[0], second.anchor_indices[2])


def test_either_kind_of_point_may_be_absent():
    assert stream(from_anchors=0).draw().anchor_indices.shape == (4, 0)
    assert stream(from_sobol=0).draw().uniform.shape == (4, 0, 2)


def test_the_papers_protocol_is_expressible():
    """Seeds reset before each test grid: batches differ from each other, grids do not."""
    model = small_model(small_config())
    observations = some_observations(model)
    queries = some_queries(model)

    def evaluate_grid():
        points = model.point_stream(2026091322, 2026091323)
        return [model(observations, points.draw())(queries) for _ in range(2)]

    first, second = evaluate_grid(), evaluate_grid()
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[0], first[1])


def test_a_plain_call_is_repeatable():
    model = small_model()
    observations, queries = some_observations(model), some_queries(model)
    assert torch.equal(model(observations)(queries), model(observations)(queries))


def test_draws_move_with_the_model():
    draws = build(small_config()).point_stream(1, 2).draw().to(torch.device("meta"), torch.float32)
    assert draws.uniform.device.type == draws.anchor_indices.device.type == "meta"
    assert draws.uniform.dtype == torch.float32


@pytest.mark.parametrize(
    ("asked", "sobol", "expected"),
    [("as-trained", 8, (6, 8)), ("all-anchors", 8, (20, 20)), ("all-anchors", 0, (20, 0))],
)
def test_predictions_may_have_more_points_than_training(asked, sobol, expected):
    model = small_model(small_config(prediction_points=asked, points_from_sobol=sobol))

    def counts() -> tuple[int, int]:
        draws = model.point_stream(1, 2).draw()
        return draws.anchor_indices.shape[1], draws.uniform.shape[1]

    model.train()
    assert counts() == (6, sobol)
    model.eval()
    assert counts() == expected
    drawn = model.draws_for(some_observations(model))
    assert (drawn.anchor_indices.shape[1], drawn.uniform.shape[1]) == expected
