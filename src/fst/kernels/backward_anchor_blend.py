"""The backward kernels of the blend at the anchors: from all steps at once to positions and scales.

The equations are in `fst.kernels.anchor_blend`. Of up to several steps r come the gradients g_r of
the blends, the features z_r and the blends y_r, each (b m d).
"""

import triton
import triton.language as tl


@triton.jit
def _of_step(tensors, step):
    """One of the pointers."""
    chosen = tensors[0]
    for i in tl.static_range(1, len(tensors)):
        chosen = tl.where(step == i, tensors[i], chosen)
    return chosen


@triton.jit
def _channels(base, index, M, first, D: tl.constexpr, PART: tl.constexpr, EVEN: tl.constexpr):
    """Channels from the first on of the listed anchors, zero beyond the last."""
    channels = first + tl.arange(0, PART)
    place = base + index[:, None] * D + channels[None, :]
    if not EVEN:
        return tl.load(place, mask=(index < M)[:, None] & (channels < D)[None, :], other=0.0)
    elif D % PART != 0:
        return tl.load(place, mask=(channels < D)[None, :], other=0.0)
    else:
        return tl.load(place)


@triton.jit
def _numbers(base, index, M, EVEN: tl.constexpr):
    """One number of each of the listed anchors."""
    if EVEN:
        return tl.load(base + index)
    else:
        return tl.load(base + index, mask=index < M, other=1.0)


@triton.jit
def _gaps(anchors, inverse, rows, columns, M, axis: tl.constexpr, EVEN: tl.constexpr):
    """From the columns to the rows along one axis, in the columns' length scales: (column row)."""
    point = _numbers(anchors + axis * M, rows, M, EVEN)
    anchor = _numbers(anchors + axis * M, columns, M, EVEN)
    scale = _numbers(inverse + axis * M, columns, M, EVEN)
    return (point[None, :] - anchor[:, None]) * scale[:, None]


@triton.jit
def _sums(change, gap, inverse, columns, M, axis: tl.constexpr, EVEN: tl.constexpr):
    """Σ S u and Σ S u² of the columns, Σ S u/ℓ of the rows, along one axis."""
    along = change * gap
    scale = _numbers(inverse + axis * M, columns, M, EVEN)
    return tl.sum(along, 1), tl.sum(along * gap, 1), tl.sum(along * scale[:, None], 0)


@triton.jit
def _quarter(
    product, rows, columns, anchors, inverse, reciprocals, shifts, M,
    AXES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The sums along every axis, from a product of this part of the tile: (column row)."""
    u0 = _gaps(anchors, inverse, rows, columns, M, 0, EVEN)
    u1, u2 = u0, u0
    exponents = -u0 * u0
    if AXES > 1:
        u1 = _gaps(anchors, inverse, rows, columns, M, 1, EVEN)
        exponents -= u1 * u1
    if AXES > 2:
        u2 = _gaps(anchors, inverse, rows, columns, M, 2, EVEN)
        exponents -= u2 * u2
    # w (G - δ), the reciprocal of the row's sum multiplied in.
    reciprocal = _numbers(reciprocals, rows, M, EVEN)
    shift = _numbers(shifts, rows, M, EVEN)
    change = tl.exp2(exponents) * (product * reciprocal[None, :] - shift[None, :])
    if not EVEN:
        change = tl.where((columns < M)[:, None] & (rows < M)[None, :], change, 0.0)
    s0, q0, r0 = _sums(change, u0, inverse, columns, M, 0, EVEN)
    s1, q1, r1, s2, q2, r2 = s0, q0, r0, s0, q0, r0
    if AXES > 1:
        s1, q1, r1 = _sums(change, u1, inverse, columns, M, 1, EVEN)
    if AXES > 2:
        s2, q2, r2 = _sums(change, u2, inverse, columns, M, 2, EVEN)
    return (s0, s1, s2), (q0, q1, q2), (r0, r1, r2)


@triton.jit
def _put_rows(grad_points, one, other, rows, M, unfold, AXES: tl.constexpr, EVEN: tl.constexpr):
    for axis in tl.static_range(AXES):
        found = -(one[axis] + other[axis]) * unfold
        tl.store(grad_points + axis * M + rows, found, mask=EVEN | (rows < M))


@triton.jit
def _put_columns(
    grad_anchors, grad_inverse, inverse, first, other_first, second, other_second, columns, M,
    unfold, AXES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    there = EVEN | (columns < M)
    for axis in tl.static_range(AXES):
        scale = _numbers(inverse + axis * M, columns, M, EVEN)
        found = (first[axis] + other_first[axis]) * scale * unfold
        tl.store(grad_anchors + axis * M + columns, found, mask=there)
        found = -(second[axis] + other_second[axis]) / scale * unfold
        tl.store(grad_inverse + axis * M + columns, found, mask=there)


@triton.jit
def shifts_kernel(
    grads, blends, reciprocals, shifts, COUNT,
    D: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """δ of each row, Σ_r g_r · y_r, times the reciprocal of the row's sum."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, WIDE)
    place = rows[:, None] * D + channels[None, :]
    there = (rows < COUNT)[:, None] & (channels < D)[None, :]
    along = tl.zeros((ROWS, WIDE), tl.float32)
    for step in tl.static_range(len(grads)):
        g = tl.load(grads[step] + place, mask=there, other=0.0).to(tl.float32)
        along += g * tl.load(blends[step] + place, mask=there, other=0.0).to(tl.float32)
    reciprocal = tl.load(reciprocals + rows, mask=rows < COUNT, other=0.0)
    tl.store(shifts + rows, tl.sum(along, 1) * reciprocal, mask=rows < COUNT)


@triton.jit
def steps_kernel(
    grads, features, anchors, inverse, reciprocals, shifts,
    grad_points, grad_anchors, grad_inverse, M, unfold,
    D: tl.constexpr, AXES: tl.constexpr, EVEN: tl.constexpr,
    HALF: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """One square tile of G and what it adds to the gradients of its rows and of its columns.

    Four quarters, for registers: what comes after the product has many intermediate values.
    """
    batch = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(M, 2 * HALF)
    row, column = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    upper = row * 2 * HALF + tl.arange(0, HALF)
    left = column * 2 * HALF + tl.arange(0, HALF)
    lower, right = upper + HALF, left + HALF
    anchors += batch * M * AXES
    inverse += batch * M * AXES
    reciprocals += batch * M
    shifts += batch * M
    grad_points += (batch * tiles + column) * AXES * M
    grad_anchors += (batch * tiles + row) * AXES * M
    grad_inverse += (batch * tiles + row) * AXES * M

    upper_left = tl.zeros((HALF, HALF), tl.float32)
    upper_right, lower_left, lower_right = upper_left, upper_left, upper_left
    PARTS: tl.constexpr = (D + PART - 1) // PART
    for i in range(len(grads) * PARTS):
        first = i % PARTS * PART
        g = _of_step(grads, i // PARTS) + batch * M * D
        z = _of_step(features, i // PARTS) + batch * M * D
        g0 = tl.trans(_channels(g, upper, M, first, D, PART, EVEN))
        g1 = tl.trans(_channels(g, lower, M, first, D, PART, EVEN))
        z0 = _channels(z, left, M, first, D, PART, EVEN)
        z1 = _channels(z, right, M, first, D, PART, EVEN)
        upper_left = tl.dot(z0, g0, upper_left, input_precision="ieee")
        upper_right = tl.dot(z1, g0, upper_right, input_precision="ieee")
        lower_left = tl.dot(z0, g1, lower_left, input_precision="ieee")
        lower_right = tl.dot(z1, g1, lower_right, input_precision="ieee")

    s0, q0, r0 = _quarter(
        upper_left, upper, left, anchors, inverse, reciprocals, shifts, M, AXES, EVEN
    )
    s1, q1, r1 = _quarter(
        upper_right, upper, right, anchors, inverse, reciprocals, shifts, M, AXES, EVEN
    )
    _put_rows(grad_points, r0, r1, upper, M, unfold, AXES, EVEN)
    s2, q2, r0 = _quarter(
        lower_left, lower, left, anchors, inverse, reciprocals, shifts, M, AXES, EVEN
    )
    _put_columns(grad_anchors, grad_inverse, inverse, s0, s2, q0, q2, left, M, unfold, AXES, EVEN)
    s2, q2, r1 = _quarter(
        lower_right, lower, right, anchors, inverse, reciprocals, shifts, M, AXES, EVEN
    )
    _put_columns(grad_anchors, grad_inverse, inverse, s1, s2, q1, q2, right, M, unfold, AXES, EVEN)
    _put_rows(grad_points, r0, r1, lower, M, unfold, AXES, EVEN)
