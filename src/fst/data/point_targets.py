"""What the relative error asks of a user's targets: not all zero, and channels of similar sizes.

Enters: targets of some samples of a point file. Leaves: an error or a warning where they would
spoil training or hide in its score. The relative error of a sample (paper, Equation 7) is
‖prediction − target‖ / ‖target‖, over all of its targets and all channels in their own units.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from fst.data.errors import DataError
from fst.data.images import listed
from fst.data.point_files import Label, Points

# ‖target‖² in float32, in which errors are measured, must leave room above for a first prediction
# and below for a small error; and a sample so much smaller than the typical one would overflow the
# first gradient.
LEAST_SQUARE, LARGEST_SQUARE = 1e-30, 1e34
LEAST_SHARE = 1e-16
# A channel so much smaller adds a hundredth to the squared relative error if it is not learned.
LARGEST_RATIO = 10.0
# A mean beyond so many standard deviations hides what varies.
LARGEST_OFFSET = 5.0


def undefined_rows(rows: Int[np.ndarray, " n"], queried: Points, typical: float = 0.0) -> list[int]:
    """Those rows whose ‖target‖² is out of the range in which errors can be measured.

    `typical` is the mean square of the targets that are learned together.
    """
    with np.errstate(over="ignore", under="ignore"):
        squares = np.einsum("pc,pc->p", queried.values, queried.values)
        norms = np.add.reduceat(squares, np.cumsum(queried.sizes) - queried.sizes)
    least = np.maximum(LEAST_SQUARE, LEAST_SHARE * typical * queried.sizes)
    unusable: list[int] = rows[~((norms >= least) & (norms <= LARGEST_SQUARE))].tolist()
    return unusable


def refuse_undefined(path: Path, rows: Sequence[int]) -> None:
    """Raise where there are rows whose relative error is undefined."""
    if rows:
        raise DataError(
            f"{path}: the relative error is undefined for targets that are all zero, or too small "
            f"or too large to be squared in float32 or beside the others, as they are in sample"
            f"{'s' if len(rows) > 1 else ''} {listed([str(row) for row in rows])}; leave such "
            "samples out, or measure the targets in another unit"
        )


def channel_squares(targets: Float[np.ndarray, "p c"]) -> Float[np.ndarray, " c"]:
    """The sum of squares of each channel, in float64 and without a float64 copy."""
    squares: np.ndarray = np.einsum("pc,pc->c", targets, targets, dtype=np.float64)
    return squares


def warn_of_unequal_channels(
    path: Path, labels: Sequence[Label], squares: Float[np.ndarray, " c"], points: int
) -> None:
    """Warn where the channels' root mean squares differ so much that the smallest hardly counts."""
    sizes = np.sqrt(squares / points)
    filled = sizes[sizes > 0]  # a channel of zeros cannot be brought to another size
    if len(filled) and filled.max() > LARGEST_RATIO * filled.min():
        named = listed(
            [f"{label.name}: {size:.3g}" for label, size in zip(labels, sizes, strict=True)]
        )
        warnings.warn(
            f"{path}: the target channels' root mean squares differ by a factor of "
            f"{filled.max() / filled.min():.3g} ({named}); loss and score are one relative error "
            "over all channels, in which the small ones count little: bring them to similar "
            "sizes",
            stacklevel=3,
        )


def offsets(targets: Float[np.ndarray, "p c"]) -> Float[np.ndarray, " c"]:
    """|mean| / standard deviation of each channel; 0 for one that is constant."""
    wide = targets.astype(np.float64)
    mean, std = np.abs(wide.mean(axis=0)), wide.std(axis=0)
    return np.where(std > 0, mean / np.where(std > 0, std, 1.0), 0.0)


def warn_of_large_means(
    path: Path, labels: Sequence[Label], targets: Float[np.ndarray, "p c"]
) -> None:
    """Warn where a constant would already have a small relative error."""
    ratios = offsets(targets)
    large = [n for n, ratio in enumerate(ratios) if ratio > LARGEST_OFFSET]
    if large:
        wide = targets.astype(np.float64)
        named = listed(
            [f"{labels[n].name}: {wide[:, n].mean():.4g} ± {wide[:, n].std():.2g}" for n in large]
        )
        warnings.warn(
            f"{path}: the mean of the targets is far larger than their standard deviation "
            f"({named}), so that a constant already has a relative error of about "
            f"{1 / ratios[large].min():.2g}; --training.objective.channels standardized measures "
            "in standard deviations instead",
            stacklevel=3,
        )
