"""`attention` for Hopper, forward and backward (Gluon): operands and results of the Triton kernels.

Going forward, no maximum is followed, and tensor cores add up the weights. Two programs stay on
every multiprocessor and take one block of queries after another. In each, two groups of warps hold
64 queries each; one more warp fills a ring of tiles of keys and values that both groups read, so
that copies run early even across blocks. The groups run apart: one makes exponentials while another
multiplies. A weight costs its exponential and little more:

- out_i = Σ_j w_ij v_j / Σ_j w_ij with w_ij = exp2(c q_i·k_j - r_i), whatever r_i: floats keep their
  precision at any size. So r_i comes from the maximum over the first tile alone, and nothing is
  scaled again later. In trained models later keys have had logits 93 above that maximum; bfloat16
  has room for 156 (`RANGES`). Only if a sum ends where weights may have left the range of their
  dtype, a group takes its block again and follows the maximum (`_follow_maximum`).
- The units that make exponentials are the narrowest on the chip, so every fourth is made by a cubic
  (relative error 9e-5, against 2e-3 of the rounding that follows).
- Heads of 24 numbers leave room on chip: a column of ones beside the values gives Σ_j w_ij by the
  same product. It is zero beyond the last key, so no tile needs a mask. Heads of 32 numbers have
  their ones in a product of its own.

Going backward, all gradients come from one pass over P and without atomics. One program takes one
head of one batch entry. Three groups of warps hold 64 keys each: k, v and the sums for their
gradients stay in registers while tiles of 64 queries (q, g, their logarithms and δ) come through a
ring that all groups read. Each group leaves S (keys x queries) in shared memory for one more group,
which fills the ring and adds Sᵀ k of all groups to ∂q of all the head's queries, kept in shared
memory as float32. There is no barrier between the groups, so one makes exponentials while another
multiplies.

The order of every sum is fixed: results repeat to the last bit.
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
    BOX,
    advance,
    barrier,
    barriers,
    copy_heads,
    copy_in,
    describe,
    end_barriers,
    exp2,
    seen_as,
)
from fst.kernels.launch import launch_kernel, processors, tiles_in

TILE = gl.constexpr(64)  # queries, or keys, of a tile
WIDE = gl.constexpr(32)  # numbers of a head on chip
# How a tile of logits lies in a group's registers, one of sums (the mixture, or gradients), and
# sums of weights that are made apart.
LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
TOTALS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))
# Numbers of each query.
QUERY = gl.constexpr(gl.SliceLayout(1, LOGITS.value))
SUMS_QUERY = gl.constexpr(gl.SliceLayout(1, SUMS.value))
# Left operands of the products that make them.
TO_LOGITS = gl.constexpr(gl.DotOperandLayout(0, LOGITS.value, 2))
TO_SUMS = gl.constexpr(gl.DotOperandLayout(0, SUMS.value, 2))
# In shared memory: heads as operands; S, or ones for each key; numbers of each query.
HEADS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2))
SQUARE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
LINE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# ∂q: every thread finds its own numbers of a tile, four at a time, beside its neighbour's.
OWN = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [0, 8], [0, 16], [16, 0], [32, 0]]
    )
)
# What one warp puts beside values, and all warps put into the ones for each key.
BESIDE = gl.constexpr(gl.BlockedLayout([1, 8], [32, 1], [1, 1], [1, 0]))
SPREAD = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))

# Forward.
ONES = gl.constexpr(8)  # columns beside the values, of which the first holds ones
QUERY_GROUPS = gl.constexpr(2)  # groups of warps that hold queries
KEY_STAGES = gl.constexpr(8)  # tiles of keys and values in the ring
LAG = gl.constexpr(2)  # tiles between asking for values and putting ones beside them
# Registers of a thread: where the program begins, where queries are held and where tiles are
# fetched. With fewer, the compiler lets every product wait for the one before.
START_REGISTERS = 80
MIX_REGISTERS = gl.constexpr(104)
FETCH_REGISTERS = gl.constexpr(24)
PROGRAMS = 2  # on one multiprocessor
# How far the first tile's largest weight lies below one, as a power of two: so much more may later
# weights be above it. Sums of weights below the second number hold no weight that the dtype cannot,
# and leave room to multiply by values. bfloat16 has small numbers to spare: 2⁻¹²⁶ is far below what
# counts beside 2⁻⁶⁰.
RANGES = {torch.bfloat16: (60.0, 2.0**96), torch.float16: (0.0, 2.0**15)}

# Backward.
KEY_GROUPS = gl.constexpr(3)  # groups of warps that hold keys
QUERY_STAGES = gl.constexpr(4)  # tiles of queries in the ring
DEPTH = gl.constexpr(2)  # tiles of S that a group may leave before the first is taken
# Registers of a thread that holds keys (where nothing spills from tile to tile) and that sums ∂q.
KEYS_REGISTERS = gl.constexpr(152)
QUERIES_REGISTERS = gl.constexpr(56)


def _heads(tensor: Tensor) -> TensorDescriptor:
    """Tiles of one head of a (b h n k) tensor, widened with zeros."""
    batch, heads, count, size = tensor.shape
    b, h, n, _ = tensor.stride()
    shape, strides = (batch, count, heads, size), (b, n, h, 1)
    return describe(tensor, shape, strides, (1, TILE.value, 1, WIDE.value), BOX.value)


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
    return (M + QUERY_GROUPS * TILE - 1) // (QUERY_GROUPS * TILE), (N + TILE - 1) // TILE


@gluon.jit
def _unravel(item, blocks, H):
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
        b, h, block = _unravel(item, blocks, H)
        for g in gl.static_range(QUERY_GROUPS):
            mbarrier.wait(asked_free.index(g), asked_turn)
            mbarrier.expect(asked_ready.index(g), TILE * WIDE * 2)
            first = (block * QUERY_GROUPS + g) * TILE
            copy_heads(sources[0], b, first, h, asked_ready.index(g), asked.index(g))
        asked_turn ^= 1
        for t in range(tiles):
            if SIZE < WIDE:  # noqa: SIM102 (this one is known when compiling)
                if i >= LAG:
                    _put_ones(ring[1], there, ready, behind, behind_turn, left, SIZE)
                    behind, behind_turn = advance(behind, behind_turn, KEY_STAGES)
                    left = gl.where(left > TILE, left - TILE, N)
            mbarrier.wait(free.index(stage), turn)
            mbarrier.expect(there.index(stage), 2 * TILE * WIDE * 2)
            for which in gl.static_range(2):
                target = ring[which].index(stage)
                copy_heads(sources[1 + which], b, t * TILE, h, there.index(stage), target)
            stage, turn = advance(stage, turn, KEY_STAGES)
            i += 1
    if SIZE < WIDE:
        for _ in range(gl.minimum(i, LAG)):
            _put_ones(ring[1], there, ready, behind, behind_turn, left, SIZE)
            behind, behind_turn = advance(behind, behind_turn, KEY_STAGES)
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
    weights = gl.convert_layout(w.to(q.dtype), TO_SUMS)
    out = gl.zeros((TILE, WIDE), gl.float32, SUMS)
    total = gl.zeros((TILE, ONES), gl.float32, TOTALS)
    for _ in range(1, tiles):
        before = stage
        stage, turn = advance(stage, turn, KEY_STAGES)
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
        weights = gl.convert_layout(w.to(q.dtype), TO_SUMS)
    out, total = _mix(weights, ring[1].index(stage), ones.index(1), out, total, SIZE)
    out, total, weights = warpgroup_mma_wait(0, deps=[out, total, weights])
    mbarrier.arrive(free.index(stage), count=1)
    stage, turn = advance(stage, turn, KEY_STAGES)
    if SIZE < WIDE:
        column = gl.arange(0, WIDE, layout=gl.SliceLayout(0, SUMS))
        sums = gl.sum(gl.where((column == SIZE)[None, :], out, 0.0), 1)
    else:
        sums = gl.convert_layout(gl.max(total, 1), SUMS_QUERY)  # all columns are alike
    return gl.convert_layout(r, SUMS_QUERY), sums, out, stage, turn


@gluon.jit
def _follow_maximum(q, sources, pair, bar, turn, b, h, N, c):
    """The same of the same queries, following the maximum; the group copies for itself."""
    highest = gl.full((TILE,), -float("inf"), gl.float32, QUERY)
    sums = gl.full((TILE,), 0.0, gl.float32, QUERY)
    out = gl.zeros((TILE, WIDE), gl.float32, SUMS)
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
        out = out * gl.convert_layout(shrink, SUMS_QUERY)[:, None]
        weights = gl.convert_layout(w.to(q.dtype), TO_SUMS)
        out = warpgroup_mma(weights, pair[1], out, is_async=True)
        out, weights = warpgroup_mma_wait(0, deps=[out, weights])
    r = gl.convert_layout(-highest, SUMS_QUERY)
    return r, gl.convert_layout(sums, SUMS_QUERY), out, turn


@gluon.jit
def _store_mixture(
    result, logarithms, r, sums, out, b, h, H, first, M, SIZE: gl.constexpr, REAL: gl.constexpr
):
    row = first + gl.arange(0, TILE, layout=SUMS_QUERY)
    column = gl.arange(0, WIDE, layout=gl.SliceLayout(0, SUMS))
    result += (b.to(gl.int64) * M * H + h) * SIZE
    pointers = result + row[:, None] * (H * SIZE) + column[None, :]
    mask = (row < M)[:, None] & (column < SIZE)[None, :]
    out = gl.where((column == REAL)[None, :], 1.0, out * (1.0 / sums)[:, None])
    gl.store(pointers, out.to(result.dtype.element_ty), mask=mask)
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
        b, h, block = _unravel(item, blocks, H)
        mbarrier.wait(asked_ready.index(G), asked_turn)
        asked_turn ^= 1
        q = asked.index(G).load(TO_LOGITS)
        r, sums, out, stage, turn = _over_all_keys(
            q, asked_free.index(G), ring, ones, come, free, stage, turn, tiles, c, below, SIZE
        )
        # Infinite weights and those that are no numbers do not pass either.
        beyond = gl.where((sums > least) & (sums < most), 0, 1)
        if gl.max(beyond, 0) > 0:
            r, sums, out, again_turn = _follow_maximum(
                q, sources, pair, again.index(G), again_turn, b, h, N, c
            )
        first = (block * QUERY_GROUPS + G) * TILE
        _store_mixture(result, logarithms, r, sums, out, b, h, H, first, M, SIZE, REAL)


@gluon.jit(do_not_specialize=["H", "M", "N", "items"])
def attention_gluon_kernel(
    queries, keys, values, result, logarithms, H, M, N, c, items, below, least, most,
    SIZE: gl.constexpr, REAL: gl.constexpr,
):  # fmt: skip
    """An item is a block of queries of one head of one batch entry.

    The first tile's largest weight is 2 to the minus `below`; sums must lie between the other two.
    """
    dtype: gl.constexpr = keys.dtype
    asked = gl.allocate_shared_memory(dtype, [QUERY_GROUPS, TILE, WIDE], HEADS)
    spare = gl.allocate_shared_memory(dtype, [2 * QUERY_GROUPS, TILE, WIDE], HEADS)
    ring = (
        gl.allocate_shared_memory(dtype, [KEY_STAGES, TILE, WIDE], HEADS),
        gl.allocate_shared_memory(dtype, [KEY_STAGES, TILE, WIDE], HEADS),
    )
    # For all tiles but the last, and for the last.
    ones = gl.allocate_shared_memory(dtype, [2, ONES, TILE], SQUARE)
    if SIZE == WIDE:
        one = gl.full((ONES, TILE), 1.0, gl.float32, SPREAD)
        key = gl.arange(0, TILE, layout=gl.SliceLayout(0, SPREAD))[None, :]
        ones.index(0).store(one.to(dtype))
        ones.index(1).store(gl.where(key <= (N - 1) % TILE, one, 0.0).to(dtype))
    bars = (
        barriers(QUERY_GROUPS, 1), barriers(QUERY_GROUPS, 1),
        barriers(KEY_STAGES, 1), barriers(KEY_STAGES, 1), barriers(KEY_STAGES, QUERY_GROUPS),
    )  # fmt: skip
    again = barriers(QUERY_GROUPS, 1)
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
    end_barriers(bars)
    end_barriers((again,))


def forward(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor, logarithms: Tensor,
    real: int,
) -> None:  # fmt: skip
    """Fills the mixture (b h p k), stored (b p h k), and the logarithms (b h p).

    `attention` knows which tensors are taken.
    """
    batch, heads, count, size = queries.shape
    items = batch * heads * tiles_in(count, QUERY_GROUPS.value * TILE.value)
    below, most = RANGES[queries.dtype]
    launch_kernel(
        attention_gluon_kernel, (min(items, PROGRAMS * processors(queries.device)),),
        _heads(queries), _heads(keys), _heads(values), out, logarithms,
        heads, count, keys.shape[2], scale * math.log2(math.e), items,
        below, 2.0 ** (-below - 1), most, SIZE=size, REAL=real,
        num_warps=4, maxnreg=START_REGISTERS,
    )  # fmt: skip


@gluon.jit
def _fragment(base, stride, first, count, SIZE: gl.constexpr):
    """A tile of keys or values as the left operand of a product; beyond the last, the last again.

    So their weights stay at most 1, and what they leave is finite; it is multiplied by keys that
    are zero, and their own gradients are not written. No tile needs a mask.
    """
    r = first + gl.arange(0, TILE, layout=gl.SliceLayout(1, TO_LOGITS))
    c = gl.arange(0, WIDE, layout=gl.SliceLayout(0, TO_LOGITS))
    pointers = base + gl.minimum(r, count - 1)[:, None] * stride + c[None, :]
    return gl.load(pointers, mask=(c < SIZE)[None, :], other=0.0)


@gluon.jit
def _store_gradients(base, b, h, H, first, count, sums, SIZE: gl.constexpr, PARTS: gl.constexpr):
    """A tile of sums into one of the parts of a dense (b n PARTS h SIZE) tensor."""
    r = first + gl.arange(0, TILE, layout=gl.SliceLayout(1, SUMS))
    c = gl.arange(0, WIDE, layout=gl.SliceLayout(0, SUMS))
    mask = (r < count)[:, None] & (c < SIZE)[None, :]
    base += (b.to(gl.int64) * count * (PARTS * H) + h) * SIZE
    pointers = base + r[:, None] * (PARTS * H * SIZE) + c[None, :]
    gl.store(pointers, sums.to(base.dtype.element_ty), mask=mask)


@gluon.jit
def _fetch_queries(sources, ring, ready, stage, b, h, both, first):
    bar = ready.index(stage)
    mbarrier.expect(bar, 2 * TILE * WIDE * 2 + 2 * TILE * 4)
    copy_heads(sources[0], b, first, h, bar, ring[0].index(stage))
    copy_heads(sources[1], b, first, h, bar, ring[1].index(stage))
    copy_in(sources[2], [both, first], bar, ring[2].index(stage))
    copy_in(sources[3], [both, first], bar, ring[3].index(stage))


@gluon.jit
def _fetch_keys(source, kept, known, b, h, first):
    """One tile for every group; rows beyond the last key come as zeros."""
    bar = known.index(0)
    mbarrier.expect(bar, KEY_GROUPS * TILE * WIDE * 2)
    for g in gl.static_range(KEY_GROUPS):
        copy_heads(source, b, first + g * TILE, h, bar, kept.index(g))


@gluon.jit
def _passes(N):
    """Tiles of keys, and how often all groups together must take one each."""
    blocks = (N + TILE - 1) // TILE
    return blocks, (blocks + KEY_GROUPS - 1) // KEY_GROUPS


@gluon.jit
def _queries_group(
    sources, keys, kept, ring, left, sums, ready, free, known, full, empty, dq,
    b, h, both, H, M, N, SIZE: gl.constexpr, STEPS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Fills the ring and sums the gradient of the queries."""
    blocks, passes = _passes(N)
    total = passes * STEPS
    for i in gl.static_range(QUERY_STAGES):
        if i < total:
            _fetch_queries(sources, ring, ready, i, b, h, both, (i % STEPS) * TILE)
    _fetch_keys(keys, kept, known, b, h, 0)
    for t in range(STEPS):
        sums.index(t).store(gl.zeros((TILE, WIDE), gl.float32, SUMS))
    i = 0
    stage = 0
    turn = 0
    fetched = QUERY_STAGES % STEPS
    for p in range(passes):
        mbarrier.wait(known.index(0), p & 1)
        for t in range(STEPS):
            depth = i % DEPTH
            own = sums.index(t)
            acc = own.load(SUMS)
            for g in gl.static_range(KEY_GROUPS):
                # In the last pass a group may have no keys: what it left before is not waited
                # for, and is multiplied by zeros.
                slot = g * DEPTH + depth
                there = p * KEY_GROUPS + g < blocks
                mbarrier.wait(full.index(slot), (i // DEPTH) & 1, pred=there)
                change = left.index(slot).permute((1, 0))
                acc = warpgroup_mma(change, kept.index(g), acc, is_async=True)
                if g == KEY_GROUPS - 1:
                    acc = warpgroup_mma_wait(0, deps=[acc])
                elif g > 0:
                    acc = warpgroup_mma_wait(1, deps=[acc])
                if g > 0:
                    mbarrier.arrive(empty.index(slot - DEPTH), count=1)
            mbarrier.arrive(empty.index((KEY_GROUPS - 1) * DEPTH + depth), count=1)
            if p + 1 < passes:
                own.store(acc)
            else:
                _store_gradients(dq, b, h, H, t * TILE, M, acc, SIZE, PARTS)
            if i + QUERY_STAGES < total:
                mbarrier.wait(free.index(stage), turn)
                _fetch_queries(sources, ring, ready, stage, b, h, both, fetched * TILE)
                fetched = gl.where(fetched + 1 == STEPS, 0, fetched + 1)
            i += 1
            stage, turn = advance(stage, turn, QUERY_STAGES)
        if p + 1 < passes:
            _fetch_keys(keys, kept, known, b, h, (p + 1) * KEY_GROUPS * TILE)


@gluon.jit
def _keys_group(
    k, v, k_n, v_n, ring, left, ready, free, full, empty, dk, dv,
    b, h, H, N, c, scale,
    SIZE: gl.constexpr, STEPS: gl.constexpr, PARTS: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """The gradients of 64 keys and values, over and over."""
    dtype: gl.constexpr = ring[0].dtype
    EACH: gl.constexpr = gl.SliceLayout(0, LOGITS)
    none = gl.zeros((TILE, TILE), gl.float32, LOGITS)
    _, passes = _passes(N)
    for p in range(passes):
        first = (p * KEY_GROUPS + G) * TILE
        if first < N:
            key = _fragment(k, k_n, first, N, SIZE)
            value = _fragment(v, v_n, first, N, SIZE)
            sum_k = gl.zeros((TILE, WIDE), gl.float32, SUMS)
            sum_v = gl.zeros((TILE, WIDE), gl.float32, SUMS)
            for t in range(STEPS):
                i = p * STEPS + t
                stage = i % QUERY_STAGES
                mbarrier.wait(ready.index(stage), (i // QUERY_STAGES) & 1)
                q = ring[0].index(stage)
                g = ring[1].index(stage)
                log = seen_as(ring[2].index(stage), gl.float32, [TILE], FLAT)
                delta = seen_as(ring[3].index(stage), gl.float32, [TILE], FLAT)
                s = warpgroup_mma(key, q.permute((1, 0)), none, use_acc=False, is_async=True)
                d = warpgroup_mma(value, g.permute((1, 0)), none, use_acc=False, is_async=True)
                log = log.load(EACH)
                s = warpgroup_mma_wait(1, deps=[s])
                w = exp2(s * c - log[None, :])
                weights = gl.convert_layout(w.to(dtype), TO_SUMS)
                sum_v = warpgroup_mma(weights, g, sum_v, is_async=True)
                delta = delta.load(EACH)
                # w is named so that the exponentials are not put behind the wait.
                d, w = warpgroup_mma_wait(1, deps=[d, w])
                x = (w * (d * scale - delta[None, :])).to(dtype)
                change = gl.convert_layout(x, TO_SUMS)
                sum_k = warpgroup_mma(change, q, sum_k, is_async=True)
                slot = G * DEPTH + i % DEPTH
                mbarrier.wait(empty.index(slot), ((i // DEPTH) & 1) ^ 1)
                left.index(slot).store(x)
                fence_async_shared()
                mbarrier.arrive(full.index(slot), count=1)
                # The operands are named so that nobody takes their registers before.
                sum_k, sum_v, weights, change = warpgroup_mma_wait(
                    0, deps=[sum_k, sum_v, weights, change]
                )
                mbarrier.arrive(free.index(stage), count=1)
            _store_gradients(dk, b, h, H, first, N, sum_k, SIZE, PARTS)
            _store_gradients(dv, b, h, H, first, N, sum_v, SIZE, PARTS)
        else:  # no keys are left for this group: it only gives the queries back
            for t in range(STEPS):
                i = p * STEPS + t
                mbarrier.wait(ready.index(i % QUERY_STAGES), (i // QUERY_STAGES) & 1)
                mbarrier.arrive(free.index(i % QUERY_STAGES), count=1)


@gluon.jit(do_not_specialize=["k_b", "k_h", "k_n", "v_b", "v_h", "v_n", "H", "M", "N"])
def attention_backward_gluon_kernel(
    queries, grads, keys, logarithms, deltas, k, v, dq, dk, dv,
    k_b, k_h, k_n, v_b, v_h, v_n, H, M, N, c, scale,
    SIZE: gl.constexpr, STEPS: gl.constexpr, APART: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Strides are counted in 8 numbers, so that the compiler sees rows of 16 bytes."""
    dtype: gl.constexpr = queries.dtype
    both = gl.program_id(0)
    b = both // H
    h = both % H
    k += (b.to(gl.int64) * k_b + h * k_h) * 8
    v += (b.to(gl.int64) * v_b + h * v_h) * 8
    k_n = k_n * 8
    v_n = v_n * 8
    sums = gl.allocate_shared_memory(gl.float32, [STEPS, TILE, WIDE], OWN)
    left = gl.allocate_shared_memory(dtype, [KEY_GROUPS * DEPTH, TILE, TILE], SQUARE)
    kept = gl.allocate_shared_memory(dtype, [KEY_GROUPS, TILE, WIDE], HEADS)
    ring = (
        gl.allocate_shared_memory(dtype, [QUERY_STAGES, TILE, WIDE], HEADS),
        gl.allocate_shared_memory(dtype, [QUERY_STAGES, TILE, WIDE], HEADS),
        gl.allocate_shared_memory(gl.float32, [QUERY_STAGES, 1, TILE], LINE),
        gl.allocate_shared_memory(gl.float32, [QUERY_STAGES, 1, TILE], LINE),
    )
    ready = barriers(QUERY_STAGES, 1)
    free = barriers(QUERY_STAGES, KEY_GROUPS)
    known = barriers(1, 1)
    full = barriers(KEY_GROUPS * DEPTH, 1)
    empty = barriers(KEY_GROUPS * DEPTH, 1)
    fence_async_shared()
    sources = (queries, grads, logarithms, deltas)
    gl.warp_specialize(
        [
            (_keys_group, (k, v, k_n, v_n, ring, left, ready, free, full, empty, dk, dv,
                           b, h, H, N, c, scale, SIZE, STEPS, PARTS, 0)),
            (_keys_group, (k, v, k_n, v_n, ring, left, ready, free, full, empty, dk, dv,
                           b, h, H, N, c, scale, SIZE, STEPS, PARTS, 1)),
            (_keys_group, (k, v, k_n, v_n, ring, left, ready, free, full, empty, dk, dv,
                           b, h, H, N, c, scale, SIZE, STEPS, PARTS, 2)),
            (_queries_group, (sources, keys, kept, ring, left, sums, ready, free, known, full,
                              empty, dq, b, h, both, H, M, N, SIZE, STEPS, APART)),
        ],
        [4, 4, 4],
        [KEYS_REGISTERS, KEYS_REGISTERS, QUERIES_REGISTERS],
    )  # fmt: skip
    end_barriers((ready, free, known, full, empty))


def _lines(tensor: Tensor) -> TensorDescriptor:
    """Tiles of one head's numbers of a (b h p) tensor."""
    flat = tensor.contiguous().flatten(0, 1)
    return describe(flat, flat.shape, flat.stride(), (1, TILE.value), LINE.value)


def _parts(gradient: Tensor) -> int:
    """Of how many parts this is one."""
    _, heads, _, size = gradient.shape
    return gradient.stride(2) // (heads * size)


def backward(
    grad: Tensor, queries: Tensor, keys: Tensor, values: Tensor, logarithms: Tensor, delta: Tensor,
    scale: float, dq: Tensor, dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Fills dq (b h p k), dk and dv (b h n k), parts of dense tensors stored (b n parts h k).

    `attention` knows which tensors are taken.
    """
    batch, heads, count, size = queries.shape
    strides = [stride // 8 for tensor in (keys, values) for stride in tensor.stride()[:3]]
    launch_kernel(
        attention_backward_gluon_kernel, (batch * heads,),
        _heads(queries), _heads(grad), _heads(keys), _lines(logarithms), _lines(delta),
        keys, values, dq, dk, dv, *strides,
        heads, count, keys.shape[2], scale * math.log2(math.e), scale,
        SIZE=size, STEPS=tiles_in(count, TILE.value), APART=_parts(dq), PARTS=_parts(dk),
        num_warps=4,
    )  # fmt: skip
