"""The gradients of linear layers' weights for Hopper: aᵀ b over many tokens (Gluon).

Of two pairs a (t m), b (t n) in half precision, (s m n) in float32 leaves: s shares of the
tokens, each summed up, which `fst.kernels.weights` adds. There are many tokens and few channels, so
that reading the operands takes about as long as the products. A program keeps a tile of the result
in registers for one share of the tokens. Three groups of warps hold 64 channels each of the operand
with fewer of them, against WIDE channels of the other; the first group also has 64 tokens at a time
copied into a ring that all groups read. Tensor cores take both operands as they lie there, tokens
first. Channels and tokens beyond the last come as zeros. Both pairs share one launch. As
many programs run as the largest Hopper GPU has multiprocessors, on whatever GPU: so sums do not
depend on it. There are no atomics: results repeat to the last bit.
"""

from collections.abc import Sequence

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

from fst.kernels.gluon_parts import barriers, copy_in, described, end_barriers
from fst.kernels.launch import launch_kernel
from fst.kernels.weights import GROUP, GROUPS, TOKENS, Division, Pair, product_sizes

# Of a thread. With a fourth group, for copying, a thread would start with 128, and one product
# against 256 channels, whose sums alone are 128, could not be compiled.
REGISTERS = gl.constexpr(168)
# Tiles of tokens in the ring, by the channels of the wide operand: what fits into shared memory.
STAGES = {256: 3, 128: 5, 64: 7}

_TOKENS = gl.constexpr(TOKENS)
_GROUP = gl.constexpr(GROUP)
_GROUPS = gl.constexpr(GROUPS)


@gluon.jit
def _copy(
    wide, narrow, first_wide, first_narrow, block, i, ring, ready,
    WIDE: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """A block of tokens into the ring, as the program's i-th."""
    stage = i % DEPTH
    bar = ready.index(stage)
    mbarrier.expect(bar, _TOKENS * (WIDE + _GROUPS * _GROUP) * 2)
    copy_in(wide, [block * _TOKENS, first_wide], bar, ring[0].index(stage))
    for g in gl.static_range(_GROUPS):
        spot = ring[1].index(stage * _GROUPS + g)
        copy_in(narrow, [block * _TOKENS, first_narrow + g * _GROUP], bar, spot)


@gluon.jit
def _fetch(
    sources, second, first_wide, first_narrow, block, i, ring, ready,
    WIDE: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    if second:
        _copy(sources[2], sources[3], first_wide, first_narrow, block, i, ring, ready, WIDE, DEPTH)
    else:
        _copy(sources[0], sources[1], first_wide, first_narrow, block, i, ring, ready, WIDE, DEPTH)


@gluon.jit
def _put(
    out, sums, share, first_wide, first_narrow, W, N,
    TURNED: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """A tile of a share's sums; narrow channels are the rows of the result, or its columns."""
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    n = first_narrow + gl.arange(0, _GROUP, layout=gl.SliceLayout(1, M))
    w = first_wide + gl.arange(0, WIDE, layout=gl.SliceLayout(0, M))
    out += share.to(gl.int64) * (W * N)
    there = (n < N)[:, None] & (w < W)[None, :]
    if TURNED:
        gl.store(out + n[:, None] + w[None, :] * N, sums, mask=there)
    else:
        gl.store(out + n[:, None] * W + w[None, :], sums, mask=there)


@gluon.jit
def _sum_group(
    sources, outs, second, share, first_wide, first_narrow, W, N, begin, count, ring, ready, free,
    TURNED0: gl.constexpr, TURNED1: gl.constexpr,
    WIDE: gl.constexpr, DEPTH: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    if G == 0:
        for i in gl.static_range(DEPTH):
            if i < count:
                _fetch(
                    sources, second, first_wide, first_narrow, begin + i, i, ring, ready,
                    WIDE, DEPTH,
                )  # fmt: skip
    sums = gl.zeros((_GROUP, WIDE), gl.float32, M)
    for i in range(count):
        stage = i % DEPTH
        mbarrier.wait(ready.index(stage), (i // DEPTH) & 1)
        narrow = ring[1].index(stage * _GROUPS + G).permute((1, 0))
        sums = warpgroup_mma(narrow, ring[0].index(stage), sums, is_async=True)
        sums = warpgroup_mma_wait(1, deps=[sums])
        # The product before this one has been made: its operands may go.
        last = i - 1
        if last >= 0:
            mbarrier.arrive(free.index(last % DEPTH), count=1)
            if G == 0:  # noqa: SIM102 (known when compiled, the next is not)
                if last + DEPTH < count:
                    mbarrier.wait(free.index(last % DEPTH), (last // DEPTH) & 1)
                    _fetch(
                        sources, second, first_wide, first_narrow, begin + last + DEPTH,
                        last + DEPTH, ring, ready, WIDE, DEPTH,
                    )  # fmt: skip
    sums = warpgroup_mma_wait(0, deps=[sums])
    first_narrow += G * _GROUP
    if second:
        _put(outs[1], sums, share, first_wide, first_narrow, W, N, TURNED1, WIDE)
    else:
        _put(outs[0], sums, share, first_wide, first_narrow, W, N, TURNED0, WIDE)


@gluon.jit(
    do_not_specialize=["blocks0", "shares0", "W0", "N0", "blocks1", "shares1", "W1", "N1", "START"]
)
def weight_gradients_gluon_kernel(
    wide0, narrow0, wide1, narrow1, out0, out1,
    blocks0, shares0, W0, N0, blocks1, shares1, W1, N1, START,
    TURNED0: gl.constexpr, TURNED1: gl.constexpr,
    WIDE: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Channels are counted in 8 (so that the compiler sees it), tokens in blocks of TOKENS.

    Programs from START on take the second pair.
    """
    dtype: gl.constexpr = wide0.dtype
    program = gl.program_id(0)
    second = program >= START
    blocks = gl.where(second, blocks1, blocks0)
    shares = gl.where(second, shares1, shares0)
    W = gl.where(second, W1, W0) * 8
    N = gl.where(second, N1, N0) * 8
    program = gl.where(second, program - START, program)
    # Programs that read the same tokens follow one another: they find them in the cache.
    across = (W + WIDE - 1) // WIDE
    tiles = across * ((N + _GROUPS * _GROUP - 1) // (_GROUPS * _GROUP))
    share = program // tiles
    tile = program % tiles
    first_wide = tile % across * WIDE
    first_narrow = tile // across * (_GROUPS * _GROUP)
    begin = share * blocks // shares
    count = (share + 1) * blocks // shares - begin
    ring = (
        gl.allocate_shared_memory(dtype, [DEPTH, _TOKENS, WIDE], wide0.layout),
        gl.allocate_shared_memory(dtype, [DEPTH * _GROUPS, _TOKENS, _GROUP], narrow0.layout),
    )
    ready = barriers(DEPTH, 1)
    free = barriers(DEPTH, _GROUPS)
    fence_async_shared()
    sources = (wide0, narrow0, wide1, narrow1)
    outs = (out0, out1)
    gl.warp_specialize(
        [
            (_sum_group, (sources, outs, second, share, first_wide, first_narrow, W, N, begin,
                          count, ring, ready, free, TURNED0, TURNED1, WIDE, DEPTH, 0)),
            (_sum_group, (sources, outs, second, share, first_wide, first_narrow, W, N, begin,
                          count, ring, ready, free, TURNED0, TURNED1, WIDE, DEPTH, 1)),
            (_sum_group, (sources, outs, second, share, first_wide, first_narrow, W, N, begin,
                          count, ring, ready, free, TURNED0, TURNED1, WIDE, DEPTH, 2)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip
    end_barriers((ready, free))


def shares(pairs: Sequence[Pair], division: Division) -> list[Tensor]:
    """Of both pairs, as many sums (s m n) as the division says."""
    wide, numbers = division
    operands, counts, turned, found, programs = [], [], [], [], []
    for (a, b), number in zip(pairs, numbers, strict=True):
        product = product_sizes((a, b))
        rows_are_wide = a.shape[1] >= b.shape[1]
        many, few = (a, b) if rows_are_wide else (b, a)
        operands.append((*described(many, TOKENS, wide), *described(few, TOKENS, GROUP)))
        counts.append((product.blocks(), number, product.wide // 8, product.narrow // 8))
        turned.append(rows_are_wide)
        found.append(a.new_empty(number, a.shape[1], b.shape[1], dtype=torch.float32))
        programs.append(number * product.tiles(wide))
    launch_kernel(
        weight_gradients_gluon_kernel, (sum(programs),),
        *operands[0], *operands[1], *found, *counts[0], *counts[1], programs[0],
        TURNED0=turned[0], TURNED1=turned[1],
        WIDE=wide, DEPTH=STAGES[wide], num_warps=4,
    )  # fmt: skip
    return found
