"""What a run says about itself while it goes: to its records and to the screen.

Every process keeps a journal, so that all do the same; only the main one has records and a screen.
"""

import time

from fst.training.progress import Progress, Reading
from fst.training.records import Records
from fst.training.trainer import Trainer


class Stopwatch:
    """Seconds between one call and the next."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    @property
    def running(self) -> float:
        return time.monotonic() - self._start

    def lap(self) -> float:
        now = time.monotonic()
        passed, self._start = now - self._start, now
        return passed


class Journal:
    """Averages what the trainer has read and passes it on."""

    def __init__(self, trainer: Trainer, records: Records | None, progress: Progress) -> None:
        self.trainer = trainer
        self.records = records
        self.progress = progress
        self._logged_step = trainer.progression.step
        self._logged_seconds = trainer.progression.training_seconds
        self._reading = Reading(self._logged_step, float("nan"), 0.0, 0.0)

    def read(self) -> None:
        """Take up the losses read since the last log line."""
        progression = self.trainer.progression
        if not progression.pending:
            return
        seconds = progression.training_seconds - self._logged_seconds
        self._reading = Reading(
            step=progression.step,
            loss=self._mean(0),
            learning_rate=self.trainer.optimizer.param_groups[0]["lr"],
            steps_per_second=(progression.step - self._logged_step) / max(seconds, 1e-9),
        )

    def log(self) -> None:
        """Write the means over the steps since the last log line, and begin anew."""
        reading, progression = self._reading, self.trainer.progression
        if self.records is not None:
            values = {
                "loss": reading.loss,
                "gradient_norm": self._mean(1),
                "learning_rate": reading.learning_rate,
                "steps_per_second": reading.steps_per_second,
                "seconds": progression.training_seconds + progression.other_seconds,
            }
            self.records.add("training", progression.step, values)
        progression.pending.clear()
        self._logged_step = progression.step
        self._logged_seconds = progression.training_seconds

    def validated(self) -> None:
        """Write the validation just made."""
        progression = self.trainer.progression
        step, error = progression.history[-1]
        if self.records is not None and progression.best is not None:
            selecting = {"error": error, "best": progression.best[1]}
            self.records.add("validation", step, selecting | progression.errors)

    def show(self, *, validated: bool) -> None:
        errors = tuple(self.trainer.progression.errors.values())
        self.progress.show(self._reading, errors, now=validated)

    def sync(self) -> None:
        """Bring what was written to the disk."""
        if self.records is not None:
            self.records.sync()

    def _mean(self, column: int) -> float:
        pending = self.trainer.progression.pending
        return sum(entry[column] for entry in pending) / len(pending)
