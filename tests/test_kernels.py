"""The Triton kernels against float64 references, forward and every gradient.

Without a GPU they run in Triton's interpreter, which has no bfloat16 products: float16 stands in
for half precision there.
"""

import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st

from fst import kernels
from fst.rbf import blend, rbf_weights

pytest.importorskip("triton")
attention = pytest.importorskip("fst.kernels.attention")
hopper = pytest.importorskip("fst.kernels.hopper")
weights = pytest.importorskip("fst.kernels.weights")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
# On a GPU our own attention is given half precision alone (`kernels.takes_heads`). In the
# interpreter float32 shows what rounding would hide.
FINEST = HALF if DEVICE == "cuda" else torch.float32
BOUND = {torch.float32: 2e-6, HALF: 2.0 ** (-6 if torch.bfloat16 == HALF else -9)}


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


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


def blend_errors(inputs, learned_points=True):
    """Relative errors of the fused blend and of its gradients."""
    dtype = inputs[3].dtype
    learned = inputs if learned_points else inputs[1:]
    count = len(learned)
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    expected = blend(rbf_weights(*exact[:3]), exact[3])
    upstream = torch.randn_like(expected).to(dtype)
    wanted = torch.autograd.grad(expected, exact[-count:], upstream.double())
    mine = [tensor.clone() for tensor in inputs]
    for tensor in mine[-count:]:
        tensor.requires_grad_()
    found = kernels.fused_blend(*mine)
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
    forward, *gradients = blend_errors(inputs)
    assert forward < 2e-6
    # A gradient that vanishes (one anchor holds all the weight) has no relative error to speak of.
    weights = rbf_weights(*(tensor.double() for tensor in inputs[:3]))
    if (weights.amax(dim=-1) < 0.9).any():
        assert max(gradients) < 2e-5


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
        kernels.fused_blend(*inputs)


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
        kernels.fused_blend(*inputs), torch.full_like(inputs[3][:, :50], 3.0), rtol=0, atol=0
    )


def test_nothing_of_points_by_anchors_is_stored():
    inputs = scattered(1, 37, 41, 8, 2, 0.1)
    stored = []

    def keep(tensor):
        stored.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kernels.fused_blend(*(tensor.requires_grad_() for tensor in inputs))
    assert max(stored) < 37 * 41


@pytest.mark.parametrize(
    ("count", "axes", "scale"),
    [(1, 2, 0.1), (33, 3, 0.015), (130, 1, 0.3), (64, 2, 0.015), (200, 2, 0.05)],
)
def test_anchor_weights(count, axes, scale):
    _, positions, scales, _ = scattered(2, 1, count, 1, axes, scale)
    positions[:, count // 2] = positions[:, 0].clone()  # coincident
    exact = [tensor.double().requires_grad_() for tensor in (positions, scales)]
    expected = rbf_weights(exact[0], *exact)
    upstream = torch.randn(2, count, count, device=DEVICE)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    mine = [tensor.clone().requires_grad_() for tensor in (positions, scales)]
    found, _ = weights.weights_forward(*weights.prepare(*mine), torch.float32)
    gradients = torch.autograd.grad(found, mine, upstream)
    assert relative(found.detach(), expected.detach()) < 1e-6
    for gradient, reference in zip(gradients, wanted, strict=True):
        assert relative(gradient, reference) < 4e-6
    half, _ = weights.weights_forward(*weights.prepare(positions, scales), HALF)
    torch.testing.assert_close(half, found.detach().to(HALF), rtol=0, atol=0)


def heads(batch, count, number, size, dtype):
    """Heads as a projection leaves them: strided, the last axis dense."""
    return torch.randn(batch, count, number, size, device=DEVICE).to(dtype).transpose(1, 2)


def joint(batch, count, parts, number, size, dtype):
    """Keys and values, or queries and these, as a joint projection leaves them."""
    return torch.randn(batch, count, parts, number, size, device=DEVICE).to(dtype)


def plain_attention(memory, queries=None, scale=1.0):
    *own, keys, values = memory.permute(2, 0, 3, 1, 4)
    asked = own[0] if queries is None else queries
    return F.scaled_dot_product_attention(asked, keys, values, scale=scale)


@pytest.mark.parametrize(
    ("queries", "keys", "size", "dtype"),
    [
        (10, 7, 22, FINEST),
        (64, 64, 32, FINEST),
        (70, 150, 24, FINEST),
        (130, 65, 25, FINEST),
        (70, 150, 24, HALF),
        (132, 260, 32, HALF),
        (1, 1, 16, FINEST),
    ],
)
@pytest.mark.parametrize("apart", [True, False])
def test_attention(queries, keys, size, dtype, apart):
    """Queries apart, or in one tensor with keys and values."""
    scale, bound = 22**-0.5, BOUND[dtype]
    inputs = [joint(2, keys, 2 if apart else 3, 3, size, dtype)]
    if apart:
        inputs.append(heads(2, queries, 3, size, dtype))
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    expected = plain_attention(*exact, scale=scale)
    upstream = heads(2, expected.shape[2], 3, size, dtype)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    mine = [tensor.detach().requires_grad_() for tensor in inputs]
    found = kernels.short_attention(mine[0], mine[1] if apart else None, scale)
    gradients = torch.autograd.grad(found, mine, upstream)
    assert relative(found.detach(), expected.detach()) < bound
    # One key takes all the weight: queries and keys have no gradient.
    chosen = slice(0 if keys > 1 else -1, None)
    assert relative(gradients[0][:, :, chosen], wanted[0][:, :, chosen]) < bound
    assert gradients[0].is_contiguous()
    if apart:
        assert keys == 1 or relative(gradients[1], wanted[1]) < bound
        assert gradients[1].transpose(1, 2).is_contiguous()
    assert found.transpose(1, 2).is_contiguous()


def test_attention_with_a_channel_of_ones():
    """It leaves as one and, whatever gradient it meets, moves nothing but itself."""
    memory, queries = joint(2, 70, 2, 3, 16, FINEST), heads(2, 40, 3, 16, FINEST)
    memory[:, :, 1, :, 13:] = 0
    upstream = heads(2, 40, 3, 16, FINEST)
    inputs = [tensor.requires_grad_() for tensor in (memory, queries)]
    found = kernels.short_attention(*inputs, 0.3, 13)
    plain = kernels.short_attention(*inputs, 0.3)
    assert torch.equal(found[..., 13], torch.ones_like(found[..., 13]))
    assert torch.equal(found[..., :13], plain[..., :13])
    assert not found[..., 14:].any()
    gradients = torch.autograd.grad(found, inputs, upstream)
    wanted = torch.autograd.grad(plain[..., :13], inputs, upstream[..., :13])
    last_bit = torch.finfo(FINEST).eps
    rtol, atol = (1e-5, 1e-6) if torch.float32 == FINEST else (last_bit, last_bit / 8)
    for gradient, reference in zip(gradients, wanted, strict=True):
        if reference is wanted[0]:  # of values, what lies behind the real channels may be anything
            gradient[:, :, 1, :, 13:] = reference[:, :, 1, :, 13:] = 0
        torch.testing.assert_close(gradient, reference, rtol=rtol, atol=atol)


def test_attention_at_large_logits():
    """No overflow where a logit is far beyond the range of exp."""
    memory = joint(1, 20, 3, 1, 16, FINEST)
    memory[:, :, :2] *= 300
    found = kernels.short_attention(memory, None, 1.0)
    assert relative(found, plain_attention(memory.double())) < max(1e-4, BOUND[FINEST])


def test_the_heads_that_the_kernel_for_hopper_takes():
    def taken(queries=72, keys=136, size=24, dtype=torch.bfloat16, of=heads):
        counts = (queries, queries, keys, keys)
        return attention._suits_hopper(*(of(2, count, 3, size, dtype) for count in counts))

    def dense(batch, count, number, size, dtype):
        return heads(batch, count, number, size, dtype).contiguous()

    def cut(batch, count, number, size, dtype):
        return heads(batch, count, number, size + 8, dtype)[..., :size]

    def shifted(batch, count, number, size, dtype):
        return heads(batch, count, number, size + 8, dtype)[..., 1 : size + 1]

    def odd(batch, count, number, size, dtype):
        return heads(batch, count, number, size + 4, dtype)[..., :size]

    def repeated(batch, count, number, size, dtype):
        return heads(1, count, number, size, dtype).expand(batch, -1, -1, -1)

    def scattered_numbers(batch, count, number, size, dtype):
        return heads(batch, count, number, 2 * size, dtype)[..., ::2]

    assert taken()
    assert taken(size=32, dtype=torch.float16)
    assert taken(of=dense)
    assert taken(of=cut)
    assert taken(queries=1024)
    assert not taken(dtype=torch.float32)
    assert not taken(size=16)
    assert not taken(queries=1028)  # more than shared memory holds
    assert not taken(queries=74)
    assert not taken(queries=64)
    assert not taken(keys=128)
    for of in (shifted, odd, repeated, scattered_numbers):
        assert not taken(of=of)


def broken(*given):
    raise RuntimeError("cannot be launched")


@pytest.mark.parametrize(
    ("module", "reason"),
    [(None, "ModuleNotFoundError"), (SimpleNamespace(backward=broken), "cannot be launched")],
)
def test_without_the_attention_kernel_for_hopper_others_run(module, reason, monkeypatch):
    """The same gradients, a warning, and no second attempt."""
    inputs = joint(1, 136, 2, 2, 24, HALF), heads(1, 72, 2, 24, HALF)
    for tensor in inputs:
        tensor.requires_grad_()

    def gradients():
        return torch.autograd.grad(kernels.short_attention(*inputs, 0.2).square().sum(), inputs)

    monkeypatch.setattr(hopper, "_given_up", {"attention"})
    monkeypatch.setattr(hopper, "_on_hopper", lambda _: True)
    monkeypatch.setitem(sys.modules, "fst.kernels.attention_hopper", module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = gradients()
    monkeypatch.setattr(hopper, "_given_up", set())
    with pytest.warns(UserWarning, match=f"attention kernels for Hopper do not work.*{reason}"):
        first = gradients()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = gradients()
    for found in (first, second):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_the_attention_kernel_for_hopper_runs_alone(monkeypatch):
    """Where it takes the heads, no other kernel writes the gradients."""

    def fill(*given):
        for number, tensor in enumerate(given[-3:]):
            tensor.fill_(number)

    monkeypatch.setattr(hopper, "_given_up", set())
    monkeypatch.setattr(hopper, "_on_hopper", lambda _: True)
    module = SimpleNamespace(backward=fill)
    monkeypatch.setitem(sys.modules, "fst.kernels.attention_hopper", module)
    queries, lines = heads(1, 72, 2, 24, HALF), torch.zeros(1, 2, 72, device=DEVICE)
    memory = joint(1, 136, 2, 2, 24, HALF)
    found = attention.attention_backward(queries, memory, queries, lines, lines, 0.2)
    assert torch.equal(found[0][:, :, 0], torch.full_like(memory[:, :, 0], 1))
    assert torch.equal(found[0][:, :, 1], torch.full_like(memory[:, :, 1], 2))
    assert torch.equal(found[1], torch.full_like(queries, 0))
    memory = joint(1, 136, 3, 2, 24, HALF)
    grad, lines = heads(1, 136, 2, 24, HALF), torch.zeros(1, 2, 136, device=DEVICE)
    (found,) = attention.attention_backward(grad, memory, None, lines, lines, 0.2)
    for number in range(3):
        assert torch.equal(found[:, :, number], torch.full_like(memory[:, :, number], number))


def test_the_reference_can_be_asked_for():
    features = torch.zeros(1, 4, 8, device=DEVICE)
    anchors = torch.zeros(1, 4, 2, device=DEVICE)
    assert kernels.usable(anchors, features.shape[2]) == torch.cuda.is_available()
    with kernels.reference():
        assert not kernels.usable(anchors, features.shape[2])
    assert kernels.usable(anchors, features.shape[2]) == torch.cuda.is_available()
