"""The test of classifiers: a model and a test split of images enter, two result rows leave.

    top-k error = share of images whose class is not among the k with the highest scores

for k = 1 and k = 5, in float32 and in the order of the test split. With fewer than five classes
the second is always 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from rich.console import Console
from torch import Tensor

from fst.base import parameter_count
from fst.classifiers import Classifier
from fst.data.image_samples import LabelledRows
from fst.data.samples import Rows
from fst.data.source import DataSource, TestSplit
from fst.evaluation.fields import ImageFields, choose_rows
from fst.evaluation.protocol import Split, TestProtocol, check_test, make_row, measuring
from fst.evaluation.rows import ACCURACIES, EvaluationError, Origin, Row, Scores, group_errors
from fst.evaluation.trivial import TrainingFacts
from fst.evaluation_points import PointDraws
from fst.metrics import top_errors
from fst.terminal import printable, progress_bar
from fst.types import check_fields
from fst.vision import ImageClassifier


@dataclass(frozen=True)
class ClassificationSettings(TestProtocol):
    """How a classifier is scored. How test images are cut is up to the data."""

    batch_size: int = 100
    anchor_seed: int = 2026091322
    sobol_seed: int = 2026091323
    """Of the evaluation points, where a model draws them; the same for every batch."""
    paper_errors: tuple[float, ...] = ()
    """The paper's top-1 and top-5 error; empty where it has none."""
    pictures: int = 8
    """Test images kept with the results, for the figures."""

    kind, of_images = Classifier, True
    shown = ("pictures", "paper_errors")

    def __post_init__(self) -> None:
        check_fields(self, batch_size=1)
        if len(self.paper_errors) not in (0, len(ACCURACIES)):
            raise ValueError(
                f"paper_errors must give the top-1 and the top-5 error, got {self.paper_errors}"
            )
        if self.pictures < 0:
            raise ValueError(f"pictures must not be negative, got {self.pictures}")

    def about_data(self, data: DataSource) -> dict[str, Any]:
        """How images are cut."""
        return {"data": {name: getattr(data, name) for name in ("image_size", "resize")}}

    def score(
        self, model: Any, test: Split, origin: Origin, facts: TrainingFacts, console: Console | None
    ) -> Scores:
        rows = evaluate(model, test, self, origin, console=console)
        fields = sample_image_fields(model, test, self, origin)
        return rows + trivial_rows(rows, facts), fields


def evaluate(
    model: Classifier,
    test: TestSplit[Rows],
    settings: ClassificationSettings,
    origin: Origin,
    *,
    console: Console | None = None,
) -> list[Row]:
    """Score a classifier on a test split: a row for top-1, then one for top-5, with each class."""
    samples = images_of(test)
    if tuple(samples.class_names) != model.class_names:
        raise EvaluationError(
            f"the model knows {len(model.class_names)} classes ({_few(model.class_names)}), the "
            f"test images have {len(samples.class_names)} ({_few(samples.class_names)}); they "
            "must be the same"
        )
    device = next(model.parameters()).device
    errors = measure(model, samples, settings, label=origin.model, console=console)
    kept = samples.decoded_rows()
    errors, labels = errors[kept], samples.labels.cpu()[kept]
    groups = tuple(samples.class_names[label] for label in labels.tolist())
    rows, paper = [], settings.paper_errors or (None,) * len(ACCURACIES)
    for metric, column, quoted in zip(ACCURACIES, errors.T.tolist(), paper, strict=True):
        by_class = group_errors(column, groups, {})
        row = make_row(tuple(column), by_class, quoted, origin, parameter_count(model), device)
        rows.append(replace(row, metric=metric))
    return rows


def measure(
    model: Classifier,
    samples: LabelledRows,
    settings: ClassificationSettings,
    *,
    label: str = "",
    console: Console | None = None,
) -> Float[Tensor, "n e"]:
    """The top-1 and top-5 error of each image, or of what stood in for it."""
    device, draws = next(model.parameters()).device, point_draws(model, settings)
    parts = []
    with measuring(model), progress_bar(console) as progress:
        rows = torch.arange(len(samples)).split(settings.batch_size)
        batches, description = samples.in_order(rows), printable(f"testing {label}".strip())
        for batch in progress.track(batches, total=len(rows), description=description):
            scores = model(batch.images.to(device, non_blocking=True), draws)
            parts.append(top_errors(scores, batch.labels.to(device)).cpu())
    errors = torch.cat(parts)
    bad = torch.nonzero(~errors.isfinite().all(dim=1)).flatten().tolist()
    if bad:
        raise EvaluationError(
            f"the scores of {len(bad):,} test images are NaN or infinite, the first of them "
            f"{samples.names[bad[0]]}"
        )
    return errors


def trivial_rows(rows: Sequence[Row], facts: TrainingFacts) -> list[Row]:
    """Always the class that most training images have, scored as the model was (top-1)."""
    if (frequent := facts.frequent_class) is None:
        return []
    row = next(row for row in rows if row.metric == "top1_error")
    groups = tuple(replace(each, error=float(each.name != frequent)) for each in row.groups)
    right = sum(group.samples for group in groups if not group.error)
    errors = (0.0,) * right + (1.0,) * (row.samples - right)  # in the order of no image
    row = replace(row, model="most frequent class", seed=None, parameters=0, training=None)
    return [replace(row, paper_error=None, errors=errors, error=fmean(errors), groups=groups)]


def point_draws(model: Classifier, settings: ClassificationSettings) -> PointDraws | None:
    """The evaluation points of a test: one draw for every batch."""
    stream = model.point_stream(settings.anchor_seed, settings.sobol_seed)
    return None if stream is None else stream.draw()


def images_of(test: TestSplit[Rows]) -> LabelledRows:
    check_test(test)
    if not isinstance(test.samples, LabelledRows):
        raise EvaluationError(f"a classifier is tested on images, got {type(test.samples)}")
    return test.samples


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def choose_images(labels: Int[Tensor, " n"], count: int) -> list[int]:
    """The first images of classes spread over all, then the second ones: chosen without a model."""
    labels = labels.cpu()
    classes = labels.unique()
    spread = torch.linspace(0, len(classes) - 1, min(count, len(classes))).round().long()
    rows = torch.isin(labels, classes[spread]).nonzero().flatten()
    chosen = choose_rows([str(label) for label in labels[rows].tolist()], len(rows), count)
    return [int(row) for row in rows[chosen]]


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
        anchors = length_scales = images.new_zeros(len(images), 0, 2)  # of models without anchors
        if isinstance(model, ImageClassifier):
            found = model.represent(images, draws).anchors
            anchors = found.positions
            length_scales = found.refinement_length_scales.expand_as(anchors)
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
