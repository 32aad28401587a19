"""Result rows: one test error of one model, and where it came from.

A run's rows are one JSON file, a list with one row a line. Everything a table shows is in the
rows; the mean and the group means are checked against the per-sample errors when rows are read.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fst.data.files import DataError, reading, writing
from fst.io import parse_json, write_atomically
from fst.pretrained import from_json, to_json

# Significant digits that give a float32 back exactly.
DIGITS = 9

NOTHING = "–"
Grid = tuple[int, ...] | None


class Metric(ABC):
    """What an error is, and how tables show it."""

    title: str
    samples: str
    group: str
    header: tuple[str, str, str, str]
    """Names of the columns: what was scored, our number, the paper's, and their difference."""
    loss: str
    """What training minimised, and what it was validated by, for the axes of its curves."""
    validation: str

    @abstractmethod
    def column(self, grid: Grid) -> str:
        """What was scored, as the heading of a column."""

    @abstractmethod
    def text(self, value: float | None) -> str: ...

    @abstractmethod
    def spread(self, value: float) -> str:
        """A standard deviation, in the units of `text`."""

    @abstractmethod
    def difference(self, ours: float, paper: float | None) -> str: ...

    @abstractmethod
    def sentence(self, error: float) -> str:
        """What an error means, as the part of a sentence that follows the name of a model."""

    def better(self, error: float, other: float) -> str:
        """How a lower error stands to another."""
        del error, other
        return "compared with"


class RelativeError(Metric):
    """‖prediction − target‖ / ‖target‖."""

    title, samples, group = "mean relative L2 error", "Samples", "ν"
    header = ("Test grid", "Ours", "Paper", "Change")
    loss, validation = "mean squared relative L2", "mean relative L2"

    def column(self, grid: Grid) -> str:
        return "points" if grid is None else "×".join(map(str, grid))

    def text(self, value: float | None) -> str:
        return NOTHING if value is None else f"{value:.5f}"

    def spread(self, value: float) -> str:
        return self.text(value)

    def difference(self, ours: float, paper: float | None) -> str:
        return NOTHING if not paper else f"{100 * (ours - paper) / paper:+.1f} %"

    def sentence(self, error: float) -> str:
        return f"has a mean relative L2 error of {error:.5f}"

    def better(self, error: float, other: float) -> str:
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


RELATIVE_L2 = "relative_l2"
ACCURACIES = {"top1_error": Accuracy("Top-1"), "top5_error": Accuracy("Top-5")}
METRICS: dict[str, Metric] = {RELATIVE_L2: RelativeError(), **ACCURACIES}


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
    """Of training; for classifiers."""


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


@dataclass(frozen=True)
class Curves:
    """The course of a training run: (step, value) pairs, possibly none."""

    loss: tuple[tuple[int, float], ...] = ()
    validation: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class ChannelError:
    """One target channel by itself.

    `rmse` is in the unit of the channel; `std` is the standard deviation of its training targets,
    where it is known.
    """

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


@dataclass(frozen=True)
class Row:
    """One error: `error` is the mean of `errors`, which follow the order of the test split.

    `grid` is None where the test points form no grid. `neighbors` is None where every anchor
    takes part in decoding. `protocol` identifies the weights and the settings of the evaluation.
    `metric` says what an error is: the relative L2 of a solution or, for a classifier, 1 where
    the class of an image is not among its first guess (`top1_error`) or five (`top5_error`).
    """

    run: str
    recipe: str
    task: str
    model: str
    seed: int | None
    git_hash: str | None
    parameters: int
    split: str
    grid: tuple[int, ...] | None
    neighbors: int | None
    samples: int
    error: float
    paper_error: float | None
    errors: tuple[float, ...]
    groups: tuple[GroupError, ...]
    protocol: str
    fst_version: str
    torch_version: str
    device: str
    training: TrainingCost | None
    metric: str = RELATIVE_L2
    channels: tuple[ChannelError, ...] = ()
    data: str = ""

    @property
    def measure(self) -> Metric:
        return METRICS[self.metric]

    @property
    def column(self) -> str:
        return self.measure.column(self.grid)

    @property
    def trivial(self) -> bool:
        """Whether this is a predictor without parameters."""
        return self.parameters == 0

    @property
    def std_error(self) -> float | None:
        """Root mean square over channels of rmse / std: 1 is as good as the mean of the targets."""
        shares = [each.rmse / each.std for each in self.channels if each.std]
        return math.sqrt(mean([share**2 for share in shares])) if shares else None


def check(row: Row) -> None:
    """Raise unless the means are those of the per-sample errors: rows may be edited by hand."""
    if row.metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {row.metric!r}")
    if row.samples != len(row.errors) or not row.errors:
        raise ValueError(f"samples is {row.samples}, but errors holds {len(row.errors)}")
    if not all(math.isfinite(error) and error >= 0 for error in row.errors):
        raise ValueError("errors must be finite and not negative")
    _check_mean("errors", mean(row.errors), row)
    if row.groups:
        if sum(group.samples for group in row.groups) != row.samples:
            raise ValueError(f"groups must hold all {row.samples} samples between them")
        total = math.fsum(group.samples * group.error for group in row.groups)
        _check_mean("groups", total / row.samples, row)


def _check_mean(name: str, found: float, row: Row) -> None:
    if not math.isclose(row.error, found, rel_tol=1e-6, abs_tol=1e-12):
        raise ValueError(f"error is {row.error}, but the mean of {name} is {found}")


def mean(errors: Sequence[float]) -> float:
    return math.fsum(errors) / len(errors)


def shortened(value: float) -> float:
    """The number with the digits a float32 has: rows stay readable and lose nothing."""
    return float(f"{value:.{DIGITS}g}")


def group_errors(
    errors: Sequence[float], groups: Sequence[str] | None, paper: dict[str, float]
) -> tuple[GroupError, ...]:
    """Means over the samples of each group, in the order in which the groups appear."""
    if groups is None:
        return ()
    named = {_same(name): error for name, error in paper.items()}
    members: dict[str, list[float]] = {}
    for error, name in zip(errors, groups, strict=True):
        members.setdefault(name, []).append(error)
    return tuple(
        GroupError(name, len(those), mean(those), named.get(_same(name)))
        for name, those in members.items()
    )


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
    lines = ",\n".join(json.dumps(to_json(row), allow_nan=False) for row in rows)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, f"[\n{lines}\n]\n".encode())


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
