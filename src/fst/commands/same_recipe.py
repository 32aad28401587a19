"""Whether a run goes on as it was begun: every checkpoint carries the recipe that it followed."""

from typing import Any

from fst.io import differences, flat, read_json
from fst.training.errors import TrainingError
from fst.training.run_folder import RunFolder

# What decides the course of a training. How a run is scored and named may change later.
PARTS = ("model", "data", "training", "standardization")
# These decide how fast it goes and what is kept of it, not where it goes.
FREE = (
    "data.workers",
    "training.accumulate",
    "training.checkpoint_every",
    "training.compile",
    "training.compile_mode",
    "training.keep",
    "training.log_every",
    "training.tensorboard",
    "training.wandb",
)


def check_same_recipe(folder: RunFolder) -> None:
    """Raise where recipe.json is no longer what the checkpoint to go on from was trained with."""
    if folder.resume_from is None:
        return
    trained = read_json(folder.resume_from / "recipe.json")
    if trained is None:
        return
    if shown := differences(_deciding(trained), _deciding(folder.recipe)):
        raise TrainingError(
            f"{folder.path / 'recipe.json'} has changed since {folder.resume_from.name} was saved: "
            f"{shown}; put it back, or start a new run"
        )


def _deciding(recipe: Any) -> dict[str, Any]:
    parts = {name: recipe.get(name) for name in PARTS} if isinstance(recipe, dict) else {}
    return {name: value for name, value in flat(parts).items() if name not in FREE}
