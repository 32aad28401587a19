"""The blend of features at the anchors, W z_r in every refinement step r, and its gradients.

The weights W^A leave in the dtype of the products they are for, from positions and reciprocal
length scales, with the reciprocal of each row's sum for the backward pass:

    w_ij = exp2(t_ij) / Σ_k exp2(t_ik),   t_ij = -Σ_s ((a_is - a_js) c / ℓ_js)²,   c² = ½ log₂ e.

Every row holds its own anchor, where t = 0 is the largest: no maximum has to be found. A row fits
on the chip, so normalisation needs no second pass. The weights are stored: they serve every step.
Their own gradient is

    G_ij = Σ_r g_r,i · z_r,j,   δ_i = Σ_j w_ij G_ij = Σ_r g_r,i · y_r,i,   S_ij = w_ij (G_ij - δ_i),

with y_r = W z_r and g_r its gradient. Sums of S (a_i - a_j) / ℓ_j² along rows and columns then give
the positions, and sums along columns the length scales.

Autograd would form g_r z_rᵀ in each step, round it to half precision, and add up what the steps
made. Here one kernel does all steps: G, summed up in float32, is on the chip a tile at a time.

For that, the backward pass must have every g_r, z_r and y_r at once. Slots bring them there:
tensors without numbers, made from the anchors before the first step. A step takes three of them
along into its product, and returns g_r, z_r and y_r as if these were the gradients of the slots. So
the slots' own backward pass, which autograd runs once all steps are done, has them all.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fst.kernels.blend import EXP2_SCALE, by_axis, nothing
from fst.kernels.launch import Gradients, Tiles, first_that_fits, launch_kernel, operator

# Rows at once, and rows of one program: the fastest of those tried on an H200.
WEIGHTS = {"ROWS": 4, "CHUNK": 64, "num_warps": 4}


@triton.jit
def _axes(base, index, real, M, AXES: tl.constexpr):
    """Coordinates of the listed anchors along each axis, or their length scales."""
    found = nothing()
    for axis in tl.static_range(AXES):
        found += (tl.load(base + axis * M + index, mask=real, other=1.0),)
    return found


@triton.jit
def anchor_weights_kernel(
    anchors, inverse, out, reciprocals, M,
    AXES: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    anchors += b * M * AXES
    inverse += b * M * AXES
    columns = tl.arange(0, WIDE)
    there = columns < M
    a = _axes(anchors, columns, there, M, AXES)
    i = _axes(inverse, columns, there, M, AXES)
    for start in range(0, CHUNK, ROWS):
        rows = tl.program_id(0) * CHUNK + start + tl.arange(0, ROWS)
        real = rows < M
        p = _axes(anchors, rows, real, M, AXES)
        u = (p[0][:, None] - a[0][None, :]) * i[0][None, :]
        t = -u * u
        for axis in tl.static_range(1, AXES):
            u = (p[axis][:, None] - a[axis][None, :]) * i[axis][None, :]
            t -= u * u
        weights = tl.where(there[None, :], tl.exp2(t), 0.0)
        reciprocal = 1.0 / tl.maximum(tl.sum(weights, 1), 1.0)  # rows beyond the last have none
        pointers = out + (b * M + rows[:, None]) * M + columns[None, :]
        kept = (weights * reciprocal[:, None]).to(out.dtype.element_ty)
        tl.store(pointers, kept, mask=real[:, None] & there[None, :])
        tl.store(reciprocals + b * M + rows, reciprocal, mask=real)


@operator("fst::anchor_weights")
def weights_forward(anchors: Tensor, inverse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The weights (b m m) and the reciprocal of the sum of each row before it was normalised."""
    out, reciprocals = _empty_weights(anchors, inverse, dtype)
    batch, axes, count = anchors.shape
    launch_kernel(anchor_weights_kernel, (triton.cdiv(count, WEIGHTS["CHUNK"]), batch),
        anchors, inverse, out, reciprocals, count,
        AXES=axes, WIDE=max(16, triton.next_power_of_2(count)), **WEIGHTS,
    )  # fmt: skip
    return out, reciprocals


@weights_forward.register_fake
def _empty_weights(anchors: Tensor, inverse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    batch, _, count = anchors.shape
    return anchors.new_empty(batch, count, count, dtype=dtype), anchors.new_empty(batch, count)


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
    pointers = base + index[:, None] * D + channels[None, :]
    if not EVEN:
        return tl.load(pointers, mask=(index < M)[:, None] & (channels < D)[None, :], other=0.0)
    elif D % PART != 0:
        return tl.load(pointers, mask=(channels < D)[None, :], other=0.0)
    else:
        return tl.load(pointers)


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
def _quarter(
    product, rows, columns, given, M, AXES: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Σ S u and Σ S u² of the columns, Σ S u/ℓ of the rows, along every axis, from a product of
    this part of the tile: (column row)."""
    anchors, inverse, reciprocals, shifts = given
    u = nothing()
    for axis in tl.static_range(AXES):
        gap = _gaps(anchors, inverse, rows, columns, M, axis, EVEN)
        u += (gap,)
        if axis == 0:
            exponents = -gap * gap
        else:
            exponents -= gap * gap
    # w (G - δ), the reciprocal of the row's sum multiplied in.
    reciprocal = _numbers(reciprocals, rows, M, EVEN)
    shift = _numbers(shifts, rows, M, EVEN)
    change = tl.exp2(exponents) * (product * reciprocal[None, :] - shift[None, :])
    if not EVEN:
        change = tl.where((columns < M)[:, None] & (rows < M)[None, :], change, 0.0)
    first, second, of_rows = nothing(), nothing(), nothing()
    for axis in tl.static_range(AXES):
        along = change * u[axis]
        scale = _numbers(inverse + axis * M, columns, M, EVEN)
        first += (tl.sum(along, 1),)
        second += (tl.sum(along * u[axis], 1),)
        of_rows += (tl.sum(along * scale[:, None], 0),)
    return first, second, of_rows


@triton.jit
def _store_rows(grad_points, one, other, rows, M, rescale, AXES: tl.constexpr, EVEN: tl.constexpr):
    for axis in tl.static_range(AXES):
        found = -(one[axis] + other[axis]) * rescale
        tl.store(grad_points + axis * M + rows, found, mask=EVEN | (rows < M))


@triton.jit
def _store_columns(
    grad_anchors, grad_inverse, inverse, first, other_first, second, other_second, columns, M,
    rescale, AXES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    there = EVEN | (columns < M)
    for axis in tl.static_range(AXES):
        scale = _numbers(inverse + axis * M, columns, M, EVEN)
        found = (first[axis] + other_first[axis]) * scale * rescale
        tl.store(grad_anchors + axis * M + columns, found, mask=there)
        found = -(second[axis] + other_second[axis]) / scale * rescale
        tl.store(grad_inverse + axis * M + columns, found, mask=there)


@triton.jit
def shifts_kernel(
    grads, blends, reciprocals, shifts, COUNT,
    D: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """δ of each row, Σ_r g_r · y_r, times the reciprocal of the row's sum."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, WIDE)
    pointers = rows[:, None] * D + channels[None, :]
    there = (rows < COUNT)[:, None] & (channels < D)[None, :]
    along = tl.zeros((ROWS, WIDE), tl.float32)
    for step in tl.static_range(len(grads)):
        g = tl.load(grads[step] + pointers, mask=there, other=0.0).to(tl.float32)
        along += g * tl.load(blends[step] + pointers, mask=there, other=0.0).to(tl.float32)
    reciprocal = tl.load(reciprocals + rows, mask=rows < COUNT, other=0.0)
    tl.store(shifts + rows, tl.sum(along, 1) * reciprocal, mask=rows < COUNT)


@triton.jit
def steps_kernel(
    grads, features, anchors, inverse, reciprocals, shifts,
    grad_points, grad_anchors, grad_inverse, M, rescale,
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

    given = (anchors, inverse, reciprocals, shifts)
    s0, q0, r0 = _quarter(upper_left, upper, left, given, M, AXES, EVEN)
    s1, q1, r1 = _quarter(upper_right, upper, right, given, M, AXES, EVEN)
    _store_rows(grad_points, r0, r1, upper, M, rescale, AXES, EVEN)
    s2, q2, r0 = _quarter(lower_left, lower, left, given, M, AXES, EVEN)
    _store_columns(
        grad_anchors, grad_inverse, inverse, s0, s2, q0, q2, left, M, rescale, AXES, EVEN
    )
    s2, q2, r1 = _quarter(lower_right, lower, right, given, M, AXES, EVEN)
    _store_columns(
        grad_anchors, grad_inverse, inverse, s1, s2, q1, q2, right, M, rescale, AXES, EVEN
    )
    _store_rows(grad_points, r0, r1, lower, M, rescale, AXES, EVEN)


# Steps that are done at once; more go in several lots.
TOGETHER = 4
# Anchors of half the side of a tile: four quarters are as much as the registers hold.
HALF = 64
# Channels at once. With the first, two programs fit a multiprocessor of an H200.
TILES: tuple[Tiles, ...] = (
    {"PART": 64, "num_stages": 3, "num_warps": 4},
    {"PART": 64, "num_stages": 2, "num_warps": 4},
    {"PART": 32, "num_stages": 2, "num_warps": 4},
)
SHIFTS = {"ROWS": 16, "num_warps": 4}


@operator("fst::anchor_blend_backward")
def blend_backward(
    anchors: Tensor,
    inverse: Tensor,
    reciprocals: Tensor,
    grads: list[Tensor],
    features: list[Tensor],
    blends: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the rows' and of the columns' positions, and of the columns' reciprocal length
    scales, each in as many parts as a side has tiles (b c s m)."""
    found = _empty_parts(anchors)
    batch, side, axes, count = found[0].shape
    channels = grads[0].shape[2]
    shifts = torch.empty_like(reciprocals)
    launch_kernel(shifts_kernel, (triton.cdiv(batch * count, SHIFTS["ROWS"]),),
        tuple(grads), tuple(blends), reciprocals, shifts, batch * count,
        D=channels, WIDE=triton.next_power_of_2(channels), **SHIFTS,
    )  # fmt: skip

    def launch(tiles: Tiles) -> None:
        launch_kernel(steps_kernel, (side * side, batch),
            tuple(grads), tuple(features), anchors, inverse, reciprocals, shifts, *found,
            count, EXP2_SCALE**-2, D=channels, AXES=axes, EVEN=count % (2 * HALF) == 0,
            HALF=HALF, **tiles,
        )  # fmt: skip

    first_that_fits(TILES, launch)
    return found


@blend_backward.register_fake
def _empty_parts(anchors: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, axes, count = anchors.shape
    parts = (batch, math.ceil(count / (2 * HALF)), axes, count)
    return anchors.new_empty(parts), anchors.new_empty(parts), anchors.new_empty(parts)


@operator("fst::anchor_blend_slots")
def make_slots(
    anchors: Tensor, inverse: Tensor, reciprocals: Tensor, channels: int, dtype: torch.dtype
) -> list[Tensor]:
    """Three for each step, shaped like its features; they hold one number that nobody reads."""
    shape = (anchors.shape[0], anchors.shape[2], channels)
    return [anchors.new_empty(1, dtype=dtype).expand(shape) for _ in range(3 * TOGETHER)]


make_slots.register_fake(make_slots.function)


@make_slots.gradients("anchors", "inverse", "reciprocals")
def _(ctx: Any, brought: list[Tensor | None], *given: Tensor) -> Gradients:
    # Steps whose result was not used bring nothing.
    used = [tensor.contiguous() for tensor in brought if tensor is not None]
    if not used:
        return {}
    rows, columns, inverse = blend_backward(*given, used[::3], used[1::3], used[2::3])
    return {"anchors": (rows + columns).sum(dim=1), "inverse": inverse.sum(dim=1)}


@operator("fst::anchor_blend")
def blend_step(
    weights: Tensor, features: Tensor, for_grad: Tensor, for_features: Tensor, for_blend: Tensor
) -> Tensor:
    """W z; the slots are for the backward pass only."""
    return weights @ features


blend_step.register_fake(blend_step.function)


@blend_step.gradients("weights", "features", outputs=True)
def _(ctx: Any, grad: Tensor, weights: Tensor, features: Tensor, blended: Tensor) -> Gradients:
    back = weights.mT @ grad if ctx.needs_input_grad[1] else None
    slots = {"for_grad": grad, "for_features": features, "for_blend": blended}
    return {"features": back} | slots


class AnchorBlend:
    """W z at the anchors, for the features z of one refinement step after another."""

    def __init__(
        self,
        positions: Float[Tensor, "b m s"],
        length_scales: Float[Tensor, "b m s"],
        dtype: torch.dtype,
    ) -> None:
        anchors, inverse = by_axis(positions), by_axis(EXP2_SCALE / length_scales.float())
        # Their gradient is part of what the slots give.
        self.weights, reciprocals = weights_forward(anchors.detach(), inverse.detach(), dtype)
        self._anchors = anchors, inverse, reciprocals
        self._slots: list[Tensor] = []

    def __call__(self, features: Float[Tensor, "b m d"]) -> Float[Tensor, "b m d"]:
        features = features.to(self.weights.dtype)
        learned = any(each.requires_grad for each in self._anchors)
        if not (learned and torch.is_grad_enabled()):
            return self.weights @ features
        if not self._slots:
            self._slots = make_slots(*self._anchors, features.shape[2], features.dtype)
        three, self._slots = self._slots[:3], self._slots[3:]
        return blend_step(self.weights, features, *three)
