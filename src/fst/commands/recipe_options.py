"""`fst train RECIPE`: every field of the recipe is an option, with its value as the default.

What decides other options is read first: the recipe, the data, the weights to start from, and the
short names `--steps`, `--lr` and `--batch-size`. So an option of the recipe goes before them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from tyro.conf import AvoidSubcommands, arg

from fst.commands import train as train_command
from fst.io import read_json
from fst.recipes import CHOOSE, find, own
from fst.recipes.comparison import seed_of
from fst.recipes.recipe import Recipe, recipe_from_json
from fst.training.budget import spend
from fst.training.run_folder import RunFolder
from fst.training.settings import TrainingError


@dataclass(frozen=True)
class ShortOptions:
    """What is read before the options of a recipe."""

    data: Path | None = None
    """Data folder, or your own file; ./data/... when not given, and made there if missing."""
    device: str | None = None
    """cpu or cuda; a GPU where there is one."""
    config: Path | None = None
    """A recipe as JSON, such as recipe.json of a run folder, instead of a recipe's name."""
    start: Annotated[str | None, arg(name="from")] = None
    """Start from the weights of a run, of a folder of save_pretrained, of a name that ships with
    fst or of hf://owner/name, with a new schedule.
    Without a recipe's name, the recipe and data of that run are taken."""
    size: own.Size | None = None
    """For own/...: the paper's size or a small one, whatever the device."""
    steps: int | None = None
    """Train for so many steps: a warm-up, one cosine to zero, ten validations."""
    lr: float | None = None
    """Base learning rate: short for --training.learning-rate."""
    batch_size: int | None = None
    """Samples in one step: short for --training.batch-size."""


@dataclass(frozen=True)
class TrainOptions:
    """Options of a new run besides the fields of its recipe."""

    recipe: Annotated[Recipe, arg(name="")]
    short: Annotated[ShortOptions, arg(name="")] = field(default_factory=ShortOptions)
    out: Path = tyro.MISSING
    """Folder for the run; it must be empty or absent."""
    minutes: float | None = None
    """Fit the run into this time on this machine: steps follow from a short measurement."""
    seeds: int = 1
    """Train so many times, with other seeds, into OUT/seed1, OUT/seed2, ..."""


def train_recipe(name: str | None, arguments: Sequence[str], *, console: Console) -> None:
    """Start new runs from the words after `fst train`, the recipe's name first if there is one."""
    words = [word for word in arguments if word not in ("-h", "--help")]
    short, _ = tyro.cli(ShortOptions, args=words, return_unknown_args=True)
    asked = _named(name, short)
    data, choice = short.data, None
    # The recipe of a run or a file leaves nothing to choose, and neither do weights for images.
    given = name is None or (short.start is not None and asked.task != own.TASK)
    if data is not None and asked.task in CHOOSE and not given:
        size = short.size or ("paper" if short.start else None)
        choice = CHOOSE[asked.task](asked, data, train_command.choose_device(short.device), size)
    if short.start is not None:
        model = train_command.saved_config(short.start, asked)
        if data is not None:
            model = asked.data.on_domain(model, data)
        elif name is None and short.config is None:
            data = train_command.stored_data_path(Path(short.start))
        asked = replace(asked, model=model)
        choice = choice.with_weights(model, short.start) if choice else None
    recipe = choice.recipe if choice is not None else asked
    if choice is None and data is not None and recipe.data.shapes_options:
        recipe = recipe.data.fit(recipe, data)
    recipe = recipe.data.shown(_shortened(recipe, short))
    options = tyro.cli(
        AvoidSubcommands[TrainOptions],
        default=TrainOptions(recipe),
        args=arguments,
        prog=f"fst train {name or recipe.name}",
    )
    if options.seeds < 1:
        raise TrainingError(f"seeds must be at least 1, got {options.seeds}")
    recipe.data.check_changes(options.recipe)
    if options.minutes is not None and short.steps is not None:
        raise TrainingError("give --steps or --minutes, not both")
    reasons: dict[str, str] | None = {} if recipe.task in CHOOSE else None
    if choice is not None:
        reasons = choice.explain(options.recipe)
    untouched = short.steps is None and options.recipe.training.schedule == recipe.training.schedule
    several = [options.out / f"seed{number + 1}" for number in range(options.seeds)]
    folders = several if options.seeds > 1 else [options.out]
    for folder in folders:  # before the first is trained
        RunFolder.require_free(folder)
    for number, folder in enumerate(folders, start=1):
        seed = seed_of(options.recipe, number)
        train_command.train(
            replace(options.recipe, training=replace(options.recipe.training, seed=seed)),
            folder,
            data=data,
            device=short.device,
            minutes=options.minutes,
            most_minutes=choice.minutes if choice and untouched else None,
            weights=short.start,
            reasons=reasons,
            console=console,
        )


def _named(name: str | None, short: ShortOptions) -> Recipe:
    """The recipe of a name, of a file, or of the run to start from."""
    if name is not None and short.config is not None:
        raise TrainingError("name a recipe or give --config, not both")
    if name is not None:
        return find(name)
    path = short.config or (Path(short.start) / "recipe.json" if short.start else None)
    if path is None:
        raise ValueError("name a recipe (fst train RECIPE --out DIR) or --resume DIR")
    found = read_json(path)
    if found is None and short.config is None:
        raise TrainingError(
            f"{short.start} is no run folder: name a recipe (fst train RECIPE --from {short.start} "
            "--out DIR)"
        )
    if found is None:
        raise TrainingError(f"{path}: there is no such file, expected a recipe as JSON")
    return recipe_from_json(found, str(path))


def _shortened(recipe: Recipe, short: ShortOptions) -> Recipe:
    """The recipe with what --lr, --batch-size and --steps say."""
    training = recipe.training
    if short.lr is not None:
        training = replace(training, learning_rate=short.lr)
    if short.batch_size is not None:
        training = replace(training, batch_size=short.batch_size)
    if short.steps is not None:
        training = spend(training, short.steps)
    return replace(recipe, training=training)
