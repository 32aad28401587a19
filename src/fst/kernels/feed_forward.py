"""The pointwise MLPs of the model as Triton kernels: the hidden layer stays on the chip.

Tokens x (t d) enter and leave, in the dtype of the products; parameters are in float32. One kernel
goes forward and one backward. A position term, which `point_mlp` has and the others do not, chooses
between the two forms of the first two equations:

    feed_forward: y = x + W2 gelu(W1 LN(x) + b1) + b2,
    point_mlp:    y = W2 gelu(W1 x + term) + b2,           where token t takes row t mod P of it,
    output_mlp:   y = w2 · gelu(W1 LN(x) + b1) + b2,       one number a token.

LayerNorm is folded into the first product. With w = W1 γ, u = Σ_d w and c = b1 + W1 β,

    W1 LN(x) + b1 = (x w - mean u + std c) / std,

with mean and standard deviation of each token, and the bracket is one product: columns behind the
channels, there as padding anyway, hold (std, mean) in the tokens and (c, -u) in the weights, each
split in two numbers of the product's dtype. So the operand is the tokens as they come, and can lie
in shared memory. `fst.kernels.weights` packs the weights so; `Layers` hold them for any number of
calls.

gelu(x) = max(x, 0) - |x| Φ(-|x|), and Φ(-a) = 2^P(a) with a polynomial P: one exponential, no
branch. Going backward the hidden layer is computed again; it leaves together with its gradient and
the normalised tokens, for the products which make the weights' gradients (`weight_gradients`),
summed and kept in float32. The normalised tokens are stored with a column of ones: the same product
then gives the gradients of b1 and β. The kernel of `output_mlp` leaves each tile's share of
Σ_t dy gelu, the gradient of w2, instead of the hidden layer.

Channels are divided in two tiles: D0 from the first on, D1 that end beyond the last. On Hopper, in
bfloat16, `feed_forward_hopper` replaces the kernels of the first two.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fst.kernels.blend import settled
from fst.kernels.launch import (
    Gradients,
    Tiles,
    first_that_fits,
    from_module,
    launch_fitting,
    launch_kernel,
    operator,
    tiles_in,
)
from fst.kernels.weights import (
    EXTRA,
    channel_tiles,
    hopper_took,
    pack_layers,
    pack_normed_layers,
    takes_sizes,
    tile_widths,
    transposed_product,
    weight_gradients,
)
from fst.types import product_dtype


@triton.jit
def _exp2(x, ASM: tl.constexpr):
    """On a GPU without the scaling that would keep denormal results."""
    if ASM:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def _tail(a, EXACT: tl.constexpr, ASM: tl.constexpr):
    """Φ(-a) for a >= 0; the shorter polynomial is far below what half precision resolves."""
    if EXACT:
        p = a * -2.275922270200681e-06 + 3.296868089819327e-05
        p = p * a - 0.00015728228027001023
        p = p * a - 0.00020246939675416797
        p = p * a + 0.007142767310142517
        p = p * a - 0.0525464229285717
        p = p * a - 0.45919305086135864
        p = p * a - 1.1511069536209106
        p = p * a - 0.9999999403953552
    else:
        p = a * -0.0005002620746381581 + 0.007282395847141743
        p = p * a - 0.05234328657388687
        p = p * a - 0.4594140350818634
        p = p * a - 1.1510521173477173
        p = p * a - 1.0000019073486328
    return _exp2(p, ASM)


@triton.jit
def gelu(x, EXACT: tl.constexpr, ASM: tl.constexpr):
    a = tl.abs(x)
    return tl.maximum(x, 0.0) - a * _tail(a, EXACT, ASM)


@triton.jit
def gelu_and_slope(x, EXACT: tl.constexpr, ASM: tl.constexpr):
    """The slope is s or 1 - s with s = Φ(-a) - a φ(a), a = |x|."""
    a = tl.abs(x)
    tail = _tail(a, EXACT, ASM)
    density = _exp2(x * x * -0.7213475204444817 - 1.3257480647361593, ASM)
    s = tail - a * density
    return tl.maximum(x, 0.0) - a * tail, tl.where(x > 0.0, 1.0 - s, s)


@triton.jit
def weight_tile(base, start, first, W: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of a packed matrix, whose shape is a multiple of the tile."""
    rows, columns = start + tl.arange(0, ROWS), first + tl.arange(0, BLOCK)
    return tl.load(base + rows[:, None] * W + columns[None, :])


@triton.jit
def token_tile(base, rows, T, first, D: tl.constexpr, BLOCK: tl.constexpr):
    channels = first + tl.arange(0, BLOCK)
    mask = (rows < T)[:, None] & (channels < D)[None, :]
    return tl.load(base + rows[:, None] * D + channels[None, :], mask=mask, other=0.0)


@triton.jit
def put_tile(base, rows, T, first, values, D: tl.constexpr, BLOCK: tl.constexpr):
    channels = first + tl.arange(0, BLOCK)
    mask = (rows < T)[:, None] & (channels < D)[None, :]
    pointers = base + rows[:, None] * D + channels[None, :]
    tl.store(pointers, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def vector_tile(base, first, D: tl.constexpr, BLOCK: tl.constexpr):
    channels = first + tl.arange(0, BLOCK)
    return tl.load(base + channels, mask=channels < D, other=0.0)


@triton.jit
def _term_tile(term, term_rows, start, H: tl.constexpr, HP: tl.constexpr, BLOCK_H: tl.constexpr):
    """A tile of hidden units of the given rows."""
    columns = (start + tl.arange(0, BLOCK_H))[None, :]
    if HP == H:
        return tl.load(term + term_rows + columns).to(tl.float32)
    return tl.load(term + term_rows + columns, mask=columns < H, other=0.0).to(tl.float32)


@triton.jit
def put_hidden(
    base, rows, T, start, values, H: tl.constexpr, HP: tl.constexpr, BLOCK_H: tl.constexpr
):
    columns = (start + tl.arange(0, BLOCK_H))[None, :]
    offsets = rows[:, None] * H + columns  # no addresses yet: two tiles of these are many registers
    if HP == H:
        tl.store(base + offsets, values, mask=(rows < T)[:, None])
    else:
        tl.store(base + offsets, values, mask=(rows < T)[:, None] & (columns < H))


@triton.jit
def statistics(x0, x1, eps, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    """Mean and standard deviation of each token."""
    f0, f1 = x0.to(tl.float32), x1.to(tl.float32)
    mean = (tl.sum(f0, 1) + tl.sum(f1, 1)) / D
    c0 = tl.where((tl.arange(0, D0) < D)[None, :], f0 - mean[:, None], 0.0)
    c1 = tl.where((D0 + tl.arange(0, D1) < D)[None, :], f1 - mean[:, None], 0.0)
    return mean, tl.sqrt((tl.sum(c0 * c0, 1) + tl.sum(c1 * c1, 1)) / D + eps)


@triton.jit
def with_moments(
    x, rows, T, mean, std,
    D: tl.constexpr, E: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
):  # fmt: skip
    """The second tile of the tokens with std and mean, each in two parts, from column E."""
    dtype = x.dtype.element_ty
    channels = D0 + tl.arange(0, D1)
    high_d, high_m = std.to(dtype), mean.to(dtype)
    low_d = (std - high_d.to(tl.float32)).to(dtype)
    low_m = (mean - high_m.to(tl.float32)).to(dtype)
    k = (channels - E)[None, :]
    extra = tl.where((k == 0) | (k == 2), high_d[:, None], 0.0)
    extra = tl.where(k == 1, low_d[:, None], extra)
    extra = tl.where((k == 3) | (k == 5), high_m[:, None], extra)
    extra = tl.where(k == 4, low_m[:, None], extra)
    mask = (rows < T)[:, None] & (channels < D)[None, :]
    pointers = x + rows[:, None] * D + channels[None, :]
    return tl.load(pointers, mask=mask, other=extra.to(dtype))


@triton.jit
def normed_operand(
    x, rows, T, eps, D: tl.constexpr, E: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr
):
    """Both tiles of the tokens for the first product, with their mean and reciprocal std."""
    x0 = token_tile(x, rows, T, 0, D, D0)
    mean, std = statistics(x0, token_tile(x, rows, T, D0, D, D1), eps, D, D0, D1)
    return x0, with_moments(x, rows, T, mean, std, D, E, D0, D1), mean, 1.0 / std


@triton.jit
def first_product(
    x0, x1, w, start, D0: tl.constexpr, D1: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Of the tokens with a tile of a packed layer, and both parts of that tile."""
    a0 = weight_tile(w, start, 0, D0 + D1, BLOCK, D0)
    a1 = weight_tile(w, start, D0, D0 + D1, BLOCK, D1)
    found = tl.dot(x0, tl.trans(a0), input_precision="ieee")
    return tl.dot(x1, tl.trans(a1), found, input_precision="ieee"), a0, a1


@triton.jit
def through_norm(
    d0, d1, x, rows, T, mean, scale, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr
):
    """The gradient of the tokens from that of the normalised ones.

    The tokens are read again: kept in registers, they would push the sums out.
    """
    d0 = tl.where((tl.arange(0, D0) < D)[None, :], d0, 0.0)
    d1 = tl.where((D0 + tl.arange(0, D1) < D)[None, :], d1, 0.0)
    n0 = (token_tile(x, rows, T, 0, D, D0).to(tl.float32) - mean[:, None]) * scale[:, None]
    n1 = (token_tile(x, rows, T, D0, D, D1).to(tl.float32) - mean[:, None]) * scale[:, None]
    level = (tl.sum(d0, 1) + tl.sum(d1, 1)) / D
    along = (tl.sum(d0 * n0, 1) + tl.sum(d1 * n1, 1)) / D
    d0 = (d0 - level[:, None] - n0 * along[:, None]) * scale[:, None]
    return d0, (d1 - level[:, None] - n1 * along[:, None]) * scale[:, None]


@triton.jit(do_not_specialize=["T", "P"])
def feed_forward_kernel(
    x, term, w1, w2, b2, y, T, P, eps,
    D: tl.constexpr, E: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    H: tl.constexpr, HP: tl.constexpr, EXACT: tl.constexpr, ASM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    W: tl.constexpr = D0 + D1
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    dtype = x.dtype.element_ty
    if term is None:
        x0, x1, _, scale = normed_operand(x, rows, T, eps, D, E, D0, D1)
    else:
        x0 = token_tile(x, rows, T, 0, D, D0)
        x1 = token_tile(x, rows, T, D0, D, D1)
        term_rows = (rows % P)[:, None] * H
    s0 = tl.zeros((BLOCK_T, D0), tl.float32)
    s1 = tl.zeros((BLOCK_T, D1), tl.float32)
    for start in range(0, HP, BLOCK_H):
        pre = first_product(x0, x1, w1, start, D0, D1, BLOCK_H)[0]
        if term is None:
            pre = pre * scale[:, None]
        else:
            pre += _term_tile(term, term_rows, start, H, HP, BLOCK_H)
        h = gelu(pre, EXACT, ASM).to(dtype)
        s0 = tl.dot(h, weight_tile(w2, start, 0, W, BLOCK_H, D0), s0, input_precision="ieee")
        s1 = tl.dot(h, weight_tile(w2, start, D0, W, BLOCK_H, D1), s1, input_precision="ieee")
        s1 = settled(s1, ASM)
    s0 += vector_tile(b2, 0, D, D0)[None, :]
    s1 += vector_tile(b2, D0, D, D1)[None, :]
    if term is None:  # read again: kept in registers, the tokens would push the sums out
        s0 += token_tile(x, rows, T, 0, D, D0).to(tl.float32)
        s1 += token_tile(x, rows, T, D0, D, D1).to(tl.float32)
    put_tile(y, rows, T, 0, s0, D, D0)
    put_tile(y, rows, T, D0, s1, D, D1)


@triton.jit
def put_normed(normed, rows, T, x, mean, scale, channels, D: tl.constexpr, EXTRA: tl.constexpr):
    """The normalised tokens, then a column of ones, then zeros."""
    n = (x.to(tl.float32) - mean[:, None]) * scale[:, None]
    n = tl.where((channels < D)[None, :], n, tl.where((channels == D)[None, :], 1.0, 0.0))
    mask = (rows < T)[:, None] & (channels < D + EXTRA)[None, :]
    pointers = normed + rows[:, None] * (D + EXTRA) + channels[None, :]
    tl.store(pointers, n.to(normed.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "P"])
def feed_forward_backward_kernel(
    dy, x, term, w1, w2, dx, normed, hidden, change, sums, T, P, eps,
    D: tl.constexpr, E: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    H: tl.constexpr, HP: tl.constexpr, EXACT: tl.constexpr, ASM: tl.constexpr,
    EXTRA: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """dx; gelu and the gradient of its argument (`change`); each tile's share of Σ_t dy."""
    W: tl.constexpr = D0 + D1
    tile = tl.program_id(0)
    rows = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    dtype = x.dtype.element_ty
    c0, c1 = tl.arange(0, D0), D0 + tl.arange(0, D1)
    if term is None:
        x0, x1, mean, scale = normed_operand(x, rows, T, eps, D, E, D0, D1)
        put_normed(normed, rows, T, x0, mean, scale, c0, D, EXTRA)
        put_normed(normed, rows, T, x1, mean, scale, c1, D, EXTRA)
    else:
        x0 = token_tile(x, rows, T, 0, D, D0)
        x1 = token_tile(x, rows, T, D0, D, D1)
        term_rows = (rows % P)[:, None] * H
    g0 = token_tile(dy, rows, T, 0, D, D0)
    g1 = token_tile(dy, rows, T, D0, D, D1)
    tl.store(sums + tile * D + c0, tl.sum(g0.to(tl.float32), 0), mask=c0 < D)
    tl.store(sums + tile * D + c1, tl.sum(g1.to(tl.float32), 0), mask=c1 < D)
    d0 = tl.zeros((BLOCK_T, D0), tl.float32)
    d1 = tl.zeros((BLOCK_T, D1), tl.float32)
    for start in range(0, HP, BLOCK_H):
        pre, a0, a1 = first_product(x0, x1, w1, start, D0, D1, BLOCK_H)
        v0 = tl.trans(weight_tile(w2, start, 0, W, BLOCK_H, D0))
        dh = tl.dot(g0, v0, input_precision="ieee")
        v1 = tl.trans(weight_tile(w2, start, D0, W, BLOCK_H, D1))
        dh = tl.dot(g1, v1, dh, input_precision="ieee")
        if term is None:
            pre = pre * scale[:, None]
        else:
            pre += _term_tile(term, term_rows, start, H, HP, BLOCK_H)
        h, slope = gelu_and_slope(pre, EXACT, ASM)
        put_hidden(hidden, rows, T, start, h.to(dtype), H, HP, BLOCK_H)
        back = (dh * slope).to(dtype)
        put_hidden(change, rows, T, start, back, H, HP, BLOCK_H)
        d0 = tl.dot(back, a0, d0, input_precision="ieee")
        d1 = settled(tl.dot(back, a1, d1, input_precision="ieee"), ASM)
    if term is None:
        d0, d1 = through_norm(d0, d1, x, rows, T, mean, scale, D, D0, D1)
        d0 += token_tile(dy, rows, T, 0, D, D0).to(tl.float32)
        d1 += token_tile(dy, rows, T, D0, D, D1).to(tl.float32)
    put_tile(dx, rows, T, 0, d0, D, D0)
    put_tile(dx, rows, T, D0, d1, D, D1)


def mlp_tiles(tokens: int, hidden: int, warps: int, stages: int) -> Tiles:
    return {"BLOCK_T": tokens, "BLOCK_H": hidden, "num_warps": warps, "num_stages": stages}


# The fastest of those tried on an H200, by whether the channels' second tile is a wide one; then
# what fits into less shared memory.
FORWARD_TILES = {False: mlp_tiles(128, 64, 8, 3), True: mlp_tiles(128, 32, 8, 3)}
BACKWARD_TILES = {False: mlp_tiles(128, 64, 8, 2), True: mlp_tiles(128, 32, 8, 2)}
SMALLER_TILES = [mlp_tiles(64, 32, 4, 2), mlp_tiles(32, 16, 4, 1)]
# Each group of warps of the Hopper kernels adds up so many tokens' gradients.
_GROUP = 64


_hopper_took = partial(hopper_took, "MLP")


def constants(x: Tensor, w1: Tensor, hidden: int) -> dict[str, int | bool]:
    """What kernels with a hidden layer are compiled for."""
    exact = x.dtype == torch.float32
    sizes = {"H": hidden, "HP": len(w1), "EXACT": exact, "ASM": x.is_cuda}
    return channel_tiles(x.shape[1]) | sizes


@operator("fst::feed_forward")
def mlp_forward(
    x: Tensor,
    term: Tensor | None,
    first: Tensor,
    second: Tensor,
    b2: Tensor,
    w1: Tensor,
    w2: Tensor,
    eps: float,
) -> Tensor:
    """Tokens (t d) to tokens; first (h d+EXTRA, or h d without a norm) and second (d h) are there
    for their gradients, w1 and w2 are the same packed. A position term (p h) serves tokens with the
    same index modulo p."""
    y = torch.empty_like(x)
    launch = from_module("feed_forward_hopper", "forward", x, term, w1, w2, b2, eps, y)
    if not _hopper_took(launch, x):
        tiles = FORWARD_TILES[tile_widths(x.shape[1])[1] == 128], *SMALLER_TILES
        given = x, term, w1, w2, b2, y, len(x), 1 if term is None else len(term), eps
        sizes = constants(x, w1, len(first))
        launch_fitting(feed_forward_kernel, len(x), tiles, *given, **sizes)
    return y


@mlp_forward.register_fake
def _(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)


@operator("fst::feed_forward_backward")
def mlp_backward(
    dy: Tensor, x: Tensor, term: Tensor | None, w1: Tensor, w2: Tensor, hidden: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, term (empty without one), first (with EXTRA columns), second; b2's shares.

    A compiler does better than we could here at adding up the shares.
    """
    count, width = x.shape
    dx = torch.empty_like(x)
    normed = x.new_empty(count, width + EXTRA) if term is None else None
    activation, change = x.new_empty(count, hidden), x.new_empty(count, hidden)
    sums = x.new_empty(2 * tiles_in(count, 2 * _GROUP), width, dtype=torch.float32)
    given = dy, x, term, w1, w2, eps, dx, normed, activation, change, sums
    for_hopper = from_module("feed_forward_hopper", "backward", *given)

    def launch(tiles: Tiles) -> Tensor:
        shares = x.new_empty(tiles_in(count, tiles["BLOCK_T"]), width, dtype=torch.float32)
        launch_kernel(feed_forward_backward_kernel, (len(shares),),
            dy, x, term, w1, w2, dx, normed, activation, change, shares,
            count, 1 if term is None else len(term), eps,
            **constants(x, w1, hidden), EXTRA=EXTRA, **tiles,
        )  # fmt: skip
        return shares

    if not _hopper_took(for_hopper, x, dy):
        shares = first_that_fits(
            (BACKWARD_TILES[tile_widths(width)[1] == 128], *SMALLER_TILES), launch
        )
        sums.zero_()
        sums[0] = shares.sum(dim=0)
    first, second = weight_gradients((change, x if normed is None else normed), (dy, activation))
    if term is None:
        change = x.new_empty(0)
    elif len(term) < count:
        change = change.unflatten(0, (-1, len(term))).sum(dim=0)
    return dx, change, first, second, sums


@mlp_backward.register_fake
def _(
    dy: Tensor, x: Tensor, term: Tensor | None, w1: Tensor, w2: Tensor, hidden: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    width = x.shape[1]
    return (
        torch.empty_like(x),
        x.new_empty(0) if term is None else torch.empty_like(term),
        x.new_empty(hidden, width + (EXTRA if term is None else 0), dtype=torch.float32),
        x.new_empty(width, hidden, dtype=torch.float32),
        x.new_empty(2 * math.ceil(x.shape[0] / (2 * _GROUP)), width, dtype=torch.float32),
    )


@mlp_forward.gradients("x", "term", "w1", "w2", "first", "eps")
def _(
    ctx: Any, dy: Tensor, x: Tensor, term: Tensor | None, w1: Tensor, w2: Tensor, first: Tensor,
    eps: float,
) -> Gradients:  # fmt: skip
    found = mlp_backward(dy.contiguous(), x, term, w1, w2, first.shape[0], eps)
    dx, dterm, dfirst, dsecond, sums = found
    layers = {"first": dfirst, "second": dsecond, "b2": sums.sum(dim=0)}
    return {"x": dx, "term": None if term is None else dterm} | layers


class Layers(NamedTuple):
    """Both layers of an MLP: as they are differentiated, in float32, and packed for the kernels."""

    first: Float[Tensor, "h c"]
    """A slot (`fst.kernels.weights`) behind a LayerNorm, or the weight alone."""
    second: Float[Tensor, "d h"]
    bias: Float[Tensor, " d"]
    packed_first: Float[Tensor, "H W"]
    packed_second: Float[Tensor, "H W"]


def _check_sizes(first_weight: Tensor, second_weight: Tensor) -> None:
    hidden, width = first_weight.shape
    if not takes_sizes(width, hidden):
        raise ValueError(
            f"width must be a multiple of 8 up to 248 and hidden a multiple of 8, "
            f"got {width} and {hidden}"
        )
    if second_weight.shape != (width, hidden):
        came = tuple(second_weight.shape)
        raise ValueError(f"second_weight must be {(width, hidden)}, got {came}")


def normed_layers(
    norm_weight: Float[Tensor, " d"],
    norm_bias: Float[Tensor, " d"],
    first_weight: Float[Tensor, "h d"],
    first_bias: Float[Tensor, " h"],
    second_weight: Float[Tensor, "d h"],
    second_bias: Float[Tensor, " d"],
    tokens: Tensor,
) -> Layers:
    """The layers behind a LayerNorm, for tokens like these."""
    _check_sizes(first_weight, second_weight)
    dtype = product_dtype(tokens)
    norm, layer = (norm_weight, norm_bias), ([first_weight], [first_bias])
    first, *packed = pack_normed_layers(*norm, *layer, dtype, second=second_weight)
    return Layers(first, second_weight.float(), second_bias.float(), *packed)


def point_layers(
    weight: Float[Tensor, "h d"],
    second_weight: Float[Tensor, "d h"],
    second_bias: Float[Tensor, " d"],
    blend: Tensor,
) -> Layers:
    """The layers of an MLP whose first has an addend for each point, for blends like these."""
    _check_sizes(weight, second_weight)
    dtype = product_dtype(blend)
    packed = pack_layers(weight, second_weight, dtype)
    return Layers(weight.float(), second_weight.float(), second_bias.float(), *packed)


def _rows(tokens: Tensor, dtype: torch.dtype) -> Tensor:
    return tokens.to(dtype).flatten(0, 1).contiguous()


def feed_forward(
    tokens: Float[Tensor, "b p d"], layers: Layers, eps: float
) -> Float[Tensor, "b p d"]:
    """Tokens + MLP(LayerNorm(tokens)), products in the autocast dtype where one is set.

    Wider tokens are rounded to it, also in the sum; their dtype stays.
    """
    dtype = product_dtype(tokens)
    out = mlp_forward(_rows(tokens, dtype), None, *layers, eps)
    return out.view(tokens.shape).to(torch.promote_types(tokens.dtype, dtype))


def point_mlp(
    blend: Float[Tensor, "b p d"], position_term: Float[Tensor, "#b p h"], layers: Layers
) -> Float[Tensor, "b p d"]:
    """The MLP whose first layer has an addend for each point, which the batch may share."""
    dtype = product_dtype(blend)
    out = mlp_forward(_rows(blend, dtype), _rows(position_term, dtype), *layers, 0.0)
    return out.view(blend.shape)


OUTPUT_TOKENS = 64
# The fastest of those tried on an H200, forward and backward; then smaller ones for other GPUs.
OUTPUT_TILES = [mlp_tiles(OUTPUT_TOKENS, *rest) for rest in ((64, 4, 2), (32, 4, 2), (16, 4, 1))]


@triton.jit(do_not_specialize=["T"])
def output_kernel(
    x, w1, w2, b2, y, T, eps,
    D: tl.constexpr, E: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    H: tl.constexpr, HP: tl.constexpr, EXACT: tl.constexpr, ASM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    x0, x1, _, scale = normed_operand(x, rows, T, eps, D, E, D0, D1)
    total = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(0, HP, BLOCK_H):
        pre = first_product(x0, x1, w1, start, D0, D1, BLOCK_H)[0] * scale[:, None]
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
        pre, a0, a1 = first_product(x0, x1, w1, start, D0, D1, BLOCK_H)
        pre = pre * scale[:, None]
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
    """Of tokens (t d) the outputs (t), in float32. `layer` is a slot (`fst.kernels.weights`)."""
    count = tokens.shape[0]
    out = tokens.new_empty(count, dtype=torch.float32)
    given = tokens, packed, second, bias, out, count, eps
    sizes = constants(tokens, packed, len(second))
    launch_fitting(output_kernel, count, OUTPUT_TILES, *given, **sizes)
    return out


@output_forward.register_fake
def _(tokens: Tensor, *rest: Any) -> Tensor:
    return tokens.new_empty(tokens.shape[0], dtype=torch.float32)


@operator("fst::output_mlp_backward")
def output_backward(
    grad: Tensor, tokens: Tensor, packed: Tensor, second: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient of the tokens; normalised tokens with ones; gradient of gelu's argument; shares."""
    found = _empty_output_gradients(grad, tokens, packed, second)
    given = grad, tokens, packed, second, *found, len(tokens), eps
    sizes = constants(tokens, packed, len(second))
    launch_fitting(output_backward_kernel, len(tokens), OUTPUT_TILES, *given, EXTRA=EXTRA, **sizes)
    return found


@output_backward.register_fake
def _empty_output_gradients(
    grad: Tensor, tokens: Tensor, packed: Tensor, second: Tensor, *rest: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (count, width), hidden = tokens.shape, len(second)
    return (
        torch.empty_like(tokens),
        tokens.new_empty(count, width + EXTRA),
        tokens.new_empty(count, hidden),
        tokens.new_empty(math.ceil(count / OUTPUT_TOKENS), hidden, dtype=torch.float32),
    )


@output_forward.gradients("tokens", "packed", "second", "eps")
def _(ctx: Any, grad: Tensor, *given: Any) -> Gradients:
    grad = grad.float().contiguous()
    found, normed, change, shares = output_backward(grad, *given)
    layers = {"layer": transposed_product(change, normed), "second": shares.sum(dim=0)}
    return {"tokens": found, "bias": grad.sum().reshape(1)} | layers


def output_mlp(
    tokens: Float[Tensor, "b p d"],
    norm_weight: Float[Tensor, " d"],
    norm_bias: Float[Tensor, " d"],
    first_weight: Float[Tensor, "h d"],
    first_bias: Float[Tensor, " h"],
    second_weight: Float[Tensor, "1 h"],
    second_bias: Float[Tensor, " 1"],
    eps: float,
) -> Float[Tensor, "b p 1"]:
    """MLP(LayerNorm(tokens)): one number per token, in float32."""
    norm, layer = (norm_weight, norm_bias), ([first_weight], [first_bias])
    first, packed, _ = pack_normed_layers(*norm, *layer, tokens.dtype)
    rest = second_weight[0].float(), second_bias.float(), eps
    out = output_forward(tokens.flatten(0, 1).contiguous(), first, packed, *rest)
    outputs: Tensor = out.unflatten(0, tokens.shape[:2]).unsqueeze(-1)
    return outputs
