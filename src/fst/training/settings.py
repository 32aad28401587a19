"""Everything that decides how a model is trained, apart from the model and the data.

The objective is what training minimises and what validation measures: one small class for each
kind of task. The loss of a step is the mean of `losses` over the global batch; validation reports
the mean of every column of `errors`, and the first column selects the best weights.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fst.base import Model
from fst.classifiers import Classifier
from fst.data.image_samples import ImageBatch, LabelledRows
from fst.data.samples import Batch, Rows, Samples
from fst.evaluation_points import PointDraws
from fst.metrics import in_words, mean_square, relative_l2, squared_relative_l2, top_errors
from fst.operators import Operator
from fst.training.schedules import Plateau, Stages, WarmupCosine
from fst.types import check_fields

Values = Float[Tensor, "b q c"]
Draws = PointDraws | None
"""The evaluation points of a batch, for models that take them at random."""
# What an optimiser makes of larger ones does not fit into float32.
LARGEST_NUMBER = 1e30


class TrainingError(RuntimeError):
    """Training cannot start or go on; the message is one clear line for the user."""


class Objective(ABC):
    """Loss and errors of one kind of task."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Of the columns of `errors`."""

    @property
    def loss_name(self) -> str:
        return in_words(self.names[0])

    @abstractmethod
    def check(self, model: Model, samples: Rows) -> None:
        """Raise, before training, where the model or the data are of another kind of task."""

    @abstractmethod
    def predict(self, model: Any, batch: Any, draws: Draws) -> Tensor:
        """The prediction of a training step."""

    @abstractmethod
    def losses(self, model: Any, prediction: Tensor, batch: Any) -> Float[Tensor, " b"]:
        """What a training step averages; float32 whatever the precision of the prediction."""

    @abstractmethod
    def errors(self, model: Any, batch: Any, draws: Draws) -> Float[Tensor, "b e"]:
        """What a validation averages, in float32."""


@dataclass(frozen=True)
class RelativeL2(Objective):
    """Operators: ‖prediction - target‖ / ‖target‖, squared in the loss.

    In original units unless `channels` says otherwise; the test is always scored in them.
    """

    channels: Literal["original", "standardized"] = "original"
    """Whether differences count in the units of the data, or in standard deviations of each
    channel from its mean: then all channels count alike, and a constant scores about 1."""
    scale: Literal["relative", "absolute"] = "relative"
    """Divide by the norm of each target, or take the root mean square as it is."""
    weights: tuple[float, ...] = ()
    """Of the channels' squares, one for each; none: all count alike."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.weights and not (min(self.weights) >= 0 and sum(self.weights) > 0):
            raise ValueError(f"weights must be at least 0 and not all 0, got {self.weights}")

    @property
    def names(self) -> tuple[str, ...]:
        if self == RelativeL2():
            return ("relative_l2",)
        words = ["weighted"] if self.weights else []
        words += ["standardized"] if self.channels == "standardized" else []
        words += ["relative"] if self.scale == "relative" else []
        return "_".join((*words, "l2")), "relative_l2"  # what the test is scored by

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
        if len(self.weights) not in (0, model.output_channels):
            raise TrainingError(
                f"objective.weights must be one for each of the {model.output_channels} target "
                f"channels, got {len(self.weights)}"
            )
        if len(samples):
            # One sample for what only the model knows: its grid, or the number of observations.
            observed = samples.batch(torch.zeros(1, dtype=torch.long, device=samples.device))
            try:
                model.check(observed.observations.to(next(model.parameters()).device))
            except ValueError as error:
                raise TrainingError(f"the model does not fit the data: {error}") from None

    def predict(self, model: Operator, batch: Batch, draws: Draws) -> Values:
        return model.represent(batch.observations, draws).decode(batch.queries)

    def losses(self, model: Operator, prediction: Values, batch: Batch) -> Float[Tensor, " b"]:
        measure = squared_relative_l2 if self.scale == "relative" else mean_square
        ours, theirs = self._scaled(model, prediction), self._scaled(model, batch.targets)
        return measure(ours, theirs, batch.mask)

    def _scaled(self, model: Operator, values: Values) -> Values:
        if self.channels == "standardized":
            values = model.standardize_outputs(values)
        if self.weights:
            values = values * values.new_tensor(self.weights).sqrt()
        return values

    def errors(self, model: Operator, batch: Batch, draws: Draws) -> Float[Tensor, "b e"]:
        # The checked, chunked path: any number of queries fits.
        prediction = model.predict(batch.observations, draws)(batch.queries)
        found = [self.losses(model, prediction, batch).sqrt()]
        if len(self.names) > 1:
            found.append(relative_l2(prediction, batch.targets, batch.mask))
        return torch.stack(found, dim=1)


@dataclass(frozen=True)
class CrossEntropy(Objective):
    """Classifiers: -Σ_k q_k log softmax(logits)_k, with q = 1 - ε at the label and ε/K on all."""

    label_smoothing: float = 0.1
    """The ε above: the part of the target that is spread evenly over all K classes."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"label_smoothing must be at least 0 and below 1, got {self.label_smoothing}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        return "top1_error", "top5_error"

    @property
    def loss_name(self) -> str:
        return "cross entropy"

    def check(self, model: Model, samples: Rows) -> None:
        _require(self, "model", model, Classifier)
        _require(self, "data", samples, LabelledRows)
        assert isinstance(model, Classifier)
        assert isinstance(samples, LabelledRows)
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

    def predict(self, model: Classifier, batch: ImageBatch, draws: Draws) -> Float[Tensor, "b k"]:
        return model.logits(batch.images, draws)

    def losses(
        self, model: Classifier, prediction: Float[Tensor, "b k"], batch: ImageBatch
    ) -> Float[Tensor, " b"]:
        smoothing = self.label_smoothing
        logits = prediction.float()
        return cross_entropy(logits, batch.labels, reduction="none", label_smoothing=smoothing)

    def errors(self, model: Classifier, batch: ImageBatch, draws: Draws) -> Float[Tensor, "b e"]:
        return top_errors(model.logits(batch.images, draws), batch.labels)


class Loss(nn.Module):
    """A batch to the sum of its losses: one module for the compiler."""

    def __init__(self, objective: Objective, model: Model) -> None:
        super().__init__()
        self.objective, self.model = objective, model

    def forward(self, batch: Any, draws: Draws) -> Float[Tensor, ""]:
        prediction = self.objective.predict(self.model, batch, draws)
        return self.objective.losses(self.model, prediction, batch).sum()


def _require(objective: Objective, name: str, given: object, kind: type) -> None:
    if not isinstance(given, kind):
        raise TrainingError(
            f"the objective {type(objective).__name__} needs {name} of kind {kind.__name__}, "
            f"got {type(given).__name__}"
        )


@dataclass(frozen=True)
class TrainingSettings:
    """One training run. The defaults are those of single-viscosity Burgers in the paper."""

    objective: RelativeL2 | CrossEntropy = field(default_factory=RelativeL2)
    """What is minimised and validated: RelativeL2 for operators, CrossEntropy for classifiers."""
    schedule: Stages | Plateau | WarmupCosine = field(default_factory=Plateau)
    """How the learning rates change, and when training ends."""
    learning_rate: float = 1e-3
    """Base learning rate of the main network."""
    predictor_learning_rate: float | None = None
    """Base learning rate of the coordinate predictor; None takes `learning_rate`."""
    optimizer: Literal["adam", "adamw", "muon"] = "adam"
    """Which update to use. `muon` moves weight matrices by Muon and the rest by Adam."""
    momentum: float = 0.95
    """Of Muon."""
    matrix_rate: float = 1.0
    """With `muon`: the learning rate of weight matrices over that of the other parameters."""
    weight_decay: float = 0.0
    """Decoupled for `adamw` and `muon`, added to the gradient for `adam`."""
    epsilon: float = 1e-8
    """The small number in the denominator of Adam."""
    clip: float | None = None
    """Largest norm of the whole gradient; None leaves it as it is."""
    batch_size: int = 48
    """Samples in one step, over all processes together."""
    accumulate: int = 1
    """Parts into which each process splits its share of the batch, to fit the memory. One step
    is made of all of them: the gradient is that of the whole batch."""
    queries: int | None = 2_500
    """Targets drawn for each solution and step; None takes all of them."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Of the forward and backward pass. Loss, weights and validation are always float32."""
    seed: int = 2026091311
    """Of the order of samples, the queries, the augmentation and the evaluation points."""

    validate_every: int = 2_000
    """Steps between validations."""
    validation_batch: int = 8
    """Samples validated at once; it decides which evaluation points each of them gets."""
    validation_anchor_seed: int = 2026091322
    """Of the anchors among the evaluation points of a validation."""
    validation_sobol_seed: int = 2026091323
    """Of the Sobol points among them."""
    validation_reset: Literal["grid", "batch"] = "grid"
    """Whether the evaluation points start anew once per validation or for every batch."""

    average: float | None = None
    """Decay of the exponential moving average of the weights. With one, validation and the best
    weights use the average. It is off in the paper."""
    augment: bool = False
    """Apply the exact symmetries of the data at random. Off in the paper."""
    compile: bool | None = None
    """Compile each step with torch.compile; None: on a GPU."""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "reduce-overhead"
    """Passed to torch.compile."""

    log_every: int = 50
    """Steps that one line of metrics averages."""
    checkpoint_every: int = 1_000
    """Steps between checkpoints."""
    keep: int = 2
    """How many of the newest checkpoints to keep."""
    tensorboard: bool = True
    """Write the metrics for TensorBoard as well."""
    wandb: bool = False
    """Send the metrics to Weights & Biases as well."""

    def __post_init__(self) -> None:
        counts = ("batch_size", "accumulate", "validate_every", "validation_batch", "log_every")
        rates = ("learning_rate", "predictor_learning_rate", "matrix_rate", "epsilon", "clip")
        seeds = ("seed", "validation_anchor_seed", "validation_sobol_seed")
        least = dict.fromkeys((*counts, "checkpoint_every", "keep"), 1) | dict.fromkeys(seeds, 0)
        check_fields(self, **least)
        most = f"and at most {LARGEST_NUMBER}"
        self._require((*rates, "queries"), lambda n: 0 < n <= LARGEST_NUMBER, f"above 0 {most}")
        self._require(("weight_decay",), lambda n: 0 <= n <= LARGEST_NUMBER, f"at least 0 {most}")
        self._require(("momentum",), lambda n: 0 <= n < 1, "at least 0 and below 1")
        self._require(("average",), lambda n: 0 < n < 1, "above 0 and below 1")

    def _require(self, names: tuple[str, ...], fits: Callable[[float], bool], words: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and not fits(value):
                raise ValueError(f"{name} must be {words}, got {value}")
