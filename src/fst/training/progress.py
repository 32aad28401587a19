"""How a run is doing: a live line in a terminal, sparse plain lines anywhere else."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as LiveProgress
from rich.text import Text

# Seconds between plain lines, where every line stays in a log.
QUIET = 30.0


@dataclass(frozen=True)
class Reading:
    """The numbers shown."""

    step: int
    loss: float
    learning_rate: float
    steps_per_second: float


class _TwoLines(LiveProgress):
    """The bar above its numbers: together they are too wide for most terminals."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            yield Text(task.fields["text"], no_wrap=True, overflow="ellipsis")


class Progress:
    """Shows readings; `last_step` is the most steps the schedule allows."""

    def __init__(self, console: Console, step: int, last_step: int) -> None:
        self.console = console
        self.last_step = last_step
        self._said = time.monotonic()
        self._live: LiveProgress | None = None
        if console.is_terminal:
            columns = (TextColumn("step"), BarColumn(), MofNCompleteColumn())
            # Twice a second is enough to look at, and leaves a small machine to its training.
            self._live = _TwoLines(*columns, console=console, refresh_per_second=2)
            self._task = self._live.add_task("", total=last_step, completed=step, text="")

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, reading: Reading, validation: tuple[float, ...], *, now: bool = False) -> None:
        """Update the live line, or print a plain one if `now` or if the last is long ago."""
        text = self._text(reading, validation)
        if self._live is not None:
            self._live.update(self._task, completed=reading.step, text=text)
        elif now or time.monotonic() - self._said >= QUIET:
            self._said = time.monotonic()
            self.say(f"step {reading.step:,} of {self.last_step:,}: {text}")

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _text(self, reading: Reading, validation: tuple[float, ...]) -> str:
        parts = [f"loss {reading.loss:.3e}"]
        if validation:
            parts.append("validation " + " / ".join(f"{error:.5f}" for error in validation))
        parts.append(f"rate {reading.learning_rate:.1e}")
        parts.append(f"{reading.steps_per_second:.1f} steps/s")
        if reading.steps_per_second > 0:
            # Most schedules may stop earlier, so this is the longest it can take.
            seconds = (self.last_step - reading.step) / reading.steps_per_second
            parts.append(f"at most {_duration(seconds)} left")
        return ", ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
