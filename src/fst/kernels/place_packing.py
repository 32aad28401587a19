"""The layer on γ(x) as `fst.kernels.place_kernels` want it, in one kernel, and its gradients.

W_γ (h g) and a bias (h) enter; packed they have the columns which that module describes. What the
kernels find as the gradient of those columns goes, as in `fst.kernels.folding`, to a slot that
nobody reads, and from there to weight and bias.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fst.kernels.launching import launch_kernel
from fst.kernels.operators import operator
from fst.kernels.tiles import tiles_in

# Columns of the last tile: the coordinates in two parts, and ones.
RAW = 16
MOST_AXES, MOST_BANDS = 3, 64
# Hidden units of the packed weights come in multiples of this; no tile has more.
UNITS = 128
# Hidden units of a program.
BLOCK = 8
_TURN = tl.constexpr(2 * math.pi)


class PlaceLayer(NamedTuple):
    """The slot of W_γ and the bias; the same packed; and, for the kernels, the turns of each band
    and where the coordinates and ones of the last tile belong."""

    layer: Float[Tensor, "h w"]
    packed: Float[Tensor, "H w"]
    table: Float[Tensor, "r k"]


@triton.jit
def pack_place_kernel(
    weight, bias, frequencies, packed, table, STRIDE, H,
    AXES: tl.constexpr, BANDS: tl.constexpr, K: tl.constexpr, RAW: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some rows of the packed layer; the first program makes the table.

    Columns: for each axis K sines and K cosines, of which BANDS are real, then RAW for the
    coordinates in two parts and the bias in two. The weight has the coordinates first, then the
    sines of all axes, then the cosines.
    """
    rows, columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    dtype: tl.constexpr = packed.dtype.element_ty
    WIDE: tl.constexpr = 2 * AXES * K + RAW
    behind, band = columns - 2 * AXES * K, columns % K
    wave = (columns // K % 2 * AXES + columns // (2 * K)) * BANDS + band
    source = tl.where(behind < 0, AXES + wave, behind % AXES)
    real = tl.where(behind < 0, band, behind) < tl.where(behind < 0, BANDS, 2 * AXES)
    there = (rows < H)[:, None] & real[None, :]
    found = tl.load(weight + rows[:, None] * STRIDE + source[None, :], mask=there, other=0.0)
    found = found.to(tl.float32)
    constant = tl.load(bias + rows, mask=rows < H, other=0.0).to(tl.float32)
    rest = constant - constant.to(dtype).to(tl.float32)
    found = tl.where((behind == 2 * AXES)[None, :], constant[:, None], found)
    found = tl.where((behind == 2 * AXES + 1)[None, :], rest[:, None], found)
    put = rows[:, None] * WIDE + columns[None, :]
    tl.store(packed + put, found.to(dtype), mask=(columns < WIDE)[None, :])
    if tl.program_id(0) == 0:
        line, bands = tl.arange(0, ROWS)[:, None], tl.arange(0, K)
        turns = tl.load(frequencies + bands, mask=bands < BANDS, other=0.0).to(tl.float32)
        turns = tl.div_rn(turns, tl.full((K,), _TURN, tl.float32))
        chosen = (bands[None, :] == line - 1) | (line > 2 * AXES) & (
            (bands == 2 * AXES) | (bands == 2 * AXES + 1)
        )[None, :]
        filled = tl.where(line == 0, turns[None, :], tl.where(chosen, 1.0, 0.0))
        tl.store(table + line * K + bands[None, :], filled, mask=line < 2 * AXES + 2)


@triton.jit
def unpack_place_kernel(
    grad, dweight, dbias, H,
    AXES: tl.constexpr, BANDS: tl.constexpr, K: tl.constexpr, RAW: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some rows of the weight's gradient, and of the bias's: each has one place in `grad`."""
    rows, columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    WIDE: tl.constexpr = 2 * AXES * K + RAW
    SIZE: tl.constexpr = AXES * (1 + 2 * BANDS)
    wave = columns - AXES
    axis, cosine = wave // BANDS % AXES, wave // (AXES * BANDS)
    source = tl.where(wave < 0, 2 * AXES * K + columns, (2 * axis + cosine) * K + wave % BANDS)
    there = (rows < H)[:, None] & (columns < SIZE)[None, :]
    found = tl.load(grad + rows[:, None] * WIDE + source[None, :], mask=there, other=0.0)
    tl.store(dweight + rows[:, None] * SIZE + columns[None, :], found, mask=there)
    place = grad + rows * WIDE + 2 * AXES * (K + 1)
    tl.store(dbias + rows, tl.load(place, mask=rows < H, other=0.0), mask=rows < H)


def _padded_bands(bands: int) -> int:
    """A power of two that fills a tensor core's tile."""
    return max(RAW, triton.next_power_of_2(bands))


def _sizes(bands: int, columns: int) -> dict[str, int]:
    """Of weights with so many columns."""
    axes = columns // (1 + 2 * bands)
    return {"AXES": axes, "BANDS": bands, "K": _padded_bands(bands), "RAW": RAW}


def _made(weight: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Nothing in them yet."""
    hidden, columns = weight.shape
    sizes = _sizes(frequencies.shape[0], columns)
    wide = 2 * sizes["AXES"] * sizes["K"] + RAW
    slot = weight.new_empty(1, dtype=torch.float32).expand(hidden, wide)
    packed = weight.new_empty(tiles_in(hidden, UNITS) * UNITS, wide, dtype=dtype)
    lines = 2 * sizes["AXES"] + 2
    return slot, packed, weight.new_empty(lines, sizes["K"], dtype=torch.float32)


@operator("fst::place_layer")
def pack_place(
    weight: Tensor, bias: Tensor, frequencies: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The slot, the packed layer and the table."""
    slot, packed, table = _made(weight, frequencies, dtype)
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    launch_kernel(
        pack_place_kernel,
        (len(packed) // BLOCK,),
        weight, bias.contiguous(), frequencies.contiguous(), packed, table, weight.stride(0),
        len(weight),
        **_sizes(len(frequencies), weight.shape[1]),
        COLUMNS=triton.next_power_of_2(packed.shape[1]),
        ROWS=triton.next_power_of_2(len(table)),
        BLOCK=BLOCK,
    )  # fmt: skip
    return slot, packed, table


@pack_place.register_fake
def _(
    weight: Tensor, bias: Tensor, frequencies: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return _made(weight, frequencies, dtype)


@operator("fst::place_layer_backward")
def unpack_place(grad: Tensor, bands: int, columns: int) -> tuple[Tensor, Tensor]:
    """Of the weight, with so many columns, and of the bias, in float32."""
    grad = grad.contiguous()
    dweight, dbias = grad.new_empty(len(grad), columns), grad.new_empty(len(grad))
    launch_kernel(
        unpack_place_kernel,
        (tiles_in(len(grad), BLOCK),),
        grad, dweight, dbias, len(grad),
        **_sizes(bands, columns),
        COLUMNS=triton.next_power_of_2(columns),
        BLOCK=BLOCK,
    )  # fmt: skip
    return dweight, dbias


@unpack_place.register_fake
def _(grad: Tensor, bands: int, columns: int) -> tuple[Tensor, Tensor]:
    return grad.new_empty(grad.shape[0], columns), grad.new_empty(grad.shape[0])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    weight, _, frequencies, _ = inputs
    ctx.sizes = frequencies.shape[0], weight.shape[1]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad: Tensor | None, packed: None, table: None
) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 4
    found = unpack_place(grad, *ctx.sizes)
    weight, bias = (
        each if wanted else None for each, wanted in zip(found, ctx.needs_input_grad, strict=False)
    )
    return weight, bias, None, None


pack_place.register_autograd(_differentiate, setup_context=_remember)


def takes(axes: int, bands: int, hidden: int) -> bool:
    """Whether the kernels are made for a layer of this size."""
    return 0 < axes <= MOST_AXES and 0 < bands <= MOST_BANDS and hidden > 0 and hidden % 8 == 0


def place_layer(
    weight: Float[Tensor, "h g"],
    bias: Float[Tensor, " h"],
    frequencies: Float[Tensor, " k"],
    dtype: torch.dtype,
) -> PlaceLayer:
    """The layer on γ with these frequencies, for products in this dtype."""
    bands = len(frequencies)
    axes, rest = divmod(weight.shape[1], 1 + 2 * bands)
    if rest or not takes(axes, bands, len(weight)):
        raise ValueError(
            f"weight must have a multiple of 8 rows and {1 + 2 * bands} columns for each of up to "
            f"{MOST_AXES} axes, with at most {MOST_BANDS} bands, got {tuple(weight.shape)}"
        )
    return PlaceLayer(*pack_place(weight, bias, frequencies.detach(), dtype))
