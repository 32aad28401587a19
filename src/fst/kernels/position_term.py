"""The position term of a pointwise MLP's first layer as one kernel: nothing of γ in memory.

Positions x (b p s) enter in float32; W_γ γ(x) + bias, and a share of each batch entry where there
is one, leaves in the products' dtype. γ(x) = [x, sin(f_k x), cos(f_k x)], `fst.nn.FourierFeatures`,
is made in registers. With t = f / 2π,

    sin(f x) = sin(2π (t x - n)),   n the nearest integer to t x.

The inner bracket is one fused multiply-add, so its error is that of t alone, and the angle lies
within [-π, π], where the GPU's fast sine errs by about 2^-21.

Going forward a program keeps the weights of some hidden units in shared memory and takes one tile
of positions after the other. It makes γ where the tensor cores want it: the compiler does so only
if all that γ is made of comes from memory, which is why a table holds even trivial numbers.

Columns of γ and of the packed weights: for each axis K sines, then K cosines; then RAW columns for

    (x, what rounding leaves of x, 1, 1)   and   (w_x, w_x, bias, what rounding leaves of it).

Rows of the table (K columns): the turns t; for each of those columns of the last tile that depend
on x, a one in that column; the ones.

Going backward γ is made again and stored, for the product which gives the gradient of those
columns. It goes, as in `fst.kernels.weights`, to a slot that nobody reads, and from there to weight
and bias. Where positions are learned, the same kernel makes their gradient from g W,
∂x = Σ_k f_k (cos(f_k x) (g W)_sin,k - sin(f_k x) (g W)_cos,k) + (g W)_x.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fst.kernels.blend import nothing, zero_tiles
from fst.kernels.feed_forward import mlp_tiles, weight_tile
from fst.kernels.launch import (
    Gradients,
    Tiles,
    first_that_fits,
    launch_fitting,
    launch_kernel,
    operator,
    processors,
    tiles_in,
)
from fst.kernels.weights import transposed_product

# Columns of the last tile: the coordinates in two parts, and ones.
RAW = 16
MOST_AXES, MOST_BANDS = 3, 64
# Hidden units of the packed weights come in multiples of this; no tile has more.
UNITS = 128
# Hidden units that a program packs.
PACKED_ROWS = 8
_TURN = tl.constexpr(2 * math.pi)


class PositionLayer(NamedTuple):
    """The slot of W_γ and the bias; the same packed; and, for the kernels, the turns of each band
    and where the coordinates and ones of the last tile belong."""

    layer: Float[Tensor, "h w"]
    packed: Float[Tensor, "H w"]
    table: Float[Tensor, "r k"]


@triton.jit
def pack_position_kernel(
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
def pack_position_backward_kernel(
    grad, dweight, dbias, H,
    AXES: tl.constexpr, BANDS: tl.constexpr, K: tl.constexpr, RAW: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some rows of the weight's gradient, and of the bias's: each has one column in `grad`."""
    rows, columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    WIDE: tl.constexpr = 2 * AXES * K + RAW
    SIZE: tl.constexpr = AXES * (1 + 2 * BANDS)
    wave = columns - AXES
    axis, cosine = wave // BANDS % AXES, wave // (AXES * BANDS)
    source = tl.where(wave < 0, 2 * AXES * K + columns, (2 * axis + cosine) * K + wave % BANDS)
    there = (rows < H)[:, None] & (columns < SIZE)[None, :]
    found = tl.load(grad + rows[:, None] * WIDE + source[None, :], mask=there, other=0.0)
    tl.store(dweight + rows[:, None] * SIZE + columns[None, :], found, mask=there)
    pointers = grad + rows * WIDE + 2 * AXES * (K + 1)
    tl.store(dbias + rows, tl.load(pointers, mask=rows < H, other=0.0), mask=rows < H)


def _layer_sizes(bands: int, columns: int) -> dict[str, int]:
    """Of weights with so many columns; bands are filled up to a tensor core's tile."""
    axes, padded = columns // (1 + 2 * bands), max(RAW, triton.next_power_of_2(bands))
    return {"AXES": axes, "BANDS": bands, "K": padded, "RAW": RAW}


@operator("fst::pack_position_layer")
def pack_position_forward(
    weight: Tensor, bias: Tensor, frequencies: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The slot, the packed layer and the table."""
    slot, packed, table = _empty_layer(weight, bias, frequencies, dtype)
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    launch_kernel(
        pack_position_kernel,
        (len(packed) // PACKED_ROWS,),
        weight, bias.contiguous(), frequencies.contiguous(), packed, table, weight.stride(0),
        len(weight),
        **_layer_sizes(len(frequencies), weight.shape[1]),
        COLUMNS=triton.next_power_of_2(packed.shape[1]),
        ROWS=triton.next_power_of_2(len(table)),
        BLOCK=PACKED_ROWS,
    )  # fmt: skip
    return slot, packed, table


@pack_position_forward.register_fake
def _empty_layer(
    weight: Tensor, bias: Tensor, frequencies: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Nothing in them yet."""
    hidden, columns = weight.shape
    sizes = _layer_sizes(frequencies.shape[0], columns)
    wide = 2 * sizes["AXES"] * sizes["K"] + RAW
    slot = weight.new_empty(1, dtype=torch.float32).expand(hidden, wide)
    packed = weight.new_empty(tiles_in(hidden, UNITS) * UNITS, wide, dtype=dtype)
    lines = 2 * sizes["AXES"] + 2
    return slot, packed, weight.new_empty(lines, sizes["K"], dtype=torch.float32)


@operator("fst::pack_position_layer_backward")
def pack_position_backward(grad: Tensor, bands: int, columns: int) -> tuple[Tensor, Tensor]:
    """Of the weight, with so many columns, and of the bias, in float32."""
    grad = grad.contiguous()
    dweight, dbias = _empty_gradients(grad, bands, columns)
    launch_kernel(
        pack_position_backward_kernel,
        (tiles_in(len(grad), PACKED_ROWS),),
        grad, dweight, dbias, len(grad),
        **_layer_sizes(bands, columns),
        COLUMNS=triton.next_power_of_2(columns),
        BLOCK=PACKED_ROWS,
    )  # fmt: skip
    return dweight, dbias


@pack_position_backward.register_fake
def _empty_gradients(grad: Tensor, bands: int, columns: int) -> tuple[Tensor, Tensor]:
    return grad.new_empty(grad.shape[0], columns), grad.new_empty(grad.shape[0])


@pack_position_forward.gradients("weight", "frequencies")
def _(ctx: Any, grad: Tensor, weight: Tensor, frequencies: Tensor) -> Gradients:
    dweight, dbias = pack_position_backward(grad, frequencies.shape[0], weight.shape[1])
    return {"weight": dweight, "bias": dbias}


def takes(axes: int, bands: int, hidden: int) -> bool:
    """Whether the kernels are made for a layer of this size."""
    return 0 < axes <= MOST_AXES and 0 < bands <= MOST_BANDS and hidden > 0 and hidden % 8 == 0


def position_layer(
    weight: Float[Tensor, "h g"],
    bias: Float[Tensor, " h"],
    frequencies: Float[Tensor, " k"],
    dtype: torch.dtype,
) -> PositionLayer:
    """The layer on γ with these frequencies, for products in this dtype."""
    bands = len(frequencies)
    axes, rest = divmod(weight.shape[1], 1 + 2 * bands)
    if rest or not takes(axes, bands, len(weight)):
        raise ValueError(
            f"weight must have a multiple of 8 rows and {1 + 2 * bands} columns for each of up to "
            f"{MOST_AXES} axes, with at most {MOST_BANDS} bands, got {tuple(weight.shape)}"
        )
    return PositionLayer(*pack_position_forward(weight, bias, frequencies.detach(), dtype))


# Adding and subtracting it rounds to an integer: float32 has no fractions so far from zero.
_ROUNDER = tl.constexpr(1.5 * 2**23)


@triton.jit
def _sine(angle, ASM: tl.constexpr):
    """Of an angle within [-π, π]."""
    if ASM:
        return tl.inline_asm_elementwise(
            "sin.approx.ftz.f32 $0, $1;", "=r,r", [angle], tl.float32, is_pure=True, pack=1
        )
    return tl.sin(angle)


@triton.jit
def _cosine(angle, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise(
            "cos.approx.ftz.f32 $0, $1;", "=r,r", [angle], tl.float32, is_pure=True, pack=1
        )
    return tl.cos(angle)


@triton.jit
def _angle(x, turns):
    """2π times what x turns (both t k) are more or less than whole turns."""
    minus_whole = _ROUNDER - tl.fma(x, turns, _ROUNDER)
    return tl.fma(x, turns, minus_whole) * _TURN


@triton.jit
def _waves(x, turns, ASM: tl.constexpr):
    """The sines and cosines of each coordinate."""
    x, turns = tl.broadcast(x[:, None], turns[None, :])
    angle = _angle(x, turns)
    return _sine(angle, ASM), _cosine(angle, ASM)


@triton.jit
def _raw(x, table, AXES: tl.constexpr, K: tl.constexpr, RAW: tl.constexpr, dtype: tl.constexpr):
    """The tile of coordinates, and of what rounding leaves of them, and ones."""
    column = table + tl.arange(0, RAW)
    raw = tl.load(table + (1 + 2 * AXES) * K + tl.arange(0, RAW))[None, :]
    for axis in tl.static_range(AXES):
        high = x[axis].to(dtype).to(tl.float32)
        raw += high[:, None] * tl.load(column + (1 + axis) * K)[None, :]
        raw += (x[axis] - high)[:, None] * tl.load(column + (1 + AXES + axis) * K)[None, :]
    return raw.to(dtype)


@triton.jit
def _coordinates(positions, rows, there, AXES: tl.constexpr):
    """Along each axis."""
    found = nothing()
    for axis in tl.static_range(AXES):
        found += (tl.load(positions + rows * AXES + axis, mask=there, other=0.0),)
    return found


@triton.jit(do_not_specialize=["P", "stride", "tiles", "each"])
def position_term_kernel(
    positions, w, table, share, hidden, P, stride, tiles, each,
    AXES: tl.constexpr, K: tl.constexpr, RAW: tl.constexpr,
    H: tl.constexpr, ASM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Some hidden units, whose weights stay in shared memory, of one tile of positions after the
    other; `each` batch entry has so many tiles."""
    W: tl.constexpr = 2 * K * AXES + RAW
    dtype = w.dtype.element_ty
    start = tl.program_id(1) * BLOCK_H
    columns = start + tl.arange(0, BLOCK_H)
    raw_weights = tl.trans(weight_tile(w, start, 2 * K * AXES, W, BLOCK_H, RAW))
    weights = nothing()  # of the sines and the cosines of each axis
    for i in tl.static_range(2 * AXES):
        weights += (tl.trans(weight_tile(w, start, i * K, W, BLOCK_H, K)),)
    rows = tl.arange(0, BLOCK_T)
    turns = tl.load(table + tl.arange(0, K))
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        batch = (tile // each).to(tl.int64)
        first = (tile % each).to(tl.int64) * BLOCK_T
        there = first + rows < P
        pointers = positions + batch * stride + first * AXES
        x = _coordinates(pointers, rows, there, AXES)
        raw = _raw(x, table, AXES, K, RAW, dtype)
        found = tl.dot(raw, raw_weights, input_precision="ieee")
        for axis in tl.static_range(AXES):
            s, c = _waves(x[axis], turns, ASM)
            found = tl.dot(s.to(dtype), weights[2 * axis], found, input_precision="ieee")
            found = tl.dot(c.to(dtype), weights[2 * axis + 1], found, input_precision="ieee")
        if share is not None:
            found += tl.load(share + batch * H + columns, mask=columns < H, other=0.0)[None, :]
        out = hidden + (batch * P + first) * H
        mask = there[:, None] & (columns < H)[None, :]
        tl.store(out + rows[:, None] * H + columns[None, :], found.to(dtype), mask=mask)


@triton.jit
def _put_embedding(embedding, rows, there, first, values, W: tl.constexpr, BLOCK: tl.constexpr):
    columns = first + tl.arange(0, BLOCK)
    pointers = embedding + rows[:, None] * W + columns[None, :]
    tl.store(pointers, values.to(embedding.dtype.element_ty), mask=there[:, None])


@triton.jit
def _put_gradient(
    dx, rows, there, x, back, back_raw, table, axis: tl.constexpr,
    AXES: tl.constexpr, K: tl.constexpr, RAW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A coordinate's, from those of its sines and cosines and of the tile of coordinates."""
    column = tl.arange(0, 2 * K)
    turns = tl.load(table + column % K)
    x, rates = tl.broadcast(x[:, None], turns[None, :])
    angle = _angle(x, rates)
    slope = tl.where((column < K)[None, :], _cosine(angle, ASM), -_sine(angle, ASM))
    found = tl.sum(back * slope * rates, 1) * _TURN
    found += tl.sum(tl.where((tl.arange(0, RAW) == axis)[None, :], back_raw, 0.0), 1)
    tl.store(dx + rows * AXES + axis, found, mask=there)


@triton.jit(do_not_specialize=["T"])
def position_term_backward_kernel(
    grad, positions, w, table, embedding, dx, T,
    AXES: tl.constexpr, K: tl.constexpr, RAW: tl.constexpr,
    H: tl.constexpr, ASM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """γ with ones, in the order of the packed weights; and dx, unless it is None."""
    W: tl.constexpr = 2 * K * AXES + RAW
    first = tl.program_id(0).to(tl.int64) * BLOCK_T
    rows = tl.arange(0, BLOCK_T)
    there = first + rows < T
    positions += first * AXES
    embedding += first * W
    x = _coordinates(positions, rows, there, AXES)
    turns = tl.load(table + tl.arange(0, K))
    raw = _raw(x, table, AXES, K, RAW, embedding.dtype.element_ty)
    _put_embedding(embedding, rows, there, 2 * K * AXES, raw, W, RAW)
    for axis in tl.static_range(AXES):
        sines, cosines = _waves(x[axis], turns, ASM)
        _put_embedding(embedding, rows, there, 2 * K * axis, sines, W, K)
        _put_embedding(embedding, rows, there, 2 * K * axis + K, cosines, W, K)
    if dx is not None:
        grad += first * H
        dx += first * AXES
        back = tl.zeros((BLOCK_T, RAW), tl.float32)
        back_waves = zero_tiles(AXES, BLOCK_T, 2 * K)
        for start in range(0, H, BLOCK_H):
            columns = start + tl.arange(0, BLOCK_H)
            mask = there[:, None] & (columns < H)[None, :]
            g = tl.load(grad + rows[:, None] * H + columns[None, :], mask=mask, other=0.0)
            a = weight_tile(w, start, 2 * K * AXES, W, BLOCK_H, RAW)
            back = tl.dot(g, a, back, input_precision="ieee")
            added = nothing()
            for axis in tl.static_range(AXES):
                a = weight_tile(w, start, 2 * K * axis, W, BLOCK_H, 2 * K)
                added += (tl.dot(g, a, back_waves[axis], input_precision="ieee"),)
            back_waves = added
        for axis in tl.static_range(AXES):
            _put_gradient(
                dx, rows, there, x[axis], back_waves[axis], back, table, axis, AXES, K, RAW, ASM
            )


# By whether there is little to hold in registers: then four programs run at once instead of three.
# After these, what fits into less shared memory.
FORWARD_TILES = {True: mlp_tiles(64, 128, 4, 1) | {"maxnreg": 128}, False: mlp_tiles(64, 128, 4, 1)}
BACKWARD_TILES = mlp_tiles(64, 64, 4, 3)
SMALLER_TILES = mlp_tiles(64, 32, 4, 1), mlp_tiles(32, 16, 4, 1)
# Programs that a multiprocessor runs at once; and how many columns of γ are few.
PROGRAMS, FEW_COLUMNS = {True: 4, False: 3}, 144


def _constants(positions: Tensor, packed: Tensor, table: Tensor, hidden: int) -> dict[str, Any]:
    fast = packed.is_cuda and packed.element_size() == 2
    sizes = {"AXES": positions.shape[-1], "K": table.shape[1], "RAW": RAW}
    return sizes | {"H": hidden, "ASM": fast}


@operator("fst::position_term")
def position_term_forward(
    positions: Tensor, layer: Tensor, packed: Tensor, table: Tensor, share: Tensor | None
) -> Tensor:
    """Of positions (#b p s) the hidden layer's share (b p h), h the rows of `layer`, a slot
    of the packed weights; of batch entries there are as many as in positions or in share (b h)."""
    out = _empty_term(positions, layer, packed, table, share)
    (batch, count, hidden), axes = out.shape, positions.shape[2]
    # Without a share of each, batch entries need not be told apart.
    entries, rows = (1, batch * count) if share is None else (batch, count)
    stride = 0 if positions.shape[0] == 1 else count * axes
    constants = _constants(positions, packed, table, hidden)
    little = share is None and packed.shape[1] <= FEW_COLUMNS

    def launch(tiles: Tiles) -> None:
        each, columns = tiles_in(rows, tiles["BLOCK_T"]), tiles_in(hidden, tiles["BLOCK_H"])
        most = PROGRAMS[little] * processors(positions.device) if positions.is_cuda else 6
        given = positions, packed, table, share, out, rows, stride, each * entries, each
        grid = (min(each * entries, max(1, most // columns)), columns)
        launch_kernel(position_term_kernel, grid, *given, **constants, **tiles)

    if out.numel():
        first_that_fits((FORWARD_TILES[little], *SMALLER_TILES), launch)
    return out


@position_term_forward.register_fake
def _empty_term(
    positions: Tensor, layer: Tensor, packed: Tensor, table: Tensor, share: Tensor | None
) -> Tensor:
    batch = positions.shape[0] if share is None else share.shape[0]
    return packed.new_empty(batch, positions.shape[1], layer.shape[0])


@operator("fst::position_term_backward")
def position_term_backward(
    grad: Tensor, positions: Tensor, packed: Tensor, table: Tensor, learned: bool
) -> tuple[Tensor, Tensor]:
    """Of grad (t h) and positions (t s): γ with ones, and the gradient of positions if learned."""
    count, hidden = grad.shape
    embedding, found = _empty_embedding(grad, positions, packed, table, learned)
    given = grad, positions, packed, table, embedding, found if learned else None, count
    constants = _constants(positions, packed, table, hidden)
    if count:
        tiles = BACKWARD_TILES, *SMALLER_TILES
        launch_fitting(position_term_backward_kernel, count, tiles, *given, **constants)
    return embedding, found


@position_term_backward.register_fake
def _empty_embedding(
    grad: Tensor, positions: Tensor, packed: Tensor, table: Tensor, learned: bool
) -> tuple[Tensor, Tensor]:
    embedding = packed.new_empty(grad.shape[0], packed.shape[1])
    return embedding, positions.new_empty(positions.shape if learned else 0)


@position_term_forward.gradients("positions", "packed", "table", "share")
def _(
    ctx: Any, grad: Tensor, positions: Tensor, packed: Tensor, table: Tensor, share: Tensor | None
) -> Gradients:
    learned = ctx.needs_input_grad[0]
    dshare = None if share is None else grad.sum(dim=1, dtype=torch.float32)
    if len(positions) != len(grad):  # positions common to the batch
        grad = grad.sum(dim=0, keepdim=True, dtype=torch.float32).to(grad.dtype)
    grad = grad.flatten(0, 1).contiguous()
    given = grad, positions.flatten(0, 1), packed, table
    embedding, found = position_term_backward(*given, learned)
    moved = found.view(positions.shape) if learned else None
    return {"positions": moved, "layer": transposed_product(grad, embedding), "share": dshare}


def position_term(
    positions: Float[Tensor, "#b p s"],
    layer: PositionLayer,
    share: Float[Tensor, "b h"] | None = None,
) -> Float[Tensor, "b p h"]:
    """W_γ γ(x) + bias, and the share of each batch entry; positions may be common to all."""
    if share is not None:
        hidden = layer.layer.shape[0]
        if share.shape[1] != hidden or positions.shape[0] not in (1, share.shape[0]):
            raise ValueError(
                f"share must be (b, {hidden}) for positions (1 or b, p, s), got "
                f"{tuple(share.shape)} for {tuple(positions.shape)}"
            )
        share = share.float().contiguous()
    return position_term_forward(positions.float().contiguous(), *layer, share)
