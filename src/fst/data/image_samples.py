"""Images and labels by row: resident on the device, or streamed from the disk.

Enters: row numbers. Leaves: an `ImageBatch` of float RGB images in [0, 1] and their labels.
`ResidentImages` holds every decoded image on the device, where augmentation happens too, so that
training never waits for decoding. `StreamedImages` decodes in background processes; its training
images go through timm's transforms, which need torchvision.
"""

import hashlib
import json
import logging
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor
from torch.utils.data import get_worker_info

from fst.classifiers import IMAGENET_MEAN, IMAGENET_STD
from fst.data.files import DataError
from fst.data.image_augmentation import Boxes, ImageAugmentation, crop
from fst.data.image_decoding import View, look_at
from fst.data.images import LabelledImages, Skipped
from fst.data.samples import Asked, Rows, Streamed
from fst.types import Device

ImageTransform = Callable[[Image.Image], Tensor]
_log = logging.getLogger(__name__)


@contextmanager
def seeded(*seed: int) -> Iterator[None]:
    """Python's and PyTorch's own generators, which transforms draw from, set for a while."""
    state = np.random.SeedSequence(seed).generate_state(2, np.uint64)
    before = random.getstate()
    with torch.random.fork_rng(devices=[]):
        random.seed(int(state[0]))
        torch.manual_seed(int(state[1]))
        try:
            yield
        finally:
            random.setstate(before)


class TimmTransform:
    """timm's training transform: the same augmentations as `ImageAugmentation`, from whole files.

    timm standardises before it erases, and our models standardise by themselves, so that is undone:
    the erased pixels are then standard normal for the model, as timm has it.
    """

    def __init__(self, augmentation: ImageAugmentation) -> None:
        try:
            from timm.data.transforms_factory import create_transform
        except ImportError as error:
            raise DataError(
                "streamed training images are augmented by timm and torchvision, and "
                f"{error.name or 'one of them'} is not installed: "
                "pip install 'function-space-transformer[vision]', or "
                'keep the images in memory (storage "resident")'
            ) from error
        self.transform = create_transform(
            input_size=(3, *augmentation.image_size),
            is_training=True,
            scale=augmentation.crop_scale,
            ratio=augmentation.crop_ratio,
            hflip=augmentation.flip,
            auto_augment="3a" if augmentation.three_augment else None,
            color_jitter=augmentation.jitter,
            interpolation="bicubic",
            re_prob=augmentation.erasing,
            re_mode="pixel",
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
        )
        self._mean = torch.tensor(IMAGENET_MEAN)[:, None, None]
        self._std = torch.tensor(IMAGENET_STD)[:, None, None]

    def __call__(self, image: Image.Image) -> Float[Tensor, "3 h w"]:
        transformed: Tensor = self.transform(image) * self._std + self._mean
        return transformed


@dataclass(frozen=True)
class ImageBatch:
    """Images in [0, 1], not yet standardised (the model does that), and their class numbers."""

    images: Float[Tensor, "b 3 h w"]
    labels: Int[Tensor, " b"]

    def to(self, device: Device) -> "ImageBatch":
        images, labels = (x.to(device, non_blocking=True) for x in (self.images, self.labels))
        return ImageBatch(images, labels)


class LabelledRows(Rows):
    """Images by name, each of one of the named classes."""

    labels: Int[Tensor, " n"]
    class_names: tuple[str, ...]
    names: tuple[str, ...]
    skipped: Any

    def describe(self) -> dict[str, Any]:
        names = "\n".join(self.names).encode()
        labels = json.dumps(self.labels.tolist()).encode()
        return {
            "training_samples": len(self),
            "class_names": list(self.class_names),
            "fingerprint": hashlib.sha256(names + labels).hexdigest()[:16],
        }

    def decoded_rows(self) -> Int[Tensor, " m"]:
        """The images that were there, once all have been asked for."""
        return torch.arange(len(self))

    def left_out(self) -> dict[str, Any]:
        return {"skipped": [f"{item.name}: {item.reason}" for item in self.skipped]}


@dataclass(eq=False, repr=False)
class ResidentImages(LabelledRows):
    """Decoded images on the device, 8 bits a channel.

    Training images are stored larger than the model's and cut by `augmentation`; without random
    numbers a batch is their central `view`, as in validation. Validation images are stored as the
    model takes them.
    """

    pixels: UInt8[Tensor, "n 3 rows columns"]
    labels: Int[Tensor, " k"]
    class_names: tuple[str, ...]
    names: tuple[str, ...]
    skipped: tuple[Skipped, ...] = ()
    view: View | None = field(default=None, kw_only=True)
    augmentation: ImageAugmentation | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not len(self.pixels) == len(self.labels) == len(self.names):
            raise ValueError(
                "pixels, labels and names must have one row for each image, "
                f"got {len(self.pixels)}, {len(self.labels)} and {len(self.names)}"
            )
        self.labels = self.labels.to(self.pixels.device)
        self.augmented = self.augmentation is not None

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def device(self) -> torch.device:
        return self.pixels.device

    def to(self, device: Device) -> Self:
        return replace(self, pixels=self.pixels.to(device))

    def augmentations(
        self, solutions: int, generator: torch.Generator
    ) -> Float[Tensor, "b a"] | None:
        return None if self.augmentation is None else self.augmentation.draw(solutions, generator)

    def gather(
        self, rows: Tensor, chosen: Tensor | None, augmentation: Tensor | None
    ) -> ImageBatch:
        if chosen is not None:
            raise ValueError("chosen was given, but an image has no queries to choose from")
        pixels = self.pixels[rows]
        if augmentation is None or self.augmentation is None:
            images = self._central(pixels)
        else:
            images = self.augmentation(pixels, augmentation)
        return ImageBatch(images, self.labels[rows])

    def _central(self, pixels: UInt8[Tensor, "b 3 rows columns"]) -> Float[Tensor, "b 3 h w"]:
        height, width = pixels.shape[2:]
        if self.view is None or (self.view.crop == self.view.cover == (height, width)):
            return pixels.float() / 255.0
        cover, size = self.view.cover, self.view.crop
        shape = pixels.new_ones(len(pixels), dtype=torch.float32)
        tall, wide = height * size[0] / cover[0], width * size[1] / cover[1]
        box = Boxes(
            shape * (height - tall) / 2, shape * (width - wide) / 2, shape * tall, shape * wide
        )
        return crop(pixels, box, size, shape < 0, None)


class StreamedImages(Streamed, LabelledRows):
    """Images decoded when they are needed.

    What is done to a row is a function of the seed and the row alone; the seed None asks for
    evaluation views. A file that cannot be decoded is replaced by another of its class (always the
    same one), noted in `skipped` and said in the log: a first look at every file would take as long
    as an epoch.
    """

    def __init__(
        self,
        images: LabelledImages,
        view: View,
        transform: ImageTransform | None = None,
        *,
        workers: int = 0,
        device: Device = "cpu",
    ) -> None:
        self.images = images
        self.labels = torch.from_numpy(images.labels)
        self.class_names = images.class_names
        self.names = images.names
        self.skipped: list[Skipped] = list(images.files.problems)
        self.view = view
        self.transform = transform
        self.workers = workers
        self._device = torch.device(device)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, asked: Asked) -> tuple[Tensor, Tensor, list[Skipped]]:
        # A worker is one of many; who asks for a batch at once, always without a seed, has threads.
        threads = 1 if get_worker_info() is not None else max(1, self.workers)
        with ThreadPoolExecutor(threads) as pool:
            items = [*pool.map(lambda row: self._decoded(row, asked.seed), asked.rows.tolist())]
        images, labels, skipped = zip(*items, strict=True)
        return torch.stack(images), torch.tensor(labels), [one for some in skipped for one in some]

    def received(self, batch: tuple[Tensor, Tensor, list[Skipped]]) -> ImageBatch:
        images, labels, skipped = batch
        for item in skipped:
            if item not in self.skipped:
                self.skipped.append(item)
                name = item.name.encode(errors="replace").decode()
                _log.warning("image skipped: %s: %s; another takes its place", name, item.reason)
        return ImageBatch(images, labels)

    def decoded_rows(self) -> Int[Tensor, " m"]:
        """Those that another has not stood in for."""
        bad = {item.name for item in self.skipped}
        titles = (self.images.files.title(int(row)) for row in self.images.rows)
        return torch.arange(len(self))[torch.tensor([title not in bad for title in titles])]

    def _decoded(self, row: int, seed: int | None) -> tuple[Tensor, int, list[Skipped]]:
        """One image with its label, or another that stands in for it, and what was skipped."""
        skipped: list[Skipped] = []
        for candidate in self._candidates(row):
            file = int(self.images.rows[candidate])
            change = partial(self._changed, row=candidate, seed=seed)
            found = look_at(self.images.files, file, change)
            if not isinstance(found, Skipped):
                return found, int(self.images.labels[candidate]), skipped
            skipped.append(found)
        source, count = self.images.files.source, f"{len(skipped):,}"
        raise DataError(f"{source}: none of {count} images can be decoded; {skipped[0]}")

    def _candidates(self, row: int) -> Iterator[int]:
        """The row, those that follow it in its class (from the start after the end), all others."""
        yield row
        labels = self.images.labels
        same = np.flatnonzero(labels == labels[row])
        yield from np.roll(same, -np.searchsorted(same, row))[1:].tolist()
        after = np.argsort((labels - labels[row] - 1) % len(self.class_names), kind="stable")
        yield from after[: len(self) - len(same)].tolist()

    def _changed(self, image: Image.Image, row: int, seed: int | None) -> Float[Tensor, "3 h w"]:
        if seed is None or self.transform is None:
            return torch.from_numpy(self.view(image)).float() / 255.0
        with seeded(seed, row):
            return self.transform(image)
