"""One refinement step (paper, Equations 2-5): read the observations, evaluate and mix, write back.

What does not change across steps is computed once per input, in `precompute`: the keys and values
of the observations and the anchor-to-anchor weights W^A. A sampled evaluation point that is an
anchor takes the value that the write-back query has there anyway: same equation, same numbers.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from fst.evaluation_points import PointDraws
from fst.nn import Attention, FeedForward, FourierFeatures, PointMLP
from fst.rbf import Blend, rbf_weights
from fst.types import Anchors


class Context(NamedTuple):
    """What every refinement step of one input shares."""

    anchors: Anchors
    condition: Float[Tensor, "b c"] | None
    mask: Bool[Tensor, "b n"] | None
    observed: Any
    """What `read` precomputes: the keys and values of the observations."""
    at_anchors: Any
    """What `update` precomputes: the anchor-to-anchor weights W^A."""


class Points(NamedTuple):
    """Evaluation points of one step: chosen anchors, then points anywhere in the unit box."""

    anchor_indices: Int[Tensor, " a"]
    uniform: Float[Tensor, "u s"]


class Read(nn.Module):
    """Equation 2: the anchors attend to the observations."""

    def __init__(self, width: int, attention: Attention) -> None:
        super().__init__()
        self.norm_a, self.norm_h, self.norm_2 = (nn.LayerNorm(width) for _ in range(3))
        self.attention = attention
        self.feed_forward = FeedForward(width)

    def precompute(self, tokens: Float[Tensor, "b n d"], anchors: Anchors) -> Any:
        """Keys and values; where the anchors are does not matter to plain attention."""
        return self.attention.keys_values(self.norm_h(tokens))

    def forward(self, z: Float[Tensor, "b m d"], context: Context) -> Float[Tensor, "b m d"]:
        z = z + self.attention(self.norm_a(z), context.observed, context.mask)
        z = z + self.feed_forward(self.norm_2(z))
        return z


class EvaluateMixWrite(nn.Module):
    """Equations 3-5: evaluate the field at sampled points, mix, and write back to the anchors."""

    def __init__(self, width: int, heads: int, fourier: FourierFeatures, condition: int) -> None:
        super().__init__()
        self.fourier, self.blend = fourier, Blend()
        self.evaluate = PointMLP(width, fourier.size, condition, 2 * width, width)
        self.norm_e, self.norm_g, self.norm_q, self.norm_v = (nn.LayerNorm(width) for _ in range(4))
        self.mix, self.write = Attention(width, heads), Attention(width, heads)
        self.mix_feed, self.write_feed = FeedForward(width), FeedForward(width)

    def precompute(self, anchors: Anchors, condition: Float[Tensor, "b c"] | None) -> Any:
        """W^A. Only the fused module needs `condition`, for its position term."""
        return rbf_weights(anchors.positions, anchors.positions, anchors.refinement_length_scales)

    def forward(
        self, z: Float[Tensor, "b m d"], context: Context, points: Points
    ) -> Float[Tensor, "b m d"]:
        anchors, condition = context.anchors, context.condition
        positions, scales = anchors.positions, anchors.refinement_length_scales
        # Equation 3: F_θ[blend, γ(x), c] at the anchors, which Equation 5 needs, and at the points.
        at_anchors = self.evaluate(
            context.at_anchors.to(z.dtype) @ z, self.fourier(positions), condition
        )  # b m d
        e = at_anchors[:, points.anchor_indices]
        if len(points.uniform):
            uniform = points.uniform.unsqueeze(0)  # 1 u s
            elsewhere = self.evaluate(
                self.blend(uniform, positions, scales, z), self.fourier(uniform), condition
            )  # b u d
            e = torch.cat((e, elsewhere), dim=1)  # b e d
        # Equation 4: the evaluation points attend to each other.
        e = e + self.mix.attend_to_self(self.norm_e(e))
        e = e + self.mix_feed(self.norm_g(e))
        # Equation 5: the anchors attend to the evaluation points.
        keys_values = self.write.keys_values(self.norm_e(e))
        z = z + self.write(self.norm_q(at_anchors), keys_values)
        z = z + self.write_feed(self.norm_v(z))
        return z


class FunctionSpaceLayer(nn.Module):
    """The map Φ from the features of one step to those of the next."""

    update: Any

    def __init__(self, read: Read, update: nn.Module) -> None:
        super().__init__()
        self.read, self.update = read, update

    def precompute(
        self,
        tokens: Float[Tensor, "b n d"],
        mask: Bool[Tensor, "b n"] | None,
        anchors: Anchors,
        condition: Float[Tensor, "b c"] | None,
    ) -> Context:
        observed = self.read.precompute(tokens, anchors)
        at_anchors = self.update.precompute(anchors, condition)
        return Context(anchors, condition, mask, observed, at_anchors)

    def forward(
        self, z: Float[Tensor, "b m d"], context: Context, points: Points
    ) -> Float[Tensor, "b m d"]:
        refined: Tensor = self.update(self.read(z, context), context, points)
        return refined

    def refine(
        self, z: Float[Tensor, "b m d"], context: Context, draws: PointDraws
    ) -> Iterator[Float[Tensor, "b m d"]]:
        """The features after each of the R steps, which share their parameters."""
        for points in zip(*draws, strict=True):
            z = self(z, context, Points(*points))
            yield z
