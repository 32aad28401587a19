"""The folder in which a command keeps its settings and results from one call to the next.

`settings.json` says what the folder was made for. A later call with the same settings goes on; one
with others is refused, with the differences. While a call is at work, no other can be (`held`).
`data.json` holds the path at which the data were last found, and their fingerprint: data may be
moved, or made again on another machine, but not be others.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fst.commands import train as train_command
from fst.io import differences, read_json, write_json, write_text
from fst.recipes.recipe import Recipe
from fst.training.errors import TrainingError
from fst.training.run_folder import LOCK

SETTINGS, DATA = "settings.json", "data.json"


def write_report(path: Path, markdown: str, values: Any) -> None:
    """A table as PATH.md and PATH.json."""
    write_text(path.with_name(f"{path.name}.md"), markdown)
    write_json(path.with_name(f"{path.name}.json"), values)


def read_settings(folder: Path, kind: str) -> dict[str, Any] | None:
    """The settings that a folder was made with; None where it is empty or absent."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise TrainingError(f"a {kind} trains on one device: start it without a launcher")
    settings = read_json(folder / SETTINGS) if folder.is_dir() else None
    if settings is not None:
        if not isinstance(settings, dict) or settings.get("kind") != kind:
            raise TrainingError(f"{folder} holds no {kind}: choose another folder")
        return settings
    if folder.exists() and not folder.is_dir():
        raise TrainingError(f"{folder} is a file, expected a folder or a name for a new one")
    ours = {LOCK, f"{SETTINGS}.part"}  # all that a call killed at its very start leaves
    if folder.is_dir() and any(path.name not in ours for path in folder.iterdir()):
        raise TrainingError(
            f"{folder} already holds files, and nothing is overwritten; choose another folder"
        )
    return None


def require_same(path: Path, before: object, now: object) -> None:
    """Raise unless two descriptions agree, naming what differs; None is the first time."""
    if before is not None and (shown := differences(before, now)):
        raise TrainingError(f"{path} was made with other settings: {shown}; choose another folder")


def find_data(folder: Path, recipe: Recipe, data: Path | None) -> Path:
    """The path given, or the last one if it is still there, or the recipe's own."""
    if data is None:
        last = (read_json(folder / DATA) or {}).get("path")
        data = Path(last) if isinstance(last, str) and Path(last).exists() else None
    train_command.check_data_folder(recipe, data)
    return train_command.data_path(recipe, data).resolve()


def prepare_data(
    folder: Path, recipe: Recipe, data: Path, device: torch.device, console: Console
) -> None:
    """Make what is missing of the data, and raise unless they are those of earlier calls."""
    recipe.data.prepare(data, device, console)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of the solvers
    recorded, found = read_json(folder / DATA) or {}, recipe.data.fingerprint(data)
    train_command.require_same_data(folder, recorded, found)
    if recorded.get("path") != str(data):
        write_json(folder / DATA, {"path": str(data)} | found)


def clear(folder: Path) -> None:
    """Remove all that is in a folder but its lock, which this process holds."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name != LOCK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
