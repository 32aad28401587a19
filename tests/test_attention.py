"""What a GPU does with widened heads and padded products is what a CPU does without."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from fst.nn import ALIGNMENT, Attention, Memory, aligned


@pytest.mark.parametrize("size", [6, 8, 22])
def test_widened_heads_change_nothing(size):
    attention = Attention(2 * size, 2).double()
    tokens = torch.randn(3, 5, 2 * size, dtype=torch.float64, requires_grad=True)
    projections = (attention.query, attention.key, attention.value)
    plain = attention._project(tokens, None, *projections)
    wide = attention._project_together(tokens, None, *projections)
    for narrow, widened in zip(plain, wide, strict=True):
        assert widened.shape[-1] % ALIGNMENT == 0
        torch.testing.assert_close(widened[..., :size], narrow, rtol=0, atol=1e-14)
        assert not widened[..., size:].any()
    expected = attention.attend_to_self(tokens)
    found = attention._attend(wide[0], Memory(*wide[1:]))
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
