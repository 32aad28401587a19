"""The kernels of `feed_forward_kernels` for Hopper: groups of warps that take turns (Gluon).

The same equations, packed weights and results, in bfloat16 and for widths of 128 to 248. Each group
of four warps owns 64 tokens, and a program has two groups or three. The weights come through a ring
of tiles which all groups read: in a step, the first layer's tile i and the second's tile i - 1. The
groups multiply one after the other, so that one's products run under the GELU of the others. The
first product's operand is the normalised tokens, rounded as a separate LayerNorm's would be, then
(1, 0, 1): these pick up both parts of c, and nothing of u, from the columns behind the packed
weights' channels. Channels come in tiles of 128 and 64, and a third, narrow one for widths beyond.

Gluon is young, and its names change: `mlp` does without this module where it cannot be imported, or
where a kernel cannot be compiled.
"""

from functools import cache, lru_cache
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
    gelu,
    load_place,
    normalise,
    of_group,
    token_tiles,
    weight_tiles,
)
from fst.kernels.hopper import processors
from fst.kernels.launching import launch_kernel
from fst.kernels.tiles import tiles_in


@gluon.jit
def _fetch(
    weights, ring, ready, i,
    D1: gl.constexpr, D2: gl.constexpr, HID: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What step i reads: tile i of the first weights, tile i - 1 of the second.

    Of the first step and the last, half is out of range and arrives as zeros.
    """
    stage = i % STAGES
    bar = ready.index(stage)
    mbarrier.expect(bar, 2 * HID * (TILE + D1 + D2) * 2)
    copy_in(weights[0], [i * HID, 0], bar, ring[0].index(stage))
    copy_in(weights[1], [i * HID, TILE], bar, ring[1].index(stage))
    if D2 > 0:
        copy_in(weights[4], [i * HID, TILE + D1], bar, ring[4].index(stage))
    copy_in(weights[2], [(i - 1) * HID, 0], bar, ring[2].index(stage))
    copy_in(weights[3], [(i - 1) * HID, TILE], bar, ring[3].index(stage))
    if D2 > 0:
        copy_in(weights[5], [(i - 1) * HID, TILE + D1], bar, ring[5].index(stage))


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
    barrier()
    copy_out(target, [rows, FIRST], own)


@gluon.jit
def _await_turn(turns, i, G: gl.constexpr):
    """Groups multiply one after the other; the first begins."""
    mbarrier.wait(turns.index(G), (i & 1) ^ (G == 0))


@gluon.jit
def _pass_turn(turns, GROUPS: gl.constexpr, G: gl.constexpr):
    mbarrier.arrive(turns.index((G + 1) % GROUPS), count=1)


@gluon.jit
def _copy_place(spots, spot, placed, rows, P, i, HID: gl.constexpr):
    """Tile i of the rows' own addends into shared memory: the rows follow one another."""
    mbarrier.expect(placed, ROWS * HID * 2)
    copy_in(spots, [rows % P, i * HID], placed, spot)


@gluon.jit
def _activate(
    pre, place, spots, spot, placed, rows, T, P, i, dtype: gl.constexpr,
    H: gl.constexpr, PLACE: gl.constexpr, TILES: gl.constexpr, HID: gl.constexpr,
):  # fmt: skip
    """The hidden layer's tile i of a group, once it is multiplied."""
    MH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HID, 16])
    if PLACE == 1:
        pre += load_place(place, rows, T, P, i, H, HID).to(gl.float32)
    if PLACE == 2:
        mbarrier.wait(placed, i & 1)
        pre += spot.load(MH).to(gl.float32)
        if i + 1 < TILES:
            fence_async_shared()
            barrier()  # this tile has been read
            _copy_place(spots, spot, placed, rows, P, i + 1, HID)
    return gelu(pre).to(dtype)


@gluon.jit
def _first(own, ring, stage, none, D2: gl.constexpr):
    """Begins the first product of a tile."""
    w0 = ring[0].index(stage).permute((1, 0))
    w1 = ring[1].index(stage).permute((1, 0))
    pre = warpgroup_mma(own[0], w0, none, use_acc=False, is_async=True)
    pre = warpgroup_mma(own[1], w1, pre, is_async=True)
    if D2 > 0:
        w2 = ring[4].index(stage).permute((1, 0))
        pre = warpgroup_mma(own[2], w2, pre, is_async=True)
    return pre


@gluon.jit
def _operand(h, WIDE: gl.constexpr):
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    return gl.convert_layout(h, gl.DotOperandLayout(0, M, 2))


@gluon.jit
def _no_sums(D1: gl.constexpr, D2: gl.constexpr):
    M0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    M1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D1, 16])
    M2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, max(D2, 16), 16])
    s0 = gl.zeros((ROWS, TILE), gl.float32, M0)
    s1 = gl.zeros((ROWS, D1), gl.float32, M1)
    if D2 > 0:
        return s0, s1, gl.zeros((ROWS, D2), gl.float32, M2)
    else:
        return s0, s1


@gluon.jit
def _second(h, ring, stage, sums, D1: gl.constexpr, D2: gl.constexpr):
    """Begins to add the second product of a tile; gives its operands, too."""
    a0 = _operand(h, TILE)
    a1 = _operand(h, D1)
    t0 = warpgroup_mma(a0, ring[2].index(stage), sums[0], is_async=True)
    t1 = warpgroup_mma(a1, ring[3].index(stage), sums[1], is_async=True)
    if D2 > 0:
        a2 = _operand(h, D2)
        t2 = warpgroup_mma(a2, ring[5].index(stage), sums[2], is_async=True)
        return (t0, t1, t2), (a0, a1, a2)
    else:
        return (t0, t1), (a0, a1)


@gluon.jit
def _settled(sums, a, PENDING: gl.constexpr, D2: gl.constexpr):
    """The sums, done; named with the operands so that nobody takes their registers before."""
    if D2 > 0:
        s0, s1, s2, _, _, _ = warpgroup_mma_wait(
            PENDING, deps=[sums[0], sums[1], sums[2], a[0], a[1], a[2]]
        )
        return s0, s1, s2
    else:
        s0, s1, _, _ = warpgroup_mma_wait(PENDING, deps=[sums[0], sums[1], a[0], a[1]])
        return s0, s1


@gluon.jit
def _forward_group(
    given, held, T, P, eps,
    D: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr, H: gl.constexpr, PLACE: gl.constexpr,
    TILES: gl.constexpr, HID: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    MH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HID, 16])
    x, tokens, place, spots, weights, targets, b2 = given
    ring, owns, spot, ready, empty, arrived, turns = held
    if G == 0:
        for i in gl.static_range(STAGES):
            _fetch(weights, ring, ready, i, D1, D2, HID, STAGES)
    rows = gl.program_id(0) * (GROUPS * ROWS) + G * ROWS
    own = of_group(owns, D2, G)
    spot = spot.index(G % spot.shape[0])
    placed = arrived.index(GROUPS + G)
    dtype: gl.constexpr = owns[0].dtype
    if PLACE:
        copy_tokens(tokens, rows, arrived.index(G), D1, D2, own)
        if PLACE == 2:
            _copy_place(spots, spot, placed, rows, P, 0, HID)
        mbarrier.wait(arrived.index(G), 0)
    else:
        normalise(x, rows, T, eps, D, D1, D2, own)
    sums = _no_sums(D1, D2)
    none = gl.zeros((ROWS, HID), gl.float32, MH)
    mbarrier.wait(ready.index(0), 0)
    _await_turn(turns, 0, G)
    pre = _first(own, ring, 0, none, D2)
    _pass_turn(turns, GROUPS, G)
    pre = warpgroup_mma_wait(0, deps=[pre])
    mbarrier.arrive(empty.index(0), count=1)
    h = _activate(pre, place, spots, spot, placed, rows, T, P, 0, dtype, H, PLACE, TILES, HID)
    for i in range(1, TILES):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        _await_turn(turns, i, G)
        under_way, a = _second(h, ring, stage, sums, D1, D2)
        if GROUPS == 3:  # too few registers for both products at once
            sums = _settled(under_way, a, 0, D2)
        pre = _first(own, ring, stage, none, D2)
        _pass_turn(turns, GROUPS, G)
        if G == 0:  # noqa: SIM102 (known when compiled, the next is not)
            if i - 1 + STAGES <= TILES:
                last = (i - 1) % STAGES
                mbarrier.wait(empty.index(last), ((i - 1) // STAGES) & 1)
                _fetch(weights, ring, ready, i - 1 + STAGES, D1, D2, HID, STAGES)
        if GROUPS == 2:
            sums = _settled(under_way, a, 3 if D2 > 0 else 2, D2)
        pre = warpgroup_mma_wait(0, deps=[pre])
        mbarrier.arrive(empty.index(stage), count=1)
        h = _activate(pre, place, spots, spot, placed, rows, T, P, i, dtype, H, PLACE, TILES, HID)
    mbarrier.wait(ready.index(TILES % STAGES), (TILES // STAGES) & 1)
    under_way, a = _second(h, ring, TILES % STAGES, sums, D1, D2)
    if D2 > 0:
        s2, _ = warpgroup_mma_wait(0, deps=[under_way[2], a[2]])
    s0, s1 = _settled(under_way, a, 0, 0)
    _finish(s0, x, b2, rows, T, own[0], targets[0], PLACE == 0, D, 0, TILE)
    _finish(s1, x, b2, rows, T, own[1], targets[1], PLACE == 0, D, TILE, D1)
    if D2 > 0:
        _finish(s2, x, b2, rows, T, own[2], targets[2], PLACE == 0, D, TILE + D1, D2)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["T", "P"])
def feed_forward_gluon_kernel(
    x, x0, x1, x2, place, spots, w1a, w1b, w1c, w2a, w2b, w2c, y0, y1, y2, b2, T, P, eps,
    D: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr, H: gl.constexpr, PLACE: gl.constexpr,
    TILES: gl.constexpr, HID: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    tokens = (x0, x1, x2)
    weights = (w1a, w1b, w2a, w2b, w1c, w2c)
    targets = (y0, y1, y2)
    ring = weight_tiles(weights, D1, D2, HID, STAGES)
    own = token_tiles(targets, D1, D2, GROUPS)
    SPOTS: gl.constexpr = GROUPS if PLACE == 2 else 1
    ROOM: gl.constexpr = ROWS if PLACE == 2 else 8
    spot = gl.allocate_shared_memory(w1a.dtype, [SPOTS, ROOM, HID], spots.layout)
    ready = barriers(STAGES, 1)
    empty = barriers(STAGES, GROUPS)
    arrived = barriers(2 * GROUPS, 1)
    turns = barriers(GROUPS, 1)
    fence_async_shared()
    given = (x, tokens, place, spots, weights, targets, b2)
    held = (ring, own, spot, ready, empty, arrived, turns)
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (_forward_group, (given, held, T, P, eps,
                                  D, D1, D2, H, PLACE, TILES, HID, STAGES, GROUPS, 0)),
                (_forward_group, (given, held, T, P, eps,
                                  D, D1, D2, H, PLACE, TILES, HID, STAGES, GROUPS, 1)),
                (_forward_group, (given, held, T, P, eps,
                                  D, D1, D2, H, PLACE, TILES, HID, STAGES, GROUPS, 2)),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_forward_group, (given, held, T, P, eps,
                                  D, D1, D2, H, PLACE, TILES, HID, STAGES, GROUPS, 0)),
                (_forward_group, (given, held, T, P, eps,
                                  D, D1, D2, H, PLACE, TILES, HID, STAGES, GROUPS, 1)),
            ],
            [4],
            [REGISTERS],
        )  # fmt: skip
    end_barriers(ready)
    end_barriers(empty)
    end_barriers(arrived)
    end_barriers(turns)


HIDDEN = 64  # hidden units of a tile of weights
SHARED = 226 * 1024  # bytes of shared memory for tiles; the barriers lie behind
# Registers a thread may have, by the groups of a program.
REGISTERS = {2: 256, 3: 168}


class Plan(NamedTuple):
    """How a kernel is laid out: what is compiled beside the sizes."""

    groups: int
    stages: int
    place: int
    """0: none, 1: loaded by every thread, 2: copied in tiles."""


def way_of(place: Tensor | None, count: int) -> int:
    """Of taking the place: tiles of it must not wrap around, and begin at multiples of 16 bytes."""
    if place is None:
        return 0
    whole = len(place) % ROWS.value == 0 or len(place) == count
    return 2 if whole and place.data_ptr() % 16 == 0 else 1


@cache
def tiles_of(width: int) -> tuple[int, int, int]:
    """Channels of the three tiles, with room for three columns more; the last may be empty."""
    first, second = tile_widths(width)
    if second == 64:
        return first, second, 0
    return first, 64, next(wide for wide in (16, 32, 64) if first + 64 + wide >= width + 3)


@lru_cache(1024)
def plan(count: int, width: int, place: int, available: int) -> Plan:
    """Three groups share the weights better; two where that leaves fewer processors idle."""

    def rounds(groups: int) -> int:
        return groups * tiles_in(tiles_in(count, groups * ROWS.value), available)

    columns = sum(tiles_of(width))
    groups = 3 if columns <= 208 and rounds(3) <= 1.1 * rounds(2) else 2
    return Plan(groups, stages(groups, columns, place), place)


def stages(groups: int, columns: int, place: int) -> int:
    """How many tiles of both weights fit beside the tokens."""
    own = groups * ROWS.value * (columns + (HIDDEN if place == 2 else 0))
    return min(3, (SHARED // 2 - own) // (2 * HIDDEN * columns))


def processors_of(x: Tensor) -> int:
    return processors(x.device) if x.is_cuda else 132


def forward(
    x: Tensor, place: Tensor | None, w1: Tensor, w2: Tensor, b2: Tensor, eps: float, y: Tensor
) -> None:
    """Fills y (t d)."""
    count = x.shape[0]
    widths = tiles_of(x.shape[1])
    boxes, absent = (widths, ()) if widths[2] else (widths[:2], (None,))
    chosen = plan(count, x.shape[1], way_of(place, count), processors_of(x))
    tiles, rows = w1.shape[0] // HIDDEN, ROWS.value
    spots = x if place is None else place
    # Copied as they are only where they are not normalised first.
    tokens = (None,) * 3 if place is None else (*described(x, rows, *boxes), *absent)
    launch_kernel(
        feed_forward_gluon_kernel, (tiles_in(count, chosen.groups * rows),),
        x, *tokens, spots, *described(spots, rows, HIDDEN),
        *described(w1, HIDDEN, *boxes), *absent, *described(w2, HIDDEN, *boxes), *absent,
        *described(y, rows, *boxes), *absent, b2, count, spots.shape[0], eps,
        D=x.shape[1], D1=widths[1], D2=widths[2], H=spots.shape[1], PLACE=chosen.place,
        TILES=tiles, HID=HIDDEN, STAGES=min(chosen.stages, tiles + 1),
        REGISTERS=REGISTERS[chosen.groups], GROUPS=chosen.groups, num_warps=4,
    )  # fmt: skip
