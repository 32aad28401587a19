"""The backward kernel of `projection` for Hopper: see `projection_hopper`.

A group's pieces come in the order of their use: those of the tokens, of the outputs' gradient, then
those of the next tile. The normalised tokens wait in shared memory, where they also leave from,
until they make way for the tokens' gradient. Weights that do not fit pass through shared memory,
once for all groups.
"""

from functools import cache
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
from fst.kernels.gluon_parts import barrier, barriers, copy_in, copy_out, end_barriers
from fst.kernels.hopper import processors
from fst.kernels.launching import launch_kernel
from fst.kernels.projection_hopper import (
    BYTES,
    GROUPS,
    REGISTERS,
    SIDE,
    SUMS,
    _columns,
    _normalise,
    _nothing,
    _pieces,
    piecewise,
)
from fst.kernels.tiles import tiles_in


@gluon.jit
def _bring(p: gl.constexpr, x, dy, rows, slot, slots, full, C: gl.constexpr, K: gl.constexpr):
    """Piece p of a tile: of the tokens, then of the outputs' gradient."""
    bar = full.index(slot)
    mbarrier.expect(bar, BYTES)
    if p < C:
        copy_in(x, [rows, p * SIDE], bar, slots.index(slot))
    else:
        copy_in(dy, [rows, (p - C) * SIDE], bar, slots.index(slot))


@gluon.jit
def _slot(p: gl.constexpr, i, G: gl.constexpr, P: gl.constexpr, RING: gl.constexpr):
    """Where piece p of round i lies, and the phase of its barrier."""
    count = i * P + p
    return G * RING + count % RING, (count // RING) & 1


@gluon.jit
def _advance(
    p: gl.constexpr, i, rounds, x, dy, rows, step, slots, full,
    C: gl.constexpr, K: gl.constexpr, P: gl.constexpr, RING: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """Into the slot that piece p of round i has left comes the piece RING later."""
    slot, _ = _slot(p, i, G, P, RING)
    if p + RING < P:
        _bring(p + RING, x, dy, rows, slot, slots, full, C, K)
    else:
        if i + 1 < rounds:
            _bring(p + RING - P, x, dy, rows + step * SIDE, slot, slots, full, C, K)


@gluon.jit
def _weights(w, weights, ready, k, stage, C: gl.constexpr):
    mbarrier.expect(ready.index(stage), C * BYTES)
    for j in gl.static_range(C):
        copy_in(w, [k * SIDE, j * SIDE], ready.index(stage), weights.index(stage * C + j))


@gluon.jit
def _settled(sums, PENDING: gl.constexpr, C: gl.constexpr):
    if C == 3:
        a, b, c = warpgroup_mma_wait(PENDING, deps=[sums[0], sums[1], sums[2]])
        return (a, b, c)
    else:
        a, b, c, d = warpgroup_mma_wait(PENDING, deps=[sums[0], sums[1], sums[2], sums[3]])
        return (a, b, c, d)


@gluon.jit
def _backward_group(
    given, held, tiles, eps,
    D: gl.constexpr, C: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, P: gl.constexpr,
    RING: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    dy, x, w, dx, normed = given
    weights, slots, own, ready, empty, full = held
    step = gl.num_programs(0) * GROUPS
    first = gl.program_id(0) * GROUPS
    rounds = (tiles - first + step - 1) // step  # the same for all groups: they share the weights
    for p in gl.static_range(RING):
        _bring(p, x, dy, (first + G) * SIDE, G * RING + p, slots, full, C, K)
    if G == 0:
        for k in gl.static_range(STAGES):
            _weights(w, weights, ready, k, k, C)
    none = gl.zeros((SIDE, SIDE), gl.float32, SUMS)
    for i in range(rounds):
        rows = (first + G + i * step) * SIDE
        pieces = _nothing()
        for p in gl.static_range(C):
            slot, phase = _slot(p, i, G, P, RING)
            mbarrier.wait(full.index(slot), phase)
            pieces += (slots.index(slot).load(SUMS),)
        values, scale = _normalise(pieces, eps, D, C)
        fence_async_shared()
        tma.store_wait(0)
        barrier()  # the tokens have been read, and so have the last results
        for p in gl.static_range(C):
            _advance(p, i, rounds, x, dy, rows, step, slots, full, C, K, P, RING, G)
            own.index(G * C + p).store(values[p])
        fence_async_shared()
        barrier()
        for j in gl.static_range(C):
            copy_out(normed, [rows, j * SIDE], own.index(G * C + j))
        sums = _nothing()
        for _ in gl.static_range(C):
            sums += (none,)
        for k in gl.static_range(K + 1):
            if k < K:
                slot, phase = _slot(C + k, i, G, P, RING)
                mbarrier.wait(full.index(slot), phase)
                if STAGES < K:
                    stage = (i * K + k) % STAGES
                    mbarrier.wait(ready.index(stage), ((i * K + k) // STAGES) & 1)
                else:
                    stage = k
                    mbarrier.wait(ready.index(k), 0)
                grads = slots.index(slot)
                under_way = _nothing()
                for j in gl.static_range(C):
                    b = weights.index(stage * C + j)
                    under_way += (warpgroup_mma(grads, b, sums[j], use_acc=k > 0, is_async=True),)
                sums = under_way
            if k > 0:
                sums = _settled(sums, C if k < K else 0, C)
                if k == K:
                    tma.store_wait(0)  # the normalised tokens have left
                barrier()
                _advance(C + k - 1, i, rounds, x, dy, rows, step, slots, full, C, K, P, RING, G)
                if STAGES < K:
                    last = i * K + k - 1
                    mbarrier.arrive(empty.index(last % STAGES), count=1)
                    if G == 0:  # noqa: SIM102 (known when compiled, the next is not)
                        if last + STAGES < rounds * K:
                            mbarrier.wait(empty.index(last % STAGES), (last // STAGES) & 1)
                            _weights(w, weights, ready, (k - 1 + STAGES) % K, last % STAGES, C)
        level = gl.zeros((SIDE, SIDE), gl.float32, SUMS)
        along = gl.zeros((SIDE, SIDE), gl.float32, SUMS)
        for j in gl.static_range(C):
            d = sums[j]
            if (j + 1) * SIDE > D:
                d = gl.where(_columns(j) < D, d, 0.0)
            level += d
            along += d * own.index(G * C + j).load(SUMS).to(gl.float32)
        level = (gl.sum(level, 1) / D)[:, None]
        along = (gl.sum(along, 1) / D)[:, None]
        for j in gl.static_range(C):
            mine = own.index(G * C + j)
            found = (sums[j] - level - mine.load(SUMS).to(gl.float32) * along) * scale[:, None]
            mine.store(found.to(mine.dtype))
        fence_async_shared()
        barrier()
        for j in gl.static_range(C):
            copy_out(dx, [rows, j * SIDE], own.index(G * C + j))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles"])
def normed_linear_backward_gluon_kernel(
    dy, x, w, dx, normed, tiles, eps,
    D: gl.constexpr, C: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, P: gl.constexpr,
    RING: gl.constexpr,
):  # fmt: skip
    weights = _pieces(w, STAGES * C)
    slots = _pieces(x, GROUPS * RING)
    own = _pieces(dx, GROUPS * C)
    ready = barriers(STAGES, 1)
    empty = barriers(STAGES, GROUPS)
    full = barriers(GROUPS * RING, 1)
    fence_async_shared()
    given = (dy, x, w, dx, normed)
    held = (weights, slots, own, ready, empty, full)
    gl.warp_specialize(
        [
            (_backward_group, (given, held, tiles, eps, D, C, K, STAGES, P, RING, 0)),
            (_backward_group, (given, held, tiles, eps, D, C, K, STAGES, P, RING, 1)),
        ],
        [4],
        [REGISTERS],
    )
    end_barriers(ready)
    end_barriers(empty)
    end_barriers(full)


class Backward(NamedTuple):
    """Pieces that each group asks for ahead, and rows of pieces of weights that are held.

    A tile's tokens are in shared memory all at once, so at least their pieces must be ahead; of
    weights that pass through it at least two rows.
    """

    ahead: int
    weights: int


# By the width in pieces: the fastest of those tried on an H200.
BACKWARD = {3: Backward(6, 3), 4: Backward(4, 3)}


@cache
def backward_constants(width: int, outputs: int) -> dict[str, int]:
    """What the kernel is compiled for; `outputs` are whole pieces."""
    side = SIDE.value
    pieces, rows = sum(tile_widths(width)) // side, outputs // side
    ahead, weights = BACKWARD[pieces]
    of_a_tile = pieces + rows
    constants = {"D": width, "C": pieces, "K": rows, "STAGES": min(weights, rows)}
    return constants | {"P": of_a_tile, "RING": min(ahead, of_a_tile)}


def backward(dy: Tensor, x: Tensor, w: Tensor, eps: float, dx: Tensor, normed: Tensor) -> None:
    """Fills dx (t d) and normed (t d + EXTRA)."""
    constants = backward_constants(x.shape[1], w.shape[0])
    tiles = tiles_in(x.shape[0], SIDE.value)
    given = dy, x, w, dx, normed
    count = min(processors(x.device), tiles_in(tiles, GROUPS.value))
    launch_kernel(
        normed_linear_backward_gluon_kernel, (count,),
        *piecewise(*given), tiles, eps, **constants, num_warps=4,
    )  # fmt: skip
