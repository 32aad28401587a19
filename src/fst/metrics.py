"""Relative L2 errors, one per solution, and the loss made of them (paper, Equation 7).

Sums run in float32 or better whatever the dtype of the prediction. `mask` is True at real targets.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def squared_relative_l2(
    prediction: Float[Tensor, "b q c"],
    target: Float[Tensor, "b q c"],
    mask: Bool[Tensor, "b q"] | None = None,
) -> Float[Tensor, " b"]:
    """‖prediction - target‖² / ‖target‖² for each solution."""
    wide = torch.promote_types(torch.float32, target.dtype)
    difference = (prediction.to(wide) - target.to(wide)).square().sum(dim=-1)
    reference = target.to(wide).square().sum(dim=-1)
    if mask is not None:
        difference = difference.where(mask, 0.0)
        reference = reference.where(mask, 0.0)
    return difference.sum(dim=-1) / reference.sum(dim=-1)


def relative_l2(
    prediction: Float[Tensor, "b q c"],
    target: Float[Tensor, "b q c"],
    mask: Bool[Tensor, "b q"] | None = None,
) -> Float[Tensor, " b"]:
    """‖prediction - target‖ / ‖target‖ for each solution; the paper reports its mean."""
    return squared_relative_l2(prediction, target, mask).sqrt()
