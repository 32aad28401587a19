"""`fst evaluate`: score a trained run on its test set, once."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from fst.classifiers import Classifier
from fst.commands.device import choose_device
from fst.commands.train import (
    check_same_data,
    data_of_run,
    read_run,
    record_data,
)
from fst.data import BurgersData
from fst.data.samples import Rows, Samples
from fst.data.splits import TestSplit
from fst.evaluation import classification, protocol
from fst.evaluation.accuracy_tables import accuracy_table
from fst.evaluation.classification import ClassificationSettings
from fst.evaluation.fields import sample_fields
from fst.evaluation.image_fields import sample_image_fields
from fst.evaluation.once import ROWS, Scores, score_once
from fst.evaluation.protocol import EvaluationError, EvaluationSettings
from fst.evaluation.rows import ACCURACIES, Origin, Row, read_rows
from fst.evaluation.runs import RESULTS, read_origin
from fst.evaluation.tables import error_table
from fst.evaluation.trivial import trivial_rows
from fst.io import parse_json
from fst.operators import Operator
from fst.pretrained import WEIGHTS, PretrainedError, shipped
from fst.recipes.quoting import comparable
from fst.recipes.recipe import Recipe, recipe_from_json
from fst.terminal import Terminal
from fst.training.errors import TrainingError
from fst.training.run_folder import held


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
    console = console or Terminal()
    if not run.exists() and str(run) in shipped():
        if data is not None or again or trivial:
            raise EvaluationError(
                f"{run} ships with fst and was scored when it was trained: only its stored rows "
                "are shown, without --data, --again and --trivial"
            )
        return show(shipped()[str(run)], console)
    recipe = comparable(read_recipe(run))
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
    mark = fingerprint(recipe, (best / WEIGHTS).read_bytes())
    if data is not None and not again:
        check_not_scored(run, data)
    classifies = isinstance(recipe.evaluation, ClassificationSettings)
    origin = read_origin(
        run,
        recipe=recipe.name,
        task=recipe.task,
        model=recipe.model_name,
        seed=recipe.training.seed,
        images=recipe.training.batch_size if classifies else None,
    )

    def compute() -> Scores:
        chosen = choose_device(device)
        path = data_of_run(recipe, run, data)
        # Files without stored splits are split by their size: where they have changed, samples of
        # the training may now be in the test.
        recipe.data.check_fits(recipe, run, path)
        check_same_data(run, recipe.data, path)
        test: TestSplit[Any] = recipe.data.load_test(path, chosen)
        if isinstance(recipe.evaluation, ClassificationSettings):
            classifier = Classifier.from_pretrained(best).to(chosen)
            return _score_classes(classifier, test, recipe.evaluation, origin, mark, console)
        model = Operator.from_pretrained(best).to(chosen)
        beside = recipe.data if trivial and isinstance(recipe.data, BurgersData) else None
        return _score(model, test, recipe.evaluation, origin, mark, beside, console)

    scored = (run / RESULTS / ROWS).is_file() and not again
    with nullcontext() if scored else held(run):
        score_once(run / RESULTS, mark, compute, again=again)
        if data is not None:
            record_data(run, data)
    return show(run, console)


def show(run: Path, console: Console) -> list[Row]:
    """Print the rows that are stored with a run or with shipped weights."""
    rows = read_rows(run / RESULTS / ROWS)
    table = accuracy_table if any(row.metric in ACCURACIES for row in rows) else error_table
    console.print(table(rows).terminal())
    console.print(f"rows: {run / RESULTS}", style="dim")
    return rows


def check_not_scored(run: Path, data: Path) -> None:
    """Raise where rows are stored, which were not found with the data now asked for."""
    stored = run / RESULTS / ROWS
    if stored.is_file() and str(data.resolve()) != read_run(run).get("data"):
        raise EvaluationError(
            f"{stored}: this run was scored before, and a test set is scored once: {data} was not "
            "read; leave out --data to see the stored rows (--again scores anew)"
        )


def fingerprint(recipe: Recipe, weights: bytes) -> str:
    """Identifies the weights and the protocol that a run is scored by."""
    settings = recipe.evaluation
    if isinstance(settings, ClassificationSettings):
        cut = {name: getattr(recipe.data, name) for name in ("image_size", "resize")}
        return classification.fingerprint(settings, cut, weights)
    return protocol.fingerprint(settings, weights)


def _score(
    model: Operator,
    test: TestSplit[Samples],
    settings: EvaluationSettings,
    origin: Origin,
    mark: str,
    beside: BurgersData | None,
    console: Console,
) -> Scores:
    rows = protocol.evaluate(model, test, settings, origin, protocol=mark, console=console)
    if beside is not None:
        rows += trivial_rows(beside, test, settings, origin, protocol=mark, console=console)
    return rows, sample_fields(model, test, settings, origin)


def _score_classes(
    model: Classifier,
    test: TestSplit[Rows],
    settings: ClassificationSettings,
    origin: Origin,
    mark: str,
    console: Console,
) -> Scores:
    rows = classification.evaluate(model, test, settings, origin, protocol=mark, console=console)
    return rows, sample_image_fields(model, test, settings, origin)


def read_recipe(run: Path) -> Recipe:
    """The recipe that a run was trained with."""
    path = run / "recipe.json"
    try:
        description = parse_json(path.read_text())
    except OSError:
        raise TrainingError(f"{run} is no run folder: recipe.json cannot be read") from None
    except ValueError:
        raise TrainingError(f"{path} is damaged: no JSON") from None
    return recipe_from_json(description, str(path))
