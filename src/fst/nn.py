"""Building blocks that know nothing of anchors: embedding, MLPs, attention.

Every module keeps batch, points, features as its shape, and every projection has a bias.
"""

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (the name PyTorch users know)
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fst import kernels

Spacing = Literal["linear", "geometric"]

# Products and fused attention on a GPU want inner sizes and heads of a multiple of this size.
ALIGNMENT = 8


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
        phases = positions.unsqueeze(-1) * self.frequencies(positions)  # ... p s k
        phases = phases.flatten(-2)
        return torch.cat((positions, phases.sin(), phases.cos()), dim=-1)


def aligned(
    inputs: Float[Tensor, "... i"], weight: Float[Tensor, "o i"]
) -> tuple[Float[Tensor, "... j"], Float[Tensor, "o j"]]:
    """Both with zeros up to a multiple of the alignment; they add nothing to a product."""
    padding = -inputs.shape[-1] % ALIGNMENT
    return F.pad(inputs, (0, padding)), F.pad(weight, (0, padding))


class Linear(nn.Linear):
    """For inputs of any size, such as an embedding of 131 numbers, which on a GPU would keep the
    product off the fast path."""

    def forward(self, inputs: Float[Tensor, "... i"]) -> Float[Tensor, "... o"]:
        return linear(inputs, self.weight, self.bias)


def linear(
    inputs: Float[Tensor, "... i"],
    weight: Float[Tensor, "o i"],
    bias: Float[Tensor, " o"] | None = None,
) -> Float[Tensor, "... o"]:
    """The product and the bias, aligned where it pays."""
    if inputs.is_cuda and inputs.shape[-1] % ALIGNMENT:
        inputs, weight = aligned(inputs, weight)
    return F.linear(inputs, weight, bias)


class MLP(nn.Sequential):
    """Linear, GELU, linear."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__(Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, outputs))


class FeedForward(MLP):
    """The transformer's d -> 4d -> d."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 4 * width, width)


def fusible(
    tokens: Float[Tensor, "b p d"], norm: nn.LayerNorm, feed: MLP
) -> tuple[Tensor, ...] | None:
    """The parameters of MLP(LN(x)) for a kernel, if tokens and layers are what kernels are for.

    Layers that somebody replaced go the plain way, and so do tokens in float32, even under
    autocast: a kernel would round their sum.
    """
    first, second = feed[0], feed[-1]
    if not isinstance(first, nn.Linear) or not isinstance(second, nn.Linear):
        return None
    if tokens.element_size() != 2 or not kernels.takes_tokens(tokens, first.out_features):
        return None
    parameters = norm.weight, norm.bias, first.weight, first.bias, second.weight, second.bias
    return None if any(each is None for each in parameters) else parameters


def residual_feed(
    tokens: Float[Tensor, "b p d"], norm: nn.LayerNorm, feed: MLP
) -> Float[Tensor, "b p d"]:
    """x + FFN(LN(x)), in one kernel where there is one for it."""
    fused, parameters = kernels.feed_forward, fusible(tokens, norm, feed)
    if fused is None or parameters is None:
        return tokens + feed(norm(tokens))
    return fused(tokens, *parameters, norm.eps)


class ResidualFeedForward(nn.Module):
    """x + FFN(LN(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width)

    def forward(self, tokens: Float[Tensor, "b p d"]) -> Float[Tensor, "b p d"]:
        return residual_feed(tokens, self.norm, self.feed_forward)


def zero_linear(inputs: int, outputs: int) -> nn.Linear:
    """A head that starts by saying nothing: what it adjusts starts at its base."""
    head = nn.Linear(inputs, outputs)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


class PointMLP(nn.Module):
    """MLP on [blend, γ(x), condition], split so that the part without the blend is done once.

    The first layer is linear, so W[blend, γ, c] = W_blend blend + (W_γ γ + W_c c + bias), and the
    bracket is the same in every refinement step.
    """

    def __init__(self, blend: int, embedding: int, condition: int, hidden: int, out: int) -> None:
        super().__init__()
        self.sizes = (blend, embedding, condition)
        self.first = nn.Linear(blend + embedding + condition, hidden)
        self.second = nn.Linear(hidden, out)

    def place(
        self, embedding: Float[Tensor, "#b p g"], condition: Float[Tensor, "b c"] | None
    ) -> Float[Tensor, "#b p k"]:
        """The share of the first layer that depends on where, not on what is stored there."""
        _, place, given = self.first.weight.split(self.sizes, dim=1)
        hidden = linear(embedding, place, self.first.bias)
        if condition is not None:
            hidden = hidden + F.linear(condition, given).unsqueeze(1)
        return hidden

    def forward(
        self, blend: Float[Tensor, "b p d"], place: Float[Tensor, "#b p k"]
    ) -> Float[Tensor, "b p d"]:
        weight, second = self.first.weight[:, : self.sizes[0]], self.second
        fused = kernels.point_mlp
        if fused is not None and kernels.takes_tokens(blend, second.in_features):
            return fused(blend, place, weight, second.weight, second.bias)
        return second(F.gelu(F.linear(blend, weight) + place))


def normed_linear(
    tokens: Float[Tensor, "b p d"],
    norm: nn.LayerNorm | None,
    weight: Float[Tensor, "n d"],
    bias: Float[Tensor, " n"],
) -> Float[Tensor, "b p n"]:
    """W LN(x) + b, in one kernel where there is one for it; without a norm W x + b."""
    if norm is None:
        return F.linear(tokens, weight, bias)
    fused, half = kernels.normed_linear, tokens.element_size() == 2 and norm.bias is not None
    if fused is None or not half or not kernels.takes_tokens(tokens, len(weight)):
        return F.linear(norm(tokens), weight, bias)
    return fused(tokens, norm.weight, norm.bias, weight, bias, norm.eps)


class Memory(NamedTuple):
    """Keys and values that queries attend to; `mask` is True where a key is real."""

    keys: Float[Tensor, "b h n k"]
    values: Float[Tensor, "b h n k"]
    mask: Bool[Tensor, "b 1 1 n"] | None = None


# Of PyTorch's own on an H200, cuDNN's attention is the fastest for short heads.
PREFERRED = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def attend(
    queries: Float[Tensor, "b h p k"], memory: Memory, scale: float
) -> Float[Tensor, "b h p k"]:
    """Softmax attention, by the fastest exact way there is here."""
    ours = kernels.short_attention
    if ours is not None and memory.mask is None and kernels.takes_heads(queries):
        return ours(queries, memory.keys, memory.values, scale)
    with sdpa_kernel(PREFERRED, set_priority=True):
        return F.scaled_dot_product_attention(
            queries, memory.keys, memory.values, attn_mask=memory.mask, scale=scale
        )


class Attention(nn.Module):
    """Multi-head attention with separate query, key, value and output projections.

    A `norm` is applied to the tokens first: on a GPU in the same kernel as the projections.
    On a GPU the heads are widened with zeros to a size that fused attention takes as it is. The
    zeros are put into the projections' weights, so the activations come out widened without a
    copy; they add nothing to a product.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, got {width} and {heads}")
        self.heads = heads
        self.head_size = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def _project(
        self, tokens: Float[Tensor, "b n d"], norm: nn.LayerNorm | None, *projections: nn.Linear
    ) -> tuple[Float[Tensor, "b h n k"], ...]:
        """Tokens, normalised, through several projections, split into heads."""
        if tokens.is_cuda:
            return self._project_together(tokens, norm, *projections)
        # On a CPU, joining the weights costs more than it saves.
        tokens = tokens if norm is None else norm(tokens)
        return tuple(self._split(project(tokens)) for project in projections)

    def _project_together(
        self, tokens: Float[Tensor, "b n d"], norm: nn.LayerNorm | None, *projections: nn.Linear
    ) -> tuple[Float[Tensor, "b h n w"], ...]:
        """The same in one product, with widened heads."""
        padding, size = -self.head_size % ALIGNMENT, self.head_size
        weight = torch.stack([project.weight for project in projections])  # t d d
        weight = F.pad(weight.unflatten(1, (-1, size)), (0, 0, 0, padding))
        bias = torch.stack([project.bias for project in projections])  # t d
        bias = F.pad(bias.unflatten(1, (-1, size)), (0, padding))
        projected = normed_linear(tokens, norm, weight.flatten(0, -2), bias.flatten())
        split = projected.unflatten(-1, (len(projections), self.heads, size + padding))
        return split.permute(2, 0, 3, 1, 4).unbind(0)

    def _split(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b h n k"]:
        return tokens.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def remember(
        self,
        tokens: Float[Tensor, "b n d"],
        mask: Bool[Tensor, "b n"] | None = None,
        norm: nn.LayerNorm | None = None,
    ) -> Memory:
        """Keys and values of tokens, to be attended to any number of times."""
        keys, values = self._project(tokens, norm, self.key, self.value)
        return Memory(keys, values, None if mask is None else mask[:, None, None, :])

    def forward(
        self, tokens: Float[Tensor, "b p d"], memory: Memory, norm: nn.LayerNorm | None = None
    ) -> Float[Tensor, "b p d"]:
        (queries,) = self._project(tokens, norm, self.query)
        return self._attend(queries, memory)

    def attend_to_self(
        self, tokens: Float[Tensor, "b p d"], norm: nn.LayerNorm | None = None
    ) -> Float[Tensor, "b p d"]:
        """The same as `forward(tokens, remember(tokens))`; on a GPU in fewer products."""
        queries, keys, values = self._project(tokens, norm, self.query, self.key, self.value)
        return self._attend(queries, Memory(keys, values))

    def _attend(self, queries: Float[Tensor, "b h p k"], memory: Memory) -> Float[Tensor, "b p d"]:
        mixed = attend(queries, memory, self.head_size**-0.5)
        weight = self.output.weight
        if padding := mixed.shape[-1] - self.head_size:
            weight = F.pad(weight.unflatten(1, (self.heads, -1)), (0, padding)).flatten(1)
        return F.linear(mixed.transpose(1, 2).flatten(-2), weight, self.output.bias)  # b p d
