"""`fst train`: data, model, loop, run folder, in that order."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import PartialState
from rich.console import Console

from fst.data import PointData
from fst.data.samples import Samples
from fst.operators import Operator
from fst.recipes import own
from fst.recipes.recipe import Recipe, build_model, recipe_from_json
from fst.training.errors import TrainingError
from fst.training.loop import Summary
from fst.training.loop import train as run_training
from fst.training.run_folder import RunFolder


def train(
    recipe: Recipe,
    out: Path,
    *,
    data: Path | None = None,
    device: str | None = None,
    console: Console | None = None,
) -> Summary:
    """Start a new run in `out`, which must be empty or absent."""
    place = choose_device(device)
    data = data_path(recipe, data)
    recipe = fit_to_data(recipe, data)
    folder = RunFolder.create(out, recipe.to_json())
    if PartialState().is_main_process:
        folder.write_json("run.json", {"data": str(data.resolve())})
    return _train(recipe, folder, data, place, console)


def resume(
    out: Path,
    *,
    checkpoint: str | None = None,
    data: Path | None = None,
    device: str | None = None,
    console: Console | None = None,
) -> Summary:
    """Continue the run in `out` from its newest checkpoint, or from the one named."""
    place = choose_device(device)
    folder = RunFolder.resume(out, checkpoint)
    if (out / "summary.json").is_file():
        raise TrainingError(f"{out} has finished; score it with: fst evaluate {out}")
    recipe = recipe_from_json(folder.recipe, source=str(out / "recipe.json"))
    return _train(recipe, folder, data or recorded_data(out), place, console)


def _train(
    recipe: Recipe,
    folder: RunFolder,
    data: Path,
    device: torch.device,
    console: Console | None,
) -> Summary:
    with PartialState().main_process_first():
        recipe.data.prepare(data, device, console)
    training, validation = recipe.data.load(data, device, augment=recipe.training.augment)
    model = prepare_model(recipe, training.samples)
    return run_training(model, training, validation, recipe.training, folder, console=console)


def prepare_model(recipe: Recipe, training: Samples) -> Operator:
    """The untrained model, with the statistics of the training data."""
    torch.manual_seed(recipe.training.seed)
    model = build_model(recipe.model)
    statistics = training.statistics()
    if recipe.standardization is not None:
        mean, deviation = (torch.tensor(number) for number in recipe.standardization)
        statistics = replace(
            statistics,
            value_mean=mean,
            value_deviation=deviation,
            output_mean=mean,
            output_deviation=deviation,
        )
    model.standardize_values.set(statistics.value_mean, statistics.value_deviation)
    model.standardize_outputs.set(statistics.output_mean, statistics.output_deviation)
    if model.condition_channels:
        model.standardize_condition(training.conditions())
    return model


def choose_device(name: str | None) -> torch.device:
    """The device asked for, or a GPU where there is one. With several processes, this one's.

    To be called first: Accelerate settles on a device when it is first asked for anything.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise TrainingError(f"device must be cpu or cuda, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise TrainingError("device cuda was asked for, but PyTorch sees no GPU")
    return PartialState(cpu=device.type == "cpu").device


def data_path(recipe: Recipe, data: Path | None) -> Path:
    """Where a recipe's data lie: the path given, or its own folder under ./data."""
    if data is not None:
        return data
    if isinstance(recipe.data, PointData):
        raise TrainingError(f"recipe {recipe.name} needs a file of yours: add --data FILE")
    return Path("data") / recipe.data_folder


def recorded_data(run: Path) -> Path:
    """The data that a run was trained on."""
    try:
        return Path(json.loads((run / "run.json").read_text())["data"])
    except (OSError, ValueError, KeyError, TypeError):
        raise TrainingError(f"{run / 'run.json'} does not name the data: add --data") from None


def fit_to_data(recipe: Recipe, data: Path) -> Recipe:
    """A recipe for a user's own file takes its sizes from that file."""
    if not isinstance(recipe.data, PointData):
        return recipe
    return own.fitted(recipe, recipe.data.describe(data))
