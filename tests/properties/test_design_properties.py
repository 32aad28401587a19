"""The paper's three design properties (Section 3.3), on random models."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import fst.operators
from fst import Observations, rbf_blend
from fst.evaluation_points import PointDraws
from fst.kernels import fuse
from fst.rbf import rbf_weights
from small import small_config, small_model, some_observations, some_queries

close = {"rtol": 1e-9, "atol": 1e-9}


def test_the_order_of_observations_does_not_matter():
    model = small_model(small_config(condition_channels=1))
    given_, queries = some_observations(model), some_queries(model)
    order = torch.randperm(given_.positions.shape[1])
    shuffled = Observations(given_.positions[:, order], given_.values[:, order], given_.condition)
    torch.testing.assert_close(model(shuffled)(queries), model(given_)(queries), **close)


def test_the_order_of_evaluation_points_does_not_matter():
    model = small_model()
    observations, queries = some_observations(model), some_queries(model)
    draws = model.point_stream(3, 4).draw()
    mixed = PointDraws(
        draws.anchor_indices[:, torch.randperm(draws.anchor_indices.shape[1])],
        draws.uniform[:, torch.randperm(draws.uniform.shape[1])],
    )
    first, second = model(observations, draws), model(observations, mixed)
    torch.testing.assert_close(second.features, first.features, **close)
    torch.testing.assert_close(second(queries), first(queries), **close)


def test_the_order_of_refinement_steps_does():
    """The counterpart, so that the tests above could fail: other points, another answer."""
    model = small_model()
    observations, queries = some_observations(model), some_queries(model)
    draws = model.point_stream(3, 4).draw()
    other = PointDraws(draws.anchor_indices.flip(0), draws.uniform.flip(0))
    difference = model(observations, draws)(queries) - model(observations, other)(queries)
    assert difference.abs().max() > 1e-6


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**31), st.sampled_from([None, 1, 3, 20, 99]))
def test_queries_do_not_know_of_each_other(count, seed, neighbors):
    torch.manual_seed(seed)
    model = small_model()
    field = model(some_observations(model))
    queries = some_queries(model, count=count)
    answers = field(queries, neighbors)
    order = torch.randperm(count)
    torch.testing.assert_close(field(queries[:, order], neighbors), answers[:, order], **close)
    some = order[: (count + 1) // 2]
    torch.testing.assert_close(field(queries[:, some], neighbors), answers[:, some], **close)
    more = torch.cat((queries, some_queries(model)), dim=1)
    torch.testing.assert_close(field(more, neighbors)[:, :count], answers, **close)


@pytest.mark.parametrize("numbers", [1, 700, 5_000])
def test_chunks_do_not_matter(monkeypatch, numbers):
    model = small_model()
    field = model(some_observations(model))
    queries = some_queries(model, count=33)
    whole = field.decode(queries)
    monkeypatch.setitem(fst.operators.CHUNK_NUMBERS, "cpu", numbers)
    torch.testing.assert_close(field(queries), whole, **close)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that is made."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return made


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("neighbors", [None, 3])
@pytest.mark.parametrize("fast", [False, True])
def test_memory_does_not_grow_with_the_queries(monkeypatch, gradients, neighbors, fast):
    """Beside queries and answers themselves, decoding holds one region and one chunk at a time."""
    model = fuse(small_model()) if fast else small_model()
    field = model(some_observations(model, batch=1))
    monkeypatch.setitem(fst.operators.CHUNK_NUMBERS, "cpu", 20_000)
    monkeypatch.setattr(fst.kernels.modules, "REGION", 256)
    largest = {}
    for count in (1_000, 4_000):
        queries = some_queries(model, batch=1, count=count)
        with torch.set_grad_enabled(gradients), Largest() as watch:
            field(queries, neighbors)
        largest[count] = watch.numbers
    assert largest[4_000] <= max(largest[1_000], 2 * 4_000)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(2, 40),
    st.integers(1, 45),
    st.floats(0.015, 0.30),
    st.integers(0, 2**31),
)
def test_the_neighbour_limited_error_is_bounded_by_the_omitted_weight(axes, m, k, scale, seed):
    """|full - limited| <= omitted weight * (largest - smallest feature), per feature.

    With ω the omitted weight, full = (1-ω) limited + ω rest, where `limited` and `rest` are both
    means of features; so the difference is ω (rest - limited).
    """
    torch.manual_seed(seed)
    points, anchors = torch.rand(1, 20, axes).double(), torch.rand(1, m, axes).double()
    scales = scale * (0.5 + torch.rand(1, m, axes)).double()
    features = torch.randn(1, m, 5).double()
    full = rbf_blend(points, anchors, scales, features)
    limited = rbf_blend(points, anchors, scales, features, neighbors=k)
    kept = rbf_weights(points, anchors, scales, k) > 0
    weights = rbf_weights(points, anchors, scales)
    omitted = weights.masked_fill(kept, 0).sum(-1, keepdim=True)
    spread = features.amax(1, keepdim=True) - features.amin(1, keepdim=True)
    assert bool(((full - limited).abs() <= omitted * spread + 1e-12).all())
    if k >= m:
        torch.testing.assert_close(limited, full, rtol=0, atol=0)


def test_the_error_falls_as_neighbours_grow():
    model = small_model()
    field = model(some_observations(model))
    queries = some_queries(model, count=200)
    full = field(queries)
    errors = [(field(queries, neighbors=k) - full).norm().item() for k in (1, 4, 12, 20)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1e-3
    assert errors[-1] == 0
