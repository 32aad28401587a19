"""A blend of first order for FST's decoder: a trial.

Equation 1 averages what anchors store. Between anchors that average knows how near each is, but not
on which side. Here it also takes the first moments along every axis,

    z̄(x) = A [Σ_j w_j z_j, Σ_j w_j ξ_j1 z_j, ...],   ξ_js = (x_s − a_js) / ℓ_js,

with a matrix A that is learned. It begins as Equation 1 with small moments.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fst.model import FunctionSpaceTransformer
from fst.rbf import Blend, rbf_weights

FIRST_MOMENTS = 0.3  # how large their part of A begins, of a linear layer's usual size


class FirstOrderBlend(Blend):
    """The blend and its first moments, joined to as many features as before."""

    def __init__(self, width: int, axes: int) -> None:
        super().__init__()
        self.join = nn.Linear((1 + axes) * width, width)
        with torch.no_grad():
            self.join.weight[:, width:] *= FIRST_MOMENTS
            self.join.weight[:, :width] = torch.eye(width)
            self.join.bias.zero_()

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
        joined: Tensor = self.join(torch.cat(moments, dim=-1))
        return joined


def first_order(model: FunctionSpaceTransformer) -> None:
    """Give a model's decoder such a blend."""
    model.decoder.blend = FirstOrderBlend(model.config.width, model.domain.axes)
