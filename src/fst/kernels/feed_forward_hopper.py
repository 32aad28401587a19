"""The kernels of `feed_forward_kernels` for Hopper: two groups of warps that run apart (Gluon).

The same equations, packed weights and results, in bfloat16 and for widths of 128 to 248. Each group
of four warps owns 64 tokens. The weights come through a ring of tiles which both groups read; there
is no barrier between the groups, so one computes GELU while the other multiplies. Within a group,
the second product of a tile runs under the GELU of the next. The first product's operand is the
normalised tokens, rounded as a separate LayerNorm's would be, then (1, 0, 1): these pick up both
parts of c, and nothing of u, from the columns behind the packed weights' channels.

Gluon is young, and its names change: `mlp` does without this module where it cannot be
imported, or where a kernel cannot be compiled.
"""

from typing import NamedTuple

import triton
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fst.kernels.feed_forward_packing import tile_widths

ROWS = gl.constexpr(64)  # tokens of a group
TILE = gl.constexpr(128)  # channels of the first tile

# Triton 3.6 has other names for these than later versions.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _tail(a):
    """Φ(-a), as in `feed_forward_kernels`."""
    p = a * -0.0005002620746381581 + 0.007282395847141743
    p = p * a - 0.05234328657388687
    p = p * a - 0.4594140350818634
    p = p * a - 1.1510521173477173
    p = p * a - 1.0000019073486328
    return _exp2(p)


@gluon.jit
def _gelu(x):
    a = gl.abs(x)
    return gl.maximum(x, 0.0) - a * _tail(a)


@gluon.jit
def _gelu_and_slope(x):
    a = gl.abs(x)
    tail = _tail(a)
    s = tail - a * _exp2(x * x * -0.7213475204444817 - 1.3257480647361593)
    return gl.maximum(x, 0.0) - a * tail, gl.where(x > 0.0, 1.0 - s, s)


@gluon.jit
def _fetch(weights, ring, ready, i, D1: gl.constexpr, HID: gl.constexpr, STAGES: gl.constexpr):
    """Hidden units of tile i of both weights into their place in the ring."""
    stage = i % STAGES
    bar = ready.index(stage)
    mbarrier.expect(bar, 2 * HID * (TILE + D1) * 2)
    _copy_in(weights[0], [i * HID, 0], bar, ring[0].index(stage))
    _copy_in(weights[1], [i * HID, TILE], bar, ring[1].index(stage))
    _copy_in(weights[2], [i * HID, 0], bar, ring[2].index(stage))
    _copy_in(weights[3], [i * HID, TILE], bar, ring[3].index(stage))


@gluon.jit
def _normalise(x, rows, T, eps, D: gl.constexpr, D1: gl.constexpr, own0, own1):
    """The normalised tokens into shared memory; mean and reciprocal deviation."""
    L0: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    L1: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D1, D1 // 8], [4, 1], [1, 0])
    r0 = rows + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L0))
    r1 = rows + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L1))
    c0 = gl.arange(0, TILE, layout=gl.SliceLayout(0, L0))
    c1 = TILE + gl.arange(0, D1, layout=gl.SliceLayout(0, L1))
    in1 = (c1 < D)[None, :]
    f0 = gl.load(x + r0[:, None] * D + c0[None, :], mask=(r0 < T)[:, None], other=0.0)
    f1 = gl.load(x + r1[:, None] * D + c1[None, :], mask=(r1 < T)[:, None] & in1, other=0.0)
    f0 = f0.to(gl.float32)
    f1 = f1.to(gl.float32)
    sum1 = gl.convert_layout(gl.sum(f1, 1), gl.SliceLayout(1, L0))
    mean0 = (gl.sum(f0, 1) + sum1) / D
    mean1 = gl.convert_layout(mean0, gl.SliceLayout(1, L1))
    f0 = f0 - mean0[:, None]
    f1 = gl.where(in1, f1 - mean1[:, None], 0.0)
    square1 = gl.convert_layout(gl.sum(f1 * f1, 1), gl.SliceLayout(1, L0))
    scale0 = 1.0 / gl.sqrt((gl.sum(f0 * f0, 1) + square1) / D + eps)
    scale1 = gl.convert_layout(scale0, gl.SliceLayout(1, L1))
    ones = gl.where((c1 == D) | (c1 == D + 2), 1.0, 0.0)[None, :]
    own0.store((f0 * scale0[:, None]).to(own0.dtype))
    own1.store((f1 * scale1[:, None] + ones).to(own1.dtype))
    fence_async_shared()
    _barrier()
    return mean0, scale0


@gluon.jit
def _copy_tokens(tokens, rows, bar, D1: gl.constexpr, own0, own1):
    """Tokens as they are into shared memory; `bar` tells when they are there."""
    mbarrier.expect(bar, ROWS * (TILE + D1) * 2)
    _copy_in(tokens[0], [rows, 0], bar, own0)
    _copy_in(tokens[1], [rows, TILE], bar, own1)


@gluon.jit
def _place(place, rows, T, P, i, H: gl.constexpr, HID: gl.constexpr):
    """Tile i of the rows' own addends, as the product lies; token t takes row t mod P."""
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HID, 16])
    r = rows + gl.arange(0, ROWS, layout=gl.SliceLayout(1, M))
    c = i * HID + gl.arange(0, HID, layout=gl.SliceLayout(0, M))
    mask = (r < T)[:, None] & (c < H)[None, :]
    return gl.load(place + (r % P)[:, None] * H + c[None, :], mask=mask, other=0.0)


@gluon.jit
def _finish(
    sums, x, b2, rows, T, own, target,
    RESIDUAL: gl.constexpr, D: gl.constexpr, FIRST: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Adds bias and tokens, and writes through the group's own part of shared memory."""
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    r = rows + gl.arange(0, ROWS, layout=gl.SliceLayout(1, M))
    c = FIRST + gl.arange(0, WIDE, layout=gl.SliceLayout(0, M))
    there = (r < T)[:, None] & (c < D)[None, :]
    sums += gl.load(b2 + c, mask=c < D, other=0.0)[None, :]
    if RESIDUAL:
        sums += gl.load(x + r[:, None] * D + c[None, :], mask=there, other=0.0).to(gl.float32)
    own.store(sums.to(own.dtype))
    fence_async_shared()
    _barrier()
    _copy_out(target, [rows, FIRST], own)


@gluon.jit
def _forward_group(
    x, tokens, place, weights, targets, b2, ring, own, ready, empty, arrived, T, P, eps,
    D: gl.constexpr, D1: gl.constexpr, H: gl.constexpr, PLACE: gl.constexpr,
    TILES: gl.constexpr, HID: gl.constexpr, STAGES: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    MH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HID, 16])
    M0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    M1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D1, 16])
    A0: gl.constexpr = gl.DotOperandLayout(0, M0, 2)
    A1: gl.constexpr = gl.DotOperandLayout(0, M1, 2)
    if G == 0:
        for i in gl.static_range(STAGES):
            _fetch(weights, ring, ready, i, D1, HID, STAGES)
    rows = gl.program_id(0) * (2 * ROWS) + G * ROWS
    own0 = own[0].index(G)
    own1 = own[1].index(G)
    if PLACE:
        _copy_tokens(tokens, rows, arrived.index(G), D1, own0, own1)
        spot = _place(place, rows, T, P, 0, H, HID)
        mbarrier.wait(arrived.index(G), 0)
    else:
        _normalise(x, rows, T, eps, D, D1, own0, own1)
    s0 = gl.zeros((ROWS, TILE), gl.float32, M0)
    s1 = gl.zeros((ROWS, D1), gl.float32, M1)
    none = gl.zeros((ROWS, HID), gl.float32, MH)
    mbarrier.wait(ready.index(0), 0)
    w0 = ring[0].index(0).permute((1, 0))
    w1 = ring[1].index(0).permute((1, 0))
    pre = warpgroup_mma(own0, w0, none, use_acc=False, is_async=True)
    pre = warpgroup_mma(own1, w1, pre, is_async=True)
    pre = warpgroup_mma_wait(0, deps=[pre])
    if PLACE:
        pre += spot.to(gl.float32)
    h = _gelu(pre).to(own0.dtype)
    for i in range(1, TILES):
        stage = i % STAGES
        last = (i - 1) % STAGES
        if PLACE:
            spot = _place(place, rows, T, P, i, H, HID)
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        w0 = ring[0].index(stage).permute((1, 0))
        w1 = ring[1].index(stage).permute((1, 0))
        pre = warpgroup_mma(own0, w0, none, use_acc=False, is_async=True)
        pre = warpgroup_mma(own1, w1, pre, is_async=True)
        a0 = gl.convert_layout(h, A0)
        a1 = gl.convert_layout(h, A1)
        t0 = warpgroup_mma(a0, ring[2].index(last), s0, is_async=True)
        t1 = warpgroup_mma(a1, ring[3].index(last), s1, is_async=True)
        pre = warpgroup_mma_wait(2, deps=[pre])
        if PLACE:
            pre += spot.to(gl.float32)
        act = _gelu(pre)
        # a0 and a1 are named so that nobody takes their registers before, and act so that GELU is
        # not put behind the wait.
        s0, s1, a0, a1, act = warpgroup_mma_wait(0, deps=[t0, t1, a0, a1, act])
        h = act.to(own0.dtype)
        mbarrier.arrive(empty.index(last), count=1)
        if G == 0:  # noqa: SIM102 (known when compiled, the next is not)
            if i - 1 + STAGES < TILES:  # tile i - 1 is free once both groups have left it
                mbarrier.wait(empty.index(last), ((i - 1) // STAGES) & 1)
                _fetch(weights, ring, ready, i - 1 + STAGES, D1, HID, STAGES)
    a0 = gl.convert_layout(h, A0)
    a1 = gl.convert_layout(h, A1)
    t0 = warpgroup_mma(a0, ring[2].index((TILES - 1) % STAGES), s0, is_async=True)
    t1 = warpgroup_mma(a1, ring[3].index((TILES - 1) % STAGES), s1, is_async=True)
    s0, s1, a0, a1 = warpgroup_mma_wait(0, deps=[t0, t1, a0, a1])
    _finish(s0, x, b2, rows, T, own0, targets[0], not PLACE, D, 0, TILE)
    _finish(s1, x, b2, rows, T, own1, targets[1], not PLACE, D, TILE, D1)
    tma.store_wait(0)


@gluon.jit
def _ring(weights, D1: gl.constexpr, HID: gl.constexpr, STAGES: gl.constexpr):
    """Places for so many tiles of both weights."""
    dtype: gl.constexpr = weights[0].dtype
    return (
        gl.allocate_shared_memory(dtype, [STAGES, HID, TILE], weights[0].layout),
        gl.allocate_shared_memory(dtype, [STAGES, HID, D1], weights[1].layout),
        gl.allocate_shared_memory(dtype, [STAGES, HID, TILE], weights[2].layout),
        gl.allocate_shared_memory(dtype, [STAGES, HID, D1], weights[3].layout),
    )


@gluon.jit
def _pair(like, D1: gl.constexpr):
    """Both tiles of the tokens of both groups."""
    dtype: gl.constexpr = like[0].dtype
    return (
        gl.allocate_shared_memory(dtype, [2, ROWS, TILE], like[0].layout),
        gl.allocate_shared_memory(dtype, [2, ROWS, D1], like[1].layout),
    )


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit(do_not_specialize=["T", "P"])
def feed_forward_gluon_kernel(
    x, x0, x1, place, w1a, w1b, w2a, w2b, y0, y1, b2, T, P, eps,
    D: gl.constexpr, D1: gl.constexpr, H: gl.constexpr, PLACE: gl.constexpr,
    TILES: gl.constexpr, HID: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    tokens = (x0, x1)
    weights = (w1a, w1b, w2a, w2b)
    targets = (y0, y1)
    ring = _ring(weights, D1, HID, STAGES)
    own = _pair(targets, D1)
    ready = _barriers(STAGES, 1)
    empty = _barriers(STAGES, 2)
    arrived = _barriers(2, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_forward_group, (x, tokens, place, weights, targets, b2, ring, own, ready, empty,
                              arrived, T, P, eps, D, D1, H, PLACE, TILES, HID, STAGES, 0)),
            (_forward_group, (x, tokens, place, weights, targets, b2, ring, own, ready, empty,
                              arrived, T, P, eps, D, D1, H, PLACE, TILES, HID, STAGES, 1)),
        ],
        [4],
        [REGISTERS],
    )  # fmt: skip


class Tiles(NamedTuple):
    """Hidden units of a tile of weights, and how many tiles the ring holds."""

    hidden: int
    stages: int


# By the channels of the second tile: what fits into shared memory and spills no register.
FORWARD = {64: Tiles(64, 3), 128: Tiles(64, 2)}
# Registers a thread of the second group may have; the first has as many.
REGISTERS = 256


def described(tensor: Tensor, rows: int, *widths: int) -> list[TensorDescriptor]:
    """Tiles of a dense matrix, one shape after the other."""
    shapes = [[rows, width] for width in widths]
    layouts = [gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16) for shape in shapes]
    pairs = zip(shapes, layouts, strict=True)
    return [TensorDescriptor.from_tensor(tensor, shape, layout) for shape, layout in pairs]


def forward(
    x: Tensor, place: Tensor | None, w1: Tensor, w2: Tensor, b2: Tensor, eps: float, y: Tensor
) -> None:
    """Fills y (t d)."""
    first, second = tile_widths(x.shape[1])
    tiles = FORWARD[second]
    count = len(w1) // tiles.hidden
    spots = x if place is None else place
    feed_forward_gluon_kernel[(triton.cdiv(len(x), 2 * ROWS.value),)](
        x, *described(x, ROWS.value, first, second), spots,
        *described(w1, tiles.hidden, first, second), *described(w2, tiles.hidden, first, second),
        *described(y, ROWS.value, first, second), b2, len(x), len(spots), eps,
        D=x.shape[1], D1=second, H=spots.shape[1], PLACE=place is not None,
        TILES=count, HID=tiles.hidden, STAGES=min(tiles.stages, count),
        REGISTERS=REGISTERS, num_warps=4,
    )  # fmt: skip
