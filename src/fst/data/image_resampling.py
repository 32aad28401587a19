"""Resampling a batch of images, each from its own box, by two matrix products.

Cropping, resizing, mirroring and blurring are linear in the pixels and separate into rows and
columns: image' = R · image · Cᵀ, with one matrix R (output rows × stored rows) and one matrix C for
each image. The filter is the bicubic kernel (a = −1/2), widened where the box is larger than the
output, so it does not alias: the filter of Pillow, with which it agrees to its 8-bit rounding.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor


@dataclass(frozen=True)
class Boxes:
    """A rectangle for each image, in pixels: whole numbers stored as floats."""

    top: Float[Tensor, " b"]
    left: Float[Tensor, " b"]
    height: Float[Tensor, " b"]
    width: Float[Tensor, " b"]


def cubic(distance: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Keys' kernel with a = −1/2; zero from distance 2 on."""
    x = distance.abs().clamp(max=2.0)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return torch.where(x < 1.0, near, far)


def sampling_matrix(
    start: Float[Tensor, " b"],
    length: Float[Tensor, " b"],
    stored: int,
    out: int,
    mirrored: Bool[Tensor, " b"] | None = None,
) -> Float[Tensor, "b out stored"]:
    """Weights that resize `start` .. `start + length` of an axis of `stored` pixels to `out`."""
    places = torch.arange(out, device=start.device, dtype=start.dtype).expand(len(start), out)
    if mirrored is not None:
        places = torch.where(mirrored[:, None], out - 1 - places, places)
    scale = (length / out)[:, None]
    centres = start[:, None] + (places + 0.5) * scale  # b out
    pixels = torch.arange(stored, device=start.device, dtype=start.dtype) + 0.5
    distance = (pixels - centres[..., None]) / scale.clamp(min=1.0)[..., None]
    inside = (pixels > start[:, None]) & (pixels < (start + length)[:, None])  # b stored
    weights = cubic(distance) * inside[:, None]
    return weights / weights.sum(dim=-1, keepdim=True)


def blur_matrix(deviation: Float[Tensor, " b"], size: int) -> Float[Tensor, "b size size"]:
    """A Gaussian over an axis, in pixels, its weights renormalised at the border.

    A deviation far below a pixel gives the unit matrix exactly.
    """
    pixels = torch.arange(size, device=deviation.device, dtype=deviation.dtype)
    distance = (pixels[:, None] - pixels) / deviation.clamp(min=0.01)[:, None, None]
    weights = torch.exp(-0.5 * distance.square())
    return weights / weights.sum(dim=-1, keepdim=True)


def resample(
    images: UInt8[Tensor, "b 3 rows columns"],
    down: Float[Tensor, "b height rows"],
    across: Float[Tensor, "b width columns"],
) -> Float[Tensor, "b 3 height width"]:
    """R · image · Cᵀ, in [0, 1]: a bicubic filter overshoots at edges, and is clipped there."""
    rows, columns = images.shape[2:]
    # One product for all channels: they lie below each other as rows.
    stacked = images.reshape(len(images), 3 * rows, columns).to(across.dtype)
    wide = torch.bmm(stacked, across.mT).unflatten(1, (3, rows))  # b 3 rows width
    return torch.matmul((down / 255.0)[:, None], wide).clamp_(0.0, 1.0)
