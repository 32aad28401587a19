"""What training minimises and what validation measures: one small class for each kind of task.

An objective sees the model as a module to be wrapped and compiled, a prediction, and the batch it
was made for. The loss of a step is the mean of `losses` over the global batch; validation reports
the mean of every column of `errors`, and the first column selects the best weights.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fst.base import Model
from fst.classifiers import Classifier
from fst.data.image_samples import ImageBatch
from fst.data.samples import Batch, Rows, Samples
from fst.evaluation_points import PointDraws
from fst.metrics import relative_l2, squared_relative_l2, top_errors
from fst.operators import Operator
from fst.training.errors import TrainingError
from fst.types import Observations, check_fields


class Objective(ABC):
    """Loss and errors of one kind of task; `names` are the columns of `errors`."""

    names: ClassVar[tuple[str, ...]]

    @abstractmethod
    def check(self, model: Model, samples: Rows) -> None:
        """Raise, before training, where the model or the data are of another kind of task."""

    @abstractmethod
    def module(self, model: Any) -> nn.Module:
        """The model as a step calls it: one module for the distributed wrapper and the compiler."""

    @abstractmethod
    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """What the module takes, in order; the draws of evaluation points follow."""

    @abstractmethod
    def losses(self, prediction: Tensor, batch: Any) -> Float[Tensor, " b"]:
        """What a training step averages; float32 whatever the precision of the prediction."""

    @abstractmethod
    def errors(self, model: Any, batch: Any, draws: PointDraws | None) -> Float[Tensor, "b e"]:
        """What a validation averages, in float32."""


@dataclass(frozen=True)
class RelativeL2(Objective):
    """Operators: ‖prediction - target‖ / ‖target‖ in original units, squared in the loss."""

    names = ("relative_l2",)

    def check(self, model: Model, samples: Rows) -> None:
        _require(self, "model", model, Operator)
        _require(self, "data", samples, Samples)
        assert isinstance(model, Operator)
        assert isinstance(samples, Samples)
        for name in ("domain", "value_channels", "output_channels", "condition_channels"):
            ours, theirs = getattr(model, name), getattr(samples, name)
            if ours != theirs:
                raise TrainingError(
                    f"the model's {name} must be that of the data, {theirs}, got {ours}"
                )
        if len(samples):
            # One sample for what only the model knows: its grid, or the number of observations.
            observed = samples.batch(torch.zeros(1, dtype=torch.long, device=samples.device))
            try:
                model.check(observed.observations.to(next(model.parameters()).device))
            except ValueError as error:
                raise TrainingError(f"the model does not fit the data: {error}") from None

    def module(self, model: Operator) -> nn.Module:
        return _AtQueries(model)

    def inputs(self, batch: Batch) -> tuple[Observations, Float[Tensor, "b q s"]]:
        return batch.observations, batch.queries

    def losses(self, prediction: Float[Tensor, "b q c"], batch: Batch) -> Float[Tensor, " b"]:
        return squared_relative_l2(prediction, batch.targets, batch.mask)

    def errors(
        self, model: Operator, batch: Batch, draws: PointDraws | None
    ) -> Float[Tensor, "b e"]:
        # The checked, chunked path: any number of queries fits.
        prediction = model.represent(batch.observations, draws)(batch.queries)
        return relative_l2(prediction, batch.targets, batch.mask)[:, None]


@runtime_checkable
class Labelled(Protocol):
    """Rows that have a class each: its number, and the names in the order of the numbers."""

    labels: Int[Tensor, " n"]
    class_names: tuple[str, ...]


@dataclass(frozen=True)
class CrossEntropy(Objective):
    """Classifiers: -Σ_k q_k log softmax(logits)_k, with q = 1 - ε at the label and ε/K on all."""

    names = ("top1_error", "top5_error")

    label_smoothing: float = 0.1
    """The ε above: the part of the target that is spread evenly over all K classes."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"label_smoothing must be at least 0 and below 1, got {self.label_smoothing}"
            )

    def check(self, model: Model, samples: Rows) -> None:
        _require(self, "model", model, Classifier)
        _require(self, "data", samples, Labelled)
        assert isinstance(model, Classifier)
        assert isinstance(samples, Labelled)
        if model.class_names != tuple(samples.class_names):
            raise TrainingError(
                f"the model's {len(model.class_names)} classes are not the "
                f"{len(samples.class_names)} of the data; they must be the same, in order"
            )
        labels = torch.as_tensor(samples.labels)
        wrong = (labels < 0) | (labels >= len(model.class_names))
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise TrainingError(
                f"labels must lie between 0 and {len(model.class_names) - 1}, "
                f"sample {row} has {int(labels[row])}"
            )

    def module(self, model: Classifier) -> nn.Module:
        return _Scores(model)

    def inputs(self, batch: ImageBatch) -> tuple[Float[Tensor, "b 3 h w"]]:
        return (batch.images,)

    def losses(self, prediction: Float[Tensor, "b k"], batch: ImageBatch) -> Float[Tensor, " b"]:
        return cross_entropy(
            prediction.float(),
            batch.labels,
            reduction="none",
            label_smoothing=self.label_smoothing,
        )

    def errors(
        self, model: Classifier, batch: ImageBatch, draws: PointDraws | None
    ) -> Float[Tensor, "b e"]:
        return top_errors(model.logits(batch.images, draws), batch.labels)


class _AtQueries(nn.Module):
    """An operator's values at the queries."""

    def __init__(self, model: Operator) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, observations: Observations, queries: Float[Tensor, "b q s"], draws: PointDraws | None
    ) -> Float[Tensor, "b q c"]:
        return self.model.represent(observations, draws).decode(queries)


class _Scores(nn.Module):
    """A classifier's scores."""

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, images: Float[Tensor, "b 3 h w"], draws: PointDraws | None
    ) -> Float[Tensor, "b k"]:
        return self.model.logits(images, draws)


def _require(objective: Objective, name: str, given: object, kind: type) -> None:
    if not isinstance(given, kind):
        raise TrainingError(
            f"the objective {type(objective).__name__} needs {name} of kind {kind.__name__}, "
            f"got {type(given).__name__}"
        )
