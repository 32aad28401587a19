"""Which data a comparison or a search was made with, wherever they lie now.

DIR/data.json holds the path at which the data were last found, and their fingerprint. Only that is
compared: data may be moved, or made again on another machine, but not be others.
"""

from pathlib import Path

from fst.commands import train as train_command
from fst.commands.kept import read_json, write_json
from fst.recipes.recipe import Recipe

DATA = "data.json"


def find_data(folder: Path, recipe: Recipe, data: Path | None) -> Path:
    """The path given, or the last one if it is still there, or the recipe's own."""
    if data is None:
        last = (read_json(folder / DATA) or {}).get("path")
        data = Path(last) if isinstance(last, str) and Path(last).exists() else None
    train_command.check_data_folder(recipe, data)
    return train_command.data_path(recipe, data).resolve()


def settle_data(folder: Path, recipe: Recipe, data: Path) -> None:
    """Record the data at the first time; later, raise unless they are the same."""
    recorded, found = read_json(folder / DATA) or {}, recipe.data.fingerprint(data)
    train_command.require_same_data(folder, recorded, found)
    if recorded.get("path") != str(data):
        write_json(folder / DATA, {"path": str(data)} | found)
