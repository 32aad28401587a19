"""Normalised RBF interpolation (paper, Equation 1): the field between the anchors.

Logits and their normalisation run in float32 or better whatever the autocast dtype: at the shortest
length scale a logit reaches thousands, where bfloat16 has lost the difference between one anchor
and the next.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fst.types import check_alike, check_length_scales, check_neighbors, check_tensor

# Squared distances this close (relative) count as equal: rounding must not decide between them.
TIE = 1e-6


def squared_distances(
    points: Float[Tensor, "#b q s"],
    anchors: Float[Tensor, "#b m s"],
    length_scales: Float[Tensor, "#b m s"] | None = None,
) -> Float[Tensor, "b q m"]:
    """Σ_s ((x_s - a_s) / ℓ_s)². Differences come first: the expanded square would cancel."""
    inverse = None if length_scales is None else length_scales.reciprocal()
    squares = []
    for axis in range(points.shape[-1]):
        gap = points[..., axis, None] - anchors[:, None, :, axis]  # b q m
        squares.append((gap if inverse is None else gap * inverse[:, None, :, axis]).square())
    return sum(squares[1:], start=squares[0])


def rbf_weights(
    points: Float[Tensor, "#b q s"],
    anchors: Float[Tensor, "b m s"],
    length_scales: Float[Tensor, "b m s"],
    neighbors: int | None = None,
) -> Float[Tensor, "b q m"]:
    """w_j(x) = exp(-½ Σ_s ((x_s - a_js)/ℓ_js)²) / Σ_k exp(...), which sum to one over the anchors.

    With `neighbors`, only that many nearest anchors (Euclidean, in the coordinates given) keep
    a weight, together with any that are as near as the last; those are normalised anew.
    """
    with torch.autocast(points.device.type, enabled=False):
        wide = torch.promote_types(torch.float32, anchors.dtype)
        points, anchors, length_scales = (x.to(wide) for x in (points, anchors, length_scales))
        logits = -0.5 * squared_distances(points, anchors, length_scales)
        if neighbors is not None and neighbors < anchors.shape[1]:
            with torch.no_grad():
                distances = squared_distances(points, anchors)
                nearest = distances.topk(neighbors, largest=False, sorted=False).values
                # A distance that is not a number is not beyond: a diverged model is seen to have.
                beyond = distances > nearest.amax(dim=-1, keepdim=True) * (1 + TIE)
            logits = logits.masked_fill(beyond, -torch.inf)
        return logits.softmax(dim=-1)


class Blend(nn.Module):
    """Equation 1: the RBF-weighted average of the features, Σ_j w_j(x) z_j."""

    def forward(
        self,
        points: Float[Tensor, "#b q s"],
        anchors: Float[Tensor, "b m s"],
        length_scales: Float[Tensor, "b m s"],
        features: Float[Tensor, "b m d"],
        neighbors: int | None = None,
    ) -> Float[Tensor, "b q d"]:
        # The product may run in the autocast dtype: the weights are in [0, 1].
        weights = rbf_weights(points, anchors, length_scales, neighbors)
        return weights.to(features.dtype) @ features


def rbf_blend(
    points: Float[Tensor, "b q s"],
    anchors: Float[Tensor, "b m s"],
    length_scales: Float[Tensor, "b m s"],
    features: Float[Tensor, "b m d"],
    neighbors: int | None = None,
) -> Float[Tensor, "b q d"]:
    """The field of `features` stored at `anchors`, evaluated at `points`; arguments are checked."""
    given = {
        "points": (points, "b q s"),
        "anchors": (anchors, "b m s"),
        "length_scales": (length_scales, "b m s"),
        "features": (features, "b m d"),
    }
    for name, (value, shape) in given.items():
        check_tensor(name, value, shape)
        check_alike(name, value, "points", points)
    batch, _, axes = points.shape
    count = anchors.shape[1]
    expected = {
        "anchors": (batch, count, axes),
        "length_scales": (batch, count, axes),
        "features": (batch, count, features.shape[2]),
    }
    for name, size in expected.items():
        if tuple(given[name][0].shape) != size:
            raise ValueError(f"{name} must have shape {size}, got {tuple(given[name][0].shape)}")
    if count == 0:
        raise ValueError("anchors must hold at least one anchor, got none")
    check_neighbors(neighbors)
    if not torch.compiler.is_compiling() and batch:
        check_length_scales(length_scales, points, anchors)
    blended: Tensor = Blend()(points, anchors, length_scales, features, neighbors)
    return blended
