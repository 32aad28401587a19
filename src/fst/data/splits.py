"""Training, validation and test: three types, so that one cannot be handed over as another.

Which rows of a file belong to which split is a `Partition`: named in the file, or drawn by seed.
A partition whose splits overlap cannot be made.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import h5py
import numpy as np
import torch
from jaxtyping import Int

from fst.data.errors import DataError
from fst.data.samples import Rows

# Which kind of samples: solutions of an equation, or images.
Kind = TypeVar("Kind", bound=Rows, covariant=True)

LOOKED_AT = 4
SPLITS = ("training", "validation", "test")


def looked_at(rows: Int[np.ndarray, " n"]) -> Int[np.ndarray, " k"]:
    """A few rows, evenly spaced, by which data are known again without reading all of them."""
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(LOOKED_AT, len(rows))).astype(int))
    return np.asarray(rows[chosen])


@dataclass(frozen=True)
class TrainingSplit(Generic[Kind]):
    """What a model learns from. Normalisation statistics come from here and nowhere else."""

    samples: Kind


@dataclass(frozen=True)
class ValidationSplit(Generic[Kind]):
    """What a checkpoint is selected by."""

    samples: Kind


@dataclass(frozen=True)
class TestSplit(Generic[Kind]):
    """What a result is reported on, once. `groups` names each sample's group in a table.

    `numbers` are those by which the user knows the samples, and `cells` gives the triangles between
    the queries of the sample with a number, where its mesh is known; the rest are names and units.
    """

    __test__ = False  # the name is the paper's word, not a class of tests for pytest to collect

    samples: Kind
    groups: tuple[str, ...] | None = None
    numbers: tuple[int, ...] | None = None
    axes: tuple[tuple[str, str], ...] = ()
    values: tuple[tuple[str, str], ...] = ()
    targets: tuple[tuple[str, str], ...] = ()
    cells: Callable[[int], Int[np.ndarray, "t 3"] | None] | None = None

    def __post_init__(self) -> None:
        if self.groups is not None and len(self.groups) != len(self.samples):
            raise ValueError(
                f"groups must name each of the {len(self.samples)} samples, got {len(self.groups)}"
            )


@dataclass(frozen=True)
class Partition:
    """Rows of one file: sorted, without repetition, and never in two splits."""

    training: Int[np.ndarray, " a"]
    validation: Int[np.ndarray, " b"]
    test: Int[np.ndarray, " c"]

    def __post_init__(self) -> None:
        together = np.concatenate([self.training, self.validation, self.test])
        if len(np.unique(together)) != len(together):
            raise ValueError("splits must not overlap or repeat a row, but they do")

    @property
    def digest(self) -> str:
        """Tells which rows are in which split."""
        found = hashlib.sha256()
        for name in SPLITS:
            rows = getattr(self, name).astype(np.int64)
            found.update(f"{name} {len(rows)}".encode() + rows.tobytes())
        return found.hexdigest()[:16]

    @classmethod
    def named(cls, rows: Mapping[str, object], total: int) -> "Partition":
        """From index lists by name, checked against a file of `total` rows."""
        unknown = sorted(set(rows) - set(SPLITS))
        if unknown:
            raise ValueError(f"splits must be named {', '.join(SPLITS)}, got {', '.join(unknown)}")
        lists = {}
        for name in SPLITS:
            given = np.asarray(rows.get(name, ()))
            if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
                raise ValueError(
                    f"split {name} must be a list of row numbers, "
                    f"got {given.dtype} of shape {given.shape}"
                )
            lists[name] = np.sort(given.astype(np.int64))
        together = np.concatenate(list(lists.values()))
        if together.size and not (together.min() >= 0 and together.max() < total):
            raise ValueError(
                f"splits must name rows 0 to {total - 1}, got {together.min()} to {together.max()}"
            )
        return cls(**lists)

    @classmethod
    def consecutive(cls, training: int, validation: int, test: int) -> "Partition":
        """The first rows for training, the next for validation, the next for the test."""
        ends = np.cumsum([training, validation, test])
        return cls(*np.split(np.arange(ends[-1]), ends[:-1]))

    @classmethod
    def drawn(
        cls, total: int, *, training: int, validation: int, test: int, seed: int
    ) -> "Partition":
        """Drawn from `total` rows by seed.

        Files of equal length, such as those of several viscosities, get the same rows: PDEBench
        uses one list of initial conditions for all of them, and none may be in two splits.
        """
        counts = {"training": training, "validation": validation, "test": test}
        negative = [name for name, count in counts.items() if count < 0]
        if negative or sum(counts.values()) > total:
            raise ValueError(
                f"cannot draw {training} training, {validation} validation and {test} test rows "
                f"from {total}"
            )
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).numpy()
        ends = np.cumsum(list(counts.values()))
        lists = np.split(order[: ends[-1]], ends[:-1])
        return cls(*(np.sort(rows) for rows in lists))


def stored_partition(path: Path, file: h5py.File, rows: int) -> Partition | None:
    """The splits that a file names, if any."""
    group = file.get("split")
    if group is None:
        return None
    if not isinstance(group, h5py.Group):
        raise DataError(f"{path}: split must be a group of index lists")
    try:
        return Partition.named({name: group[name][:] for name in group}, rows)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error
