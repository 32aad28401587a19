"""The normalised RBF blend (paper, Equation 1): the field between the anchors.

Points, anchors with axis-wise length scales and features enter; at each point the weighted mean
of the features leaves. Logits and their normalisation run in float32 or better whatever the
autocast dtype: at the shortest length scale a logit reaches thousands, where bfloat16 has lost
the difference between one anchor and the next.
"""

from collections.abc import Iterable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from fst.types import product_dtype

# Squared distances this close (relative) count as equal: rounding must not decide between them.
TIE = 1e-6


def axis_gaps(
    points: Float[Tensor, "#b q s"], anchors: Float[Tensor, "b m s"]
) -> Iterator[Float[Tensor, "b q m"]]:
    """x_s - a_s for one axis after the other, in float32 or better. Differences are taken before
    squaring: the expanded square would cancel catastrophically at small length scales."""
    wide = torch.promote_types(torch.float32, anchors.dtype)
    points, anchors = points.to(wide), anchors.to(wide)
    return (points[..., axis, None] - anchors[:, None, :, axis] for axis in range(points.shape[-1]))


def squared_lengths(gaps: Iterable[Float[Tensor, "b q m"]]) -> Float[Tensor, "b q m"]:
    """Σ_s gap_s²: Euclidean, in the coordinates given."""
    total = None
    for gap in gaps:
        square = gap.square()
        total = square if total is None else total + square
    assert total is not None
    return total


def rbf_logits(
    points: Float[Tensor, "#b q s"],
    anchors: Float[Tensor, "b m s"],
    length_scales: Float[Tensor, "b m s"],
) -> Float[Tensor, "b q m"]:
    """-½ Σ_s ((x_s - a_s) / ℓ_s)²."""
    with torch.autocast(points.device.type, enabled=False):
        wide = torch.promote_types(torch.float32, length_scales.dtype)
        inverse = length_scales.to(wide).reciprocal()
        gaps = enumerate(axis_gaps(points, anchors))
        return -0.5 * squared_lengths(gap * inverse[:, None, :, axis] for axis, gap in gaps)


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
        with torch.no_grad():
            distances = squared_lengths(axis_gaps(points, anchors))
            nearest = distances.topk(neighbors, dim=-1, largest=False, sorted=False).values
            # What has no number is not beyond: a model that has diverged is seen to have.
            beyond = distances > nearest.amax(dim=-1, keepdim=True) * (1 + TIE)
        logits = logits.masked_fill(beyond, -torch.inf)
    return logits.softmax(dim=-1)


def blend(
    weights: Float[Tensor, "b q m"], features: Float[Tensor, "b m d"]
) -> Float[Tensor, "b q d"]:
    """Σ_j w_j z_j. The product may run in the autocast dtype: the weights are in [0, 1]."""
    dtype = product_dtype(features)
    return weights.to(dtype) @ features.to(dtype)
