"""The RBF blend as Triton kernels: nothing of size points × anchors is ever in memory.

Points, anchors, reciprocal length scales and features enter; the blend and, for the backward pass,
the logarithm of each point's normaliser leave:

    out_i = Σ_j w_ij z_j,   w_ij = exp2(t_ij - log_i),   t_ij = -Σ_s ((x_is - a_js) c / ℓ_js)²,

with c² = ½ log₂ e, so that exp2(t) is the Gaussian. Logits and their normalisation run in float32;
the product with the features runs on the tensor cores in the features' dtype. Going backward,
with g_i the gradient of out_i and δ_i = g_i · out_i, the weights are computed again and

    ∂z_j = Σ_i w_ij g_i,   ∂logit_ij = w_ij (g_i · z_j - δ_i),

from which the chain rule gives coordinates and length scales.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

# c above: folds ½ and the change to base 2 into the reciprocal length scales.
FOLD = math.sqrt(0.5 * math.log2(math.e))


def _tiles(points: int, anchors: int, warps: int, stages: int) -> dict[str, int]:
    return {"BLOCK_Q": points, "BLOCK_M": anchors, "num_warps": warps, "num_stages": stages}


# By the size of a feature in bytes; the fastest of those tried on an H200.
FORWARD_TILES = {2: _tiles(64, 32, 4, 4), 4: _tiles(32, 32, 4, 2)}
BACKWARD_TILES = {2: _tiles(32, 64, 4, 3), 4: _tiles(32, 32, 4, 2)}


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
def _tile(base, rows, row_mask, first, D: tl.constexpr, BLOCK: tl.constexpr):
    """Channels first .. first + BLOCK of the listed rows, zero beyond the last."""
    channels = first + tl.arange(0, BLOCK)
    mask = row_mask[:, None] & (channels < D)[None, :]
    return tl.load(base + rows[:, None] * D + channels[None, :], mask=mask, other=0.0)


@triton.jit
def _put(base, rows, row_mask, first, values, D: tl.constexpr, BLOCK: tl.constexpr):
    channels = first + tl.arange(0, BLOCK)
    mask = row_mask[:, None] & (channels < D)[None, :]
    place = base + rows[:, None] * D + channels[None, :]
    tl.store(place, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def blend_kernel(
    points, anchors, inverse, features, output, logarithms,
    Q, M, point_stride,
    D: tl.constexpr, AXES: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """A tile of points against all anchors, with a running maximum and sum."""
    batch = tl.program_id(1).to(tl.int64)
    points += batch * point_stride
    anchors += batch * M * AXES
    inverse += batch * M * AXES
    features += batch * M * D
    output += batch * Q * D
    logarithms += batch * Q

    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    real = rows < Q
    x0 = _axis(points, Q, rows, real, 0, AXES)[:, None]
    x1 = _axis(points, Q, rows, real, 1, AXES)[:, None]
    x2 = _axis(points, Q, rows, real, 2, AXES)[:, None]
    highest = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    sum0 = tl.zeros((BLOCK_Q, D0), tl.float32)
    sum1 = tl.zeros((BLOCK_Q, D1), tl.float32)
    for start in range(0, M, BLOCK_M):
        columns = start + tl.arange(0, BLOCK_M)
        there = columns < M
        logits = _logits(
            x0 - _axis(anchors, M, columns, there, 0, AXES)[None, :],
            x1 - _axis(anchors, M, columns, there, 1, AXES)[None, :],
            x2 - _axis(anchors, M, columns, there, 2, AXES)[None, :],
            _axis(inverse, M, columns, there, 0, AXES)[None, :],
            _axis(inverse, M, columns, there, 1, AXES)[None, :],
            _axis(inverse, M, columns, there, 2, AXES)[None, :],
            AXES,
        )
        logits = tl.where(there[None, :], logits, -float("inf"))
        now = tl.maximum(highest, tl.max(logits, 1))
        shrink = tl.exp2(highest - now)
        weights = tl.exp2(logits - now[:, None]).to(features.dtype.element_ty)
        # The weights as the product sees them: a constant field comes out constant.
        total = total * shrink + tl.sum(weights.to(tl.float32), 1)
        z0 = _tile(features, columns, there, 0, D, D0)
        sum0 = tl.dot(weights, z0, sum0 * shrink[:, None], input_precision="ieee")
        if D > D0:
            z1 = _tile(features, columns, there, D0, D, D1)
            sum1 = tl.dot(weights, z1, sum1 * shrink[:, None], input_precision="ieee")
        highest = now
    _put(output, rows, real, 0, sum0 / total[:, None], D, D0)
    if D > D0:
        _put(output, rows, real, D0, sum1 / total[:, None], D, D1)
    tl.store(logarithms + rows, highest + tl.log2(total), mask=real)


@triton.jit
def blend_anchors_kernel(
    grad, logarithms, delta, points, anchors, inverse, features,
    grad_anchors, grad_inverse, grad_features,
    Q, M, point_stride, unfold,
    D: tl.constexpr, AXES: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of anchors, from all points."""
    batch = tl.program_id(1).to(tl.int64)
    points += batch * point_stride
    anchors += batch * M * AXES
    inverse += batch * M * AXES
    grad_anchors += batch * M * AXES
    grad_inverse += batch * M * AXES
    features += batch * M * D
    grad_features += batch * M * D
    grad += batch * Q * D
    logarithms += batch * Q
    delta += batch * Q

    columns = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = columns < M
    a0 = _axis(anchors, M, columns, there, 0, AXES)[:, None]
    a1 = _axis(anchors, M, columns, there, 1, AXES)[:, None]
    a2 = _axis(anchors, M, columns, there, 2, AXES)[:, None]
    i0 = _axis(inverse, M, columns, there, 0, AXES)
    i1 = _axis(inverse, M, columns, there, 1, AXES)
    i2 = _axis(inverse, M, columns, there, 2, AXES)
    z0 = _tile(features, columns, there, 0, D, D0)
    z1 = _tile(features, columns, there, D0, D, D1)
    dz0 = tl.zeros((BLOCK_M, D0), tl.float32)
    dz1 = tl.zeros((BLOCK_M, D1), tl.float32)
    # First and second moments of the logit gradients about each anchor.
    first0, second0 = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    first1, second1 = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    first2, second2 = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, Q, BLOCK_Q):
        rows = start + tl.arange(0, BLOCK_Q)
        real = rows < Q
        gap0 = _axis(points, Q, rows, real, 0, AXES)[None, :] - a0
        gap1 = _axis(points, Q, rows, real, 1, AXES)[None, :] - a1
        gap2 = _axis(points, Q, rows, real, 2, AXES)[None, :] - a2
        logits = _logits(gap0, gap1, gap2, i0[:, None], i1[:, None], i2[:, None], AXES)
        logits = tl.where(there[:, None], logits, -float("inf"))
        logarithm = tl.load(logarithms + rows, mask=real, other=float("inf"))
        weights = tl.exp2(logits - logarithm[None, :])  # m q; zero beyond the last point
        rounded = weights.to(grad.dtype.element_ty)
        g0 = _tile(grad, rows, real, 0, D, D0)
        dz0 = tl.dot(rounded, g0, dz0, input_precision="ieee")
        along = tl.dot(z0, tl.trans(g0), input_precision="ieee")
        if D > D0:
            g1 = _tile(grad, rows, real, D0, D, D1)
            dz1 = tl.dot(rounded, g1, dz1, input_precision="ieee")
            along = tl.dot(z1, tl.trans(g1), along, input_precision="ieee")
        change = weights * (along - tl.load(delta + rows, mask=real, other=0.0)[None, :])
        first0 += tl.sum(change * gap0, 1)
        second0 += tl.sum(change * gap0 * gap0, 1)
        if AXES > 1:
            first1 += tl.sum(change * gap1, 1)
            second1 += tl.sum(change * gap1 * gap1, 1)
        if AXES > 2:
            first2 += tl.sum(change * gap2, 1)
            second2 += tl.sum(change * gap2 * gap2, 1)
    _put(grad_features, columns, there, 0, dz0, D, D0)
    if D > D0:
        _put(grad_features, columns, there, D0, dz1, D, D1)
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
    Q, M, point_stride, unfold,
    D: tl.constexpr, AXES: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of points, from all anchors; only where the points are learned."""
    batch = tl.program_id(1).to(tl.int64)
    points += batch * point_stride
    grad_points += batch * Q * AXES
    anchors += batch * M * AXES
    inverse += batch * M * AXES
    features += batch * M * D
    grad += batch * Q * D
    logarithms += batch * Q
    delta += batch * Q

    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    real = rows < Q
    x0 = _axis(points, Q, rows, real, 0, AXES)[:, None]
    x1 = _axis(points, Q, rows, real, 1, AXES)[:, None]
    x2 = _axis(points, Q, rows, real, 2, AXES)[:, None]
    logarithm = tl.load(logarithms + rows, mask=real, other=float("inf"))[:, None]
    projection = tl.load(delta + rows, mask=real, other=0.0)[:, None]
    g0 = _tile(grad, rows, real, 0, D, D0)
    g1 = _tile(grad, rows, real, D0, D, D1)
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
        z0 = _tile(features, columns, there, 0, D, D0)
        along = tl.dot(g0, tl.trans(z0), input_precision="ieee")
        if D > D0:
            z1 = _tile(features, columns, there, D0, D, D1)
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


def _sizes(features: Tensor) -> dict[str, int]:
    """Channels in at most two power-of-two tiles: 176 is 128 + 64, not 256."""
    channels = features.shape[2]
    first = min(128, max(16, triton.next_power_of_2(channels)))
    second = max(16, triton.next_power_of_2(max(channels - first, 1)))
    return {"D": channels, "D0": first, "D1": second}


def _point_stride(points: Tensor) -> int:
    """Points of one set may serve the whole batch."""
    return 0 if points.shape[0] == 1 else points.shape[1] * points.shape[2]


@torch.library.custom_op("fst::rbf_blend", mutates_args=())
def blend_forward(
    points: Tensor, anchors: Tensor, inverse: Tensor, features: Tensor
) -> tuple[Tensor, Tensor]:
    """The blend (b q d) and the logarithm to base 2 of the normaliser (b q)."""
    batch, axes, count = anchors.shape
    queries, sizes = points.shape[2], _sizes(features)
    output = features.new_empty(batch, queries, sizes["D"])
    logarithms = anchors.new_empty(batch, queries)
    tiles = FORWARD_TILES[features.element_size()]
    blend_kernel[(triton.cdiv(queries, tiles["BLOCK_Q"]), batch)](
        points, anchors, inverse, features, output, logarithms,
        queries, count, _point_stride(points), **sizes, AXES=axes, **tiles,
    )  # fmt: skip
    return output, logarithms


@blend_forward.register_fake
def _(points: Tensor, anchors: Tensor, inverse: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    shape = (anchors.shape[0], points.shape[2])
    return features.new_empty(*shape, features.shape[2]), anchors.new_empty(shape)


@torch.library.custom_op("fst::rbf_blend_backward", mutates_args=())
def blend_backward(
    grad: Tensor,
    logarithms: Tensor,
    delta: Tensor,
    points: Tensor,
    anchors: Tensor,
    inverse: Tensor,
    features: Tensor,
    learned_points: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of points (empty unless they are learned), anchors, inverse and features."""
    batch, axes, count = anchors.shape
    queries, sizes = points.shape[2], _sizes(features)
    grad_anchors, grad_inverse = torch.empty_like(anchors), torch.empty_like(inverse)
    grad_features = torch.empty_like(features)
    grad_points = points.new_empty(points.shape if learned_points else (0,))
    tiles = BACKWARD_TILES[features.element_size()]
    shared = {**sizes, "AXES": axes, **tiles}
    given = (grad, logarithms, delta, points, anchors, inverse, features)
    stride = _point_stride(points)
    blend_anchors_kernel[(triton.cdiv(count, tiles["BLOCK_M"]), batch)](
        *given,
        grad_anchors,
        grad_inverse,
        grad_features,
        queries,
        count,
        stride,
        FOLD**-2,
        **shared,
    )
    if learned_points:
        blend_points_kernel[(triton.cdiv(queries, tiles["BLOCK_Q"]), batch)](
            *given, grad_points, queries, count, stride, FOLD**-2, **shared
        )
    return grad_points, grad_anchors, grad_inverse, grad_features


@blend_backward.register_fake
def _(
    grad: Tensor,
    logarithms: Tensor,
    delta: Tensor,
    points: Tensor,
    anchors: Tensor,
    inverse: Tensor,
    features: Tensor,
    learned_points: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = points.shape if learned_points else (0,)
    return (
        points.new_empty(shape),
        torch.empty_like(anchors),
        torch.empty_like(inverse),
        torch.empty_like(features),
    )


def _remember(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    points, anchors, inverse, features = inputs
    ctx.learned_points = points.requires_grad
    if ctx.learned_points and len(points) != len(anchors):
        raise ValueError("points shared by the batch cannot be learned")
    ctx.save_for_backward(points, anchors, inverse, features, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    points, anchors, inverse, features, output, logarithms = ctx.saved_tensors
    grad = grad.contiguous()
    delta = (grad.float() * output.float()).sum(dim=-1)
    found = blend_backward(
        grad, logarithms, delta, points, anchors, inverse, features, ctx.learned_points
    )
    return (found[0] if ctx.learned_points else None, *found[1:])


blend_forward.register_autograd(_differentiate, setup_context=_remember)


def fused_blend(
    points: Float[Tensor, "#b q s"],
    anchors: Float[Tensor, "b m s"],
    length_scales: Float[Tensor, "b m s"],
    features: Float[Tensor, "b m d"],
) -> Float[Tensor, "b q d"]:
    """The blend in the features' dtype, which is also that of the product; the rest in float32."""
    inverse = FOLD / length_scales.float()
    # One axis after the other, so that neighbouring threads read neighbouring numbers.
    places = (x.float().transpose(1, 2).contiguous() for x in (points, anchors, inverse))
    return blend_forward(*places, features.contiguous())[0]
