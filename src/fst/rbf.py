"""The normalised RBF blend (paper, Equation 1): the field between the anchors.

Points, anchors with axis-wise length scales and features enter; at each point the weighted mean
of the features leaves. Logits and their normalisation run in float32 or better whatever the
autocast dtype: at the shortest length scale a logit reaches thousands, where bfloat16 has lost
the difference between one anchor and the next.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fst.types import product_dtype

# Squared distances this close (relative) count as equal: rounding must not decide between them.
TIE = 1e-6


def rbf_logits(
    points: Float[Tensor, "#b q s"],
    anchors: Float[Tensor, "b m s"],
    length_scales: Float[Tensor, "b m s"],
) -> Float[Tensor, "b q m"]:
    """-½ Σ_s ((x_s - a_s) / ℓ_s)². Differences are taken before squaring: the expanded square
    would cancel catastrophically at small length scales."""
    with torch.autocast(points.device.type, enabled=False):
        wide = torch.promote_types(torch.float32, anchors.dtype)
        points, anchors, length_scales = points.to(wide), anchors.to(wide), length_scales.to(wide)
        inverse = length_scales.reciprocal()
        logits = None
        for axis in range(points.shape[-1]):
            distance = points[..., axis, None] - anchors[:, None, :, axis]  # b q m
            square = (distance * inverse[:, None, :, axis]).square()
            logits = square if logits is None else logits + square
        assert logits is not None
        return -0.5 * logits


def squared_distances(
    points: Float[Tensor, "#b q s"], anchors: Float[Tensor, "b m s"]
) -> Float[Tensor, "b q m"]:
    """Euclidean, in the coordinates given."""
    gaps = (points[..., axis, None] - anchors[:, None, :, axis] for axis in range(points.shape[-1]))
    total = next(gaps).square()
    for gap in gaps:
        total = total + gap.square()
    return total


def among_nearest(distances: Float[Tensor, "b q m"], neighbors: int) -> Bool[Tensor, "b q m"]:
    """Where an anchor is one of the nearest, or as near as the last of them."""
    # Not `kthvalue`, which takes several times as long on short rows.
    nearest = distances.topk(neighbors, dim=-1, largest=False, sorted=False).values
    return distances <= nearest.amax(dim=-1, keepdim=True) * (1 + TIE)


def rbf_weights(
    points: Float[Tensor, "#b q s"],
    anchors: Float[Tensor, "b m s"],
    length_scales: Float[Tensor, "b m s"],
    neighbors: int | None = None,
) -> Float[Tensor, "b q m"]:
    """The weights w_j(x), which sum to one over the anchors.

    With `neighbors`, only that many nearest anchors (Euclidean, in the coordinates given) keep
    a weight, together with any that are as near as the last; those are normalised anew.
    """
    logits = rbf_logits(points, anchors, length_scales)
    if neighbors is not None and neighbors < anchors.shape[1]:
        wide = torch.promote_types(torch.float32, anchors.dtype)
        with torch.no_grad():
            keep = among_nearest(squared_distances(points.to(wide), anchors.to(wide)), neighbors)
        logits = logits.masked_fill(~keep, -torch.inf)
    return logits.softmax(dim=-1)


def blend(
    weights: Float[Tensor, "b q m"], features: Float[Tensor, "b m d"]
) -> Float[Tensor, "b q d"]:
    """Σ_j w_j z_j. The product may run in the autocast dtype: the weights are in [0, 1]."""
    dtype = product_dtype(features)
    return weights.to(dtype) @ features.to(dtype)
