"""The local blend on a GPU: the full blend to rounding, from the anchors that matter.

Without a GPU the kernels run in Triton's interpreter.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fst.blending
import fst.field
from fst import kernels
from fst.rbf import blend, rbf_weights
from small import config_on, small_model, some_observations

pytest.importorskip("triton")
from fst.kernels import local_blend as local

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


def on_rows(axes, points, side, batch=1, channels=5):
    """A grid of anchors with length scales from 0.015 to 0.3, and points in the order of a grid."""
    ticks = torch.linspace(0, 1, side)
    anchors = torch.cartesian_prod(*[ticks] * axes).view(-1, axes)
    places = torch.cartesian_prod(*[torch.linspace(0, 1, points)] * axes).view(-1, axes)
    scales = 0.015 * 20 ** torch.rand(batch, len(anchors), axes) ** 3
    features = torch.randn(batch, len(anchors), channels)
    inputs = (places.expand(batch, -1, -1), anchors.expand(batch, -1, -1), scales, features)
    return [tensor.to(DEVICE) for tensor in inputs]


def exact(points, anchors, scales, features):
    inputs = [tensor.double() for tensor in (points, anchors, scales, features)]
    return blend(rbf_weights(*inputs[:3]), inputs[3])


def relative(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def lists(inputs, dtype):
    """For each tile the anchors listed for it and whether it is remote; the tiles' size."""
    points, anchors, scales, _ = inputs
    tiles = local.LOCAL_TILES[dtype.itemsize]
    places, *far = (x.transpose(1, 2).contiguous() for x in (points, anchors, local.FOLD / scales))
    tolerance = local.SHARE * torch.finfo(dtype).eps
    filled = local.with_far(*far, tiles["BLOCK_M"])
    made = local.anchor_lists(places, *filled, anchors.shape[1], tolerance, tiles)
    found = [row[:count].long() for row, count in zip(made.chosen[0], made.counts[0], strict=True)]
    return found, made.remote[0].bool().tolist(), tiles["BLOCK_Q"], tolerance


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    st.integers(1, 150), st.integers(1, 150), st.integers(1, 70), st.integers(1, 3),
    st.sampled_from([0.015, 0.05, 0.30]),
)  # fmt: skip
def test_any_size(points, anchors, channels, axes, scale):
    inputs = (
        torch.rand(2, points, axes),
        torch.rand(2, anchors, axes),
        scale * (0.5 + torch.rand(2, anchors, axes)),
        torch.randn(2, anchors, channels),
    )
    inputs = [tensor.to(DEVICE) for tensor in inputs]
    assert relative(local.local_blend(*inputs), exact(*inputs)) < 2e-6


@pytest.mark.parametrize(("axes", "points", "side"), [(1, 300, 200), (2, 30, 16), (3, 8, 6)])
def test_a_field_on_rows(axes, points, side):
    inputs = on_rows(axes, points, side, batch=2)
    assert relative(local.local_blend(*inputs), exact(*inputs)) < 2e-6
    inputs[3] = inputs[3].to(HALF)
    found = local.local_blend(*inputs)
    assert found.dtype == HALF
    assert relative(found, exact(*inputs)) < 2.0 ** (-7 if torch.bfloat16 == HALF else -10)


def test_points_shared_by_the_batch():
    points, *rest = on_rows(2, 20, 12, batch=2)
    shared = local.local_blend(points[:1], *rest)
    torch.testing.assert_close(shared, local.local_blend(points.contiguous(), *rest))


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


def test_all_anchors_in_one_place():
    """Nothing can be skipped, and every weight is the same where the scales are."""
    inputs = on_rows(2, 12, 12)
    inputs[1] = torch.full_like(inputs[1], 0.25)
    assert relative(local.local_blend(*inputs), exact(*inputs)) < 2e-6
    inputs[2] = torch.full_like(inputs[2], 0.015)
    found, *_ = lists(inputs, torch.float32)
    assert all(len(kept) == 144 for kept in found)
    mean = inputs[3].double().mean(dim=1, keepdim=True)
    torch.testing.assert_close(
        local.local_blend(*inputs).double(), mean.expand(-1, 144, -1), rtol=1e-5, atol=1e-5
    )


def test_one_anchor():
    inputs = on_rows(2, 12, 1)
    found = local.local_blend(*inputs)
    torch.testing.assert_close(found, inputs[3].expand_as(found), rtol=1e-6, atol=0)


@pytest.mark.parametrize("blend_", [kernels.fused_blend, local.local_blend])
@pytest.mark.parametrize(
    ("dtype", "channels", "error"), [(torch.float32, 5, 3e-5), (HALF, 5, 0.01), (HALF, 200, 0.01)]
)
def test_far_from_all_anchors(blend_, dtype, channels, error):
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
    found = blend_(points, anchors, scales, features)
    assert relative(found, exact(points, anchors, scales, features)) < error


@pytest.mark.parametrize("axis", [0, 1])
def test_an_anchor_without_a_number_is_seen(axis):
    """As in the dense formula: a model that has diverged does not look as if it had not."""
    inputs = on_rows(2, 24, 12)
    inputs[2][0, 3, axis] = torch.nan
    assert local.local_blend(*inputs).isnan().all()


def test_only_tiles_far_from_all_anchors_are_remote():
    """Elsewhere the weights of every point have a sum that float32 holds without a shift."""
    points, anchors, scales, features = on_rows(1, 300, 8)
    inputs = (points, 0.1 * anchors, torch.full_like(scales, 0.015), features)
    _, remote, size, _ = lists(inputs, torch.float32)
    points, anchors, scales, _ = (tensor.double() for tensor in inputs)
    logits = -0.5 * ((points[:, :, None] - anchors[:, None]) / scales[:, None]).square().sum(-1)
    logarithms = (logits[0].logsumexp(dim=-1) / math.log(2)).split(size)
    for tile, far in zip(logarithms, remote, strict=True):
        assert far or tile.min() >= local.LEAST_LOGARITHM.value
    assert True in remote
    assert False in remote
    assert not any(lists(on_rows(1, 300, 200), torch.float32)[1])


def test_a_constant_stays_constant_in_half_precision():
    inputs = on_rows(2, 12, 12)
    inputs[3] = torch.full_like(inputs[3], 3.0, dtype=HALF)
    found = local.local_blend(*inputs)
    torch.testing.assert_close(found, torch.full_like(found, 3.0), rtol=0, atol=0)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_scattered_points_are_put_in_compact_tiles(axes):
    points = torch.rand(2, 20_000, axes)
    assert local.scattered(points)
    order = local.compact_order(points)
    assert torch.equal(order.sort(dim=1).values, torch.arange(20_000).expand(2, -1))
    assert not local.scattered(points.gather(1, order[..., None].expand_as(points)))


def test_a_grid_is_left_as_it_is():
    grid = torch.cartesian_prod(torch.linspace(0, 1, 20), torch.linspace(0, 1, 1000))[None]
    assert not local.scattered(grid)
    assert not local.scattered(torch.rand(1, 10, 2))


class Calls:
    """Counts the calls of a function."""

    def __init__(self, function):
        self.function, self.number = function, 0

    def __call__(self, *given):
        self.number += 1
        return self.function(*given)


@pytest.fixture
def everywhere(monkeypatch):
    """The kernels are used for a CPU's tensors and for few points; returns the local blend."""
    monkeypatch.setattr(kernels, "usable", lambda anchors, width: True)
    monkeypatch.setattr(fst.blending, "LOCAL_POINTS", 50)
    monkeypatch.setattr(fst.blending, "LOCAL_ANCHORS", 8)
    counted = Calls(local.local_blend)
    monkeypatch.setattr(fst.blending, "local_blend", counted)
    return counted


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_field_is_asked_in_bounded_parts(everywhere, monkeypatch, ordered, parts):
    model = small_model(config_on(2)).float().to(DEVICE)
    field = model(some_observations(model, batch=2).to(torch.float32).to(DEVICE))
    queries = torch.rand(2, 300, 2, device=DEVICE)
    if ordered:
        queries = queries.sort(dim=1).values
    each = fst.field.FUSED_WIDTHS[4] * 2 * field.features.shape[2] * 4
    monkeypatch.setattr(fst.field, "FUSED_BYTES", 300 * each / parts)
    with torch.no_grad():
        found = field(queries)
        assert everywhere.number == parts
        with monkeypatch.context() as plain:
            plain.setattr(kernels, "usable", lambda anchors, width: False)
            wanted = field.decode(queries)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("parts", [1, 3])
def test_few_neighbours_are_decoded_in_bounded_parts(everywhere, monkeypatch, parts):
    model = small_model(config_on(2)).float().to(DEVICE)
    field = model(some_observations(model, batch=2).to(torch.float32).to(DEVICE))
    queries = torch.rand(2, 300, 2, device=DEVICE)
    each = fst.field.FUSED_WIDTHS[4] * 2 * field.features.shape[2] * 4
    monkeypatch.setattr(fst.field, "FUSED_BYTES", 300 * each / parts)
    finished = []
    finish = fst.field.Field._finish
    monkeypatch.setattr(
        fst.field.Field, "_finish", lambda *given: finished.append(1) or finish(*given)
    )
    with torch.no_grad():
        found = field(queries, neighbors=4)
        assert len(finished) == parts
        torch.testing.assert_close(found, field.decode(queries, 4), rtol=1e-4, atol=1e-4)
    assert everywhere.number == 0


def test_gradients_go_through_the_full_blend(everywhere):
    inputs = [tensor.requires_grad_() for tensor in on_rows(2, 12, 6)]
    found = fst.blending.field_at(*inputs)
    assert everywhere.number == 0
    found.sum().backward()
    assert all(tensor.grad is not None for tensor in inputs[1:])
    with torch.no_grad():
        torch.testing.assert_close(fst.blending.field_at(*inputs), found, rtol=1e-5, atol=1e-5)
    assert everywhere.number == 1


def test_a_field_with_gradients_is_asked_in_parts(everywhere, monkeypatch):
    model = small_model(config_on(2)).float().to(DEVICE)
    field = model(some_observations(model, batch=1).to(torch.float32).to(DEVICE))
    queries = torch.rand(1, 150, 2, device=DEVICE)
    each = fst.field.FUSED_WIDTHS[4] * field.features.shape[2] * 4
    monkeypatch.setattr(fst.field, "FUSED_BYTES", 70 * each)
    found = torch.autograd.grad(field(queries).sum(), field.features, retain_graph=True)[0]
    assert everywhere.number == 0
    monkeypatch.setattr(kernels, "usable", lambda anchors, width: False)
    wanted = torch.autograd.grad(field.decode(queries).sum(), field.features)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
