"""The page of results, its figures and its short form, from the rows that this repository keeps.

    python benchmarks/results.py --readme README.md               # after new rows
    python benchmarks/results.py --add RUN... --readme README.md  # with scored runs added to them

RESULTS/records.json                          scored runs (--add)
RESULTS/comparisons/NAME/comparison.json      models on equal terms (`fst compare`)
RESULTS/comparisons/NAME/recipes/MODEL.json   the recipes that it trained
RESULTS/ablations/rows.jsonl                  benchmarks/ablations.py
RESULTS/evaluation-points/rows.jsonl          benchmarks/evaluation_points.py
RESULTS/pdebench/rows.jsonl                   benchmarks/pdebench_check.py

Leaves: OUT (Markdown), a figure of error over seconds for each comparison in OUT's folder, and the
part of README between two marks. No number on the page is written by hand.
"""

import argparse
import io
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from fst import pretrained
from fst.data.files import DataError, reading
from fst.evaluation.comparison import Comparison, Result, Score
from fst.evaluation.figures import STYLE, chart, draw_line, new_figure
from fst.evaluation.rows import (
    METRICS,
    NOTHING,
    RELATIVE_L2,
    RESULTS,
    ROWS,
    Metric,
    Row,
    grouped,
    read_rows,
    read_run,
    read_timed_curve,
)
from fst.evaluation.tables import Table, unique
from fst.io import read_object, write_list, write_text
from fst.recipes import ablation, find
from fst.terminal import markdown

BEGIN, END = "<!-- written by benchmarks/results.py -->", "<!-- end of results -->"
COMMIT = 10  # characters of it that are shown
# A run within this factor of another's time has had as much.
SAME_TIME = 1.25
CHANGED = "other settings"
POINTS = {"anchors": 256, "sobol": 256}
"""The paper's evaluation points, which are not told."""
Values = dict[str, Any]
Columns = dict[str, Callable[[Values], str]]


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


def write_records(runs: list[Path], out: Path) -> list[Values]:
    """Add the runs to the list, instead of earlier entries of the same name."""
    known = {record["run"]: record for record in read_records(out)} if out.exists() else {}
    found = [describe(run) for run in runs]
    known |= {record["run"]: record for record in found}
    write_list(out, known.values())
    return found


def read_records(path: Path) -> list[Values]:
    with reading(path, "records (JSON)"):
        text = path.read_bytes()
    try:
        records = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path}: does not hold records: {error}") from None
    listed: list[Any] = records if isinstance(records, list) else [None]
    if not all(isinstance(each, dict) and "run" in each for each in listed):
        raise DataError(f"{path}: does not hold records: expected a list of objects with a run")
    return listed


def describe(run: Path) -> Values:
    """One run: its error on the finest test grid, what it cost, and where it was trained."""
    rows = read_run(run).rows
    row = finest(rows)
    summary, environment, described = (
        read_object(run / f"{name}.json") for name in ("summary", "environment", "run")
    )
    seconds, before = summary.get("update_seconds"), described.get("before", [])
    if seconds is None or any(each["update_seconds"] is None for each in before):
        raise DataError(f"{run}: its files do not say the seconds of all its updates")
    git, hardware = environment.get("git") or {}, environment.get("hardware") or {}
    gpus = [gpu["name"] for gpu in hardware.get("gpus", [])]
    here = ", ".join(gpus) or f"{hardware.get('cpus')} CPU cores"
    return {
        # Of several seeds, each run's folder is called after its seed.
        "run": f"{run.resolve().parent.name}/{row.run}" if row.run.startswith("seed") else row.run,
        "task": row.task,
        "model": row.model,
        "recipe": row.recipe,
        "settings": settings(read_object(run / "recipe.json")),
        "data": row.data,
        "seed": row.seed,
        # With what the weights that it started from have cost.
        "seconds": round(sum((each["update_seconds"] for each in before), seconds), 1),
        "compilation_and_validation_seconds": round(summary["seconds"] - seconds, 1),
        "steps": sum((each["steps"] for each in before), summary["steps"]),
        "selected_step": summary["selected_step"],
        "validation_error": summary["validation_error"],
        "error": row.error,
        "paper_error": row.paper_error,
        "nearest": {each.neighbors: each.error for each in rows if each.neighbors is not None},
        "metric": row.metric,
        "grid": row.grid,
        "samples": row.samples,
        "parameters": row.parameters,
        "hardware": ", then ".join(dict.fromkeys((*(each["hardware"] for each in before), here))),
        "torch": (environment.get("versions") or {}).get("torch"),
        "commit": git.get("commit"),
        "modified": git.get("modified"),
        "curve": read_timed_curve(run),
    }


def settings(recipe: Values) -> str:
    """What decides a run most: recipes change under their names, and runs change recipes."""
    training, model, data = (recipe.get(part, {}) for part in ("training", "model", "data"))
    optimizer, decay = training["optimizer"], training["weight_decay"]
    muon = f" × {training['matrix_rate']:g}, momentum {training.get('momentum', 0.95):g}"
    parts = [f"{optimizer} {training['learning_rate']:g}{muon if optimizer == 'muon' else ''}"]
    parts += [f"decay {decay:g}"] if decay else []
    grid = data.get("supervision_grid")
    drawn = f"{training['queries'] or 'all'} queries"
    parts.append(f"batch {training['batch_size']}")
    parts.append(f"{drawn} of {grid[0]}×{grid[1]}" if grid else drawn)
    if scales := model.get("length_scales"):
        parts.append(f"{scales} scales")
    points = tuple(model.get(f"points_from_{origin}", most) for origin, most in POINTS.items())
    if points != tuple(POINTS.values()):
        parts.append(f"evaluated at {points[0]} anchors and {points[1]} Sobol points")
    if model.get("prediction_points") == "all-anchors":
        parts.append("predictions with all anchors as evaluation points")
    if (symmetry := model.get("prediction_symmetry", "none")) != "none":
        parts.append(f"predictions with {symmetry.replace('-', ' ')}")
    return ", ".join(parts)


def has_changed(recipe: str, trained: str | None) -> bool:
    """Whether a recipe has other settings today than those that a run was trained with.

    A user's own data decide some settings of `own/`, so nothing can be said of those.
    """
    own = recipe.startswith("own/")
    return not own and trained is not None and settings(find(recipe).to_json()) != trained


def _recipe(record: Values) -> str:
    """The recipe of a record; with the name of the file where a user's own data were trained on."""
    data = record.get("data")
    return f"{record['recipe']} on {data.split()[0]}" if data else str(record["recipe"])


def _recipe_then(record: Values) -> str:
    """The same, and whether it is as it was."""
    changed = not record.get("data") and has_changed(record["recipe"], record.get("settings"))
    return f"{_recipe(record)}, {CHANGED}" if changed else _recipe(record)


def finest(rows: tuple[Row, ...]) -> Row:
    """The row of all anchors on the grid with the most points."""
    whole = [row for row in rows if row.neighbors is None and not row.trivial]
    if not whole:
        raise DataError("no row was decoded from all anchors")
    sizes = [1 if row.grid is None else prod(row.grid) for row in whole]
    return whole[sizes.index(max(sizes))]


def write_results(results: Path, out: Path, readme: Path | None = None) -> list[Path]:
    """Write the page and its figures; returns what was written."""
    if not results.is_dir():
        raise DataError(f"{results}: there is no such folder of results")
    if readme is not None and not readme.is_file():
        raise DataError(f"--readme {readme}: there is no such file")
    comparisons = read_comparisons(results / "comparisons")
    written = [out]
    write_text(out, page(results, comparisons))
    for name, comparison in comparisons.items():
        title = f"{comparison.task}, {comparison.budget} for each model"
        figure = error_over_seconds(_curves(comparison.results), title, comparison.measure)
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


@matplotlib.rc_context(STYLE)
def error_over_seconds(
    models: Mapping[str, Sequence[Sequence[tuple[float, float]]]], title: str, measure: Metric
) -> Figure | None:
    """Validation error over seconds of updates, a line for each seed; None without any."""
    if not models:
        return None
    figure, axes = new_figure(1, 1, width=7.0, row_height=3.6)
    for index, (name, curves) in enumerate(models.items()):
        for number, curve in enumerate(curves):
            seconds, errors = zip(*curve, strict=True)
            draw_line(axes[0, 0], seconds, errors, index, "_" if number else name)
    axes[0, 0].set_xlim(left=0)
    across, up = "seconds of updates, compilation apart", f"validation: {measure.validation}"
    chart(axes[0, 0], (), xlabel=across, ylabel=up, title=title)
    return figure


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
        "# Results\n\nWritten by `benchmarks/results.py` from the rows under `results/`. Errors "
        "are the mean relative L2 on the test set, on its full grid, scored once for each line. "
        "The same weights have several lines where their predictions were set up differently. The "
        "published data sets were not available to us: all data were generated here from the same "
        "distributions. The paper's numbers come from its own data and its own, longer training. "
        "Images have accuracies in percent.\n"
    ]
    if records:
        parts.append(
            f"## Runs\n\n{record_table(records)}{_environments(records)}\n"
            "One seed says nothing about the spread. A second run of one recipe with other "
            "settings, or the same weights scored with more evaluation points, is a line of its "
            "own. `fast/burgers-all/fst` was trained again with targets at every saved time after "
            "the test score of its first run had shown that one time was left out "
            "([LOG.md](../LOG.md)).\n"
        )
    for title, those in (("Equal time", timed), ("Equal steps", counted)):
        for name, each in those.items():
            trained = trained_with(results / "comparisons" / name, each)
            parts.append(f"## {title}: {each.task}\n\n{_comparison(name, each, trained)}")
    if ablations:
        parts.append(
            "## The paper's ablations\n\nSingle-viscosity Burgers with the fast recipe, its last "
            "weights; ± is the standard deviation over seeds. The paper trained each row to its "
            f"own end.\n\n{ablation_table(ablations).markdown()}\n"
            "Several models shared the GPU, so that an idle one takes fewer seconds.\n\n"
            "A finding holds where every seed of one row is below every seed of the other; single "
            f"seeds must be {CHANCE:.0%} apart.\n\n"
            f"{claim_table(ablations).markdown()}{_environments(ablations)}"
        )
    near = [(each["run"], each) for each in records]
    near += [(each["names"][0], each) for each in _done(ablations) if each["number"] == 1]
    near = [(name, each) for name, each in near if each.get("nearest")]
    if near:
        parts.append(
            "## Decoding from the nearest anchors\n\nThe error where each query is answered from "
            f"its k nearest anchors.\n\n{nearest_table(near).markdown()}"
        )
    if weights := weight_table():
        parts.append(f"## Weights that ship with fst\n\n{weights.markdown()}")
    if points := read_lines(results / "evaluation-points" / "rows.jsonl"):
        parts.append(
            "## More evaluation points in predictions\n\nTrained weights with other numbers of "
            "evaluation points than in training, on solutions that no training and no test has "
            "used. The column ms is the time for one solution, in float32.\n\n"
            f"{point_table(points).markdown()}"
        )
    if tried:
        parts.append(
            "## PDEBench's own trajectories\n\nWeights tried on trajectories of PDEBench's "
            "generator, which no training here has seen. The end cells are given at 201 times "
            "(by our solver) or at the 21 times of the file.\n\n"
            f"{pdebench_table(tried).markdown()}"
        )
    return "\n".join(parts)


def short(results: Path, comparisons: dict[str, Comparison]) -> str:
    """Each recipe with the mean over its seeds, and the comparisons at equal time.

    Runs that another of their task has beaten in about the same time are on the page alone.
    """
    same = ("recipe", "settings", "steps", "hardware")
    runs = grouped(_records(results), lambda each: tuple(each.get(name) for name in same))
    scored = [
        (those[0]["task"], _average(those, "seconds"), _average(those, "error"), those)
        for those in runs.values()
    ]
    kept = [
        each
        for each in scored
        if not any(
            other[0] == each[0] and other[1] <= SAME_TIME * each[1] and other[2] < each[2]
            for other in scored
        )
    ]
    table = _table(
        "",
        [those for *_, those in sorted(kept, key=lambda each: each[:2])],
        {
            "Recipe": lambda those: _recipe_then(those[0]),
            "Hardware": lambda those: those[0]["hardware"],
            "Steps": lambda those: f"{those[0]['steps']:,}",
            "Seconds": lambda those: _mean(each["seconds"] for each in those),
            "Seeds": lambda those: str(len(those)),
            "Test error": lambda those: _spread([each["error"] for each in those]),
            "Paper's": lambda those: _error(those[0].get("paper_error")),
        },
        words=2,
    )
    text = table.markdown() if runs else ""
    for name, comparison in comparisons.items():
        if _by_steps(comparison):
            continue
        found = {
            title: [headline(result) for result in those]
            for title, those in _by_title(comparison.results, "scores").items()
        }
        means = {t: statistics.fmean(s.error for s in scores) for t, scores in found.items()}
        text_of = comparison.measure.text
        ranked = ", ".join(f"{t} {text_of(e)}" for t, e in sorted(means.items(), key=itemgetter(1)))
        trained = trained_with(results / "comparisons" / name, comparison)
        changed = any(has_changed(*each) for each in trained.values())
        words = f"{markdown(comparison.task)}, {comparison.budget} for each model, "
        words += comparison.measure.title
        words += f" ({CHANGED})" if changed else ""
        text += f"\n{words}: {ranked}.\n"
    if CHANGED in text:
        text += f"\n*{CHANGED.capitalize()}*: the recipe has changed since the run.\n"
    return text or "Nothing has been kept yet.\n"


def trained_with(folder: Path, comparison: Comparison) -> dict[str, tuple[str, str]]:
    """The recipe's name and the settings of each model, where its recipe is kept."""
    found = {}
    for result in comparison.results:
        if recipe := read_object(folder / "recipes" / f"{result.model}.json"):
            found[result.model] = recipe["name"], settings(recipe)
    return found


def headline(result: Result) -> Score:
    """Of a model's scores the one that says most: on the finest grid, or its first guesses."""
    return result.scores[0 if result.scores[0].grid is None else -1]


def _average(those: Sequence[Values], name: str) -> float:
    return statistics.fmean(each[name] for each in those)


def record_table(records: Sequence[Values]) -> str:
    """A line for each run; the settings, which are long, have numbers and stand below."""
    ordered = sorted(records, key=lambda each: (each["task"], each["seconds"]))
    known = unique(each.get("settings", NOTHING) for each in ordered)
    columns: Columns = {
        "Recipe": _recipe,
        "Seconds": lambda each: f"{each['seconds']:,.1f}",
        "Relative L2": lambda each: _error(each["error"]),
        "Paper": lambda each: _error(each.get("paper_error")),
        "Settings": lambda each: str(1 + known.index(each.get("settings", NOTHING))),
        "Steps": lambda each: f"{each['steps']:,}",
        "Samples": lambda each: f"{each['samples']:,}",
        "Seed": lambda each: str(each["seed"]),
        "Hardware": lambda each: each["hardware"],
        "Commit": _commit,
    }
    numbered = "".join(f"{number}. {each}\n" for number, each in enumerate(known, start=1))
    table = _table("Scored runs", ordered, columns, words=1)
    return f"{table.markdown()}\nSettings:\n\n{numbered}"


def _comparison(name: str, comparison: Comparison, trained: Mapping[str, tuple[str, str]]) -> str:
    figure = ""
    if _curves(comparison.results):
        figure = f"![Validation error over seconds of updates]({figure_name(name)})\n\n"
    seeds = unique(result.seed for result in comparison.results)
    titles = {result.model: result.title for result in comparison.results}
    notes = [
        *comparison.notes,
        *(f"{titles[model]}: {words}." for model, (_, words) in trained.items()),
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
        values = read_object(path)
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


def _ablations(rows: Sequence[Values]) -> dict[str, tuple[float | None, list[Values]]]:
    """Of each ablation, in the order of the paper's tables: the paper's error, and our rows."""
    recipes = {(made := make()).name.removeprefix("ablation/"): made for make in ablation.recipes()}
    return {
        name: (recipe.paper_error, [row for row in _done(rows) if name in row["names"]])
        for name, recipe in recipes.items()
    }


def ablation_table(rows: Sequence[Values]) -> Table:
    """Ours beside the paper's, in the order of its tables."""
    lines = []
    for name, (paper, those) in _ablations(rows).items():
        near = [row["nearest"]["16"] for row in those if "16" in row["nearest"]]
        errors, seconds = [row["error"] for row in those], _mean(row["seconds"] for row in those)
        steps = " / ".join(unique(f"{row['steps']:,}" for row in those)) or NOTHING
        ours = _spread(errors), _spread(near), str(len(those))
        lines.append((name, _error(paper), *ours, seconds, steps))
    header = ("Ablation", "Paper", "Ours", "16 nearest", "Seeds", "Seconds", "Steps")
    return Table("The paper's ablations", header, tuple(lines))


def claim_table(rows: Sequence[Values]) -> Table:
    """What the paper found, and whether it holds here."""
    known, lines = _ablations(rows), []
    for claim in CLAIMS:
        both = [known[name] for name in (claim.better, claim.worse)]
        theirs = [[paper] if paper else [] for paper, _ in both]
        ours = [[row["error"] for row in those] for _, those in both]
        lines.append((claim.words, _change(*theirs), _change(*ours), verdict(*ours)))
    return Table("Findings", ("Finding", "Paper's change", "Ours", "Holds"), tuple(lines))


# Two seeds of one model can differ by this much: single seeds that are closer say nothing.
CHANCE = 0.1


def verdict(better: Sequence[float], worse: Sequence[float]) -> str:
    if not better or not worse:
        return "not measured"
    if len(better) == len(worse) == 1 and abs(better[0] / worse[0] - 1) < CHANCE:
        return "not decided by one seed"
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
        row, near = finest(rows), [each.error for each in rows if each.neighbors == 16]
        size = f"{(folder / pretrained.WEIGHTS).stat().st_size / 1e6:.1f}"
        lines.append((name, row.recipe, size, row.column, _error(row.error), _spread(near)))
    header = ("Name", "Recipe", "MB", "Grid", "Relative L2", "16 nearest")
    return Table("Weights", header, tuple(lines), words=2) if lines else None


def point_table(rows: Sequence[Values]) -> Table:
    columns: Columns = {
        "Weights": lambda row: row["weights"],
        "Trained with": lambda row: f"{row['trained_with']:,}",
        "Points": lambda row: f"{row['points']:,}",
        "Symmetry": lambda row: row.get("symmetry", "none"),
        "Solutions": lambda row: str(row["solutions"]),
        "Mean error": lambda row: _error(row["error"]),
        "Median": lambda row: _error(row["median"]),
        "ms": lambda row: f"{row['milliseconds']:,.0f}",
        "Hardware": lambda row: f"{row['hardware']}, threads: {row['threads']}",
        "Commit": lambda row: _commit(row.get("git") or {}),
    }
    return _table("Evaluation points", rows, columns, words=1)


def pdebench_table(rows: Sequence[Values]) -> Table:
    """The newest row of each way; the file of a row is known by its name."""
    ways = ("weights", "file", "observed", "neighbors")
    found = {tuple(row[way] for way in ways): row for row in rows}
    columns: Columns = {
        "Weights": lambda row: row["weights"],
        "File": lambda row: row["file"],
        "End cells from": lambda row: row["observed"],
        "Anchors": lambda row: str(row["neighbors"] or "all"),
        "Trajectories": lambda row: str(len(row["errors"])),
        "Relative L2": lambda row: _error(row["error"]),
        "Commit": lambda row: _commit(row.get("git") or {}),
    }
    return _table("PDEBench", found.values(), columns, words=3)


def _table(
    title: str, items: Iterable[Any], columns: Mapping[str, Callable[[Any], str]], words: int
) -> Table:
    """One line for each item."""
    lines = tuple(tuple(cell(item) for cell in columns.values()) for item in items)
    return Table(title, tuple(columns), lines, words)


def figure_name(comparison: str) -> str:
    return f"images/error-over-seconds-{comparison}.svg"


def _records(results: Path) -> list[Values]:
    path = results / "records.json"
    return read_records(path) if path.is_file() else []


def _done(rows: Sequence[Values]) -> list[Values]:
    return [row for row in rows if "error" in row]


def _by_steps(comparison: Comparison) -> bool:
    return comparison.budget.endswith("steps")


def _by_title(results: Iterable[Result], part: str) -> dict[str, list[Result]]:
    """The seeds of each model that have `part`: scores, or a curve."""
    return grouped((each for each in results if getattr(each, part)), lambda each: each.title)


def _curves(results: Iterable[Result]) -> dict[str, list[Sequence[tuple[float, float]]]]:
    """By model, one curve for each seed."""
    found = _by_title(results, "curve")
    return {title: [each.curve for each in those] for title, those in found.items()}


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


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="?", default=Path("results"))
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="RUN")
    parser.add_argument("--out", type=Path, default=Path("docs/results.md"))
    parser.add_argument("--readme", type=Path, help="its part between two marks is replaced")
    options = parser.parse_args(given)
    if options.add:
        for each in write_records(options.add, options.results / "records.json"):
            print(f"{each['run']}: {each['error']:.5f} after {each['seconds']:g} s of updates")
    for path in write_results(options.results, options.out, options.readme):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
