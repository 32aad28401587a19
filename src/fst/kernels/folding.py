"""The parameters of layers as kernels want them, in one kernel; and their gradients, in another.

Behind a LayerNorm with γ and β, a layer W LN(x) + b acts on normalised tokens x̂ and a one as

    [W γ, c],   c = b + W β,

and is packed in the dtype of the products, up to whole tiles, with c and -u = -Σ_d w in two parts
each behind the channels; the tokens there hold (deviation, its rest, deviation, mean, its rest,
mean). Several projections of the same tokens become one layer, the rows of each head followed by
zeros up to a wider one. The second weight of an MLP is packed along with the first.

The kernels that use a layer find gradients dL of [W γ, c], which belong to no tensor with numbers.
A slot stands for it: a tensor that nobody reads, so that autograd adds up what all uses found and
brings it to

    dW = dL γ + dc βᵀ,   db = dc,   dγ = Σ_n dL w,   dβ = Σ_n dc w,

with sums over the rows in a fixed order. Everything before the last rounding is in float32.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fst.kernels.feed_forward_packing import EXTRA, channel_tiles, padded_hidden
from fst.kernels.launching import launch_kernel
from fst.kernels.operators import operator
from fst.kernels.tiles import tiles_in

# Projections of the same tokens: queries, keys and values.
MOST_WEIGHTS = 3
# Rows that a program packs; channels, and rows at once, whose gradients one makes.
PACKED_ROWS = 8
CHANNELS, MOST_ROWS = 8, 512


@triton.jit
def _in_parts(values, dtype: tl.constexpr):
    high = values.to(dtype)
    return high.to(tl.float32), values - high.to(tl.float32)


@triton.jit
def fold_kernel(
    gamma, beta, w0, w1, w2, b0, b1, b2, second, packed, packed_second, STRIDE,
    COUNT: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of the packed layer, from COUNT weights (N D) with heads of SIZE rows, widened to WIDE;
    without γ the weight alone. The same rows of the transpose of the second weight (D N).

    Packed rows have D0 + D1 columns; what is behind the channels begins at E.
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, COLUMNS)
    EACH: tl.constexpr = N // SIZE * WIDE
    dtype: tl.constexpr = packed.dtype.element_ty
    which, head, inside = rows // EACH, rows % EACH // WIDE, rows % WIDE
    source = head * SIZE + inside
    channels = (columns < D)[None, :]
    weight = tl.zeros((BLOCK, COLUMNS), tl.float32)
    constant = tl.zeros((BLOCK,), tl.float32)
    weights, biases = (w0, w1, w2), (b0, b1, b2)
    for i in tl.static_range(COUNT):
        mine = (which == i) & (inside < SIZE)
        place = weights[i] + source[:, None] * STRIDE + columns[None, :]
        found = tl.load(place, mask=mine[:, None] & channels, other=0.0).to(tl.float32)
        weight = tl.where(mine[:, None], found, weight)
        if gamma is not None:
            found = tl.load(biases[i] + source, mask=mine, other=0.0).to(tl.float32)
            constant = tl.where(mine, found, constant)
    if gamma is not None:
        g = tl.load(gamma + columns, mask=columns < D, other=0.0).to(tl.float32)
        b = tl.load(beta + columns, mask=columns < D, other=0.0).to(tl.float32)
        constant += tl.sum(weight * b[None, :], 1)
        weight = (weight * g[None, :]).to(dtype).to(tl.float32)
        c, c_rest = _in_parts(constant, dtype)
        # Of the rounded weights: what the product with a constant token really gives.
        u, u_rest = _in_parts(-tl.sum(weight, 1), dtype)
        behind = (columns - E)[None, :]
        weight = tl.where((behind == 0) | (behind == 1), c[:, None], weight)
        weight = tl.where(behind == 2, c_rest[:, None], weight)
        weight = tl.where((behind == 3) | (behind == 4), u[:, None], weight)
        weight = tl.where(behind == 5, u_rest[:, None], weight)
    put = rows[:, None] * (D0 + D1) + columns[None, :]
    tl.store(packed + put, weight.to(dtype), mask=(columns < D0 + D1)[None, :])
    if second is not None:
        there = (rows < N)[:, None] & channels
        found = tl.load(second + columns[None, :] * N + rows[:, None], mask=there, other=0.0)
        found = found.to(tl.float32).to(dtype)
        tl.store(packed_second + put, found, mask=(columns < D0 + D1)[None, :])


@triton.jit
def unfold_kernel(
    grad, gamma, beta, w0, w1, w2, dgamma, dbeta, dw0, db0, dw1, db1, dw2, db2,
    COUNT: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
    D: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A few channels' gradients in every row, from the gradient of the layer, whose rows have G
    columns: D channels, then the constant."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    EACH: tl.constexpr = N // SIZE * WIDE
    channels = columns < D
    g = tl.load(gamma + columns, mask=channels, other=0.0).to(tl.float32)
    b = tl.load(beta + columns, mask=channels, other=0.0).to(tl.float32)
    of_gamma = tl.zeros((ROWS, COLUMNS), tl.float32)
    of_beta = tl.zeros((ROWS, COLUMNS), tl.float32)
    weights, dweights, dbiases = (w0, w1, w2), (dw0, dw1, dw2), (db0, db1, db2)
    for i in tl.static_range(COUNT):
        for start in range(0, N, ROWS):
            rows = start + tl.arange(0, ROWS)
            place = (i * EACH + rows // SIZE * WIDE + rows % SIZE) * G
            there = (rows < N)[:, None] & channels[None, :]
            change = tl.load(grad + place[:, None] + columns[None, :], mask=there, other=0.0)
            constant = tl.load(grad + place + D, mask=rows < N, other=0.0)
            at = rows[:, None] * D + columns[None, :]
            weight = tl.load(weights[i] + at, mask=there, other=0.0).to(tl.float32)
            of_gamma += change * weight
            of_beta += constant[:, None] * weight
            found = change * g[None, :] + constant[:, None] * b[None, :]
            tl.store(dweights[i] + at, found, mask=there)
            if tl.program_id(0) == 0:
                tl.store(dbiases[i] + rows, constant, mask=rows < N)
    tl.store(dgamma + columns, tl.sum(of_gamma, 0), mask=channels)
    tl.store(dbeta + columns, tl.sum(of_beta, 0), mask=channels)


def _heads(count: int, rows: int, heads: int, widened: int) -> dict[str, int]:
    return {"COUNT": count, "N": rows, "SIZE": rows // heads, "WIDE": widened}


def _contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if each is None else each.contiguous() for each in tensors)


def _packed(weight: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    tiles = channel_tiles(weight.shape[1])
    return weight.new_empty(padded_hidden(rows), tiles["D0"] + tiles["D1"], dtype=dtype)


def _made(
    weights: Sequence[Tensor | None],
    second: Tensor | None,
    heads: int,
    widened: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The slot, and room for the packed layer and the packed second weight, if there is one."""
    first = weights[0]
    assert first is not None
    rows = sum(each is not None for each in weights) * heads * widened
    slot = first.new_empty(1, dtype=torch.float32).expand(rows, first.shape[1] + EXTRA)
    packed = _packed(first, rows, dtype)
    return slot, packed, packed.new_empty(0) if second is None else torch.empty_like(packed)


def _pack(
    norm: tuple[Tensor | None, ...],
    weights: tuple[Tensor | None, ...],
    biases: tuple[Tensor | None, ...],
    second: Tensor | None,
    packed: Tensor,
    packed_second: Tensor,
    sizes: dict[str, int],
) -> None:
    first = weights[0]
    assert first is not None
    launch_kernel(
        fold_kernel,
        (len(packed) // PACKED_ROWS,),
        *norm, *weights, *biases, second, packed, packed_second, first.stride(0),
        **sizes,
        **channel_tiles(first.shape[1]),
        COLUMNS=triton.next_power_of_2(packed.shape[1]),
        BLOCK=PACKED_ROWS,
        num_warps=4,
    )  # fmt: skip


@operator("fst::folded_layer")
def fold(
    gamma: Tensor,
    beta: Tensor,
    w0: Tensor,
    b0: Tensor,
    w1: Tensor | None,
    b1: Tensor | None,
    w2: Tensor | None,
    b2: Tensor | None,
    second: Tensor | None,
    heads: int,
    widened: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The slot, the packed layer, and the packed second weight (empty without one)."""
    slot, packed, packed_second = _made((w0, w1, w2), second, heads, widened, dtype)
    norm, (last,) = _contiguous(gamma, beta), _contiguous(second)
    weights, biases = _contiguous(w0, w1, w2), _contiguous(b0, b1, b2)
    sizes = _heads(len(slot) // (heads * widened), len(w0), heads, widened)
    _pack(norm, weights, biases, last, packed, packed_second, sizes)
    return slot, packed, packed_second


@fold.register_fake
def _(
    gamma: Tensor,
    beta: Tensor,
    w0: Tensor,
    b0: Tensor,
    w1: Tensor | None,
    b1: Tensor | None,
    w2: Tensor | None,
    b2: Tensor | None,
    second: Tensor | None,
    heads: int,
    widened: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    return _made((w0, w1, w2), second, heads, widened, dtype)


@operator("fst::folded_layer_backward")
def unfold(
    grad: Tensor,
    gamma: Tensor,
    beta: Tensor,
    w0: Tensor,
    w1: Tensor | None,
    w2: Tensor | None,
    heads: int,
    widened: int,
) -> list[Tensor]:
    """Of γ, β, and each weight and bias, in float32."""
    grad = grad.contiguous()
    norm, weights = _contiguous(gamma, beta), _contiguous(w0, w1, w2)
    found = _gradients(gamma, beta, w0, w1, w2)
    (rows, width), count = w0.shape, len(found) // 2 - 1
    launch_kernel(
        unfold_kernel,
        (tiles_in(width, CHANNELS),),
        grad, *norm, *weights, *found, *(None,) * (2 * (MOST_WEIGHTS - count)),
        **_heads(count, rows, heads, widened),
        D=width,
        G=grad.shape[1],
        ROWS=min(MOST_ROWS, triton.next_power_of_2(rows)),
        COLUMNS=CHANNELS,
        num_warps=8,
    )  # fmt: skip
    return found


@unfold.register_fake
def _(
    grad: Tensor,
    gamma: Tensor,
    beta: Tensor,
    w0: Tensor,
    w1: Tensor | None,
    w2: Tensor | None,
    heads: int,
    widened: int,
) -> list[Tensor]:
    return _gradients(gamma, beta, w0, w1, w2)


def _gradients(gamma: Tensor, beta: Tensor, *weights: Tensor | None) -> list[Tensor]:
    found = [gamma.new_empty(each.shape, dtype=torch.float32) for each in (gamma, beta)]
    for weight in weights:
        if weight is not None:
            found.append(gamma.new_empty(weight.shape, dtype=torch.float32))
            found.append(gamma.new_empty(weight.shape[0], dtype=torch.float32))
    return found


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    gamma, beta, w0, _, w1, _, w2, _, _, *ctx.heads, _ = inputs
    ctx.save_for_backward(gamma, beta, w0, w1, w2)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad: Tensor | None, packed: None, packed_second: None
) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad
    found = [] if grad is None else unfold(grad, *ctx.saved_tensors, *ctx.heads)
    filled = [*found, *[None] * (len(needed) - len(found))]
    # Autograd rounds them to the parameters' dtype.
    return tuple(each if wanted else None for each, wanted in zip(filled, needed, strict=True))


fold.register_autograd(_differentiate, setup_context=_remember)


def folded_layer(
    gamma: Float[Tensor, " d"],
    beta: Float[Tensor, " d"],
    weights: Sequence[Float[Tensor, "n d"]],
    biases: Sequence[Float[Tensor, " n"]],
    dtype: torch.dtype,
    *,
    heads: int = 1,
    widened: int | None = None,
    second: Float[Tensor, "d n"] | None = None,
) -> tuple[Float[Tensor, "r e"], Float[Tensor, "R W"], Float[Tensor, "..."]]:
    """The slot of the layers behind a LayerNorm as one, that layer packed, and the second weight.

    Each layer has this many heads, every one widened to so many rows.
    """
    if not 0 < len(weights) <= MOST_WEIGHTS:
        raise ValueError(f"weights must be one to {MOST_WEIGHTS}, got {len(weights)}")
    wide = len(weights[0]) // heads if widened is None else widened
    pairs: list[Tensor | None] = []
    for weight, bias in zip(weights, biases, strict=True):
        pairs += [weight, bias]
    pairs += [None] * (2 * (MOST_WEIGHTS - len(weights)))
    if second is not None:
        second = second.detach()
    return fold(gamma, beta, *pairs, second, heads, wide, dtype)


@operator("fst::packed_layers")
def pack_both(weight: Tensor, second: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    packed = _packed(weight, len(weight), dtype)
    packed_second = torch.empty_like(packed)
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    weights, sizes = (weight, None, None), _heads(1, len(weight), 1, len(weight))
    _pack((None,) * 2, weights, (None,) * 3, second.contiguous(), packed, packed_second, sizes)
    return packed, packed_second


@pack_both.register_fake
def _(weight: Tensor, second: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    packed = _packed(weight, weight.shape[0], dtype)
    return packed, torch.empty_like(packed)


def packed_layers(
    weight: Float[Tensor, "h d"], second: Float[Tensor, "d h"], dtype: torch.dtype
) -> tuple[Float[Tensor, "H W"], Float[Tensor, "H W"]]:
    """Both weights of an MLP without a norm, hidden units down, channels across."""
    return pack_both(weight.detach(), second.detach(), dtype)
