"""LayerNorm fused with the projections behind it, against float64: output and every gradient."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from kernel_examples import (
    DEVICE,
    HALF,
    NORMED_SIZES,
    OnGPU,
    check_against_float64,
    joined_heads,
    normed_parameters,
    relative,
)

projection = pytest.importorskip("fst.kernels.projection")
launch = pytest.importorskip("fst.kernels.launch")
weights = pytest.importorskip("fst.kernels.weights")


def plain_linear(tokens, gamma, beta, weight, bias):
    return F.linear(F.layer_norm(tokens, tokens.shape[-1:], gamma, beta), weight, bias)


def normed_linear(tokens, *parameters_and_eps):
    gamma, beta, weight, bias, eps = parameters_and_eps
    layer = weights.pack_normed_layers(gamma, beta, [weight], [bias], tokens.dtype)
    return projection.normed_linear(tokens, *layer[:2], eps)


@NORMED_SIZES
def test_normed_linear(tokens, width, outputs, offset, dtype, bound):
    x = (torch.randn(2, tokens, width) + offset).to(dtype)
    upstream = torch.randn(2, tokens, outputs).to(dtype)
    check_against_float64(
        normed_linear, plain_linear, (x, *normed_parameters(width, outputs)), upstream, bound
    )


def test_what_the_kernels_for_hopper_take(monkeypatch):
    monkeypatch.setattr(launch, "_given_up", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    x = torch.zeros(4, 176, dtype=torch.bfloat16).as_subclass(OnGPU)
    took, ran = projection._hopper_took, []
    assert took(lambda: ran.append(1), x)
    assert not took(ran.clear, x, torch.zeros(4, 12, dtype=torch.bfloat16))  # rows of 24 bytes
    assert not took(ran.clear, x[:, :64])  # too narrow
    assert not took(ran.clear, x[:0])  # nothing there
    assert not took(ran.clear, x.half())
    shifted = torch.zeros(712, dtype=torch.bfloat16)[1:705].view(4, 176)
    assert not took(ran.clear, x, shifted)  # it begins at two bytes
    assert ran == [1]


def test_several_projections_as_one_with_widened_heads():
    gamma, beta, weight, bias = (tensor.to(DEVICE) for tensor in normed_parameters(16, 24))
    tokens = torch.randn(2, 5, 16, device=DEVICE).to(HALF)
    parts = weight.split(12), bias.split(12)
    layer = weights.pack_normed_layers(gamma, beta, *parts, HALF, heads=2, widened=8)
    found = projection.normed_linear(tokens, *layer[:2], 1e-5)
    assert found.shape == (2, 5, 32)
    widened = (joined_heads(each, 2, 8) for each in parts)
    exact = (tensor.double() for tensor in (tokens, gamma, beta, *widened))
    assert relative(found, plain_linear(*exact)) < 2.0**-7
    assert not found.unflatten(2, (2, 2, 8))[..., 6:].any()


def test_the_kernels_for_hopper_compile(compiled_for_hopper):
    assert len(compiled_for_hopper("projection")) == 4
