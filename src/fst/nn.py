"""Building blocks that know nothing of anchors: embedding, MLPs, attention.

Every module keeps batch, points, features as its shape, and every projection has a bias.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (the name PyTorch users know)
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fst import kernels
from fst.prepared import Prepared
from fst.types import product_dtype

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
    tokens: Float[Tensor, "b p d"],
    norm: nn.LayerNorm,
    feed: MLP,
    prepared: Prepared | None = None,
) -> Float[Tensor, "b p d"]:
    """x + FFN(LN(x)), in one kernel where there is one for it."""
    mlp, parameters = kernels.mlp, fusible(tokens, norm, feed)
    if mlp is None or parameters is None:
        return tokens + feed(norm(tokens))
    layers = (prepared or Prepared()).once(
        (norm, feed), lambda: mlp.normed_layers(*parameters, tokens)
    )
    return mlp.feed_forward(tokens, layers, norm.eps)


class ResidualFeedForward(nn.Module):
    """x + FFN(LN(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width)

    def forward(
        self, tokens: Float[Tensor, "b p d"], prepared: Prepared | None = None
    ) -> Float[Tensor, "b p d"]:
        return residual_feed(tokens, self.norm, self.feed_forward, prepared)


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
        self,
        fourier: FourierFeatures,
        positions: Float[Tensor, "#b p s"],
        condition: Float[Tensor, "b c"] | None,
        prepared: Prepared | None = None,
    ) -> Float[Tensor, "#b p k"]:
        """The share of the first layer that depends on where, not on what is stored there."""
        _, weight, given = self.first.weight.split(self.sizes, dim=1)
        share = None if condition is None else F.linear(condition, given)
        kernel = kernels.place
        if kernel is None or not kernels.takes_positions(positions, fourier.bands, len(weight)):
            hidden = linear(fourier(positions), weight, self.first.bias)
            return hidden if share is None else hidden + share.unsqueeze(1)

        def layer() -> Any:
            frequencies, dtype = fourier.frequencies(positions), product_dtype(positions)
            return kernel.place_layer(weight, self.first.bias, frequencies, dtype)

        ready = (prepared or Prepared()).once((self, fourier), layer)
        return kernel.place(positions, ready, share)

    def forward(
        self,
        blend: Float[Tensor, "b p d"],
        place: Float[Tensor, "#b p k"],
        prepared: Prepared | None = None,
    ) -> Float[Tensor, "b p d"]:
        mlp, second = kernels.mlp, self.second
        weight = self.first.weight[:, : self.sizes[0]]
        if mlp is None or not kernels.takes_tokens(blend, second.in_features):
            return second(F.gelu(F.linear(blend, weight) + place))
        parameters = weight, second.weight, second.bias
        layers = (prepared or Prepared()).once(
            (self,), lambda: mlp.point_layers(*parameters, blend)
        )
        return mlp.point_mlp(blend, place, layers)


class Projection(NamedTuple):
    """W LN(x) + b, or W x + b without a norm; `fused` is what a kernel makes of the parameters."""

    norm: nn.LayerNorm | None
    weight: Float[Tensor, "n d"]
    bias: Float[Tensor, " n"]
    fused: tuple[Tensor, Tensor] | None

    @classmethod
    def of(
        cls,
        tokens: Float[Tensor, "b p d"],
        norm: nn.LayerNorm | None,
        weight: Float[Tensor, "n d"],
        bias: Float[Tensor, " n"],
    ) -> "Projection":
        """For tokens like these."""
        if norm is None or norm.bias is None or tokens.element_size() != 2:
            return cls(norm, weight, bias, None)
        if kernels.projection is None or not kernels.takes_tokens(tokens, len(weight)):
            return cls(norm, weight, bias, None)
        parameters = norm.weight, norm.bias, weight, bias
        return cls(norm, weight, bias, kernels.projection.normed_layer(*parameters, tokens.dtype))

    def __call__(self, tokens: Float[Tensor, "b p d"]) -> Float[Tensor, "b p n"]:
        if self.norm is None:
            return F.linear(tokens, self.weight, self.bias)
        if self.fused is None or kernels.projection is None:
            return F.linear(self.norm(tokens), self.weight, self.bias)
        return kernels.projection.normed_linear(tokens, *self.fused, self.norm.eps)


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
    queries: Float[Tensor, "b h p k"], memory: Memory, scale: float, real: int
) -> tuple[Float[Tensor, "b h p k"], bool]:
    """Softmax attention, by the fastest exact way there is here.

    Values have `real` channels, and zeros behind them. The second result says whether the first of
    these has become one, so that it can carry a bias.
    """
    ours = kernels.short_attention
    if ours is not None and memory.mask is None and kernels.takes_heads(queries):
        mixed = ours(queries, memory.keys, memory.values, scale, real)
        return mixed, real < queries.shape[-1]
    with sdpa_kernel(PREFERRED, set_priority=True):
        mixed = F.scaled_dot_product_attention(
            queries, memory.keys, memory.values, attn_mask=memory.mask, scale=scale
        )
    return mixed, False


class OutputWeights(NamedTuple):
    """Of the projection behind attention, for heads with channels behind the real ones."""

    weight: Float[Tensor, "d hk"]
    with_bias: Float[Tensor, "d hk"]
    """The same, with the bias where the first head has its first channel behind the real ones."""

    @classmethod
    def of(cls, output: nn.Linear, heads: int, size: int) -> "OutputWeights":
        """For heads of this size."""
        weight = output.weight.unflatten(1, (heads, -1))  # d h k
        padding = size - weight.shape[-1]
        if padding == 0:
            return cls(output.weight, output.weight)
        bias = F.pad(output.bias[:, None, None], (0, padding - 1, 0, heads - 1))
        padded = F.pad(weight, (0, padding))
        return cls(padded.flatten(1), torch.cat((weight, bias), dim=-1).flatten(1))


def joined(
    mixed: Float[Tensor, "b h p k"],
    one: bool,
    weights: OutputWeights,
    bias: Float[Tensor, " d"],
    residual: Float[Tensor, "b p d"] | None,
) -> Float[Tensor, "b p d"]:
    """W mixed + bias, and the residual: all in one product where a channel holds ones."""
    tokens = mixed.transpose(1, 2).flatten(-2)  # b p hk
    if residual is None:
        return F.linear(tokens, weights.weight, bias)
    if not one or residual.dtype != tokens.dtype:
        return residual + F.linear(tokens, weights.weight, bias)
    product = torch.addmm(residual.flatten(0, 1), tokens.flatten(0, 1), weights.with_bias.t())
    return product.view(residual.shape)


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
        self,
        tokens: Float[Tensor, "b n d"],
        norm: nn.LayerNorm | None,
        prepared: Prepared | None,
        *projections: nn.Linear,
    ) -> tuple[Float[Tensor, "b h n k"], ...]:
        """Tokens, normalised, through several projections, split into heads."""
        if tokens.is_cuda:
            return self._project_together(tokens, norm, prepared, *projections)
        # On a CPU, joining the weights costs more than it saves.
        tokens = tokens if norm is None else norm(tokens)
        return tuple(self._split(project(tokens)) for project in projections)

    def _project_together(
        self,
        tokens: Float[Tensor, "b n d"],
        norm: nn.LayerNorm | None,
        prepared: Prepared | None,
        *projections: nn.Linear,
    ) -> tuple[Float[Tensor, "b h n w"], ...]:
        """The same in one product, with widened heads."""
        joint = (prepared or Prepared()).once(
            projections, lambda: self._join(tokens, norm, *projections)
        )
        split = joint(tokens).unflatten(-1, (len(projections), self.heads, -1))
        return split.permute(2, 0, 3, 1, 4).unbind(0)

    def _join(
        self, tokens: Float[Tensor, "b n d"], norm: nn.LayerNorm | None, *projections: nn.Linear
    ) -> Projection:
        """Several projections as one, with widened heads."""
        padding, size = -self.head_size % ALIGNMENT, self.head_size
        weight = torch.stack([project.weight for project in projections])  # t d d
        weight = F.pad(weight.unflatten(1, (-1, size)), (0, 0, 0, padding))
        bias = torch.stack([project.bias for project in projections])  # t d
        bias = F.pad(bias.unflatten(1, (-1, size)), (0, padding))
        return Projection.of(tokens, norm, weight.flatten(0, -2), bias.flatten())

    def _split(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b h n k"]:
        return tokens.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def remember(
        self,
        tokens: Float[Tensor, "b n d"],
        mask: Bool[Tensor, "b n"] | None = None,
        norm: nn.LayerNorm | None = None,
        prepared: Prepared | None = None,
    ) -> Memory:
        """Keys and values of tokens, to be attended to any number of times."""
        keys, values = self._project(tokens, norm, prepared, self.key, self.value)
        return Memory(keys, values, None if mask is None else mask[:, None, None, :])

    def forward(
        self,
        tokens: Float[Tensor, "b p d"],
        memory: Memory,
        norm: nn.LayerNorm | None = None,
        prepared: Prepared | None = None,
        residual: Float[Tensor, "b p d"] | None = None,
    ) -> Float[Tensor, "b p d"]:
        """With a residual, that is added."""
        (queries,) = self._project(tokens, norm, prepared, self.query)
        return self._attend(queries, memory, prepared, residual)

    def attend_to_self(
        self,
        tokens: Float[Tensor, "b p d"],
        norm: nn.LayerNorm | None = None,
        prepared: Prepared | None = None,
        residual: Float[Tensor, "b p d"] | None = None,
    ) -> Float[Tensor, "b p d"]:
        """The same as `forward(tokens, remember(tokens))`; on a GPU in fewer products."""
        all_three = self.query, self.key, self.value
        queries, keys, values = self._project(tokens, norm, prepared, *all_three)
        return self._attend(queries, Memory(keys, values), prepared, residual)

    def _attend(
        self,
        queries: Float[Tensor, "b h p k"],
        memory: Memory,
        prepared: Prepared | None,
        residual: Float[Tensor, "b p d"] | None = None,
    ) -> Float[Tensor, "b p d"]:
        mixed, one = attend(queries, memory, self.head_size**-0.5, self.head_size)
        size, output = mixed.shape[-1], self.output
        weights = (prepared or Prepared()).once(
            (output,), lambda: OutputWeights.of(output, self.heads, size)
        )
        return joined(mixed, one, weights, output.bias, residual)
