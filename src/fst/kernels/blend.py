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
import torch.nn.functional as F  # noqa: N812
import triton
from jaxtyping import Float
from torch import Tensor

from fst.kernels.backward_blend import blend_anchors_kernel, blend_points_kernel
from fst.kernels.forward_blend import PART, run_blend, with_ones
from fst.kernels.launching import launch_kernel
from fst.kernels.operators import operator
from fst.kernels.tiles import tiles_in

# c above: folds ½ and the change to base 2 into the reciprocal length scales.
FOLD = math.sqrt(0.5 * math.log2(math.e))


def tile_sizes(
    points: int, anchors: int, warps: int, stages: int, registers: int | None = None
) -> dict[str, int]:
    """What a kernel is launched with; `registers` limits those of a thread."""
    sizes = {"BLOCK_Q": points, "BLOCK_M": anchors, "num_warps": warps, "num_stages": stages}
    return sizes if registers is None else sizes | {"maxnreg": registers}


# Products of float32: exact to its rounding.
FORWARD_PRECISION = BACKWARD_PRECISION = "ieee"
# By the size of a feature in bytes. Three blocks of the forward kernel fit a multiprocessor.
FORWARD_TILES = {2: tile_sizes(64, 64, 4, 3), 4: tile_sizes(32, 32, 4, 2)}
BACKWARD_TILES = {2: tile_sizes(32, 64, 4, 3), 4: tile_sizes(32, 32, 4, 2)}


def _sizes(channels: int) -> dict[str, int]:
    """Channels in at most two power-of-two tiles, for the points: 176 is 128 + 64, not 256."""
    first = min(128, max(16, triton.next_power_of_2(channels)))
    second = max(16, triton.next_power_of_2(max(channels - first, 1)))
    return {"D0": first, "D1": second}


@operator("fst::rbf_blend")
def blend_forward(
    points: Tensor, anchors: Tensor, inverse: Tensor, features: Tensor, channels: int
) -> tuple[Tensor, Tensor]:
    """The blend (b q d) and the logarithm to base 2 of the normaliser (b q).

    The features come from `with_ones`; so many of their channels count.
    """
    tiles = FORWARD_TILES[features.element_size()]
    rows = triton.cdiv(anchors.shape[2], tiles["BLOCK_M"]) * tiles["BLOCK_M"]
    return run_blend(points, anchors, inverse, features, channels, rows, tiles, FORWARD_PRECISION)


@blend_forward.register_fake
def _(
    points: Tensor, anchors: Tensor, inverse: Tensor, features: Tensor, channels: int
) -> tuple[Tensor, Tensor]:
    shape = (anchors.shape[0], points.shape[2])
    return features.new_empty(*shape, channels), anchors.new_empty(shape)


@operator("fst::rbf_blend_backward")
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
    """Gradients of points (empty unless they are learned), anchors, inverse and features.

    Points, logarithms and δ are filled up to a whole number of tiles (`_filled`). Only the channels
    of the features that count have a gradient; the others are not written.
    """
    (batch, axes, count), (queries, channels) = anchors.shape, grad.shape[1:]
    grad_anchors, grad_inverse = torch.empty_like(anchors), torch.empty_like(inverse)
    grad_features = torch.empty_like(features)
    grad_points = points.new_empty((batch, axes, queries) if learned_points else (0,))
    tiles = BACKWARD_TILES[features.element_size()]
    given = (grad, logarithms, delta, points, anchors, inverse, features)
    # Points of one set may serve the whole batch.
    stride = 0 if points.shape[0] == 1 else axes * points.shape[2]
    sizes = (queries, points.shape[2], count, stride, FOLD**-2)
    parts = {"D": channels, "P": features.shape[2], "AXES": axes}
    launch_kernel(
        blend_anchors_kernel, (tiles_in(count, tiles["BLOCK_M"]), batch),
        *given, grad_anchors, grad_inverse, grad_features, *sizes,
        **parts, W=min(PART, max(16, triton.next_power_of_2(channels))),
        PRECISION=BACKWARD_PRECISION, **tiles,
    )  # fmt: skip
    if learned_points:
        blend_points_kernel[(triton.cdiv(queries, tiles["BLOCK_Q"]), batch)](
            *given, grad_points, *sizes, **parts, **_sizes(channels), **tiles
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
    shape = (*anchors.shape[:2], grad.shape[1]) if learned_points else (0,)
    return (
        points.new_empty(shape),
        torch.empty_like(anchors),
        torch.empty_like(inverse),
        torch.empty_like(features),
    )


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    points, anchors, inverse, features, _ = inputs
    ctx.learned_points = points.requires_grad
    if ctx.learned_points and len(points) != len(anchors):
        raise ValueError("points shared by the batch cannot be learned")
    ctx.save_for_backward(points, anchors, inverse, features, *output)


def _filled(tensor: Tensor, missing: int, value: float) -> Tensor:
    """Here and not inside the operator, so that a compiler can make it part of something else."""
    return F.pad(tensor, (0, missing), value=value) if missing else tensor


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    points, anchors, inverse, features, output, logarithms = ctx.saved_tensors
    grad = grad.contiguous()
    delta = (grad.float() * output.float()).sum(dim=-1)
    missing = -grad.shape[1] % BACKWARD_TILES[features.element_size()]["BLOCK_Q"]
    filled = (_filled(logarithms, missing, torch.inf), _filled(delta, missing, 0.0))
    found = blend_backward(
        grad,
        *filled,
        _filled(points, missing, 0.0),
        anchors,
        inverse,
        features,
        ctx.learned_points,
    )
    return (found[0] if ctx.learned_points else None, *found[1:], None)


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
    return blend_forward(*places, with_ones(features), features.shape[2])[0]
