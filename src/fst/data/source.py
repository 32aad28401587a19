"""A source of data: what a recipe says about its data, and all that commands ask of it.

Training, validation and test are three types, so that one cannot be handed over as another. Which
rows of a file belong to which split is a `Partition`: named in the file, or drawn by seed. A
partition whose splits overlap cannot be made.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import h5py
import numpy as np
import torch
from jaxtyping import Int
from rich.console import Console

from fst.data.files import DataError, Plan, Produce, blame, check_existing, write_rows
from fst.data.samples import Rows
from fst.io import publish
from fst.terminal import Terminal
from fst.types import Device

# A recipe: any dataclass with a `model`, `data` and `evaluation`.
Recipe = TypeVar("Recipe")
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

    `digest` tells a user's own samples from others. `numbers` or, where there are some, `names` are
    those by which the user knows the samples, and `cells` gives the triangles between the queries
    of the sample with a number, where its mesh is known; the rest are names and units.
    """

    __test__ = False  # the name is the paper's word, not a class of tests for pytest to collect

    samples: Kind
    groups: tuple[str, ...] | None = None
    numbers: tuple[int, ...] | None = None
    names: tuple[str, ...] | None = None
    axes: tuple[tuple[str, str], ...] = ()
    values: tuple[tuple[str, str], ...] = ()
    targets: tuple[tuple[str, str], ...] = ()
    cells: Callable[[int], Int[np.ndarray, "t 3"] | None] | None = None
    digest: str = ""

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
        ends = np.cumsum([training, validation, test])
        if min(training, validation, test) < 0 or ends[-1] > total:
            raise ValueError(
                f"cannot draw {training} training, {validation} validation and {test} test rows "
                f"from {total}"
            )
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).numpy()
        return cls(*map(np.sort, np.split(order[: ends[-1]], ends[:-1])))


def stored_partition(path: Path, file: h5py.File, rows: int) -> Partition | None:
    """The splits that a file names, if any."""
    group = file.get("split")
    if group is None:
        return None
    if not isinstance(group, h5py.Group):
        raise DataError(f"{path}: split must be a group of index lists")
    with blame(path):
        return Partition.named({name: group[name][:] for name in group}, rows)


class DataSource(ABC):
    """Files or folders that become three splits."""

    own: ClassVar[str | None] = None
    """What a user has to bring, in words ("a file of yours: add --data FILE"); None where missing
    files are made."""
    shapes_options: ClassVar[bool] = False
    """Whether the data decide defaults of a recipe's options, so that they are looked at first."""

    limits: ClassVar[str] = "Nothing beyond data of the kind above was tested."
    """What a model of these data was and was not tested on, for the card of shipped weights."""

    value_names: ClassVar[tuple[tuple[str, str], ...]] = ()
    target_names: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Names and units of what is observed and of what is asked for, where they are always the
    same."""

    def channel_names(self, folder: Path) -> tuple[tuple[tuple[str, str], ...], ...]:
        """Names and units of what is observed, and of what is asked for."""
        return self.value_names, self.target_names

    def labels(self, folder: Path) -> dict[str, list[list[str]]]:
        """Names and units of axes, values, targets and condition, where a file says them."""
        return {}

    @property
    def diffusion(self) -> float | None:
        """For solutions that diffuse: the coefficient times the last time; None elsewhere."""
        return None

    def frequent_class(self, folder: Path) -> str | None:
        """For classes: the one that most training samples have; None elsewhere."""
        return None

    @property
    def grid(self) -> tuple[int, ...] | None:
        """The stored grid, if the data lie on one."""
        return None

    def files(self, folder: Path) -> list[Path]:
        """The files that are made where they are missing."""
        return []

    @abstractmethod
    def prepare(self, folder: Path, device: Device = "cpu", console: Console | None = None) -> None:
        """Make what is missing and check what is there, so that errors come early."""

    def load(
        self,
        folder: Path | str,
        device: Device = "cpu",
        *,
        augment: bool = False,
        console: Console | None = None,
    ) -> tuple[TrainingSplit[Any], ValidationSplit[Any]]:
        """Training and validation, on the device. The test split is not read."""
        training, validation = self.splits(Path(folder), torch.device(device), augment, console)
        return TrainingSplit(training), ValidationSplit(validation)

    @abstractmethod
    def splits(
        self, folder: Path, device: torch.device, augment: bool, console: Console | None
    ) -> tuple[Any, Any]:
        """Training and validation samples; where `augment`, those that can be changed at random."""

    def check_test(self, folder: Path) -> None:
        """Raise where a user's data hold no test split; it is not read."""
        del folder

    @abstractmethod
    def load_test(self, folder: Path, device: Device = "cpu") -> TestSplit[Any]: ...

    @abstractmethod
    def fingerprint(self, folder: Path) -> dict[str, Any]:
        """By which the data of a run are known again."""

    def fit(self, recipe: Recipe, folder: Path) -> Recipe:
        """The recipe with what the data decide: channels, domain, classes."""
        return recipe

    def on_domain(self, model: Any, folder: Path) -> Any:
        """The configuration of trained weights for these data, where they lie in another box."""
        return model

    def check_fits(self, recipe: Any, run: Path, folder: Path) -> None:
        """Raise where data are of another kind than those a run was trained on."""
        del recipe, run, folder

    def shown(self, recipe: Recipe) -> Recipe:
        """The recipe as a list of its options shows it."""
        return recipe

    def check_changes(self, recipe: Any) -> None:
        """Raise where options have changed what the data decide, in a recipe from `shown`."""
        del recipe

    def check_options(self, recipe: Any) -> None:
        """Raise where a recipe asks for something that these data cannot give."""
        for shape in getattr(recipe.evaluation, "grids", ()):
            if self.grid is None:
                raise ValueError(
                    f"evaluation.grids must be empty for {recipe.name}, whose points lie on no "
                    f"grid, got {recipe.evaluation.grids}"
                )
            if any(count > size for count, size in zip(shape, self.grid, strict=True)):
                raise ValueError(
                    f"evaluation.grids must fit into the {self.grid} grid of the data, got {shape}"
                )


class MadeData(DataSource):
    """Solutions of an equation on a grid, in files that are made where they are missing.

    Each file is known by its path and its part: what `make` needs besides the path to make it.
    """

    seed: int

    @abstractmethod
    def parts(self, folder: Path) -> dict[Path, tuple[Any, ...]]:
        """The files of this recipe, whether they exist or not, with their parts."""

    @abstractmethod
    def plan(self, path: Path, device: torch.device, *part: Any) -> tuple[Plan, Produce, int]:
        """A file to be made, how, and how many rows at once."""

    @abstractmethod
    def layout(self, path: Path) -> Any:
        """A file whose layout has been checked, with its `provenance` and `blocks` of rows.

        A block is a tuple that ends with the solutions.
        """

    @abstractmethod
    def rows_of(self, file: Any, *part: Any) -> Partition:
        """Which rows of a file are used; raise where it is not of this recipe."""

    def opened(self, path: Path, *part: Any) -> tuple[Any, Partition]:
        file = self.layout(path)
        with blame(path):
            return file, self.rows_of(file, *part)

    def for_training(self, folder: Path) -> list[tuple[Any, Partition]]:
        """The files that hold training and validation."""
        return [self.opened(path, *part) for path, part in self.parts(folder).items()]

    def files(self, folder: Path) -> list[Path]:
        return list(self.parts(folder))

    def prepare(self, folder: Path, device: Device = "cpu", console: Console | None = None) -> None:
        """Make the files that are missing. A file that is there is checked and kept."""
        console = console or Terminal()
        for path, part in self.parts(folder).items():
            if not path.exists():
                self.make(path, *part, device=device, console=console)
                continue
            found = self.opened(path, *part)[0].provenance
            if found is not None and found.get("seed") != self.seed:
                console.print(f"{path.name}: kept, made with seed {found.get('seed')}")

    def make(
        self,
        path: Path,
        *part: Any,
        device: Device,
        console: Console,
        batch_size: int | None = None,
        force: bool = False,
    ) -> bool:
        """Make one file, going on from an unfinished one; False if it was there already."""
        plan, produce, at_once = self.plan(path, torch.device(device), *part)
        if path.exists() and not force:
            check_existing(path, self.layout(path).provenance, plan.provenance)
            return False
        at_once = at_once if batch_size is None else batch_size
        write_rows(plan, produce, batch_size=at_once, console=console, force=force)
        self.finish(plan)
        return True

    def finish(self, plan: Plan) -> None:
        """Make the final file of a complete part."""
        publish(plan.part, plan.path)

    def fingerprint(self, folder: Path) -> dict[str, Any]:
        """By which the data of a run are known again: their splits, and the size of a few rows.

        It tells other samples, and another solver, but not the rounding of another device.
        """
        opened = self.for_training(folder)
        sizes: list[float] = []
        for file, partition in opened:
            for rows in (partition.training, partition.validation):
                blocks = (block for *_, block in file.blocks(looked_at(rows)))
                sizes += [u.double().square().mean().sqrt().item() for b in blocks for u in b]
        return {"splits": [partition.digest for _, partition in opened], "sizes": sizes}
