"""Errors of single predictions: relative L2 of a solution (paper, Equation 7), top-k of a class.

Sums run in float32 or better whatever the dtype of the prediction. `mask` is True at real targets.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def squared_relative_l2(
    prediction: Float[Tensor, "b q c"],
    target: Float[Tensor, "b q c"],
    mask: Bool[Tensor, "b q"] | None = None,
) -> Float[Tensor, " b"]:
    """‖prediction - target‖² / ‖target‖² for each solution."""
    difference, reference = _squares(prediction, target, mask)
    return difference.sum(dim=-1) / reference.sum(dim=-1)


def mean_square(
    prediction: Float[Tensor, "b q c"],
    target: Float[Tensor, "b q c"],
    mask: Bool[Tensor, "b q"] | None = None,
) -> Float[Tensor, " b"]:
    """The mean of (prediction - target)² over points and channels of each solution."""
    difference, _ = _squares(prediction, target, mask)
    count = difference.shape[1] if mask is None else mask.sum(dim=-1)
    return difference.sum(dim=-1) / (count * target.shape[-1])


def _squares(
    prediction: Float[Tensor, "b q c"],
    target: Float[Tensor, "b q c"],
    mask: Bool[Tensor, "b q"] | None,
) -> tuple[Float[Tensor, "b q"], Float[Tensor, "b q"]]:
    """Of the difference and of the target at every point; zero at padding."""
    if target.ndim != 3:
        raise ValueError(f"target must have shape (b q c), got {tuple(target.shape)}")
    if prediction.shape != target.shape:  # they would be broadcast
        raise ValueError(
            f"prediction must have the shape of target, {tuple(target.shape)}, "
            f"got {tuple(prediction.shape)}"
        )
    if mask is not None and mask.shape != target.shape[:2]:
        raise ValueError(
            f"mask must have the shape {tuple(target.shape[:2])}, got {tuple(mask.shape)}"
        )
    wide = torch.promote_types(torch.float32, target.dtype)
    difference = (prediction.to(wide) - target.to(wide)).square().sum(dim=-1)
    reference = target.to(wide).square().sum(dim=-1)
    if mask is not None:
        difference = difference.where(mask, 0.0)
        reference = reference.where(mask, 0.0)
    return difference, reference


def relative_l2(
    prediction: Float[Tensor, "b q c"],
    target: Float[Tensor, "b q c"],
    mask: Bool[Tensor, "b q"] | None = None,
) -> Float[Tensor, " b"]:
    """‖prediction - target‖ / ‖target‖ for each solution; the paper reports its mean."""
    squared = squared_relative_l2(prediction, target, mask)
    # A gradient of zero where the error is zero: that of the root is infinite there.
    exact = squared == 0
    return squared.masked_fill(exact, 1.0).sqrt().where(~exact, squared)


def label_ranks(scores: Float[Tensor, "b k"], labels: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
    """The rank of the correct class, from 0; ties go to the lower class number."""
    if scores.shape[:1] != labels.shape:
        raise ValueError(
            f"labels must have the shape ({len(scores)},) to match scores, "
            f"got {tuple(labels.shape)}"
        )
    own = scores.gather(1, labels[:, None])
    earlier = torch.arange(scores.shape[1], device=scores.device) < labels[:, None]
    return ((scores > own) | ((scores == own) & earlier)).sum(dim=1)


def top_errors(
    scores: Float[Tensor, "b k"], labels: Int[Tensor, " b"], counts: tuple[int, ...] = (1, 5)
) -> Float[Tensor, "b e"]:
    """For each count: 1 where the right class is not among that many with the highest scores.

    With fewer classes than `count`, the right one always is. NaN where a score is not finite.
    """
    ranks = label_ranks(scores, labels)
    limits = torch.tensor(counts, device=scores.device)
    wrong = (ranks[:, None] >= limits).float()
    return wrong.where(scores.isfinite().all(dim=1, keepdim=True), torch.nan)


def in_words(measure: str) -> str:
    """The name of a measure, as files have it, for a reader: relative L2."""
    return measure.replace("_", " ").replace("l2", "L2")
