"""Everything that decides how a model is trained, apart from the model and the data."""

from dataclasses import dataclass, field
from typing import Literal

from fst.training.objectives import CrossEntropy, RelativeL2
from fst.training.schedules import Plateau, Stages, WarmupCosine
from fst.types import check_fields

# What an optimiser makes of larger ones does not fit into float32.
LARGEST_NUMBER = 1e30


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
    """Compile each step with torch.compile; None: where one process trains on one GPU."""
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
        check_fields(self)
        counts = ("batch_size", "accumulate", "validate_every", "validation_batch", "log_every")
        for name in (*counts, "checkpoint_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("seed", "validation_anchor_seed", "validation_sobol_seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in (
            "learning_rate", "predictor_learning_rate", "matrix_rate", "epsilon", "clip", "queries",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 < value <= LARGEST_NUMBER:
                raise ValueError(
                    f"{name} must be above 0 and at most {LARGEST_NUMBER}, got {value}"
                )
        if not 0 <= self.weight_decay <= LARGEST_NUMBER:
            raise ValueError(
                f"weight_decay must be at least 0 and at most {LARGEST_NUMBER}, "
                f"got {self.weight_decay}"
            )
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {self.momentum}")
        if self.average is not None and not 0 < self.average < 1:
            raise ValueError(f"average must lie between 0 and 1, got {self.average}")
