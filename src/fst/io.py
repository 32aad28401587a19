"""Files that are whole or absent, and JSON: every file of ours is written by these functions.

A file is written under another name, forced to the disk and renamed. Whoever reads sees the old
content or the new one, never a part of it.
"""

import errno
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class FileError(ValueError):
    """A file cannot be read or written; the message is one clear line that names it."""


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turn a full disk, a read-only folder or a failing disk into one clear `FileError`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = f"no space left on the disk of {path}"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            reason = f"{path} is read-only, or not yours to write in"
        else:
            reason = f"cannot write to {path} ({error.strerror or error})"
        raise FileError(reason) from error


def sync(path: Path) -> None:
    """Force a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(finished: Path, path: Path) -> None:
    with file_errors(path):
        sync(finished)
        finished.replace(path)
        sync(path.parent)


def write_synced(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    sync(path)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file by a complete one."""
    partial = path.with_name(path.name + ".part")
    write_synced(partial, data)
    partial.replace(path)


def write_file(path: Path, data: bytes) -> None:
    """Replace a file by a complete one, in a folder that is made if missing."""
    with file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)


def write_text(path: Path, text: str) -> None:
    write_file(path, text.encode())


def write_list(path: Path, items: Iterable[object]) -> None:
    """Replace a file by a JSON list with one item a line."""
    lines = ",\n".join(json.dumps(item, allow_nan=False) for item in items)
    write_text(path, f"[\n{lines}\n]\n")


def write_json(path: Path, values: Any) -> None:
    write_text(path, json_text(values))


def json_text(values: Any) -> str:
    return json.dumps(values, indent=2, allow_nan=False) + "\n"


def parse_json(text: str | bytes) -> Any:
    """What JSON text says; ValueError where it says nothing, or is nested beyond reason."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: Path) -> Any:
    """What a JSON file holds; None where there is none."""
    try:
        return parse_json(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be read: {error}") from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one where there is no file."""
    if not path.exists():
        return {}
    values = read_json(path)
    if not isinstance(values, dict):
        raise FileError(f"{path} cannot be read: expected a JSON object")
    return values


def flat(values: object, name: str = "") -> dict[str, Any]:
    """Nested JSON objects as one, with dotted names."""
    if not isinstance(values, dict):
        return {name: values}
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{name}.{key}" if name else str(key))
    return found


def differences(before: object, now: object) -> str:
    """What differs between two JSON descriptions, in words; empty where they agree."""
    old, new = flat(before), flat(json.loads(json.dumps(now)))  # as it would be read back
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    shown = "; ".join(
        f"{name} was {_word(old.get(name))}, is {_word(new.get(name))}" for name in names[:6]
    )
    return f"{shown} and {len(names) - 6} more" if len(names) > 6 else shown


def _word(value: object) -> str:
    return "not set" if value is None else str(value)
