"""The result store of a run, and what else its folder says about it; no model is loaded here.

RUN/results/rows.json    the result rows
RUN/results/fields.npz   a few samples seen closely, for the figures
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fst.data.files import DataError, reading, writing
from fst.evaluation.fields import SavedFields, read_fields, save_fields
from fst.evaluation.protocol import EvaluationError, Scores
from fst.evaluation.rows import Curves, Origin, Row, TrainingCost, read_rows, write_rows
from fst.io import parse_json, read_object
from fst.pretrained import PretrainedError, from_json
from fst.terminal import one_line

RESULTS, ROWS, FIELDS = "results", "rows.json", "fields.npz"
# Log lines that a median is worth taking of.
FEWEST_LINES = 5


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


def read_run(folder: Path) -> Run:
    """The rows, fields and curves of a run that `fst evaluate` has scored."""
    results = folder / RESULTS
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such run folder")
    if not (results / ROWS).is_file():
        raise DataError(f"{folder}: has no results yet; score it with: fst evaluate {folder}")
    saved = results / FIELDS
    return Run(
        folder.resolve().name,
        tuple(read_rows(results / ROWS)),
        read_fields(saved) if saved.is_file() else None,
        read_curves(folder / "metrics.jsonl"),
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl. Those that a killed writer left unfinished are skipped."""
    found = []
    if not path.is_file():
        return []
    with reading(path, "metrics as JSON lines"):
        lines = path.read_text(errors="replace").splitlines()
    for line in lines:
        try:
            entry = parse_json(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return found


def read_curves(path: Path) -> Curves:
    """Loss and validation error by step."""
    loss, validation = [], []
    for entry in read_metrics(path):
        try:
            if entry["kind"] == "training":
                loss.append((int(entry["step"]), float(entry["loss"])))
            elif entry["kind"] == "validation":
                validation.append((int(entry["step"]), float(entry["error"])))
        except (ValueError, KeyError, TypeError, OverflowError):
            continue
    return Curves(tuple(loss), tuple(validation))


def read_timed_curve(run: Path) -> tuple[tuple[float, float], ...]:
    """Validation errors by the seconds of updates, compilation apart, as spread over the steps."""
    summary = read_object(run / "summary.json")
    steps, seconds = summary.get("steps"), summary.get("update_seconds")
    if not steps or seconds is None:
        return ()
    points = read_curves(run / "metrics.jsonl").validation
    return tuple(
        (round(step * seconds / steps, 2), float(f"{error:.6g}")) for step, error in points
    )


def steady_rate(run: Path) -> float | None:
    """Updates a second once a run is under way: the median over its log lines.

    So compiling, once for each start, does not count. None where there are too few lines to tell.
    """
    rates = []
    for entry in read_metrics(run / "metrics.jsonl"):
        try:
            if entry["kind"] == "training":
                rates.append(float(entry["steps_per_second"]))
        except (ValueError, KeyError, TypeError):
            continue
    return statistics.median(rates) if len(rates) >= FEWEST_LINES else None


def read_starts(run: Path) -> list[dict[str, Any]]:
    """With what, and on what, a run was started and resumed."""
    environment = read_object(run / "environment.json")
    resumed = environment.get("resumed")
    starts = [environment, *(resumed if isinstance(resumed, list) else [])] if environment else []
    names = ("hardware", "versions", "git")
    return [{name: each.get(name) for name in names} for each in starts if isinstance(each, dict)]


def read_origin(
    folder: Path,
    *,
    recipe: str,
    task: str,
    model: str,
    seed: int | None = None,
    images: int | None = None,
    data: str = "",
) -> Origin:
    """Where a run's weights came from; what its folder does not say is None.

    `images` is how many of them a training step takes, for classifiers.
    """
    environment = read_object(folder / "environment.json")
    summary = read_object(folder / "summary.json")
    try:
        cost = _cost(summary, environment.get("hardware") or {}, images)
        git_hash = _git_hash(environment.get("git"))
    except (KeyError, TypeError, AttributeError, IndexError, PretrainedError) as error:
        files = "environment.json or summary.json"
        raise DataError(f"{folder}: {files} is damaged ({one_line(error)})") from None
    return Origin(
        run=folder.resolve().name,
        recipe=recipe,
        task=task,
        model=model,
        seed=seed,
        git_hash=git_hash,
        training=cost,
        data=data,
    )


def _cost(
    summary: dict[str, Any], hardware: dict[str, Any], images: int | None
) -> TrainingCost | None:
    if "steps" not in summary:
        return None
    rate = summary["steps_per_second"]
    values = {
        "steps": summary["steps"],
        "seconds": summary["seconds"],
        "steps_per_second": rate,
        "device": _device(hardware),
        "selected_step": summary.get("selected_step"),
        "peak_memory_gib": summary.get("peak_memory_gib"),
        "images_per_second": None if images is None else images * rate,
    }
    return from_json(values, TrainingCost, "summary.json")  # which checks them


def _device(hardware: dict[str, Any]) -> str:
    """The hardware in a few words; a GPU that was there but not used cannot be told apart."""
    processes = hardware.get("processes", 1)
    if hardware.get("gpus"):
        name = hardware["gpus"][0]["name"]
        return name if processes == 1 else f"{processes} × {name}"
    threads = hardware.get("threads")
    unit = "thread" if threads == 1 else "threads"
    return f"CPU {hardware.get('machine', '')}, {threads} {unit}"


def _git_hash(state: dict[str, Any] | None) -> str | None:
    if not state or not state.get("commit"):
        return None
    return f"{state['commit']}{' (modified)' if state.get('modified') else ''}"
