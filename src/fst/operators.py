"""What every model of this package is: an operator from observations to a callable output.

FST and the baselines share this interface, so training, evaluation and the command line treat
them alike. Standardisation belongs to the model: observations enter and predictions leave in the
user's own units, and the statistics travel with the weights.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fst import pretrained
from fst.types import Domain, Observations, check_observations, check_queries


class PointDraws(NamedTuple):
    """Raw random choices of evaluation points for R refinement steps, shared by the batch."""

    anchor_indices: Int[Tensor, "r a"]
    uniform: Float[Tensor, "r u s"]

    def to(self, device: torch.device, dtype: torch.dtype) -> "PointDraws":
        return PointDraws(
            self.anchor_indices.to(device, non_blocking=True),
            self.uniform.to(device, dtype, non_blocking=True),
        )


class PointStream(Protocol):
    """A resumable source of `PointDraws`: two seeds and a position."""

    def draw(self) -> PointDraws: ...

    def state(self) -> dict[str, int]: ...

    def restore(self, state: dict[str, int]) -> None: ...


class Standardization(nn.Module):
    """(x - mean) / deviation per channel, and its inverse. Learned from training data only."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("deviation", torch.ones(channels))

    def set(self, mean: float | Tensor, deviation: float | Tensor) -> None:
        """Take statistics; a scalar serves every channel, as in the paper."""
        mean, deviation = torch.as_tensor(mean), torch.as_tensor(deviation)
        if not bool(torch.isfinite(mean).all()) or not bool((deviation > 0).all()):
            raise ValueError(f"need a finite mean and deviation > 0, got {mean}, {deviation}")
        self.mean.copy_(mean.expand_as(self.mean))
        self.deviation.copy_(deviation.expand_as(self.deviation))

    def forward(self, values: Float[Tensor, "b n v"]) -> Float[Tensor, "b n v"]:
        return (values - self.mean) / self.deviation

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
        prepared = self.prepare(conditions.double())
        deviation = prepared.std(dim=0, correction=0)
        # One and the same condition everywhere: nothing to divide by.
        self.standardize.set(prepared.mean(dim=0), deviation.where(deviation > 0, 1.0))

    def check(self, condition: Float[Tensor, "b c"] | None) -> None:
        """Raise unless a condition whose logarithm is taken has one."""
        if condition is not None and self.logarithm and not bool((condition > 0).all()):
            raise ValueError(
                "condition must be positive: this model takes its logarithm, "
                f"got {condition.min().item()}"
            )

    def forward(self, condition: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        return self.standardize(self.prepare(condition))


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


class Operator(nn.Module, ABC):
    """A learned map from observations to an `Output`. Each is built from one configuration."""

    config_type: ClassVar[type]
    config: Any

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

    def point_stream(self, anchor_seed: int, sobol_seed: int) -> PointStream | None:
        """The random evaluation points this model consumes, if it consumes any."""
        del anchor_seed, sobol_seed
        return None

    def forward(self, observations: Observations, draws: PointDraws | None = None) -> Output:
        self.check(observations)
        return self.represent(observations, draws)

    def check(self, observations: Observations) -> None:
        """Raise unless the observations fit this model in channels, domain, dtype and device."""
        check_observations(observations, self.domain, self.value_channels, self.condition_channels)
        for module in self.modules():
            if isinstance(module, ConditionChannels):
                module.check(observations.condition)
        parameter = next(self.parameters())
        if observations.values.dtype != parameter.dtype:
            raise TypeError(
                f"observations have dtype {observations.values.dtype}, "
                f"but the model has {parameter.dtype}"
            )
        if observations.values.device != parameter.device:
            raise ValueError(
                f"observations are on {observations.values.device}, "
                f"but the model is on {parameter.device}"
            )

    def standardize_condition(self, conditions: Float[Tensor, "n c"]) -> None:
        """Take the statistics of the conditions of the training data."""
        for module in self.modules():
            if isinstance(module, ConditionChannels):
                module.fit(conditions)

    def learning_rate_groups(self) -> dict[str, list[nn.Parameter]]:
        """Parameters by the learning rate they take: `main`, and `predictor` where there is one."""
        return {"main": list(self.parameters())}

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `model.safetensors` and `config.json`, the statistics included."""
        pretrained.save(type(self).__name__, self.config, self.state_dict(), Path(folder))

    @classmethod
    def from_pretrained(cls, source: str | Path) -> Self:
        """The model saved in a local folder, or under that name on the Hugging Face hub.

        Called on `Operator` it loads any model; called on a class, only that class and its kin.
        """
        folder = pretrained.find(source)
        name, config, weights = pretrained.read(folder)
        known = {kind.__name__: kind for kind in _family(cls)}
        if name not in known:
            raise pretrained.PretrainedError(
                f"{folder}: holds a {name!r}, expected one of {', '.join(sorted(known))}"
            )
        kind = known[name]
        # Every operator is constructed from its configuration alone.
        build: Any = kind
        model = build(pretrained.from_json(config, kind.config_type, str(folder)))
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            raise pretrained.PretrainedError(f"{folder}: weights do not fit: {error}") from None
        return model


def _family(cls: type[Operator]) -> list[type[Operator]]:
    """A class and all its descendants that have been imported."""
    return [cls, *(kind for child in cls.__subclasses__() for kind in _family(child))]


def parameter_count(module: nn.Module) -> int:
    """Trainable numbers; a complex weight counts as two."""
    return sum(p.numel() * (2 if p.is_complex() else 1) for p in module.parameters())
