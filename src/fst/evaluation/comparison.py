"""Several models trained on equal terms as one table, and a learning-rate search as another.

Enters: one result for each model and seed, read from its run folder. Leaves: a table with a line
per model (the mean over seeds), under it their spread and the paper's figures, as text for a
terminal, Markdown and JSON.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from rich.console import Console

from fst.evaluation.rows import (
    METRICS,
    NOTHING,
    RELATIVE_L2,
    RESULTS,
    ROWS,
    Metric,
    Scored,
    grouped,
    hardware_name,
    read_rows,
    read_starts,
    read_timed_curve,
    steady_rate,
)
from fst.evaluation.tables import Table, shown, unique
from fst.io import flat, read_object, write_json, write_text
from fst.pretrained import to_json
from fst.terminal import markdown
from fst.training.budget import MOST_WARMUP, Plan

SPREAD, PAPER = "  ±", "  paper"


@dataclass(frozen=True)
class Score(Scored):
    """A test error; the per-sample errors stay with the run."""

    metric: str
    grid: tuple[int, ...] | None
    samples: int
    error: float
    paper_error: float | None


@dataclass(frozen=True)
class Result:
    """One model with one seed: how far it came, what it cost, and its errors."""

    model: str
    """Its name in the recipes; `title` is its name in the paper."""
    title: str
    number: int
    """Of the seed, counted from 1."""
    seed: int
    status: Literal["done", "failed", "waiting"]
    run: str
    learning_rate: float
    predictor_learning_rate: float | None
    parameters: int | None = None
    paper_parameters: int | None = None
    steps: int | None = None
    training_seconds: float | None = None
    """Of the updates alone, with compilation at every start."""
    all_seconds: float | None = None
    """With validation and saving."""
    calibrated_steps_per_second: float | None = None
    steps_per_second: float | None = None
    """Of the updates once the run is under way."""
    images_per_second: float | None = None
    starts: int | None = None
    """How often it was started: once, and again whenever it was resumed."""
    peak_memory_gib: float | None = None
    selected_step: int | None = None
    validation_error: float | None = None
    compiled: bool | None = None
    note: str | None = None
    scores: tuple[Score, ...] = ()
    curve: tuple[tuple[float, float], ...] = ()
    """Seconds of updates, compilation apart, and the validation error then."""

    def planned(self, plan: Plan) -> Self:
        return replace(
            self,
            steps=plan.steps,
            compiled=plan.compiled,
            note=plan.note,
            peak_memory_gib=plan.calibration.peak_memory_gib,
            calibrated_steps_per_second=plan.calibration.steps_per_second,
        )

    def scored(self, run: Path) -> Self:
        """With the cost and the errors of a run that is trained and scored."""
        summary, rows = read_object(run / "summary.json"), read_rows(run / RESULTS / ROWS)
        overall, cost = summary["steps_per_second"], rows[0].training
        rate = steady_rate(run) or overall
        images = None if cost is None else cost.images_per_second
        return replace(
            self,
            status="done",
            parameters=rows[0].parameters,
            steps=summary["steps"],
            training_seconds=summary["steps"] / overall,
            all_seconds=summary["seconds"],
            steps_per_second=rate,
            images_per_second=None if images is None else images / overall * rate,
            starts=len(read_starts(run)),
            selected_step=summary["selected_step"],
            validation_error=summary["validation_error"],
            scores=tuple(
                Score(row.metric, row.grid, row.samples, row.error, row.paper_error)
                for row in rows
                if row.neighbors is None and not row.trivial
            ),
            curve=read_timed_curve(run),
        )


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1_000 else f"{value:,.0f}"


IMAGES = "Images\n/s"
Costs = dict[str, tuple[str, Callable[[float], str]]]
COSTS: Costs = {
    "Steps": ("steps", "{:,.0f}".format),
    "Time\n(s)": ("training_seconds", _short),
    "Steps\n/s": ("steps_per_second", _short),
    IMAGES: ("images_per_second", "{:,.0f}".format),
    "Peak\nGiB": ("peak_memory_gib", "{:.1f}".format),
}
"""Columns about what a model cost: a field of its results, and how their mean is shown."""


@dataclass(frozen=True)
class Comparison:
    task: str
    budget: str
    results: tuple[Result, ...]
    hardware: dict[str, Any]
    versions: dict[str, Any]
    notes: tuple[str, ...] = ()
    commits: tuple[str, ...] = ()
    """Of the source that the runs were started from."""

    @classmethod
    def read(
        cls, folder: Path, task: str, budget: str, results: tuple[Result, ...], *notes: str
    ) -> Self:
        """With the hardware and versions of the runs in a folder; a note names what differs."""
        starts = [start for each in results for start in read_starts(folder / each.run)]
        parts = [flat(start) for start in starts]
        names = {name for each in parts for name in each}
        differing = [n for n in sorted(names) if any(p.get(n) != parts[0].get(n) for p in parts)]
        if differing:
            notes = (*notes, f"Not the same for all runs: {', '.join(differing)}.")
        done = [each for each in results if each.status == "done"]
        if done:
            rows = read_rows(folder / done[0].run / RESULTS / ROWS)
            finest = [row for row in rows if row.trivial and row.grid == rows[0].grid]
            found = (f"{row.model} {row.measure.text(row.error)}" for row in finest)
            if finest:
                notes = (*notes, f"What needs no training, on the same test: {', '.join(found)}.")
        first = starts[0] if starts else {}
        hardware, versions = first.get("hardware") or {}, first.get("versions") or {}
        states = [start.get("git") or {} for start in starts]
        commits = tuple(unique(each["commit"] for each in states if each.get("commit")))
        return cls(task, budget, results, hardware, versions, notes, commits)

    def table(self) -> Table:
        """One line a model, then its spread over several seeds and the paper's figures."""
        columns = unique(score.column for each in self.results for score in each.scores)
        images = any(each.images_per_second is not None for each in self.results)
        costs = {name: cost for name, cost in COSTS.items() if images or name != IMAGES}
        models = grouped(self.results, lambda each: each.model).values()
        lines = tuple(line for those in models for line in _lines(those, costs, columns))
        return Table(self.title, ("Model", "Para-\nmeters", *costs, *columns), lines)

    @property
    def measure(self) -> Metric:
        """What the first score is in."""
        scores = [score for each in self.results for score in each.scores]
        return scores[0].measure if scores else METRICS[RELATIVE_L2]

    @property
    def title(self) -> str:
        what = self.measure.title
        return f"{self.task}, {self.budget} for each model: {what} on the test set"

    def explanations(self) -> list[str]:
        """What a reader of the table must know, a sentence or two each."""
        measured = ""
        if not self.budget.endswith("steps"):
            measured = (
                " in updates on this device. A short measurement of each model gives its steps, so "
                "the time it then takes can differ a little"
            )
        words = [
            f"Budget: {self.budget} for each model{measured}. Validation, saving and the test are "
            "not counted.",
            "Schedule: for every model, in place of its recipe's, a linear warm-up over a tenth of "
            f"its steps (at most {MOST_WARMUP:,}), then one cosine to zero, at the learning rate "
            f"of its recipe: {self._rates()}.",
            "Time and steps/s: of the updates alone.",
        ]
        if any(each.compiled for each in self.results):
            words.append(
                "Compilation comes on top of the budget, again whenever a run is resumed. It is "
                "in the time, not in steps/s, which is the median over the run."
            )
        memory = "Peak: most memory allocated on the GPU by updates, the data on it included."
        paper = "paper: its figures after its own, longer training, on the published data."
        seeds = "±: standard deviation over the seeds of a model; the line above it is their mean."
        if any(each.peak_memory_gib is not None for each in self.results):
            words.append(memory)
        if any(score.paper_error for each in self.results for score in each.scores):
            words.append(paper)
        if len({each.number for each in self.results}) > 1:
            words.append(seeds)
        for each in self.results:
            if each.note is not None:
                which = f", seed {each.number}" if each.status == "failed" else ""
                words.append(f"{each.title}{which}: {each.note}")
        return [*unique(words), *self.notes, self._environment()]

    def show(self, console: Console) -> None:
        console.print(self.title, style="bold", highlight=False)
        # 80 columns hold four test grids.
        console.print(self.table().terminal(compact=True), crop=False)
        for sentence in self.explanations():
            console.print(sentence, style="dim", markup=False, highlight=False)

    def markdown(self) -> str:
        notes = "\n".join(f"- {markdown(sentence)}" for sentence in self.explanations())
        return f"# {markdown(self.title)}\n\n{self.table().markdown()}\n{notes}\n"

    def to_json(self) -> dict[str, Any]:
        names = ("task", "budget", "hardware", "versions", "commits")
        found = {name: getattr(self, name) for name in names}
        rows = [to_json(each) for each in self.results]
        return found | {"explanations": self.explanations(), "rows": rows}

    def _rates(self) -> str:
        found = {}
        for each in self.results:
            found[each.title] = f"{each.title} {each.learning_rate:g}"
            if each.predictor_learning_rate is not None:
                found[each.title] += f" (predictor {each.predictor_learning_rate:g})"
        return ", ".join(found.values())

    def _environment(self) -> str:
        names = [n for n in ("fst", "torch", "neuraloperator") if self.versions.get(n)]
        if not names:
            return "Nothing is trained yet."
        versions = ", ".join(f"{name} {self.versions[name]}" for name in names)
        return f"Made with: {hardware_name(self.hardware)}; {versions}."


def _lines(those: list[Result], costs: Costs, columns: list[str]) -> list[tuple[str, ...]]:
    done = [each for each in those if each.status == "done"]
    first, blank = those[0], [""] * len(costs)
    by_column = grouped((score for each in done for score in each.scores), lambda s: s.column)
    found = [by_column.get(name, []) for name in columns]
    errors = [[score.error for score in scores] for scores in found]
    measures = [METRICS[scores[0].metric if scores else RELATIVE_L2] for scores in found]
    both = list(zip(measures, errors, strict=True))
    line = [first.title, shown(first.parameters)]
    for field, form in costs.values():
        values = [value for each in done if (value := getattr(each, field)) is not None]
        line.append(form(statistics.fmean(values)) if values else NOTHING)
    line += [measure.text(statistics.fmean(each) if each else None) for measure, each in both]
    lines = [tuple(line)]
    if len(done) > 1:
        spread = (measure.spread(statistics.stdev(each)) if each else "" for measure, each in both)
        lines.append((SPREAD, "", *blank, *spread))
    if any(score.paper_error is not None for scores in found for score in scores):
        paper = "" if first.paper_parameters is None else f"{first.paper_parameters:,}"
        quoted = (each[0].measure.text(each[0].paper_error) if each else "" for each in found)
        lines.append((PAPER, paper, *blank, *quoted))
    for status in ("failed", "waiting"):
        count = sum(each.status == status for each in those)
        if count:
            word = status if count == len(those) else f"{count} {status}"
            lines.append((f"  {word}", *[""] * (len(line) - 1)))
    return lines


_ERROR = METRICS[RELATIVE_L2]
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
        return to_json(self) | {"confirmed": self.confirmed, "conclusion": self.conclusion()}


def _line(trial: Trial, verdict: str) -> tuple[str, ...]:
    lowest = min((error for _, error in trial.errors), default=None)
    errors = _ERROR.text(trial.score), _ERROR.text(lowest)
    return f"{trial.rate:g}", f"{trial.steps:,}", *errors, trial.note or verdict


def write_report(path: Path, found: Comparison | Search) -> None:
    """A table as PATH.md and PATH.json."""
    write_text(path.with_name(f"{path.name}.md"), found.markdown())
    write_json(path.with_name(f"{path.name}.json"), found.to_json())
