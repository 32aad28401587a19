"""A few test images seen closely: what the figures of a classifier draw, saved beside its rows.

Enters: a classifier and its test split. Leaves: `ImageFields`, NumPy arrays of the images as the
model saw them, their classes, the guesses, and the anchors in the unit square (vertical coordinate
first, the top left corner at zero). The file stays in the run's folder and is read without
unpickling anything.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped, UInt8
from torch import Tensor

from fst.classifiers import Classifier
from fst.data.samples import Rows
from fst.data.splits import TestSplit
from fst.evaluation.arrays import Array, read_arrays
from fst.evaluation.classification import (
    ClassificationSettings,
    images_of,
    point_draws,
)
from fst.evaluation.protocol import measuring
from fst.evaluation.rows import Origin
from fst.evaluation_points import PointDraws
from fst.vision import ImageClassifier


@dataclass(frozen=True)
class ImageFields:
    """Images n of k classes. Models without anchors have zero of them."""

    model: Shaped[Array, ""]
    rows: Int[Array, " n"]
    names: Shaped[Array, " n"]
    """Files that the images came from."""
    labels: Shaped[Array, " n"]
    guesses: Shaped[Array, " n"]
    """The most probable class, by name."""
    probabilities: Float[Array, " n"]
    """Of the guesses."""
    pictures: UInt8[Array, "n h w 3"]
    anchors: Float[Array, "n m 2"]
    length_scales: Float[Array, "n m 2"]
    """Of refinement: a classifier decodes nothing."""

    def __len__(self) -> int:
        return len(self.rows)

    def spread(self) -> float:
        """How far anchors adapt: the deviation of an anchor's horizontal coordinate over images."""
        return float(self.anchors[..., 1].std(axis=0).mean())


def load_image_fields(path: Path) -> ImageFields:
    """The fields of a file, their shapes checked against each other."""
    return read_arrays(path, ImageFields)


def choose_images(labels: Int[Tensor, " n"], count: int) -> list[int]:
    """The first image of classes spread over all classes, then the second of each, and so on.

    Decided without a model.
    """
    labels = labels.cpu()
    classes = labels.unique()
    spread = torch.linspace(0, len(classes) - 1, min(count, len(classes))).round().long()
    found = [torch.nonzero(labels == classes[index]).flatten().tolist() for index in spread]
    deepest = max(map(len, found), default=0)
    turns = [rows[turn] for turn in range(deepest) for rows in found if turn < len(rows)]
    return sorted(turns[:count])


def sample_image_fields(
    model: Classifier, test: TestSplit[Rows], settings: ClassificationSettings, origin: Origin
) -> ImageFields | None:
    """The chosen images, guessed as they are scored; None where none was asked for."""
    samples = images_of(test)
    wanted = choose_images(samples.labels, settings.pictures)
    if not wanted:
        return None
    rows = torch.tensor(wanted, device=samples.device)
    device = next(model.parameters()).device
    with measuring(model):
        images = samples.batch(rows).images.to(device)
        draws = point_draws(model, settings)
        probabilities, guesses = model(images, draws).softmax(dim=-1).max(dim=-1)
        anchors, length_scales = _anchors(model, images, draws)
    pictures = (images.permute(0, 2, 3, 1) * 255).round().clamp(0, 255).to(torch.uint8)
    labels = samples.labels.cpu()
    return ImageFields(
        model=np.array(origin.model),
        rows=np.array(wanted),
        names=np.array([samples.names[row] for row in wanted]),
        labels=np.array([samples.class_names[int(labels[row])] for row in wanted]),
        guesses=np.array([model.class_names[guess] for guess in guesses.tolist()]),
        probabilities=probabilities.float().cpu().numpy(),
        pictures=pictures.cpu().numpy(),
        anchors=anchors.float().cpu().numpy(),
        length_scales=length_scales.float().cpu().numpy(),
    )


def _anchors(
    model: Classifier, images: Float[Tensor, "n 3 h w"], draws: PointDraws | None
) -> tuple[Float[Tensor, "n m 2"], Float[Tensor, "n m 2"]]:
    """Anchors and refinement length scales; none for models without anchors."""
    if not isinstance(model, ImageClassifier):
        return images.new_zeros(len(images), 0, 2), images.new_zeros(len(images), 0, 2)
    found = model.represent(images, draws).anchors
    return found.positions, found.refinement_length_scales.expand_as(found.positions)
