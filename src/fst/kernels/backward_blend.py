"""The backward kernels of the blend: gradients of anchors and features, and of the points.

The equations are in `fst.kernels.blend`. Points, logarithms and δ come filled up to a whole number
of tiles, QP instead of Q, with infinite logarithms: the weights there are zero. Rows of features
hold P numbers, of which D count.
"""

import triton
import triton.language as tl


@triton.jit
def _axis(base, count, index, mask, axis: tl.constexpr, AXES: tl.constexpr):
    """One coordinate of the listed points; zero where there are fewer axes than that."""
    if axis < AXES:
        return tl.load(base + axis * count + index, mask=mask, other=0.0)
    return tl.zeros(index.shape, tl.float32)


@triton.jit
def _put_axis(base, count, index, mask, axis: tl.constexpr, AXES: tl.constexpr, values):
    if axis < AXES:
        tl.store(base + axis * count + index, values, mask=mask)


@triton.jit
def _logits(gap0, gap1, gap2, i0, i1, i2, AXES: tl.constexpr):
    """-Σ_s (gap_s i_s)²: the exponent of two. The gaps come first: no cancellation."""
    u = gap0 * i0
    logits = -u * u
    if AXES > 1:
        u = gap1 * i1
        logits -= u * u
    if AXES > 2:
        u = gap2 * i2
        logits -= u * u
    return logits


@triton.jit
def _tile(
    base, rows, row_mask, stride: tl.constexpr, first: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Channels first .. first + BLOCK of the listed rows, zero beyond the last of D."""
    channels = first + tl.arange(0, BLOCK)
    mask = row_mask[:, None]
    if first + BLOCK > D:
        mask = mask & (channels < D)[None, :]
    return tl.load(base + rows[:, None] * stride + channels[None, :], mask=mask, other=0.0)


@triton.jit
def _put(
    base, rows, row_mask, stride: tl.constexpr, first: tl.constexpr, values,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    channels = first + tl.arange(0, BLOCK)
    mask = row_mask[:, None] & (channels < D)[None, :]
    place = base + rows[:, None] * stride + channels[None, :]
    tl.store(place, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _moments(change, gap):
    """First and second moments of the logit gradients about each anchor, along one axis."""
    moment = change * gap
    return tl.sum(moment, 1), tl.sum(moment * gap, 1)


@triton.jit
def blend_anchors_kernel(
    grad, logarithms, delta, points, anchors, inverse, features,
    grad_anchors, grad_inverse, grad_features,
    Q, QP, M, point_stride, unfold,
    D: tl.constexpr, P: tl.constexpr, W: tl.constexpr, AXES: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of anchors, from all points. The channels come in at most four parts."""
    batch = tl.program_id(1).to(tl.int64)
    points += batch * point_stride
    anchors += batch * M * AXES
    inverse += batch * M * AXES
    grad_anchors += batch * M * AXES
    grad_inverse += batch * M * AXES
    features += batch * M * P
    grad_features += batch * M * P
    grad += batch * Q * D
    logarithms += batch * QP
    delta += batch * QP

    columns = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = columns < M
    a0 = _axis(anchors, M, columns, there, 0, AXES)[:, None]
    a1 = _axis(anchors, M, columns, there, 1, AXES)[:, None]
    a2 = _axis(anchors, M, columns, there, 2, AXES)[:, None]
    i0 = _axis(inverse, M, columns, there, 0, AXES)
    i1 = _axis(inverse, M, columns, there, 1, AXES)
    i2 = _axis(inverse, M, columns, there, 2, AXES)
    z0 = _tile(features, columns, there, P, 0, D, W)
    z1 = _tile(features, columns, there, P, W, D, W)
    z2 = _tile(features, columns, there, P, 2 * W, D, W)
    z3 = _tile(features, columns, there, P, 3 * W, D, W)
    dz0 = tl.zeros((BLOCK_M, W), tl.float32)
    dz1 = tl.zeros((BLOCK_M, W), tl.float32)
    dz2 = tl.zeros((BLOCK_M, W), tl.float32)
    dz3 = tl.zeros((BLOCK_M, W), tl.float32)
    first0, second0 = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    first1, second1 = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    first2, second2 = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, QP, BLOCK_Q):
        rows = start + tl.arange(0, BLOCK_Q)
        real = rows < Q
        g0 = _tile(grad, rows, real, D, 0, D, W)
        along = tl.dot(z0, tl.trans(g0), input_precision=PRECISION)
        if D > W:
            g1 = _tile(grad, rows, real, D, W, D, W)
            along = tl.dot(z1, tl.trans(g1), along, input_precision=PRECISION)
        if D > 2 * W:
            g2 = _tile(grad, rows, real, D, 2 * W, D, W)
            along = tl.dot(z2, tl.trans(g2), along, input_precision=PRECISION)
        if D > 3 * W:
            g3 = _tile(grad, rows, real, D, 3 * W, D, W)
            along = tl.dot(z3, tl.trans(g3), along, input_precision=PRECISION)
        # The zeros tie the weights to the layout of the product: they are then made only once, and
        # go to the tensor cores from where they are.
        exponents = along * 0.0 - tl.load(logarithms + rows)[None, :]
        gap0 = tl.load(points + rows)[None, :] - a0
        u = gap0 * i0[:, None]
        exponents -= u * u
        if AXES > 1:
            gap1 = tl.load(points + QP + rows)[None, :] - a1
            u = gap1 * i1[:, None]
            exponents -= u * u
        if AXES > 2:
            gap2 = tl.load(points + 2 * QP + rows)[None, :] - a2
            u = gap2 * i2[:, None]
            exponents -= u * u
        weights = tl.exp2(exponents)  # m q; zero beyond the last point
        rounded = weights.to(grad.dtype.element_ty)
        dz0 = tl.dot(rounded, g0, dz0, input_precision=PRECISION)
        if D > W:
            dz1 = tl.dot(rounded, g1, dz1, input_precision=PRECISION)
        if D > 2 * W:
            dz2 = tl.dot(rounded, g2, dz2, input_precision=PRECISION)
        if D > 3 * W:
            dz3 = tl.dot(rounded, g3, dz3, input_precision=PRECISION)
        change = weights * (along - tl.load(delta + rows)[None, :])
        first, second = _moments(change, gap0)
        first0, second0 = first0 + first, second0 + second
        if AXES > 1:
            first, second = _moments(change, gap1)
            first1, second1 = first1 + first, second1 + second
        if AXES > 2:
            first, second = _moments(change, gap2)
            first2, second2 = first2 + first, second2 + second
    _put(grad_features, columns, there, P, 0, dz0, D, W)
    if D > W:
        _put(grad_features, columns, there, P, W, dz1, D, W)
    if D > 2 * W:
        _put(grad_features, columns, there, P, 2 * W, dz2, D, W)
    if D > 3 * W:
        _put(grad_features, columns, there, P, 3 * W, dz3, D, W)
    # The logit is -gap² i² / (2c²) with gap = x - a; `unfold` is 1/c² (and the ½ goes with the 2).
    _put_axis(grad_anchors, M, columns, there, 0, AXES, first0 * i0 * i0 * unfold)
    _put_axis(grad_anchors, M, columns, there, 1, AXES, first1 * i1 * i1 * unfold)
    _put_axis(grad_anchors, M, columns, there, 2, AXES, first2 * i2 * i2 * unfold)
    _put_axis(grad_inverse, M, columns, there, 0, AXES, -second0 * i0 * unfold)
    _put_axis(grad_inverse, M, columns, there, 1, AXES, -second1 * i1 * unfold)
    _put_axis(grad_inverse, M, columns, there, 2, AXES, -second2 * i2 * unfold)


@triton.jit
def blend_points_kernel(
    grad, logarithms, delta, points, anchors, inverse, features, grad_points,
    Q, QP, M, point_stride, unfold,
    D: tl.constexpr, P: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, AXES: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of points, from all anchors; only where the points are learned."""
    batch = tl.program_id(1).to(tl.int64)
    points += batch * point_stride
    grad_points += batch * Q * AXES
    anchors += batch * M * AXES
    inverse += batch * M * AXES
    features += batch * M * P
    grad += batch * Q * D
    logarithms += batch * QP
    delta += batch * QP

    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    real = rows < Q
    x0 = _axis(points, QP, rows, real, 0, AXES)[:, None]
    x1 = _axis(points, QP, rows, real, 1, AXES)[:, None]
    x2 = _axis(points, QP, rows, real, 2, AXES)[:, None]
    logarithm = tl.load(logarithms + rows, mask=real, other=float("inf"))[:, None]
    projection = tl.load(delta + rows, mask=real, other=0.0)[:, None]
    g0 = _tile(grad, rows, real, D, 0, D, D0)
    g1 = _tile(grad, rows, real, D, D0, D, D1)
    d0 = tl.zeros((BLOCK_Q,), tl.float32)
    d1 = tl.zeros((BLOCK_Q,), tl.float32)
    d2 = tl.zeros((BLOCK_Q,), tl.float32)
    for start in range(0, M, BLOCK_M):
        columns = start + tl.arange(0, BLOCK_M)
        there = columns < M
        gap0 = x0 - _axis(anchors, M, columns, there, 0, AXES)[None, :]
        gap1 = x1 - _axis(anchors, M, columns, there, 1, AXES)[None, :]
        gap2 = x2 - _axis(anchors, M, columns, there, 2, AXES)[None, :]
        i0 = _axis(inverse, M, columns, there, 0, AXES)[None, :]
        i1 = _axis(inverse, M, columns, there, 1, AXES)[None, :]
        i2 = _axis(inverse, M, columns, there, 2, AXES)[None, :]
        logits = _logits(gap0, gap1, gap2, i0, i1, i2, AXES)
        logits = tl.where(there[None, :], logits, -float("inf"))
        weights = tl.exp2(logits - logarithm)
        z0 = _tile(features, columns, there, P, 0, D, D0)
        along = tl.dot(g0, tl.trans(z0), input_precision="ieee")
        if D > D0:
            z1 = _tile(features, columns, there, P, D0, D, D1)
            along = tl.dot(g1, tl.trans(z1), along, input_precision="ieee")
        change = weights * (along - projection)
        d0 -= tl.sum(change * gap0 * i0 * i0, 1)
        if AXES > 1:
            d1 -= tl.sum(change * gap1 * i1 * i1, 1)
        if AXES > 2:
            d2 -= tl.sum(change * gap2 * i2 * i2, 1)
    _put_axis(grad_points, Q, rows, real, 0, AXES, d0 * unfold)
    _put_axis(grad_points, Q, rows, real, 1, AXES, d1 * unfold)
    _put_axis(grad_points, Q, rows, real, 2, AXES, d2 * unfold)
