"""Building blocks that know nothing of anchors: Fourier features, MLPs, attention.

Every module keeps batch, points, features as its shape, and every projection has a bias.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 (the name PyTorch users know)
from jaxtyping import Bool, Float
from torch import Tensor, nn

Spacing = Literal["linear", "geometric"]
KeysValues = tuple[Float[Tensor, "b h n k"], Float[Tensor, "b h n k"]]


class FourierFeatures(nn.Module):
    """γ(x): the raw coordinates with sine and cosine of `bands` frequencies per axis.

    Both spacings run from π to π·bands. Linear spacing makes a complete cosine basis of the unit
    interval up to that frequency; geometric spacing favours the low end.
    """

    def __init__(self, axes: int, bands: int, spacing: Spacing) -> None:
        super().__init__()
        self.size = axes * (1 + 2 * bands)
        self.bands, self.spacing = bands, spacing

    def frequencies(self, like: Tensor) -> Float[Tensor, " k"]:
        """Made anew in the dtype asked for: a stored copy would keep its first dtype's rounding."""
        order = torch.arange(self.bands, dtype=like.dtype, device=like.device)
        if self.spacing == "linear":
            return math.pi * (order + 1)
        return math.pi * torch.exp2(order * (math.log2(self.bands) / max(self.bands - 1, 1)))

    def forward(self, positions: Float[Tensor, "... p s"]) -> Float[Tensor, "... p g"]:
        phases = (positions.unsqueeze(-1) * self.frequencies(positions)).flatten(-2)
        return torch.cat((positions, phases.sin(), phases.cos()), dim=-1)


class MLP(nn.Sequential):
    """Linear, GELU, linear."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, outputs))


class FeedForward(MLP):
    """The transformer's d -> 4d -> d."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 4 * width, width)


class ResidualFeedForward(nn.Module):
    """x + FFN(LN(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width)

    def forward(self, tokens: Float[Tensor, "b p d"]) -> Float[Tensor, "b p d"]:
        tokens = tokens + self.feed_forward(self.norm(tokens))
        return tokens


def zero_linear(inputs: int, outputs: int) -> nn.Linear:
    """A zero-initialised head: what it adjusts starts at its base."""
    head = nn.Linear(inputs, outputs)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


class PointMLP(nn.Module):
    """F_θ: an MLP on [field value, γ(x), condition]."""

    def __init__(self, value: int, embedding: int, condition: int, hidden: int, out: int) -> None:
        super().__init__()
        self.sizes = (value, embedding, condition)
        self.first = nn.Linear(value + embedding + condition, hidden)
        self.second = nn.Linear(hidden, out)

    def forward(
        self,
        value: Float[Tensor, "b p d"],
        embedding: Float[Tensor, "#b p g"],
        condition: Float[Tensor, "b c"] | None,
    ) -> Float[Tensor, "b p o"]:
        batch, points = value.shape[:2]
        inputs = [value, embedding.expand(batch, -1, -1).to(value.dtype)]
        if condition is not None:
            inputs.append(condition.unsqueeze(1).expand(-1, points, -1).to(value.dtype))
        mapped: Tensor = self.second(F.gelu(self.first(torch.cat(inputs, dim=-1))))
        return mapped


class Attention(nn.Module):
    """Multi-head attention with separate query, key, value and output projections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, got {width} and {heads}")
        self.heads, self.head_size = heads, width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def split(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b h n k"]:
        per_head: Tensor = tokens.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return per_head

    def keys_values(self, context: Float[Tensor, "b n d"]) -> KeysValues:
        """Keys and values, which may serve any number of calls."""
        return self.split(self.key(context)), self.split(self.value(context))

    def forward(
        self,
        tokens: Float[Tensor, "b p d"],
        keys_values: KeysValues,
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b p d"]:
        """`mask` is True where a key is real."""
        keep = None if mask is None else mask[:, None, None, :]
        queries = self.split(self.query(tokens))
        mixed = F.scaled_dot_product_attention(queries, *keys_values, attn_mask=keep)
        attended: Tensor = self.output(mixed.transpose(1, 2).flatten(-2))
        return attended

    def attend_to_self(self, tokens: Float[Tensor, "b p d"]) -> Float[Tensor, "b p d"]:
        attended: Tensor = self(tokens, self.keys_values(tokens))
        return attended
