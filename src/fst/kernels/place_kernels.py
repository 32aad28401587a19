"""The position's share of a pointwise MLP as Triton kernels: γ is made in registers.

γ(x) = [x, sin(f_k x), cos(f_k x)] of positions x (t s). With t = f / 2π,

    sin(f x) = sin(2π (t x - n)),   n the nearest integer to t x.

The inner bracket is one fused multiply-add, so its error is that of t alone, and the angle lies
within [-π, π], where the GPU's fast sine errs by about 2^-21.

Going forward a program keeps the weights of some hidden units in shared memory and takes one tile
of positions after the other. It makes γ where the tensor cores want it: the compiler does so only
if all that γ is made of comes from memory, which is why a table holds even trivial numbers.

Columns of γ and of the weights: for each axis K sines, then K cosines; then a tile of RAW for

    (x, what rounding leaves of x, 1, 1)   and   (w_x, w_x, bias, what rounding leaves of it).

Rows of the table (K columns): the turns t; for each of those columns of the last tile that depend
on x, a one at its place; the ones.
"""

import math

import triton
import triton.language as tl

from fst.kernels.feed_forward_kernels import weight_tile

# Adding and subtracting it rounds to an integer: float32 has no fractions so far from zero.
_ROUNDER = tl.constexpr(1.5 * 2**23)
_TURN = tl.constexpr(2 * math.pi)


@triton.jit
def _sine(angle, ASM: tl.constexpr):
    """Of an angle within [-π, π]."""
    if ASM:
        return tl.inline_asm_elementwise(
            "sin.approx.ftz.f32 $0, $1;", "=r,r", [angle], tl.float32, is_pure=True, pack=1
        )
    return tl.sin(angle)


@triton.jit
def _cosine(angle, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise(
            "cos.approx.ftz.f32 $0, $1;", "=r,r", [angle], tl.float32, is_pure=True, pack=1
        )
    return tl.cos(angle)


@triton.jit
def _angle(x, turns):
    """2π times what x turns (both t k) are more or less than whole turns."""
    minus_whole = _ROUNDER - tl.fma(x, turns, _ROUNDER)
    return tl.fma(x, turns, minus_whole) * _TURN


@triton.jit
def _waves(x, turns, ASM: tl.constexpr):
    """The sines and cosines of each coordinate."""
    x, turns = tl.broadcast(x[:, None], turns[None, :])
    angle = _angle(x, turns)
    return _sine(angle, ASM), _cosine(angle, ASM)


@triton.jit
def _two_parts(
    raw, x, table, axis: tl.constexpr,
    AXES: tl.constexpr, K: tl.constexpr, RAW: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """The tile of coordinates with one of them in it, and with what rounding leaves of it."""
    column = table + tl.arange(0, RAW)
    high = x.to(dtype).to(tl.float32)
    raw += high[:, None] * tl.load(column + (1 + axis) * K)[None, :]
    return raw + (x - high)[:, None] * tl.load(column + (1 + AXES + axis) * K)[None, :]


@triton.jit
def _raw(
    x0, x1, x2, table, AXES: tl.constexpr, K: tl.constexpr, RAW: tl.constexpr, dtype: tl.constexpr
):
    """The tile of coordinates and ones."""
    raw = tl.load(table + (1 + 2 * AXES) * K + tl.arange(0, RAW))[None, :]
    raw = _two_parts(raw, x0, table, 0, AXES, K, RAW, dtype)
    if AXES > 1:
        raw = _two_parts(raw, x1, table, 1, AXES, K, RAW, dtype)
    if AXES > 2:
        raw = _two_parts(raw, x2, table, 2, AXES, K, RAW, dtype)
    return raw.to(dtype)


@triton.jit
def _coordinate(positions, rows, there, axis: tl.constexpr, AXES: tl.constexpr):
    if axis < AXES:
        return tl.load(positions + rows * AXES + axis, mask=there, other=0.0)
    return tl.zeros((rows.shape[0],), tl.float32)


@triton.jit(do_not_specialize=["P", "stride", "tiles", "each"])
def place_kernel(
    positions, w, table, share, hidden, P, stride, tiles, each,
    AXES: tl.constexpr, K: tl.constexpr, RAW: tl.constexpr,
    H: tl.constexpr, ASM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Some hidden units, whose weights stay in shared memory, of one tile of positions after the
    other; `each` batch entry has so many tiles."""
    W: tl.constexpr = 2 * K * AXES + RAW
    dtype = w.dtype.element_ty
    start = tl.program_id(1) * BLOCK_H
    columns = start + tl.arange(0, BLOCK_H)
    raw_weights = tl.trans(weight_tile(w, start, 2 * K * AXES, W, BLOCK_H, RAW))
    sine0 = tl.trans(weight_tile(w, start, 0, W, BLOCK_H, K))
    cosine0 = tl.trans(weight_tile(w, start, K, W, BLOCK_H, K))
    if AXES > 1:
        sine1 = tl.trans(weight_tile(w, start, 2 * K, W, BLOCK_H, K))
        cosine1 = tl.trans(weight_tile(w, start, 3 * K, W, BLOCK_H, K))
    if AXES > 2:
        sine2 = tl.trans(weight_tile(w, start, 4 * K, W, BLOCK_H, K))
        cosine2 = tl.trans(weight_tile(w, start, 5 * K, W, BLOCK_H, K))
    rows = tl.arange(0, BLOCK_T)
    turns = tl.load(table + tl.arange(0, K))
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        batch = (tile // each).to(tl.int64)
        first = (tile % each).to(tl.int64) * BLOCK_T
        there = first + rows < P
        place = positions + batch * stride + first * AXES
        x0 = _coordinate(place, rows, there, 0, AXES)
        x1 = _coordinate(place, rows, there, 1, AXES)
        x2 = _coordinate(place, rows, there, 2, AXES)
        raw = _raw(x0, x1, x2, table, AXES, K, RAW, dtype)
        found = tl.dot(raw, raw_weights, input_precision="ieee")
        s, c = _waves(x0, turns, ASM)
        found = tl.dot(s.to(dtype), sine0, found, input_precision="ieee")
        found = tl.dot(c.to(dtype), cosine0, found, input_precision="ieee")
        if AXES > 1:
            s, c = _waves(x1, turns, ASM)
            found = tl.dot(s.to(dtype), sine1, found, input_precision="ieee")
            found = tl.dot(c.to(dtype), cosine1, found, input_precision="ieee")
        if AXES > 2:
            s, c = _waves(x2, turns, ASM)
            found = tl.dot(s.to(dtype), sine2, found, input_precision="ieee")
            found = tl.dot(c.to(dtype), cosine2, found, input_precision="ieee")
        if share is not None:
            found += tl.load(share + batch * H + columns, mask=columns < H, other=0.0)[None, :]
        out = hidden + (batch * P + first) * H
        mask = there[:, None] & (columns < H)[None, :]
        tl.store(out + rows[:, None] * H + columns[None, :], found.to(dtype), mask=mask)


@triton.jit
def _put_embedding(embedding, rows, there, first, values, W: tl.constexpr, BLOCK: tl.constexpr):
    columns = first + tl.arange(0, BLOCK)
    place = embedding + rows[:, None] * W + columns[None, :]
    tl.store(place, values.to(embedding.dtype.element_ty), mask=there[:, None])


@triton.jit
def _put_waves(
    embedding, rows, there, x, turns, axis: tl.constexpr,
    K: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    sines, cosines = _waves(x, turns, ASM)
    _put_embedding(embedding, rows, there, 2 * K * axis, sines, W, K)
    _put_embedding(embedding, rows, there, 2 * K * axis + K, cosines, W, K)


@triton.jit
def _put_gradient(
    dx, rows, there, x, back, back_raw, table, axis: tl.constexpr,
    AXES: tl.constexpr, K: tl.constexpr, RAW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A coordinate's, from those of its sines and cosines and of the tile of coordinates."""
    column = tl.arange(0, 2 * K)
    turns = tl.load(table + column % K)
    x, rates = tl.broadcast(x[:, None], turns[None, :])
    angle = _angle(x, rates)
    slope = tl.where((column < K)[None, :], _cosine(angle, ASM), -_sine(angle, ASM))
    found = tl.sum(back * slope * rates, 1) * _TURN
    found += tl.sum(tl.where((tl.arange(0, RAW) == axis)[None, :], back_raw, 0.0), 1)
    tl.store(dx + rows * AXES + axis, found, mask=there)


@triton.jit(do_not_specialize=["T"])
def place_backward_kernel(
    grad, positions, w, table, embedding, dx, T,
    AXES: tl.constexpr, K: tl.constexpr, RAW: tl.constexpr,
    H: tl.constexpr, ASM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """γ with ones, in the order of the packed weights; and dx, unless it is None."""
    W: tl.constexpr = 2 * K * AXES + RAW
    first = tl.program_id(0).to(tl.int64) * BLOCK_T
    rows = tl.arange(0, BLOCK_T)
    there = first + rows < T
    positions += first * AXES
    embedding += first * W
    x0 = _coordinate(positions, rows, there, 0, AXES)
    x1 = _coordinate(positions, rows, there, 1, AXES)
    x2 = _coordinate(positions, rows, there, 2, AXES)
    turns = tl.load(table + tl.arange(0, K))
    raw = _raw(x0, x1, x2, table, AXES, K, RAW, embedding.dtype.element_ty)
    _put_embedding(embedding, rows, there, 2 * K * AXES, raw, W, RAW)
    _put_waves(embedding, rows, there, x0, turns, 0, K, W, ASM)
    if AXES > 1:
        _put_waves(embedding, rows, there, x1, turns, 1, K, W, ASM)
    if AXES > 2:
        _put_waves(embedding, rows, there, x2, turns, 2, K, W, ASM)
    if dx is not None:
        grad += first * H
        dx += first * AXES
        back = tl.zeros((BLOCK_T, RAW), tl.float32)
        back0 = tl.zeros((BLOCK_T, 2 * K), tl.float32)
        back1 = tl.zeros((BLOCK_T, 2 * K), tl.float32)
        back2 = tl.zeros((BLOCK_T, 2 * K), tl.float32)
        for start in range(0, H, BLOCK_H):
            columns = start + tl.arange(0, BLOCK_H)
            mask = there[:, None] & (columns < H)[None, :]
            g = tl.load(grad + rows[:, None] * H + columns[None, :], mask=mask, other=0.0)
            a = weight_tile(w, start, 2 * K * AXES, W, BLOCK_H, RAW)
            back = tl.dot(g, a, back, input_precision="ieee")
            a = weight_tile(w, start, 0, W, BLOCK_H, 2 * K)
            back0 = tl.dot(g, a, back0, input_precision="ieee")
            if AXES > 1:
                a = weight_tile(w, start, 2 * K, W, BLOCK_H, 2 * K)
                back1 = tl.dot(g, a, back1, input_precision="ieee")
            if AXES > 2:
                a = weight_tile(w, start, 4 * K, W, BLOCK_H, 2 * K)
                back2 = tl.dot(g, a, back2, input_precision="ieee")
        _put_gradient(dx, rows, there, x0, back0, back, table, 0, AXES, K, RAW, ASM)
        if AXES > 1:
            _put_gradient(dx, rows, there, x1, back1, back, table, 1, AXES, K, RAW, ASM)
        if AXES > 2:
            _put_gradient(dx, rows, there, x2, back2, back, table, 2, AXES, K, RAW, ASM)
