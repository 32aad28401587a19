"""The pointwise MLPs of the model, each as one kernel forward and one backward.

    feed_forward: x + W2 gelu(W1 LN(x) + b1) + b2        point_mlp: W2 gelu(W1 x + place) + b2

Activations enter and leave in the dtype of the products, parameters in float32. The kernels want
the weights packed; `Layers` hold them so for any number of calls. `feed_forward_kernels` says how
the kernels work. The gradients of the weights are products of what the backward kernel leaves
(`weight_gradients`), summed and kept in float32.

On Hopper, in bfloat16, `feed_forward_hopper` replaces the kernels. If it cannot be imported or one
of its kernels cannot be compiled, a warning says so once and it is never tried again.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fst.kernels.feed_forward_kernels import feed_forward_backward_kernel, feed_forward_kernel
from fst.kernels.feed_forward_packing import (
    EXTRA,
    channel_tiles,
    product_dtype,
    takes_sizes,
    tile_widths,
)
from fst.kernels.folding import folded_layer, packed_layers
from fst.kernels.hopper import try_on_hopper
from fst.kernels.operators import operator
from fst.kernels.tiles import Tiles, first_that_fits, tiles_in
from fst.kernels.weight_gradients import weight_gradients


def _tiles(tokens: int, hidden: int, warps: int, stages: int) -> Tiles:
    return {"BLOCK_T": tokens, "BLOCK_H": hidden, "num_warps": warps, "num_stages": stages}


# The fastest of those tried on an H200, by whether the channels' second tile is a wide one; then
# what fits into less shared memory.
FORWARD = {False: _tiles(128, 64, 8, 3), True: _tiles(128, 32, 8, 3)}
BACKWARD = {False: _tiles(128, 64, 8, 2), True: _tiles(128, 32, 8, 2)}
SMALLER = [_tiles(64, 32, 4, 2), _tiles(32, 16, 4, 1)]
# Each group of warps of the Hopper kernels adds up so many tokens' gradients.
_GROUP = 64


def _hopper_took(launch: Callable[[], None], *tokens: Tensor) -> bool:
    """Whether the Hopper kernel ran on these; it wants them to begin at multiples of 16 bytes."""
    suited = all(x.dtype == torch.bfloat16 and x.data_ptr() % 16 == 0 for x in tokens)
    wide = tile_widths(tokens[0].shape[1])[0] == 128
    return suited and wide and try_on_hopper("MLP", tokens[0], launch)


def constants(x: Tensor, w1: Tensor, hidden: int) -> dict[str, int | bool]:
    """What kernels with a hidden layer are compiled for."""
    exact = x.dtype == torch.float32
    sizes = {"H": hidden, "HP": len(w1), "EXACT": exact, "ASM": x.is_cuda}
    return channel_tiles(x.shape[1]) | sizes


@operator("fst::feed_forward")
def mlp_forward(
    x: Tensor,
    place: Tensor | None,
    first: Tensor,
    second: Tensor,
    b2: Tensor,
    w1: Tensor,
    w2: Tensor,
    eps: float,
) -> Tensor:
    """Tokens (t d) to tokens; first (h d+EXTRA, or h d without a norm) and second (d h) are there
    for their gradients, w1 and w2 are the same packed. A place (p h) serves tokens with the same
    index modulo p."""
    y = torch.empty_like(x)

    def for_hopper() -> None:
        from fst.kernels import feed_forward_hopper as hopper

        hopper.forward(x, place, w1, w2, b2, eps, y)

    def launch(tiles: Tiles) -> None:
        rows = 1 if place is None else len(place)
        feed_forward_kernel[(tiles_in(len(x), tiles["BLOCK_T"]),)](
            x, place, w1, w2, b2, y, len(x), rows, eps, **constants(x, w1, len(first)), **tiles
        )

    if not _hopper_took(for_hopper, x):
        first_that_fits((FORWARD[tile_widths(x.shape[1])[1] == 128], *SMALLER), launch)
    return y


@mlp_forward.register_fake
def _(
    x: Tensor,
    place: Tensor | None,
    first: Tensor,
    second: Tensor,
    b2: Tensor,
    w1: Tensor,
    w2: Tensor,
    eps: float,
) -> Tensor:
    return torch.empty_like(x)


@operator("fst::feed_forward_backward")
def mlp_backward(
    dy: Tensor, x: Tensor, place: Tensor | None, w1: Tensor, w2: Tensor, hidden: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, place (empty without one), first (with EXTRA columns), second; b2's shares.

    A compiler does better than we could here at adding up the shares.
    """
    count, width = x.shape
    dx = torch.empty_like(x)
    normed = x.new_empty(count, width + EXTRA) if place is None else None
    gelu, change = x.new_empty(count, hidden), x.new_empty(count, hidden)
    sums = x.new_empty(2 * tiles_in(count, 2 * _GROUP), width, dtype=torch.float32)

    def for_hopper() -> None:
        from fst.kernels import feed_forward_hopper_backward as hopper

        hopper.backward(dy, x, place, w1, w2, eps, dx, normed, gelu, change, sums)

    def launch(tiles: Tiles) -> Tensor:
        shares = x.new_empty(tiles_in(count, tiles["BLOCK_T"]), width, dtype=torch.float32)
        feed_forward_backward_kernel[(len(shares),)](
            dy, x, place, w1, w2, dx, normed, gelu, change, shares,
            count, 1 if place is None else len(place), eps,
            **constants(x, w1, hidden), EXTRA=EXTRA, **tiles,
        )  # fmt: skip
        return shares

    if not _hopper_took(for_hopper, x, dy):
        shares = first_that_fits((BACKWARD[tile_widths(width)[1] == 128], *SMALLER), launch)
        sums.zero_()
        sums[0] = shares.sum(dim=0)
    first, second = weight_gradients((change, x if normed is None else normed), (dy, gelu))
    if place is None:
        change = x.new_empty(0)
    elif len(place) < count:
        change = change.unflatten(0, (-1, len(place))).sum(dim=0)
    return dx, change, first, second, sums


@mlp_backward.register_fake
def _(
    dy: Tensor, x: Tensor, place: Tensor | None, w1: Tensor, w2: Tensor, hidden: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    width = x.shape[1]
    return (
        torch.empty_like(x),
        x.new_empty(0) if place is None else torch.empty_like(place),
        x.new_empty(hidden, width + (EXTRA if place is None else 0), dtype=torch.float32),
        x.new_empty(width, hidden, dtype=torch.float32),
        x.new_empty(2 * math.ceil(x.shape[0] / (2 * _GROUP)), width, dtype=torch.float32),
    )


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, place, first, _, _, w1, w2, ctx.eps = inputs
    ctx.save_for_backward(x, place, w1, w2)
    ctx.hidden = first.shape[0]


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, place, w1, w2 = ctx.saved_tensors
    given = dy.contiguous(), x, place, w1, w2
    dx, dplace, first, second, sums = mlp_backward(*given, ctx.hidden, ctx.eps)
    layers = first, second, sums.sum(dim=0)
    return dx, None if place is None else dplace, *layers, None, None, None


mlp_forward.register_autograd(_differentiate, setup_context=_remember)


class Layers(NamedTuple):
    """Both layers of an MLP: as they are differentiated, in float32, and packed for the kernels."""

    first: Float[Tensor, "h c"]
    """A slot (`fst.kernels.folding`) behind a LayerNorm, or the weight alone."""
    second: Float[Tensor, "d h"]
    bias: Float[Tensor, " d"]
    packed_first: Float[Tensor, "H W"]
    packed_second: Float[Tensor, "H W"]


def _check(first_weight: Tensor, second_weight: Tensor) -> None:
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
    _check(first_weight, second_weight)
    dtype = product_dtype(tokens)
    norm, layer = (norm_weight, norm_bias), ([first_weight], [first_bias])
    first, *packed = folded_layer(*norm, *layer, dtype, second=second_weight)
    return Layers(first, second_weight.float(), second_bias.float(), *packed)


def point_layers(
    weight: Float[Tensor, "h d"],
    second_weight: Float[Tensor, "d h"],
    second_bias: Float[Tensor, " d"],
    blend: Tensor,
) -> Layers:
    """The layers of an MLP whose first has an addend for each point, for blends like these."""
    _check(weight, second_weight)
    dtype = product_dtype(blend)
    packed = packed_layers(weight, second_weight, dtype)
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
    blend: Float[Tensor, "b p d"], place: Float[Tensor, "#b p h"], layers: Layers
) -> Float[Tensor, "b p d"]:
    """The MLP whose first layer has an addend for each point, which the batch may share."""
    dtype = product_dtype(blend)
    out = mlp_forward(_rows(blend, dtype), _rows(place, dtype), *layers, 0.0)
    return out.view(blend.shape)
