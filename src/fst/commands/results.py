"""`fst results`: the page of results, its figures and its short form, from the rows that are kept.

RESULTS/records.json                          scored runs (`fst records`)
RESULTS/comparisons/NAME/comparison.json      models on equal terms (`fst compare`)
RESULTS/ablations/rows.jsonl                  benchmarks/ablations.py
RESULTS/pdebench/rows.jsonl                   benchmarks/pdebench_check.py

Leaves: OUT (Markdown), a figure of error over seconds for each comparison in OUT's folder, and the
part of README between two marks. No number on the page is written by hand.
"""

import io
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from fst import pretrained
from fst.commands.records import finest, read_records
from fst.data.files import DataError
from fst.evaluation.comparison import Comparison, Result
from fst.evaluation.figures import error_over_seconds
from fst.evaluation.rows import METRICS, NOTHING, RELATIVE_L2, read_rows
from fst.evaluation.runs import RESULTS, ROWS, read_json
from fst.evaluation.tables import Table, unique
from fst.io import write_text
from fst.recipes import ablation
from fst.terminal import markdown

BEGIN, END = "<!-- written by fst results -->", "<!-- end of results -->"
COMMIT = 10  # characters of it that are shown
Values = dict[str, Any]


class Claim(NamedTuple):
    """The paper finds one ablation better than another."""

    words: str
    better: str
    worse: str


CLAIMS = (
    Claim("Adaptive coordinates (32×32)", "anchors-adaptive-fixed-32", "anchors-uniform-fixed-32"),
    Claim("Even coordinates (16×16)", "anchors-uniform-fixed-16", "anchors-adaptive-fixed-16"),
    Claim("Fixed length scales", "anchors-adaptive-fixed-32", "anchors-adaptive-adaptive-32"),
    Claim("Update in function space", "anchors-adaptive-fixed-32", "update-anchor-attention"),
    Claim("Four refinement steps, not one", "refine-4", "refine-1"),
    Claim("Four refinement steps, not eight", "refine-4", "refine-8"),
    Claim("Observations in every step", "refine-4", "observe-first"),
)  # fmt: skip


def write_results(results: Path, out: Path, readme: Path | None = None) -> list[Path]:
    """Write the page and its figures; returns what was written."""
    if not results.is_dir():
        raise DataError(f"{results}: there is no such folder of results")
    comparisons = read_comparisons(results / "comparisons")
    written = [out]
    write_text(out, page(results, comparisons))
    for name, comparison in comparisons.items():
        title = f"{comparison.task}, {comparison.budget} for each model"
        figure = error_over_seconds(_curves(comparison.results), title)
        if figure is not None:
            written.append(out.parent / figure_name(name))
            write_text(written[-1], svg(figure))
    if readme is not None:
        text = readme.read_text()
        if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
            raise DataError(f"{readme}: expected one line {BEGIN} and after it one line {END}")
        before, _, rest = text.partition(BEGIN)
        after = rest.partition(END)[2]
        write_text(readme, f"{before}{BEGIN}\n{short(results, comparisons)}{END}{after}")
        written.append(readme)
    return written


@matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fst"})
def svg(figure: Figure) -> str:
    """The same text for the same figure: no date, no random names, letters as text."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def page(results: Path, comparisons: dict[str, Comparison]) -> str:
    """The whole page, in Markdown."""
    timed = {name: each for name, each in comparisons.items() if not _by_steps(each)}
    counted = {name: each for name, each in comparisons.items() if _by_steps(each)}
    records, ablations = _records(results), read_lines(results / "ablations" / "rows.jsonl")
    tried = read_lines(results / "pdebench" / "rows.jsonl")
    parts = [
        "# Results\n\nWritten by `fst results` from the rows under `results/`. Errors are the mean "
        "relative L2 on the test set, on its full grid, scored once for each run. All data were "
        "generated here by the law of the published ones, which were not available to us: the "
        "paper's numbers beside ours are from its own data and its own, longer training.\n"
    ]
    if records:
        parts.append(f"## Runs\n\n{record_table(records).markdown()}{_environments(records)}")
    for title, those in (("Equal time", timed), ("Equal steps", counted)):
        for name, each in those.items():
            parts.append(f"## {title}: {each.task}\n\n{_comparison(name, each)}")
    if ablations:
        parts.append(
            "## The paper's ablations\n\nSingle-viscosity Burgers with the fast recipe, its last "
            "weights; ± is the standard deviation over seeds. The paper trained each row to its "
            f"own end.\n\n{ablation_table(ablations).markdown()}\n"
            "A finding holds where every seed of one row is below every seed of the other.\n\n"
            f"{claim_table(ablations).markdown()}{_environments(ablations)}"
        )
    near = [(f"{each['recipe']}, seed {each['seed']}", each) for each in records]
    near += [(each["names"][0], each) for each in _done(ablations) if each["number"] == 1]
    near = [(name, each) for name, each in near if each.get("nearest")]
    if near:
        parts.append(
            "## Decoding from the nearest anchors\n\nThe error where each query is answered from "
            f"its k nearest anchors.\n\n{nearest_table(near).markdown()}"
        )
    if weights := weight_table():
        parts.append(f"## Weights that ship with fst\n\n{weights.markdown()}")
    if tried:
        parts.append(
            "## PDEBench's own trajectories\n\nWeights tried on trajectories of PDEBench's "
            "generator, which no training here has seen. The end cells are given at 201 times "
            "(by our solver) or at the 21 times of the file.\n\n"
            f"{pdebench_table(tried).markdown()}"
        )
    return "\n".join(parts)


def short(results: Path, comparisons: dict[str, Comparison]) -> str:
    """Each recipe with the mean over its seeds, and the comparisons at equal time."""
    runs: dict[tuple[str, int, str], list[Values]] = {}
    for each in _records(results):
        runs.setdefault((each["recipe"], each["steps"], each["hardware"]), []).append(each)
    lines = tuple(
        (
            recipe,
            hardware,
            f"{steps:,}",
            _mean(each["seconds"] for each in those),
            str(len(those)),
            _spread([each["error"] for each in those]),
            _error(those[0].get("paper_error")),
        )
        for (recipe, steps, hardware), those in runs.items()
    )
    header = ("Recipe", "Hardware", "Steps", "Seconds", "Seeds", "Test error", "Paper's")
    text = Table("", header, lines, words=2).markdown() if lines else ""
    for comparison in comparisons.values():
        if _by_steps(comparison):
            continue
        found = {
            title: statistics.fmean(result.scores[-1].error for result in those)
            for title, those in _by_title(comparison.results).items()
        }
        ranked = ", ".join(f"{t} {_error(e)}" for t, e in sorted(found.items(), key=lambda i: i[1]))
        words = f"{markdown(comparison.task)}, {comparison.budget} for each model"
        text += f"\n{words}: {ranked}.\n"
    return text or "Nothing has been kept yet.\n"


def record_table(records: Sequence[Values]) -> Table:
    lines = tuple(
        (
            each["recipe"], each["model"], str(each["seed"]), f"{each['steps']:,}",
            f"{each['seconds']:,.1f}", _error(each["error"]), _error(each.get("paper_error")),
            _commit(each),
        )
        for each in sorted(records, key=lambda each: (each["task"], each["seconds"]))
    )  # fmt: skip
    header = ("Recipe", "Model", "Seed", "Steps", "Seconds", "Relative L2", "Paper", "Commit")
    return Table("Scored runs", header, lines, words=2)


def _comparison(name: str, comparison: Comparison) -> str:
    figure = ""
    if _curves(comparison.results):
        figure = f"![Validation error over seconds of updates]({figure_name(name)})\n\n"
    seeds = unique(result.seed for result in comparison.results)
    notes = [
        *comparison.notes,
        f"Seeds: {', '.join(map(str, seeds))}. Commits: "
        f"{', '.join(each[:COMMIT] for each in comparison.commits) or 'not recorded'}.",
    ]
    return (
        comparison.table().markdown() + "\n" + figure + "".join(f"- {markdown(n)}\n" for n in notes)
    )


def read_comparisons(folder: Path) -> dict[str, Comparison]:
    """By the name of their folders; the notes are all that their tables are explained by."""
    found = {}
    for path in sorted(folder.glob("*/comparison.json")):
        values = read_json(path)
        try:
            results = tuple(pretrained.from_json(row, Result, str(path)) for row in values["rows"])
            found[path.parent.name] = Comparison(
                values["task"], values["budget"], results, values["hardware"],
                values["versions"], tuple(values["explanations"]), tuple(values.get("commits", ())),
            )  # fmt: skip
        except (KeyError, TypeError) as error:
            raise DataError(f"{path}: does not hold a comparison: {error}") from None
    return found


def read_lines(path: Path) -> list[Values]:
    """The objects of a file of JSON lines; none where it is missing."""
    if not path.is_file():
        return []
    try:
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except ValueError as error:
        raise DataError(f"{path}: expected one JSON object a line: {error}") from None


def ablation_table(rows: Sequence[Values]) -> Table:
    """Ours beside the paper's, in the order of its tables."""
    lines = []
    for make in ablation.recipes():
        recipe = make()
        name = recipe.name.removeprefix("ablation/")
        those = [row for row in _done(rows) if name in row["names"]]
        near = [row["nearest"]["16"] for row in those if "16" in row["nearest"]]
        lines.append(
            (
                name,
                _error(recipe.paper_error),
                _spread([row["error"] for row in those]),
                _spread(near),
                str(len(those)),
                _mean(row["seconds"] for row in those),
                " / ".join(unique(f"{row['steps']:,}" for row in those)) or NOTHING,
            )
        )
    header = ("Ablation", "Paper", "Ours", "16 nearest", "Seeds", "Seconds", "Steps")
    return Table("The paper's ablations", header, tuple(lines))


def claim_table(rows: Sequence[Values]) -> Table:
    """What the paper found, and whether it holds here."""
    paper = {
        make().name.removeprefix("ablation/"): make().paper_error for make in ablation.recipes()
    }
    lines = []
    for claim in CLAIMS:
        ours = [[row["error"] for row in _done(rows) if name in row["names"]] for name in claim[1:]]
        theirs = [[value] if value else [] for value in (paper[claim.better], paper[claim.worse])]
        lines.append((claim.words, _change(*theirs), _change(*ours), verdict(*ours)))
    header = ("Finding", "Paper's change", "Ours", "Holds")
    return Table("Findings", header, tuple(lines))


def verdict(better: Sequence[float], worse: Sequence[float]) -> str:
    if not better or not worse:
        return "not measured"
    if max(better) < min(worse):
        return "yes"
    return "no" if min(better) > max(worse) else "not decided by these seeds"


def nearest_table(near: Sequence[tuple[str, Values]]) -> Table:
    counts = sorted({int(k) for _, each in near for k in each["nearest"]})
    lines = tuple(
        (name, *(_error(each["nearest"].get(str(k))) for k in counts), _error(each["error"]))
        for name, each in near
    )
    return Table("Nearest anchors", ("Run", *map(str, counts), "All"), lines)


def weight_table() -> Table | None:
    lines = []
    for name, folder in pretrained.shipped().items():
        rows = tuple(read_rows(folder / RESULTS / ROWS))
        row = finest(rows)
        near = [each.error for each in rows if each.neighbors == 16]
        size = (folder / pretrained.WEIGHTS).stat().st_size / 1e6
        lines.append(
            (name, row.recipe, f"{size:.1f}", row.column, _error(row.error), _spread(near))
        )
    header = ("Name", "Recipe", "MB", "Grid", "Relative L2", "16 nearest")
    return Table("Weights", header, tuple(lines), words=2) if lines else None


def pdebench_table(rows: Sequence[Values]) -> Table:
    """The newest row of each way; the file of a row is known by its name."""
    found: dict[tuple[str, ...], Values] = {}
    for row in rows:
        found[row["weights"], row["file"], row["observed"], str(row["neighbors"])] = row
    lines = tuple(
        (row["weights"], row["file"], row["observed"], str(row["neighbors"] or "all"),
         str(len(row["errors"])), _error(row["error"]), _commit(row.get("git") or {}))
        for row in found.values()
    )  # fmt: skip
    header = (
        "Weights",
        "File",
        "End cells from",
        "Anchors",
        "Trajectories",
        "Relative L2",
        "Commit",
    )
    return Table("PDEBench", header, lines, words=3)


def figure_name(comparison: str) -> str:
    return f"images/error-over-seconds-{comparison}.svg"


def _records(results: Path) -> list[Values]:
    path = results / "records.json"
    return read_records(path) if path.is_file() else []


def _done(rows: Sequence[Values]) -> list[Values]:
    return [row for row in rows if "error" in row]


def _by_steps(comparison: Comparison) -> bool:
    return comparison.budget.endswith("steps")


def _by_title(results: Iterable[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for each in results:
        if each.scores:
            found.setdefault(each.title, []).append(each)
    return found


def _curves(results: Iterable[Result]) -> dict[str, list[Sequence[tuple[float, float]]]]:
    """By model, one curve for each seed."""
    found: dict[str, list[Sequence[tuple[float, float]]]] = {}
    for each in results:
        if each.curve:
            found.setdefault(each.title, []).append(each.curve)
    return found


def _environments(rows: Sequence[Values]) -> str:
    """On what, and with what, rows were made."""
    each = unique(f"{row.get('hardware')}, torch {row.get('torch')}" for row in rows)
    commits = unique(_commit(row) for row in rows)
    return f"\nMade on: {markdown('; '.join(each))}. Commits: {', '.join(commits)}.\n"


def _commit(row: Values) -> str:
    commit = row.get("commit")
    return f"{commit[:COMMIT]}{' (modified)' if row.get('modified') else ''}" if commit else NOTHING


def _error(value: float | None) -> str:
    return METRICS[RELATIVE_L2].text(value)


def _mean(values: Iterable[float], form: Callable[[float], str] = "{:,.0f}".format) -> str:
    found = list(values)
    return form(statistics.fmean(found)) if found else NOTHING


def _spread(errors: Sequence[float]) -> str:
    if len(errors) < 2:
        return _mean(errors, _error)
    return f"{_error(statistics.fmean(errors))} ± {_error(statistics.stdev(errors))}"


def _change(better: Sequence[float], worse: Sequence[float]) -> str:
    if not better or not worse:
        return NOTHING
    return f"{statistics.fmean(better) / statistics.fmean(worse) - 1:+.1%}"
