"""How the kernels of the pointwise MLPs want their weights: products' dtype, whole tiles.

Weights are packed h × W: hidden units up to a whole number of tiles, channels in two tiles of
powers of two, with room behind the last channel for what `fst.kernels.folding` puts there.
"""

import torch
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


def padded_hidden(hidden: int) -> int:
    """Up to whole tiles."""
    return hidden + -hidden % HIDDEN_MULTIPLE
