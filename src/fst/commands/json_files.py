"""Small JSON files of ours: read, written whole, and compared."""

import json
from pathlib import Path
from typing import Any

from fst.pretrained import flat, parse_json, write_atomically
from fst.training.errors import TrainingError, clear_file_errors


def read_json(path: Path) -> Any:
    """What a file of ours holds; None where there is none."""
    try:
        return parse_json(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path} cannot be read: {error}") from None


def write_text(path: Path, text: str) -> None:
    with clear_file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())


def write_json(path: Path, values: Any) -> None:
    write_text(path, json.dumps(values, indent=2, allow_nan=False) + "\n")


def differences(before: object, now: object) -> str:
    """What differs between two descriptions, in words; none where they agree."""
    old, new = flat(before), flat(json.loads(json.dumps(now)))  # as it would be read back
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    shown = "; ".join(
        f"{name} was {_word(old.get(name))}, is {_word(new.get(name))}" for name in names[:6]
    )
    return f"{shown} and {len(names) - 6} more" if len(names) > 6 else shown


def _word(value: object) -> str:
    return "not set" if value is None else str(value)
