"""What an earlier run of `speed.py` left, where a new one may add to it.

Rows are compared with each other, so both runs must have measured the same on the same: setting,
weights, hardware and versions. Only the number of starts may grow.
"""

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from speed_setting import Row

# How many of many differences are told.
SHOWN = 4


def read(file: Path, heading: Row, sections: Collection[str]) -> Row:
    """The content of the file; a message instead, if `heading` is of another kind of run."""
    try:
        earlier = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"--resume: cannot read {file}: {error}") from None
    if not is_results(earlier, sections):
        raise SystemExit(f"--resume: {file} was not written by this command")
    before, now = dict(flat(comparable(earlier))), dict(flat(comparable(heading)))
    other = [
        f"{name} was {before.get(name)}, is {now.get(name)}"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]
    if other:
        more = f" and {len(other) - SHOWN} more" if len(other) > SHOWN else ""
        raise SystemExit(
            f"--resume: {file} was measured otherwise: {'; '.join(other[:SHOWN])}{more}"
        )
    return earlier


def is_results(content: Any, sections: Collection[str]) -> bool:
    """Whether this looks like what `speed.py` writes."""
    parts = ("environment", "setting", "sections", "conclusions")
    if not isinstance(content, dict) or not all(isinstance(content.get(p), dict) for p in parts):
        return False
    return all(
        name in sections
        and isinstance(rows, list)
        and all(isinstance(row, dict) and {"entry", "error"} <= row.keys() for row in rows)
        for name, rows in content["sections"].items()
    )


def comparable(content: Row) -> Row:
    setting = {name: value for name, value in content["setting"].items() if name != "starts"}
    environment = content["environment"]
    return {**setting, **{name: environment.get(name) for name in ("hardware", "versions")}}


def flat(values: Row, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every number and word with the path of names to it."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
