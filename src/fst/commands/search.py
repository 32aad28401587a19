"""`fst search`: the paper's learning-rate search, for any recipe.

DIR/settings.json     recipe, rates, steps
DIR/data.json         where its data lie, and their fingerprint
DIR/rate-R/           one trial a rate: an ordinary run folder
DIR/confirm-R/        the winning trial carried on: an ordinary run folder
DIR/search.md, .json  the table

Asked again, it goes on where it stopped and repeats nothing that is complete.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from fst.commands import train as train_command
from fst.commands.kept import SETTINGS, read_json, read_settings, require_same, write_json
from fst.commands.same_data import find_data, settle_data
from fst.evaluation.runs import read_curves
from fst.evaluation.tables import NOTHING, Table, number
from fst.pretrained import to_json, write_atomically
from fst.recipes import search as search_recipes
from fst.recipes.recipe import Recipe
from fst.recipes.search import CHECKS, MORE_STEPS, RATES, STEPS
from fst.terminal import Terminal, markdown
from fst.training import checkpoint
from fst.training.budget import release
from fst.training.errors import Interrupted, NonFiniteError, TrainingError, clear_file_errors
from fst.training.run_folder import RunFolder, held
from fst.training.schedules import History, mean_error

KIND = "search"
DIVERGED = "diverged.json"


@dataclass(frozen=True)
class Trial:
    """One rate; `score` is the mean of the last validation errors, None if training diverged."""

    rate: float
    steps: int
    run: str
    score: float | None
    errors: tuple[tuple[int, float], ...]
    """Every validation: step and error."""
    note: str | None = None


@dataclass(frozen=True)
class Search:
    """How a search ended."""

    recipe: str
    trials: tuple[Trial, ...]
    selected: float | None
    confirmation: Trial | None
    recipe_rate: float
    """The rate that the recipe has."""

    @property
    def confirmed(self) -> bool:
        """Whether the winner went on improving."""
        if self.confirmation is None or self.confirmation.score is None:
            return False
        (before,) = [trial.score for trial in self.trials if trial.rate == self.selected]
        return before is not None and self.confirmation.score < before

    def table(self) -> Table:
        lines = [_line(trial, self) for trial in self.trials]
        if self.confirmation is not None:
            lines.append(_line(self.confirmation, self, carried_on=True))
        header = ("Rate", "Steps", f"Mean of the last {CHECKS}", "Lowest", "")
        title = f"{self.recipe}: validation error by learning rate"
        return Table(title, header, tuple(lines), words=1)

    def conclusion(self) -> str:
        if self.selected is None:
            return "Every rate diverged: try lower ones."
        words = [f"Selected: {self.selected:g} (the recipe has {self.recipe_rate:g})."]
        rates = sorted(trial.rate for trial in self.trials)
        if len(rates) > 1 and self.selected in (rates[0], rates[-1]):
            side = "lowest" if self.selected == rates[0] else "highest"
            words.append(f"It is the {side} rate tried, so a better one may lie beyond.")
        if self.confirmation is not None:
            verdict = "Confirmed" if self.confirmed else "Not confirmed"
            went = "went on falling" if self.confirmed else "did not fall further"
            words.append(f"{verdict}: its error {went} to step {self.confirmation.steps:,}.")
        return " ".join(words)


def search(
    recipe: Recipe,
    out: Path,
    *,
    rates: Sequence[float] = RATES,
    steps: int = STEPS,
    confirm: int = MORE_STEPS,
    data: Path | None = None,
    device: str | None = None,
    console: Console | None = None,
) -> Search:
    """Try every rate, select the best, and carry it on; write one table."""
    console = console or Terminal()
    if not rates or len({f"{rate:g}" for rate in rates}) < len(rates):  # the names of their folders
        raise ValueError(f"rates must be one or more different numbers, got {tuple(rates)}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise TrainingError("fst search trains on one device: start it without a launcher")
    place = train_command.choose_device(device)
    before = read_settings(out, KIND)
    data = find_data(out, recipe, data)
    recipe = recipe.data.fit(recipe, data)
    trials = {rate: search_recipes.trial(recipe, rate, steps) for rate in sorted(rates)}
    if confirm:
        search_recipes.confirmation(next(iter(trials.values())), confirm)  # a wrong number, early
    settings: dict[str, Any] = {
        "kind": KIND,
        "rates": sorted(rates),
        "steps": steps,
        "confirm": confirm,
        "recipe": recipe.to_json(),
    }
    if before is not None:
        require_same(out, before, settings)
    with held(out):
        write_json(out / SETTINGS, settings)
        recipe.data.prepare(data, place, console)
        settle_data(out, recipe, data)
        done: list[Trial] = []
        for rate, tried in trials.items():
            run = out / f"rate-{rate:g}"
            console.rule(run.name)
            done.append(_try(tried, run, data, device, console))
            _write(out, Search(recipe.name, tuple(done), None, None, recipe.training.learning_rate))
        found = _conclude(recipe, trials, done, out, confirm, data, device, console)
        _write(out, found)
    console.print(found.table().terminal())
    console.print(found.conclusion(), highlight=False)
    console.print(f"table: {out / 'search.md'}", style="dim")
    return found


def _conclude(
    recipe: Recipe,
    trials: dict[float, Recipe],
    done: list[Trial],
    out: Path,
    confirm: int,
    data: Path,
    device: str | None,
    console: Console,
) -> Search:
    """Select the rate with the lowest score and carry its trial on."""
    scored = [(trial.score, trial.rate) for trial in done if trial.score is not None]
    selected = min(scored)[1] if scored else None
    carried = None
    if selected is not None and confirm:
        run = out / f"confirm-{selected:g}"
        console.rule(run.name)
        longer = search_recipes.confirmation(trials[selected], confirm)
        _carry_on(out / f"rate-{selected:g}", run, longer)
        carried = _try(longer, run, data, device, console)
    return Search(recipe.name, tuple(done), selected, carried, recipe.training.learning_rate)


def _try(recipe: Recipe, run: Path, data: Path, device: str | None, console: Console) -> Trial:
    """Train a trial, or what is left of it. A rate at which training diverges is a result too."""
    note = read_json(run / DIVERGED)
    if note is None and not (run / "summary.json").is_file():
        try:
            if checkpoint.available(run / "checkpoints"):
                train_command.resume(run, data=data, device=device, console=console)
            else:
                shutil.rmtree(run, ignore_errors=True)  # killed before its first checkpoint
                train_command.train(recipe, run, data=data, device=device, console=console)
        except Interrupted:
            raise KeyboardInterrupt from None  # to go on, the whole search is asked again
        except NonFiniteError as error:
            note = f"diverged at step {error.step:,}"
            write_json(run / DIVERGED, note)
        release()
    errors: History = read_curves(run / "metrics.jsonl").validation
    score = mean_error(errors, CHECKS) if note is None else None
    training = recipe.training
    steps = training.schedule.maximum
    return Trial(training.learning_rate, steps, run.name, score, errors, note)


def _carry_on(tried: Path, run: Path, recipe: Recipe) -> None:
    """A run folder that stands where the trial ended, and allows more steps.

    The schedules agree up to there, so going on gives what one longer run would have given.
    """
    if run.exists():
        return
    partial = run.with_name(f".partial-{run.name}")
    shutil.rmtree(partial, ignore_errors=True)
    last = checkpoint.available(tried / "checkpoints")
    if not last:
        raise TrainingError(f"{tried} has no checkpoint to carry on from")
    folder = RunFolder.create(partial, recipe.to_json())
    with clear_file_errors(partial):
        for name in ("metrics.jsonl", "run.json"):
            shutil.copyfile(tried / name, partial / name)
    state = checkpoint.load(last[-1])
    folder.save_checkpoint(state, checkpoint.step_of(last[-1]), keep=1)
    with clear_file_errors(run):
        partial.rename(run)


def _write(out: Path, found: Search) -> None:
    values = to_json(found) | {"confirmed": found.confirmed, "conclusion": found.conclusion()}
    with clear_file_errors(out):
        table, conclusion = found.table(), markdown(found.conclusion())
        text = f"# {markdown(table.title)}\n\n{table.markdown()}\n{conclusion}\n"
        write_atomically(out / "search.md", text.encode())
    write_json(out / "search.json", values)


def _line(trial: Trial, found: Search, *, carried_on: bool = False) -> tuple[str, ...]:
    lowest = min((error for _, error in trial.errors), default=None)
    word = trial.note or ("selected" if trial.rate == found.selected else "")
    if carried_on and trial.note is None:
        word = "confirmed" if found.confirmed else "not confirmed"
    score = NOTHING if trial.score is None else number(trial.score)
    return f"{trial.rate:g}", f"{trial.steps:,}", score, number(lowest), word
