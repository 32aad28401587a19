"""Result rows as tables: the paper's number beside ours, for a terminal, Markdown and HTML."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from jinja2 import Environment
from markupsafe import Markup
from rich.box import SIMPLE_HEAD
from rich.table import Table as TerminalTable
from rich.text import Text

from fst.evaluation.rows import Row
from fst.terminal import markdown, printable

NOTHING = "–"

Item = TypeVar("Item")


@dataclass(frozen=True)
class Table:
    """Cells of text. The first `words` columns are aligned left, the numbers after them right."""

    title: str
    header: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    words: int = 1

    def terminal(self) -> TerminalTable:
        table = TerminalTable(
            title=Text(printable(self.title)),
            title_justify="left",
            header_style="bold",
            box=SIMPLE_HEAD,
        )
        for index, name in enumerate(self.header):
            table.add_column(Text(name), justify="left" if index < self.words else "right")
        for line in self.lines:
            table.add_row(*(Text(printable(cell)) for cell in line))
        return table

    def markdown(self) -> str:
        rule = [":---" if index < self.words else "---:" for index in range(len(self.header))]
        lines = [self.header, tuple(rule), *self.lines]
        return "\n".join("| " + " | ".join(map(markdown, line)) + " |" for line in lines) + "\n"

    def html(self) -> Markup:
        return Markup(_HTML.render(table=self))


_HTML = Environment(autoescape=True, trim_blocks=True).from_string("""
{%- macro line(cells, tag) -%}
<tr>
{%- for cell in cells -%}
<{{ tag }}{% if loop.index0 >= table.words %} class="number"{% endif %}>{{ cell }}</{{ tag }}>
{%- endfor -%}
</tr>
{%- endmacro -%}
<table>
<caption>{{ table.title }}</caption>
<thead>{{ line(table.header, "th") }}</thead>
<tbody>
{% for cells in table.lines %}
{{ line(cells, "td") }}
{% endfor %}
</tbody>
</table>
""")


def error_table(rows: Sequence[Row]) -> Table:
    """One line a row: ours, the paper's, and how far apart they are.

    Columns that would be empty, about neighbours or about the paper, are left out.
    """
    swept = {_identity(row) for row in rows if row.neighbors is not None}
    quoted = any(row.paper_error is not None for row in rows)
    header = ["Model", "Test grid", "Samples", "Ours"]
    header[2:2] = ["Anchors"] if swept else []
    header += ["Paper", "Change"] if quoted else []
    lines = []
    for row in rows:
        line = [row.model, grid_name(row.grid), f"{row.samples:,}", number(row.error)]
        if swept:
            whole = "all" if _identity(row) in swept else NOTHING
            line.insert(2, whole if row.neighbors is None else str(row.neighbors))
        if quoted:
            line += [number(row.paper_error), difference(row.error, row.paper_error)]
        lines.append(tuple(line))
    recipes = ", ".join(unique(row.recipe for row in rows))
    title = f"{recipes}: mean relative L2 error on the test set"
    return Table(title, tuple(header), tuple(lines), words=2)


def grid_table(rows: Iterable[Row]) -> Table:
    """One line a model and one column a grid, ours with the paper's in brackets (Table 3)."""
    rows = [row for row in rows if row.neighbors is None]
    grids = unique(row.grid for row in rows)
    lines = []
    for those in by_model(rows).values():
        found = {row.grid: row for row in those}
        cells = [_with_paper(found.get(grid)) for grid in grids]
        row = those[0]
        lines.append((row.model, row.run, parameters(row.parameters), f"{row.samples:,}", *cells))
    title = "Mean relative L2 error on the test set by test grid"
    if any(row.paper_error is not None for row in rows):
        title += ": ours, and the paper's in brackets"
    header = ("Model", "Run", "Parameters", "Samples", *map(grid_name, grids))
    return Table(title, header, tuple(lines), words=2)


def viscosity_table(rows: Iterable[Row]) -> Table | None:
    """One line a viscosity and one column a model (Table 19); None with fewer than two groups."""
    grouped = [row for row in full_grid(rows) if len(row.groups) > 1]
    if not grouped:
        return None
    columns: list[tuple[str, dict[str, float | None]]] = []
    for row in grouped:
        ours = {group.name: group.error for group in row.groups}
        columns.append((f"{row.model}, ours", {**ours, "all": row.error}))
        paper = {group.name: group.paper_error for group in row.groups}
        if any(paper.values()):
            columns.append((f"{row.model}, paper", {**paper, "all": row.paper_error}))
    names = unique(group.name for row in grouped for group in row.groups)
    lines = [
        (name, *(number(errors.get(name)) for _, errors in columns)) for name in (*names, "all")
    ]
    title = f"Mean relative L2 error by viscosity on the {grid_name(grouped[0].grid)} grid"
    return Table(title, ("ν", *(name for name, _ in columns)), tuple(lines))


def cost_table(rows: Iterable[Row]) -> Table:
    """What each model cost to train, and where."""
    lines, rows = [], list(rows)
    pictured = any(row.training and row.training.images_per_second for row in rows)
    for those in by_model(rows).values():
        row, cost = those[0], those[0].training
        if cost is None:
            continue
        rate = f"{cost.images_per_second:,.0f}" if cost.images_per_second else NOTHING
        memory = NOTHING if cost.peak_memory_gib is None else f"{cost.peak_memory_gib:.1f} GiB"
        chosen = NOTHING if cost.selected_step is None else f"{cost.selected_step:,}"
        lines.append(
            (
                row.model,
                row.run,
                cost.device,
                parameters(row.parameters),
                f"{cost.steps:,}",
                chosen,
                duration(cost.seconds),
                f"{cost.steps_per_second:.1f}",
                *([rate] if pictured else []),
                memory,
            )
        )
    header = ("Model", "Run", "Hardware", "Parameters", "Steps", "Selected step")
    more = ("Time", "Steps/s", *(["Images/s"] if pictured else []), "Peak memory")
    return Table("Training cost", (*header, *more), tuple(lines), words=3)


def by_model(rows: Iterable[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Rows of the same scored model together, in the order in which they came."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(_identity(row), []).append(row)
    return found


def _identity(row: Row) -> tuple[str, ...]:
    return row.run, row.recipe, row.model, row.protocol


def full_grid(rows: Iterable[Row]) -> list[Row]:
    """Each model's row on its last grid, decoded from all anchors."""
    return [
        [row for row in those if row.neighbors is None][-1] for those in by_model(rows).values()
    ]


def unique(items: Iterable[Item]) -> list[Item]:
    return list(dict.fromkeys(items))


def number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.5f}"


def difference(ours: float, paper: float | None) -> str:
    return NOTHING if not paper else f"{100 * (ours - paper) / paper:+.1f} %"


def grid_name(grid: tuple[int, ...] | None) -> str:
    return "points" if grid is None else "×".join(map(str, grid))


def parameters(count: int) -> str:
    return f"{count:,}" if count else NOTHING


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def _with_paper(row: Row | None) -> str:
    if row is None:
        return NOTHING
    return number(row.error) + (f" ({number(row.paper_error)})" if row.paper_error else "")
