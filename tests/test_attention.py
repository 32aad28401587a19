"""What a GPU does with widened heads and padded products is what a CPU does without."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from fst.attention import Attention, Memory, OutputWeights, joined
from fst.nn import ALIGNMENT, aligned


@pytest.mark.parametrize("size", [6, 8, 22])
def test_widened_heads_change_nothing(size):
    attention = Attention(2 * size, 2).double()
    tokens = torch.randn(3, 5, 2 * size, dtype=torch.float64, requires_grad=True)
    projections = (attention.query, attention.key, attention.value)
    plain, _ = attention._project(tokens, None, None, *projections)
    wide, joint = attention._project_together(tokens, None, None, *projections)
    for narrow, widened in zip(plain, wide, strict=True):
        assert widened.shape[-1] % ALIGNMENT == 0
        torch.testing.assert_close(widened[..., :size], narrow, rtol=0, atol=1e-14)
        assert not widened[..., size:].any()
    expected = attention.attend_to_self(tokens)
    found = attention._attend(wide[0], Memory(*wide[1:], joint=joint), None)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    learned = [tokens, *attention.parameters()]
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, learned, upstream)
    for gradient, reference in zip(torch.autograd.grad(found, learned, upstream), wanted):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-12)


def test_attending_to_oneself_is_attending_to_what_is_remembered():
    attention = Attention(12, 3).double()
    tokens = torch.randn(2, 7, 12, dtype=torch.float64)
    torch.testing.assert_close(
        attention.attend_to_self(tokens), attention(tokens, attention.remember(tokens))
    )


@pytest.mark.parametrize("size", [1, 8, 131])
def test_aligned_products_are_the_products(size):
    inputs, weight = torch.randn(2, 5, size).double(), torch.randn(3, size).double()
    filled, widened = aligned(inputs, weight)
    assert filled.shape[-1] == widened.shape[-1]
    assert 0 <= filled.shape[-1] - size < ALIGNMENT
    assert filled.shape[-1] % ALIGNMENT == 0
    found, expected = F.linear(filled, widened), F.linear(inputs, weight)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("size", [6, 8])
def test_a_channel_of_ones_carries_the_bias(size):
    """Residual, product and bias in one: the same numbers and gradients as one after the other."""
    attention = Attention(2 * size, 2).double()
    padding = -size % ALIGNMENT
    mixture = torch.randn(3, 2, 5, size, dtype=torch.float64, requires_grad=True)
    residual = torch.randn(3, 5, 2 * size, dtype=torch.float64, requires_grad=True)
    output = attention.output
    expected = residual + output(mixture.transpose(1, 2).flatten(-2))
    ones = torch.ones(3, 2, 5, min(padding, 1), dtype=torch.float64)
    mixed = F.pad(torch.cat((mixture, ones), dim=-1), (0, padding - ones.shape[-1]))
    weights = OutputWeights.of(output, 2, size + padding)
    learned = [mixture, residual, output.weight, output.bias]
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, learned, upstream)
    for one in {False, padding > 0}:
        found = joined(mixed, one, weights, output.bias, residual)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
        gradients = torch.autograd.grad(found, learned, upstream)
        for gradient, reference in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-12)
    alone = joined(mixed, padding > 0, weights, output.bias, None)
    torch.testing.assert_close(alone, expected - residual, rtol=0, atol=1e-13)


def test_a_residual_is_added():
    attention = Attention(12, 3).double()
    tokens, residual = torch.randn(2, 2, 7, 12, dtype=torch.float64)
    memory = attention.remember(tokens)
    for attended in (attention.attend_to_self, lambda *x, **y: attention(x[0], memory, **y)):
        found = attended(tokens, residual=residual)
        torch.testing.assert_close(found, residual + attended(tokens))
