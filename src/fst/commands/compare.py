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

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fst.base import build_model, parameter_count
from fst.commands import jobs
from fst.commands import train as train_command
from fst.commands.evaluate import evaluate
from fst.data.files import UnfitError
from fst.evaluation.comparison import Comparison, Result, write_report
from fst.evaluation.protocol import device_name
from fst.evaluation.rows import RESULTS, ROWS
from fst.io import read_json, write_json
from fst.pretrained import WEIGHTS, from_json
from fst.recipes import comparison as terms
from fst.recipes import find, fitted, own
from fst.recipes.recipe import Recipe, recipe_from_json
from fst.terminal import Terminal
from fst.training.budget import Plan, make_plan, parse_budget, release, spend
from fst.training.run_folder import held
from fst.training.settings import TrainingError

KIND, MODULE = "comparison", "fst.commands.compare"


@dataclass(frozen=True)
class ModelJob(jobs.Job):
    """One model with one seed: measure, train, score. `number` counts the seeds from 1."""

    model: str
    number: int

    def __str__(self) -> str:
        return f"{self.model}, seed {self.number},"

    @property
    def name(self) -> str:
        return f"{self.model}-seed{self.number}"

    @property
    def is_done(self) -> bool:
        """Whether it is trained and scored; the weights may have been left behind."""
        return (self.run / "summary.json").is_file() and (self.run / RESULTS / ROWS).is_file()

    @property
    def plan_file(self) -> Path:
        return self.folder / "plans" / f"{self.model}.json"

    def recipe(self) -> Recipe:
        path = self.folder / "recipes" / f"{self.model}.json"
        return recipe_from_json(read_json(path), str(path))

    def plan(self) -> Plan | None:
        values = read_json(self.plan_file)
        return None if values is None else from_json(values, Plan, str(self.plan_file))

    def launch(self) -> int:
        words = map(str, (self.folder, self.data, self.model, self.number))
        return jobs.launch_process(
            ["-P", "-m", MODULE, *words, *([self.device] if self.device else [])]
        )

    def work(self, console: Console) -> None:
        finished = (self.run / "summary.json").is_file()
        if not finished or not (self.run / "best" / WEIGHTS).is_file():
            self.train(console, partial(self._start, console))
            release()
        console.print(f"scoring {self.name} on the test set")
        evaluate(self.run, data=self.data, device=self.device, console=Terminal(quiet=True))
        # A finished run cannot be resumed, and these are most of what it holds.
        shutil.rmtree(self.run / "checkpoints", ignore_errors=True)

    def _start(self, console: Console) -> None:
        recipe, device = self.recipe(), train_command.choose_device(self.device)
        splits = train_command.load(recipe, self.data, device, console)
        plan = self.plan()
        if plan is None:
            budget = parse_budget(read_json(self.folder / jobs.SETTINGS)["budget"])
            build = partial(train_command.prepare_model, recipe, splits[0].samples)
            plan = make_plan(budget, build, recipe.training, splits)
            write_json(self.plan_file, asdict(plan))
        rate = plan.calibration.steps_per_second
        console.print(f"{plan.steps:,} steps, measured at {rate:.3g} a second", highlight=False)
        settings = spend(recipe.training, plan.steps, rate)
        seed = terms.seed_of(recipe, self.number)
        recipe = replace(recipe, training=replace(settings, seed=seed, compile=plan.compiled))
        train_command.start(recipe, self.run, self.data, splits, console)

    def result(self, parameters: int | None) -> Result:
        """What its folder says of it."""
        recipe, plan = self.recipe(), self.plan()
        result = Result(
            model=self.model,
            title=recipe.model_name,
            number=self.number,
            seed=terms.seed_of(recipe, self.number),
            status="waiting",
            run=self.name,
            learning_rate=recipe.training.learning_rate,
            predictor_learning_rate=recipe.training.predictor_learning_rate,
            parameters=parameters,
            paper_parameters=recipe.paper_parameters,
        )
        if plan is not None:
            result = result.planned(plan)
        if self.is_done:
            return result.scored(self.run)
        if self.failure.is_file():
            reason = self.failure.read_text().partition("\n")[0]
            return replace(result, status="failed", note=f"failed: {reason}")
        return result


def compare(
    task: str,
    out: Path,
    *,
    budget: str,
    models: Sequence[str] = (),
    seeds: int = 1,
    data: Path | None = None,
    device: str | None = None,
    compile: bool = True,
    compile_mode: terms.CompileMode | None = None,
    size: own.Size | None = None,
    changes: Sequence[str] = (),
    console: Console | None = None,
    make: Callable[[str], Recipe] = find,
    launch: Callable[[ModelJob], int] = ModelJob.launch,
) -> Comparison:
    """Train and score every model asked for (a job each), and write one table."""
    console = console or Terminal()
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    spent = parse_budget(budget)
    compilation: terms.Compilation = compile_mode if compile else "no"
    settings: dict[str, Any] = {"kind": KIND, "task": task, "budget": str(spent)}
    settings["compile"] = compilation or "as the recipes say"
    named = terms.models_of(task, tuple(models))
    recipes = {model: terms.equal_terms(make(name), compilation) for model, name in named.items()}
    before, chosen = jobs.read_settings(out, KIND) or {}, train_command.choose_device(device)
    path = jobs.find_data(out, next(iter(recipes.values())), data)
    recipes, counts, left_out = _fit(recipes, path, chosen, size, changes, named=bool(models))
    asked = [(model, number) for number in range(1, seeds + 1) for model in recipes]
    job_of = partial(ModelJob, out, path, device)
    with held(out):
        wanted = [job_of(*each) for each in asked]
        missing = [job for job in wanted if not job.is_done]
        # Where there is nothing to train it does not matter on what.
        settings["device"] = device_name(chosen) if missing or not before else before.get("device")
        runs = _settle(out, settings, recipes, asked)
        notes = tuple(note for model, note in left_out.items() if model not in dict(runs))

        def report() -> Comparison:
            results = tuple(job_of(*each).result(counts.get(each[0])) for each in runs)
            found = Comparison.read(out, task, spent.words(), results, *notes)
            write_report(out / "comparison", found)
            return found

        for job in missing:
            jobs.prepare_data(out, recipes[job.model], path, chosen, console)
            jobs.run_apart(job, console, partial(launch, job))
            report()
        comparison = report()
    comparison.show(console)
    console.print(f"table: {out / 'comparison.md'}", style="dim")
    if failed := [job.name for job in wanted if not job.is_done]:
        raise TrainingError(
            f"{', '.join(failed)} failed (see {out / 'failures'}); the same command tries again"
        )
    return comparison


def _fit(
    recipes: dict[str, Recipe],
    data: Path,
    device: torch.device,
    size: own.Size | None,
    changes: Sequence[str],
    *,
    named: bool,
) -> tuple[dict[str, Recipe], dict[str, int], dict[str, str]]:
    """Recipes fitted to the data, their parameters, and why models nobody `named` are left out."""
    wanted = terms.changes_by_model(changes, recipes)
    found, counts, left_out = {}, {}, {}
    for model, asked in recipes.items():
        asked.data.check_options(asked)
        asked.data.check_test(data)  # before training, not after it
        try:
            recipe = fitted(asked, data, device, size)
            recipe = terms.changed(recipe, wanted.get(model, {}))
            with torch.device("meta"):  # shapes without numbers
                counts[model] = parameter_count(build_model(recipe.model))
        except (ImportError, UnfitError) as error:
            if named:
                unfit = isinstance(error, UnfitError)
                raise error if unfit else TrainingError(str(error)) from None
            left_out[model] = f"{asked.model_name} is left out. {error}"
        else:
            found[model] = recipe
    if not found:
        raise TrainingError(f"no model can be trained here: {'; '.join(left_out.values())}")
    return found, counts, left_out


def _settle(
    out: Path, settings: dict[str, Any], recipes: dict[str, Recipe], asked: list[tuple[str, int]]
) -> list[tuple[str, int]]:
    """Store what is to be done, or check it; models and seeds may be added."""
    stored = jobs.read_settings(out, KIND) or settings
    jobs.require_same(out, {name: stored.get(name) for name in settings}, settings)
    folder = out / "recipes"
    described = {folder / f"{model}.json": each.to_json() for model, each in recipes.items()}
    for path, values in described.items():
        jobs.require_same(path, read_json(path), values)
    runs = list(dict.fromkeys([*((model, n) for model, n in stored.get("runs", [])), *asked]))
    write_json(out / jobs.SETTINGS, settings | {"runs": runs})
    for path, values in described.items():
        if not path.is_file():
            write_json(path, values)
    order = [model for model, _ in runs]
    return sorted(runs, key=lambda each: (order.index(each[0]), each[1]))


if __name__ == "__main__":
    folder, data, model, number, *device = sys.argv[1:]
    job = ModelJob(Path(folder), Path(data), device[0] if device else None, model, int(number))
    sys.exit(jobs.main(job))
