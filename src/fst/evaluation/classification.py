"""The test of classifiers: a model and a test split of images enter, two result rows leave.

    top-k error = share of images whose class is not among the k with the highest scores

for k = 1 and k = 5, in float32 and in the order of the test split. With fewer than five classes
the second is always 0.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from rich.console import Console
from torch import Tensor

from fst.base import parameter_count
from fst.classifiers import Classifier
from fst.data.image_samples import ResidentImages, StreamedImages
from fst.data.samples import Rows
from fst.data.splits import TestSplit
from fst.evaluation.protocol import (
    EvaluationError,
    fingerprint_of,
    make_row,
    measuring,
    show_progress,
)
from fst.evaluation.rows import ACCURACIES, Origin, Row, group_errors
from fst.evaluation_points import PointDraws
from fst.metrics import top_errors
from fst.pretrained import to_json
from fst.training.batches import in_order
from fst.types import check_fields

Images = ResidentImages | StreamedImages


@dataclass(frozen=True)
class ClassificationSettings:
    """How a classifier is scored. How test images are cut is up to the data."""

    batch_size: int = 100
    anchor_seed: int = 2026091322
    sobol_seed: int = 2026091323
    """Of the evaluation points, where a model draws them; the same for every batch."""
    paper_errors: tuple[float, ...] = ()
    """The paper's top-1 and top-5 error; empty where it has none."""
    pictures: int = 8
    """Test images kept with the results, for the figures."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if len(self.paper_errors) not in (0, len(ACCURACIES)):
            raise ValueError(
                f"paper_errors must give the top-1 and the top-5 error, got {self.paper_errors}"
            )
        if self.pictures < 0:
            raise ValueError(f"pictures must not be negative, got {self.pictures}")


def fingerprint(settings: ClassificationSettings, data: Any, weights: bytes) -> str:
    """Identifies the weights scored and what was asked of them, in a few characters.

    `data` says how images are cut, which decides a score as much as the weights do.
    """
    asked = to_json(settings)
    for name in ("pictures", "paper_errors"):  # what is shown beside the errors
        del asked[name]
    return fingerprint_of(asked | {"data": data}, weights)


def evaluate(
    model: Classifier,
    test: TestSplit[Rows],
    settings: ClassificationSettings,
    origin: Origin,
    *,
    protocol: str = "",
    console: Console | None = None,
) -> list[Row]:
    """Score a classifier on a test split: a row for top-1, then one for top-5, with each class.

    `protocol` is what `fingerprint` gives.
    """
    samples = images_of(test)
    if tuple(samples.class_names) != model.class_names:
        raise EvaluationError(
            f"the model knows {len(model.class_names)} classes ({_few(model.class_names)}), the "
            f"test images have {len(samples.class_names)} ({_few(samples.class_names)}); they "
            "must be the same"
        )
    device = next(model.parameters()).device
    errors = measure(model, samples, settings, label=origin.model, console=console)
    kept = decoded_rows(samples)
    errors, labels = errors[kept], samples.labels.cpu()[kept]
    groups = tuple(samples.class_names[label] for label in labels.tolist())
    rows = []
    paper = settings.paper_errors or (None,) * len(ACCURACIES)
    for metric, column, quoted in zip(ACCURACIES, errors.T.tolist(), paper, strict=True):
        by_class = group_errors(column, groups, {})
        row = make_row(
            tuple(column), by_class, quoted, origin, parameter_count(model), protocol, device
        )
        rows.append(replace(row, metric=metric))
    return rows


def measure(
    model: Classifier,
    samples: Images,
    settings: ClassificationSettings,
    *,
    label: str = "",
    console: Console | None = None,
) -> Float[Tensor, "n e"]:
    """The top-1 and top-5 error of each image, or of what stood in for it (`decoded_rows`)."""
    device, draws = next(model.parameters()).device, point_draws(model, settings)
    parts = []
    with measuring(model), show_progress(console) as progress:
        total = -(-len(samples) // settings.batch_size)
        description = f"testing {label}".strip()
        batches = in_order(samples, torch.arange(len(samples)).split(settings.batch_size))
        for batch in progress.track(batches, total=total, description=description):
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


def decoded_rows(samples: Images) -> Int[Tensor, " m"]:
    """The images that were there, once all have been asked for.

    A streamed image that cannot be decoded is found only then, and another has stood in for it.
    """
    rows = torch.arange(len(samples))
    if isinstance(samples, ResidentImages) or not samples.skipped:
        return rows
    bad, images = {item.name for item in samples.skipped}, samples.images
    titles = (images.files.title(int(row)) for row in images.rows)
    return rows[torch.tensor([title not in bad for title in titles])]


def point_draws(model: Classifier, settings: ClassificationSettings) -> PointDraws | None:
    """The evaluation points of a test: one draw for every batch."""
    stream = model.point_stream(settings.anchor_seed, settings.sobol_seed)
    if stream is None:
        return None
    return stream.draw().to(next(model.parameters()).device, torch.float32)


def images_of(test: TestSplit[Rows]) -> Images:
    if not isinstance(test, TestSplit):
        raise TypeError(f"test must be a TestSplit, got {type(test).__name__}")
    if not isinstance(test.samples, ResidentImages | StreamedImages):
        raise EvaluationError(f"a classifier is tested on images, got {type(test.samples)}")
    return test.samples


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
