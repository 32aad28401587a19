"""The building blocks by themselves: against formulas, and what they promise."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from fst.nn import (
    MLP,
    Attention,
    FeedForward,
    FourierFeatures,
    PointMLP,
    ResidualFeedForward,
    zero_linear,
)
from small import stirred


@pytest.mark.parametrize("spacing", ["linear", "geometric"])
def test_fourier_features_are_coordinates_sines_and_cosines(spacing):
    fourier = FourierFeatures(2, 4, spacing)
    positions = torch.rand(3, 5, 2, dtype=torch.float64)
    found = fourier(positions)
    assert found.shape == (3, 5, fourier.size) == (3, 5, 18)
    steps = {"linear": [1, 2, 3, 4], "geometric": [4 ** (k / 3) for k in range(4)]}[spacing]
    for axis in range(2):
        x = positions[..., axis]
        torch.testing.assert_close(found[..., axis], x)
        for k, step in enumerate(steps):
            phase = math.pi * step * x
            torch.testing.assert_close(found[..., 2 + 4 * axis + k], phase.sin())
            torch.testing.assert_close(found[..., 10 + 4 * axis + k], phase.cos())


def test_frequencies_have_the_precision_that_is_asked_for():
    fourier = FourierFeatures(1, 32, "linear")
    double = fourier.frequencies(torch.empty(0, dtype=torch.float64))
    assert double[-1].item() == 32 * math.pi
    assert fourier.frequencies(torch.empty(0)).dtype == torch.float32


def test_one_band_has_the_lowest_frequency_in_both_spacings():
    for spacing in ("linear", "geometric"):
        frequencies = FourierFeatures(1, 1, spacing).frequencies(torch.empty(0))
        torch.testing.assert_close(frequencies, torch.tensor([math.pi]))


def test_mlps_are_linear_gelu_linear():
    tokens = torch.randn(2, 3, 6, dtype=torch.float64)
    for layers in (MLP(6, 9, 4).double(), FeedForward(6).double()):
        first, _, second = layers
        hidden = tokens @ first.weight.T + first.bias
        gelu = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
        torch.testing.assert_close(layers(tokens), gelu @ second.weight.T + second.bias)
    assert FeedForward(6)[0].out_features == 24


def test_a_residual_feed_forward_adds_to_its_input():
    block = stirred(ResidualFeedForward(6).double())
    tokens = torch.randn(2, 3, 6, dtype=torch.float64)
    normed = F.layer_norm(tokens, (6,), block.norm.weight, block.norm.bias)
    torch.testing.assert_close(block(tokens), tokens + block.feed_forward(normed))


def test_a_zero_head_says_zero():
    head = zero_linear(5, 3)
    assert not head(torch.randn(2, 5)).any()
    assert head.bias.requires_grad


@pytest.mark.parametrize("condition", [0, 2])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_pointwise_mlp_reads_value_embedding_and_condition(condition, batch):
    """An embedding may be shared by the batch; the condition is the same at every point."""
    layers = PointMLP(4, 5, condition, 7, 6).double()
    value = torch.randn(3, 8, 4, dtype=torch.float64)
    embedding = torch.randn(batch, 8, 5, dtype=torch.float64)
    given = torch.randn(3, condition, dtype=torch.float64) if condition else None
    found = layers(value, embedding, given)
    assert found.shape == (3, 8, 6)
    for b in range(3):
        for p in range(8):
            parts = [value[b, p], embedding[min(b, batch - 1), p]]
            row = torch.cat(parts + ([given[b]] if condition else []))
            hidden = F.gelu(layers.first.weight @ row + layers.first.bias)
            expected = layers.second.weight @ hidden + layers.second.bias
            torch.testing.assert_close(found[b, p], expected)


def attend_by_hand(attention, tokens, context, mask=None):
    size, outputs = attention.head_size, []
    q, k, v = attention.query(tokens), attention.key(context), attention.value(context)
    for head in range(attention.heads):
        part = slice(head * size, (head + 1) * size)
        logits = q[..., part] @ k[..., part].mT / math.sqrt(size)
        if mask is not None:
            logits = logits.masked_fill(~mask[:, None, :], -torch.inf)
        outputs.append(logits.softmax(dim=-1) @ v[..., part])
    return attention.output(torch.cat(outputs, dim=-1))


@pytest.mark.parametrize("masked", [False, True])
def test_attention_by_hand(masked):
    attention = Attention(12, 3).double()
    tokens, context = torch.randn(2, 5, 12).double(), torch.randn(2, 7, 12).double()
    mask = torch.arange(7) < torch.tensor([[7], [4]]) if masked else None
    found = attention(tokens, attention.keys_values(context), mask)
    expected = attend_by_hand(attention, tokens, context, mask)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_attending_to_oneself():
    attention = Attention(12, 3).double()
    tokens = torch.randn(2, 7, 12, dtype=torch.float64)
    expected = attend_by_hand(attention, tokens, tokens)
    torch.testing.assert_close(attention.attend_to_self(tokens), expected, rtol=0, atol=1e-13)


def test_what_is_masked_does_not_matter():
    attention = Attention(8, 2).double()
    tokens, context = torch.randn(1, 3, 8).double(), torch.randn(1, 4, 8).double()
    mask = torch.tensor([[True, True, True, False]])
    before = attention(tokens, attention.keys_values(context), mask)
    context[:, 3] += 100
    after = attention(tokens, attention.keys_values(context), mask)
    torch.testing.assert_close(after, before)


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="width must be a multiple of heads, got 10 and 4"):
        Attention(10, 4)
