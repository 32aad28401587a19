"""A tiny classifier and a tiny labelled data set for the tests of training."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fst.classifiers import Classifier
from fst.data.image_samples import ImageBatch, LabelledRows
from fst.data.source import TrainingSplit, ValidationSplit
from fst.evaluation_points import PointDraws, ResampledPoints
from fst.training import RunFolder, Summary, TrainingSettings, train
from fst.training.settings import CrossEntropy
from training_fakes import tiny_settings

SIZE = (4, 6)
CLASSES = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu")


@dataclass(frozen=True)
class TinyClassifierConfig:
    class_names: tuple[str, ...] = CLASSES
    width: int = 10
    dropout: float = 0.0


class TinyClassifier(Classifier):
    """Two layers on all pixels; the evaluation points matter, so a lost stream shows."""

    config_type = TinyClassifierConfig

    def __init__(self, config: TinyClassifierConfig) -> None:
        super().__init__(SIZE, config.class_names)
        self.config = config
        self.predict_anchors = nn.Linear(1, 1)
        self.read = nn.Linear(3 * SIZE[0] * SIZE[1] + 1, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.width, len(config.class_names))

    def logits(
        self, images: Float[Tensor, "b 3 h w"], draws: PointDraws | None = None
    ) -> Float[Tensor, "b k"]:
        assert draws is not None
        pixels = self.standardize(images).flatten(1)
        points = torch.sin(7 * self.predict_anchors(draws.uniform)).mean().expand(len(pixels), 1)
        hidden = torch.tanh(self.read(torch.cat((pixels, points), dim=1)))
        return self.head(self.dropout(hidden))

    def point_stream(self, anchor_seed: int, sobol_seed: int) -> ResampledPoints:
        return ResampledPoints(2, 9, 4, 3, 1, anchor_seed, sobol_seed)

    def param_groups(self) -> dict[str, list[nn.Parameter]]:
        predictor = list(self.predict_anchors.parameters())
        known = {id(parameter) for parameter in predictor}
        return {
            "main": [p for p in self.parameters() if id(p) not in known],
            "predictor": predictor,
        }


class StripeSamples(LabelledRows):
    """Noise around one random picture for each class; the augmentation changes the brightness."""

    class_names, names, skipped = CLASSES, (), ()

    def __init__(self, images: Float[Tensor, "n 3 h w"], labels: Int[Tensor, " n"]) -> None:
        self.images, self.labels = images, labels

    @classmethod
    def draw(cls, count: int, seed: int) -> Self:
        means = torch.rand(len(CLASSES), 3, *SIZE, generator=torch.Generator().manual_seed(99))
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(len(CLASSES), (count,), generator=generator)
        noise = torch.rand(count, 3, *SIZE, generator=generator)
        return cls((means[labels] + noise) / 2, labels)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def device(self) -> torch.device:
        return self.images.device

    def to(self, device: torch.device | str) -> Self:
        return type(self)(self.images.to(device), self.labels.to(device))

    augmented = True

    def augmentations(self, solutions: int, generator: torch.Generator) -> Float[Tensor, "b a"]:
        return torch.rand(solutions, 1, generator=generator, device=self.device)

    def gather(
        self, rows: Tensor, chosen: Tensor | None, augmentation: Tensor | None
    ) -> ImageBatch:
        assert chosen is None
        images = self.images[rows]
        if augmentation is not None:
            images = images * (0.5 + augmentation[..., None, None] / 2)
        return ImageBatch(images, self.labels[rows])


class StreamedStripes(StripeSamples):
    """The same pictures, made one after the other in the order of a plan."""

    streamed = True
    ahead = 3

    def iterate(self, plan: Iterator[tuple[Tensor, int | None]]) -> Iterator[ImageBatch]:
        """Like a reader in the background, it asks for more of the plan than was taken."""
        waiting: list[ImageBatch] = []
        for rows, seed, _ in plan:
            waiting.append(self.batch(rows, None, None if seed is None else _bright(rows, seed)))
            if len(waiting) > self.ahead:
                yield waiting.pop(0)
        yield from waiting


def _bright(rows: Tensor, seed: int) -> Float[Tensor, "b 1"]:
    numbers = [np.random.default_rng((seed, int(row))).random() for row in rows]
    return torch.tensor(numbers, dtype=torch.float32)[:, None]


def image_settings(**changes: Any) -> TrainingSettings:
    settings = tiny_settings(
        objective=CrossEntropy(), queries=None, validation_batch=4, batch_size=6, augment=True
    )
    return dataclasses.replace(settings, **changes)


def image_train(
    path: Path | str,
    settings: TrainingSettings,
    *,
    resume: bool = False,
    dropout: float = 0.0,
    kind: type[StripeSamples] = StripeSamples,
) -> Summary:
    """Train the tiny classifier, from fixed weights, in a new or resumed run folder."""
    torch.manual_seed(3)
    model = TinyClassifier(TinyClassifierConfig(dropout=dropout))
    folder = RunFolder.resume(path) if resume else RunFolder.create(path, {"name": "tiny"})
    return train(
        model,
        TrainingSplit(kind.draw(29, seed=1)),
        ValidationSplit(kind.draw(17, seed=2)),
        settings,
        folder,
    )


def streamed_train(
    path: Path | str, settings: TrainingSettings, *, resume: bool = False, dropout: float = 0.0
) -> Summary:
    return image_train(path, settings, resume=resume, dropout=dropout, kind=StreamedStripes)


def tiny_draws(model: Classifier) -> PointDraws:
    stream = model.point_stream(0, 1)
    assert stream is not None
    return stream.draw().to(torch.device("cpu"), torch.float32)


# Seven images over two processes in two parts each: neither shares nor parts are equal.
IMAGE_RANKS_SETTINGS = image_settings(batch_size=7, accumulate=2, average=0.8, log_every=4)
