"""`fst compare`: the models of one task, trained with the same budget and scored on the same grids.

DIR/settings.json         what the comparison is: task, budget, compilation, device, runs
DIR/data.json             where its data lie, and their fingerprint
DIR/recipes/MODEL.json    each model's recipe before the budget
DIR/plans/MODEL.json      the steps that the budget gives it, with the measurement behind them
DIR/MODEL-seedN/          an ordinary run folder: fst report, predict and evaluate take it
DIR/failures/             why a run failed, until it is tried again
DIR/comparison.md, .json  the table

Asked again, it goes on where it stopped and repeats nothing that is complete. The folder may be
moved in between, and so may the data.
"""

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fst.base import build_model, parameter_count
from fst.commands import train as train_command
from fst.commands.contestant import INTERRUPTED, OTHER_DATA, ComparisonFolder, note_failure
from fst.commands.kept import (
    SETTINGS,
    flat,
    read_json,
    read_settings,
    require_same,
    write_json,
)
from fst.commands.launching import Launch, how_it_ended, launch_process
from fst.commands.same_data import find_data
from fst.evaluation.comparison import Comparison, Standing, scores_of
from fst.evaluation.once import ROWS
from fst.evaluation.protocol import device_name
from fst.evaluation.rows import read_rows
from fst.evaluation.runs import RESULTS
from fst.pretrained import parse_json, write_atomically
from fst.recipes import find
from fst.recipes.comparison import Compilation, contestant, models_of, seed_of
from fst.recipes.recipe import Recipe
from fst.terminal import Terminal
from fst.training.budget import parse_budget
from fst.training.errors import TrainingError, clear_file_errors
from fst.training.run_folder import held

KIND = "comparison"
# Log lines that a median is worth taking of.
FEWEST_LINES = 5

Entrant = tuple[str, int]


def compare(
    task: str,
    out: Path,
    *,
    budget: str,
    models: Sequence[str] = (),
    seeds: int = 1,
    data: Path | None = None,
    device: str | None = None,
    compilation: Compilation = None,
    console: Console | None = None,
    make: Callable[[str], Recipe] = find,
    launch: Launch = launch_process,
) -> Comparison:
    """Train and score every model asked for, and write one table.

    `make` gives a recipe by its name, `launch` runs one entrant.
    """
    console = console or Terminal()
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise TrainingError("fst compare trains on one device: start it without a launcher")
    settings: dict[str, Any] = {
        "kind": KIND,
        "task": task,
        "budget": str(parse_budget(budget)),
        "compile": compilation or "as the recipes say",
    }
    names = models_of(task, tuple(models))
    recipes = {model: contestant(make(name), compilation) for model, name in names.items()}
    folder, before = ComparisonFolder(out), read_settings(out, KIND) or {}
    place = train_command.choose_device(device)
    data = find_data(out, next(iter(recipes.values())), data)
    recipes, counts, left_out = _enter(recipes, data, named=bool(models))
    asked = [(model, number) for number in range(1, seeds + 1) for model in recipes]
    with held(out):
        missing = [each for each in asked if not folder.is_done(*each)]
        # Where there is nothing to train it does not matter on what.
        settings["device"] = device_name(place) if missing or not before else before.get("device")
        entrants = _settle(folder, settings, recipes, asked)
        took_part = {model for model, _ in entrants}
        notes = tuple(note for model, note in left_out.items() if model not in took_part)
        if missing:
            next(iter(recipes.values())).data.prepare(data, place, console)
        if place.type == "cuda":
            torch.cuda.empty_cache()
        for model, number in missing:
            console.rule(folder.run(model, number).name)
            _run(folder, model, number, data, device, launch)
            write(folder, describe(folder, entrants, counts, notes))
        comparison = describe(folder, entrants, counts, notes)
        write(folder, comparison)
    show(comparison, out, console)
    failed = [
        each.run
        for each in comparison.standings
        if each.status == "failed" and (each.model, each.number) in asked
    ]
    if failed:
        raise TrainingError(
            f"{', '.join(failed)} failed (see {out / 'failures'}); the same command tries again"
        )
    return comparison


def _enter(
    recipes: dict[str, Recipe], data: Path, *, named: bool
) -> tuple[dict[str, Recipe], dict[str, int], dict[str, str]]:
    """The recipes fitted to the data, their parameters, and why others are left out.

    Only a model that nobody `named` may be left out.
    """
    entered, counts, skipped = {}, {}, {}
    for model, asked in recipes.items():
        train_command.check_options(asked)
        recipe = asked.data.fit(asked, data)
        try:
            with torch.device("meta"):  # shapes without numbers
                counts[model] = parameter_count(build_model(recipe.model))
        except ImportError as error:
            if named:
                raise TrainingError(str(error)) from None
            skipped[model] = f"{recipe.model_name} is left out. {error}"
            continue
        entered[model] = recipe
    if not entered:
        raise TrainingError(f"no model can be trained here: {'; '.join(skipped.values())}")
    return entered, counts, skipped


def _run(
    folder: ComparisonFolder,
    model: str,
    number: int,
    data: Path,
    device: str | None,
    launch: Launch,
) -> None:
    """One entrant; if it fails, the reason is kept and the others go on."""
    failure = folder.failure(model, number)
    with clear_file_errors(failure):
        failure.unlink(missing_ok=True)
    code = launch(folder, model, number, data, device)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code == OTHER_DATA:
        reason = failure.read_text().partition("\n")[0]
        failure.unlink()
        raise TrainingError(reason)
    if code != 0 and not failure.exists():
        note_failure(failure, how_it_ended(code))


def _settle(
    folder: ComparisonFolder,
    settings: dict[str, Any],
    recipes: dict[str, Recipe],
    asked: list[Entrant],
) -> list[Entrant]:
    """Store what is to be done, or check it against what is stored.

    Models and seeds may be added to a comparison; all of them are returned.
    """
    before = read_settings(folder.path, KIND)
    if before is not None:
        require_same(folder.path, {name: before.get(name) for name in settings}, settings)
    stored = {model: read_json(folder.recipe(model)) for model in recipes}
    for model, recipe in recipes.items():
        if stored[model] is not None:
            require_same(folder.recipe(model), stored[model], recipe.to_json())
    earlier = [(model, number) for model, number in (before or {}).get("runs", [])]
    entrants = [*earlier, *(each for each in asked if each not in earlier)]
    write_json(folder.path / SETTINGS, settings | {"runs": entrants})
    for model, recipe in recipes.items():
        if stored[model] is None:
            write_json(folder.recipe(model), recipe.to_json())
    return entrants


def describe(
    folder: ComparisonFolder,
    entrants: list[Entrant],
    counts: dict[str, int],
    notes: tuple[str, ...] = (),
) -> Comparison:
    """How the comparison stands, read from its folder."""
    settings = read_json(folder.path / SETTINGS)
    order = list(dict.fromkeys(model for model, _ in entrants))
    entrants = sorted(entrants, key=lambda each: (order.index(each[0]), each[1]))
    standings = tuple(_standing(folder, *each, counts.get(each[0])) for each in entrants)
    found = [start for each in standings for start in _starts(folder.path / each.run)]
    differing = sorted({name for each in found for name in _differences(found[0], each)})
    if differing:
        notes = (*notes, f"Not the same for all runs: {', '.join(differing)}.")
    chosen = found[0] if found else {}
    return Comparison(
        settings["task"],
        _words(settings["budget"]),
        standings,
        chosen.get("hardware") or {},
        chosen.get("versions") or {},
        notes,
    )


def _starts(run: Path) -> list[dict[str, Any]]:
    """With what, and on what, a run was started and resumed."""
    environment = read_json(run / "environment.json")
    resumed = environment.get("resumed") if isinstance(environment, dict) else None
    starts = [environment, *(resumed if isinstance(resumed, list) else [])]
    names = ("hardware", "versions", "git")
    return [{name: each.get(name) for name in names} for each in starts if isinstance(each, dict)]


def _differences(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    old, new = flat(one), flat(two)
    return [name for name in {**old, **new} if old.get(name) != new.get(name)]


def _steady_rate(run: Path) -> float | None:
    """Updates a second once a run is under way: the median over its log lines.

    So compiling, once for each start, does not count. None where there are too few lines to tell.
    """
    rates = []
    for line in (run / "metrics.jsonl").read_text(errors="replace").splitlines():
        try:
            entry = parse_json(line)
            if entry["kind"] == "training":
                rates.append(float(entry["steps_per_second"]))
        except (ValueError, KeyError, TypeError):  # of a writer that was killed
            continue
    return statistics.median(rates) if len(rates) >= FEWEST_LINES else None


def _standing(
    folder: ComparisonFolder, model: str, number: int, parameters: int | None
) -> Standing:
    recipe, plan = folder.read_recipe(model), folder.read_plan(model)
    run, failure = folder.run(model, number), folder.failure(model, number)
    training = recipe.training
    standing = Standing(
        model=model,
        title=recipe.model_name,
        number=number,
        seed=seed_of(recipe, number),
        status="waiting",
        run=run.name,
        learning_rate=training.learning_rate,
        predictor_learning_rate=training.predictor_learning_rate,
        parameters=parameters,
        paper_parameters=recipe.paper_parameters,
    )
    if plan is not None:
        standing = replace(
            standing,
            steps=plan.steps,
            compiled=plan.compiled,
            note=plan.note,
            peak_memory_gib=plan.calibration.peak_memory_gib,
            calibrated_steps_per_second=plan.calibration.steps_per_second,
        )
    if not folder.is_done(model, number):
        if not failure.is_file():
            return standing
        reason = failure.read_text().partition("\n")[0]
        return replace(standing, status="failed", note=f"failed: {reason}")
    summary, rows = read_json(run / "summary.json"), read_rows(run / RESULTS / ROWS)
    overall, cost = summary["steps_per_second"], rows[0].training
    rate = _steady_rate(run) or overall
    images = None if cost is None else cost.images_per_second
    return replace(
        standing,
        status="done",
        parameters=rows[0].parameters,
        steps=summary["steps"],
        training_seconds=summary["steps"] / overall,
        all_seconds=summary["seconds"],
        steps_per_second=rate,
        images_per_second=None if images is None else images / overall * rate,
        starts=len(_starts(run)),
        selected_step=summary["selected_step"],
        validation_error=summary["validation_error"],
        scores=scores_of(rows),
    )


def write(folder: ComparisonFolder, comparison: Comparison) -> None:
    """The table so far, as Markdown and as JSON."""
    with clear_file_errors(folder.path):
        text = comparison.markdown()
        write_atomically(folder.path / "comparison.md", text.encode())
    write_json(folder.path / "comparison.json", comparison.to_json())


def show(comparison: Comparison, out: Path, console: Console) -> None:
    console.print(comparison.title, style="bold", highlight=False)
    console.print(comparison.terminal(), crop=False)
    for sentence in comparison.explanations():
        console.print(sentence, style="dim", markup=False, highlight=False)
    console.print(f"table: {out / 'comparison.md'}", style="dim")


def _words(budget: str) -> str:
    """A stored budget as a reader likes it."""
    if budget.endswith("steps"):
        return f"{int(budget.removesuffix('steps')):,} steps"
    seconds = float(budget.removesuffix("s"))
    if seconds < 120:
        return f"{seconds:g} seconds"
    return f"{seconds / 60:g} minutes"
