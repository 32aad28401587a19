"""LayerNorm and the linear layer behind it as one kernel.

Tokens x (t d) enter, y = W LN(x) + b (t n) leaves. LayerNorm is folded into the product, as in
`fst.kernels.feed_forward`: the normalised tokens are never in memory going forward. Going
backward they are stored once, with a column of ones, for the product which gives the gradients of
weight, bias, and LayerNorm's own parameters.

On Hopper, in bfloat16, `projection_hopper` replaces the kernels.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fst.kernels.blend import settled
from fst.kernels.feed_forward import (
    first_product,
    normed_operand,
    put_normed,
    put_tile,
    statistics,
    through_norm,
    token_tile,
    weight_tile,
)
from fst.kernels.launch import Gradients, Tiles, from_module, launch_fitting, operator
from fst.kernels.weights import EXTRA, channel_tiles, hopper_took, transposed_product


def _projection_tiles(outputs: int, stages: int) -> Tiles:
    return {"BLOCK_T": 64, "BLOCK_N": outputs, "num_warps": 4, "num_stages": stages}


# The fastest of those tried on an H200, forward and backward; then smaller ones for other GPUs.
TILES = (_projection_tiles(64, 3), _projection_tiles(32, 2), _projection_tiles(16, 1))


_hopper_took = partial(hopper_took, "projection")


@triton.jit(do_not_specialize=["T"])
def normed_linear_kernel(
    x, w, y, T, N, NP, eps,
    D: tl.constexpr, E: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    x0, x1, _, scale = normed_operand(x, rows, T, eps, D, E, D0, D1)
    for start in range(0, NP, BLOCK_N):
        found = first_product(x0, x1, w, start, D0, D1, BLOCK_N)[0] * scale[:, None]
        columns = start + tl.arange(0, BLOCK_N)
        there = (rows < T)[:, None] & (columns < N)[None, :]
        tl.store(y + rows[:, None] * N + columns[None, :], found.to(y.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["T"])
def normed_linear_backward_kernel(
    dy, x, w, dx, normed, T, N, NP, eps,
    D: tl.constexpr, E: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    ASM: tl.constexpr, EXTRA: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dx, and the normalised tokens with ones."""
    W: tl.constexpr = D0 + D1
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    c0, c1 = tl.arange(0, D0), D0 + tl.arange(0, D1)
    x0, x1 = token_tile(x, rows, T, 0, D, D0), token_tile(x, rows, T, D0, D, D1)
    mean, std = statistics(x0, x1, eps, D, D0, D1)
    scale = 1.0 / std
    put_normed(normed, rows, T, x0, mean, scale, c0, D, EXTRA)
    put_normed(normed, rows, T, x1, mean, scale, c1, D, EXTRA)
    d0 = tl.zeros((BLOCK_T, D0), tl.float32)
    d1 = tl.zeros((BLOCK_T, D1), tl.float32)
    for start in range(0, NP, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        there = (rows < T)[:, None] & (columns < N)[None, :]
        g = tl.load(dy + rows[:, None] * N + columns[None, :], mask=there, other=0.0)
        d0 = tl.dot(g, weight_tile(w, start, 0, W, BLOCK_N, D0), d0, input_precision="ieee")
        d1 = tl.dot(g, weight_tile(w, start, D0, W, BLOCK_N, D1), d1, input_precision="ieee")
        d1 = settled(d1, ASM)
    d0, d1 = through_norm(d0, d1, x, rows, T, mean, scale, D, D0, D1)
    put_tile(dx, rows, T, 0, d0, D, D0)
    put_tile(dx, rows, T, D0, d1, D, D1)


@operator("fst::normed_linear")
def normed_linear_forward(tokens: Tensor, layer: Tensor, packed: Tensor, eps: float) -> Tensor:
    """Of tokens (t d) the outputs (t n). `layer` is a slot (`fst.kernels.weights`)."""
    out = _empty_outputs(tokens, layer, packed, eps)
    launch = from_module("projection_hopper", "forward", tokens, packed, eps, out)
    if not _hopper_took(launch, tokens, out):
        count, outputs = out.shape
        given = tokens, packed, out, count, outputs, len(packed), eps
        sizes = channel_tiles(tokens.shape[1])
        launch_fitting(normed_linear_kernel, count, TILES, *given, **sizes)
    return out


@normed_linear_forward.register_fake
def _empty_outputs(tokens: Tensor, layer: Tensor, packed: Tensor, eps: float) -> Tensor:
    return tokens.new_empty(tokens.shape[0], layer.shape[0])


@operator("fst::normed_linear_backward")
def normed_linear_backward(
    grad: Tensor, tokens: Tensor, packed: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradient of the tokens, and the normalised tokens with ones."""
    count, width = tokens.shape
    found, normed = _empty_gradients(grad, tokens, packed, eps)
    launch = from_module("projection_hopper", "backward", grad, tokens, packed, eps, found, normed)
    if not _hopper_took(launch, tokens, grad):
        given = grad, tokens, packed, found, normed, count, grad.shape[1], len(packed), eps
        sizes = channel_tiles(width) | {"ASM": tokens.is_cuda, "EXTRA": EXTRA}
        launch_fitting(normed_linear_backward_kernel, count, TILES, *given, **sizes)
    return found, normed


@normed_linear_backward.register_fake
def _empty_gradients(
    grad: Tensor, tokens: Tensor, packed: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    count, width = tokens.shape
    return torch.empty_like(tokens), tokens.new_empty(count, width + EXTRA)


@normed_linear_forward.gradients("tokens", "packed", "eps")
def _(ctx: Any, grad: Tensor, *given: Any) -> Gradients:
    grad = grad.contiguous()
    found, normed = normed_linear_backward(grad, *given)
    return {"tokens": found, "layer": transposed_product(grad, normed)}


def normed_linear(
    tokens: Float[Tensor, "b p d"],
    layer: Float[Tensor, "n e"],
    packed: Float[Tensor, "N W"],
    eps: float,
) -> Float[Tensor, "b p n"]:
    """W LN(x) + b in the tokens' dtype, of a layer that
    `pack_normed_layers` has packed."""
    out = normed_linear_forward(tokens.flatten(0, 1).contiguous(), layer, packed, eps)
    outputs: Tensor = out.unflatten(0, tokens.shape[:2])
    return outputs
