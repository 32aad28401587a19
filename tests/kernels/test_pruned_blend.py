"""The pruned blend: the same numbers as the dense formula, from far fewer anchors."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fst
from fst.kernels import pruned_blend as pruned
from fst.rbf import rbf_weights
from small import small_model, some_observations, some_queries


def blend(weights, features):
    return weights.to(features.dtype) @ features


def scattered(points, anchors, axes, scale, dtype=torch.float64):
    return (
        torch.rand(2, points, axes, dtype=dtype),
        torch.rand(2, anchors, axes, dtype=dtype),
        scale * (0.5 + torch.rand(2, anchors, axes, dtype=dtype)),
        torch.randn(2, anchors, 5, dtype=dtype),
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.integers(1, 300), st.integers(1, 120), st.integers(1, 3),
    st.sampled_from([0.015, 0.05, 0.30]), st.integers(1, 40), st.booleans(),
    st.sampled_from([1, 2**21]),
)  # fmt: skip
def test_both_are_the_dense_formula(points, anchors, axes, scale, neighbors, learning, at_once):
    """Whether all tiles are in one group, or each is alone."""
    inputs = scattered(points, anchors, axes, scale)
    groups = patch.dict(pruned.GROUP_NUMBERS, cpu=at_once)
    with groups, torch.set_grad_enabled(learning):
        dense = blend(rbf_weights(*inputs[:3]), inputs[3])
        torch.testing.assert_close(pruned.pruned_blend(*inputs), dense, rtol=1e-12, atol=1e-13)
        if neighbors < anchors:
            dense = blend(rbf_weights(*inputs[:3], neighbors), inputs[3])
            found = pruned.nearest_blend(*inputs, neighbors)
            torch.testing.assert_close(found, dense, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_left_out_is_below_rounding(dtype):
    """At every point the weights of the anchors that a tile leaves out sum to less than ε/2."""
    points, anchors, scales, _ = scattered(500, 400, 2, 0.03, torch.float64)
    marks = torch.eye(400, dtype=dtype).expand(2, -1, -1)  # the blend of marks is the weights
    kept = pruned.pruned_blend(points.to(dtype), anchors.to(dtype), scales.to(dtype), marks) > 0
    exact = rbf_weights(points.to(dtype).double(), anchors.to(dtype).double(), scales.to(dtype))
    lost = exact.masked_fill(kept, 0.0).sum(dim=-1)
    assert 0 < lost.max() < torch.finfo(dtype).eps


def test_ties_are_kept_whatever_the_order():
    """A point in the middle of four anchors: asked for three, it takes all four."""
    anchors = torch.tensor([[[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.9]]])
    scales = torch.full_like(anchors, 0.5)
    points = torch.full((1, 3, 2), 0.5)
    features = torch.arange(5.0).view(1, 5, 1)
    for form in (
        blend(rbf_weights(points, anchors, scales, 3), features),
        pruned.nearest_blend(points, anchors, scales, features, 3),
    ):
        # The fifth is nearest; two of the four corners are as near as the third, so all come.
        assert form.std() == 0
        weights = torch.tensor([-0.25 / 0.25] * 4 + [-0.5 * (0.25 + 0.16) / 0.25]).exp()
        expected = (weights * features.flatten()).sum() / weights.sum()
        torch.testing.assert_close(form[0, 0, 0], expected)


@pytest.mark.parametrize("which", [1, 2, 3])
def test_what_has_no_number_is_seen(which):
    """A model that has diverged does not look as if it had not."""
    inputs = scattered(300, 100, 2, 0.05, torch.float32)
    inputs[which][:, 7] = torch.nan
    assert pruned.pruned_blend(*inputs).isnan().any()
    nearest = pruned.nearest_blend(*inputs, 5).isnan()
    assert nearest.any()
    assert nearest.all() == (which == 1)  # without a position it may be near to all
    assert blend(rbf_weights(*inputs[:3], 5), inputs[3]).isnan().any()


@pytest.mark.parametrize("threads", [0, 1_000])
def test_both_ways_to_find_the_nearest(monkeypatch, threads):
    monkeypatch.setattr(pruned, "FEW_THREADS", threads)
    inputs = scattered(200, 100, 2, 0.05)
    dense = blend(rbf_weights(*inputs[:3], 7), inputs[3])
    torch.testing.assert_close(pruned.nearest_blend(*inputs, 7), dense, rtol=1e-12, atol=1e-13)


def test_gradients():
    inputs = tuple(x.requires_grad_() for x in scattered(5, 9, 2, 0.3))
    assert torch.autograd.gradcheck(lambda *x: pruned.nearest_blend(*x, 4), inputs)
    assert torch.autograd.gradcheck(pruned.pruned_blend, inputs)


def test_few_candidates_on_ordered_rows():
    """On 32 rows of 32 anchors a tile of a grid needs a small share of them for 16 neighbours."""
    rows = torch.cartesian_prod(torch.linspace(0, 1, 32), torch.linspace(0, 1, 32))
    grid = torch.cartesian_prod(torch.linspace(0, 1, 100), torch.linspace(0, 1, 100))
    tiles, order = pruned._in_tiles(grid)
    assert order.unique().tolist() == list(range(10_001))  # the last is where copies go
    least, most = map(sum, pruned._squared_gaps(tiles, rows))
    candidates = (least <= most.kthvalue(16, dim=1, keepdim=True).values).sum(dim=1)
    assert candidates.double().mean() < 0.1 * 1024


def test_the_public_blend_takes_the_local_way():
    inputs = scattered(200, 100, 2, 0.05)
    torch.testing.assert_close(
        fst.rbf_blend(*inputs, neighbors=7),
        blend(rbf_weights(*inputs[:3], 7), inputs[3]),
        rtol=1e-12,
        atol=1e-13,
    )


@pytest.mark.parametrize("learning", [True, False])
def test_half_precision_decides_as_the_dense_formula_does(learning):
    points, anchors, scales, features = (x.bfloat16() for x in scattered(200, 100, 2, 0.05))
    inputs = points, anchors, scales
    with torch.set_grad_enabled(learning):
        found = pruned.nearest_blend(*inputs, features, 7)
        full = pruned.pruned_blend(*inputs, features)
    dense = blend(rbf_weights(*inputs, 7), features)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, dense, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(full, blend(rbf_weights(*inputs), features), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("batch", [0, 1, 2])
@pytest.mark.parametrize("axes", [1, 2])
def test_no_points_have_no_blends(batch, axes):
    inputs = [each[:batch] for each in scattered(0 if batch else 3, 10, axes, 0.05)]
    wanted = (batch, inputs[0].shape[1], 5)
    for neighbors in (None, 3):
        assert fst.rbf_blend(*inputs, neighbors=neighbors).shape == wanted
    assert pruned.pruned_blend(*inputs).shape == wanted


@pytest.mark.parametrize("neighbors", [None, 3])
def test_no_queries_have_no_answers(neighbors):
    model = small_model()
    with torch.no_grad():
        field = model(some_observations(model))
        answer = field(some_queries(model, count=0), neighbors=neighbors)
    assert answer.shape == (2, 0, model.output_channels)
