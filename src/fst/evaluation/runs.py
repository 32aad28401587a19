"""What a run folder says about itself: its origin for result rows, its curves and its results.

Everything is read as JSON or NumPy arrays; no model is loaded here.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fst.data.errors import DataError, reading
from fst.evaluation.arrays import stored_names
from fst.evaluation.fields import Fields, load_fields
from fst.evaluation.image_fields import ImageFields, load_image_fields
from fst.evaluation.once import FIELDS, ROWS
from fst.evaluation.point_fields import PointFields, load_point_fields
from fst.evaluation.rows import Origin, Row, TrainingCost, read_rows
from fst.io import parse_json
from fst.pretrained import PretrainedError, from_json
from fst.terminal import one_line

RESULTS = "results"
# Log lines that a median is worth taking of.
FEWEST_LINES = 5


@dataclass(frozen=True)
class Curves:
    """The course of a training run: (step, value) pairs, possibly none."""

    loss: tuple[tuple[int, float], ...] = ()
    validation: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Run:
    """A scored run, as the report needs it."""

    name: str
    rows: tuple[Row, ...]
    fields: Fields | PointFields | ImageFields | None
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


def read_fields(path: Path) -> Fields | PointFields | ImageFields:
    """The saved fields of an operator on a grid or at points, or of a classifier.

    Only a classifier's file holds pictures, and only one of points holds queries.
    """
    names = stored_names(path)
    if "pictures" in names:
        return load_image_fields(path)
    return load_point_fields(path) if "queries" in names else load_fields(path)


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
    summary = read_json(run / "summary.json")
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
    environment = read_json(run / "environment.json")
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
) -> Origin:
    """Where a run's weights came from; what its folder does not say is None.

    `images` is how many of them a training step takes, for classifiers.
    """
    environment = read_json(folder / "environment.json")
    summary = read_json(folder / "summary.json")
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


def read_json(path: Path) -> dict[str, Any]:
    """What a file of a run folder holds; nothing where it is missing."""
    if not path.is_file():
        return {}
    with reading(path, "a JSON object"):
        try:
            values = parse_json(path.read_text())
        except ValueError as error:
            raise DataError(f"{path}: is damaged: {error}") from None
    if not isinstance(values, dict):
        raise DataError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values
