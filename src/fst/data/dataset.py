"""A user's own functions for a plain PyTorch training loop: a `Dataset`, and how to batch it.

Enters: `PointSample`s in memory, or an `fst` point file, which is read a sample at a time. Leaves:
samples by number, and by `collate` a padded `Batch`: `DataLoader(data, collate_fn=fst.collate)`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import Dataset

from fst.data.point_data import PointData, settings_for
from fst.data.point_files import (
    PointFunctions,
    Points,
    PointSample,
    checked_sample,
    read_points,
)
from fst.data.point_samples import Ragged
from fst.data.samples import Batch, RunningMoments, Statistics
from fst.data.source import SPLITS
from fst.types import Domain, Observations, check_argument


class PointDataset(Dataset[PointSample]):
    """Functions by number, and what `fit_statistics` and `fst.build` ask of them.

    With `queries`, every access draws so many of a sample's targets anew, from PyTorch's generator.
    """

    def __init__(
        self,
        samples: Sequence[PointSample] | PointFunctions | str | Path,
        domain: Domain | None = None,
        *,
        split: str | None = None,
        queries: int | None = None,
    ) -> None:
        """`domain` goes with samples; a file has its own, and splits: training, validation, test.

        A file that names no splits is split as `fst train` splits it.
        """
        check_argument("queries", queries, int | None, least=1)
        self.queries = queries
        self.samples: Any
        if isinstance(samples, str | Path):
            if domain is not None or split not in (None, *SPLITS):
                raise ValueError(
                    "a file has its own domain, and split must be None, training, validation or "
                    f"test, got domain={domain} and split={split!r}"
                )
            self.samples = read_points(samples)
            self.domain = self.samples.domain
            rows = np.arange(len(self.samples))
            if split is not None:
                rows = getattr(PointData().partition(self.samples), split)
            self.rows = rows.tolist()
        else:
            if isinstance(samples, PointFunctions):
                domain, samples = domain or samples.domain, samples.samples
            if domain is None or split is not None:
                raise ValueError("samples need a domain, and have no splits")
            self.domain = domain
            self.samples = _Listed(samples, domain)
            self.rows = list(range(len(self.samples)))
        if not self.rows:
            raise ValueError("samples must hold at least one sample, got none")
        self.value_channels: int = self.samples.value_channels
        self.output_channels: int = self.samples.output_channels
        self.condition_channels: int = self.samples.condition_channels

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> PointSample:
        sample: PointSample = self.samples[self.rows[row]]
        queries = np.asarray(sample.queries)
        if self.queries is None or self.queries >= len(queries):
            return sample
        chosen = torch.randperm(len(queries))[: self.queries].numpy()
        return replace(sample, queries=queries[chosen], targets=np.asarray(sample.targets)[chosen])

    def decided(self, model: Any) -> dict[str, Any]:
        """The settings of a model's configuration that these functions decide."""
        return settings_for(model, self.samples)

    def statistics(self) -> Statistics:
        """Mean and standard deviation of each channel, over all observations and all targets."""
        values = RunningMoments(self.value_channels)
        targets = RunningMoments(self.output_channels)
        for row in self.rows:
            sample = self.samples[row]
            values.see(sample.values)
            targets.see(sample.targets)
        return Statistics(*values.result(), *targets.result())

    def conditions(self) -> Float[Tensor, "n c"]:
        """The condition of every sample; without channels where there is none."""
        if not self.condition_channels:
            return torch.empty(len(self), 0)
        return torch.from_numpy(np.stack([self.samples[row].condition for row in self.rows]))


class _Listed:
    """Samples in memory, asked as a file of points is (`Functions`)."""

    path = "the samples"

    def __init__(self, samples: Sequence[PointSample], domain: Domain) -> None:
        if not len(samples):
            raise ValueError("samples must hold at least one sample, got none")
        self.domain = domain
        self.samples = [checked_sample(row, each, domain) for row, each in enumerate(samples)]
        first: Any = self.samples[0]
        self.value_channels, self.output_channels = first.values.shape[1], first.targets.shape[1]
        self.condition_channels = 0 if first.condition is None else len(first.condition)
        sizes = [len(np.asarray(each.positions)) for each in self.samples]
        self.observation_offsets = np.cumsum([0, *sizes])

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, row: int) -> PointSample:
        return self.samples[row]

    def blocks(self) -> Iterator[Int[np.ndarray, " k"]]:
        yield np.arange(len(self))

    def observations(self, rows: Int[np.ndarray, " n"]) -> Points:
        return _end_to_end([(self[row].positions, self[row].values) for row in rows.tolist()])

    def queries(self, rows: Int[np.ndarray, " n"]) -> Points:
        return _end_to_end([(self[row].queries, self[row].targets) for row in rows.tolist()])


def _end_to_end(parts: Sequence[tuple[Any, Any]]) -> Points:
    positions, values = zip(*parts, strict=True)
    sizes = np.array([len(each) for each in positions])
    return Points(np.concatenate(positions), np.concatenate(values), sizes)


def collate(samples: Sequence[PointSample]) -> Batch:
    """A batch, padded to its longest sample; masks where samples differ in length.

    Padding repeats a sample's first point, so that it is finite and inside the domain.
    """
    observed = _padded([sample.positions for sample in samples], [s.values for s in samples])
    queried = _padded([sample.queries for sample in samples], [s.targets for s in samples])
    condition = None
    if samples[0].condition is not None:
        condition = torch.from_numpy(np.stack([np.asarray(each.condition) for each in samples]))
    return Batch(Observations(observed[0], observed[1], condition, observed[2]), *queried)


def _padded(
    positions: Sequence[Any], values: Sequence[Any]
) -> tuple[Float[Tensor, "b n s"], Float[Tensor, "b n v"], Tensor | None]:
    ragged = Ragged.of(*map(torch.from_numpy, _end_to_end([*zip(positions, values, strict=True)])))
    return ragged.take(torch.arange(len(positions)))
