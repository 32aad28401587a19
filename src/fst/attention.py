"""Attention: several heads, with what comes before and behind in as few products as possible."""

from collections.abc import Sequence
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
    """W LN(x) + b, or W x + b without a norm: a product, whose weight and bias these are."""

    norm: nn.Module | None
    weight: Float[Tensor, "n d"]
    bias: Float[Tensor, " n"]

    @classmethod
    def of(
        cls, norm: nn.Module | None, projections: Sequence[nn.Linear], heads: int, size: int
    ) -> "Projection":
        """Several projections as one, with heads of this size."""
        weight = torch.stack([project.weight for project in projections])  # t d d
        bias = torch.stack([project.bias for project in projections])  # t d
        weight, bias = weight.unflatten(1, (heads, -1)), bias.unflatten(1, (heads, -1))
        padding = size - bias.shape[-1]
        weight, bias = F.pad(weight, (0, 0, 0, padding)), F.pad(bias, (0, padding))
        return cls(norm, weight.flatten(0, -2), bias.flatten())

    def __call__(self, tokens: Float[Tensor, "b p d"]) -> Float[Tensor, "b p n"]:
        tokens = tokens if self.norm is None else self.norm(tokens)
        return F.linear(tokens, self.weight, self.bias)


class FusedProjection(NamedTuple):
    """W LN(x) + b in one kernel, which has made this of the parameters."""

    layer: Float[Tensor, "n e"]
    packed: Float[Tensor, "N W"]
    eps: float

    def __call__(self, tokens: Float[Tensor, "b p d"]) -> Float[Tensor, "b p n"]:
        assert kernels.projection is not None
        return kernels.projection.normed_linear(tokens, *self)


def joint_projection(
    tokens: Float[Tensor, "b p d"],
    norm: nn.Module | None,
    projections: Sequence[nn.Linear],
    heads: int,
    size: int,
) -> Projection | FusedProjection:
    """Several projections of tokens like these as one, their heads widened to this size."""
    if not isinstance(norm, nn.LayerNorm) or norm.bias is None or tokens.element_size() != 2:
        return Projection.of(norm, projections, heads, size)
    rows = len(projections) * heads * size
    if kernels.projection is None or not kernels.takes_tokens(tokens, rows):
        return Projection.of(norm, projections, heads, size)
    weights, biases = zip(*((each.weight, each.bias) for each in projections), strict=True)
    layers = norm.weight, norm.bias, weights, biases
    layer, packed = kernels.projection.normed_layer(*layers, tokens.dtype, heads, size)
    return FusedProjection(layer, packed, norm.eps)


class Heads(NamedTuple):
    """What projections make of the same tokens."""

    parts: tuple[Float[Tensor, "b h n k"], ...]
    joint: Float[Tensor, "b n t h k"] | None = None
    """The tensor that all parts lie in, if there is one."""


def parts_of(joint: Float[Tensor, "b n t h k"]) -> tuple[Float[Tensor, "b h n k"], ...]:
    return joint.permute(2, 0, 3, 1, 4).unbind(0)


class Memory(NamedTuple):
    """Keys and values that queries attend to; `mask` is True where a key is real."""

    keys: Float[Tensor, "b h n k"]
    values: Float[Tensor, "b h n k"]
    mask: Bool[Tensor, "b 1 1 n"] | None = None
    joint: Float[Tensor, "b n t h k"] | None = None
    """The tensor that both lie in, if there is one; the first of three parts are the queries."""

    def together(self) -> "Memory":
        """The same in one tensor, if our own attention is the one for these."""
        ours = kernels.short_attention is not None and kernels.takes_heads(self.keys)
        if self.joint is not None or not ours:
            return self
        joint = torch.stack((self.keys.transpose(1, 2), self.values.transpose(1, 2)), dim=2)
        keys, values = parts_of(joint)
        return Memory(keys, values, self.mask, joint)


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

    If memory's joint tensor has three parts, the queries must be the first of them.
    Values have `real` channels, and zeros behind them. The second result says whether the first of
    these has become one, so that it can carry a bias.
    """
    ours = kernels.short_attention
    if ours is not None and memory.mask is None and kernels.takes_heads(queries):
        joint = memory.together().joint
        assert joint is not None
        mixed = ours(joint, None if joint.shape[2] == 3 else queries, scale, real)
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
    ours = kernels.residual_product
    if ours is None or not one or residual.dtype != tokens.dtype:
        return residual + F.linear(tokens, weights.weight, bias)
    return ours(residual, tokens, weights.with_bias)


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
    ) -> Heads:
        """Tokens, normalised, through several projections, split into heads."""
        if tokens.is_cuda:
            return self._project_together(tokens, norm, prepared, *projections)
        # On a CPU, joining the weights costs more than it saves.
        tokens = tokens if norm is None else norm(tokens)
        return Heads(tuple(self._split(project(tokens)) for project in projections))

    def _project_together(
        self,
        tokens: Float[Tensor, "b n d"],
        norm: nn.LayerNorm | None,
        prepared: Prepared | None,
        *projections: nn.Linear,
    ) -> Heads:
        """The same in one product, with widened heads."""
        size = self.head_size + -self.head_size % ALIGNMENT
        joint = (prepared or Prepared()).once(
            (norm, *projections),
            lambda: joint_projection(tokens, norm, projections, self.heads, size),
        )
        split = joint(tokens).unflatten(-1, (len(projections), self.heads, -1))
        return Heads(parts_of(split), split)

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
        (keys, values), joint = self._project(tokens, norm, prepared, self.key, self.value)
        return Memory(keys, values, None if mask is None else mask[:, None, None, :], joint)

    def forward(
        self,
        tokens: Float[Tensor, "b p d"],
        memory: Memory,
        norm: nn.LayerNorm | None = None,
        prepared: Prepared | None = None,
        residual: Float[Tensor, "b p d"] | None = None,
    ) -> Float[Tensor, "b p d"]:
        """With a residual, that is added."""
        (queries,), _ = self._project(tokens, norm, prepared, self.query)
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
        (queries, keys, values), joint = self._project(tokens, norm, prepared, *all_three)
        return self._attend(queries, Memory(keys, values, joint=joint), prepared, residual)

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
