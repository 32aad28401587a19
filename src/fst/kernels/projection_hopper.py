"""The kernels of `projection` for Hopper (Gluon): tokens and weights are fetched early.

The same equations, packed weights and results, in bfloat16 and for widths of 128 to 248. As many
programs as multiprocessors each hold weights in shared memory and go through tiles of 64 tokens.
Groups of four warps run apart, each on its own tile. A group asks for its next tokens as soon as it
has read the last ones, and leaves its results to a copy that runs by itself, so that memory always
has something to do: these kernels can be no faster than what they read and write.

Everything moves in pieces of 64 × 64. A group sees tokens as the tensor cores' sums lie: four
threads share a row, and the normalised tokens are an operand without leaving the registers.
Outputs beyond one slice of the weights belong to other programs.

Going backward, a group's pieces come in the order of their use: those of the tokens, of the
outputs' gradient, then those of the next tile. The normalised tokens wait in shared memory, where
they also leave from, until they make way for the tokens' gradient. Weights that do not fit pass
through shared memory, once for all groups.
"""

from functools import cache

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

from fst.kernels.gluon_parts import (
    barrier,
    barriers,
    copy_in,
    copy_out,
    described,
    end_barriers,
    nothing,
)
from fst.kernels.launch import launch_kernel, processors, tiles_in
from fst.kernels.weights import tile_widths

GROUPS = gl.constexpr(2)  # of four warps each
REGISTERS = gl.constexpr(256)  # that a thread may have
SIDE = gl.constexpr(64)  # tokens of a group, and the side of every piece
BYTES = gl.constexpr(64 * 64 * 2)  # of a piece
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, SUMS.value, 2))


@gluon.jit
def _pieces(like, COUNT: gl.constexpr):
    return gl.allocate_shared_memory(like.dtype, [COUNT, SIDE, SIDE], like.layout)


@gluon.jit
def _columns(j):
    return (j * SIDE + gl.arange(0, SIDE, layout=gl.SliceLayout(0, SUMS)))[None, :]


@gluon.jit
def _normalise(pieces, eps, D: gl.constexpr, C: gl.constexpr):
    """Tokens in C pieces, normalised, then (1, 0, 1) behind them; the reciprocal std."""
    total = gl.zeros((SIDE, SIDE), gl.float32, SUMS)
    for j in gl.static_range(C):
        total += pieces[j].to(gl.float32)
    mean = (gl.sum(total, 1) / D)[:, None]
    square = gl.zeros((SIDE, SIDE), gl.float32, SUMS)
    for j in gl.static_range(C):
        f = pieces[j].to(gl.float32) - mean
        if (j + 1) * SIDE > D:
            f = gl.where(_columns(j) < D, f, 0.0)
        square += f * f
    scale = 1.0 / gl.sqrt(gl.sum(square, 1) / D + eps)
    normed = nothing()
    for j in gl.static_range(C):
        f = (pieces[j].to(gl.float32) - mean) * scale[:, None]
        if (j + 1) * SIDE > D:
            c = _columns(j)
            f = gl.where(c < D, f, gl.where((c == D) | (c == D + 2), 1.0, 0.0))
        normed += (f.to(pieces[j].dtype),)
    return normed, scale


@gluon.jit
def _fetch_rows(source, rows, bar, slots, first, C: gl.constexpr):
    """The C pieces of these rows into slots from the first on; `bar` tells when they are there."""
    mbarrier.expect(bar, C * BYTES)
    for j in gl.static_range(C):
        copy_in(source, [rows, j * SIDE], bar, slots.index(first + j))


@gluon.jit
def _product(a, weights, ready, o: gl.constexpr, C: gl.constexpr):
    """Of the tokens with piece o of the outputs; under way."""
    mbarrier.wait(ready.index(o), 0)
    sums = gl.zeros((SIDE, SIDE), gl.float32, SUMS)
    for j in gl.static_range(C):
        b = weights.index(o * C + j).permute((1, 0))
        sums = warpgroup_mma(a[j], b, sums, use_acc=j > 0, is_async=True)
    return sums


@gluon.jit
def _forward_group(
    given, held, tiles, slices, eps,
    D: gl.constexpr, C: gl.constexpr, OUT: gl.constexpr,
    PREFETCH: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    x, w, y = given
    weights, slots, staged, ready, arrived = held
    begin = gl.program_id(0) % slices * OUT
    first = gl.program_id(0) // slices * GROUPS + G
    step = gl.num_programs(0) // slices * GROUPS
    rounds = (tiles - first + step - 1) // step
    for i in gl.static_range(PREFETCH):
        if i < rounds:
            rows = (first + i * step) * SIDE
            _fetch_rows(x, rows, arrived.index(G * PREFETCH + i), slots, (G * PREFETCH + i) * C, C)
    if G == 0:
        for o in gl.static_range(OUT):
            mbarrier.expect(ready.index(o), C * BYTES)
            for j in gl.static_range(C):
                at = [(begin + o) * SIDE, j * SIDE]
                copy_in(w, at, ready.index(o), weights.index(o * C + j))
    for i in range(rounds):
        rows = (first + i * step) * SIDE
        slot = G * PREFETCH + i % PREFETCH
        mbarrier.wait(arrived.index(slot), (i // PREFETCH) & 1)
        pieces = nothing()
        for j in gl.static_range(C):
            pieces += (slots.index(slot * C + j).load(SUMS),)
        normed, _ = _normalise(pieces, eps, D, C)
        fence_async_shared()
        tma.store_wait(0)
        barrier()  # the tokens have been read, and so have the last results
        if i + PREFETCH < rounds:
            _fetch_rows(x, rows + PREFETCH * step * SIDE, arrived.index(slot), slots, slot * C, C)
        a = nothing()
        for j in gl.static_range(C):
            a += (gl.convert_layout(normed[j], LEFT),)
        found = _product(a, weights, ready, 0, C)
        for o in gl.static_range(OUT):
            if o + 1 < OUT:
                following = _product(a, weights, ready, o + 1, C)
                result = warpgroup_mma_wait(C, deps=[found])
                found = following
            else:
                # Named with its operands so that nobody takes their registers before.
                last = (found,)
                result = warpgroup_mma_wait(0, deps=last + a)[0]
            piece = staged.index(G * OUT + o)
            piece.store(result.to(piece.dtype))
            fence_async_shared()
            barrier()
            copy_out(y, [rows, (begin + o) * SIDE], piece)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "slices"])
def normed_linear_gluon_kernel(
    x, w, y, tiles, slices, eps,
    D: gl.constexpr, C: gl.constexpr, OUT: gl.constexpr,
    PREFETCH: gl.constexpr,
):  # fmt: skip
    weights = _pieces(w, OUT * C)
    slots = _pieces(x, GROUPS * PREFETCH * C)
    staged = _pieces(y, GROUPS * OUT)
    ready = barriers(OUT, 1)
    arrived = barriers(GROUPS * PREFETCH, 1)
    fence_async_shared()
    given = (x, w, y)
    held = (weights, slots, staged, ready, arrived)
    gl.warp_specialize(
        [
            (_forward_group, (given, held, tiles, slices, eps, D, C, OUT, PREFETCH, 0)),
            (_forward_group, (given, held, tiles, slices, eps, D, C, OUT, PREFETCH, 1)),
        ],
        [4],
        [REGISTERS],
    )
    end_barriers((ready, arrived))


# Tiles of tokens that each group prefetches and outputs of a program in pieces, by the width in
# pieces: the fastest of those tried on an H200.
FORWARD_PLANS = {3: (1, 3), 4: (2, 2)}


@cache
def forward_constants(width: int, outputs: int) -> dict[str, int]:
    """What the kernel is compiled for; `outputs` are whole pieces."""
    side = SIDE.value
    pieces = sum(tile_widths(width)) // side
    prefetch, most = FORWARD_PLANS[pieces]
    return {"D": width, "C": pieces, "OUT": min(most, outputs // side), "PREFETCH": prefetch}


def piecewise(*tensors: Tensor) -> list[TensorDescriptor]:
    side = SIDE.value
    return [each for tensor in tensors for each in described(tensor, side, side)]


def forward(x: Tensor, w: Tensor, eps: float, y: Tensor) -> None:
    """Fills y (t n)."""
    constants, tiles = forward_constants(x.shape[1], w.shape[0]), tiles_in(x.shape[0], SIDE.value)
    slices = tiles_in(w.shape[0], constants["OUT"] * SIDE.value)
    count = min(max(1, processors(x.device) // slices), tiles_in(tiles, GROUPS.value))
    launch_kernel(
        normed_linear_gluon_kernel, (count * slices,),
        *piecewise(x, w, y), tiles, slices, eps, **constants, num_warps=4,
    )  # fmt: skip


@gluon.jit
def _fetch_piece(p: gl.constexpr, x, dy, rows, slot, slots, full, C: gl.constexpr):
    """Piece p of a tile: of the tokens, then of the outputs' gradient."""
    bar = full.index(slot)
    mbarrier.expect(bar, BYTES)
    if p < C:
        copy_in(x, [rows, p * SIDE], bar, slots.index(slot))
    else:
        copy_in(dy, [rows, (p - C) * SIDE], bar, slots.index(slot))


@gluon.jit
def _piece_slot(p: gl.constexpr, i, G: gl.constexpr, P: gl.constexpr, RING: gl.constexpr):
    """Where piece p of round i lies, and the phase of its barrier."""
    count = i * P + p
    return G * RING + count % RING, (count // RING) & 1


@gluon.jit
def _fetch_next(
    p: gl.constexpr, i, rounds, x, dy, rows, step, slots, full,
    C: gl.constexpr, P: gl.constexpr, RING: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """Into the slot that piece p of round i has left comes the piece RING later."""
    slot, _ = _piece_slot(p, i, G, P, RING)
    if p + RING < P:
        _fetch_piece(p + RING, x, dy, rows, slot, slots, full, C)
    else:
        if i + 1 < rounds:
            _fetch_piece(p + RING - P, x, dy, rows + step * SIDE, slot, slots, full, C)


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
        _fetch_piece(p, x, dy, (first + G) * SIDE, G * RING + p, slots, full, C)
    if G == 0:
        for k in gl.static_range(STAGES):
            _fetch_rows(w, k * SIDE, ready.index(k), weights, k * C, C)
    none = gl.zeros((SIDE, SIDE), gl.float32, SUMS)
    for i in range(rounds):
        rows = (first + G + i * step) * SIDE
        pieces = nothing()
        for p in gl.static_range(C):
            slot, phase = _piece_slot(p, i, G, P, RING)
            mbarrier.wait(full.index(slot), phase)
            pieces += (slots.index(slot).load(SUMS),)
        values, scale = _normalise(pieces, eps, D, C)
        fence_async_shared()
        tma.store_wait(0)
        barrier()  # the tokens have been read, and so have the last results
        for p in gl.static_range(C):
            _fetch_next(p, i, rounds, x, dy, rows, step, slots, full, C, P, RING, G)
            own.index(G * C + p).store(values[p])
        fence_async_shared()
        barrier()
        for j in gl.static_range(C):
            copy_out(normed, [rows, j * SIDE], own.index(G * C + j))
        sums = nothing()
        for _ in gl.static_range(C):
            sums += (none,)
        for k in gl.static_range(K + 1):
            if k < K:
                slot, phase = _piece_slot(C + k, i, G, P, RING)
                mbarrier.wait(full.index(slot), phase)
                if STAGES < K:
                    stage = (i * K + k) % STAGES
                    mbarrier.wait(ready.index(stage), ((i * K + k) // STAGES) & 1)
                else:
                    stage = k
                    mbarrier.wait(ready.index(k), 0)
                grads = slots.index(slot)
                under_way = nothing()
                for j in gl.static_range(C):
                    b = weights.index(stage * C + j)
                    under_way += (warpgroup_mma(grads, b, sums[j], use_acc=k > 0, is_async=True),)
                sums = under_way
            if k > 0:
                sums = warpgroup_mma_wait(C if k < K else 0, deps=sums)
                if k == K:
                    tma.store_wait(0)  # the normalised tokens have left
                barrier()
                _fetch_next(C + k - 1, i, rounds, x, dy, rows, step, slots, full, C, P, RING, G)
                if STAGES < K:
                    last = i * K + k - 1
                    mbarrier.arrive(empty.index(last % STAGES), count=1)
                    if G == 0:  # noqa: SIM102 (known when compiled, the next is not)
                        if last + STAGES < rounds * K:
                            at = last % STAGES
                            mbarrier.wait(empty.index(at), (last // STAGES) & 1)
                            begin = (k - 1 + STAGES) % K * SIDE
                            _fetch_rows(w, begin, ready.index(at), weights, at * C, C)
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
    end_barriers((ready, empty, full))


# Pieces that each group prefetches and rows of pieces of weights that are held, by the width in
# pieces: the fastest of those tried on an H200. A tile's tokens are in shared memory all at once,
# so at least their pieces must be prefetched; of weights that pass through it at least two rows.
BACKWARD_PLANS = {3: (6, 3), 4: (4, 3)}


@cache
def backward_constants(width: int, outputs: int) -> dict[str, int]:
    """What the kernel is compiled for; `outputs` are whole pieces."""
    side = SIDE.value
    pieces, rows = sum(tile_widths(width)) // side, outputs // side
    prefetch, weights = BACKWARD_PLANS[pieces]
    of_a_tile = pieces + rows
    constants = {"D": width, "C": pieces, "K": rows, "STAGES": min(weights, rows)}
    return constants | {"P": of_a_tile, "RING": min(prefetch, of_a_tile)}


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
