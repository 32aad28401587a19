"""Kernels for the GPU. Plain PyTorch, where they are called from, stays the default elsewhere.

Where Triton is not installed, the names below are None.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fst.kernels.feed_forward_packing import EXTRA, product_dtype, takes_sizes

fused_blend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
short_attention: Callable[[Tensor, Tensor | None, float, int], Tensor] | None = None
AnchorBlend: Callable[[Tensor, Tensor, torch.dtype], Callable[[Tensor], Tensor]] | None = None
residual_product: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
# Modules, because layers are prepared in one call and used in others.
mlp: Any
output: Any
place: Any
projection: Any

if find_spec("triton") is None:
    mlp = output = place = projection = None
else:
    from fst.kernels import anchor_blend, attention, blend, mlp, output, place, projection, residual

    fused_blend, short_attention = blend.fused_blend, attention.short_attention
    AnchorBlend, residual_product = anchor_blend.AnchorBlend, residual.residual_product

__all__ = [
    "AnchorBlend",
    "fused_blend",
    "mlp",
    "output",
    "place",
    "projection",
    "reference",
    "residual_product",
    "short_attention",
    "takes_anchors",
    "takes_heads",
    "takes_positions",
    "takes_together",
    "takes_tokens",
    "usable",
]

# More features or axes than this are left to PyTorch.
_MOST_FEATURES, _MOST_AXES = 256, 3
# A row of anchor-to-anchor weights must fit into the registers.
_MOST_ANCHORS = 2048
# Longer heads are well served by PyTorch's own attention.
_LONGEST_HEAD = 32
# Places in a matrix are counted in 32 bits.
_MOST_NUMBERS = 2**31

_enabled = True


def enabled() -> bool:
    """Whether kernels of our own run where they apply."""
    return _enabled


def _on_gpu(tensor: Tensor) -> bool:
    """On one of NVIDIA's: some kernels contain its instructions."""
    return tensor.is_cuda and torch.version.hip is None


def usable(anchors: Tensor, width: int) -> bool:
    """Whether the fused blend takes anchors with so many features each: on a GPU, in float32 or
    less, of moderate size."""
    return (
        _enabled
        and _on_gpu(anchors)
        and anchors.element_size() <= 4
        and width <= _MOST_FEATURES
        and anchors.shape[2] <= _MOST_AXES
    )


def takes_anchors(positions: Tensor) -> bool:
    """Whether the kernel for W^A takes these: on a GPU, in float32 or less, not too many."""
    return (
        _enabled
        and _on_gpu(positions)
        and positions.element_size() <= 4
        and positions.shape[1] <= _MOST_ANCHORS
        and positions.shape[2] <= _MOST_AXES
    )


def takes_heads(queries: Tensor) -> bool:
    """Whether our own attention is the one for these: on a GPU, in half precision, short heads."""
    return (
        _enabled
        and _on_gpu(queries)
        and queries.element_size() == 2
        and queries.shape[-1] <= _LONGEST_HEAD
    )


def takes_positions(positions: Tensor, bands: int, hidden: int) -> bool:
    """Whether the kernel for the position's share takes these: on a GPU, in float32 or less,
    products in half precision."""
    return (
        place is not None
        and _enabled
        and _on_gpu(positions)
        and positions.element_size() <= 4
        and product_dtype(positions).itemsize == 2
        and place.takes(positions.shape[-1], bands, hidden)
    )


def takes_together(tensors: Sequence[Tensor]) -> bool:
    """Whether the optimiser's kernels take these: all on one GPU, contiguous, in float32."""
    device = tensors[0].device
    return _enabled and all(
        _on_gpu(tensor)
        and tensor.device == device
        and tensor.dtype == torch.float32
        and tensor.is_contiguous()
        for tensor in tensors
    )


def takes_tokens(tokens: Tensor, hidden: int) -> bool:
    """Whether the fused MLPs take tokens (b p d): on a GPU, products in half precision, sizes in
    whole units of 8. Float32 tokens will do under autocast, as for any product."""
    if not _enabled or not _on_gpu(tokens) or tokens.ndim != 3 or tokens.element_size() > 4:
        return False
    batch, count, width = tokens.shape
    return (
        product_dtype(tokens) in (torch.bfloat16, torch.float16)
        and takes_sizes(width, hidden)
        and 0 < batch * count * max(width + EXTRA, hidden) < _MOST_NUMBERS
    )


@contextmanager
def reference() -> Iterator[None]:
    """Within, the plain PyTorch path runs: for comparisons and for finding faults."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before
