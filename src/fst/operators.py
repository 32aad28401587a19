"""Operators: observations in, an output that can be asked anywhere out.

FST and the baselines share this interface, so training, evaluation and the command line treat
them alike. Standardisation belongs to the model: observations enter and predictions leave in the
user's own units, and the statistics travel with the weights.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fst.base import Model
from fst.evaluation_points import PointDraws
from fst.symmetry import SYMMETRIES, Symmetry
from fst.types import Domain, Observations, check_alike, check_observations, check_queries

# Standardised numbers beyond this would overflow when a network squares them in float32.
LARGEST_STANDARDIZED = 1e15

# Numbers held at once while a chunk of queries is decoded: weights, logits and hidden layers. A
# GPU wants many at a time; a CPU is several times faster when they stay in its cache.
CHUNK_NUMBERS = {"cpu": 2**22, "cuda": 2**25}


def queries_at_once(like: Tensor, numbers: int) -> int:
    """How many queries to decode at once, where each holds this many numbers."""
    return max(1, CHUNK_NUMBERS.get(like.device.type, CHUNK_NUMBERS["cuda"]) // numbers)


class Standardization(nn.Module):
    """(x - mean) / std per channel, and its inverse. Learned from training data only."""

    mean: Tensor
    deviation: Tensor
    """The standard deviation, under the name that it has in stored weights."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("deviation", torch.ones(channels))

    def set(self, mean: float | Tensor, std: float | Tensor) -> None:
        """Take statistics; a scalar serves every channel, as in the paper."""
        mean, std = torch.as_tensor(mean), torch.as_tensor(std)
        if not bool(torch.isfinite(mean).all()) or not bool((std > 0).all()):
            raise ValueError(f"need a finite mean and std > 0, got {mean}, {std}")
        self.mean.copy_(mean.expand_as(self.mean))
        self.deviation.copy_(std.expand_as(self.deviation))

    def forward(self, values: Float[Tensor, "*points v"]) -> Float[Tensor, "*points v"]:
        return (values - self.mean) / self.deviation

    def check(self, name: str, values: Float[Tensor, "... v"], mask: Tensor | None = None) -> None:
        """Raise where a finite number is so far from the mean that it would become NaN."""
        far = self(values).abs().amax(dim=-1) > LARGEST_STANDARDIZED
        far = far if mask is None else far & mask
        if bool(far.any()):
            where = tuple(far.nonzero()[0].tolist())
            raise ValueError(
                f"{name} must be within {LARGEST_STANDARDIZED:g} standard deviations of the mean "
                f"that the model was trained with, got {values[where].tolist()} at index {where}"
            )

    def restore(self, values: Float[Tensor, "b q c"]) -> Float[Tensor, "b q c"]:
        # Under autocast the prediction may be bfloat16; the original units deserve better.
        wide = torch.promote_types(values.dtype, self.mean.dtype)
        return values.to(wide) * self.deviation + self.mean


class ConditionChannels(nn.Module):
    """The global input, standardised; its logarithm where asked, for inputs that span decades."""

    def __init__(self, channels: int, logarithm: bool) -> None:
        super().__init__()
        self.logarithm = logarithm
        self.standardize = Standardization(channels)

    def prepare(self, condition: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """What is standardised: the condition itself or its logarithm."""
        return condition.log() if self.logarithm else condition

    def fit(self, conditions: Float[Tensor, "n c"]) -> None:
        """Take the statistics of the conditions of the training data."""
        self.check_logarithm(conditions)
        transformed = self.prepare(conditions.double())
        std = transformed.std(dim=0, correction=0)
        # One and the same condition everywhere: nothing to divide by.
        self.standardize.set(transformed.mean(dim=0), std.where(std > 0, 1.0))

    def check_logarithm(self, condition: Float[Tensor, "b c"]) -> None:
        """Raise unless a condition whose logarithm is taken has one."""
        if self.logarithm and not bool((condition > 0).all()):
            raise ValueError(
                "condition must be positive: this model takes its logarithm, "
                f"got {condition.min().item()}"
            )

    def check(self, condition: Float[Tensor, "b c"]) -> None:
        """Raise where a condition has no logarithm, or is far from those of the training data."""
        self.check_logarithm(condition)
        self.standardize.check("condition", self.prepare(condition))

    def forward(self, condition: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        standardized: Tensor = self.standardize(self.prepare(condition))
        return standardized


class Output(ABC):
    """A prediction that can be asked anywhere in the domain, any number of times."""

    domain: Domain

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """A tensor whose batch size, device and dtype the queries must share."""

    @abstractmethod
    def decode(self, queries: Float[Tensor, "b q s"]) -> Float[Tensor, "b q c"]:
        """Values at queries, unchecked and in one piece: the training path."""

    def __call__(self, queries: Float[Tensor, "b q s"]) -> Float[Tensor, "b q c"]:
        return self.decode(check_queries(queries, self.domain, self.like))

    def mean_with(self, image: Any, symmetry: Symmetry) -> "Output":
        """The mean of this and of the output for the image of the observations, mapped back."""
        return MeanOutput(self, image, symmetry)


class MeanOutput(Output):
    """½ (G(a) + S G(S a))."""

    def __init__(self, own: Output, image: Output, symmetry: Symmetry) -> None:
        self.domain, self.own, self.image, self.symmetry = own.domain, own, image, symmetry

    @property
    def like(self) -> Tensor:
        return self.own.like

    def decode(self, queries: Float[Tensor, "b q s"]) -> Float[Tensor, "b q c"]:
        mapped = self.symmetry.positions(queries, self.domain)
        return 0.5 * (self.own.decode(queries) + self.symmetry.sign * self.image.decode(mapped))

    def __call__(self, queries: Float[Tensor, "b q s"]) -> Float[Tensor, "b q c"]:
        own = self.own(queries)  # which checks them
        image = self.image(self.symmetry.positions(queries, self.domain))
        return 0.5 * (own + self.symmetry.sign * image)


class Operator(Model):
    """A learned map from observations to an `Output`."""

    def __init__(
        self, domain: Domain, value_channels: int, output_channels: int, condition_channels: int
    ) -> None:
        super().__init__()
        self.domain = domain
        self.value_channels = value_channels
        self.output_channels = output_channels
        self.condition_channels = condition_channels
        self.standardize_values = Standardization(value_channels)
        self.standardize_outputs = Standardization(output_channels)

    @abstractmethod
    def represent(self, observations: Observations, draws: PointDraws | None = None) -> Output:
        """The output for observations known to be good: the training path."""

    def predict(self, observations: Observations, draws: PointDraws | None = None) -> Output:
        """The same outside training: with the symmetry that the configuration names, if any."""
        return self.symmetrized(self.represent(observations, draws), observations, draws)

    def symmetrized(
        self, output: Output, observations: Observations, draws: PointDraws | None
    ) -> Output:
        """The mean of the output for these observations and of that for their image."""
        if self.symmetry is None:
            return output
        image = self.represent(self.symmetry.observations(observations, self.domain), draws)
        return output.mean_with(image, self.symmetry)

    @property
    def symmetry(self) -> Symmetry | None:
        """The symmetry applied to predictions, or None."""
        config = getattr(self, "config", None)  # an operator of one's own may have none
        return SYMMETRIES.get(getattr(config, "prediction_symmetry", "none"))

    def forward(self, observations: Observations, draws: PointDraws | None = None) -> Output:
        self.check(observations)
        work = self.represent if self.training else self.predict
        return work(observations, draws)

    def check(self, observations: Observations) -> None:
        """Raise unless the observations fit this model in channels, domain, dtype and device."""
        check_observations(observations, self.domain, self.value_channels, self.condition_channels)
        check_alike("observations", observations.values, "the model", next(self.parameters()))
        self.standardize_values.check("values", observations.values, observations.mask)
        if observations.condition is not None:
            for module in self.modules():
                if isinstance(module, ConditionChannels):
                    module.check(observations.condition)

    def fit_statistics(
        self, training: Any, standardization: tuple[float, float] | None = None
    ) -> None:
        if not hasattr(training, "statistics"):
            raise TypeError(f"training must be data such as fst.PointDataset, got {training!r:.80}")
        for kind in ("value_channels", "output_channels", "condition_channels"):
            wanted, got = getattr(self, kind), getattr(training, kind)
            if wanted and got != wanted:  # a model may leave conditions aside
                words = kind.replace("_", " ")
                raise ValueError(f"training must have {wanted} {words} like the model, got {got}")
        found = training.statistics()
        # A constant channel is divided by 1; where all channels share one std, 0 is an error.
        values, outputs = (
            std.where(std != 0, 1.0) if std.ndim else std
            for std in (found.value_std, found.output_std)
        )
        self.standardize_values.set(*standardization or (found.value_mean, values))
        self.standardize_outputs.set(*standardization or (found.output_mean, outputs))
        if self.condition_channels:
            self.standardize_condition(training.conditions())

    def standardize_condition(self, conditions: Float[Tensor, "n c"]) -> None:
        """Take the statistics of the conditions of the training data."""
        for module in self.modules():
            if isinstance(module, ConditionChannels):
                module.fit(conditions)
