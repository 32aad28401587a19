"""From the bytes of an image file to pixels, and from many files to one tensor.

Enters: files of the usual kinds. Leaves: 8-bit RGB at one size. Greyscale, palette, CMYK and
16-bit images are converted, transparent ones are laid on white, and photographs are turned as their
EXIF orientation says. What cannot be decoded whole is left out, with its name and the reason.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from typing import Self, TypeVar

import numpy as np
import torch
from jaxtyping import Int, UInt8
from PIL import Image, ImageOps, UnidentifiedImageError
from rich.console import Console
from torch import Tensor

from fst.data.files import DataError, first_line
from fst.data.images import ImageFiles, LabelledImages, Skipped, listed
from fst.terminal import printable, progress_bar
from fst.types import Device

Seen = TypeVar("Seen")
# Images decoded between two copies to the device: bounds what is held twice.
_BLOCK = 512
# Pillow reads dozens of kinds, some with programs of their own: Ghostscript for PostScript.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
# What decoding may hold at once, over all threads of a process; and at most for each pixel, while
# it is turned, laid on white and converted.
MEMORY, BYTES_PER_PIXEL = 2 * 2**30, 24
_SIXTEEN_BIT = ("I", "I;16", "I;16B", "I;16L", "I;16N")


class ImageError(ValueError):
    """An image cannot be used; the message says why."""


class _Memory:
    """A memory limit shared by threads. A thread waits until its image fits, or until no other is
    being decoded."""

    def __init__(self) -> None:
        self._taken = 0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._taken == 0 or self._taken + size <= MEMORY)
            self._taken += size
        try:
            yield
        finally:
            with self._changed:
                self._taken -= size
                self._changed.notify_all()


_memory = _Memory()


@contextmanager
def decoding(data: bytes) -> Iterator[Image.Image]:
    """An upright RGB image; `ImageError` where the file is damaged, cut short or too large.

    Until the block is left its memory counts, and other threads may have to wait.
    """
    if not data:
        raise ImageError("is empty")
    with _explained():
        opened = Image.open(BytesIO(data), formats=FORMATS)
    with opened:
        width, height = opened.size
        size = BYTES_PER_PIXEL * width * height
        if size > MEMORY:
            limit = MEMORY // BYTES_PER_PIXEL
            raise ImageError(f"has {width} × {height} pixels, more than {limit:,}")
        with _memory.taken(size):
            with _explained():
                opened.load()
                with suppress(Exception):  # unreadable metadata say nothing about the pixels
                    ImageOps.exif_transpose(opened, in_place=True)
                image = _rgb(opened)
            yield image


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except ImageError:
        raise
    # A damaged file can make a decoder raise almost anything, MemoryError included.
    except Exception as error:
        # Pillow's message for unknown content names a buffer by its address.
        unknown = isinstance(error, UnidentifiedImageError)
        raise ImageError("is not an image" if unknown else first_line(error)) from error


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in _SIXTEEN_BIT:
        values = np.asarray(image).clip(0, 65535).astype(np.uint32)
        return Image.fromarray(((values + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ImageError("has floating-point pixels, whose range is not known")
    if image.has_transparency_data:
        layer = image if image.mode == "RGBA" else image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")


@dataclass(frozen=True)
class View:
    """Scale an image (bicubic, antialiased) until it just covers `cover`, and keep the centre."""

    cover: tuple[int, int]
    crop: tuple[int, int]

    @classmethod
    def evaluation(cls, image_size: tuple[int, int], resize: int) -> Self:
        """Validation and prediction: for a square, short side to `resize`, then the centre."""
        height, width = (round(side * resize / min(image_size)) for side in image_size)
        return cls((height, width), image_size)

    @classmethod
    def stored(cls, image_size: tuple[int, int], stored_size: int) -> Self:
        """What resident training images keep: the centre, in the shape of the model's images."""
        shape = cls.evaluation(image_size, stored_size).cover
        return cls(shape, shape)

    def __call__(self, image: Image.Image) -> UInt8[np.ndarray, "3 h w"]:
        width, height = image.size
        rows, columns = self.cover
        # The rounding of torchvision's Resize and CenterCrop, the library most results come from.
        if height * columns <= width * rows:
            scaled = rows, max(columns, int(rows * width / height))
        else:
            scaled = max(rows, int(columns * height / width)), columns
        top = round((scaled[0] - self.crop[0]) / 2)
        left = round((scaled[1] - self.crop[1]) / 2)
        # Only the kept part is computed; a very long image would not fit the memory otherwise.
        down, across = height / scaled[0], width / scaled[1]
        bottom, right = top + self.crop[0], left + self.crop[1]
        box = (left * across, top * down, min(right * across, width), min(bottom * down, height))
        size = self.crop[1], self.crop[0]
        image = image.resize(size, Image.Resampling.BICUBIC, box=box)
        return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def look_at(files: ImageFiles, row: int, look: Callable[[Image.Image], Seen]) -> Seen | Skipped:
    """What `look` makes of an image, or why there is none."""
    try:
        data = files.read(row)
    except OSError as error:
        return Skipped(files.title(row), f"cannot be read ({error.strerror or error})")
    try:
        with decoding(data) as image:
            return look(image)
    except ImageError as error:
        return Skipped(files.title(row), str(error))


def looked_through(
    files: ImageFiles,
    rows: Int[np.ndarray, " n"],
    look: Callable[[Image.Image], Seen],
    threads: int | None = None,
) -> Iterator[list[Seen | Skipped]]:
    """What `look` makes of each image, or why there is none, a block of images at a time."""
    with ThreadPoolExecutor(threads or default_threads()) as pool:
        # A block at a time: work that is queued all at once cannot be interrupted.
        for start in range(0, len(rows), _BLOCK):
            block = rows[start : start + _BLOCK].tolist()
            yield list(pool.map(lambda row: look_at(files, row, look), block))


def decoded(
    files: ImageFiles, rows: Int[np.ndarray, " n"], view: View, threads: int | None = None
) -> Iterator[tuple[Int[np.ndarray, " b"], UInt8[Tensor, "b 3 h w"], list[Skipped]]]:
    """Blocks of decoded images: which of `rows` (by position), pixels, and what was left out."""
    start = 0
    for views in looked_through(files, rows, view, threads):
        good = [(start + n, v) for n, v in enumerate(views) if not isinstance(v, Skipped)]
        images = np.array([pixels for _, pixels in good], np.uint8).reshape(-1, 3, *view.crop)
        which = np.array([position for position, _ in good], dtype=np.int64)
        yield which, torch.from_numpy(images), [v for v in views if isinstance(v, Skipped)]
        start += len(views)


def decode_all(
    images: LabelledImages, view: View, device: Device, console: Console, threads: int | None = None
) -> tuple[UInt8[Tensor, "n 3 h w"], LabelledImages, tuple[Skipped, ...]]:
    """All images on the device, the labels of those that are there, and what was left out."""
    pixels = torch.empty(len(images), 3, *view.crop, dtype=torch.uint8, device=device)
    skipped = list(images.files.problems)
    kept: list[np.ndarray] = []
    filled = 0
    with progress_bar(console, transient=True) as progress:
        title = printable(f"decoding {images.files.source.name}")
        task = progress.add_task(title, total=len(images))
        for which, block, missing in decoded(images.files, images.rows, view, threads):
            pixels[filled : filled + len(block)] = block.to(device)
            filled += len(block)
            kept.append(which)
            skipped += missing
            progress.advance(task, len(block) + len(missing))
    if filled == 0:
        raise DataError(f"{images.files.source}: no image could be decoded: {listed(skipped)}")
    return pixels[:filled], images.take(np.concatenate(kept)), tuple(skipped)


def report(
    images: LabelledImages, skipped: tuple[Skipped, ...], console: Console, purpose: str
) -> None:
    """One line: how many images of how many classes, what for, and what was left out."""
    classes = f"{len(images.class_names)} classes for {purpose}"
    text = f"{images.files.source}: {len(images):,} images of {classes}"
    if skipped:
        items = listed([f"{item.name} ({item.reason})" for item in skipped])
        text += f"; {len(skipped):,} skipped: {items}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def default_threads() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
