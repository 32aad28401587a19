"""The decoder's last MLP as Triton kernels, for one output: the hidden layer stays on the chip.

Tokens x (t d) enter, one number a token leaves:

    y = w2 · gelu(W1 LN(x) + b1) + b2.

LayerNorm is folded into the first product, as in `fst.kernels.feed_forward_kernels`. Going
backward the hidden layer is computed again, and with it each tile's share of Σ_t dy gelu, the
gradient of w2.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fst.kernels.feed_forward_kernels import (
    gelu,
    gelu_and_slope,
    normed_operand,
    put_hidden,
    put_normed,
    put_tile,
    through_norm,
    vector_tile,
    weight_tile,
)
from fst.kernels.feed_forward_packing import EXTRA
from fst.kernels.folding import folded_layer
from fst.kernels.forward_blend import settled
from fst.kernels.mlp import constants
from fst.kernels.operators import operator
from fst.kernels.tiles import Tiles, first_that_fits
from fst.kernels.weight_gradients import transposed_product

TOKENS = 64


def _tiles(hidden: int, stages: int) -> Tiles:
    return {"BLOCK_T": TOKENS, "BLOCK_H": hidden, "num_warps": 4, "num_stages": stages}


# The fastest of those tried on an H200, forward and backward; then smaller ones for other GPUs.
TILES = (_tiles(64, 2), _tiles(32, 2), _tiles(16, 1))


@triton.jit(do_not_specialize=["T"])
def output_kernel(
    x, w1, w2, b2, y, T, eps,
    D: tl.constexpr, E: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    H: tl.constexpr, HP: tl.constexpr, EXACT: tl.constexpr, ASM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    W: tl.constexpr = D0 + D1
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    x0, x1, _, scale = normed_operand(x, rows, T, eps, D, E, D0, D1)
    total = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(0, HP, BLOCK_H):
        a0 = tl.trans(weight_tile(w1, start, 0, W, BLOCK_H, D0))
        a1 = tl.trans(weight_tile(w1, start, D0, W, BLOCK_H, D1))
        pre = tl.dot(x0, a0, input_precision="ieee")
        pre = tl.dot(x1, a1, pre, input_precision="ieee") * scale[:, None]
        total += tl.sum(gelu(pre, EXACT, ASM) * vector_tile(w2, start, H, BLOCK_H)[None, :], 1)
    tl.store(y + rows, total + tl.load(b2), mask=rows < T)


@triton.jit(do_not_specialize=["T"])
def output_backward_kernel(
    dy, x, w1, w2, dx, normed, change, shares, T, eps,
    D: tl.constexpr, E: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    H: tl.constexpr, HP: tl.constexpr, EXACT: tl.constexpr, ASM: tl.constexpr,
    EXTRA: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """dx; the gradient of gelu's argument (`change`); each tile's share of the gradient of w2."""
    W: tl.constexpr = D0 + D1
    tile = tl.program_id(0)
    rows = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    dtype = x.dtype.element_ty
    c0, c1 = tl.arange(0, D0), D0 + tl.arange(0, D1)
    x0, x1, mean, scale = normed_operand(x, rows, T, eps, D, E, D0, D1)
    put_normed(normed, rows, T, x0, mean, scale, c0, D, EXTRA)
    put_normed(normed, rows, T, x1, mean, scale, c1, D, EXTRA)
    g = tl.load(dy + rows, mask=rows < T, other=0.0)
    d0 = tl.zeros((BLOCK_T, D0), tl.float32)
    d1 = tl.zeros((BLOCK_T, D1), tl.float32)
    for start in range(0, HP, BLOCK_H):
        a0 = weight_tile(w1, start, 0, W, BLOCK_H, D0)
        a1 = weight_tile(w1, start, D0, W, BLOCK_H, D1)
        pre = tl.dot(x0, tl.trans(a0), input_precision="ieee")
        pre = tl.dot(x1, tl.trans(a1), pre, input_precision="ieee") * scale[:, None]
        h, slope = gelu_and_slope(pre, EXACT, ASM)
        units = start + tl.arange(0, BLOCK_H)
        tl.store(shares + tile * H + units, tl.sum(h * g[:, None], 0), mask=units < H)
        back = (slope * g[:, None] * vector_tile(w2, start, H, BLOCK_H)[None, :]).to(dtype)
        put_hidden(change, rows, T, start, back, H, HP, BLOCK_H)
        d0 = tl.dot(back, a0, d0, input_precision="ieee")
        d1 = settled(tl.dot(back, a1, d1, input_precision="ieee"), ASM)
    d0, d1 = through_norm(d0, d1, x, rows, T, mean, scale, D, D0, D1)
    put_tile(dx, rows, T, 0, d0, D, D0)
    put_tile(dx, rows, T, D0, d1, D, D1)


@operator("fst::output_mlp")
def output_forward(
    tokens: Tensor, layer: Tensor, packed: Tensor, second: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """Of tokens (t d) the outputs (t), in float32. `layer` is a slot (`folding`)."""
    count = tokens.shape[0]
    out = tokens.new_empty(count, dtype=torch.float32)
    given = tokens, packed, second, bias, out, count, eps
    sizes = constants(tokens, packed, len(second))

    def launch(tiles: Tiles) -> None:
        output_kernel[(triton.cdiv(count, TOKENS),)](*given, **sizes, **tiles)

    first_that_fits(TILES, launch)
    return out


@output_forward.register_fake
def _(
    tokens: Tensor, layer: Tensor, packed: Tensor, second: Tensor, bias: Tensor, eps: float
) -> Tensor:
    return tokens.new_empty(tokens.shape[0], dtype=torch.float32)


@operator("fst::output_mlp_backward")
def output_backward(
    grad: Tensor, tokens: Tensor, packed: Tensor, second: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient of the tokens; normalised tokens with ones; gradient of gelu's argument; shares."""
    (count, width), hidden = tokens.shape, len(second)
    number = triton.cdiv(count, TOKENS)
    found = (
        torch.empty_like(tokens),
        tokens.new_empty(count, width + EXTRA),
        tokens.new_empty(count, hidden),
        tokens.new_empty(number, hidden, dtype=torch.float32),
    )
    given = grad, tokens, packed, second, *found, count, eps
    sizes = constants(tokens, packed, hidden)

    def launch(tiles: Tiles) -> None:
        output_backward_kernel[(number,)](*given, EXTRA=EXTRA, **sizes, **tiles)

    first_that_fits(TILES, launch)
    return found


@output_backward.register_fake
def _(
    grad: Tensor, tokens: Tensor, packed: Tensor, second: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (count, width), hidden = tokens.shape, len(second)
    return (
        torch.empty_like(tokens),
        tokens.new_empty(count, width + EXTRA),
        tokens.new_empty(count, hidden),
        tokens.new_empty(math.ceil(count / TOKENS), hidden, dtype=torch.float32),
    )


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tokens, _, packed, second, _, ctx.eps = inputs
    ctx.save_for_backward(tokens, packed, second)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    tokens, packed, second = ctx.saved_tensors
    grad = grad.float().contiguous()
    found, normed, change, shares = output_backward(grad, tokens, packed, second, ctx.eps)
    layer = transposed_product(change, normed)
    return found, layer, None, shares.sum(dim=0), grad.sum().reshape(1), None


output_forward.register_autograd(_differentiate, setup_context=_remember)


class Layers(NamedTuple):
    """Both layers: as they are differentiated, in float32 (the first is a slot), and the first
    packed for the kernels."""

    first: Float[Tensor, "h e"]
    packed: Float[Tensor, "H W"]
    second: Float[Tensor, " h"]
    bias: Float[Tensor, " 1"]


def output_layers(
    norm_weight: Float[Tensor, " d"],
    norm_bias: Float[Tensor, " d"],
    first_weight: Float[Tensor, "h d"],
    first_bias: Float[Tensor, " h"],
    second_weight: Float[Tensor, "1 h"],
    second_bias: Float[Tensor, " 1"],
    dtype: torch.dtype,
) -> Layers:
    """The layers behind a LayerNorm, for tokens of this dtype."""
    norm, layer = (norm_weight, norm_bias), ([first_weight], [first_bias])
    first, packed, _ = folded_layer(*norm, *layer, dtype)
    return Layers(first, packed, second_weight[0].float(), second_bias.float())


def output_mlp(
    tokens: Float[Tensor, "b p d"], layers: Layers, eps: float
) -> Float[Tensor, "b p 1"]:
    """One number a token, in float32."""
    out = output_forward(tokens.flatten(0, 1).contiguous(), *layers, eps)
    return out.unflatten(0, tokens.shape[:2]).unsqueeze(-1)
