"""A user's own functions for a plain PyTorch training loop: a `Dataset`, and how to batch it.

Enters: `PointSample`s in memory, or an `fst` point file, which is read a sample at a time. Leaves:
samples by number, and by `collate` a padded `Batch`: `DataLoader(data, collate_fn=fst.collate)`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import Dataset

from fst.data.point_data import PointData, anchor_layout
from fst.data.point_files import PointSample, checked_sample, read_points
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
        samples: Sequence[PointSample] | str | Path,
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
            if domain is None or split is not None:
                raise ValueError("samples need a domain, and have no splits")
            self.domain = domain
            self.samples = [checked_sample(row, each, domain) for row, each in enumerate(samples)]
            self.rows = list(range(len(self.samples)))
        if not self.rows:
            raise ValueError("samples must hold at least one sample, got none")
        first = self.samples[self.rows[0]]
        self.value_channels = np.shape(first.values)[1]
        self.output_channels = np.shape(first.targets)[1]
        self.condition_channels = 0 if first.condition is None else len(first.condition)

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
        return {
            "low": self.domain.low,
            "high": self.domain.high,
            "value_channels": self.value_channels,
            "output_channels": self.output_channels,
            "condition_channels": self.condition_channels,
            **anchor_layout(model, self.domain.axes),
        }

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
    sizes = torch.tensor([len(row) for row in positions])
    joined = [torch.from_numpy(np.concatenate(rows)) for rows in (positions, values)]
    return Ragged.of(joined[0], joined[1], sizes).take(torch.arange(len(sizes)))
