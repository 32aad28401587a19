"""One model of a comparison with one seed: calibrate, train, score. Runs as a process of its own.

So each model has the device to itself, its peak memory is its own, and a model that fails or runs
out of memory takes no other with it. Every stage leaves a file when it is complete, and none is
repeated: `plans/MODEL.json`, then the run folder's `summary.json`, then its `results/rows.json`.
"""

import os
import shutil
import signal
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from fst.commands import train as train_command
from fst.commands.evaluate import evaluate
from fst.commands.kept import SETTINGS, clear, read_json, write_json
from fst.commands.same_data import settle_data
from fst.data.samples import Rows
from fst.data.splits import TrainingSplit, ValidationSplit
from fst.evaluation.once import ROWS
from fst.evaluation.runs import RESULTS
from fst.pretrained import WEIGHTS, from_json, write_atomically
from fst.recipes.comparison import entry
from fst.recipes.recipe import Recipe, recipe_from_json
from fst.terminal import Terminal, printable
from fst.training import checkpoint
from fst.training.budget import Budget, Calibration, calibrate, parse_budget, release
from fst.training.compilation import compiles
from fst.training.errors import (
    CompilationError,
    Interrupted,
    TrainingError,
    clear_file_errors,
)
from fst.training.run_folder import held

FAILED, OTHER_DATA, INTERRUPTED = 1, 3, 130


@dataclass(frozen=True)
class Plan:
    """How a model spends the budget, the same for all its seeds; fixed before it is trained."""

    steps: int
    compiled: bool
    calibration: Calibration
    note: str | None = None


@dataclass(frozen=True)
class ComparisonFolder:
    """Where everything of a comparison lies."""

    path: Path

    def run(self, model: str, number: int) -> Path:
        return self.path / f"{model}-seed{number}"

    def recipe(self, model: str) -> Path:
        return self.path / "recipes" / f"{model}.json"

    def plan(self, model: str) -> Path:
        return self.path / "plans" / f"{model}.json"

    def failure(self, model: str, number: int) -> Path:
        return self.path / "failures" / f"{model}-seed{number}.txt"

    def is_trained(self, model: str, number: int) -> bool:
        run = self.run(model, number)
        return (run / "summary.json").is_file() and (run / "best" / WEIGHTS).is_file()

    def is_done(self, model: str, number: int) -> bool:
        """Whether it is trained and scored; the weights may have been left behind."""
        run = self.run(model, number)
        return (run / "summary.json").is_file() and (run / RESULTS / ROWS).is_file()

    def read_recipe(self, model: str) -> Recipe:
        return recipe_from_json(read_json(self.recipe(model)), str(self.recipe(model)))

    def read_plan(self, model: str) -> Plan | None:
        path = self.plan(model)
        return from_json(read_json(path), Plan, str(path)) if path.is_file() else None


def compete(
    folder: ComparisonFolder,
    model: str,
    number: int,
    data: Path,
    *,
    device: str | None = None,
    console: Console | None = None,
) -> None:
    """Whatever is missing of one run of the comparison."""
    console = console or Terminal()
    if folder.is_done(model, number):
        return
    run = folder.run(model, number)
    with held(run):  # until one ends that a killed command left behind
        _compete(folder, model, number, data, device, console)


def _compete(
    folder: ComparisonFolder,
    model: str,
    number: int,
    data: Path,
    device: str | None,
    console: Console,
) -> None:
    run = folder.run(model, number)
    if not folder.is_trained(model, number):
        finished = (run / "summary.json").is_file()  # but its weights are gone
        if checkpoint.available(run / "checkpoints") and not finished:
            train_command.resume(run, data=data, device=device, console=console)
        else:
            _start(folder, model, number, data, device, console)
        release()
    console.print(f"scoring {run.name} on the test set")
    evaluate(run, data=data, device=device, console=Terminal(quiet=True))
    # A finished run cannot be resumed, and these are most of what it holds.
    shutil.rmtree(run / "checkpoints", ignore_errors=True)


def _start(
    folder: ComparisonFolder,
    model: str,
    number: int,
    data: Path,
    device: str | None,
    console: Console,
) -> None:
    budget = parse_budget(read_json(folder.path / SETTINGS)["budget"])
    place = train_command.choose_device(device)
    recipe, run = folder.read_recipe(model), folder.run(model, number)
    clear(run)  # of a start that was killed before its first checkpoint
    training, validation = train_command.load(recipe, data, place, console)
    settle_data(folder.path, recipe, data)
    plan = folder.read_plan(model)
    if plan is None:
        plan = make_plan(recipe, budget, training, validation)
        write_json(folder.plan(model), asdict(plan))
    rate = plan.calibration.steps_per_second
    console.print(f"{plan.steps:,} steps, measured at {rate:.3g} a second", highlight=False)
    recipe = entry(recipe, number, plan.steps, rate, compiled=plan.compiled)
    train_command.start(recipe, run, data, training, validation, console)


def make_plan(
    recipe: Recipe, budget: Budget, training: TrainingSplit[Rows], validation: ValidationSplit[Rows]
) -> Plan:
    """Measure a scratch copy of the model; where it does not compile, as it is without."""
    settings, note, measured = recipe.training, None, None
    compiled = compiles(settings, training.samples.device)
    if compiled:
        try:
            measured = _measure(recipe, budget, training, validation)
        except Exception as error:  # compilers fail in too many ways to name
            note = f"compiled it failed ({_first_line(error)}), so it was trained uncompiled"
            compiled = False
    if measured is None:
        release()  # the failed attempt, which its error held until now
        eager = replace(recipe, training=replace(settings, compile=False))
        measured = _measure(eager, budget, training, validation)
    return Plan(budget.steps(measured.steps_per_second), compiled, measured, note)


def _measure(
    recipe: Recipe, budget: Budget, training: TrainingSplit[Rows], validation: ValidationSplit[Rows]
) -> Calibration:
    scratch = train_command.prepare_model(recipe, training.samples)
    seconds = budget.calibration_seconds
    return calibrate(scratch, training, validation, recipe.training, seconds)


def _first_line(error: Exception) -> str:
    if isinstance(error, CompilationError):
        return error.reason
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def note_failure(path: Path, reason: str, details: str = "") -> None:
    """Keep why a run failed: one line for the table, then whatever helps to find the cause."""
    with clear_file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, f"{reason}\n\n{details}".rstrip().encode() + b"\n")


def end_with_parent() -> None:
    """Save and end when the process that started this one says so, or is gone, even if killed.

    Either way the other end of the pipe is closed. In training the signal is a request to save;
    before and after it there is nothing to save, and it ends the process.
    """

    def watch() -> None:
        os.read(sys.stdin.fileno(), 1)  # returns when the other end of the pipe is closed
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def attempt(
    folder: ComparisonFolder, model: str, number: int, data: Path, device: str | None
) -> int:
    """Compete, and keep the reason if that fails; the exit code of the process."""
    try:
        compete(folder, model, number, data, device=device)
    except (Interrupted, KeyboardInterrupt):
        return INTERRUPTED
    except Exception as error:
        known = isinstance(error, ValueError | TrainingError)
        reason = " ".join(str(error).split()) if known else _first_line(error)
        with suppress(TrainingError):  # a full disk may be why it failed
            note_failure(folder.failure(model, number), reason, traceback.format_exc())
        if isinstance(error, train_command.OtherDataError):  # all others would find the same
            return OTHER_DATA
        print(printable(f"fst: {model}, seed {number}, failed: {reason}"), file=sys.stderr)
        return FAILED
    return 0


def main(words: list[str]) -> int:
    """The process: folder, model, number of the seed, data and, if it was named, the device."""
    end_with_parent()
    folder, model, number, data = words[:4]
    device = words[4] if len(words) > 4 else None
    return attempt(ComparisonFolder(Path(folder)), model, int(number), Path(data), device)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
