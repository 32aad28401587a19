"""Which points of a stored grid are observed, supervised and tested (paper, Appendix B).

A grid's axis of N points has the indices 0..N−1 and the coordinates index / (N−1), so every grid
lies in the unit box. A smaller grid keeps round(linspace(0, N−1, n)) of each axis.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def subset_indices(size: int, count: int) -> Int[Tensor, " count"]:
    """`count` of the `size` indices of an axis, as evenly spaced as whole numbers allow."""
    if not 1 <= count <= size:
        raise ValueError(f"count must lie between 1 and the axis' size {size}, got {count}")
    return torch.linspace(0, size - 1, count, dtype=torch.float64).round().long()


def index_product(axes: tuple[Int[Tensor, " _"], ...]) -> Int[Tensor, "q s"]:
    """All combinations of the axes' indices, the last axis running fastest."""
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)


def index_coordinates(indices: Int[Tensor, "q s"], grid: tuple[int, ...]) -> Float[Tensor, "q s"]:
    """index / (N−1) on each axis, float32. Divided in float64, so that rounding happens once."""
    last = torch.tensor(grid, dtype=torch.float64, device=indices.device) - 1
    return (indices / last.clamp(min=1)).float()


def boundary_observation_indices(times: int, points: int) -> Int[Tensor, "n 2"]:
    """Where Burgers is observed, as (time, cell): all of t = 0, then both end cells of each time.

    For the paper's 201 × 1,024 grid these are 1,024 + 2·200 = 1,424 places.
    """
    initial = index_product((torch.zeros(1, dtype=torch.long), torch.arange(points)))
    ends = torch.tensor([0, points - 1])
    return torch.cat([initial, index_product((torch.arange(1, times), ends))])
