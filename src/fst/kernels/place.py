"""The position's share of a pointwise MLP's first layer as one kernel: nothing of γ in memory.

Positions x (b p s) enter in float32; W_γ γ(x) + bias, and a share of each batch entry where there
is one, leaves in the products' dtype. γ(x) = [x, sin(f_k x), cos(f_k x)], `fst.nn.FourierFeatures`;
`place_kernels` says how the kernels make it and how they want the weights, `place_packing` packs
them.

Going backward γ is made again and stored, for the product which gives the gradients of weight and
bias. Where positions are learned, the same kernel makes their gradient from g W,
∂x = Σ_k f_k (cos(f_k x) (g W)_sin,k - sin(f_k x) (g W)_cos,k) + (g W)_x.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fst.kernels.hopper import processors
from fst.kernels.launching import launch_kernel
from fst.kernels.operators import operator
from fst.kernels.place_kernels import place_backward_kernel, place_kernel
from fst.kernels.place_packing import RAW, PlaceLayer, place_layer, takes
from fst.kernels.tiles import Tiles, first_that_fits, tiles_in
from fst.kernels.weight_gradients import transposed_product

__all__ = ["PlaceLayer", "place", "place_layer", "takes"]


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


def _constants(positions: Tensor, packed: Tensor, table: Tensor, hidden: int) -> dict[str, Any]:
    fast = packed.is_cuda and packed.element_size() == 2
    sizes = {"AXES": positions.shape[-1], "K": table.shape[1], "RAW": RAW}
    return sizes | {"H": hidden, "ASM": fast}


def _programs(device: torch.device, little: bool) -> int:
    """As many as a GPU runs at once."""
    if device.type != "cuda":
        return 6
    return PROGRAMS[little] * processors(device)


@operator("fst::place")
def place_forward(
    positions: Tensor, layer: Tensor, packed: Tensor, table: Tensor, share: Tensor | None
) -> Tensor:
    """Of positions (#b p s) the hidden layer's share (b p h), h the rows of `layer`, a slot
    (`place_packing`); of batch entries there are as many as in positions or in share (b h)."""
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
        each, columns = tiles_in(rows, tiles["BLOCK_T"]), tiles_in(hidden, tiles["BLOCK_H"])
        most = _programs(positions.device, little) // columns
        given = positions, packed, table, share, out, rows, stride, each * entries, each
        grid = (min(each * entries, max(1, most)), columns)
        launch_kernel(place_kernel, grid, *given, **constants, **tiles)

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
        grid = (tiles_in(count, tiles["BLOCK_T"]),)
        launch_kernel(place_backward_kernel, grid, *given, **constants, **tiles)

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
