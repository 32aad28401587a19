"""fst records: scored runs as one list of what they reached, in how many seconds, on what."""

import json
from math import prod
from pathlib import Path
from typing import Any

from fst.data.files import DataError, reading, writing
from fst.evaluation.rows import Row
from fst.evaluation.runs import read_json, read_run, read_timed_curve
from fst.io import write_atomically


def write_records(runs: list[Path], out: Path) -> list[dict[str, Any]]:
    """Add the runs to the list, in the place of earlier entries of the same name."""
    known = {record["run"]: record for record in read_records(out)} if out.exists() else {}
    found = [describe(run) for run in runs]
    known |= {record["run"]: record for record in found}
    lines = ",\n".join(json.dumps(record, allow_nan=False) for record in known.values())
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, f"[\n{lines}\n]\n".encode())
    return found


def read_records(path: Path) -> list[dict[str, Any]]:
    with reading(path, "records (JSON)"):
        text = path.read_bytes()
    try:
        records = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path}: does not hold records: {error}") from None
    named = isinstance(records, list) and all(
        isinstance(each, dict) and "run" in each for each in records
    )
    if not named:
        raise DataError(f"{path}: does not hold records: expected a list of objects with a run")
    return list(records)


def describe(run: Path) -> dict[str, Any]:
    """One run: its error on the finest test grid, what it cost, and where it was trained."""
    rows = read_run(run).rows
    row = finest(rows)
    summary, environment = (read_json(run / f"{name}.json") for name in ("summary", "environment"))
    seconds = summary.get("update_seconds")
    if seconds is None:
        raise DataError(f"{run}: summary.json does not say the seconds of its updates")
    git, hardware = environment.get("git") or {}, environment.get("hardware") or {}
    gpus = [gpu["name"] for gpu in hardware.get("gpus", [])]
    return {
        "run": row.run,
        "task": row.task,
        "model": row.model,
        "recipe": row.recipe,
        "seed": row.seed,
        "seconds": round(seconds, 1),
        "compilation_and_validation_seconds": round(summary["seconds"] - seconds, 1),
        "steps": summary["steps"],
        "selected_step": summary["selected_step"],
        "validation_error": summary["validation_error"],
        "error": row.error,
        "paper_error": row.paper_error,
        "nearest": {each.neighbors: each.error for each in rows if each.neighbors is not None},
        "metric": row.metric,
        "grid": row.grid,
        "samples": row.samples,
        "parameters": row.parameters,
        "hardware": ", ".join(gpus) or f"{hardware.get('cpus')} CPU cores",
        "torch": (environment.get("versions") or {}).get("torch"),
        "commit": git.get("commit"),
        "modified": git.get("modified"),
        "curve": read_timed_curve(run),
    }


def finest(rows: tuple[Row, ...]) -> Row:
    """The row of all anchors on the grid with the most points."""
    whole = [row for row in rows if row.neighbors is None and not row.trivial]
    if not whole:
        raise DataError("no row was decoded from all anchors")
    sizes = [1 if row.grid is None else prod(row.grid) for row in whole]
    return whole[sizes.index(max(sizes))]
