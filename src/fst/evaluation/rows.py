"""Result rows (one test error of one model, and where it came from) and their store in a run.

RUN/results/rows.json    the result rows: a JSON list with one row a line
RUN/results/fields.npz   a few samples seen closely, for the figures

Everything a table shows is in the rows; the mean and the group means are checked against the
per-sample errors when rows are read. No model is loaded here.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

from fst.data.files import DataError, reading, writing
from fst.evaluation.fields import SavedFields, read_fields, save_fields
from fst.io import parse_json, read_object, write_list
from fst.metrics import in_words
from fst.pretrained import PretrainedError, from_json, to_json
from fst.terminal import one_line
from fst.training.schedules import History

NOTHING = "–"
Grid = tuple[int, ...] | None
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
RESULTS, ROWS, FIELDS = "results", "rows.json", "fields.npz"
# Log lines that a median is worth taking of.
FEWEST_LINES = 5


class EvaluationError(ValueError):
    """A model cannot be scored; the message is one clear line for the user."""


class Metric:
    """What an error is, and how tables show it: ‖prediction − target‖ / ‖target‖."""

    title, samples, group = "mean relative L2 error", "Samples", "ν"
    header = ("Test grid", "Ours", "Paper", "Change")
    """Names of the columns: what was scored, our number, the paper's, and their difference."""
    loss, validation = "mean squared relative L2", "mean relative L2"
    """What training minimised, and what it was validated by, for the axes of its curves."""

    def column(self, grid: Grid) -> str:
        """What was scored, as the heading of a column."""
        return "points" if grid is None else "×".join(map(str, grid))

    def text(self, value: float | None) -> str:
        return NOTHING if value is None else f"{value:.5f}"

    def spread(self, value: float) -> str:
        """A standard deviation, in the units of `text`."""
        return self.text(value)

    def difference(self, ours: float, paper: float | None) -> str:
        return NOTHING if not paper else f"{100 * (ours - paper) / paper:+.1f} %"

    def sentence(self, error: float) -> str:
        """What an error means, as the part of a sentence that follows the name of a model."""
        return f"has a mean relative L2 error of {error:.5f}"

    def better(self, error: float, other: float) -> str:
        """How a lower error stands to another."""
        return f"{other / error:.1f} times lower than" if error else "far below"


@dataclass(frozen=True)
class Accuracy(Metric):
    """A share of wrong answers, shown as the accuracy that it leaves, in percent."""

    name: str
    title, samples, group = "accuracy in percent", "Images", "Class"
    header = ("Accuracy", "Ours (%)", "Paper (%)", "Points")
    loss, validation = "cross-entropy", "share of wrong first guesses"

    def column(self, grid: Grid) -> str:
        return self.name

    def text(self, value: float | None) -> str:
        return NOTHING if value is None else f"{100 * (1 - value):.3f}"

    def spread(self, value: float) -> str:
        return f"{100 * value:.3f}"

    def difference(self, ours: float, paper: float | None) -> str:
        return NOTHING if paper is None else f"{100 * (paper - ours):+.3f}"

    def sentence(self, error: float) -> str:
        return f"names the right class of {100 * (1 - error):.2f} % of the images ({self.name})"

    def better(self, error: float, other: float) -> str:
        return "compared with"


RELATIVE_L2 = "relative_l2"
ACCURACIES = {"top1_error": Accuracy("Top-1"), "top5_error": Accuracy("Top-5")}
METRICS: dict[str, Metric] = {RELATIVE_L2: Metric(), **ACCURACIES}


class Scored:
    """An error by one metric, on one grid where there is any."""

    metric: str
    grid: Grid

    @property
    def measure(self) -> Metric:
        return METRICS[self.metric]

    @property
    def column(self) -> str:
        return self.measure.column(self.grid)


@dataclass(frozen=True)
class TrainingCost:
    """What the weights cost to train."""

    steps: int
    seconds: float
    steps_per_second: float
    device: str
    selected_step: int | None = None
    peak_memory_gib: float | None = None
    images_per_second: float | None = None


@dataclass(frozen=True)
class Origin:
    """Where a scored model came from; `run` is the name of its folder."""

    run: str
    recipe: str
    task: str
    model: str
    seed: int | None = None
    git_hash: str | None = None
    training: TrainingCost | None = None
    data: str = ""
    """By which a user's own data are told from others of the same task."""
    protocol: str = ""
    """Identifies the weights and the settings of the evaluation."""


@dataclass(frozen=True)
class Curves:
    """The course of a training run: (step, value) pairs, possibly none."""

    loss: History = ()
    validation: History = ()
    measure: str | None = None
    """What was minimised and validated by, where it is not the measure of the test."""


@dataclass(frozen=True)
class ChannelError:
    """One target channel alone: `rmse` in its unit; `std` of its training targets, where known."""

    name: str
    unit: str
    error: float | None
    rmse: float
    std: float | None = None


@dataclass(frozen=True)
class GroupError:
    """The mean error of one group of test samples, such as one viscosity."""

    name: str
    samples: int
    error: float
    paper_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row(Scored, Origin):
    """One error: `error` is the mean of `errors`, which follow the order of the test split.

    `grid` is None where the test points form no grid. `neighbors` is None where every anchor
    takes part in decoding. `metric` says what an error is: the relative L2 of a solution or, for
    a classifier, 1 where the class of an image is not among its first guess (`top1_error`) or
    five (`top5_error`).
    """

    parameters: int
    split: str = "test"
    grid: tuple[int, ...] | None = None
    neighbors: int | None = None
    samples: int
    error: float
    paper_error: float | None
    errors: tuple[float, ...]
    groups: tuple[GroupError, ...]
    fst_version: str
    torch_version: str
    device: str
    metric: str = RELATIVE_L2
    channels: tuple[ChannelError, ...] = ()

    @property
    def trivial(self) -> bool:
        """Whether this is a predictor without parameters."""
        return self.parameters == 0

    @property
    def std_error(self) -> float | None:
        """Root mean square over channels of rmse / std: 1 is as good as the mean of the targets."""
        shares = [each.rmse / each.std for each in self.channels if each.std]
        return math.sqrt(fmean(share**2 for share in shares)) if shares else None


def check(row: Row) -> None:
    """Raise unless the means are those of the per-sample errors: rows may be edited by hand."""
    if row.metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {row.metric!r}")
    if row.samples != len(row.errors) or not row.errors:
        raise ValueError(f"samples is {row.samples}, but errors holds {len(row.errors)}")
    if not all(math.isfinite(error) and error >= 0 for error in row.errors):
        raise ValueError("errors must be finite and not negative")
    means = {"errors": fmean(row.errors)}
    if row.groups:
        if sum(group.samples for group in row.groups) != row.samples:
            raise ValueError(f"groups must hold all {row.samples} samples between them")
        total = math.fsum(group.samples * group.error for group in row.groups)
        means["groups"] = total / row.samples
    for name, found in means.items():
        if not math.isclose(row.error, found, rel_tol=1e-6, abs_tol=1e-12):
            raise ValueError(f"error is {row.error}, but the mean of {name} is {found}")


def shortened(value: float) -> float:
    """The number with the nine digits a float32 has: rows stay readable and lose nothing."""
    return float(f"{value:.9g}")


def group_errors(
    errors: Sequence[float], groups: Sequence[str] | None, paper: dict[str, float]
) -> tuple[GroupError, ...]:
    """Means over the samples of each group, in the order in which the groups appear."""
    if groups is None:
        return ()
    named = {_same(name): error for name, error in paper.items()}
    members = grouped(zip(groups, errors, strict=True), lambda pair: pair[0])
    return tuple(
        GroupError(name, len(those), fmean(error for _, error in those), named.get(_same(name)))
        for name, those in members.items()
    )


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items with the same key together, in the order in which the keys appear."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def _same(name: str) -> str:
    """A group that is a number is the same group however the number is written: 1, 1.0."""
    try:
        return f"{float(name):g}"
    except ValueError:
        return name


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Replace the file by these rows, whole or not at all."""
    for row in rows:
        check(row)
    write_list(path, map(to_json, rows))


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, checked field by field."""
    with reading(path, "result rows (JSON)"):
        text = path.read_bytes()
    try:
        data = parse_json(text)
        if not isinstance(data, list) or not all(isinstance(item, dict) for item in data):
            raise ValueError("expected a list of JSON objects")
        rows = [from_json(item, Row, f"row {index}") for index, item in enumerate(data)]
        for row in rows:
            check(row)
    except ValueError as error:
        raise DataError(f"{path}: does not hold result rows: {error}") from None
    if not rows:
        raise DataError(f"{path}: holds no result rows")
    return rows


Scores = tuple[Sequence[Row], SavedFields | None]


def score_once(
    folder: Path, protocol: str, compute: Callable[[], Scores], *, again: bool = False
) -> list[Row]:
    """The rows in `folder`, computed and stored there if it has none.

    Stored rows of another protocol (other weights, or other settings) are an error: choosing
    between them by their test errors would be training on the test set. `again` replaces them.
    """
    path = folder / ROWS
    if path.exists() and not again:
        rows = read_rows(path)
        if {row.protocol for row in rows} == {protocol}:
            return rows
        raise EvaluationError(
            f"{path}: this run was scored before, with other weights or other settings of the "
            "evaluation; a test set is scored once (--again replaces the stored rows)"
        )
    scores, fields = compute()
    if any(row.protocol != protocol for row in scores):
        raise ValueError(f"compute must give rows of protocol {protocol!r}")
    # The rows come last: where they are, the fields beside them are complete and theirs.
    with writing(path):
        path.unlink(missing_ok=True)
        (folder / FIELDS).unlink(missing_ok=True)
    if fields is not None:
        save_fields(folder / FIELDS, fields)
    write_rows(path, scores)
    return list(scores)


@dataclass(frozen=True)
class Run:
    """A scored run, as the report needs it."""

    name: str
    rows: tuple[Row, ...]
    fields: SavedFields | None
    curves: Curves


def not_a_run(folder: Path) -> str:
    """What is wrong with a folder without a recipe, in words."""
    if not folder.is_dir():
        return f"{folder}: there is no such run folder"
    runs = [path.parent.name for path in sorted(folder.glob("*/recipe.json"))]
    inside = f"; it holds the runs {', '.join(runs)}" if runs else ""
    return f"{folder} is no run folder: it has no recipe.json{inside}"


def read_run(folder: Path) -> Run:
    """The rows, fields and curves of a run that `fst evaluate` has scored."""
    results = folder / RESULTS
    if not (results / ROWS).is_file():
        unscored = f"{folder}: has no results yet; score it with: fst evaluate {folder}"
        is_run = (folder / "recipe.json").is_file()
        raise DataError(unscored if is_run else not_a_run(folder))
    saved = results / FIELDS
    return Run(
        folder.resolve().name,
        tuple(read_rows(results / ROWS)),
        read_fields(saved) if saved.is_file() else None,
        read_curves(folder / "metrics.jsonl"),
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl. Those that a killed writer left unfinished are skipped."""
    if not path.is_file():
        return []
    with reading(path, "metrics as JSON lines"):
        lines = path.read_text(errors="replace").splitlines()
    found = []
    for line in lines:
        with suppress(ValueError):
            found.append(parse_json(line))
    return [entry for entry in found if isinstance(entry, dict)]


def read_curves(path: Path, error: str = "error") -> Curves:
    """Loss and validation error by step; `error` names another one that a run may record."""
    entries = read_metrics(path)
    validation = _by_step(entries, "validation", error) or _by_step(entries, "validation", "error")
    # What a run was validated by is told where it records the measure of the test beside it.
    checks = (each for each in entries if each.get("kind") == "validation" and RELATIVE_L2 in each)
    own = next(checks, {}).keys() - {"kind", "step", "error", "best", RELATIVE_L2}
    measure = in_words(own.pop()) if own else None
    return Curves(_by_step(entries, "training", "loss"), validation, measure)


def _by_step(entries: Sequence[dict[str, Any]], kind: str, name: str) -> History:
    """A number of the log lines of one kind; lines without it are skipped."""
    found = []
    for entry in entries:
        with suppress(ValueError, KeyError, TypeError, OverflowError):
            if entry["kind"] == kind:
                found.append((int(entry["step"]), float(entry[name])))
    return tuple(found)


def read_timed_curve(run: Path) -> tuple[tuple[float, float], ...]:
    """Validation errors by the seconds of updates, compilation apart, as spread over the steps."""
    summary = read_object(run / "summary.json")
    steps, seconds = summary.get("steps"), summary.get("update_seconds")
    if not steps or seconds is None:
        return ()
    points = read_curves(run / "metrics.jsonl", RELATIVE_L2).validation
    return tuple(
        (round(step * seconds / steps, 2), float(f"{error:.6g}")) for step, error in points
    )


def steady_rate(run: Path) -> float | None:
    """Updates a second, the median of log lines: without compiling. None where they are few."""
    found = _by_step(read_metrics(run / "metrics.jsonl"), "training", "steps_per_second")
    return median(rate for _, rate in found) if len(found) >= FEWEST_LINES else None


def read_starts(run: Path) -> list[dict[str, Any]]:
    """With what, and on what, a run was started and resumed."""
    environment = read_object(run / "environment.json")
    starts = [environment, *environment.get("resumed", [])] if environment else []
    return [{name: each.get(name) for name in ("hardware", "versions", "git")} for each in starts]


def read_origin(folder: Path, origin: Origin, images: int | None = None) -> Origin:
    """The origin with the commit and the cost that a folder says; a step takes so many `images`."""
    environment = read_object(folder / "environment.json")
    summary = read_object(folder / "summary.json")
    names = ("steps", "seconds", "steps_per_second", "selected_step", "peak_memory_gib")
    try:
        cost, git = None, environment.get("git") or {}
        if "steps" in summary:
            values: dict[str, Any] = {name: summary[name] for name in names if name in summary}
            values["device"] = hardware_name(environment.get("hardware") or {})
            if images is not None:
                values["images_per_second"] = images * summary["steps_per_second"]
            cost = from_json(values, TrainingCost, "summary.json")  # which checks them
        modified = " (modified)" if git.get("modified") else ""
        git_hash = f"{git['commit']}{modified}" if git.get("commit") else None
    except (KeyError, TypeError, AttributeError, IndexError, PretrainedError) as error:
        files = "environment.json or summary.json"
        raise DataError(f"{folder}: {files} is damaged ({one_line(error)})") from None
    return replace(origin, git_hash=git_hash, training=cost)


def hardware_name(hardware: dict[str, Any]) -> str:
    """The hardware in a few words; a GPU that was there but not used cannot be told apart."""
    processes = hardware.get("processes", 1)
    if hardware.get("gpus"):
        name = hardware["gpus"][0]["name"]
        return name if processes == 1 else f"{processes} × {name}"
    threads = hardware.get("threads")
    unit = "thread" if threads == 1 else "threads"
    return f"CPU {hardware.get('machine', '')}, {threads} {unit}"
