"""The kernels of `feed_forward` and `point_mlp` for Hopper: groups of warps (Gluon).

The same equations, packed weights and results, in bfloat16 and for widths of 128 to 248. Each group
of four warps owns 64 tokens.

Going forward, a program has two groups or three. The weights come through a ring of tiles which all
groups read: in a step, the first layer's tile i and the second's tile i - 1. The groups multiply
one after the other, so that one's products run under the GELU of the others. The first product's
operand is the normalised tokens, rounded as a separate LayerNorm's would be, then (1, 0, 1): these
pick up both parts of c, and nothing of u, from the columns behind the packed weights' channels.
Channels come in tiles of 128 and 64, and a third, narrow one for widths beyond.

Going backward, two groups run apart: there is no barrier between them, so one computes GELU while
the other multiplies. Each computes its tokens' hidden layer again, tile by tile. That layer and the
gradient of its argument leave through small staging tiles in shared memory while the next product
runs. Channels come in the two tiles of the packed weights.
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

from fst.kernels.gluon_parts import (
    barrier,
    barriers,
    copy_in,
    copy_out,
    described,
    end_barriers,
    exp2,
)
from fst.kernels.launch import launch_kernel, processors, tiles_in
from fst.kernels.weights import tile_widths

ROWS = gl.constexpr(64)  # tokens of a group of warps
TILE = gl.constexpr(128)  # channels of the first tile


@gluon.jit
def _tail(a):
    """Φ(-a), as in `fst.kernels.feed_forward`: Gluon kernels cannot call Triton's functions."""
    p = a * -0.0005002620746381581 + 0.007282395847141743
    p = p * a - 0.05234328657388687
    p = p * a - 0.4594140350818634
    p = p * a - 1.1510521173477173
    p = p * a - 1.0000019073486328
    return exp2(p)


@gluon.jit
def gelu(x):
    a = gl.abs(x)
    return gl.maximum(x, 0.0) - a * _tail(a)


@gluon.jit
def gelu_and_slope(x):
    a = gl.abs(x)
    tail = _tail(a)
    s = tail - a * exp2(x * x * -0.7213475204444817 - 1.3257480647361593)
    return gl.maximum(x, 0.0) - a * tail, gl.where(x > 0.0, 1.0 - s, s)


@gluon.jit
def _tokens(x, rows, T, D: gl.constexpr, FIRST: gl.constexpr, WIDE: gl.constexpr):
    """Columns of the tokens in float32, zeros behind the last, and whether they are channels."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDE, WIDE // 8], [4, 1], [1, 0])
    r = rows + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    c = FIRST + gl.arange(0, WIDE, layout=gl.SliceLayout(0, L))
    there = (c < D)[None, :]
    f = gl.load(x + r[:, None] * D + c[None, :], mask=(r < T)[:, None] & there, other=0.0)
    return f.to(gl.float32), there


@gluon.jit
def _like(values, WIDE: gl.constexpr):
    """A number of each token, as tiles of this width have it."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDE, WIDE // 8], [4, 1], [1, 0])
    return gl.convert_layout(values, gl.SliceLayout(1, L))


@gluon.jit
def _store_normed(own, f, scale, D: gl.constexpr, FIRST: gl.constexpr, WIDE: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDE, WIDE // 8], [4, 1], [1, 0])
    c = FIRST + gl.arange(0, WIDE, layout=gl.SliceLayout(0, L))
    ones = gl.where((c == D) | (c == D + 2), 1.0, 0.0)[None, :]
    own.store((f * _like(scale, WIDE)[:, None] + ones).to(own.dtype))


@gluon.jit
def normalise(x, rows, T, eps, D: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr, own):
    """The normalised tokens into shared memory; mean and reciprocal standard deviation."""
    f0, _ = _tokens(x, rows, T, D, 0, TILE)
    f1, in1 = _tokens(x, rows, T, D, TILE, D1)
    total = gl.sum(f0, 1) + _like(gl.sum(f1, 1), TILE)
    if D2 > 0:
        f2, in2 = _tokens(x, rows, T, D, TILE + D1, D2)
        total += _like(gl.sum(f2, 1), TILE)
    mean = total / D
    f0 = f0 - mean[:, None]
    f1 = gl.where(in1, f1 - _like(mean, D1)[:, None], 0.0)
    square = gl.sum(f0 * f0, 1) + _like(gl.sum(f1 * f1, 1), TILE)
    if D2 > 0:
        f2 = gl.where(in2, f2 - _like(mean, D2)[:, None], 0.0)
        square += _like(gl.sum(f2 * f2, 1), TILE)
    scale = 1.0 / gl.sqrt(square / D + eps)
    own[0].store((f0 * scale[:, None]).to(own[0].dtype))
    _store_normed(own[1], f1, scale, D, TILE, D1)
    if D2 > 0:
        _store_normed(own[2], f2, scale, D, TILE + D1, D2)
    fence_async_shared()
    barrier()
    return mean, scale


@gluon.jit
def copy_tokens(tokens, rows, bar, D1: gl.constexpr, D2: gl.constexpr, own):
    """Tokens as they are into shared memory; `bar` tells when they are there."""
    mbarrier.expect(bar, ROWS * (TILE + D1 + D2) * 2)
    copy_in(tokens[0], [rows, 0], bar, own[0])
    copy_in(tokens[1], [rows, TILE], bar, own[1])
    if D2 > 0:
        copy_in(tokens[2], [rows, TILE + D1], bar, own[2])


@gluon.jit
def load_term(term, rows, T, P, i, H: gl.constexpr, HID: gl.constexpr):
    """Tile i of the rows' position terms, as the product lies; token t takes row t mod P."""
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HID, 16])
    r = rows + gl.arange(0, ROWS, layout=gl.SliceLayout(1, M))
    c = i * HID + gl.arange(0, HID, layout=gl.SliceLayout(0, M))
    mask = (r < T)[:, None] & (c < H)[None, :]
    return gl.load(term + (r % P)[:, None] * H + c[None, :], mask=mask, other=0.0)


@gluon.jit
def weight_tiles(
    weights, D1: gl.constexpr, D2: gl.constexpr, HID: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Room for so many tiles of both weights."""
    dtype: gl.constexpr = weights[0].dtype
    first0 = gl.allocate_shared_memory(dtype, [STAGES, HID, TILE], weights[0].layout)
    first1 = gl.allocate_shared_memory(dtype, [STAGES, HID, D1], weights[1].layout)
    second0 = gl.allocate_shared_memory(dtype, [STAGES, HID, TILE], weights[2].layout)
    second1 = gl.allocate_shared_memory(dtype, [STAGES, HID, D1], weights[3].layout)
    if D2 > 0:
        first2 = gl.allocate_shared_memory(dtype, [STAGES, HID, D2], weights[4].layout)
        second2 = gl.allocate_shared_memory(dtype, [STAGES, HID, D2], weights[5].layout)
        return first0, first1, second0, second1, first2, second2
    else:
        return first0, first1, second0, second1


@gluon.jit
def token_tiles(like, D1: gl.constexpr, D2: gl.constexpr, GROUPS: gl.constexpr):
    """All tiles of the tokens of every group."""
    dtype: gl.constexpr = like[0].dtype
    own0 = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, TILE], like[0].layout)
    own1 = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, D1], like[1].layout)
    if D2 > 0:
        return own0, own1, gl.allocate_shared_memory(dtype, [GROUPS, ROWS, D2], like[2].layout)
    else:
        return own0, own1


@gluon.jit
def of_group(tiles, D2: gl.constexpr, G: gl.constexpr):
    """One group's part of `token_tiles`."""
    if D2 > 0:
        return tiles[0].index(G), tiles[1].index(G), tiles[2].index(G)
    else:
        return tiles[0].index(G), tiles[1].index(G)


@gluon.jit
def _fetch(
    weights, ring, ready, i, LAG: gl.constexpr,
    D1: gl.constexpr, D2: gl.constexpr, HID: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What step i reads: tile i of the first weights, tile i - LAG of the second.

    Of the first step and the last, half may be out of range and arrives as zeros.
    """
    stage = i % STAGES
    bar = ready.index(stage)
    mbarrier.expect(bar, 2 * HID * (TILE + D1 + D2) * 2)
    copy_in(weights[0], [i * HID, 0], bar, ring[0].index(stage))
    copy_in(weights[1], [i * HID, TILE], bar, ring[1].index(stage))
    if D2 > 0:
        copy_in(weights[4], [i * HID, TILE + D1], bar, ring[4].index(stage))
    copy_in(weights[2], [(i - LAG) * HID, 0], bar, ring[2].index(stage))
    copy_in(weights[3], [(i - LAG) * HID, TILE], bar, ring[3].index(stage))
    if D2 > 0:
        copy_in(weights[5], [(i - LAG) * HID, TILE + D1], bar, ring[5].index(stage))


@gluon.jit
def _write_outputs(
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
def _copy_term(term_tiles, term_slot, term_ready, rows, P, i, HID: gl.constexpr):
    """Tile i of the rows' position terms into shared memory: the rows follow one another."""
    mbarrier.expect(term_ready, ROWS * HID * 2)
    copy_in(term_tiles, [rows % P, i * HID], term_ready, term_slot)


@gluon.jit
def _activate(
    pre, term, term_tiles, term_slot, term_ready, rows, T, P, i, dtype: gl.constexpr,
    H: gl.constexpr, TERM: gl.constexpr, TILES: gl.constexpr, HID: gl.constexpr,
):  # fmt: skip
    """The hidden layer's tile i of a group, once it is multiplied."""
    MH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HID, 16])
    if TERM == 1:
        pre += load_term(term, rows, T, P, i, H, HID).to(gl.float32)
    if TERM == 2:
        mbarrier.wait(term_ready, i & 1)
        pre += term_slot.load(MH).to(gl.float32)
        if i + 1 < TILES:
            fence_async_shared()
            barrier()  # this tile has been read
            _copy_term(term_tiles, term_slot, term_ready, rows, P, i + 1, HID)
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
def _zero_sums(D1: gl.constexpr, D2: gl.constexpr):
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
def _finished(sums, a, PENDING: gl.constexpr, D2: gl.constexpr):
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
    D: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr, H: gl.constexpr, TERM: gl.constexpr,
    TILES: gl.constexpr, HID: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    MH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HID, 16])
    x, tokens, term, term_tiles, weights, targets, b2 = given
    ring, owns, term_slot, ready, empty, arrived, turns = held
    if G == 0:
        for i in gl.static_range(STAGES):
            _fetch(weights, ring, ready, i, 1, D1, D2, HID, STAGES)
    rows = gl.program_id(0) * (GROUPS * ROWS) + G * ROWS
    own = of_group(owns, D2, G)
    term_slot = term_slot.index(G % term_slot.shape[0])
    term_ready = arrived.index(GROUPS + G)
    dtype: gl.constexpr = owns[0].dtype
    if TERM:
        copy_tokens(tokens, rows, arrived.index(G), D1, D2, own)
        if TERM == 2:
            _copy_term(term_tiles, term_slot, term_ready, rows, P, 0, HID)
        mbarrier.wait(arrived.index(G), 0)
    else:
        normalise(x, rows, T, eps, D, D1, D2, own)
    sums = _zero_sums(D1, D2)
    none = gl.zeros((ROWS, HID), gl.float32, MH)
    mbarrier.wait(ready.index(0), 0)
    _await_turn(turns, 0, G)
    pre = _first(own, ring, 0, none, D2)
    _pass_turn(turns, GROUPS, G)
    pre = warpgroup_mma_wait(0, deps=[pre])
    mbarrier.arrive(empty.index(0), count=1)
    h = _activate(
        pre, term, term_tiles, term_slot, term_ready, rows, T, P, 0, dtype, H, TERM, TILES, HID
    )
    for i in range(1, TILES):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        _await_turn(turns, i, G)
        under_way, a = _second(h, ring, stage, sums, D1, D2)
        if GROUPS == 3:  # too few registers for both products at once
            sums = _finished(under_way, a, 0, D2)
        pre = _first(own, ring, stage, none, D2)
        _pass_turn(turns, GROUPS, G)
        if G == 0:  # noqa: SIM102 (known when compiled, the next is not)
            if i - 1 + STAGES <= TILES:
                last = (i - 1) % STAGES
                mbarrier.wait(empty.index(last), ((i - 1) // STAGES) & 1)
                _fetch(weights, ring, ready, i - 1 + STAGES, 1, D1, D2, HID, STAGES)
        if GROUPS == 2:
            sums = _finished(under_way, a, 3 if D2 > 0 else 2, D2)
        pre = warpgroup_mma_wait(0, deps=[pre])
        mbarrier.arrive(empty.index(stage), count=1)
        h = _activate(
            pre, term, term_tiles, term_slot, term_ready, rows, T, P, i, dtype, H, TERM, TILES, HID
        )
    mbarrier.wait(ready.index(TILES % STAGES), (TILES // STAGES) & 1)
    under_way, a = _second(h, ring, TILES % STAGES, sums, D1, D2)
    if D2 > 0:
        s2, _ = warpgroup_mma_wait(0, deps=[under_way[2], a[2]])
    s0, s1 = _finished(under_way, a, 0, 0)
    _write_outputs(s0, x, b2, rows, T, own[0], targets[0], TERM == 0, D, 0, TILE)
    _write_outputs(s1, x, b2, rows, T, own[1], targets[1], TERM == 0, D, TILE, D1)
    if D2 > 0:
        _write_outputs(s2, x, b2, rows, T, own[2], targets[2], TERM == 0, D, TILE + D1, D2)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["T", "P"])
def feed_forward_gluon_kernel(
    x, x0, x1, x2, term, term_tiles, w1a, w1b, w1c, w2a, w2b, w2c, y0, y1, y2, b2, T, P, eps,
    D: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr, H: gl.constexpr, TERM: gl.constexpr,
    TILES: gl.constexpr, HID: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    tokens = (x0, x1, x2)
    weights = (w1a, w1b, w2a, w2b, w1c, w2c)
    targets = (y0, y1, y2)
    ring = weight_tiles(weights, D1, D2, HID, STAGES)
    own = token_tiles(targets, D1, D2, GROUPS)
    TERM_SLOTS: gl.constexpr = GROUPS if TERM == 2 else 1
    TERM_ROWS: gl.constexpr = ROWS if TERM == 2 else 8
    term_slot = gl.allocate_shared_memory(
        w1a.dtype, [TERM_SLOTS, TERM_ROWS, HID], term_tiles.layout
    )
    ready = barriers(STAGES, 1)
    empty = barriers(STAGES, GROUPS)
    arrived = barriers(2 * GROUPS, 1)
    turns = barriers(GROUPS, 1)
    fence_async_shared()
    given = (x, tokens, term, term_tiles, weights, targets, b2)
    held = (ring, own, term_slot, ready, empty, arrived, turns)
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (_forward_group, (given, held, T, P, eps,
                                  D, D1, D2, H, TERM, TILES, HID, STAGES, GROUPS, 0)),
                (_forward_group, (given, held, T, P, eps,
                                  D, D1, D2, H, TERM, TILES, HID, STAGES, GROUPS, 1)),
                (_forward_group, (given, held, T, P, eps,
                                  D, D1, D2, H, TERM, TILES, HID, STAGES, GROUPS, 2)),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_forward_group, (given, held, T, P, eps,
                                  D, D1, D2, H, TERM, TILES, HID, STAGES, GROUPS, 0)),
                (_forward_group, (given, held, T, P, eps,
                                  D, D1, D2, H, TERM, TILES, HID, STAGES, GROUPS, 1)),
            ],
            [4],
            [REGISTERS],
        )  # fmt: skip
    end_barriers((ready, empty, arrived, turns))


HIDDEN = 64  # hidden units of a tile of weights
SHARED = 226 * 1024  # bytes of shared memory for tiles; the barriers lie behind
# Registers a thread of the forward kernel may have, by the groups of a program.
FORWARD_REGISTERS = {2: 256, 3: 168}


class Plan(NamedTuple):
    """How a kernel is laid out: what is compiled beside the sizes."""

    groups: int
    stages: int


def term_way(term: Tensor | None, count: int) -> int:
    """How the term is taken. 0: there is none, 1: loaded by every thread, 2: copied in tiles, which
    must not wrap around, and begin at multiples of 16 bytes."""
    if term is None:
        return 0
    whole = len(term) % ROWS.value == 0 or len(term) == count
    return 2 if whole and term.data_ptr() % 16 == 0 else 1


@cache
def tiles_of(width: int) -> tuple[int, int, int]:
    """Channels of the three tiles, with room for three columns more; the last may be empty."""
    first, second = tile_widths(width)
    if second == 64:
        return first, second, 0
    return first, 64, next(wide for wide in (16, 32, 64) if first + 64 + wide >= width + 3)


@lru_cache(1024)
def plan(count: int, width: int, term: int, available: int) -> Plan:
    """Three groups share the weights better; two where that leaves fewer processors idle."""

    def rounds(groups: int) -> int:
        return groups * tiles_in(tiles_in(count, groups * ROWS.value), available)

    columns = sum(tiles_of(width))
    groups = 3 if columns <= 208 and rounds(3) <= 1.1 * rounds(2) else 2
    # As many tiles of both weights as fit beside the tokens.
    own = groups * ROWS.value * (columns + (HIDDEN if term == 2 else 0))
    return Plan(groups, min(3, (SHARED // 2 - own) // (2 * HIDDEN * columns)))


def forward(
    x: Tensor, term: Tensor | None, w1: Tensor, w2: Tensor, b2: Tensor, eps: float, y: Tensor
) -> None:
    """Fills y (t d)."""
    count = x.shape[0]
    widths = tiles_of(x.shape[1])
    boxes, absent = (widths, ()) if widths[2] else (widths[:2], (None,))
    way = term_way(term, count)
    groups, stages = plan(count, x.shape[1], way, processors(x.device))
    tiles, rows = w1.shape[0] // HIDDEN, ROWS.value
    addend = x if term is None else term
    # Copied as they are only where they are not normalised first.
    tokens = (None,) * 3 if term is None else (*described(x, rows, *boxes), *absent)
    launch_kernel(
        feed_forward_gluon_kernel, (tiles_in(count, groups * rows),),
        x, *tokens, addend, *described(addend, rows, HIDDEN),
        *described(w1, HIDDEN, *boxes), *absent, *described(w2, HIDDEN, *boxes), *absent,
        *described(y, rows, *boxes), *absent, b2, count, addend.shape[0], eps,
        D=x.shape[1], D1=widths[1], D2=widths[2], H=addend.shape[1], TERM=way,
        TILES=tiles, HID=HIDDEN, STAGES=min(stages, tiles + 1),
        REGISTERS=FORWARD_REGISTERS[groups], GROUPS=groups, num_warps=4,
    )  # fmt: skip


class BackwardTiles(NamedTuple):
    """Hidden units of a tile of weights, and how many tiles the ring holds."""

    hidden: int
    stages: int


# By the channels of the second tile: what fits into shared memory and spills no register.
BACKWARD_TILES = {64: BackwardTiles(64, 2), 128: BackwardTiles(32, 2)}
# Registers a thread of the backward kernel may have.
BACKWARD_REGISTERS = 256


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
    x, tokens, term, weights, grads, targets, sums, ring, own, given, staged,
    ready, empty, arrived, T, P, eps,
    D: gl.constexpr, D1: gl.constexpr, H: gl.constexpr, TERM: gl.constexpr,
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
            _fetch(weights, ring, ready, i, 0, D1, 0, HID, STAGES)
    if TERM:
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
        if TERM:
            term_tile = load_term(term, rows, T, P, i, H, HID)
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
        if TERM:
            pre += term_tile.to(gl.float32)
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
                _fetch(weights, ring, ready, i + STAGES, 0, D1, 0, HID, STAGES)
    if not TERM:
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
    x, x0, x1, term, w1a, w1b, w2a, w2b, dy0, dy1, hidden, change, dx0, dx1, n0, n1, sums,
    T, P, eps,
    D: gl.constexpr, D1: gl.constexpr, H: gl.constexpr, TERM: gl.constexpr,
    TILES: gl.constexpr, HID: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = w1a.dtype
    tokens = (x0, x1)
    weights = (w1a, w1b, w2a, w2b)
    grads = (dy0, dy1)
    targets = (hidden, change, dx0, dx1, n0, n1)
    ring = weight_tiles(weights, D1, 0, HID, STAGES)
    # The tokens have the gradients' tiles; without a position term they are not described.
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
            (_backward_group, (x, tokens, term, weights, grads, targets, sums, ring, own, given,
                               staged, ready, empty, arrived, T, P, eps,
                               D, D1, H, TERM, TILES, HID, STAGES, 0)),
            (_backward_group, (x, tokens, term, weights, grads, targets, sums, ring, own, given,
                               staged, ready, empty, arrived, T, P, eps,
                               D, D1, H, TERM, TILES, HID, STAGES, 1)),
        ],
        [4],
        [REGISTERS],
    )  # fmt: skip
    end_barriers((ready, empty, arrived))


def backward(
    dy: Tensor, x: Tensor, term: Tensor | None, w1: Tensor, w2: Tensor, eps: float,
    dx: Tensor, normed: Tensor | None, hidden: Tensor, change: Tensor, sums: Tensor,
) -> None:  # fmt: skip
    """Fills dx (t d), normed (t d + EXTRA), hidden and change (t h), sums (t / 64 d)."""
    first, second = tile_widths(x.shape[1])
    tiles, rows = BACKWARD_TILES[second], ROWS.value
    count = w1.shape[0] // tiles.hidden
    addend = x if term is None else term
    # Tokens are copied as they are, or normalised, and then copied out.
    tokens = (None, None) if term is None else described(x, rows, first, second)
    ones = (None, None) if normed is None else described(normed, rows, first, second)
    launch_kernel(
        feed_forward_backward_gluon_kernel, (tiles_in(x.shape[0], 2 * rows),),
        x, *tokens, addend,
        *described(w1, tiles.hidden, first, second), *described(w2, tiles.hidden, first, second),
        *described(dy, rows, first, second),
        *described(hidden, rows, tiles.hidden), *described(change, rows, tiles.hidden),
        *described(dx, rows, first, second), *ones, sums, x.shape[0], addend.shape[0], eps,
        D=x.shape[1], D1=second, H=addend.shape[1], TERM=term is not None,
        TILES=count, HID=tiles.hidden, STAGES=min(tiles.stages, count),
        REGISTERS=BACKWARD_REGISTERS, num_warps=4,
    )  # fmt: skip
