"""The position's share of a pointwise MLP's first layer as one kernel: nothing of γ in memory.

Positions x (b p s) enter in float32; W_γ γ(x) + bias, and a share of each batch entry where there
is one, leaves in the products' dtype. γ(x) = [x, sin(f_k x), cos(f_k x)], `fst.nn.FourierFeatures`;
`place_kernels` says how the kernels make it, and how they want the weights packed.

Going backward γ is made again and stored, for the product which gives the gradients of weight and
bias. Where positions are learned, the same kernel makes their gradient from g W,
∂x = Σ_k f_k (cos(f_k x) (g W)_sin,k - sin(f_k x) (g W)_cos,k) + (g W)_x.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
import triton
from jaxtyping import Float
from torch import Tensor

from fst.kernels.operators import operator
from fst.kernels.place_kernels import place_backward_kernel, place_kernel
from fst.kernels.tiles import Tiles, first_that_fits
from fst.kernels.weight_gradients import transposed_product

# Columns of the last tile: the coordinates in two parts, and ones.
RAW = 16
MOST_AXES, MOST_BANDS = 3, 64
# Hidden units of the packed weights come in multiples of this; no tile has more.
UNITS = 128


def _tiles(positions: int, hidden: int, warps: int, stages: int, registers: int = 0) -> Tiles:
    sizes = {"BLOCK_T": positions, "BLOCK_H": hidden, "num_warps": warps, "num_stages": stages}
    return sizes | {"maxnreg": registers} if registers else sizes


# By whether there is little to hold in registers: then four programs run at once instead of three.
# After these, what fits into less shared memory.
FORWARD = {True: _tiles(64, 128, 4, 1, registers=128), False: _tiles(64, 128, 4, 1)}
BACKWARD = _tiles(64, 64, 4, 3)
SMALLER = _tiles(64, 32, 4, 1), _tiles(32, 16, 4, 1)
# Programs that a multiprocessor runs at once; and how many columns of γ are few.
PROGRAMS, FEW = {True: 4, False: 3}, 144


def takes(axes: int, bands: int, hidden: int) -> bool:
    """Whether the kernels are made for a layer of this size."""
    return 0 < axes <= MOST_AXES and 0 < bands <= MOST_BANDS and hidden > 0 and hidden % 8 == 0


def _constants(positions: Tensor, packed: Tensor, table: Tensor, hidden: int) -> dict[str, Any]:
    fast = packed.is_cuda and packed.element_size() == 2
    sizes = {"AXES": positions.shape[-1], "K": table.shape[1], "RAW": RAW}
    return sizes | {"H": hidden, "ASM": fast}


def _programs(device: torch.device, little: bool) -> int:
    """As many as a GPU runs at once."""
    if device.type != "cuda":
        return 6
    return PROGRAMS[little] * torch.cuda.get_device_properties(device).multi_processor_count


@operator("fst::place")
def place_forward(
    positions: Tensor, layer: Tensor, packed: Tensor, table: Tensor, share: Tensor | None
) -> Tensor:
    """Of positions (#b p s) the hidden layer's share (b p h), h the rows of `layer`, which is there
    for its gradient alone; of batch entries there are as many as in positions or in share (b h)."""
    hidden = len(layer)
    batch = positions.shape[0] if share is None else share.shape[0]
    count, axes = positions.shape[1:]
    out = packed.new_empty(batch, count, hidden)
    # Without a share of each, batch entries need not be told apart.
    entries, rows = (1, batch * count) if share is None else (batch, count)
    stride = 0 if positions.shape[0] == 1 else count * axes
    constants = _constants(positions, packed, table, hidden)
    little = share is None and packed.shape[1] <= FEW

    def launch(tiles: Tiles) -> None:
        each, columns = triton.cdiv(rows, tiles["BLOCK_T"]), triton.cdiv(hidden, tiles["BLOCK_H"])
        most = _programs(positions.device, little) // columns
        given = positions, packed, table, share, out, rows, stride, each * entries, each
        place_kernel[(min(each * entries, max(1, most)), columns)](*given, **constants, **tiles)

    if out.numel():
        first_that_fits((FORWARD[little], *SMALLER), launch)
    return out


@place_forward.register_fake
def _(
    positions: Tensor, layer: Tensor, packed: Tensor, table: Tensor, share: Tensor | None
) -> Tensor:
    batch = positions.shape[0] if share is None else share.shape[0]
    return packed.new_empty(batch, positions.shape[1], layer.shape[0])


@operator("fst::place_backward")
def place_backward(
    grad: Tensor, positions: Tensor, packed: Tensor, table: Tensor, learned: bool
) -> tuple[Tensor, Tensor]:
    """Of grad (t h) and positions (t s): γ with ones, and the gradient of positions if learned."""
    count, hidden = grad.shape
    embedding = packed.new_empty(count, packed.shape[1])
    found = positions.new_empty(positions.shape if learned else 0)
    given = grad, positions, packed, table, embedding, found if learned else None, count
    constants = _constants(positions, packed, table, hidden)

    def launch(tiles: Tiles) -> None:
        place_backward_kernel[(triton.cdiv(count, tiles["BLOCK_T"]),)](*given, **constants, **tiles)

    if count:
        first_that_fits((BACKWARD, *SMALLER), launch)
    return embedding, found


@place_backward.register_fake
def _(
    grad: Tensor, positions: Tensor, packed: Tensor, table: Tensor, learned: bool
) -> tuple[Tensor, Tensor]:
    embedding = packed.new_empty(grad.shape[0], packed.shape[1])
    return embedding, positions.new_empty(positions.shape if learned else 0)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    positions, _, packed, table, share = inputs
    ctx.shared = share is not None
    ctx.save_for_backward(positions, packed, table)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    positions, packed, table = ctx.saved_tensors
    learned = ctx.needs_input_grad[0]
    share = grad.sum(dim=1, dtype=torch.float32) if ctx.shared else None
    if len(positions) != len(grad):  # positions common to the batch
        grad = grad.sum(dim=0, keepdim=True, dtype=torch.float32).to(grad.dtype)
    grad = grad.flatten(0, 1).contiguous()
    given = grad, positions.flatten(0, 1), packed, table
    embedding, found = place_backward(*given, learned)
    moved = found.view(positions.shape) if learned else None
    return moved, transposed_product(grad, embedding), None, None, share


place_forward.register_autograd(_differentiate, setup_context=_remember)


class PlaceLayer(NamedTuple):
    """W_γ and the bias as they are differentiated, in float32; the same packed; and, for the
    kernels, the turns of each band and where the coordinates and ones of the last tile belong."""

    layer: Float[Tensor, "h w"]
    packed: Float[Tensor, "H w"]
    table: Float[Tensor, "r k"]


def _padded_bands(bands: int) -> int:
    """A power of two that fills a tensor core's tile."""
    return max(RAW, triton.next_power_of_2(bands))


def _pack(layer: Float[Tensor, "h w"], axes: int, dtype: torch.dtype) -> Float[Tensor, "H w"]:
    """In the products' dtype, with what the last tile's columns stand for, up to whole tiles."""
    layer = layer.detach()
    behind = layer.shape[1] - RAW
    waves, coordinates = layer[:, :behind], layer[:, behind : behind + axes]
    bias = layer[:, behind + 2 * axes, None]
    rest = bias - bias.to(dtype).float()
    columns = torch.cat((waves, coordinates, coordinates, bias, rest), dim=1)
    across, down = layer.shape[1] - columns.shape[1], -len(layer) % UNITS
    return F.pad(columns, (0, across, 0, down)).to(dtype)


def _table(frequencies: Float[Tensor, " k"], axes: int) -> Float[Tensor, "r K"]:
    """A row of turns; one for each column of the coordinates' tile; a row of ones."""
    columns = _padded_bands(len(frequencies))
    turns = F.pad(frequencies.detach().float() / (2 * math.pi), (0, columns - len(frequencies)))
    chosen = torch.eye(2 * axes, columns, device=turns.device)
    ones = F.pad(torch.ones(2, device=turns.device), (2 * axes, columns - 2 * axes - 2))
    return torch.cat((turns[None], chosen, ones[None]))


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
    weight = weight.float()
    coordinates, waves = weight[:, :axes], weight[:, axes:].unflatten(1, (2, axes, bands))
    waves = F.pad(waves, (0, _padded_bands(bands) - bands)).transpose(1, 2).flatten(1)
    constant = F.pad(bias.float().unsqueeze(1), (axes, RAW - 2 * axes - 1))
    layer = torch.cat((waves, coordinates, constant), dim=1)
    return PlaceLayer(layer, _pack(layer, axes, dtype), _table(frequencies, axes))


def place(
    positions: Float[Tensor, "#b p s"],
    layer: PlaceLayer,
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
    return place_forward(positions.float().contiguous(), *layer, share)
