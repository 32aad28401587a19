"""`fst evaluate`: score a trained run on its test set, once. `fst report`: runs as a page."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from fst.commands.train import check_same_data, choose_device, data_of_run, record_data
from fst.evaluation.report import report as write_report
from fst.evaluation.report import verdict
from fst.evaluation.rows import (
    RESULTS,
    ROWS,
    EvaluationError,
    Origin,
    Row,
    Scores,
    not_a_run,
    read_origin,
    read_rows,
    score_once,
)
from fst.evaluation.tables import channel_table, error_table, full_grid, group_table
from fst.evaluation.trivial import TrainingFacts, large_means
from fst.io import read_object
from fst.pretrained import WEIGHTS, PretrainedError, shipped
from fst.recipes.comparison import comparable
from fst.recipes.recipe import Recipe, recipe_from_json
from fst.terminal import Terminal
from fst.training.run_folder import held
from fst.training.settings import TrainingError


def evaluate(
    run: Path,
    *,
    data: Path | None = None,
    device: str | None = None,
    again: bool = False,
    unfinished: bool = False,
    console: Console | None = None,
) -> list[Row]:
    """Score the best weights of a run, print the table, and keep the rows with the run.

    Beside them stand predictors without parameters, which any model must beat. A test set is
    scored once, so a run that may still go on is not scored unless `unfinished` says so.
    """
    console = console or Terminal()
    folder = run if run.exists() else shipped().get(str(run), run)
    if (folder / WEIGHTS).is_file():
        if data is not None or again or not (folder / RESULTS / ROWS).is_file():
            raise EvaluationError(
                f"{run} holds weights and is no run folder: only its stored rows are shown, where "
                "fst ship wrote some, and without --data and --again"
            )
        return show(folder, console)
    recipe = comparable(read_recipe(run))
    if not unfinished and not (run / "summary.json").is_file():
        raise EvaluationError(
            f"{run} has not finished, and a test set is scored once; go on with: "
            f"fst train --resume {run} (--unfinished scores it as it is)"
        )
    best = run / "best"
    if not (best / WEIGHTS).is_file():
        raise PretrainedError(f"{run} has no trained weights yet: best/{WEIGHTS} is missing")
    weights = (best / WEIGHTS).read_bytes()
    settings = recipe.evaluation
    protocol = settings.fingerprint(weights, recipe.data, recipe.model)
    if data is not None and not again:
        check_not_scored(run, data)
    origin = Origin(
        run=run.resolve().name,
        recipe=recipe.name,
        task=recipe.task,
        model=recipe.model_name,
        seed=recipe.training.seed,
        protocol=protocol,
    )
    images = recipe.training.batch_size if settings.of_images else None
    origin = read_origin(run, origin, images)

    def compute() -> Scores:
        chosen = choose_device(device)
        path = data_of_run(recipe, run, data)
        # Files without stored splits are split by their size: where they have changed, samples of
        # the training may now be in the test.
        recipe.data.check_fits(recipe, run, path)
        fingerprint = check_same_data(run, recipe.data, path)
        test, frequent = recipe.data.load_test(path, chosen), recipe.data.frequent_class(path)
        facts = described_facts(read_object(run / "run.json"))
        facts = replace(facts, diffusion=recipe.data.diffusion, frequent_class=frequent)
        known = replace(origin, data=data_name(run, recipe, data, test.digest))
        model = settings.kind.from_pretrained(best).to(chosen)
        scores = settings.score(model, test, known, facts, console)
        if data is not None and fingerprint:  # a test alone is not where training goes on
            record_data(run, data)
        return scores

    scored = (run / RESULTS / ROWS).is_file() and not again
    with nullcontext() if scored else held(run):
        score_once(run / RESULTS, protocol, compute, again=again)
    return show(run, console)


def report(runs: Sequence[Path], *, out: Path, console: Console) -> None:
    console.print(f"wrote {write_report(runs, out)}")


def show(run: Path, console: Console) -> list[Row]:
    """Print what is stored with a run or shipped weights: the table, what it says in words, and a
    warning where relative errors mislead."""
    rows = read_rows(run / RESULTS / ROWS)
    last = full_grid(rows)
    console.print(error_table([row for row in rows if not row.trivial or row in last]).terminal())
    channels = channel_table(row for row in rows if not row.trivial)
    if channels is not None and len(channels.lines) > 1:
        console.print(channels.terminal())
    if (groups := group_table(rows)) is not None:
        console.print(groups.terminal())
    words, facts = [verdict(rows)], described_facts(read_object(run / "run.json"))
    names = [each.name for each in last[0].channels]
    if len(facts.mean) == len(names):
        warning = large_means(names, facts.mean, facts.std)
        words.append(warning and f"Warning: {warning}.")
    for sentence in filter(None, words):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    console.print(f"rows: {run / RESULTS}", style="dim")
    return rows


def described_facts(described: dict[str, Any]) -> TrainingFacts:
    """Mean and standard deviation of the training targets, as a run recorded them."""
    mean = described.get("output_mean")
    std = described.get("output_std", described.get("output_deviation"))
    if not isinstance(mean, list) or not isinstance(std, list) or len(mean) != len(std):
        return TrainingFacts()
    return TrainingFacts(tuple(map(float, mean)), tuple(map(float, std)))


def data_name(run: Path, recipe: Recipe, data: Path | None, test: str) -> str:
    """A user's own data by name and contents; empty where the recipe says what they are."""
    described = read_object(run / "run.json")
    path = data or Path(str(described.get("data", "")))
    digest = str(described.get("training_digest", described.get("fingerprint", "")))[:6]
    return " ".join(filter(None, (path.name, digest, test[:6]))) if recipe.data.own else ""


def check_not_scored(run: Path, data: Path) -> None:
    """Raise where rows are stored, which were not found with the data now asked for."""
    stored = run / RESULTS / ROWS
    if stored.is_file() and str(data.resolve()) != read_object(run / "run.json").get("data"):
        raise EvaluationError(
            f"{stored}: this run was scored before, and a test set is scored once: {data} was not "
            "read; leave out --data to see the stored rows (--again scores anew)"
        )


def read_recipe(run: Path) -> Recipe:
    path = run / "recipe.json"
    description = read_object(path)
    if not description:
        raise TrainingError(not_a_run(run))
    return recipe_from_json(description, str(path))
