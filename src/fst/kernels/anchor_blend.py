"""The blend of features at the anchors, W z_r in every refinement step r, and its gradients.

The weights W (`fst.kernels.weights`) are stored: they serve every step. Their own gradient is

    G_ij = Σ_r g_r,i · z_r,j,   δ_i = Σ_j w_ij G_ij = Σ_r g_r,i · y_r,i,   S_ij = w_ij (G_ij - δ_i),

with y_r = W z_r and g_r its gradient; sums of S along rows and columns then give positions and
length scales. Autograd would form g_r z_rᵀ in each step, round it, and add up what the steps made.
Here one kernel does all steps: G, summed up in float32, is on the chip a tile at a time.

For that, the backward pass must hand every g_r, z_r and y_r to one place. Slots bring them there:
tensors without numbers, made from the anchors before the first step. A step takes three of them
along into its product, and returns g_r, z_r and y_r as if these were the gradients of the slots. So
the slots' own backward pass, which autograd runs once all steps are done, has them all.
"""

import math
from typing import Any

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from fst.kernels.backward_anchor_blend import shifts_kernel, steps_kernel
from fst.kernels.blend import FOLD
from fst.kernels.operators import operator
from fst.kernels.tiles import Tiles, first_that_fits
from fst.kernels.weights import prepare, weights_forward

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
    batch, axes, count = anchors.shape
    channels = grads[0].shape[2]
    side = triton.cdiv(count, 2 * HALF)
    parts = (batch, side, axes, count)
    found = anchors.new_empty(parts), anchors.new_empty(parts), anchors.new_empty(parts)
    shifts = torch.empty_like(reciprocals)
    shifts_kernel[(triton.cdiv(batch * count, SHIFTS["ROWS"]),)](
        tuple(grads), tuple(blends), reciprocals, shifts, batch * count,
        D=channels, WIDE=triton.next_power_of_2(channels), **SHIFTS,
    )  # fmt: skip

    def launch(tiles: Tiles) -> None:
        steps_kernel[(side * side, batch)](
            tuple(grads), tuple(features), anchors, inverse, reciprocals, shifts, *found,
            count, FOLD**-2, D=channels, AXES=axes, EVEN=count % (2 * HALF) == 0,
            HALF=HALF, **tiles,
        )  # fmt: skip

    first_that_fits(TILES, launch)
    return found


@blend_backward.register_fake
def _(
    anchors: Tensor,
    inverse: Tensor,
    reciprocals: Tensor,
    grads: list[Tensor],
    features: list[Tensor],
    blends: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
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


@make_slots.register_fake
def _(
    anchors: Tensor, inverse: Tensor, reciprocals: Tensor, channels: int, dtype: torch.dtype
) -> list[Tensor]:
    shape = (anchors.shape[0], anchors.shape[2], channels)
    return [anchors.new_empty(1, dtype=dtype).expand(shape) for _ in range(3 * TOGETHER)]


def _remember_anchors(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3])


def _differentiate_slots(ctx: Any, brought: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    # Steps whose result was not used bring nothing.
    used = [tensor.contiguous() for tensor in brought if tensor is not None]
    if not used:
        return (None,) * 5
    rows, columns, inverse = blend_backward(*ctx.saved_tensors, used[::3], used[1::3], used[2::3])
    return (rows + columns).sum(dim=1), inverse.sum(dim=1), None, None, None


make_slots.register_autograd(_differentiate_slots, setup_context=_remember_anchors)


@operator("fst::anchor_blend")
def blend_step(
    weights: Tensor, features: Tensor, for_grad: Tensor, for_features: Tensor, for_blend: Tensor
) -> Tensor:
    """W z; the slots are for the backward pass only."""
    return weights @ features


@blend_step.register_fake
def _(
    weights: Tensor, features: Tensor, for_grad: Tensor, for_features: Tensor, for_blend: Tensor
) -> Tensor:
    return weights @ features


def _remember_step(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2], output)


def _differentiate_step(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    weights, features, blended = ctx.saved_tensors
    back = weights.mT @ grad if ctx.needs_input_grad[1] else None
    return None, back, grad, features, blended


blend_step.register_autograd(_differentiate_step, setup_context=_remember_step)


class AnchorBlend:
    """W z at the anchors, for the features z of one refinement step after another."""

    def __init__(
        self,
        positions: Float[Tensor, "b m s"],
        length_scales: Float[Tensor, "b m s"],
        dtype: torch.dtype,
    ) -> None:
        anchors, inverse = prepare(positions, length_scales)
        self.weights, reciprocals = weights_forward(anchors, inverse, dtype)
        # Their gradient is part of what the slots give.
        self._anchors = anchors, inverse, reciprocals.detach()
        self._slots: list[Tensor] = []

    def __call__(self, features: Float[Tensor, "b m d"]) -> Float[Tensor, "b m d"]:
        features = features.to(self.weights.dtype)
        learned = torch.is_grad_enabled() and self.weights.requires_grad
        if not learned or features.element_size() > 2:  # PyTorch's products are as good
            return self.weights @ features
        if not self._slots:
            self._slots = make_slots(*self._anchors, features.shape[2], features.dtype)
        three, self._slots = self._slots[:3], self._slots[3:]
        return blend_step(self.weights.detach(), features, *three)
