"""The blend kernels against float64, forward and every gradient; the pruned blend to rounding."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fst.rbf import rbf_blend, rbf_weights
from kernel_examples import DEVICE, HALF, exact_blend, relative

blend = pytest.importorskip("fst.kernels.blend")


def scattered(batch, points, anchors, channels, axes, scale, dtype=torch.float32, shared=False):
    """Inputs that float32 (and, for the features, `dtype`) holds exactly."""
    rows = 1 if shared else batch
    given = (
        torch.rand(rows, points, axes),
        torch.rand(batch, anchors, axes),
        scale * (0.8 + 0.4 * torch.rand(batch, anchors, axes)),
        torch.randn(batch, anchors, channels).to(dtype),
    )
    return [tensor.to(DEVICE) for tensor in given]


def blend_errors(inputs, learned_points=True, function=blend.fused_blend):
    """Relative errors of the fused blend, or of another function, and of its gradients."""
    dtype = inputs[3].dtype
    learned = inputs if learned_points else inputs[1:]
    count = len(learned)
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    expected = exact_blend(*exact)
    upstream = torch.randn_like(expected).to(dtype)
    wanted = torch.autograd.grad(expected, exact[-count:], upstream.double())
    mine = [tensor.clone() for tensor in inputs]
    for tensor in mine[-count:]:
        tensor.requires_grad_()
    found = function(*mine)
    assert found.dtype == dtype
    gradients = torch.autograd.grad(found, mine[-count:], upstream)
    pairs = [(found, expected), *zip(gradients, wanted, strict=True)]
    return [relative(a.detach(), b.detach()) for a, b in pairs]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.integers(1, 70), st.integers(1, 70), st.integers(1, 40), st.integers(1, 3),
    st.sampled_from([0.015, 0.05, 0.30]),
)  # fmt: skip
def test_the_blend_at_any_size(points, anchors, channels, axes, scale):
    inputs = scattered(2, points, anchors, channels, axes, scale)
    errors = []
    for function in (blend.fused_blend, rbf_blend):
        torch.manual_seed(1)  # the same gradient from above
        errors.append(blend_errors(inputs, function=function))
    (forward, *gradients), (plain, *plain_gradients) = errors
    # Far from all anchors single precision itself is worse: there the plain formula is the measure.
    assert forward < max(2e-6, 5 * plain)
    # A gradient that vanishes (one anchor holds all the weight) has no relative error to speak of.
    weights = rbf_weights(*(tensor.double() for tensor in inputs[:3]))
    if (weights.amax(dim=-1) < 0.9).any():
        assert max(gradients) < max(2e-5, 5 * max(plain_gradients))


@pytest.mark.parametrize("channels", [1, 16, 128, 129, 176, 200, 256])
def test_the_blend_at_any_number_of_channels(channels):
    assert max(blend_errors(scattered(1, 40, 33, channels, 2, 0.1))) < 3e-6


@pytest.mark.parametrize("scale", [0.015, 0.30])
def test_the_blend_in_half_precision(scale):
    """Errors are those of rounding the weights, features and results, not of the logits."""
    errors = blend_errors(scattered(2, 70, 150, 48, 2, scale, HALF))
    assert max(errors) < 2.0 ** (-6 if torch.bfloat16 == HALF else -8)


def test_points_shared_by_the_batch():
    inputs = scattered(3, 20, 30, 8, 2, 0.1, shared=True)
    assert max(blend_errors(inputs, learned_points=False)) < 3e-6
    inputs[0].requires_grad_()
    with pytest.raises(ValueError, match="points shared by the batch cannot be learned"):
        blend.fused_blend(*inputs)


def test_points_on_the_anchors():
    """Coincident points and anchors, twice the same anchor, and points far from all of them."""
    inputs = scattered(2, 40, 40, 8, 2, 0.03)
    inputs[0] = inputs[1].clone()
    inputs[1][:, 1] = inputs[1][:, 0]
    inputs[0][:, 2:4] = 1.0
    inputs[1][:, 5:] *= 0.05
    assert max(blend_errors(inputs)) < 1e-5


def test_a_constant_stays_constant_in_half_precision():
    inputs = scattered(1, 50, 60, 16, 2, 0.1, HALF)
    inputs[3] = torch.full_like(inputs[3], 3.0)
    torch.testing.assert_close(
        blend.fused_blend(*inputs), torch.full_like(inputs[3][:, :50], 3.0), rtol=0, atol=0
    )


def test_nothing_of_points_by_anchors_is_stored():
    inputs = scattered(1, 37, 41, 8, 2, 0.1)
    stored = []

    def keep(tensor):
        stored.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        blend.fused_blend(*(tensor.requires_grad_() for tensor in inputs))
    assert max(stored) < 37 * 41


def on_rows(axes, points, side, batch=1, channels=5):
    """A grid of anchors with length scales from 0.015 to 0.3, and points in the order of a grid."""
    ticks = torch.linspace(0, 1, side)
    anchors = torch.cartesian_prod(*[ticks] * axes).view(-1, axes)
    by_axis = torch.cartesian_prod(*[torch.linspace(0, 1, points)] * axes).view(-1, axes)
    scales = 0.015 * 20 ** torch.rand(batch, len(anchors), axes) ** 3
    features = torch.randn(batch, len(anchors), channels)
    inputs = (by_axis.expand(batch, -1, -1), anchors.expand(batch, -1, -1), scales, features)
    return [tensor.to(DEVICE) for tensor in inputs]


def lists(inputs, dtype):
    """For each tile the anchors listed for it and whether it is remote; the tiles' size."""
    points, anchors, scales, _ = inputs
    tiles = blend.PRUNED_TILES[dtype.itemsize]
    by_axis, *far = (
        x.transpose(1, 2).contiguous() for x in (points, anchors, blend.EXP2_SCALE / scales)
    )
    tolerance = blend.PRUNED_SHARE * torch.finfo(dtype).eps
    filled = blend.with_far(*far, tiles["BLOCK_M"])
    made = blend.anchor_lists(by_axis, *filled, anchors.shape[1], tolerance, tiles)
    found = [row[:count].long() for row, count in zip(made.chosen[0], made.counts[0], strict=True)]
    return found, made.remote[0].bool().tolist(), tiles["BLOCK_Q"], tolerance


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    st.integers(1, 150), st.integers(1, 150), st.integers(1, 70), st.integers(1, 3),
    st.sampled_from([0.015, 0.05, 0.30]),
)  # fmt: skip
def test_the_pruned_blend_at_any_size(points, anchors, channels, axes, scale):
    inputs = (
        torch.rand(2, points, axes),
        torch.rand(2, anchors, axes),
        scale * (0.5 + torch.rand(2, anchors, axes)),
        torch.randn(2, anchors, channels),
    )
    inputs = [tensor.to(DEVICE) for tensor in inputs]
    assert relative(blend.pruned_blend(*inputs), exact_blend(*inputs)) < 2e-6


@pytest.mark.parametrize(("axes", "points", "side"), [(1, 300, 200), (2, 30, 16), (3, 8, 6)])
def test_the_pruned_blend_of_a_field_on_rows(axes, points, side):
    inputs = on_rows(axes, points, side, batch=2)
    assert relative(blend.pruned_blend(*inputs), exact_blend(*inputs)) < 2e-6
    inputs[3] = inputs[3].to(HALF)
    found = blend.pruned_blend(*inputs)
    assert found.dtype == HALF
    assert relative(found, exact_blend(*inputs)) < 2.0 ** (-7 if torch.bfloat16 == HALF else -10)


def test_points_shared_by_the_batch_in_the_pruned_blend():
    points, *rest = on_rows(2, 20, 12, batch=2)
    shared = blend.pruned_blend(points[:1], *rest)
    torch.testing.assert_close(shared, blend.pruned_blend(points.contiguous(), *rest))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_left_out_weighs_less_than_rounding(dtype):
    inputs = on_rows(2, 40, 24)
    found, _, size, tolerance = lists(inputs, dtype)
    weights = rbf_weights(*(tensor.double() for tensor in inputs[:3]))[0]
    lost = []
    for kept, tile in zip(found, weights.split(size), strict=True):
        assert kept.unique().tolist() == kept.tolist()
        left_out = tile.clone()
        left_out[:, kept] = 0
        lost.append(left_out.sum(dim=1).max().item())
    assert 0 < max(lost) < tolerance
    assert sum(map(len, found)) < 0.6 * len(found) * weights.shape[1]


def test_all_anchors_at_one_position():
    """Nothing can be skipped, and every weight is the same where the scales are."""
    inputs = on_rows(2, 12, 12)
    inputs[1] = torch.full_like(inputs[1], 0.25)
    assert relative(blend.pruned_blend(*inputs), exact_blend(*inputs)) < 2e-6
    inputs[2] = torch.full_like(inputs[2], 0.015)
    found, *_ = lists(inputs, torch.float32)
    assert all(len(kept) == 144 for kept in found)
    mean = inputs[3].double().mean(dim=1, keepdim=True)
    torch.testing.assert_close(
        blend.pruned_blend(*inputs).double(), mean.expand(-1, 144, -1), rtol=1e-5, atol=1e-5
    )


def test_one_anchor():
    inputs = on_rows(2, 12, 1)
    found = blend.pruned_blend(*inputs)
    torch.testing.assert_close(found, inputs[3].expand_as(found), rtol=1e-6, atol=0)


@pytest.mark.parametrize("evaluate", [blend.fused_blend, blend.pruned_blend])
@pytest.mark.parametrize(
    ("dtype", "channels", "error"), [(torch.float32, 5, 3e-5), (HALF, 5, 0.01), (HALF, 200, 0.01)]
)
def test_far_from_all_anchors(evaluate, dtype, channels, error):
    """Where every exponential vanishes in float32, next to points where none does."""
    points, anchors, _, features = on_rows(2, 12, 8, channels=channels)
    features = features.to(dtype)
    anchors = 0.1 * anchors
    scales = torch.full_like(anchors, 0.015)
    weights = rbf_weights(points.double(), anchors.double(), scales.double())
    logits = -0.5 * ((points[:, :, None] - anchors[:, None]) / scales[:, None]).square().sum(-1)
    assert logits.amax(-1).max() > -1
    assert logits.amax(-1).min() < -1000
    assert weights.amax(-1).min() < 0.9
    found = evaluate(points, anchors, scales, features)
    assert relative(found, exact_blend(points, anchors, scales, features)) < error


@pytest.mark.parametrize("axis", [0, 1])
def test_an_anchor_without_a_number_is_seen(axis):
    """As in the dense formula: a model that has diverged does not look as if it had not."""
    inputs = on_rows(2, 24, 12)
    inputs[2][0, 3, axis] = torch.nan
    assert blend.pruned_blend(*inputs).isnan().all()


def test_only_tiles_far_from_all_anchors_are_remote():
    """Elsewhere the weights of every point have a sum that float32 holds without a shift."""
    points, anchors, scales, features = on_rows(1, 300, 8)
    inputs = (points, 0.1 * anchors, torch.full_like(scales, 0.015), features)
    _, remote, size, _ = lists(inputs, torch.float32)
    points, anchors, scales, _ = (tensor.double() for tensor in inputs)
    logits = -0.5 * ((points[:, :, None] - anchors[:, None]) / scales[:, None]).square().sum(-1)
    logarithms = (logits[0].logsumexp(dim=-1) / math.log(2)).split(size)
    for tile, far in zip(logarithms, remote, strict=True):
        assert far or tile.min() >= blend.LEAST_LOGARITHM.value
    assert True in remote
    assert False in remote
    assert not any(lists(on_rows(1, 300, 200), torch.float32)[1])


def test_a_constant_stays_constant_in_the_pruned_blend():
    inputs = on_rows(2, 12, 12)
    inputs[3] = torch.full_like(inputs[3], 3.0, dtype=HALF)
    found = blend.pruned_blend(*inputs)
    torch.testing.assert_close(found, torch.full_like(found, 3.0), rtol=0, atol=0)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_scattered_points_are_put_in_compact_tiles(axes):
    points = torch.rand(2, 20_000, axes)
    assert blend.scattered(points)
    order = blend.compact_order(points)
    assert torch.equal(order.sort(dim=1).values, torch.arange(20_000).expand(2, -1))
    assert not blend.scattered(points.gather(1, order[..., None].expand_as(points)))


def test_a_grid_is_left_as_it_is():
    grid = torch.cartesian_prod(torch.linspace(0, 1, 20), torch.linspace(0, 1, 1000))[None]
    assert not blend.scattered(grid)
    assert not blend.scattered(torch.rand(1, 10, 2))
