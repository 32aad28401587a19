"""The blend on a GPU from the anchors that matter: exact to rounding, without gradients.

Points, anchors, length scales and features enter; the blend leaves. Neighbouring points of the
input make a tile. A first kernel bounds the exponents t of `fst.kernels.blend` between an anchor
and the bounding box of each tile and lists, tile by tile, the anchors with

    highest t_j in the box ≥ max_k (lowest t_k in the box) - slack,   slack = log₂(M / tolerance).

Every other anchor weighs, at every point of the tile, less than `tolerance` / M of the heaviest:
all of them together are below the rounding of the features' dtype. The same bounds tell which tiles
may need their highest exponent subtracted. The forward kernel of the full blend then reads the
listed anchors only. They are listed one by one, because length scales vary so much from one anchor
to the next that among a few neighbours there is nearly always a wide one.

How much there is to win depends on the order of the points: `compact_order` sorts scattered ones.
"""

import math

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from fst.kernels.blend import FOLD, FORWARD_PRECISION, tile_sizes
from fst.kernels.forward_blend import (
    LEAST_LOGARITHM,
    AnchorLists,
    run_blend,
    with_far,
    with_ones,
)
from fst.kernels.operators import operator

# Tiles of the forward kernel by the size of a feature in bytes. Of wider features in half precision
# the registers hold no more than a smaller tile.
LOCAL_TILES = {2: tile_sizes(128, 32, 4, 2), 4: tile_sizes(32, 32, 4, 2)}
WIDE, WIDE_TILES = 192, tile_sizes(64, 32, 4, 3)
# What is left out weighs at most this part of a feature's rounding.
SHARE = 1 / 8
# All anchors are looked at together when a list is made.
MOST_ANCHORS = 4096
# Cells of one axis among which points are sorted, as a power of two.
CELL_BITS = {1: 12, 2: 6, 3: 5}
# Points count as sorted if so many in a row span, on average, at most this part of an axis.
IN_A_ROW, SORTED_SPAN = 64, 0.25


@triton.jit
def _span(points, Q, rows, anchors, inverse, R, columns, there, axis: tl.constexpr):
    """The squared distances along an axis from each anchor to the tile's box, least and most."""
    x = tl.load(points + axis * Q + rows)
    low, high = tl.min(x, 0), tl.max(x, 0)
    a = tl.load(anchors + axis * R + columns, mask=there, other=0.0)
    i = tl.load(inverse + axis * R + columns, mask=there, other=0.0)
    least = tl.maximum(tl.maximum(low - a, a - high), 0.0) * i
    most = tl.maximum(a - low, high - a) * i
    return least * least, most * most


@triton.jit
def list_kernel(
    points, anchors, inverse, chosen, counts, remote,
    Q, M, R, point_stride, slack,
    AXES: tl.constexpr, SPAN: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The anchors that matter to a tile of points, how many there are, and whether it is remote.

    M anchors are real; of the R in all, those beyond weigh nothing.
    """
    batch = tl.program_id(1).to(tl.int64)
    tile = batch * tl.num_programs(0) + tl.program_id(0)
    points += batch * point_stride
    anchors += batch * R * AXES
    inverse += batch * R * AXES
    chosen += tile * R
    rows = tl.minimum(tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q), Q - 1)
    columns = tl.arange(0, SPAN)
    there = columns < M
    least, most = _span(points, Q, rows, anchors, inverse, R, columns, there, 0)
    if AXES > 1:
        more = _span(points, Q, rows, anchors, inverse, R, columns, there, 1)
        least, most = least + more[0], most + more[1]
    if AXES > 2:
        more = _span(points, Q, rows, anchors, inverse, R, columns, there, 2)
        least, most = least + more[0], most + more[1]
    bound = tl.min(tl.where(there, most, float("inf")), 0)
    # So that an anchor without a number, of a model that has diverged, is kept and seen.
    negligible = least > bound + slack
    keep = (there & ~negligible).to(tl.int32)
    tl.store(chosen + tl.cumsum(keep, 0) - 1, columns, mask=keep > 0)
    count = tl.sum(keep, 0)
    tl.store(counts + tile, count)
    # At every point the weights add up to 2^-bound or more.
    tl.store(remote + tile, (bound > -LEAST_LOGARITHM).to(tl.int32))
    # A list ends with a whole block.
    rest = count + tl.arange(0, BLOCK_M)
    tl.store(chosen + rest, M, mask=rest < tl.cdiv(count, BLOCK_M) * BLOCK_M)


def anchor_lists(
    points: Float[Tensor, "#b s q"],
    anchors: Float[Tensor, "b s r"],
    inverse: Float[Tensor, "b s r"],
    count: int,
    tolerance: float,
    tiles: dict[str, int],
) -> AnchorLists:
    """For each tile of points those of `count` anchors that matter to it."""
    (batch, axes, rows), queries = anchors.shape, points.shape[2]
    number = triton.cdiv(queries, tiles["BLOCK_Q"])
    chosen = anchors.new_empty(batch, number, rows, dtype=torch.int32)
    counts, remote = (anchors.new_empty(batch, number, dtype=torch.int32) for _ in range(2))
    list_kernel[(number, batch)](
        points, anchors, inverse, chosen, counts, remote,
        queries, count, rows, 0 if points.shape[0] == 1 else axes * queries,
        math.log2(count / tolerance),
        AXES=axes, SPAN=triton.next_power_of_2(count),
        BLOCK_Q=tiles["BLOCK_Q"], BLOCK_M=tiles["BLOCK_M"], num_warps=4,
    )  # fmt: skip
    return AnchorLists(chosen, counts, remote)


def _tiles(features: Tensor, channels: int) -> dict[str, int]:
    size = features.element_size()
    return WIDE_TILES if size == 2 and channels >= WIDE else LOCAL_TILES[size]


@operator("fst::rbf_local_blend")
def blend_locally(
    points: Tensor, anchors: Tensor, inverse: Tensor, features: Tensor, count: int, channels: int
) -> Tensor:
    """The blend (b q d) of those of `count` anchors that matter; what weighs nothing follows them.

    The features come from `with_ones`.
    """
    tiles = _tiles(features, channels)
    tolerance = SHARE * torch.finfo(features.dtype).eps
    lists = anchor_lists(points, anchors, inverse, count, tolerance, tiles)
    return run_blend(
        points, anchors, inverse, features, channels, anchors.shape[2], tiles, FORWARD_PRECISION,
        lists,
    )[0]  # fmt: skip


@blend_locally.register_fake
def _(
    points: Tensor, anchors: Tensor, inverse: Tensor, features: Tensor, count: int, channels: int
) -> Tensor:
    return features.new_empty(anchors.shape[0], points.shape[2], channels)


def local_blend(
    points: Float[Tensor, "#b q s"],
    anchors: Float[Tensor, "b m s"],
    length_scales: Float[Tensor, "b m s"],
    features: Float[Tensor, "b m d"],
) -> Float[Tensor, "b q d"]:
    """The full blend to rounding, in the features' dtype, from the anchors that matter."""
    count, channels = features.shape[1:]
    # At least one more, to fill up lists with, and a whole number of blocks.
    more = 1 + -(count + 1) % _tiles(features, channels)["BLOCK_M"]
    inverse = FOLD / length_scales.float()
    places = points.float().transpose(1, 2).contiguous()
    far = with_far(anchors.float().transpose(1, 2), inverse.transpose(1, 2), more)
    return blend_locally(places, *far, with_ones(features, more), count, channels)


def scattered(points: Float[Tensor, "b q s"]) -> bool:
    """Whether neighbours in the order of points of the unit box are far from each other.

    This looks at the numbers, so it waits for the GPU.
    """
    if points.shape[1] < 2 * IN_A_ROW:
        return False
    whole = points.shape[1] // IN_A_ROW * IN_A_ROW
    rows = points[:, :whole].unflatten(1, (-1, IN_A_ROW))
    return bool((rows.amax(dim=2) - rows.amin(dim=2)).mean() > SORTED_SPAN)


def compact_order(points: Float[Tensor, "b q s"]) -> Int[Tensor, "b q"]:
    """An order in which points of the unit box come in compact tiles.

    They are sorted into the cells of a grid, which follow each other along a curve whose
    neighbours are neighbours (the bits of the axes interlaced).
    """
    axes = points.shape[2]
    bits = CELL_BITS[axes]
    cells = (points * 2**bits).to(torch.int16).clamp(0, 2**bits - 1)
    place = torch.zeros_like(cells[..., 0])
    for bit in range(bits):
        for axis in range(axes):
            place |= ((cells[..., axis] >> bit) & 1) << (bit * axes + axis)
    return place.argsort(dim=1)
