"""A folder that a command keeps for itself from one call to the next.

`settings.json` says what the folder was made for. A later call with the same settings goes on; one
with others is refused, with the differences. While a call is at work, no other can be (`held`).
"""

import json
import shutil
from pathlib import Path
from typing import Any

from fst.pretrained import parse_json, write_atomically
from fst.training.errors import TrainingError, clear_file_errors
from fst.training.run_folder import LOCK

SETTINGS = "settings.json"


def read_json(path: Path) -> Any:
    """What a file of ours holds; None where there is none."""
    try:
        return parse_json(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path} cannot be read: {error}") from None


def write_json(path: Path, values: Any) -> None:
    with clear_file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(values, indent=2, allow_nan=False)
        write_atomically(path, f"{text}\n".encode())


def read_settings(folder: Path, kind: str) -> dict[str, Any] | None:
    """The settings that a folder was made with; None where it is empty or absent."""
    settings = read_json(folder / SETTINGS) if folder.is_dir() else None
    if settings is None:
        _require_free(folder)
        return None
    if not isinstance(settings, dict) or settings.get("kind") != kind:
        raise TrainingError(f"{folder} holds no {kind}: choose another folder")
    return settings


def _require_free(folder: Path) -> None:
    ours = {LOCK, f"{SETTINGS}.part"}  # all that a call killed at its very start leaves
    if folder.exists() and not folder.is_dir():
        raise TrainingError(f"{folder} is a file, expected a folder or a name for a new one")
    if folder.is_dir() and any(path.name not in ours for path in folder.iterdir()):
        raise TrainingError(
            f"{folder} already holds files, and nothing is overwritten; choose another folder"
        )


def require_same(place: Path, before: object, now: object) -> None:
    """Raise unless two descriptions agree, naming what differs."""
    if shown := differences(before, now):
        raise TrainingError(f"{place} was made with other settings: {shown}; choose another folder")


def differences(before: object, now: object) -> str:
    """What differs between two descriptions, in words; none where they agree."""
    old, new = flat(before), flat(json.loads(json.dumps(now)))  # as it would be read back
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    shown = "; ".join(
        f"{name} was {_word(old.get(name))}, is {_word(new.get(name))}" for name in names[:6]
    )
    return f"{shown} and {len(names) - 6} more" if len(names) > 6 else shown


def flat(values: object, name: str = "") -> dict[str, Any]:
    """Nested JSON objects as one, with dotted names."""
    if not isinstance(values, dict):
        return {name: values}
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{name}.{key}" if name else str(key))
    return found


def _word(value: object) -> str:
    return "not set" if value is None else str(value)


def clear(folder: Path) -> None:
    """Remove all that is in a folder but its lock, which this process holds."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name != LOCK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
