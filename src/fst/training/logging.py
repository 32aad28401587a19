"""What a run says about itself while it goes: to its metrics and to the screen.

Numbers go to JSON lines always, to TensorBoard and Weights & Biases if asked. A terminal shows a
live line; anything else gets sparse plain lines. A resumed run first drops what was recorded after
its checkpoint, so each step is recorded once.
"""

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as LiveProgress
from rich.text import Text

from fst.io import file_errors, parse_json, write_atomically
from fst.metrics import in_words
from fst.terminal import duration
from fst.training.run_folder import RunFolder
from fst.training.settings import TrainingError, TrainingSettings
from fst.training.trainer import Trainer

Numbers = dict[str, float]  # of one step, by name
# Seconds between plain lines, where every line stays in a log.
QUIET = 30.0


class Stopwatch:
    def __init__(self) -> None:
        self._start = time.monotonic()

    @property
    def running(self) -> float:
        return time.monotonic() - self._start

    def lap(self) -> float:
        now = time.monotonic()
        passed, self._start = now - self._start, now
        return passed


class MetricsLog:
    """Where the main process writes; the other processes have none."""

    def __init__(self, folder: RunFolder, settings: TrainingSettings, step: int) -> None:
        self.folder, self.path = folder, folder.path / "metrics.jsonl"
        with file_errors(self.path):
            write_atomically(self.path, b"".join(_until(self.path, step)))
            self._file = self.path.open("ab")
        self._board = folder.path / "tensorboard"
        self._tensorboard = self._wandb = None
        if settings.tensorboard:
            # Imported here because it takes seconds, which not every run needs to spend.
            from torch.utils.tensorboard import SummaryWriter

            with file_errors(self._board):
                self._tensorboard = SummaryWriter(str(self._board), purge_step=step + 1)
        if settings.wandb:
            # The folder's name identifies the run, so that a resumed one goes on in the same place.
            goes_on = {"id": folder.path.resolve().name, "resume": "allow"}
            with _wandb_errors() as wandb:
                self._wandb = wandb.init(
                    project="fst", dir=str(folder.path), config=folder.recipe, **goes_on
                )

    def __enter__(self) -> Self:
        self._hook, threading.excepthook = threading.excepthook, self._report
        return self

    def _report(self, error: threading.ExceptHookArgs) -> None:
        """TensorBoard writes in a thread, whose errors nobody catches. Where the folder is gone,
        the run itself says so in one line."""
        if not isinstance(error.exc_value, OSError) or self._board.is_dir():
            self._hook(error)

    def __exit__(self, *_: object) -> None:
        threading.excepthook = self._hook
        self._file.close()
        if self._tensorboard is not None and self._board.is_dir():
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def add(self, kind: str, step: int, values: Numbers) -> None:
        """Record numbers of one step; `kind` is "training" or "validation"."""
        self.folder.require_there()
        line = {"kind": kind, "step": step, **values}
        with file_errors(self.path):
            self._file.write((json.dumps(line, allow_nan=False) + "\n").encode())
            self._file.flush()
            if self._tensorboard is not None:
                for name, value in values.items():
                    self._tensorboard.add_scalar(f"{kind}/{name}", value, step)
        if self._wandb is not None:
            self._wandb.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)

    def sync(self) -> None:
        """Bring the lines to the disk: a checkpoint counts on those before it."""
        with file_errors(self.path):
            os.fsync(self._file.fileno())


def _until(path: Path, step: int) -> Iterator[bytes]:
    """The complete lines up to `step`. A killed writer may leave half a line at the end."""
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError, KeyError, TypeError):
            if parse_json(line)["step"] <= step:
                yield line + b"\n"


def check_wandb(settings: TrainingSettings) -> None:
    """Raise where Weights & Biases is asked for but not to be had, before anything is written."""
    if settings.wandb:
        with _wandb_errors() as wandb:
            wandb.login(verify=False)  # asks in a terminal; needs no network


@contextmanager
def _wandb_errors() -> Iterator[Any]:
    """The package, and its errors as one clear line."""
    try:
        import wandb
    except ImportError:
        raise TrainingError(
            "wandb is on, but Weights & Biases is not installed: "
            "pip install 'function-space-transformer[wandb]'"
        ) from None
    try:
        yield wandb
    except wandb.Error as error:
        raise TrainingError(f"wandb is on, but Weights & Biases says: {error}") from None


class Progress(LiveProgress):
    """Shows how far training is; `last_step` is the most steps the schedule allows.

    The bar stands above its numbers: together they are too wide for most terminals.
    """

    def __init__(self, console: Console, step: int, last_step: int) -> None:
        columns = (TextColumn("step"), BarColumn(), MofNCompleteColumn())
        hidden = not console.is_terminal
        # Twice a second is enough to look at, and leaves a small machine to its training.
        super().__init__(*columns, console=console, refresh_per_second=2, disable=hidden)
        self._bar = self.add_task("", total=last_step, completed=step, text="")
        self._last_step, self._said = last_step, time.monotonic()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            yield Text(task.fields["text"], no_wrap=True, overflow="ellipsis")

    def show(self, step: int, reading: Numbers, validation: Numbers, *, now: bool = False) -> None:
        """Update the live line, or print a plain one if `now` or if the last is long ago."""
        text = self._text(step, reading, validation)
        if not self.disable:
            self.update(self._bar, completed=step, text=text)
        elif now or time.monotonic() - self._said >= QUIET:
            self._said = time.monotonic()
            self.say(f"step {step:,} of {self._last_step:,}: {text}")

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _text(self, step: int, reading: Numbers, validation: Numbers) -> str:
        parts = [f"loss {reading['loss']:.3e}"]
        if validation:
            # The first is what the loss measures; what others measure is said.
            (_, first), *others = validation.items()
            parts.append(f"validation {first:.5f}")
            parts += [f"{in_words(name)} {error:.5f}" for name, error in others]
        rate = reading["steps_per_second"]
        parts += [f"rate {reading['learning_rate']:.1e}", f"{rate:.1f} steps/s"]
        if rate > 0:
            # Most schedules may stop earlier, so this is the longest it can take.
            seconds = (self._last_step - step) / rate
            parts.append(f"at most {duration(seconds)} left")
        return ", ".join(parts)


class Log:
    """Averages what the trainer has read; every process keeps one, so that all do the same."""

    def __init__(self, trainer: Trainer, metrics: MetricsLog | None, progress: Progress) -> None:
        self.trainer, self.metrics, self.progress = trainer, metrics, progress
        self._logged_step = trainer.state.step
        self._logged_seconds = trainer.state.training_seconds

    def read(self, *, write: bool) -> Numbers:
        """Means over the steps since the last log line; `write` makes a line of them."""
        state = self.trainer.state
        loss, norm = (sum(each) / len(each) for each in zip(*state.pending, strict=True))
        seconds = state.training_seconds - self._logged_seconds
        reading = {
            "loss": loss,
            "gradient_norm": norm,
            "learning_rate": self.trainer.optimizer.param_groups[0]["lr"],
            "steps_per_second": (state.step - self._logged_step) / max(seconds, 1e-9),
            "seconds": state.training_seconds + state.other_seconds,
        }
        if write:
            if self.metrics is not None:
                self.metrics.add("training", state.step, reading)
            state.pending.clear()
            self._logged_step, self._logged_seconds = state.step, state.training_seconds
        return reading

    def validated(self) -> None:
        state = self.trainer.state
        if self.metrics is not None and state.best is not None:
            (step, error), (_, best) = state.history[-1], state.best
            self.metrics.add("validation", step, {"error": error, "best": best} | state.errors)
