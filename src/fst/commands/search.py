"""`fst search`: the paper's learning-rate search, for any recipe.

DIR/settings.json     recipe, rates, steps
DIR/data.json         where its data lie, and their fingerprint
DIR/rate-R/           one trial per rate: an ordinary run folder
DIR/confirm-R/        the winning trial carried on: an ordinary run folder
DIR/search.md, .json  the table

Asked again, it goes on where it stopped and repeats nothing that is complete.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from fst.commands import jobs
from fst.commands import train as train_command
from fst.evaluation.comparison import CHECKS, Search, Trial, write_report
from fst.evaluation.rows import read_curves
from fst.io import file_errors, read_json, write_json
from fst.recipes import comparison as terms
from fst.recipes import find, fitted
from fst.recipes.recipe import Recipe
from fst.terminal import Terminal
from fst.training import checkpoint
from fst.training.run_folder import RunFolder, held
from fst.training.schedules import mean_error
from fst.training.settings import TrainingError
from fst.training.trainer import NonFiniteError

KIND = "search"


@dataclass(frozen=True)
class TrialJob(jobs.Job):
    """One rate to train with, for the first time or (`confirm`) carried on."""

    recipe: Recipe
    stage: str = "rate"

    @property
    def name(self) -> str:
        return f"{self.stage}-{self.recipe.training.learning_rate:g}"

    def work(self, console: Console) -> None:
        """Train. A rate at which training diverges is a result too."""
        diverged = self.run / "diverged.json"
        if diverged.is_file() or (self.run / "summary.json").is_file():
            return
        start = partial(train_command.train, self.recipe, self.run, data=self.data)
        try:
            self.train(console, partial(start, device=self.device, console=console))
        except NonFiniteError as error:
            write_json(diverged, f"diverged at step {error.step:,}")

    def result(self) -> Trial:
        note = read_json(self.run / "diverged.json")
        errors = read_curves(self.run / "metrics.jsonl").validation
        score = mean_error(errors, CHECKS) if note is None else None
        rate, steps = self.recipe.training.learning_rate, self.recipe.training.schedule.maximum
        return Trial(rate, steps, self.name, score, errors, note)


def search(
    recipe: Recipe | str,
    out: Path,
    *,
    rates: Sequence[float] = terms.RATES,
    steps: int = terms.STEPS,
    confirm: int = terms.MORE_STEPS,
    data: Path | None = None,
    device: str | None = None,
    console: Console | None = None,
) -> Search:
    """Try every rate, select the best, and carry it on; write one table."""
    console = console or Terminal()
    recipe = find(recipe) if isinstance(recipe, str) else recipe
    if not rates or len({f"{rate:g}" for rate in rates}) < len(rates):  # the names of their folders
        raise ValueError(f"rates must be one or more different numbers, got {tuple(rates)}")
    before, chosen = jobs.read_settings(out, KIND), train_command.choose_device(device)
    path = jobs.find_data(out, recipe, data)
    recipe = fitted(recipe, path, chosen)
    tried = [terms.trial(recipe, rate, steps) for rate in sorted(rates)]
    if confirm:
        terms.confirmation(tried[0], confirm)  # a wrong number, early
    counts = {"rates": sorted(rates), "steps": steps, "confirm": confirm}
    settings = {"kind": KIND, "recipe": recipe.to_json()} | counts
    jobs.require_same(out, before, settings)
    found = Search(recipe.name, (), None, None, recipe.training.learning_rate)
    with held(out):
        write_json(out / jobs.SETTINGS, settings)
        jobs.prepare_data(out, recipe, path, chosen, console)
        for each in tried:
            job = TrialJob(out, path, device, each)
            jobs.run_here(job, console)
            found = replace(found, trials=(*found.trials, job.result()))
            write_report(out / "search", found)
        scored = [(trial.score, trial.rate) for trial in found.trials if trial.score is not None]
        found = replace(found, selected=min(scored)[1] if scored else None)
        if confirm and found.selected is not None:
            (winner,) = [each for each in tried if each.training.learning_rate == found.selected]
            longer = terms.confirmation(winner, confirm)
            job = TrialJob(out, path, device, longer, "confirm")
            _carry_on(out / f"rate-{found.selected:g}", job.run, longer)
            jobs.run_here(job, console)
            found = replace(found, confirmation=job.result())
        write_report(out / "search", found)
    console.print(found.table().terminal())
    console.print(found.conclusion(), highlight=False)
    console.print(f"table: {out / 'search.md'}", style="dim")
    return found


def _carry_on(tried: Path, run: Path, recipe: Recipe) -> None:
    """A run folder that stands where the trial ended, and allows more steps.

    The schedules agree up to there, so going on gives what one longer run would have given.
    """
    if run.exists():
        return
    unfinished = run.with_name(f".partial-{run.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    last = checkpoint.available(tried / "checkpoints")
    if not last:
        raise TrainingError(f"{tried} has no checkpoint to carry on from")
    folder = RunFolder.create(unfinished, recipe.to_json())
    folder.save_checkpoint(checkpoint.load(last[-1]), checkpoint.step_of(last[-1]), keep=1)
    with file_errors(unfinished):
        for name in ("metrics.jsonl", "run.json"):
            shutil.copyfile(tried / name, unfinished / name)
        unfinished.rename(run)
