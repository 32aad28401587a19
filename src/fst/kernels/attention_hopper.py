"""The gradients of `attention` for Hopper, in one pass over P and without atomics (Gluon).

The equations, operands and results of the two Triton passes. One program takes one head of one
batch entry. Three groups of warps hold 64 keys each: k, v and the sums for their gradients stay
in registers while tiles of 64 queries (q, g, their logarithms and δ) come through a ring that all
groups read. Each group leaves S (keys x queries) in shared memory for one more group, which fills
the ring and adds Sᵀ k of all groups to ∂q of all the head's queries, kept in shared memory as
float32. There is no barrier between the groups, so one makes exponentials while another multiplies.
The order of every sum is fixed: results repeat to the last bit.

Like `feed_forward_hopper`, this module may fail where Gluon has changed: `attention` then does
without it.
"""

import math

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
    barriers,
    copy_heads,
    copy_in,
    describe,
    described_heads,
    end_barriers,
    exp2,
    seen_as,
)
from fst.kernels.launching import launch_kernel
from fst.kernels.tiles import tiles_in

TILE = gl.constexpr(64)  # queries, or keys, of a tile
WIDE = gl.constexpr(32)  # numbers of a head on chip
GROUPS = gl.constexpr(3)  # groups of warps that hold keys
STAGES = gl.constexpr(4)  # tiles of queries in the ring
DEPTH = gl.constexpr(2)  # tiles of S that a group may leave before the first is taken
# Registers of a thread that holds keys (where nothing spills from tile to tile) and that sums ∂q.
KEYS_REGISTERS = gl.constexpr(152)
QUERIES_REGISTERS = gl.constexpr(56)

# How a tile of logits lies in a group's registers, and one of sums for gradients.
LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
# Left operands of the products that make them.
TO_LOGITS = gl.constexpr(gl.DotOperandLayout(0, LOGITS.value, 2))
TO_SUMS = gl.constexpr(gl.DotOperandLayout(0, SUMS.value, 2))
# In shared memory: heads as operands; S; numbers of each query.
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


@gluon.jit
def _fragment(base, stride, first, count, SIZE: gl.constexpr):
    """A tile of keys or values as the left operand of a product; beyond the last, the last again.

    So their weights stay at most 1, and what they leave is finite; it is multiplied by keys that
    are zero, and their own gradients are not written. No tile needs a mask.
    """
    r = first + gl.arange(0, TILE, layout=gl.SliceLayout(1, TO_LOGITS))
    c = gl.arange(0, WIDE, layout=gl.SliceLayout(0, TO_LOGITS))
    place = base + gl.minimum(r, count - 1)[:, None] * stride + c[None, :]
    return gl.load(place, mask=(c < SIZE)[None, :], other=0.0)


@gluon.jit
def _put(base, b, h, H, first, count, sums, SIZE: gl.constexpr, PARTS: gl.constexpr):
    """A tile of sums into one of the parts of a dense (b n PARTS h SIZE) tensor."""
    r = first + gl.arange(0, TILE, layout=gl.SliceLayout(1, SUMS))
    c = gl.arange(0, WIDE, layout=gl.SliceLayout(0, SUMS))
    mask = (r < count)[:, None] & (c < SIZE)[None, :]
    base += (b.to(gl.int64) * count * (PARTS * H) + h) * SIZE
    place = base + r[:, None] * (PARTS * H * SIZE) + c[None, :]
    gl.store(place, sums.to(base.dtype.element_ty), mask=mask)


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
    mbarrier.expect(bar, GROUPS * TILE * WIDE * 2)
    for g in gl.static_range(GROUPS):
        copy_heads(source, b, first + g * TILE, h, bar, kept.index(g))


@gluon.jit
def _passes(N):
    """Tiles of keys, and how often all groups together must take one each."""
    blocks = (N + TILE - 1) // TILE
    return blocks, (blocks + GROUPS - 1) // GROUPS


@gluon.jit
def _queries_group(
    sources, keys, kept, ring, left, sums, ready, free, known, full, empty, dq,
    b, h, both, H, M, N, SIZE: gl.constexpr, STEPS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Fills the ring and sums the gradient of the queries."""
    blocks, passes = _passes(N)
    total = passes * STEPS
    for i in gl.static_range(STAGES):
        if i < total:
            _fetch_queries(sources, ring, ready, i, b, h, both, (i % STEPS) * TILE)
    _fetch_keys(keys, kept, known, b, h, 0)
    for t in range(STEPS):
        sums.index(t).store(gl.zeros((TILE, WIDE), gl.float32, SUMS))
    i = 0
    stage = 0
    turn = 0
    fetched = STAGES % STEPS
    for p in range(passes):
        mbarrier.wait(known.index(0), p & 1)
        for t in range(STEPS):
            slot = i % DEPTH
            own = sums.index(t)
            acc = own.load(SUMS)
            for g in gl.static_range(GROUPS):
                # In the last pass a group may have no keys: what it left before is not waited
                # for, and is multiplied by zeros.
                place = g * DEPTH + slot
                there = p * GROUPS + g < blocks
                mbarrier.wait(full.index(place), (i // DEPTH) & 1, pred=there)
                change = left.index(place).permute((1, 0))
                acc = warpgroup_mma(change, kept.index(g), acc, is_async=True)
                if g == GROUPS - 1:
                    acc = warpgroup_mma_wait(0, deps=[acc])
                elif g > 0:
                    acc = warpgroup_mma_wait(1, deps=[acc])
                if g > 0:
                    mbarrier.arrive(empty.index(place - DEPTH), count=1)
            mbarrier.arrive(empty.index((GROUPS - 1) * DEPTH + slot), count=1)
            if p + 1 < passes:
                own.store(acc)
            else:
                _put(dq, b, h, H, t * TILE, M, acc, SIZE, PARTS)
            if i + STAGES < total:
                mbarrier.wait(free.index(stage), turn)
                _fetch_queries(sources, ring, ready, stage, b, h, both, fetched * TILE)
                fetched = gl.where(fetched + 1 == STEPS, 0, fetched + 1)
            i += 1
            stage, turn = advance(stage, turn, STAGES)
        if p + 1 < passes:
            _fetch_keys(keys, kept, known, b, h, (p + 1) * GROUPS * TILE)


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
        first = (p * GROUPS + G) * TILE
        if first < N:
            key = _fragment(k, k_n, first, N, SIZE)
            value = _fragment(v, v_n, first, N, SIZE)
            sum_k = gl.zeros((TILE, WIDE), gl.float32, SUMS)
            sum_v = gl.zeros((TILE, WIDE), gl.float32, SUMS)
            for t in range(STEPS):
                i = p * STEPS + t
                stage = i % STAGES
                mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
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
                place = G * DEPTH + i % DEPTH
                mbarrier.wait(empty.index(place), ((i // DEPTH) & 1) ^ 1)
                left.index(place).store(x)
                fence_async_shared()
                mbarrier.arrive(full.index(place), count=1)
                # The operands are named so that nobody takes their registers before.
                sum_k, sum_v, weights, change = warpgroup_mma_wait(
                    0, deps=[sum_k, sum_v, weights, change]
                )
                mbarrier.arrive(free.index(stage), count=1)
            _put(dk, b, h, H, first, N, sum_k, SIZE, PARTS)
            _put(dv, b, h, H, first, N, sum_v, SIZE, PARTS)
        else:  # no keys are left for this group: it only gives the queries back
            for t in range(STEPS):
                i = p * STEPS + t
                mbarrier.wait(ready.index(i % STAGES), (i // STAGES) & 1)
                mbarrier.arrive(free.index(i % STAGES), count=1)


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
    left = gl.allocate_shared_memory(dtype, [GROUPS * DEPTH, TILE, TILE], SQUARE)
    kept = gl.allocate_shared_memory(dtype, [GROUPS, TILE, WIDE], HEADS)
    ring = (
        gl.allocate_shared_memory(dtype, [STAGES, TILE, WIDE], HEADS),
        gl.allocate_shared_memory(dtype, [STAGES, TILE, WIDE], HEADS),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, TILE], LINE),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, TILE], LINE),
    )
    ready = barriers(STAGES, 1)
    free = barriers(STAGES, GROUPS)
    known = barriers(1, 1)
    full = barriers(GROUPS * DEPTH, 1)
    empty = barriers(GROUPS * DEPTH, 1)
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
    end_barriers(ready)
    end_barriers(free)
    end_barriers(known)
    end_barriers(full)
    end_barriers(empty)


def _heads(tensor: Tensor) -> TensorDescriptor:
    return described_heads(tensor, TILE.value, WIDE.value)


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
