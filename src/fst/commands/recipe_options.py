"""`fst train RECIPE`: every field of the recipe is an option, with its value as the default."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from tyro.conf import AvoidSubcommands, arg

from fst.commands import train as train_command
from fst.recipes import find
from fst.recipes.recipe import Recipe


@dataclass(frozen=True)
class TrainOptions:
    """Options of a new run besides the fields of its recipe."""

    recipe: Annotated[Recipe, arg(name="")]
    out: Path = tyro.MISSING
    """Folder for the run; it must be empty or absent."""
    data: Path | None = None
    """Data folder, or your own file; ./data/... when not given, and made there if missing."""
    device: str | None = None
    """cpu or cuda; a GPU where there is one."""


@dataclass(frozen=True)
class DataOption:
    """The one option that decides what the others mean."""

    data: Path | None = None


def _without_help(arguments: Sequence[str]) -> list[str]:
    return [word for word in arguments if word not in ("-h", "--help")]


def train_recipe(name: str, arguments: Sequence[str], *, console: Console) -> None:
    """Start a new run from the words after `fst train NAME`."""
    recipe = find(name)
    if recipe.data.shapes_options:
        # Sizes come from the file, so it is read before the other options are understood.
        named, _ = tyro.cli(DataOption, args=_without_help(arguments), return_unknown_args=True)
        if named.data is not None:
            recipe = recipe.data.fit(recipe, named.data)
    recipe = recipe.data.shown(recipe)
    default = TrainOptions(recipe)
    options = tyro.cli(
        AvoidSubcommands[TrainOptions], default=default, args=arguments, prog=f"fst train {name}"
    )
    recipe.data.check_changes(options.recipe)
    train_command.train(
        options.recipe, options.out, data=options.data, device=options.device, console=console
    )
