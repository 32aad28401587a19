"""Result rows as tables: the paper's number beside ours, for a terminal, Markdown and HTML."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from jinja2 import Environment, FileSystemLoader, select_autoescape
from markupsafe import Markup
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import JustifyMethod
from rich.table import Table as TerminalTable
from rich.text import Text

from fst.evaluation.rows import NOTHING, Item, Row, grouped
from fst.terminal import duration, markdown, printable

# Tables by group are read, so they end where nobody would read on.
MOST_GROUPS = 50
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=select_autoescape(["html"]),
    trim_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.filters["markdown"] = markdown


@dataclass(frozen=True)
class Table:
    """Cells of text. The first `words` columns are aligned left, the numbers after them right."""

    title: str
    header: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    words: int = 1

    @classmethod
    def of(cls, title: str, columns: Mapping[str, Sequence[str]], words: int = 1) -> Self:
        """A table of these columns; those that hold nothing are left out."""
        kept = {name: cells for name, cells in columns.items() if set(cells) - {NOTHING}}
        return cls(title, tuple(kept), tuple(zip(*kept.values(), strict=True)), words)

    def terminal(self, *, compact: bool = False) -> TerminalTable:
        """With its title or, if `compact`, without it and so narrow that no number is cut."""
        table = TerminalTable(
            title=None if compact else Text(printable(self.title)),
            title_justify="left",
            header_style="bold",
            box=SIMPLE_HEAD,
            show_edge=not compact,
            padding=0 if compact else (0, 1),
        )
        for index, name in enumerate(self.header):
            side: JustifyMethod = "left" if index < self.words else "right"
            table.add_column(Text(name), justify=side, no_wrap=compact)
        for line in self.lines:
            below = "dim" if compact and line[0].startswith(" ") else None
            table.add_row(*(Text(printable(cell)) for cell in line), style=below)
        if compact:
            longest = [max(map(cell_len, "\n".join(column).split("\n")))
                       for column in zip(self.header, *self.lines, strict=True)]  # fmt: skip
            table.width = sum(longest) + len(longest) - 1
        return table

    @property
    def heading(self) -> tuple[str, ...]:
        """The header in one line: narrow ones are broken for a terminal."""
        return tuple(
            name.replace("-\n", "").replace("\n/", "/").replace("\n", " ") for name in self.header
        )

    def markdown(self) -> str:
        rule = [":---" if index < self.words else "---:" for index in range(len(self.header))]
        lines = [self.heading, tuple(rule), *self.lines]
        return "\n".join("| " + " | ".join(map(markdown, line)) + " |" for line in lines) + "\n"

    def html(self) -> Markup:
        return Markup(TEMPLATES.get_template("table.html").render(table=self))


def error_table(rows: Sequence[Row]) -> Table:
    """One line a row: ours, the paper's, and how far apart they are."""
    swept = {_identity(row) for row in rows if row.neighbors is not None}
    measure = rows[0].measure
    what, ours, paper, change = measure.header

    def decoded(row: Row) -> str:
        whole = "all" if _identity(row) in swept else NOTHING
        return whole if row.neighbors is None else str(row.neighbors)

    columns = {
        "Model": [row.model for row in rows],
        what: [row.column for row in rows],
        "Anchors": [decoded(row) for row in rows],
        measure.samples: [f"{row.samples:,}" for row in rows],
        ours: [row.measure.text(row.error) for row in rows],
        paper: [row.measure.text(row.paper_error) for row in rows],
        change: [row.measure.difference(row.error, row.paper_error) for row in rows],
        "RMSE / std": [shown(row.std_error, ".3f") for row in rows],
    }
    recipes = ", ".join(unique(row.recipe for row in rows))
    return Table.of(f"{recipes}: {measure.title} on the test set", columns, words=2)


def grid_table(rows: Iterable[Row]) -> Table:
    """One line a model and one column a grid or accuracy, the paper's in brackets (Table 3, 8)."""
    rows = [row for row in rows if row.neighbors is None]
    models = [{row.column: row for row in those} for those in by_model(rows).values()]
    first = [next(iter(found.values())) for found in models]
    measure = rows[0].measure
    columns = {
        "Model": [row.model for row in first],
        "Run": [row.run for row in first],
        "Parameters": [shown(row.parameters or None) for row in first],
        measure.samples: [f"{row.samples:,}" for row in first],
    }
    for name in unique(row.column for row in rows):
        columns[name] = [_with_paper(found.get(name)) for found in models]
    columns["RMSE / std"] = [shown([*found.values()][-1].std_error, ".3f") for found in models]
    quoted = any(row.paper_error is not None for row in rows)
    title = measure.title[0].upper() + measure.title[1:] + " on the test set"
    title += ": ours, and the paper's in brackets" if quoted else ""
    return Table.of(title, columns, words=2)


def channel_table(rows: Iterable[Row]) -> Table | None:
    """Each target channel by itself, on the last grid; None where there is one without a std."""
    scored = [(row, each) for row in full_grid(rows) for each in row.channels]
    if not any(each.std for _, each in scored):
        return None
    several = len({row.run for row, _ in scored}) > 1
    lines = unique(  # a trivial predictor is the same beside every run
        (
            row.model,
            row.run if several and not row.trivial else NOTHING,
            each.name + f" ({each.unit})" * bool(each.unit),
            row.measure.text(each.error),
            f"{each.rmse:.4g}",
            shown(each.std, ".4g"),
            shown(each.rmse / each.std if each.std else None, ".3f"),
        )
        for row, each in scored
    )
    names = ("Model", "Run", "Target", "Relative L2", "RMSE", "Standard deviation", "RMSE / std")
    columns = dict(zip(names, zip(*lines, strict=True), strict=True))
    title = "Each target by itself: errors in its unit and relative to its standard deviation"
    return Table.of(title, columns, words=2 + several)


def group_table(rows: Iterable[Row]) -> Table | None:
    """A line per viscosity or class, a column per model (Table 19); None with one or too many."""
    grouped = [row for row in full_grid(rows) if len(row.groups) > 1 and not row.trivial]
    names = unique(group.name for row in grouped for group in row.groups)
    if not 1 < len(names) <= MOST_GROUPS:
        return None
    repeated = len({row.model for row in grouped}) < len(grouped)
    measure = grouped[0].measure
    counts = {group.name: group.samples for row in grouped for group in row.groups}
    columns = {
        measure.group: [*names, "all"],
        measure.samples: [f"{counts[name]:,}" for name in names] + [f"{grouped[0].samples:,}"],
    }
    for row in grouped:
        model = f"{row.model} ({row.run})" if repeated else row.model
        groups = {group.name: group for group in row.groups}
        ours = [groups[name].error if name in groups else None for name in names]
        paper = [groups[name].paper_error if name in groups else None for name in names]
        columns[f"{model}, ours"] = list(map(measure.text, [*ours, row.error]))
        if any(paper):
            columns[f"{model}, paper"] = list(map(measure.text, [*paper, row.paper_error]))
    title = f"By {measure.group.lower()}: {measure.title} ({grouped[0].column})"
    return Table.of(title, columns, words=1)


def cost_table(rows: Iterable[Row]) -> Table:
    """What each model cost to train, and where."""
    trained = [those[0] for those in by_model(rows).values()]
    costs = [(row, row.training) for row in trained if row.training is not None]
    columns = {
        "Model": [row.model for row, _ in costs],
        "Run": [row.run for row, _ in costs],
        "Hardware": [cost.device for _, cost in costs],
        "Parameters": [shown(row.parameters or None) for row, _ in costs],
        "Steps": [f"{cost.steps:,}" for _, cost in costs],
        "Selected step": [shown(cost.selected_step) for _, cost in costs],
        "Time": [duration(cost.seconds) for _, cost in costs],
        "Steps/s": [f"{cost.steps_per_second:.1f}" for _, cost in costs],
        "Images/s": [shown(cost.images_per_second) for _, cost in costs],
        "Peak memory": [shown(cost.peak_memory_gib, ".1f", " GiB") for _, cost in costs],
    }
    return Table.of("Training cost", columns, words=3)


def by_model(rows: Iterable[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Rows of the same scored model together, in the order in which they came."""
    return grouped(rows, _identity)


def _identity(row: Row) -> tuple[str, ...]:
    return row.run, row.recipe, row.model, row.protocol


def full_grid(rows: Iterable[Row]) -> list[Row]:
    """Each model's row on its last grid, decoded from all anchors; of accuracies the first."""
    models = [[row for row in those if row.neighbors is None] for those in by_model(rows).values()]
    return [next((r for r in those if r.metric == "top1_error"), those[-1]) for those in models]


def unique(items: Iterable[Item]) -> list[Item]:
    return list(dict.fromkeys(items))


def shown(value: float | None, form: str = ",.0f", unit: str = "") -> str:
    """A number in a format of Python's; a dash where there is none."""
    return NOTHING if value is None else format(value, form) + unit


def _with_paper(row: Row | None) -> str:
    if row is None:
        return NOTHING
    quoted = "" if row.paper_error is None else f" ({row.measure.text(row.paper_error)})"
    return row.measure.text(row.error) + quoted
