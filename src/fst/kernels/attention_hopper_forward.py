"""`attention` for Hopper: no maximum is followed, and tensor cores add up the weights (Gluon).

The equation, operands and results of the Triton kernel. Two programs stay on every multiprocessor
and take one block of queries after another. In each, two groups of warps hold 64 queries each;
one more warp fills a ring of tiles of keys and values that both groups read, so that copies run
ahead even across blocks. The groups run apart: one makes exponentials while another multiplies.

A weight costs its exponential and little more:

- out_i = Σ_j w_ij v_j / Σ_j w_ij with w_ij = exp2(c q_i·k_j - r_i), whatever r_i: floats keep their
  precision at any size. So r_i comes from the maximum over the first tile alone, and nothing is
  scaled again later. In trained models later keys have had logits 93 above that maximum; bfloat16
  has room for 156 (`RANGES`). Only if a sum ends where weights may have left the range of their
  dtype, a group takes its block again and follows the maximum (`_once_more`).
- The units that make exponentials are the narrowest on the chip, so every fourth is made by a cubic
  (relative error 9e-5, against 2e-3 of the rounding that follows).
- Heads of 24 numbers leave room on chip: a column of ones beside the values gives Σ_j w_ij by the
  same product. It is zero beyond the last key, so no tile needs a mask. Heads of 32 numbers have
  their ones in a product of its own.

The order of every sum is fixed: results repeat to the last bit. Like `feed_forward_hopper`, this
module may fail where Gluon has changed: `attention` then does without it.
"""

import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fst.kernels.gluon_parts import (
    advance,
    barrier,
    barriers,
    copy_heads,
    described_heads,
    end_barriers,
    exp2,
)
from fst.kernels.hopper import processors
from fst.kernels.launching import launch_kernel
from fst.kernels.tiles import tiles_in

TILE = gl.constexpr(64)  # queries of a group, and keys of a tile
WIDE = gl.constexpr(32)  # numbers of a head on chip
ONES = gl.constexpr(8)  # columns beside the values, of which the first holds ones
GROUPS = gl.constexpr(2)  # groups of warps that hold queries
STAGES = gl.constexpr(8)  # tiles of keys and values in the ring
LAG = gl.constexpr(2)  # tiles between asking for values and putting ones beside them
# Registers of a thread: where the program begins, where queries are held and where tiles are
# fetched. With fewer, the compiler lets every product wait for the one before.
REGISTERS = 80
MIX_REGISTERS = gl.constexpr(104)
FETCH_REGISTERS = gl.constexpr(24)
PROGRAMS = 2  # on one multiprocessor

# How a tile of logits lies in a group's registers, the mixture, and sums that are made apart.
LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
MIXTURE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
TOTALS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))
# Numbers of each query.
QUERY = gl.constexpr(gl.SliceLayout(1, LOGITS.value))
MIXED_QUERY = gl.constexpr(gl.SliceLayout(1, MIXTURE.value))
# Left operands of the products.
TO_LOGITS = gl.constexpr(gl.DotOperandLayout(0, LOGITS.value, 2))
TO_MIXTURE = gl.constexpr(gl.DotOperandLayout(0, MIXTURE.value, 2))
# In shared memory: heads as they come, (1 row 1 number), and as operands; ones for each key.
HEADS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2))
LINES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
# What one warp puts beside values, and all warps put into the ones for each key.
BESIDE = gl.constexpr(gl.BlockedLayout([1, 8], [32, 1], [1, 1], [1, 0]))
SPREAD = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))

# How far the first tile's largest weight lies below one, as a power of two: so much more may later
# weights be above it. Sums of weights below the second number hold no weight that the dtype cannot,
# and leave room to multiply by values. bfloat16 has small numbers to spare: 2⁻¹²⁶ is far below what
# counts beside 2⁻⁶⁰.
RANGES = {torch.bfloat16: (60.0, 2.0**96), torch.float16: (0.0, 2.0**15)}


@gluon.jit
def _powers(s, c, r, a, b):
    """exp2(c s + r), one of four by a cubic; a = c / 252, b = 1/2 + r / 252.

    That one: y = min(max(a s + b, 0), 1) is the exponent on a scale from -126 to 126. Adding a
    large number rounds it, to an integer in the lowest bits of t; the cubic is for the rest f, and
    the integer is added to the exponent's bits.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .f32 y, t, u, f, p;
        .reg .b32 i, j;
        fma.rn.ftz.f32 y, $4, $8, $12;
        ex2.approx.ftz.f32 $0, y;
        fma.rn.ftz.f32 y, $5, $9, $13;
        ex2.approx.ftz.f32 $1, y;
        fma.rn.ftz.f32 y, $6, $10, $14;
        ex2.approx.ftz.f32 $2, y;
        fma.rn.ftz.sat.f32 y, $7, $19, $23;
        fma.rn.ftz.f32 t, y, 0f437C0000, 0f4B3FFF82;
        sub.rn.ftz.f32 u, 0f4B3FFF82, t;
        fma.rn.ftz.f32 f, y, 0f437C0000, u;
        fma.rn.ftz.f32 p, f, 0f3D61FBB0, 0f3E786F0E;
        fma.rn.ftz.f32 p, p, f, 0f3F31798D;
        fma.rn.ftz.f32 p, p, f, 0f3F7FFB49;
        mov.b32 i, t;
        mov.b32 j, p;
        mad.lo.s32 $3, i, 8388608, j;
        }
        """,
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [s, c, r, a, b], dtype=gl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _weights(s, c, r):
    return _powers(s, c, r[:, None], c / 252.0, r[:, None] / 252.0 + 0.5)


@gluon.jit
def _counts(M, N):
    """Blocks of queries and tiles of keys of one head."""
    return (M + GROUPS * TILE - 1) // (GROUPS * TILE), (N + TILE - 1) // TILE


@gluon.jit
def _place(item, blocks, H):
    """Batch entry, head and block of queries."""
    both = item // blocks
    return both // H, both % H, item % blocks


@gluon.jit
def _put_ones(values, there, ready, stage, turn, left, SIZE: gl.constexpr):
    """Ones beside the values of a tile, where `left` keys are left for it and those behind."""
    row = gl.arange(0, TILE, layout=gl.SliceLayout(1, BESIDE))
    column = gl.arange(0, ONES, layout=gl.SliceLayout(0, BESIDE))
    one = (row < left)[:, None] & (column == 0)[None, :]
    mbarrier.wait(there.index(stage), turn)
    beside = values.index(stage).slice(SIZE, ONES, dim=1)
    beside.store(gl.where(one, 1.0, 0.0).to(values.dtype))
    fence_async_shared()
    mbarrier.arrive(ready.index(stage), count=1)


@gluon.jit
def _fetch_warp(sources, asked, ring, bars, H, M, N, items, SIZE: gl.constexpr):
    """Copies queries for every group and tiles into the ring, and puts ones beside the values."""
    asked_ready, asked_free, there, ready, free = bars
    blocks, tiles = _counts(M, N)
    asked_turn = 1
    stage = 0
    turn = 1
    behind = 0  # the tile that gets its ones next, and the keys that are left for it
    behind_turn = 0
    left = N
    i = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, h, block = _place(item, blocks, H)
        for g in gl.static_range(GROUPS):
            mbarrier.wait(asked_free.index(g), asked_turn)
            mbarrier.expect(asked_ready.index(g), TILE * WIDE * 2)
            first = (block * GROUPS + g) * TILE
            copy_heads(sources[0], b, first, h, asked_ready.index(g), asked.index(g))
        asked_turn ^= 1
        for t in range(tiles):
            if SIZE < WIDE:  # noqa: SIM102 (this one is known when compiling)
                if i >= LAG:
                    _put_ones(ring[1], there, ready, behind, behind_turn, left, SIZE)
                    behind, behind_turn = advance(behind, behind_turn, STAGES)
                    left = gl.where(left > TILE, left - TILE, N)
            mbarrier.wait(free.index(stage), turn)
            mbarrier.expect(there.index(stage), 2 * TILE * WIDE * 2)
            for which in gl.static_range(2):
                target = ring[which].index(stage)
                copy_heads(sources[1 + which], b, t * TILE, h, there.index(stage), target)
            stage, turn = advance(stage, turn, STAGES)
            i += 1
    if SIZE < WIDE:
        for _ in range(gl.minimum(i, LAG)):
            _put_ones(ring[1], there, ready, behind, behind_turn, left, SIZE)
            behind, behind_turn = advance(behind, behind_turn, STAGES)
            left = gl.where(left > TILE, left - TILE, N)


@gluon.jit
def _mix(weights, values, ones, out, total, SIZE: gl.constexpr):
    """Begins to take a tile into the mixture and the sums."""
    out = warpgroup_mma(weights, values, out, is_async=True)
    if SIZE == WIDE:
        total = warpgroup_mma(weights, ones.permute((1, 0)), total, is_async=True)
    return out, total


@gluon.jit
def _over_all_keys(
    q, taken, ring, ones, come, free, stage, turn, tiles, c, below, SIZE: gl.constexpr
):
    """The reference (with its sign changed), the sums and the mixture of 64 queries.

    `taken` is told when the queries are in registers.
    """
    none = gl.zeros((TILE, TILE), gl.float32, LOGITS)
    mbarrier.wait(come.index(stage), turn)
    k = ring[0].index(stage).permute((1, 0))
    s = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    # Only now: a load may be under way until its value is used, and a copy would overtake it.
    fence_async_shared()
    barrier()
    mbarrier.arrive(taken, count=1)
    r = -gl.max(s, 1) * c - below
    w = _weights(s, c, r)
    weights = gl.convert_layout(w.to(q.dtype), TO_MIXTURE)
    out = gl.zeros((TILE, WIDE), gl.float32, MIXTURE)
    total = gl.zeros((TILE, ONES), gl.float32, TOTALS)
    for _ in range(1, tiles):
        before = stage
        stage, turn = advance(stage, turn, STAGES)
        mbarrier.wait(come.index(stage), turn)
        k = ring[0].index(stage).permute((1, 0))
        s = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
        out, total = _mix(weights, ring[1].index(before), ones.index(0), out, total, SIZE)
        s = warpgroup_mma_wait(1 if SIZE < WIDE else 2, deps=[s])
        w = _weights(s, c, r)
        # The weights are named so that nobody takes their registers before; w, so that it is not
        # made behind the wait.
        out, total, weights, w = warpgroup_mma_wait(0, deps=[out, total, weights, w])
        mbarrier.arrive(free.index(before), count=1)
        weights = gl.convert_layout(w.to(q.dtype), TO_MIXTURE)
    out, total = _mix(weights, ring[1].index(stage), ones.index(1), out, total, SIZE)
    out, total, weights = warpgroup_mma_wait(0, deps=[out, total, weights])
    mbarrier.arrive(free.index(stage), count=1)
    stage, turn = advance(stage, turn, STAGES)
    if SIZE < WIDE:
        column = gl.arange(0, WIDE, layout=gl.SliceLayout(0, MIXTURE))
        sums = gl.sum(gl.where((column == SIZE)[None, :], out, 0.0), 1)
    else:
        sums = gl.convert_layout(gl.max(total, 1), MIXED_QUERY)  # all columns are alike
    return gl.convert_layout(r, MIXED_QUERY), sums, out, stage, turn


@gluon.jit
def _once_more(q, sources, pair, bar, turn, b, h, N, c):
    """The same of the same queries, following the maximum; the group copies for itself."""
    highest = gl.full((TILE,), -float("inf"), gl.float32, QUERY)
    sums = gl.full((TILE,), 0.0, gl.float32, QUERY)
    out = gl.zeros((TILE, WIDE), gl.float32, MIXTURE)
    none = gl.zeros((TILE, TILE), gl.float32, LOGITS)
    for start in range(0, N, TILE):
        barrier()  # all have done with the last tile
        mbarrier.expect(bar, 2 * TILE * WIDE * 2)
        copy_heads(sources[1], b, start, h, bar, pair[0])
        copy_heads(sources[2], b, start, h, bar, pair[1])
        mbarrier.wait(bar, turn)
        turn ^= 1
        s = warpgroup_mma(q, pair[0].permute((1, 0)), none, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        key = start + gl.arange(0, TILE, layout=gl.SliceLayout(0, LOGITS))
        s = gl.where((key < N)[None, :], s, -float("inf"))
        now = gl.maximum(highest, gl.max(s, 1) * c)
        w = exp2(s * c - now[:, None])
        shrink = exp2(highest - now)
        sums = sums * shrink + gl.sum(w, 1)
        highest = now
        out = out * gl.convert_layout(shrink, MIXED_QUERY)[:, None]
        weights = gl.convert_layout(w.to(q.dtype), TO_MIXTURE)
        out = warpgroup_mma(weights, pair[1], out, is_async=True)
        out, weights = warpgroup_mma_wait(0, deps=[out, weights])
    r = gl.convert_layout(-highest, MIXED_QUERY)
    return r, gl.convert_layout(sums, MIXED_QUERY), out, turn


@gluon.jit
def _put(
    result, logarithms, r, sums, out, b, h, H, first, M, SIZE: gl.constexpr, REAL: gl.constexpr
):
    row = first + gl.arange(0, TILE, layout=MIXED_QUERY)
    column = gl.arange(0, WIDE, layout=gl.SliceLayout(0, MIXTURE))
    result += (b.to(gl.int64) * M * H + h) * SIZE
    place = result + row[:, None] * (H * SIZE) + column[None, :]
    mask = (row < M)[:, None] & (column < SIZE)[None, :]
    out = gl.where((column == REAL)[None, :], 1.0, out * (1.0 / sums)[:, None])
    gl.store(place, out.to(result.dtype.element_ty), mask=mask)
    logarithms += (b.to(gl.int64) * H + h) * M
    gl.store(logarithms + row, gl.log2(sums) - r, mask=row < M)


@gluon.jit
def _mix_group(
    sources, asked, ring, ones, spare, bars, again, result, logarithms, H, M, N, c, items,
    below, least, most, SIZE: gl.constexpr, REAL: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """64 queries against all keys, over and over."""
    asked_ready, asked_free, there, ready, free = bars
    come = ready if SIZE < WIDE else there
    pair = (spare.index(2 * G), spare.index(2 * G + 1))
    blocks, tiles = _counts(M, N)
    stage = 0
    turn = 0
    asked_turn = 0
    again_turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, h, block = _place(item, blocks, H)
        mbarrier.wait(asked_ready.index(G), asked_turn)
        asked_turn ^= 1
        q = asked.index(G).load(TO_LOGITS)
        r, sums, out, stage, turn = _over_all_keys(
            q, asked_free.index(G), ring, ones, come, free, stage, turn, tiles, c, below, SIZE
        )
        # Infinite weights and those that are no numbers do not pass either.
        beyond = gl.where((sums > least) & (sums < most), 0, 1)
        if gl.max(beyond, 0) > 0:
            r, sums, out, again_turn = _once_more(
                q, sources, pair, again.index(G), again_turn, b, h, N, c
            )
        first = (block * GROUPS + G) * TILE
        _put(result, logarithms, r, sums, out, b, h, H, first, M, SIZE, REAL)


@gluon.jit(do_not_specialize=["H", "M", "N", "items"])
def attention_gluon_kernel(
    queries, keys, values, result, logarithms, H, M, N, c, items, below, least, most,
    SIZE: gl.constexpr, REAL: gl.constexpr,
):  # fmt: skip
    """An item is a block of queries of one head of one batch entry.

    The first tile's largest weight is 2 to the minus `below`; sums must lie between the other two.
    """
    dtype: gl.constexpr = keys.dtype
    asked = gl.allocate_shared_memory(dtype, [GROUPS, TILE, WIDE], HEADS)
    spare = gl.allocate_shared_memory(dtype, [2 * GROUPS, TILE, WIDE], HEADS)
    ring = (
        gl.allocate_shared_memory(dtype, [STAGES, TILE, WIDE], HEADS),
        gl.allocate_shared_memory(dtype, [STAGES, TILE, WIDE], HEADS),
    )
    # For all tiles but the last, and for the last.
    ones = gl.allocate_shared_memory(dtype, [2, ONES, TILE], LINES)
    if SIZE == WIDE:
        one = gl.full((ONES, TILE), 1.0, gl.float32, SPREAD)
        key = gl.arange(0, TILE, layout=gl.SliceLayout(0, SPREAD))[None, :]
        ones.index(0).store(one.to(dtype))
        ones.index(1).store(gl.where(key <= (N - 1) % TILE, one, 0.0).to(dtype))
    bars = (
        barriers(GROUPS, 1), barriers(GROUPS, 1),
        barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, GROUPS),
    )  # fmt: skip
    again = barriers(GROUPS, 1)
    fence_async_shared()
    sources = (queries, keys, values)
    gl.warp_specialize(
        [
            (_mix_group, (sources, asked, ring, ones, spare, bars, again, result, logarithms,
                          H, M, N, c, items, below, least, most, SIZE, REAL, 0)),
            (_mix_group, (sources, asked, ring, ones, spare, bars, again, result, logarithms,
                          H, M, N, c, items, below, least, most, SIZE, REAL, 1)),
            (_fetch_warp, (sources, asked, ring, bars, H, M, N, items, SIZE)),
        ],
        [4, 1],
        [MIX_REGISTERS, FETCH_REGISTERS],
    )  # fmt: skip
    SETS: gl.constexpr = len(bars)
    for i in gl.static_range(SETS):
        end_barriers(bars[i])
    end_barriers(again)


def _heads(tensor: Tensor) -> TensorDescriptor:
    return described_heads(tensor, TILE.value, WIDE.value)


def forward(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor, logarithms: Tensor,
    real: int,
) -> None:  # fmt: skip
    """Fills the mixture (b h p k), stored (b p h k), and the logarithms (b h p).

    `attention` knows which tensors are taken.
    """
    batch, heads, count, size = queries.shape
    items = batch * heads * tiles_in(count, GROUPS.value * TILE.value)
    below, most = RANGES[queries.dtype]
    launch_kernel(
        attention_gluon_kernel, (min(items, PROGRAMS * processors(queries.device)),),
        _heads(queries), _heads(keys), _heads(values), out, logarithms,
        heads, count, keys.shape[2], scale * math.log2(math.e), items,
        below, 2.0 ** (-below - 1), most, SIZE=size, REAL=real, num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip
