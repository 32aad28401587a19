"""A blend of first order for FST's decoder: a trial.

Equation 1 averages what anchors store. Between anchors that average knows how near each is, but not
on which side. Here it also takes the first moments along every axis,

    z̄(x) = A [Σ_j w_j z_j, Σ_j w_j ξ_j1 z_j, ...],   ξ_js = (x_s − a_js) / ℓ_js,

with a matrix A that is learned. It begins as Equation 1 with small moments.

`StencilBlend` has differences of Equation 1 in place of the moments,

    δ_s(x) = ½ (z̄(x + h_s e_s) − z̄(x − h_s e_s)),   h_s the mean length scale on axis s,

which a kernel of Equation 1 alone can make.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fst.model import FunctionSpaceTransformer
from fst.rbf import Blend, rbf_weights

FIRST_MOMENTS = 0.3  # how large their part of A begins, of a linear layer's usual size


def joined(width: int, axes: int) -> nn.Linear:
    """The matrix A, on a blend and its first moments."""
    join = nn.Linear((1 + axes) * width, width)
    with torch.no_grad():
        join.weight[:, width:] *= FIRST_MOMENTS
        join.weight[:, :width] = torch.eye(width)
        join.bias.zero_()
    return join


class FirstOrderBlend(Blend):
    """The blend and its first moments, joined to as many features as before."""

    def __init__(self, width: int, axes: int) -> None:
        super().__init__()
        self.join = joined(width, axes)

    def forward(
        self,
        points: Float[Tensor, "#b q s"],
        anchors: Float[Tensor, "b m s"],
        length_scales: Float[Tensor, "b m s"],
        features: Float[Tensor, "b m d"],
        neighbors: int | None = None,
    ) -> Float[Tensor, "b q d"]:
        weights = rbf_weights(points, anchors, length_scales, neighbors)
        moments = [weights.to(features.dtype) @ features]
        for axis in range(points.shape[-1]):
            gap = points[..., axis, None] - anchors[:, None, :, axis]  # b q m
            weighted = weights * (gap / length_scales[:, None, :, axis])
            moments.append(weighted.to(features.dtype) @ features)
        result: Tensor = self.join(torch.cat(moments, dim=-1))
        return result


class StencilBlend(Blend):
    """The blend and its differences along every axis, joined to as many features as before."""

    def __init__(self, width: int, axes: int) -> None:
        super().__init__()
        self.plain, self.join = Blend(), joined(width, axes)

    def forward(
        self,
        points: Float[Tensor, "#b q s"],
        anchors: Float[Tensor, "b m s"],
        length_scales: Float[Tensor, "b m s"],
        features: Float[Tensor, "b m d"],
        neighbors: int | None = None,
    ) -> Float[Tensor, "b q d"]:
        axes = points.shape[-1]
        steps = length_scales.detach().mean(dim=1).diag_embed().to(points.dtype)  # b s s
        ends = [points + sign * steps[:, None, axis] for axis in range(axes) for sign in (1, -1)]
        centres = points.expand_as(ends[0])
        at = torch.cat((centres, *ends), dim=1)
        blended = self.plain(at, anchors, length_scales, features, neighbors)
        centre, *around = blended.chunk(1 + 2 * axes, dim=1)
        pairs = zip(around[::2], around[1::2], strict=True)
        slopes = [0.5 * (after - before) for after, before in pairs]
        result: Tensor = self.join(torch.cat((centre, *slopes), dim=-1))
        return result


BLENDS = {"moments": FirstOrderBlend, "stencil": StencilBlend}


def first_order(model: FunctionSpaceTransformer, kind: str = "moments") -> None:
    """Give a model's decoder such a blend."""
    model.decoder.blend = BLENDS[kind](model.config.width, model.domain.axes)
