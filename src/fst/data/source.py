"""A source of data: what a recipe says about its data, and all that commands ask of it.

To add a task, derive from `DataSource` in a file of this folder and write its recipes; nothing else
has to know the new kind.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from rich.console import Console

from fst.data.splits import TestSplit, TrainingSplit, ValidationSplit

# A recipe: any dataclass with a `model`, `data` and `evaluation`.
Recipe = TypeVar("Recipe")


class DataSource(ABC):
    """Files or folders that become three splits."""

    own: ClassVar[str | None] = None
    """What a user has to bring, in words ("a file of yours: add --data FILE"); None where missing
    files are made."""
    shapes_options: ClassVar[bool] = False
    """Whether the data decide defaults of a recipe's options, so that they are looked at first."""

    value_names: ClassVar[tuple[tuple[str, str], ...]] = ()
    target_names: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Names and units of what is observed and of what is asked for, where they are always the
    same."""

    @property
    def diffusion(self) -> float | None:
        """For solutions that diffuse: the coefficient times the last time; None elsewhere."""
        return None

    def frequent_class(self, folder: Path) -> str | None:
        """For classes: the one that most training samples have; None elsewhere."""
        del folder
        return None

    @property
    def grid(self) -> tuple[int, ...] | None:
        """The stored grid, if the data lie on one."""
        return None

    def files(self, folder: Path) -> list[Path]:
        """The files that are made where they are missing."""
        del folder
        return []

    @abstractmethod
    def prepare(
        self, folder: Path, device: torch.device | str = "cpu", console: Console | None = None
    ) -> None:
        """Make what is missing and check what is there, so that errors come early."""

    @abstractmethod
    def load(
        self,
        folder: Path,
        device: torch.device | str = "cpu",
        *,
        augment: bool = False,
        console: Console | None = None,
    ) -> tuple[TrainingSplit[Any], ValidationSplit[Any]]:
        """Training and validation, on the device. The test split is not read."""

    @abstractmethod
    def load_test(self, folder: Path, device: torch.device | str = "cpu") -> TestSplit[Any]: ...

    @abstractmethod
    def fingerprint(self, folder: Path) -> dict[str, Any]:
        """By which the data of a run are known again."""

    def fit(self, recipe: Recipe, folder: Path) -> Recipe:
        """The recipe with what the data decide: channels, domain, classes."""
        del folder
        return recipe

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


def check_counts(source: Any) -> None:
    """Raise where the numbers of samples or the seeds of a source that makes its data are wrong."""
    if min(source.training, source.validation, source.test) < 0 or source.training == 0:
        raise ValueError(
            "training must be positive, validation and test not negative, "
            f"got {source.training}, {source.validation} and {source.test}"
        )
    if source.seed < 0 or source.split_seed < 0:
        raise ValueError(
            f"seed and split_seed must be at least 0, got {source.seed} and {source.split_seed}"
        )
