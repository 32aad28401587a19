"""The paper's augmentations for images that lie on the device, a batch at a time.

Enters: 8-bit images and, for each, a row of uniform random numbers. Leaves: float images in [0, 1].
In order, as timm and DeiT III have them: random resized crop and horizontal flip; 3-Augment, one of
greyscale, solarisation and Gaussian blur with equal chance; colour jitter; random erasing. The
result is a function of the images and the numbers alone, image by image; nothing waits for the
host. Crops come from what is stored: the centre of each photograph, at the stored size.

Cropping, resizing, mirroring and blurring are linear in the pixels and separate into rows and
columns: image' = R · image · Cᵀ, with one matrix R (output rows × stored rows) and one matrix C for
each image. The filter is the bicubic kernel (a = −1/2), widened where the box is larger than the
output, so it does not alias: the filter of Pillow, with which it agrees to its 8-bit rounding.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from fst.classifiers import IMAGENET_MEAN, IMAGENET_STD


class Boxes(NamedTuple):
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
    pixel = torch.arange(out, device=start.device, dtype=start.dtype).expand(len(start), out)
    if mirrored is not None:
        pixel = torch.where(mirrored[:, None], out - 1 - pixel, pixel)
    scale = (length / out)[:, None]
    centres = start[:, None] + (pixel + 0.5) * scale  # b out
    pixels = torch.arange(stored, device=start.device, dtype=start.dtype) + 0.5
    distance = (pixels - centres[..., None]) / scale.clamp(min=1.0)[..., None]
    inside = (pixels > start[:, None]) & (pixels < (start + length)[:, None])  # b stored
    weights = cubic(distance) * inside[:, None]
    return weights / weights.sum(dim=-1, keepdim=True)


def blur_matrix(std: Float[Tensor, " b"], size: int) -> Float[Tensor, "b size size"]:
    """A Gaussian over an axis, in pixels, its weights renormalised at the border.

    A standard deviation far below a pixel gives the unit matrix exactly.
    """
    pixels = torch.arange(size, device=std.device, dtype=std.dtype)
    distance = (pixels[:, None] - pixels) / std.clamp(min=0.01)[:, None, None]
    weights = torch.exp(-0.5 * distance.square())
    return weights / weights.sum(dim=-1, keepdim=True)


_ATTEMPTS = 10  # at a box that fits
_BOX = 2 * _ATTEMPTS + 2
_BLUR = (0.1, 2.0)  # least and greatest standard deviation, in pixels
_ERASED_AREA, _ERASED_RATIO = (0.02, 1 / 3), (0.3, 1 / 0.3)
_NOISE = 512  # pixels a side of the noise that erased boxes are cut from

# What the columns of the random numbers decide.
_COLUMNS = {
    "crop": _BOX, "flip": 1, "choice": 1, "blur": 1, "factors": 3, "order": 3,
    "erase": 1, "erased": _BOX, "noise": 2,
}  # fmt: skip


@dataclass(frozen=True)
class ImageAugmentation:
    """Which augmentations, and how strong. The defaults are the paper's."""

    image_size: tuple[int, int] = (224, 224)
    """Height and width of the model's images."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Least and greatest area of a training crop, as a share of the image."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Least and greatest width of a training crop over its height."""
    flip: float = 0.5
    """Chance of a horizontal flip."""
    three_augment: bool = True
    """One of greyscale, solarisation and Gaussian blur for every training image (3-Augment)."""
    jitter: float = 0.3
    """Brightness, contrast and saturation change by up to this share."""
    erasing: float = 0.25
    """Chance that a rectangle of a training image is replaced by noise."""

    def draw(self, count: int, generator: torch.Generator) -> Float[Tensor, "b a"]:
        """A row of random numbers for each image, on the generator's device."""
        columns = sum(_COLUMNS.values())
        return torch.rand(count, columns, generator=generator, device=generator.device)

    def __call__(
        self, images: UInt8[Tensor, "b 3 rows columns"], numbers: Float[Tensor, "b a"]
    ) -> Float[Tensor, "b 3 h w"]:
        parts = dict(zip(_COLUMNS, numbers.split(list(_COLUMNS.values()), dim=1), strict=True))
        kind = (parts["choice"][:, 0] * 3).long().clamp(max=2)
        low, high = _BLUR
        std = low + (high - low) * parts["blur"][:, 0]
        boxes = self.crops(parts["crop"], (images.shape[2], images.shape[3]))
        flipped = parts["flip"][:, 0] < self.flip
        blurred = torch.where(kind == 2, std, 0.0) if self.three_augment else None
        result = crop(images, boxes, self.image_size, flipped, blurred)
        if self.three_augment:
            result = grey_or_solar(result, kind == 0, kind == 1)
        if self.jitter > 0:
            factors = 1 + self.jitter * (2 * parts["factors"] - 1)
            result = jitter(result, factors, parts["order"].argsort(dim=1))
        if self.erasing > 0:
            chosen = parts["erase"][:, 0] < self.erasing
            size, largest = self.image_size, (self.image_size[0] - 1, self.image_size[1] - 1)
            given = parts["erased"], size, _ERASED_AREA, _ERASED_RATIO
            boxes, found = random_boxes(*given, largest=largest)
            result = erase(result, boxes, chosen & found, parts["noise"])
        return result

    def crops(self, numbers: Float[Tensor, "b 22"], size: tuple[int, int]) -> Boxes:
        """Boxes of the asked area and ratio inside images of `size`; the whole if none fits."""
        boxes, found = random_boxes(numbers, size, self.crop_scale, self.crop_ratio, largest=size)
        whole = 0.0, 0.0, float(size[0]), float(size[1])
        return Boxes(*(side.where(found, full) for side, full in zip(boxes, whole, strict=True)))


def random_boxes(
    numbers: Float[Tensor, "b 22"],
    size: tuple[int, int],
    area: tuple[float, float],
    ratio: tuple[float, float],
    largest: tuple[int, int],
) -> tuple[Boxes, Bool[Tensor, " b"]]:
    """The first of ten boxes that is no larger than `largest`, anywhere in an image of `size`.

    Areas are uniform between the two shares of the image's area, and the logarithm of width over
    height is uniform. The second result is False where none of the ten fits.
    """
    share, skew = numbers[:, :-2].unflatten(1, (_ATTEMPTS, 2)).unbind(dim=-1)
    target = (area[0] + (area[1] - area[0]) * share) * (size[0] * size[1])
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = (low + (high - low) * skew).exp()
    height = (target / aspect).sqrt().round().clamp(min=1.0)
    width = (target * aspect).sqrt().round().clamp(min=1.0)
    fits = (height <= largest[0]) & (width <= largest[1])
    first = fits.int().argmax(dim=1, keepdim=True)
    height, width = height.gather(1, first)[:, 0], width.gather(1, first)[:, 0]
    top = _whole(numbers[:, -2], size[0] - height)
    left = _whole(numbers[:, -1], size[1] - width)
    return Boxes(top, left, height, width), fits.any(dim=1)


def _whole(number: Float[Tensor, " b"], largest: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    """A whole number from 0 to `largest`, both included, from a uniform one."""
    return torch.minimum((number * (largest + 1)).floor(), largest)


def crop(
    images: UInt8[Tensor, "b 3 rows columns"],
    boxes: Boxes,
    size: tuple[int, int],
    flipped: Bool[Tensor, " b"],
    blurred: Float[Tensor, " b"] | None,
) -> Float[Tensor, "b 3 h w"]:
    """The boxes resized to one size, mirrored where `flipped`, then blurred (0 is not at all).

    R · image · Cᵀ, in [0, 1]: a bicubic filter overshoots at edges, and is clipped there.
    """
    down = sampling_matrix(boxes.top, boxes.height, images.shape[2], size[0])
    across = sampling_matrix(boxes.left, boxes.width, images.shape[3], size[1], flipped)
    if blurred is not None:
        down = torch.bmm(blur_matrix(blurred, size[0]), down)
        across = torch.bmm(blur_matrix(blurred, size[1]), across)
    # One product for all channels: they lie below each other as rows.
    stacked = images.flatten(1, 2).to(across.dtype)  # b 3·rows columns
    wide = torch.bmm(stacked, across.mT).unflatten(1, (3, -1))  # b 3 rows width
    return torch.matmul((down / 255.0)[:, None], wide).clamp_(0.0, 1.0)


def greyscale(images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b 1 h w"]:
    """Luma of ITU-R 601-2, as Pillow has it."""
    red, green, blue = images.split(1, dim=1)
    gray: Tensor = 0.299 * red + 0.587 * green + 0.114 * blue
    return gray


def grey_or_solar(
    images: Float[Tensor, "b 3 h w"], grey: Bool[Tensor, " b"], solar: Bool[Tensor, " b"]
) -> Float[Tensor, "b 3 h w"]:
    """Some images in grey, and some with their bright half inverted."""
    inverted = solar[:, None, None, None] & (images >= 0.5)
    images = torch.where(inverted, 1.0 - images, images)
    return torch.where(grey[:, None, None, None], greyscale(images), images)


def jitter(
    images: Float[Tensor, "b 3 h w"], factors: Float[Tensor, "b 3"], order: Int[Tensor, "b 3"]
) -> Float[Tensor, "b 3 h w"]:
    """Brightness, contrast and saturation times `factors`, applied in each image's own `order`.

    All three move an image away from (or towards) a plainer one: black, its mean grey, itself in
    grey. `order` holds a permutation of 0, 1, 2 for each image.
    """
    for number in range(3):
        which = order[:, number]
        factor = factors.gather(1, which[:, None])[..., None, None]
        grey = greyscale(images)
        which = which[:, None, None, None]
        plainer = torch.where(which == 1, grey.mean(dim=(2, 3), keepdim=True), grey)
        plainer = plainer * (which != 0)
        images = torch.lerp(plainer, images, factor).clamp_(0.0, 1.0)
    return images


def erase(
    images: Float[Tensor, "b 3 h w"],
    boxes: Boxes,
    chosen: Bool[Tensor, " b"],
    numbers: Float[Tensor, "b 2"],
) -> Float[Tensor, "b 3 h w"]:
    """Noise in the boxes of the chosen images: standard normal once the model has standardised.

    This is timm's mode "pixel", the one that goes with the chance 0.25; noise therefore leaves
    [0, 1]. It is cut from one fixed picture of noise at a random position.
    """
    height, width = images.shape[2:]
    rows = torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device)
    tall = (rows >= boxes.top[:, None]) & (rows < (boxes.top + boxes.height)[:, None])
    wide = (columns >= boxes.left[:, None]) & (columns < (boxes.left + boxes.width)[:, None])
    inside = tall[:, None, :, None] & wide[:, None, None, :] & chosen[:, None, None, None]
    shift = (numbers * _NOISE).long()
    down, across = (rows + shift[:, :1]) % _NOISE, (columns + shift[:, 1:]) % _NOISE
    noise = _noise(images.device)[:, down[:, :, None], across[:, None, :]]  # 3 b h w
    return torch.where(inside, noise.transpose(0, 1), images)


@cache
def _noise(device: torch.device) -> Float[Tensor, "3 s s"]:
    # Made on the CPU, so that every device has the same.
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(3, _NOISE, _NOISE, generator=generator)
    mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    return (mean + std * normal).to(device)
