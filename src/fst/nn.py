"""Building blocks that know nothing of anchors: embedding and MLPs.

Every module keeps batch, points, features as its shape, and every projection has a bias.
"""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 (the name PyTorch users know)
from jaxtyping import Float
from torch import Tensor, nn

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
    first, between, second = feed
    if not isinstance(first, nn.Linear) or not isinstance(second, nn.Linear):
        return None
    if not isinstance(between, nn.GELU) or between.approximate != "none":
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
        kernel, known = kernels.place, type(fourier) is FourierFeatures
        if not known or not kernels.takes_positions(positions, fourier.bands, len(weight)):
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
