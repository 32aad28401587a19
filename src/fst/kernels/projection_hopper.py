"""The kernels of `projection` for Hopper (Gluon): tokens and weights arrive ahead of their use.

The same equations, packed weights and results, in bfloat16 and for widths of 128 to 248. As many
programs as multiprocessors each hold weights in shared memory and go through tiles of 64 tokens.
Groups of four warps run apart, each on its own tile. A group asks for its next tokens as soon as it
has read the last ones, and leaves its results to a copy that runs by itself, so that memory always
has something to do: these kernels can be no faster than what they read and write.

Everything moves in pieces of 64 × 64. A group sees tokens as the tensor cores' sums lie: four
threads share a row, and the normalised tokens are an operand without leaving the registers.
Outputs beyond one slice of the weights belong to other programs.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fst.kernels.feed_forward_packing import tile_widths
from fst.kernels.gluon_parts import (
    barrier,
    barriers,
    copy_in,
    copy_out,
    described,
    end_barriers,
)
from fst.kernels.hopper import processors
from fst.kernels.launching import launch_kernel
from fst.kernels.tiles import tiles_in

GROUPS = gl.constexpr(2)  # of four warps each
REGISTERS = gl.constexpr(256)  # that a thread may have
SIDE = gl.constexpr(64)  # tokens of a group, and the side of every piece
BYTES = gl.constexpr(64 * 64 * 2)  # of a piece
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, SUMS.value, 2))


@gluon.jit
def _nothing():
    """For tuples to begin with."""
    return ()


@gluon.jit
def _pieces(like, COUNT: gl.constexpr):
    return gl.allocate_shared_memory(like.dtype, [COUNT, SIDE, SIDE], like.layout)


@gluon.jit
def _columns(j):
    return (j * SIDE + gl.arange(0, SIDE, layout=gl.SliceLayout(0, SUMS)))[None, :]


@gluon.jit
def _normalise(pieces, eps, D: gl.constexpr, C: gl.constexpr):
    """Tokens in C pieces, normalised, then (1, 0, 1) behind them; the reciprocal deviation."""
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
    normed = _nothing()
    for j in gl.static_range(C):
        f = (pieces[j].to(gl.float32) - mean) * scale[:, None]
        if (j + 1) * SIDE > D:
            c = _columns(j)
            f = gl.where(c < D, f, gl.where((c == D) | (c == D + 2), 1.0, 0.0))
        normed += (f.to(pieces[j].dtype),)
    return normed, scale


@gluon.jit
def _ask(tokens, rows, bar, slots, first, C: gl.constexpr):
    """The C pieces of these tokens into slots from the first on; `bar` tells when they are there"""
    mbarrier.expect(bar, C * BYTES)
    for j in gl.static_range(C):
        copy_in(tokens, [rows, j * SIDE], bar, slots.index(first + j))


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
def _last(sums, a, C: gl.constexpr):
    """The product, done; named with its operands so that nobody takes their registers before."""
    if C == 3:
        sums, _, _, _ = warpgroup_mma_wait(0, deps=[sums, a[0], a[1], a[2]])
    else:
        sums, _, _, _, _ = warpgroup_mma_wait(0, deps=[sums, a[0], a[1], a[2], a[3]])
    return sums


@gluon.jit
def _forward_group(
    given, held, tiles, slices, eps,
    D: gl.constexpr, C: gl.constexpr, OUT: gl.constexpr,
    AHEAD: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    x, w, y = given
    weights, slots, staged, ready, arrived = held
    begin = gl.program_id(0) % slices * OUT
    first = gl.program_id(0) // slices * GROUPS + G
    step = gl.num_programs(0) // slices * GROUPS
    rounds = (tiles - first + step - 1) // step
    for i in gl.static_range(AHEAD):
        if i < rounds:
            rows = (first + i * step) * SIDE
            _ask(x, rows, arrived.index(G * AHEAD + i), slots, (G * AHEAD + i) * C, C)
    if G == 0:
        for o in gl.static_range(OUT):
            mbarrier.expect(ready.index(o), C * BYTES)
            for j in gl.static_range(C):
                at = [(begin + o) * SIDE, j * SIDE]
                copy_in(w, at, ready.index(o), weights.index(o * C + j))
    for i in range(rounds):
        rows = (first + i * step) * SIDE
        place = G * AHEAD + i % AHEAD
        mbarrier.wait(arrived.index(place), (i // AHEAD) & 1)
        pieces = _nothing()
        for j in gl.static_range(C):
            pieces += (slots.index(place * C + j).load(SUMS),)
        normed, _ = _normalise(pieces, eps, D, C)
        fence_async_shared()
        tma.store_wait(0)
        barrier()  # the tokens have been read, and so have the last results
        if i + AHEAD < rounds:
            _ask(x, rows + AHEAD * step * SIDE, arrived.index(place), slots, place * C, C)
        a = _nothing()
        for j in gl.static_range(C):
            a += (gl.convert_layout(normed[j], LEFT),)
        found = _product(a, weights, ready, 0, C)
        for o in gl.static_range(OUT):
            if o + 1 < OUT:
                following = _product(a, weights, ready, o + 1, C)
                result = warpgroup_mma_wait(C, deps=[found])
                found = following
            else:
                result = _last(found, a, C)
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
    AHEAD: gl.constexpr,
):  # fmt: skip
    weights = _pieces(w, OUT * C)
    slots = _pieces(x, GROUPS * AHEAD * C)
    staged = _pieces(y, GROUPS * OUT)
    ready = barriers(OUT, 1)
    arrived = barriers(GROUPS * AHEAD, 1)
    fence_async_shared()
    given = (x, w, y)
    held = (weights, slots, staged, ready, arrived)
    gl.warp_specialize(
        [
            (_forward_group, (given, held, tiles, slices, eps, D, C, OUT, AHEAD, 0)),
            (_forward_group, (given, held, tiles, slices, eps, D, C, OUT, AHEAD, 1)),
        ],
        [4],
        [REGISTERS],
    )
    end_barriers(ready)
    end_barriers(arrived)


class Forward(NamedTuple):
    """Tiles of tokens that each group asks for ahead, outputs of a program in pieces."""

    ahead: int
    outputs: int


# By the width in pieces: the fastest of those tried on an H200.
FORWARD = {3: Forward(1, 3), 4: Forward(2, 2)}


@cache
def forward_constants(width: int, outputs: int) -> dict[str, int]:
    """What the kernel is compiled for; `outputs` are whole pieces."""
    side = SIDE.value
    pieces = sum(tile_widths(width)) // side
    ahead, most = FORWARD[pieces]
    return {"D": width, "C": pieces, "OUT": min(most, outputs // side), "AHEAD": ahead}


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
