"""What an earlier run of `speed.py` left, where a new one may add to it.

Rows are compared with each other, so both runs must have measured the same on the same: setting,
weights, hardware and versions. Only the number of starts may grow.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from speed_setting import Row

from fst.io import differences


def read(file: Path, heading: Row, sections: Collection[str]) -> Row:
    """What the file holds; an error if `heading` is of another kind of run."""
    earlier = read_results(file, sections)
    if shown := differences(comparable(earlier), comparable(heading)):
        raise ValueError(f"{file} was measured otherwise: {shown}")
    return earlier


def read_results(file: Path, sections: Collection[str]) -> Row:
    """What the file holds, if `speed.py` wrote it."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {file}: {error}") from None
    if not is_results(content, sections):
        raise ValueError(f"{file} was not written by speed.py")
    return content


def is_results(content: Any, sections: Collection[str]) -> bool:
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
