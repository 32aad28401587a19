"""How the kernels of the pointwise MLPs want their weights: products' dtype, whole tiles.

Weights are packed h × W: hidden units up to a whole number of tiles, channels in two tiles of
powers of two, with room behind the last channel for what `pack_first` puts there. Nothing here is
differentiated; `first_layer` is, before.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor

EXTRA = 8  # columns behind the channels; six are used
HIDDEN_MULTIPLE = 64
_NARROWEST, _WIDEST = 16, 128


def takes_sizes(width: int, hidden: int) -> bool:
    """Whether the kernels are made for an MLP of this size."""
    return width % 8 == 0 and hidden % 8 == 0 and 0 < width <= 2 * _WIDEST - EXTRA and hidden > 0


def product_dtype(like: Tensor) -> torch.dtype:
    """What a matrix product runs in here: the autocast dtype where one is set."""
    kind = like.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype


def tile_widths(width: int) -> tuple[int, int]:
    """The channels in two tiles, powers of two; the second has room for EXTRA columns more."""
    first = _NARROWEST
    while 2 * first <= min(width, _WIDEST):
        first *= 2
    second = _WIDEST // 2 if first == _WIDEST else _NARROWEST
    while first + second < max(width, first) + EXTRA:
        second *= 2
    return first, second


def first_extra(width: int) -> int:
    """The column where what is behind the channels begins: in the second tile."""
    return max(width, tile_widths(width)[0])


def channel_tiles(width: int) -> dict[str, int]:
    """The constants by which every kernel here divides the channels."""
    first, second = tile_widths(width)
    return {"D": width, "E": first_extra(width), "D0": first, "D1": second}


def first_layer(
    gamma: Float[Tensor, " d"],
    beta: Float[Tensor, " d"],
    weight: Float[Tensor, "h d"],
    bias: Float[Tensor, " h"],
) -> Float[Tensor, "h d+1"]:
    """[W γ, b + W β]: the first layer as it acts on normalised tokens and a one."""
    weight = weight.float()
    constant = bias.float() + (weight * beta.float()).sum(dim=1)
    return torch.cat((weight * gamma.float(), constant.unsqueeze(1)), dim=1)


def _padded(columns: Tensor, width: int) -> Tensor:
    across, down = sum(tile_widths(width)) - columns.shape[1], -len(columns) % HIDDEN_MULTIPLE
    return F.pad(columns, (0, across, 0, down)).contiguous()


def _two_parts(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    high = values.to(dtype)
    return high, (values - high.float()).to(dtype)


def pack(weight: Float[Tensor, "h d"], dtype: torch.dtype) -> Float[Tensor, "H W"]:
    """Hidden units down, channels across."""
    return _padded(weight.detach().to(dtype), weight.shape[1])


def pack_first(layer: Float[Tensor, "h d+1"], dtype: torch.dtype) -> Float[Tensor, "H W"]:
    """`first_layer` with c and -u = -Σ_d w, in two parts each, behind the channels.

    The tokens there hold (deviation, its rest, deviation, mean, its rest, mean).
    """
    layer = layer.detach()
    weight = layer[:, :-1].to(dtype)
    width = weight.shape[1]
    c, c_rest = _two_parts(layer[:, -1], dtype)
    # Of the rounded weights: what the product with a constant token really gives.
    u, u_rest = _two_parts(-weight.float().sum(dim=1), dtype)
    behind = torch.stack((c, c, c_rest, u, u, u_rest), dim=1)
    gap = F.pad(weight, (0, first_extra(width) - width))
    return _padded(torch.cat((gap, behind), dim=1), width)
