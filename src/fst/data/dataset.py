"""A user's own functions for a plain PyTorch training loop: a `Dataset`, and how to batch it.

Enters: `PointSample`s in memory, or an `fst` point file, which is read a sample at a time. Leaves:
samples by number, and by `collate` a padded `Batch`: `DataLoader(data, collate_fn=fst.collate)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import Dataset

from fst.data import point_files
from fst.data.point_data import PointData, settings_for
from fst.data.point_files import PointFile, PointFunctions, Points, PointSample
from fst.data.point_samples import Ragged, TargetCheck
from fst.data.samples import Batch, Statistics
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
        if isinstance(samples, PointFunctions):
            domain, samples = domain or samples.domain, samples.samples
        self.samples: PointFile
        if isinstance(samples, str | Path):
            if domain is not None or split not in (None, *SPLITS):
                raise ValueError(
                    "a file has its own domain, and split must be None, training, validation or "
                    f"test, got domain={domain} and split={split!r}"
                )
            self.samples = point_files.read_points(samples)
        elif domain is None or split is not None:
            raise ValueError("samples need a domain, and have no splits")
        else:
            self.samples = _Listed.of(samples, domain)
        self.rows = list(range(len(self.samples)))
        if split is not None:
            self.rows = getattr(PointData().partition(self.samples), split).tolist()
        if not self.rows:
            raise ValueError("samples must hold at least one sample, got none")
        self.domain = self.samples.domain
        self.value_channels = self.samples.value_channels
        self.output_channels = self.samples.output_channels
        self.condition_channels = self.samples.condition_channels

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> PointSample:
        check_argument("row", row, int)
        sample = self.samples[self.rows[row]]
        queries = np.asarray(sample.queries)
        if self.queries is None or self.queries >= len(queries):
            return sample
        chosen = torch.randperm(len(queries))[: self.queries].numpy()
        return replace(sample, queries=queries[chosen], targets=np.asarray(sample.targets)[chosen])

    def decided(self, model: Any) -> dict[str, Any]:
        """The settings of a model's configuration that these functions decide."""
        return settings_for(model, self.samples)

    def statistics(self) -> Statistics:
        return TargetCheck(self.samples).look_through(np.array(self.rows))

    def conditions(self) -> Float[Tensor, "n c"]:
        """The condition of every sample; without channels where there is none."""
        return torch.from_numpy(self.samples.conditions(np.array(self.rows)))


@dataclass(frozen=True)
class _Listed(PointFile):
    """Samples in memory, asked as a file of points is."""

    samples: tuple[Any, ...]

    @classmethod
    def of(cls, samples: Sequence[PointSample], domain: Domain) -> "_Listed":
        checked: tuple[Any, ...] = tuple(point_files.checked_samples(samples, domain))
        return cls(
            path=Path("the samples"),
            domain=domain,
            **point_files.Labels().of_samples(checked[0], domain),
            observation_offsets=np.cumsum([0, *(len(each.positions) for each in checked)]),
            query_offsets=np.cumsum([0, *(len(each.queries) for each in checked)]),
            partition=None,
            samples=checked,
        )

    def __getitem__(self, row: int) -> PointSample:
        sample: PointSample = self.samples[row]
        return sample

    def conditions(self, rows: Int[np.ndarray, " n"]) -> Float[np.ndarray, "n c"]:
        numbers = [self.samples[row].condition if self.condition else () for row in rows]
        return np.array(numbers, np.float32).reshape(len(rows), -1)

    def _points(
        self, group: str, offsets: np.ndarray, rows: np.ndarray, opened: h5py.File | None
    ) -> Points:
        return Points.of([self.samples[row] for row in rows], group)


def collate(samples: Sequence[PointSample]) -> Batch:
    """A batch, padded to its longest sample; masks where samples differ in length.

    Points that a sample's own masks hide are left out. Padding repeats a sample's first point, so
    that it is finite and inside the domain.
    """
    given = [each for sample in samples for each in (sample.positions, sample.values)]
    kinds = {each.dtype for each in given if isinstance(each, np.ndarray)}
    dtype = max((kind for kind in kinds if kind.kind == "f"), default=np.dtype(np.float32))
    observed, queried = (_visible(samples, group, dtype) for group in point_files.GROUPS)
    positions, values, mask = Ragged.of(*observed).take()
    conditions = [each.condition for each in samples if each.condition is not None]
    if len(conditions) not in (0, len(samples)):
        raise ValueError("condition must be given for all samples of a batch or none")
    condition = torch.from_numpy(np.stack(conditions).astype(dtype)) if conditions else None
    return Batch(Observations(positions, values, condition, mask), *Ragged.of(*queried).take())


def _visible(samples: Sequence[PointSample], group: str, dtype: np.dtype) -> Points:
    """The points of all samples that no mask hides."""
    parts = [point_files.real_points(sample, group, dtype.type) for sample in samples]
    sizes = np.array([len(positions) for positions, _ in parts])
    if not sizes.all():
        raise ValueError(f"{group} of sample {sizes.argmin()} must hold at least one point")
    positions, values = (np.concatenate(each) for each in zip(*parts, strict=True))
    return Points(positions, values, sizes)
