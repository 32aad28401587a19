"""The normalised RBF blend (paper, Equation 1): the field between the anchors.

Points, anchors with axis-wise length scales and features enter; at each point the weighted mean
of the features leaves. Logits and their normalisation run in float32 or better whatever the
autocast dtype: at the shortest length scale a logit reaches thousands, where bfloat16 has lost
the difference between one anchor and the next.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from fst import kernels
from fst.types import check_alike, check_neighbors, check_tensor, product_dtype


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


def rbf_weights(
    points: Float[Tensor, "#b q s"],
    anchors: Float[Tensor, "b m s"],
    length_scales: Float[Tensor, "b m s"],
    neighbors: int | None = None,
) -> Float[Tensor, "b q m"]:
    """The weights w_j(x), which sum to one over the anchors.

    With `neighbors`, only that many nearest anchors (Euclidean, in the coordinates given) keep
    a weight, and those are normalised anew.
    """
    logits = rbf_logits(points, anchors, length_scales)
    if neighbors is not None and neighbors < anchors.shape[1]:
        # Unit length scales turn the logits into -½ distance²: the largest are the nearest.
        closeness = rbf_logits(points, anchors, torch.ones_like(length_scales))
        nearest = closeness.topk(neighbors, dim=-1).indices
        keep = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, nearest, True)
        logits = logits.masked_fill(~keep, -torch.inf)
    return logits.softmax(dim=-1)


def blend(
    weights: Float[Tensor, "b q m"], features: Float[Tensor, "b m d"]
) -> Float[Tensor, "b q d"]:
    """Σ_j w_j z_j. The product may run in the autocast dtype: the weights are in [0, 1]."""
    dtype = product_dtype(features)
    return weights.to(dtype) @ features.to(dtype)


def field_at(
    points: Float[Tensor, "#b q s"],
    anchors: Float[Tensor, "b m s"],
    length_scales: Float[Tensor, "b m s"],
    features: Float[Tensor, "b m d"],
) -> Float[Tensor, "b q d"]:
    """The blend at points, unchecked: by the fused kernel where it runs, else as written above."""
    if kernels.fused_blend is not None and kernels.usable(anchors, features):
        features = features.to(product_dtype(features))
        return kernels.fused_blend(points, anchors, length_scales, features)
    return blend(rbf_weights(points, anchors, length_scales), features)


def rbf_blend(
    points: Float[Tensor, "b q s"],
    anchors: Float[Tensor, "b m s"],
    length_scales: Float[Tensor, "b m s"],
    features: Float[Tensor, "b m d"],
    neighbors: int | None = None,
) -> Float[Tensor, "b q d"]:
    """The field of `features` stored at `anchors`, evaluated at `points`."""
    shapes = {"points": "b q s", "anchors": "b m s", "length_scales": "b m s", "features": "b m d"}
    given = {
        "points": points,
        "anchors": anchors,
        "length_scales": length_scales,
        "features": features,
    }
    for name, value in given.items():
        check_tensor(name, value, shapes[name])
        check_alike(name, value, "points", points)
    batch, _, axes = points.shape
    expected = {
        "anchors": (batch, anchors.shape[1], axes),
        "length_scales": tuple(anchors.shape),
        "features": (batch, anchors.shape[1], features.shape[2]),
    }
    for name, shape in expected.items():
        if tuple(given[name].shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(given[name].shape)}")
    if anchors.shape[1] == 0:
        raise ValueError("anchors must hold at least one anchor, got none")
    check_neighbors(neighbors)
    if not torch.compiler.is_compiling() and not bool((length_scales > 0).all()):
        raise ValueError(f"length_scales must be positive, got {length_scales.min().item()}")
    return blend(rbf_weights(points, anchors, length_scales, neighbors), features)
