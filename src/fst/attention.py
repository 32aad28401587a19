"""Attention: several heads, with what comes before and behind in as few products as possible."""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (the name PyTorch users know)
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fst import kernels
from fst.nn import ALIGNMENT
from fst.prepared import Prepared


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
        if not isinstance(norm, nn.LayerNorm) or norm.bias is None or tokens.element_size() != 2:
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
        if padding == 0 or output.bias is None:
            weight = F.pad(weight, (0, padding)).flatten(1)
            return cls(weight, weight)
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
            (norm, *projections), lambda: self._join(tokens, norm, *projections)
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
