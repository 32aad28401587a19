"""One image at a time, read, decoded and augmented in a background process.

Enters: (row, seed). Leaves: a float image in [0, 1], its label, and the files that could not be
decoded on the way. Training images go through timm's transforms, which need torchvision; evaluation
needs neither.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from fst.classifiers import IMAGENET_DEVIATION, IMAGENET_MEAN
from fst.data.errors import DataError
from fst.data.image_augmentation import ImageAugmentation
from fst.data.image_decoding import ImageError, View, decoding, read
from fst.data.images import LabelledImages, Skipped

ImageTransform = Callable[[Image.Image], Tensor]
Item = tuple[Tensor, int, list[Skipped]]


class ImageReader(Dataset[Item]):
    """Images by (row, seed), for PyTorch's loader."""

    def __init__(
        self, images: LabelledImages, view: View, transform: ImageTransform | None = None
    ) -> None:
        self.images = images
        self.view = view
        self.transform = transform
        # Rows in the order of their classes, where a row is there, and where a class begins.
        self._order = np.argsort(images.labels, kind="stable")
        self._place = np.argsort(self._order)
        self._starts = np.concatenate([[0], np.cumsum(images.counts)])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, asked: tuple[int, int | None]) -> Item:
        row, seed = asked
        skipped: list[Skipped] = []
        for candidate in self._candidates(row):
            file = int(self.images.rows[candidate])
            try:
                with decoding(read(self.images.files, file)) as image:
                    changed = self._changed(image, candidate, seed)
            except ImageError as error:
                skipped.append(Skipped(self.images.files.title(file), str(error)))
                continue
            return changed, int(self.images.labels[candidate]), skipped
        raise DataError(
            f"{self.images.files.source}: none of {len(skipped):,} images can be decoded; "
            f"{skipped[0].name} {skipped[0].reason}"
        )

    def _candidates(self, row: int) -> Iterator[int]:
        """The row, those that follow it in its class (from the start after the end), all others."""
        label = self.images.labels[row]
        start, end = int(self._starts[label]), int(self._starts[label + 1])
        for step in range(end - start):
            yield int(self._order[start + (self._place[row] - start + step) % (end - start)])
        for step in range(len(self) - (end - start)):
            yield int(self._order[(end + step) % len(self)])

    def _changed(self, image: Image.Image, row: int, seed: int | None) -> Float[Tensor, "3 h w"]:
        if seed is None or self.transform is None:
            return torch.from_numpy(self.view(image)).float() / 255.0
        with seeded(seed, row):
            return self.transform(image)


def collate(
    items: Sequence[Item],
) -> tuple[Float[Tensor, "b 3 h w"], Int[Tensor, " b"], list[Skipped]]:
    images, labels, skipped = zip(*items, strict=True)
    return torch.stack(images), torch.tensor(labels), [item for some in skipped for item in some]


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
            std=IMAGENET_DEVIATION,
        )
        self._mean = torch.tensor(IMAGENET_MEAN)[:, None, None]
        self._deviation = torch.tensor(IMAGENET_DEVIATION)[:, None, None]

    def __call__(self, image: Image.Image) -> Float[Tensor, "3 h w"]:
        transformed: Tensor = self.transform(image) * self._deviation + self._mean
        return transformed
