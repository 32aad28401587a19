"""The blend at the anchors: stored weights, and one kernel for the gradients of all steps."""

import pytest
import torch

from fst.rbf import rbf_weights
from kernel_examples import DEVICE, HALF, relative

anchor_blend = pytest.importorskip("fst.kernels.anchor_blend")
by_axis, EXP2_SCALE = anchor_blend.by_axis, anchor_blend.EXP2_SCALE

ROUNDING = 8e-3 if DEVICE == "cuda" else 1e-3
NAMES = ("positions", "length scales", "features")
# On a GPU the kernels are given half precision alone.
DTYPES = [HALF] if DEVICE == "cuda" else [HALF, torch.float32]


def problem(batch, count, channels, axes, scale):
    """Positions, length scales and features that half precision holds."""
    positions = torch.rand(batch, count, axes, device=DEVICE)
    positions[:, count // 2] = positions[:, 0]  # coincident
    scales = scale * (0.8 + 0.4 * torch.rand(batch, count, axes, device=DEVICE))
    return positions, scales, torch.randn(batch, count, channels, device=DEVICE).to(HALF)


def plain(positions, scales, dtype):
    """The same as autograd has it."""
    stored = rbf_weights(positions, positions, scales).to(dtype)
    return lambda features: stored @ features.to(dtype)


def exact(positions, scales, dtype):
    return lambda features: rbf_weights(positions, positions, scales) @ features


def chain(make, given, steps, used=None, dtype=HALF):
    """A loss of a few steps, of which only some may be used, and what is learned."""
    positions, scales, features = given
    at_anchors = make(positions, scales, dtype)
    total = 0.0
    for step in range(steps):
        blended = at_anchors(features)
        size = (1, *blended.shape[1:])
        upstream = torch.linspace(-1, 1 + step, blended[0].numel(), device=DEVICE).view(size)
        if used is None or step in used:
            total = total + (blended * upstream.to(blended.dtype)).double().sum()
            features = (features + torch.tanh(2 * blended)).to(features.dtype)
    return total


def gradients(make, given, steps, used=None, dtype=HALF, learned=(True, True, True)):
    wide = dtype == torch.float64
    mine = [tensor.double() if wide else tensor.clone() for tensor in given]
    mine = [tensor.requires_grad_(is_learned) for tensor, is_learned in zip(mine, learned)]
    return torch.autograd.grad(
        chain(make, mine, steps, used, dtype), [x for x in mine if x.requires_grad]
    )


@pytest.mark.parametrize(
    ("count", "axes", "scale"),
    [(1, 2, 0.1), (33, 3, 0.015), (130, 1, 0.3), (64, 2, 0.015), (200, 2, 0.05)],
)
def test_anchor_weights(count, axes, scale):
    positions, scales, _ = problem(2, count, 1, axes, scale)
    expected = rbf_weights(positions.double(), positions.double(), scales.double())
    given = by_axis(positions), by_axis(EXP2_SCALE / scales)
    found, _ = anchor_blend.weights_forward(*given, torch.float32)
    assert relative(found, expected) < 1e-6
    half, _ = anchor_blend.weights_forward(*given, HALF)
    torch.testing.assert_close(half, found.to(HALF), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("count", "channels", "axes", "scale", "steps"),
    [(1, 8, 2, 0.1, 2), (33, 10, 3, 0.2, 1), (130, 24, 1, 0.3, 3), (128, 72, 2, 0.015, 4)],
)
def test_all_steps_at_once(count, channels, axes, scale, steps):
    """The kernels themselves, where no rounding hides a fault.

    On a GPU they are given half precision alone. Products of such numbers are exact, and their sums
    are in float32, which tensor cores cut off instead of rounding.
    """
    dtype, bound = (HALF, 1e-4) if DEVICE == "cuda" else (torch.float32, 2e-5)
    positions, scales, _ = problem(2, count, 1, axes, scale)
    anchors, inverse = by_axis(positions), by_axis(EXP2_SCALE / scales)
    stored, reciprocals = anchor_blend.weights_forward(anchors, inverse, torch.float32)
    shape = (2, count, channels)
    features, grads = (
        [torch.randn(shape, device=DEVICE).to(dtype) for _ in range(steps)] for _ in range(2)
    )
    blends = [stored @ each.float() for each in features]
    rows, columns, scaled = anchor_blend.blend_backward(
        anchors, inverse, reciprocals, grads, features, blends
    )
    wide = [tensor.double().requires_grad_() for tensor in (positions, scales)]
    at_anchors = exact(*wide, None)
    total = sum((at_anchors(z.double()) * g.double()).sum() for z, g in zip(features, grads))
    wanted = torch.autograd.grad(total, wide)
    # The reciprocal length scales are EXP2_SCALE / ℓ.
    found = (
        (rows + columns).sum(dim=1).mT,
        -scaled.sum(dim=1).mT * inverse.mT / scales,
    )
    for mine, reference in zip(found, wanted):
        largest = reference.abs().max().clamp_min(1e-3)
        assert (mine - reference).abs().max() < bound * largest


@pytest.mark.parametrize(
    ("count", "channels", "axes", "scale", "steps"),
    [(70, 24, 2, 0.1, 4), (64, 40, 2, 0.05, 1), (40, 16, 3, 0.2, 6)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_as_exact_as_those_of_autograd(dtype, count, channels, axes, scale, steps):
    positions, scales, features = problem(2, count, channels, axes, scale)
    given = positions, scales, features.to(dtype)
    wanted = gradients(exact, given, steps, dtype=torch.float64)
    found = gradients(anchor_blend.AnchorBlend, given, steps, dtype=dtype)
    others = gradients(plain, given, steps, dtype=dtype)
    for name, mine, other, reference in zip(NAMES, found, others, wanted):
        assert relative(mine, reference) < 1.2 * relative(other, reference) + 1e-6, name


def test_steps_that_are_not_used_add_nothing():
    given = problem(2, 20, 8, 2, 0.1)
    for used in ({1, 2}, {5}):
        wanted = gradients(exact, given, 6, used, torch.float64)
        found = gradients(anchor_blend.AnchorBlend, given, 6, used)
        for name, mine, reference in zip(NAMES, found, wanted):
            assert relative(mine, reference) < ROUNDING, name


@pytest.mark.parametrize(
    "learned", [(True, False, False), (False, True, True), (False, False, True)]
)
def test_only_some_are_learned(learned):
    given = problem(1, 20, 8, 2, 0.1)
    every = gradients(anchor_blend.AnchorBlend, given, 2)
    found = gradients(anchor_blend.AnchorBlend, given, 2, learned=learned)
    for mine, reference in zip(found, (x for x, one in zip(every, learned) if one)):
        torch.testing.assert_close(mine, reference)


def test_blends_are_the_same_without_gradients():
    given = problem(1, 20, 8, 2, 0.1)
    positions, scales, features = (tensor.requires_grad_() for tensor in given)
    at_anchors = anchor_blend.AnchorBlend(positions, scales, HALF)
    with torch.no_grad():
        without = at_anchors(features)
    assert not without.requires_grad
    torch.testing.assert_close(at_anchors(features), without, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("backend", "learned"),
    [
        ("aot_eager", (True, True, True)),
        ("aot_eager", (False, False, True)),
        ("inductor", (True, True, True)),
    ],
)
def test_compiled(backend, learned):
    given = [x.requires_grad_(one) for x, one in zip(problem(2, 20, 8, 2, 0.1), learned)]
    torch._dynamo.reset()
    step = torch.compile(chain, backend=backend, fullgraph=True)
    wanted = [x for x in given if x.requires_grad]
    found = torch.autograd.grad(step(anchor_blend.AnchorBlend, given, 4), wanted)
    eager = torch.autograd.grad(chain(anchor_blend.AnchorBlend, given, 4), wanted)
    for mine, reference in zip(found, eager):
        assert relative(mine, reference.double()) < ROUNDING
