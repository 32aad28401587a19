"""The anchor-to-anchor weights W^A as Triton kernels: one pass over each row, forward and backward.

Positions and reciprocal length scales enter, one axis after the other; the weights leave in the
dtype of the products they are for, with the reciprocal of each row's sum for the backward pass:

    w_ij = exp2(t_ij) / Σ_k exp2(t_ik),   t_ij = -Σ_s ((a_is - a_js) c / ℓ_js)²,   c² = ½ log₂ e.

Every row holds its own anchor, where t = 0 is the largest: no maximum has to be found. A row fits
on the chip, so normalisation, and going backward δ_i = Σ_j w_ij g_ij, need no second pass. With
S_ij = w_ij (g_ij - δ_i), the gradient of a logit, sums of S (a_i - a_j) / ℓ_j² along rows and
columns give the positions, and sums along columns the length scales. This backward pass is for
float32: in half precision `fst.kernels.anchor_blend` does without the gradient of the weights.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fst.kernels.blend import FOLD
from fst.kernels.operators import operator

# Rows at once, and rows of one program: the columns' gradients are summed over the latter. The
# fastest of those tried on an H200.
FORWARD = {"ROWS": 4, "CHUNK": 64, "num_warps": 4}
BACKWARD = {"ROWS": 1, "CHUNK": 128, "num_warps": 4}


@triton.jit
def _logits(p0, p1, p2, a0, a1, a2, i0, i1, i2, AXES: tl.constexpr):
    """The gaps along each axis, in the anchors' length scales, and -Σ of their squares."""
    u0 = (p0[:, None] - a0[None, :]) * i0[None, :]
    t = -u0 * u0
    u1, u2 = u0, u0
    if AXES > 1:
        u1 = (p1[:, None] - a1[None, :]) * i1[None, :]
        t -= u1 * u1
    if AXES > 2:
        u2 = (p2[:, None] - a2[None, :]) * i2[None, :]
        t -= u2 * u2
    return u0, u1, u2, t


@triton.jit
def _axes(base, index, real, M, AXES: tl.constexpr):
    """Three axes of the listed anchors; where there are fewer, the last again."""
    first = tl.load(base + index, mask=real, other=1.0)
    second = tl.load(base + (1 if AXES > 1 else 0) * M + index, mask=real, other=1.0)
    third = tl.load(base + (AXES - 1) * M + index, mask=real, other=1.0)
    return first, second, third


@triton.jit
def weights_kernel(
    anchors, inverse, out, reciprocals, M,
    AXES: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    anchors += b * M * AXES
    inverse += b * M * AXES
    columns = tl.arange(0, WIDE)
    there = columns < M
    a0, a1, a2 = _axes(anchors, columns, there, M, AXES)
    i0, i1, i2 = _axes(inverse, columns, there, M, AXES)
    for start in range(0, CHUNK, ROWS):
        rows = tl.program_id(0) * CHUNK + start + tl.arange(0, ROWS)
        real = rows < M
        p0, p1, p2 = _axes(anchors, rows, real, M, AXES)
        _, _, _, t = _logits(p0, p1, p2, a0, a1, a2, i0, i1, i2, AXES)
        weights = tl.where(there[None, :], tl.exp2(t), 0.0)
        reciprocal = 1.0 / tl.maximum(tl.sum(weights, 1), 1.0)  # rows beyond the last have none
        place = out + (b * M + rows[:, None]) * M + columns[None, :]
        kept = (weights * reciprocal[:, None]).to(out.dtype.element_ty)
        tl.store(place, kept, mask=real[:, None] & there[None, :])
        tl.store(reciprocals + b * M + rows, reciprocal, mask=real)


@triton.jit
def _put(base, chunk, M, columns, there, axis: tl.constexpr, AXES: tl.constexpr, values):
    """Into (chunk axis anchor)."""
    if axis < AXES:
        tl.store(base + (chunk * AXES + axis) * M + columns, values, mask=there)


@triton.jit
def weights_backward_kernel(
    grad, anchors, inverse, reciprocals, grad_points, grad_anchors, grad_inverse, M, unfold,
    AXES: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A chunk of rows; gradients of the columns are its share alone."""
    b = tl.program_id(1).to(tl.int64)
    anchors += b * M * AXES
    inverse += b * M * AXES
    grad_points += b * M * AXES
    columns = tl.arange(0, WIDE)
    there = columns < M
    a0, a1, a2 = _axes(anchors, columns, there, M, AXES)
    i0, i1, i2 = _axes(inverse, columns, there, M, AXES)
    # Sums of S u and S u²: the factors 1/ℓ_j of the columns come at the end.
    s0 = tl.zeros((ROWS, WIDE), tl.float32)
    s1, s2, q0, q1, q2 = s0, s0, s0, s0, s0
    for start in range(0, CHUNK, ROWS):
        rows = tl.program_id(0) * CHUNK + start + tl.arange(0, ROWS)
        real = rows < M
        p0, p1, p2 = _axes(anchors, rows, real, M, AXES)
        u0, u1, u2, t = _logits(p0, p1, p2, a0, a1, a2, i0, i1, i2, AXES)
        reciprocal = tl.load(reciprocals + b * M + rows, mask=real, other=0.0)
        weights = tl.exp2(t) * reciprocal[:, None]
        place = grad + (b * M + rows[:, None]) * M + columns[None, :]
        g = tl.load(place, mask=real[:, None] & there[None, :], other=0.0).to(tl.float32)
        weights = tl.where(there[None, :], weights, 0.0)
        change = weights * (g - tl.sum(weights * g, 1)[:, None])
        along = change * u0
        s0 += along
        q0 += along * u0
        _put(grad_points, 0, M, rows, real, 0, AXES, -tl.sum(along * i0[None, :], 1) * unfold)
        if AXES > 1:
            along = change * u1
            s1 += along
            q1 += along * u1
            _put(grad_points, 0, M, rows, real, 1, AXES, -tl.sum(along * i1[None, :], 1) * unfold)
        if AXES > 2:
            along = change * u2
            s2 += along
            q2 += along * u2
            _put(grad_points, 0, M, rows, real, 2, AXES, -tl.sum(along * i2[None, :], 1) * unfold)
    chunk = b * tl.num_programs(0) + tl.program_id(0)
    _put(grad_anchors, chunk, M, columns, there, 0, AXES, tl.sum(s0, 0) * i0 * unfold)
    _put(grad_inverse, chunk, M, columns, there, 0, AXES, -tl.sum(q0, 0) / i0 * unfold)
    if AXES > 1:
        _put(grad_anchors, chunk, M, columns, there, 1, AXES, tl.sum(s1, 0) * i1 * unfold)
        _put(grad_inverse, chunk, M, columns, there, 1, AXES, -tl.sum(q1, 0) / i1 * unfold)
    if AXES > 2:
        _put(grad_anchors, chunk, M, columns, there, 2, AXES, tl.sum(s2, 0) * i2 * unfold)
        _put(grad_inverse, chunk, M, columns, there, 2, AXES, -tl.sum(q2, 0) / i2 * unfold)


def _wide(count: int) -> int:
    return max(16, triton.next_power_of_2(count))


@operator("fst::anchor_weights")
def weights_forward(anchors: Tensor, inverse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The weights (b m m) and the reciprocal of the sum of each row before it was normalised."""
    batch, axes, count = anchors.shape
    out = anchors.new_empty(batch, count, count, dtype=dtype)
    reciprocals = anchors.new_empty(batch, count)
    weights_kernel[(triton.cdiv(count, FORWARD["CHUNK"]), batch)](
        anchors, inverse, out, reciprocals, count, AXES=axes, WIDE=_wide(count), **FORWARD
    )
    return out, reciprocals


@weights_forward.register_fake
def _(anchors: Tensor, inverse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    batch, _, count = anchors.shape
    return anchors.new_empty(batch, count, count, dtype=dtype), anchors.new_empty(batch, count)


@operator("fst::anchor_weights_backward")
def weights_backward(
    grad: Tensor, anchors: Tensor, inverse: Tensor, reciprocals: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the rows' positions (b s m), and of columns' positions and reciprocal length
    scales in as many parts as there are chunks (b c s m)."""
    batch, axes, count = anchors.shape
    chunks = triton.cdiv(count, BACKWARD["CHUNK"])
    parts = (batch, chunks, axes, count)
    found = torch.empty_like(anchors), anchors.new_empty(parts), anchors.new_empty(parts)
    weights_backward_kernel[(chunks, batch)](
        grad, anchors, inverse, reciprocals, *found, count, FOLD**-2,
        AXES=axes, WIDE=_wide(count), **BACKWARD,
    )  # fmt: skip
    return found


@weights_backward.register_fake
def _(
    grad: Tensor, anchors: Tensor, inverse: Tensor, reciprocals: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    batch, axes, count = anchors.shape
    parts = (batch, math.ceil(count / BACKWARD["CHUNK"]), axes, count)
    return torch.empty_like(anchors), anchors.new_empty(parts), anchors.new_empty(parts)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:2], output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    rows, columns, inverse = weights_backward(grad.contiguous(), *ctx.saved_tensors)
    return rows + columns.sum(dim=1), inverse.sum(dim=1), None


weights_forward.register_autograd(_differentiate, setup_context=_remember)


def prepare(
    positions: Float[Tensor, "b m s"], length_scales: Float[Tensor, "b m s"]
) -> tuple[Float[Tensor, "b s m"], Float[Tensor, "b s m"]]:
    """Positions and reciprocal length scales in float32, one axis after the other."""
    inverse = FOLD / length_scales.float()
    axes = [x.float().transpose(1, 2).contiguous() for x in (positions, inverse)]
    return axes[0], axes[1]
