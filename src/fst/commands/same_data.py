"""Which data a comparison or a search was made with, wherever they lie now.

DIR/data.json holds the path at which the data were last found, and marks of them. Only the marks
are compared: data may be moved, or made again on another machine, but not be others.
"""

from pathlib import Path
from typing import Any

import torch

from fst.commands import train as train_command
from fst.commands.kept import read_json, write_json
from fst.data.samples import Rows, Samples
from fst.data.views import subset_indices
from fst.recipes.recipe import Recipe

DATA = "data.json"
# As many samples are looked at closely.
MARKED = 16


def find_data(folder: Path, recipe: Recipe, data: Path | None) -> Path:
    """The path given, or the last one if it is still there, or the recipe's own."""
    if data is None:
        last = (read_json(folder / DATA) or {}).get("path")
        data = Path(last) if isinstance(last, str) and Path(last).exists() else None
    train_command.check_data_folder(recipe, data)
    return train_command.data_path(recipe, data).resolve()


def marks(training: Rows) -> dict[str, Any]:
    """Marks that all models of a task find alike, whichever targets each is supervised with.

    For solutions, the root mean square of what is observed of some of them. It tells other samples,
    and another solver, but not the rounding of another device.
    """
    if not isinstance(training, Samples):
        return train_command.describe(training)
    rows = subset_indices(len(training), min(MARKED, len(training))).to(training.device)
    generator = torch.Generator(training.device).manual_seed(0)
    # One target each: the whole grid of some samples is large.
    batch = training.batch(rows, training.choose(len(rows), 1, generator))
    observed = batch.observations
    values = observed.values.double()
    if observed.mask is not None:
        values = values * observed.mask[..., None]
    sizes = values.square().mean(dim=(1, 2)).sqrt()
    return {"training_samples": len(training), "observed": sizes.tolist()}


def settle_data(folder: Path, data: Path, training: Rows) -> None:
    """Record the data at the first time; later, raise unless they are the same."""
    recorded, found = read_json(folder / DATA) or {}, marks(training)
    train_command.require_same_data(folder, recorded, found)
    if recorded.get("path") != str(data):
        write_json(folder / DATA, {"path": str(data)} | found)
