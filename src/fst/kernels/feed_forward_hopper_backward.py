"""The backward kernel of the pointwise MLPs for Hopper: see `feed_forward_hopper`.

Two groups of warps run apart here: there is no barrier between them, so one computes GELU while the
other multiplies. Each computes its tokens' hidden layer again, tile by tile. That layer and the
gradient of its argument leave through small staging tiles in shared memory while the next product
runs. Channels come in the two tiles of the packed weights.
"""

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fst.kernels.feed_forward_packing import tile_widths
from fst.kernels.gluon_parts import (
    ROWS,
    TILE,
    barrier,
    barriers,
    copy_in,
    copy_out,
    copy_tokens,
    described,
    end_barriers,
    gelu_and_slope,
    load_place,
    normalise,
    of_group,
    token_tiles,
    weight_tiles,
)
from fst.kernels.launching import launch_kernel
from fst.kernels.tiles import tiles_in


class Tiles(NamedTuple):
    """Hidden units of a tile of weights, and how many tiles the ring holds."""

    hidden: int
    stages: int


# By the channels of the second tile: what fits into shared memory and spills no register.
BACKWARD = {64: Tiles(64, 2), 128: Tiles(32, 2)}
# Registers a thread of the second group may have; the first has as many.
REGISTERS = 256


@gluon.jit
def _fetch(weights, ring, ready, i, D1: gl.constexpr, HID: gl.constexpr, STAGES: gl.constexpr):
    """Hidden units of tile i of both weights into their place in the ring."""
    stage = i % STAGES
    bar = ready.index(stage)
    mbarrier.expect(bar, 2 * HID * (TILE + D1) * 2)
    copy_in(weights[0], [i * HID, 0], bar, ring[0].index(stage))
    copy_in(weights[1], [i * HID, TILE], bar, ring[1].index(stage))
    copy_in(weights[2], [i * HID, 0], bar, ring[2].index(stage))
    copy_in(weights[3], [i * HID, TILE], bar, ring[3].index(stage))


@gluon.jit
def _column_sums(own, sums, D: gl.constexpr, FIRST: gl.constexpr, WIDE: gl.constexpr):
    # Every warp has whole columns: their sums need no shared memory, of which nothing is left.
    L: gl.constexpr = gl.BlockedLayout([1, 2], [256 // WIDE, WIDE // 8], [1, 4], [1, 0])
    c = FIRST + gl.arange(0, WIDE, layout=gl.SliceLayout(0, L))
    gl.store(sums + c, gl.sum(own.load(L).to(gl.float32), 0), mask=c < D)


@gluon.jit
def _normed(x, rows, T, mean, scale, D: gl.constexpr, FIRST: gl.constexpr, WIDE: gl.constexpr):
    """Normalised tokens in float32, as the sums lie."""
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    r = rows + gl.arange(0, ROWS, layout=gl.SliceLayout(1, M))
    c = FIRST + gl.arange(0, WIDE, layout=gl.SliceLayout(0, M))
    there = (r < T)[:, None] & (c < D)[None, :]
    f = gl.load(x + r[:, None] * D + c[None, :], mask=there, other=0.0).to(gl.float32)
    return (f - mean[:, None]) * scale[:, None]


@gluon.jit
def _backward_group(
    x, tokens, place, weights, grads, targets, sums, ring, own, given, staged,
    ready, empty, arrived, T, P, eps,
    D: gl.constexpr, D1: gl.constexpr, H: gl.constexpr, PLACE: gl.constexpr,
    TILES: gl.constexpr, HID: gl.constexpr, STAGES: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    MH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HID, 16])
    M0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    M1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D1, 16])
    A0: gl.constexpr = gl.DotOperandLayout(0, M0, 2)
    A1: gl.constexpr = gl.DotOperandLayout(0, M1, 2)
    R0: gl.constexpr = gl.SliceLayout(1, M0)
    R1: gl.constexpr = gl.SliceLayout(1, M1)
    rows = gl.program_id(0) * (2 * ROWS) + G * ROWS
    own0, own1 = of_group(own, 0, G)
    dy0, dy1 = of_group(given, 0, G)
    hidden = staged[0].index(G)
    change = staged[1].index(G)
    copy_tokens(grads, rows, arrived.index(G), D1, 0, (dy0, dy1))
    if G == 0:
        for i in gl.static_range(STAGES):
            _fetch(weights, ring, ready, i, D1, HID, STAGES)
    if PLACE:
        copy_tokens(tokens, rows, arrived.index(2 + G), D1, 0, (own0, own1))
        mbarrier.wait(arrived.index(2 + G), 0)
    else:
        mean, scale = normalise(x, rows, T, eps, D, D1, 0, (own0, own1))
        copy_out(targets[4], [rows, 0], own0)
        copy_out(targets[5], [rows, TILE], own1)
        mean = gl.convert_layout(mean, R0)
        scale = gl.convert_layout(scale, R0)
    mbarrier.wait(arrived.index(G), 0)
    sums += (gl.program_id(0) * 2 + G) * D
    _column_sums(dy0, sums, D, 0, TILE)
    _column_sums(dy1, sums, D, TILE, D1)
    d0 = gl.zeros((ROWS, TILE), gl.float32, M0)
    d1 = gl.zeros((ROWS, D1), gl.float32, M1)
    none = gl.zeros((ROWS, HID), gl.float32, MH)
    for i in range(TILES):
        stage = i % STAGES
        if PLACE:
            spot = load_place(place, rows, T, P, i, H, HID)
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        w0 = ring[0].index(stage)
        w1 = ring[1].index(stage)
        v0 = ring[2].index(stage)
        v1 = ring[3].index(stage)
        pre = warpgroup_mma(own0, w0.permute((1, 0)), none, use_acc=False, is_async=True)
        pre = warpgroup_mma(own1, w1.permute((1, 0)), pre, is_async=True)
        dh = warpgroup_mma(dy0, v0.permute((1, 0)), none, use_acc=False, is_async=True)
        dh = warpgroup_mma(dy1, v1.permute((1, 0)), dh, is_async=True)
        pre = warpgroup_mma_wait(2, deps=[pre])
        if PLACE:
            pre += spot.to(gl.float32)
        act, slope = gelu_and_slope(pre)
        tma.store_wait(0)  # the staging tiles have been read
        barrier()
        # Stored here, before the wait, so that GELU runs under the product that gives dh.
        hidden.store(act.to(own0.dtype))
        dh, slope = warpgroup_mma_wait(0, deps=[dh, slope])
        back = (dh * slope).to(own0.dtype)
        a0 = gl.convert_layout(back, A0)
        a1 = gl.convert_layout(back, A1)
        t0 = warpgroup_mma(a0, w0, d0, is_async=True)
        t1 = warpgroup_mma(a1, w1, d1, is_async=True)
        change.store(back)
        fence_async_shared()
        barrier()
        copy_out(targets[0], [rows, i * HID], hidden)
        copy_out(targets[1], [rows, i * HID], change)
        d0, d1, a0, a1 = warpgroup_mma_wait(0, deps=[t0, t1, a0, a1])
        mbarrier.arrive(empty.index(stage), count=1)
        if G == 0:  # noqa: SIM102 (known when compiled, the next is not)
            if i + STAGES < TILES:
                mbarrier.wait(empty.index(stage), (i // STAGES) & 1)
                _fetch(weights, ring, ready, i + STAGES, D1, HID, STAGES)
    if not PLACE:
        c1 = TILE + gl.arange(0, D1, layout=gl.SliceLayout(0, M1))
        d1 = gl.where((c1 < D)[None, :], d1, 0.0)
        mean1 = gl.convert_layout(mean, R1)
        scale1 = gl.convert_layout(scale, R1)
        n0 = _normed(x, rows, T, mean, scale, D, 0, TILE)
        n1 = _normed(x, rows, T, mean1, scale1, D, TILE, D1)
        level = (gl.sum(d0, 1) + gl.convert_layout(gl.sum(d1, 1), R0)) / D
        along = (gl.sum(d0 * n0, 1) + gl.convert_layout(gl.sum(d1 * n1, 1), R0)) / D
        level1 = gl.convert_layout(level, R1)
        along1 = gl.convert_layout(along, R1)
        d0 = (d0 - level[:, None] - n0 * along[:, None]) * scale[:, None]
        d1 = (d1 - level1[:, None] - n1 * along1[:, None]) * scale1[:, None]
        d0 += dy0.load(M0).to(gl.float32)
        d1 += dy1.load(M1).to(gl.float32)
    barrier()
    dy0.store(d0.to(own0.dtype))
    dy1.store(d1.to(own0.dtype))
    fence_async_shared()
    barrier()
    copy_out(targets[2], [rows, 0], dy0)
    copy_out(targets[3], [rows, TILE], dy1)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["T", "P"])
def feed_forward_backward_gluon_kernel(
    x, x0, x1, place, w1a, w1b, w2a, w2b, dy0, dy1, hidden, change, dx0, dx1, n0, n1, sums,
    T, P, eps,
    D: gl.constexpr, D1: gl.constexpr, H: gl.constexpr, PLACE: gl.constexpr,
    TILES: gl.constexpr, HID: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = w1a.dtype
    tokens = (x0, x1)
    weights = (w1a, w1b, w2a, w2b)
    grads = (dy0, dy1)
    targets = (hidden, change, dx0, dx1, n0, n1)
    ring = weight_tiles(weights, D1, 0, HID, STAGES)
    # The tokens have the gradients' tiles; without a place they are not described.
    own = token_tiles(grads, D1, 0, 2)
    given = token_tiles(grads, D1, 0, 2)
    staged = (
        gl.allocate_shared_memory(dtype, [2, ROWS, HID], hidden.layout),
        gl.allocate_shared_memory(dtype, [2, ROWS, HID], change.layout),
    )
    ready = barriers(STAGES, 1)
    empty = barriers(STAGES, 2)
    arrived = barriers(4, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_backward_group, (x, tokens, place, weights, grads, targets, sums, ring, own, given,
                               staged, ready, empty, arrived, T, P, eps,
                               D, D1, H, PLACE, TILES, HID, STAGES, 0)),
            (_backward_group, (x, tokens, place, weights, grads, targets, sums, ring, own, given,
                               staged, ready, empty, arrived, T, P, eps,
                               D, D1, H, PLACE, TILES, HID, STAGES, 1)),
        ],
        [4],
        [REGISTERS],
    )  # fmt: skip
    end_barriers(ready)
    end_barriers(empty)
    end_barriers(arrived)


def backward(
    dy: Tensor, x: Tensor, place: Tensor | None, w1: Tensor, w2: Tensor, eps: float,
    dx: Tensor, normed: Tensor | None, hidden: Tensor, change: Tensor, sums: Tensor,
) -> None:  # fmt: skip
    """Fills dx (t d), normed (t d + EXTRA), hidden and change (t h), sums (t / 64 d)."""
    first, second = tile_widths(x.shape[1])
    tiles, rows = BACKWARD[second], ROWS.value
    count = w1.shape[0] // tiles.hidden
    spots = x if place is None else place
    # Tokens are copied as they are, or normalised, and then copied out.
    tokens = (None, None) if place is None else described(x, rows, first, second)
    ones = (None, None) if normed is None else described(normed, rows, first, second)
    launch_kernel(
        feed_forward_backward_gluon_kernel, (tiles_in(x.shape[0], 2 * rows),),
        x, *tokens, spots,
        *described(w1, tiles.hidden, first, second), *described(w2, tiles.hidden, first, second),
        *described(dy, rows, first, second),
        *described(hidden, rows, tiles.hidden), *described(change, rows, tiles.hidden),
        *described(dx, rows, first, second), *ones, sums, x.shape[0], spots.shape[0], eps,
        D=x.shape[1], D1=second, H=spots.shape[1], PLACE=place is not None,
        TILES=count, HID=tiles.hidden, STAGES=min(tiles.stages, count),
        REGISTERS=REGISTERS, num_warps=4,
    )  # fmt: skip
