"""A tiny model and a tiny data set for the tests of training: each step takes under 2 ms."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fst.data.samples import Batch, Samples, Statistics, random_subsets
from fst.data.source import TrainingSplit, ValidationSplit
from fst.evaluation_points import PointDraws, ResampledPoints
from fst.operators import Operator, Output
from fst.training import RunFolder, Summary, TrainingSettings, train
from fst.training.schedules import WarmupCosine
from fst.types import Domain, Observations

OBSERVED = torch.linspace(0, 1, 5)[:, None]
ASKED = torch.linspace(0, 1, 24)[:, None]


@dataclass(frozen=True)
class TinyConfig:
    width: int = 12
    dropout: float = 0.0


class TinyOutput(Output):
    def __init__(self, model: "TinyModel", features: Tensor) -> None:
        self.domain, self.model, self.features = model.domain, model, features

    @property
    def like(self) -> Tensor:
        return self.features

    def decode(self, queries: Float[Tensor, "b q s"]) -> Float[Tensor, "b q c"]:
        basis = self.model.basis(queries)  # b q d
        output = basis @ self.features.unsqueeze(-1)  # b q 1
        return self.model.standardize_outputs.restore(output)


class TinyModel(Operator):
    """Features times a learned basis; the evaluation points matter, so a lost stream shows."""

    config_type = TinyConfig

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(Domain.unit(1), 1, 1, 0)
        self.config = config
        width = config.width
        self.predict_anchors = nn.Linear(1, 1)
        self.read = nn.Linear(len(OBSERVED) + 1, width)
        self.basis = nn.Sequential(
            nn.Linear(1, width), nn.Tanh(), nn.Dropout(config.dropout), nn.Linear(width, width)
        )

    def represent(self, observations: Observations, draws: PointDraws | None = None) -> TinyOutput:
        assert draws is not None
        values = self.standardize_values(observations.values).squeeze(-1)
        points = torch.sin(7 * self.predict_anchors(draws.uniform)).mean().expand(len(values), 1)
        chosen = 0.01 * draws.anchor_indices.float().mean()
        return TinyOutput(self, self.read(torch.cat((values, 0.1 * points + chosen), dim=-1)))

    def point_stream(self, anchor_seed: int, sobol_seed: int) -> ResampledPoints:
        return ResampledPoints(2, 9, 4, 3, 1, anchor_seed, sobol_seed)

    def param_groups(self) -> dict[str, list[nn.Parameter]]:
        predictor = list(self.predict_anchors.parameters())
        known = {id(parameter) for parameter in predictor}
        return {
            "main": [p for p in self.parameters() if id(p) not in known],
            "predictor": predictor,
        }


class WaveSamples(Samples):
    """u(x) = a sin 2πx + b cos 2πx from five of its values; the symmetry is u -> -u."""

    value_channels = output_channels = 1
    condition_channels = 0

    def __init__(self, coefficients: Float[Tensor, "n 2"]) -> None:
        self.coefficients = coefficients
        self.domain = Domain.unit(1)

    @classmethod
    def draw(cls, count: int, seed: int) -> Self:
        generator = torch.Generator().manual_seed(seed)
        return cls(torch.randn(count, 2, generator=generator))

    def __len__(self) -> int:
        return len(self.coefficients)

    @property
    def device(self) -> torch.device:
        return self.coefficients.device

    def to(self, device: torch.device | str) -> Self:
        return type(self)(self.coefficients.to(device))

    def choose(
        self, solutions: int, count: int | None, generator: torch.Generator
    ) -> Int[Tensor, "b k"] | None:
        return None if count is None else random_subsets(solutions, count, len(ASKED), generator)

    augmented = True

    def augmentations(self, solutions: int, generator: torch.Generator) -> Int[Tensor, "b a"]:
        return torch.randint(2, (solutions, 1), generator=generator, device=self.device)

    def gather(self, rows: Tensor, chosen: Tensor | None, augmentation: Tensor | None) -> Batch:
        coefficients = self.coefficients[rows]
        if augmentation is not None:
            coefficients = coefficients * (1 - 2 * augmentation)
        everywhere = ASKED.to(self.device).expand(len(rows), -1, -1)
        queries = everywhere if chosen is None else everywhere.gather(1, chosen[..., None])
        positions = OBSERVED.to(self.device).expand(len(rows), -1, -1)
        observations = Observations(positions, self._values(positions, coefficients))
        return Batch(observations, queries, self._values(queries, coefficients))

    def statistics(self) -> Statistics:
        raise NotImplementedError

    @staticmethod
    def _values(positions: Tensor, coefficients: Tensor) -> Tensor:
        phase = 2 * math.pi * positions
        waves = torch.cat((phase.sin(), phase.cos()), dim=-1)
        return (waves * coefficients.unsqueeze(1)).sum(dim=-1, keepdim=True)


def tiny_settings(**changes: Any) -> TrainingSettings:
    settings = TrainingSettings(
        schedule=WarmupCosine(warmup=5, maximum=24),
        learning_rate=3e-3,
        clip=1.0,
        batch_size=5,
        queries=11,
        precision="fp32",
        seed=7,
        validate_every=8,
        validation_batch=3,
        log_every=1,
        checkpoint_every=6,
        tensorboard=False,
    )
    return dataclasses.replace(settings, **changes)


def tiny_train(
    path: Path | str,
    settings: TrainingSettings,
    *,
    resume: bool = False,
    checkpoint: str | None = None,
    dropout: float = 0.0,
    training: Samples | None = None,
) -> Summary:
    """Train the tiny model, from fixed weights, in a new or resumed run folder."""
    torch.manual_seed(3)
    model = TinyModel(TinyConfig(dropout=dropout))
    folder = (
        RunFolder.resume(path, checkpoint)
        if resume
        else RunFolder.create(path, {"name": "tiny", "batch_size": settings.batch_size})
    )
    samples = WaveSamples.draw(13, seed=1) if training is None else training
    return train(
        model,
        TrainingSplit(samples),
        ValidationSplit(WaveSamples.draw(7, seed=2)),
        settings,
        folder,
    )


# Five solutions over two processes, and three validation batches: shares are never equal.
RANKS_SETTINGS = tiny_settings(average=0.8, augment=True, log_every=4)
MUON_RANKS_SETTINGS = dataclasses.replace(RANKS_SETTINGS, optimizer="muon", weight_decay=0.1)
