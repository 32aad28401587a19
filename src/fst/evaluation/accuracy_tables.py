"""Rows of classifiers as tables: accuracies in percent, the paper's beside ours.

accuracy = 100 (1 - error),    error = share of images whose class was not guessed
"""

from collections.abc import Iterable, Sequence

from fst.evaluation.rows import ACCURACIES, Row
from fst.evaluation.tables import NOTHING, Table, by_model, parameters, unique

# Tables by class are read, so they end where nobody would read on.
MOST_CLASSES = 50


def is_classifier(row: Row) -> bool:
    return row.metric in ACCURACIES


def percent(error: float | None) -> str:
    return NOTHING if error is None else f"{100 * (1 - error):.3f}"


def points(ours: float, paper: float | None) -> str:
    """How many points of accuracy ours lies above the paper's."""
    return NOTHING if paper is None else f"{100 * (paper - ours):+.3f}"


def accuracy_table(rows: Sequence[Row]) -> Table:
    """One line a row, for a terminal."""
    quoted = any(row.paper_error is not None for row in rows)
    header = ["Model", "Accuracy", "Images", "Ours (%)"]
    header += ["Paper (%)", "Points"] if quoted else []
    lines = []
    for row in rows:
        line = [row.model, ACCURACIES[row.metric], f"{row.samples:,}", percent(row.error)]
        if quoted:
            line += [percent(row.paper_error), points(row.error, row.paper_error)]
        lines.append(tuple(line))
    recipes = ", ".join(unique(row.recipe for row in rows))
    title = f"{recipes}: test accuracy"
    return Table(title, tuple(header), tuple(lines), words=2)


def comparison_table(rows: Iterable[Row]) -> Table:
    """One line a model and one column an accuracy, ours with the paper's in brackets (Table 8)."""
    rows = list(rows)
    metrics = [metric for metric in ACCURACIES if any(row.metric == metric for row in rows)]
    lines = []
    for those in by_model(rows).values():
        found = {row.metric: row for row in those}
        cells = [_with_paper(found.get(metric)) for metric in metrics]
        row = those[0]
        lines.append((row.model, row.run, parameters(row.parameters), f"{row.samples:,}", *cells))
    title = "Accuracy on the test images in percent"
    if any(row.paper_error is not None for row in rows):
        title += ": ours, and the paper's in brackets"
    header = ("Model", "Run", "Parameters", "Images", *(ACCURACIES[name] for name in metrics))
    return Table(title, header, tuple(lines), words=2)


def class_table(rows: Iterable[Row]) -> Table | None:
    """Top-1 accuracy of each class, one column a model; None with too many classes to read."""
    scored = [row for row in rows if row.metric == "top1_error" and row.groups]
    names = unique(group.name for row in scored for group in row.groups)
    if not scored or len(names) > MOST_CLASSES:
        return None
    columns = [{group.name: group.error for group in row.groups} for row in scored]
    counts = {group.name: f"{group.samples:,}" for row in scored for group in row.groups}
    lines = [
        (name, counts[name], *(percent(errors.get(name)) for errors in columns)) for name in names
    ]
    header = ("Class", "Images", *(f"{row.model} ({row.run})" for row in scored))
    return Table("Top-1 accuracy of each class in percent", header, tuple(lines))


def _with_paper(row: Row | None) -> str:
    if row is None:
        return NOTHING
    return percent(row.error) + (
        "" if row.paper_error is None else f" ({percent(row.paper_error)})"
    )
