"""The blend: exact, normalised, and safe at the extremes."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from fst import rbf_blend
from fst.rbf import rbf_weights, squared_distances


def scattered(points=7, anchors=12, axes=2, scale=0.1, dtype=torch.float64):
    return (
        torch.rand(2, points, axes, dtype=dtype),
        torch.rand(2, anchors, axes, dtype=dtype),
        scale * (0.5 + torch.rand(2, anchors, axes, dtype=dtype)),
        torch.randn(2, anchors, 3, dtype=dtype),
    )


def test_two_anchors_by_hand():
    points = torch.tensor([[[0.25]]], dtype=torch.float64)
    anchors = torch.tensor([[[0.0], [1.0]]], dtype=torch.float64)
    scales = torch.tensor([[[0.5], [0.25]]], dtype=torch.float64)
    features = torch.tensor([[[1.0], [3.0]]], dtype=torch.float64)
    first, second = math.exp(-0.5 * 0.5**2), math.exp(-0.5 * 3**2)
    expected = (first + 3 * second) / (first + second)
    assert rbf_blend(points, anchors, scales, features).item() == pytest.approx(expected, abs=1e-14)


def test_a_constant_is_reproduced():
    points, anchors, scales, features = scattered()
    constant = torch.full_like(features, 2.5)
    torch.testing.assert_close(
        rbf_blend(points, anchors, scales, constant), torch.full((2, 7, 3), 2.5).double()
    )


def test_a_blend_is_a_mean():
    points, anchors, scales, features = scattered()
    blended = rbf_blend(points, anchors, scales, features)
    assert bool((blended <= features.amax(1, keepdim=True) + 1e-12).all())
    assert bool((blended >= features.amin(1, keepdim=True) - 1e-12).all())


@pytest.mark.parametrize("neighbors", [None, 4])
def test_gradients(neighbors):
    inputs = tuple(x.requires_grad_() for x in scattered(points=3, anchors=6, scale=0.3))
    assert gradcheck(lambda *x: rbf_blend(*x, neighbors=neighbors), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.015, 0.30])
def test_nothing_under_or_overflows(dtype, scale):
    """Far from every anchor all exponentials vanish in float32; their ratio must not."""
    points = torch.tensor([[[1.0, 1.0], [0.0, 0.0], [0.5, 0.5]]], dtype=dtype, requires_grad=True)
    anchors = torch.tensor([[[0.0, 0.0], [0.0, 0.01]]], dtype=dtype, requires_grad=True)
    scales = torch.full((1, 2, 2), scale, dtype=dtype, requires_grad=True)
    features = torch.tensor([[[1.0], [2.0]]], dtype=dtype, requires_grad=True)
    blended = rbf_blend(points, anchors, scales, features)
    blended.sum().backward()
    for tensor in (blended, points.grad, anchors.grad, scales.grad, features.grad):
        assert bool(torch.isfinite(tensor).all())
    # The nearer of two far anchors wins by the difference of their logits.
    gap = 0.5 * ((1.0 - 0.0) ** 2 - (1.0 - 0.01) ** 2) / scale**2
    assert blended[0, 0, 0].item() == pytest.approx(2 - 1 / (1 + math.exp(gap)), rel=1e-5)


def test_float32_distances_are_good_to_rounding():
    points, anchors, scales, _ = scattered(points=200, anchors=300, scale=0.02)
    single = squared_distances(points.float(), anchors.float(), scales.float()).double()
    # Rounding of the inputs themselves moves a distance by its own derivative: compare like inputs.
    exact = squared_distances(*(x.float().double() for x in (points, anchors, scales)))
    torch.testing.assert_close(single, exact, rtol=1e-6, atol=1e-6)


def test_autocast_does_not_reach_the_logits():
    points, anchors, scales, features = scattered(dtype=torch.float32, scale=0.03)
    plain = rbf_weights(points, anchors, scales)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = rbf_weights(points, anchors, scales)
        blended = rbf_blend(points, anchors, scales, features)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, plain, rtol=0, atol=0)
    torch.testing.assert_close(
        blended.float(), rbf_blend(points, anchors, scales, features), rtol=2e-2, atol=2e-2
    )


def test_neighbours_are_the_nearest_by_distance_not_by_weight():
    points = torch.zeros(1, 1, 1, dtype=torch.float64)
    anchors = torch.tensor([[[0.1], [0.2], [0.3]]], dtype=torch.float64)
    scales = torch.tensor([[[0.01], [1.0], [1.0]]], dtype=torch.float64)
    weights = rbf_weights(points, anchors, scales, neighbors=1)
    torch.testing.assert_close(weights, torch.tensor([[[1.0, 0.0, 0.0]]], dtype=torch.float64))


@pytest.mark.parametrize("k", [12, 13, 1000])
def test_all_the_neighbours_are_the_full_blend(k):
    inputs = scattered()
    torch.testing.assert_close(rbf_blend(*inputs, neighbors=k), rbf_blend(*inputs), rtol=0, atol=0)


BAD = {
    "points": lambda p, a, s, f: (p[0], a, s, f),
    "anchors": lambda p, a, s, f: (p, a[..., :1], s, f),
    "length_scales": lambda p, a, s, f: (p, a, s[:, :3], f),
    "features": lambda p, a, s, f: (p, a, s, f[:1]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_shape_is_named(name):
    with pytest.raises(ValueError, match=name):
        rbf_blend(*BAD[name](*scattered()))


def test_other_mistakes_are_named():
    points, anchors, scales, features = scattered()
    with pytest.raises(TypeError, match="features must be torch"):
        rbf_blend(points, anchors, scales, features.float())
    with pytest.raises(TypeError, match="points must be a floating-point tensor"):
        rbf_blend(points.numpy(), anchors, scales, features)
    with pytest.raises(ValueError, match="neighbors must be at least 1, got 0"):
        rbf_blend(points, anchors, scales, features, neighbors=0)
    with pytest.raises(TypeError, match="neighbors must be a whole number"):
        rbf_blend(points, anchors, scales, features, neighbors=2.5)
    with pytest.raises(ValueError, match="at least one anchor"):
        rbf_blend(points, anchors[:, :0], scales[:, :0], features[:, :0])
    with pytest.raises(ValueError, match="length_scales must be positive"):
        rbf_blend(points, anchors, 0 * scales, features)
    with pytest.raises(ValueError, match="length_scales must be at least"):
        rbf_blend(points, anchors, 0 * scales + 1e-30, features)
    with pytest.raises(ValueError, match="features must be on cpu like .*, got meta"):
        rbf_blend(points, anchors, scales, features.to("meta"))
