"""One refinement step (paper, Equations 2-5): read the observations, evaluate and mix, write back.

Features at the anchors enter and leave. What does not change across steps is computed once, in
`remember`: the keys and values of the observations, the anchor-to-anchor weights, and the
position's share of the pointwise MLP. The first step prepares the weights of the layers for all. A
sampled evaluation point that is an anchor takes the feature which the write-back query has at that
anchor anyway: same equation, same numbers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from fst import kernels
from fst.attention import Attention
from fst.blending import field_at
from fst.nn import FeedForward, FourierFeatures, PointMLP, ResidualFeedForward, residual_feed
from fst.prepared import Prepared
from fst.rbf import blend, rbf_weights
from fst.rows import rows_and_tokens
from fst.types import Anchors, product_dtype


class Scene(NamedTuple):
    """What every refinement step of one input shares."""

    anchors: Anchors
    observed: Any
    """What the read attention keeps of the observations."""
    condition: Float[Tensor, "b c"] | None
    blend: Callable[[Tensor], Tensor] | None
    """The features of the anchors, blended at the anchors themselves: W^A z."""
    places: Float[Tensor, "b m k"] | None
    prepared: Prepared


class Points(NamedTuple):
    """Evaluation points of one step: chosen anchors, then points anywhere in the unit box."""

    anchor_indices: Int[Tensor, " a"]
    uniform: Float[Tensor, "u s"]


class Read(nn.Module):
    """Equation 2: the anchors attend to the observations."""

    attention: Any

    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.norm_a, self.norm_h, self.norm_2 = (nn.LayerNorm(width) for _ in range(3))
        self.attention = attention
        self.feed_forward = FeedForward(width)

    def remember(
        self,
        tokens: Float[Tensor, "b n d"],
        mask: Bool[Tensor, "b n"] | None,
        anchors: Anchors,
    ) -> Any:
        """What every step reads; where the anchors are does not matter to plain attention."""
        del anchors
        return self.attention.remember(tokens, mask, self.norm_h)

    def forward(
        self, features: Float[Tensor, "b m d"], observed: Any, prepared: Prepared | None = None
    ) -> Float[Tensor, "b m d"]:
        features = self.attention(features, observed, self.norm_a, prepared, residual=features)
        return residual_feed(features, self.norm_2, self.feed_forward, prepared)


class EvaluateMixWrite(nn.Module):
    """Equations 3-5: evaluate the field at sampled points, mix, and write back to the anchors."""

    def __init__(self, width: int, heads: int, fourier: FourierFeatures, condition: int) -> None:
        super().__init__()
        self.width, self.fourier = width, fourier
        self.evaluate = PointMLP(width, fourier.size, condition, 2 * width, width)
        self.norm_e, self.norm_g, self.norm_q, self.norm_v = (nn.LayerNorm(width) for _ in range(4))
        self.mix, self.write = Attention(width, heads), Attention(width, heads)
        self.mix_feed, self.write_feed = FeedForward(width), FeedForward(width)

    def remember(
        self, anchors: Anchors, condition: Float[Tensor, "b c"] | None, prepared: Prepared
    ) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """The blend with the anchor-to-anchor weights W^A, and the position's share of F there.

        The weights are stored even where the fused blend could make them anew: they serve every
        step, and reading them costs less than computing them again in each. Of very many anchors
        they would fill the memory, and the fused blend serves.
        """
        positions, scales = anchors.positions, anchors.refinement_length_scales
        dtype = product_dtype(positions)
        blend_at_anchors: Callable[[Tensor], Tensor]
        if kernels.AnchorBlend is not None and kernels.takes_anchors(positions):
            blend_at_anchors = kernels.AnchorBlend(positions, scales, dtype)
        elif kernels.fused_blend is not None and kernels.usable(positions, self.width):
            blend_at_anchors = partial(field_at, positions, positions, scales)
        else:
            weights = rbf_weights(positions, positions, scales)
            blend_at_anchors = partial(blend, weights.to(dtype))
        places = self.evaluate.place(self.fourier, positions, condition, prepared)
        return blend_at_anchors, places

    def forward(
        self, features: Float[Tensor, "b m d"], scene: Scene, points: Points
    ) -> Float[Tensor, "b m d"]:
        positions, scales = scene.anchors.positions, scene.anchors.refinement_length_scales
        assert scene.blend is not None
        ready = scene.prepared
        at_anchors = self.evaluate(scene.blend(features), scene.places, ready)  # b m d

        uniform = points.uniform.unsqueeze(0)  # 1 u s
        place = self.evaluate.place(self.fourier, uniform, scene.condition, ready)
        blended = field_at(uniform, positions, scales, features)
        elsewhere = self.evaluate(blended, place, ready)  # b u d
        chosen, at_anchors = rows_and_tokens(at_anchors, points.anchor_indices)
        evaluated = torch.cat((chosen, elsewhere), dim=1)  # b e d

        mixed = self.mix.attend_to_self(evaluated, self.norm_e, ready, residual=evaluated)
        mixed = residual_feed(mixed, self.norm_g, self.mix_feed, ready)

        memory = self.write.remember(mixed, norm=self.norm_e, prepared=ready)
        features = self.write(at_anchors, memory, self.norm_q, ready, residual=features)
        return residual_feed(features, self.norm_v, self.write_feed, ready)


class SelfAttentionBlock(nn.Module):
    """Pre-norm self-attention and feed-forward on the anchor features."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed_forward = ResidualFeedForward(width)

    def forward(self, features: Float[Tensor, "b m d"]) -> Float[Tensor, "b m d"]:
        mixed = self.attention.attend_to_self(features, self.norm, residual=features)
        return self.feed_forward(mixed)


class AnchorSelfAttention(nn.Module):
    """Ablation: two self-attention blocks on the anchor features replace Equations 3-5."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(SelfAttentionBlock(width, heads) for _ in range(2)))

    def remember(
        self, anchors: Anchors, condition: Float[Tensor, "b c"] | None, prepared: Prepared
    ) -> tuple[None, None]:
        return None, None

    def forward(
        self, features: Float[Tensor, "b m d"], scene: Scene, points: Points
    ) -> Float[Tensor, "b m d"]:
        return self.blocks(features)


class FunctionSpaceLayer(nn.Module):
    """The map Φ from the features of one step to those of the next."""

    def __init__(self, read: Read, update: EvaluateMixWrite | AnchorSelfAttention) -> None:
        super().__init__()
        self.read, self.update = read, update

    def remember(
        self,
        tokens: Float[Tensor, "b n d"],
        mask: Bool[Tensor, "b n"] | None,
        anchors: Anchors,
        condition: Float[Tensor, "b c"] | None,
    ) -> Scene:
        prepared = Prepared()
        blend_at_anchors, places = self.update.remember(anchors, condition, prepared)
        observed = self.read.remember(tokens, mask, anchors)
        return Scene(anchors, observed, condition, blend_at_anchors, places, prepared)

    def forward(
        self, features: Float[Tensor, "b m d"], scene: Scene, points: Points
    ) -> Float[Tensor, "b m d"]:
        return self.update(self.read(features, scene.observed, scene.prepared), scene, points)
