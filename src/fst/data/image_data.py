"""The images of a recipe: class folders or tars in, labelled batches out.

Enters: a folder with `train` and `val`, each a folder of class folders, a tar or tar shards.
Leaves: training and validation splits and, by a separate call, the test split (the `val` images).
Classes are the data's: `ImageData.describe` gives them to whoever builds the model.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from rich.console import Console

from fst.data.files import DataError
from fst.data.image_augmentation import ImageAugmentation
from fst.data.image_decoding import View, decode_all, default_threads, report
from fst.data.image_samples import ResidentImages, StreamedImages, TimmTransform
from fst.data.images import LabelledImages, find_split, has_split, listed, require_classes
from fst.data.samples import Storage, stays_resident
from fst.data.source import DataSource, Recipe, TestSplit
from fst.terminal import Terminal
from fst.types import Device, check_fields

TRAIN, VAL = "train", "val"

# Names until the data give theirs, and how many classes the paper's numbers are about.
CLASSES, PAPER_CLASSES = ("class 0", "class 1"), 1000
_HELD_OUT = 0.05  # of the training images, unless their number is given

Images = ResidentImages | StreamedImages


@dataclass(frozen=True)
class ImageData(DataSource, ImageAugmentation):
    """Labelled images. The defaults are the paper's for ImageNet-1K.

    With `held_out` = 0, as in the paper, checkpoints are selected on the `val` images, on which the
    result is then reported: the number reported is the best of many. With `held_out` above 0 they
    are selected on training images set aside, and `val` is a test set proper. The settings of the
    augmentation are options like the others, and inherited for that.
    """

    own = "images of yours: add --data FOLDER"

    resize: int = 256
    """Validation: the short side before the central image_size is cut out."""
    storage: Storage = "auto"
    """resident decodes all images once and keeps them on the device; streamed decodes them in
    background processes at every use, and needs timm and torchvision for augmentation; auto is
    resident where a split takes at most a quarter of the GPU's memory (4 GiB without a GPU)."""
    stored_size: int | None = None
    """Resident training images: the short side they are stored at. None is `resize`."""
    held_out: int | None = 0
    """Training images set aside for validation, the same share of every class; None is a
    twentieth. If that allows, at least one of every class that has two."""
    split_seed: int = 0
    """Of the draw of the images set aside."""
    workers: int | None = None
    """Threads that decode, or background processes of the streamed path; None is one a core."""

    def __post_init__(self) -> None:
        check_fields(self, stored_size=1, held_out=0, split_seed=0, workers=1)
        if min(self.image_size) < 1 or self.resize < min(self.image_size):
            raise ValueError(
                "image_size must be positive and resize at least its short side, "
                f"got {self.image_size} and {self.resize}"
            )
        for name in ("crop_scale", "crop_ratio"):
            low, high = getattr(self, name)
            if not 0 < low <= high or (name == "crop_scale" and high > 1):
                raise ValueError(f"{name} must rise from above 0 (to 1), got {(low, high)}")
        for name in ("flip", "jitter", "erasing"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}")

    def describe(self, folder: Path) -> tuple[str, ...]:
        """The names of the classes, sorted: class number i is the i-th of them."""
        return find_split(folder, TRAIN).class_names

    def frequent_class(self, folder: Path) -> str | None:
        if not has_split(folder, TRAIN):
            return None
        images = find_split(folder, TRAIN)
        return images.class_names[int(images.counts.argmax())]

    def count_training(self, folder: Path) -> int:
        train = find_split(folder, TRAIN)
        return len(train) - self.count_held_out(train)

    def prepare(self, folder: Path, device: Device = "cpu", console: Console | None = None) -> None:
        """Nothing can be made for the user; what is there is checked, so that errors come early."""
        train = find_split(folder, TRAIN)
        self._hold_out(train)
        if self.held_out == 0 or has_split(folder, VAL):
            _val(folder, train)
        elif console is not None:
            text = f"{folder}: holds no {VAL} images, so there will be no test"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._fits(train, self._stored, torch.device(device))

    def splits(
        self, folder: Path, device: torch.device, augment: bool, console: Console | None
    ) -> tuple[Images, Images]:
        """`val` is not opened where validation images are held out."""
        console = console or _main_console()
        train = find_split(folder, TRAIN)
        training, validation = self._hold_out(train)
        if validation is None:
            validation = _val(folder, train)
        learned = self._images(training, device, console, "training", augment)
        return learned, self._images(validation, device, console, "validation")

    def fingerprint(self, folder: Path) -> dict[str, Any]:
        """By which the data of a run are known again: the names of the images of each class."""
        if not has_split(folder, TRAIN):
            return {}  # the test images may lie alone
        train = find_split(folder, TRAIN)
        training, validation = self._hold_out(train)
        validation = _val(folder, train) if validation is None else validation
        return {"splits": [_digest(training, validation)]}

    def fit(self, recipe: Recipe, folder: Path) -> Recipe:
        """The classes of the data, and how many images are held out where that is left open.

        What the paper reports is about ImageNet's classes.
        """
        changed: Any = recipe
        names = self.describe(folder)
        data = replace(self, held_out=self.count_held_out(find_split(folder, TRAIN)))
        changed = replace(changed, data=data, model=replace(changed.model, class_names=names))
        if len(names) != PAPER_CLASSES:
            about = {"evaluation": changed.evaluation.without_paper()}
            changed = replace(changed, **about, paper_parameters=None, paper_error=None)
        fitted: Recipe = changed
        return fitted

    def shown(self, recipe: Recipe) -> Recipe:
        """Nobody wants to read placeholders for a thousand classes."""
        changed: Any = recipe
        shorter: Recipe = replace(changed, model=replace(changed.model, class_names=CLASSES))
        return shorter

    def check_changes(self, recipe: Any) -> None:
        if recipe.model.class_names != CLASSES:
            raise ValueError("model.class_names cannot be set: the classes are those of the data")

    def check_options(self, recipe: Any) -> None:
        if recipe.model.image_size != self.image_size:
            raise ValueError(
                "model.image_size and data.image_size must be the same, got "
                f"{recipe.model.image_size} and {self.image_size}; --data.image-size, with a "
                "--data.resize that is no smaller, and --model.image-size set them"
            )

    def check_test(self, folder: Path) -> None:
        find_split(folder, VAL)

    def load_test(
        self, folder: Path, device: Device = "cpu", *, console: Console | None = None
    ) -> TestSplit[Images]:
        """The `val` images. Their classes must be those of `train`, where that is there too."""
        train = find_split(folder, TRAIN) if has_split(folder, TRAIN) else None
        images = _val(folder, train)
        console = console or _main_console()
        found = self._images(images, torch.device(device), console, "testing")
        return TestSplit(found, digest=_digest(images))

    @property
    def evaluation_view(self) -> View:
        """How validation, test and prediction see an image."""
        return View.evaluation(self.image_size, self.resize)

    @property
    def _stored(self) -> View:
        return View.stored(self.image_size, self.stored_size or self.resize)

    def _images(
        self,
        images: LabelledImages,
        device: torch.device,
        console: Console,
        purpose: str,
        augment: bool = False,
    ) -> Images:
        """Training images are stored larger than the model's, to be cut at random."""
        view, learned = self.evaluation_view, purpose == "training"
        stored = self._stored if learned else view
        if not self._fits(images, stored, device):
            report(images, images.files.problems, console, purpose)
            transform = TimmTransform(self) if augment else None
            workers = self.workers or default_threads()
            return StreamedImages(images, view, transform, workers=workers, device=device)
        pixels, images, skipped = decode_all(images, stored, device, console, self.workers)
        lost = [n for n, count in zip(images.class_names, images.counts, strict=True) if not count]
        if learned and lost:  # they cannot be learned, and the model would still have them
            raise DataError(
                f"{images.files.source}: no training image of {listed(lost)} can be decoded: "
                f"{listed(skipped)}"
            )
        report(images, skipped, console, purpose)
        given = pixels, torch.from_numpy(images.labels), images.class_names, images.names, skipped
        central, augmentation = view if learned else None, self if augment else None
        return ResidentImages(*given, view=central, augmentation=augmentation)

    def _fits(self, images: LabelledImages, view: View, device: torch.device) -> bool:
        """Whether to keep a split on the device; an error where it was asked for and cannot be."""
        height, width = view.crop
        what = f"{images.files.source}: {len(images):,} images of {height} × {width} pixels"
        return stays_resident(self.storage, len(images) * 3 * height * width, device, what)

    def count_held_out(self, train: LabelledImages) -> int:
        least = max(int((train.counts > 1).sum()), round(_HELD_OUT * len(train)), 1)
        return least if self.held_out is None else self.held_out

    def _hold_out(self, train: LabelledImages) -> tuple[LabelledImages, LabelledImages | None]:
        if self.held_out == 0:
            return train, None
        count = self.count_held_out(train)
        taken = stratified(train.labels, train.counts, count, self.split_seed)
        if taken is None:
            raise DataError(
                f"{train.files.source}: cannot hold out {count:,} of {len(train):,} images "
                f"and leave one to learn from in each of {len(train.class_names)} classes; "
                f"--data.held-out 0 selects the weights by the {VAL} images"
            )
        rest = np.setdiff1d(np.arange(len(train)), taken)
        held = replace(train.take(taken), files=replace(train.files, problems=()))
        return train.take(rest), held


def stratified(
    labels: Int[np.ndarray, " n"], counts: Sequence[int] | np.ndarray, total: int, seed: int
) -> Int[np.ndarray, " m"] | None:
    """`total` rows, of each class its share, to a whole image; None if that empties a class.

    Where `total` allows it, a class of two images or more gives at least one.
    """
    counts = np.asarray(counts)
    if total >= len(labels):
        return None
    exact = counts * total / len(labels)
    shares = np.floor(exact).astype(np.int64)
    several = counts > 1
    least = several.astype(np.int64) * (total >= several.sum())
    shares = np.maximum(shares, least)
    # Where that is too much, those give back that have the most above their share.
    while shares.sum() > total:
        shares[np.argmax(np.where(shares > least, shares - exact, -np.inf))] -= 1
    # The largest remainders get the images that rounding down left over.
    shares[np.argsort(shares - exact, kind="stable")[: total - shares.sum()]] += 1
    if (shares >= counts).any():
        return None
    generator = np.random.default_rng(seed)
    taken = [
        generator.choice(np.flatnonzero(labels == number), size=share, replace=False)
        for number, share in enumerate(shares)
    ]
    return np.sort(np.concatenate(taken))


def _val(folder: Path, train: LabelledImages | None) -> LabelledImages:
    images = find_split(folder, VAL)
    if train is not None:
        require_classes(images, train.class_names, str(train.files.source))
    return images


def _digest(*splits: LabelledImages) -> str:
    """By the names of the images and their classes."""
    found = hashlib.sha256()
    for images in splits:
        found.update(json.dumps([images.names, images.labels.tolist()]).encode())
    return found.hexdigest()[:16]


def _main_console() -> Console:
    """Of several processes the first one speaks."""
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return Terminal(quiet=ready and torch.distributed.get_rank() != 0)
