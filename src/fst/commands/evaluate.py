"""`fst evaluate`: score a trained run on its test set, once."""

import json
from pathlib import Path

from rich.console import Console

from fst.commands.train import choose_device, recorded_data
from fst.data import BurgersData
from fst.data.splits import TestSplit
from fst.evaluation.fields import Fields, sample_fields
from fst.evaluation.once import score_once
from fst.evaluation.protocol import EvaluationError, fingerprint
from fst.evaluation.protocol import evaluate as score
from fst.evaluation.rows import Origin, Row
from fst.evaluation.runs import RESULTS, read_origin
from fst.evaluation.tables import error_table
from fst.evaluation.trivial import trivial_rows
from fst.operators import Operator
from fst.pretrained import WEIGHTS, PretrainedError
from fst.recipes.recipe import Recipe, recipe_from_json
from fst.training.errors import TrainingError


def evaluate(
    run: Path,
    *,
    data: Path | None = None,
    device: str | None = None,
    again: bool = False,
    trivial: bool = False,
    unfinished: bool = False,
    console: Console | None = None,
) -> list[Row]:
    """Score the best weights of a run, print the table, and keep the rows with the run.

    `trivial` adds the predictors that any Burgers model must beat. A test set is scored once, so
    a run that may still go on is not scored unless `unfinished` says that it is meant.
    """
    console = console or Console()
    recipe = read_recipe(run)
    if not unfinished and not (run / "summary.json").is_file():
        raise EvaluationError(
            f"{run} has not finished, and a test set is scored once; go on with: "
            f"fst train --resume {run} (--unfinished scores it as it is)"
        )
    if trivial and not isinstance(recipe.data, BurgersData):
        raise EvaluationError(f"--trivial is for Burgers, {run} holds {recipe.name}")
    best = run / "best"
    if not (best / WEIGHTS).is_file():
        raise PretrainedError(f"{run} has no trained weights yet: best/{WEIGHTS} is missing")
    protocol = fingerprint(recipe.evaluation, (best / WEIGHTS).read_bytes())
    origin = read_origin(
        run,
        recipe=recipe.name,
        task=recipe.task,
        model=recipe.model_name,
        seed=recipe.training.seed,
    )

    def compute() -> tuple[list[Row], Fields | None]:
        place = choose_device(device)
        model = Operator.from_pretrained(best).to(place)
        test = recipe.data.load_test(data or recorded_data(run), place)
        return _score(model, test, recipe, origin, protocol, trivial, console)

    rows = score_once(run / RESULTS, protocol, compute, again=again)
    console.print(error_table(rows).terminal())
    console.print(f"rows: {run / RESULTS}", style="dim")
    return rows


def _score(
    model: Operator,
    test: TestSplit,
    recipe: Recipe,
    origin: Origin,
    protocol: str,
    trivial: bool,
    console: Console,
) -> tuple[list[Row], Fields | None]:
    settings = recipe.evaluation
    rows = score(model, test, settings, origin, protocol=protocol, console=console)
    if trivial:
        rows += trivial_rows(test, settings, origin, protocol=protocol, console=console)
    return rows, sample_fields(model, test, settings, origin)


def read_recipe(run: Path) -> Recipe:
    """The recipe that a run was trained with."""
    path = run / "recipe.json"
    try:
        description = json.loads(path.read_text())
    except OSError:
        raise TrainingError(f"{run} is no run folder: recipe.json cannot be read") from None
    except ValueError:
        raise TrainingError(f"{path} is damaged: no JSON") from None
    return recipe_from_json(description, str(path))
