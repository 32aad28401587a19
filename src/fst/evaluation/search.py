"""A learning-rate search as one table: each rate with its validation errors, and the conclusion."""

from dataclasses import dataclass
from typing import Any

from fst.evaluation.tables import NOTHING, Table, number
from fst.pretrained import to_json
from fst.terminal import markdown

CHECKS = 3
"""Validation errors, the last ones, that the score of a trial is the mean of."""


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
    """How a search stands."""

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
        lines = [_line(trial, "selected" * (trial.rate == self.selected)) for trial in self.trials]
        if self.confirmation is not None:
            verdict = "confirmed" if self.confirmed else "not confirmed"
            lines.append(_line(self.confirmation, verdict))
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

    def markdown(self) -> str:
        table, conclusion = self.table(), markdown(self.conclusion())
        return f"# {markdown(table.title)}\n\n{table.markdown()}\n{conclusion}\n"

    def to_json(self) -> dict[str, Any]:
        found = {"confirmed": self.confirmed, "conclusion": self.conclusion()}
        return to_json(self) | found


def _line(trial: Trial, verdict: str) -> tuple[str, ...]:
    lowest = min((error for _, error in trial.errors), default=None)
    score = NOTHING if trial.score is None else number(trial.score)
    return f"{trial.rate:g}", f"{trial.steps:,}", score, number(lowest), trial.note or verdict
