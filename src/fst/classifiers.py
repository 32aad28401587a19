"""Classifiers: photographs in, one score per class out.

    p(class | image) = softmax(logits(image))

Images enter as RGB between 0 and 1; standardising them belongs to the model, so the numbers it
was trained with travel with its weights.
"""

from abc import abstractmethod
from collections import Counter

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fst.base import Model
from fst.evaluation_points import PointDraws
from fst.types import check_alike

# Mean and standard deviation of the red, green and blue of ImageNet's training photographs.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def check_classes(class_names: tuple[str, ...]) -> None:
    if not isinstance(class_names, tuple) or len(class_names) < 2:
        raise ValueError(f"class_names must be a tuple of two names or more, got {class_names!r}")
    name, times = Counter(class_names).most_common(1)[0]
    if times > 1:
        raise ValueError(f"class_names must differ from each other, got {name!r} {times} times")


class ImageStandardization(nn.Module):
    """(colour - mean) / std for red, green and blue."""

    mean: Tensor
    deviation: Tensor
    """The standard deviation, under the name that it has in stored weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(IMAGENET_MEAN).view(3, 1, 1))
        self.register_buffer("deviation", torch.tensor(IMAGENET_STD).view(3, 1, 1))

    def forward(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b 3 h w"]:
        return (images - self.mean) / self.deviation


class Classifier(Model):
    """A learned map from images of one size to the scores of named classes."""

    def __init__(self, image_size: tuple[int, int], class_names: tuple[str, ...]) -> None:
        super().__init__()
        check_classes(class_names)
        self.image_size = image_size
        self.class_names = tuple(class_names)
        self.standardize = ImageStandardization()

    @abstractmethod
    def logits(
        self, images: Float[Tensor, "b 3 h w"], draws: PointDraws | None = None
    ) -> Float[Tensor, "b k"]:
        """Scores for images known to be good: the training path. It calls `standardize` first."""

    def forward(
        self, images: Float[Tensor, "b 3 h w"], draws: PointDraws | None = None
    ) -> Float[Tensor, "b k"]:
        self.check(images)
        return self.logits(images, draws)

    def check(self, images: Tensor) -> None:
        """Raise unless the images fit this model in shape, dtype, device and range."""
        if not isinstance(images, Tensor):
            raise TypeError(f"images must be a torch.Tensor, got {type(images).__name__}")
        height, width = self.image_size
        if images.ndim != 4 or images.shape[1:] != (3, height, width):
            raise ValueError(
                f"images must have the shape (batch, 3, {height}, {width}), "
                f"got {tuple(images.shape)}"
            )
        # Bytes of 0 to 255 are refused here: colours are numbers between 0 and 1.
        check_alike("images", images, "the model", next(self.parameters()))
        if images.numel() == 0:
            return
        low, high = images.aminmax()
        if not bool(torch.isfinite(high - low)):
            raise ValueError("images must be finite, got NaN or infinity")
        # Augmentation and resizing overshoot a little; 0 to 255 is what this is meant to find.
        if low < -1 or high > 2:
            raise ValueError(
                f"images must hold colours between 0 and 1, got {low.item():g} to {high.item():g}"
            )
