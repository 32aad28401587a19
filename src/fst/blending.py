"""The blend by the fastest exact way there is: fused on a GPU, local on request, else as written.

Without gradients, many points on a GPU are blended from the anchors that weigh something.

`rbf_blend` is for users and checks what it is given; `field_at` is the same without the checks.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from fst import kernels
from fst.local import nearest_blend
from fst.rbf import blend, rbf_weights
from fst.types import check_alike, check_neighbors, check_tensor, product_dtype

if kernels.fused_blend is not None:
    from fst.kernels.local_blend import MOST_ANCHORS, local_blend

# Fewer points or anchors than this gain nothing from lists of anchors.
LOCAL_POINTS, LOCAL_ANCHORS = 4096, 128


def learned(*tensors: Tensor) -> bool:
    """Whether a gradient may be asked of what is made from these."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def field_at(
    points: Float[Tensor, "#b q s"],
    anchors: Float[Tensor, "b m s"],
    length_scales: Float[Tensor, "b m s"],
    features: Float[Tensor, "b m d"],
    neighbors: int | None = None,
) -> Float[Tensor, "b q d"]:
    """The field of `features` at points, unchecked."""
    if neighbors is not None and neighbors < anchors.shape[1]:
        return nearest_blend(points, anchors, length_scales, features, neighbors)
    if kernels.fused_blend is not None and kernels.usable(anchors, features.shape[2]):
        features = features.to(product_dtype(features))
        given = (points, anchors, length_scales, features)
        many = points.shape[1] >= LOCAL_POINTS and LOCAL_ANCHORS <= anchors.shape[1] <= MOST_ANCHORS
        return local_blend(*given) if many and not learned(*given) else kernels.fused_blend(*given)
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
    return field_at(points, anchors, length_scales, features, neighbors)
