"""`fst train`: data, model, loop, run folder, in that order."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console

from fst.data import PointData
from fst.data.samples import Samples
from fst.data.splits import TrainingSplit, ValidationSplit
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
    RunFolder.require_free(out)
    check_data_folder(recipe, data)
    data = data_path(recipe, data)
    recipe = fit_to_data(recipe, data)
    check_grids(recipe)
    training, validation = load(recipe, data, place, console)
    # Only now: a start that failed leaves no folder behind.
    folder = RunFolder.create(out, recipe.to_json())
    if PartialState().is_main_process:
        described = {"data": str(data.resolve())} | describe(training.samples)
        folder.write_json("run.json", described)
    model = prepare_model(recipe, training.samples)
    return run_training(model, training, validation, recipe.training, folder, console=console)


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
    training, validation = load(recipe, data or recorded_data(out), place, console)
    check_same_data(out, training.samples)
    model = prepare_model(recipe, training.samples)
    return run_training(model, training, validation, recipe.training, folder, console=console)


def load(
    recipe: Recipe, data: Path, device: torch.device, console: Console | None
) -> tuple[TrainingSplit, ValidationSplit]:
    """Training and validation on the device; missing files are made first, by one process."""
    with PartialState().main_process_first():
        recipe.data.prepare(data, device, console)
    return recipe.data.load(data, device, augment=recipe.training.augment)


def describe(training: Samples) -> dict[str, Any]:
    """Enough of the training data to notice when others have taken their place."""
    statistics = training.statistics()
    return {
        "training_samples": len(training),
        "output_mean": statistics.output_mean.reshape(-1).tolist(),
        "output_deviation": statistics.output_deviation.reshape(-1).tolist(),
    }


def check_same_data(run: Path, training: Samples) -> None:
    """Raise unless a resumed run sees the data it was started with."""
    recorded, found = read_run(run), describe(training)
    for name, value in found.items():
        before = recorded.get(name, value)
        pairs = zip(_numbers(before), _numbers(value), strict=False)
        # Sums on another device may differ in their last digits.
        if not all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-7) for a, b in pairs):
            raise TrainingError(
                f"the training data are not those that {run} was started with: {name} was "
                f"{before}, is {value}"
            )


def _numbers(value: Any) -> list[float]:
    return [float(number) for number in (value if isinstance(value, list) else [value])]


def check_data_folder(recipe: Recipe, data: Path | None) -> None:
    """Raise where --data names something that is not this recipe's data.

    Files are made in a folder that is absent, empty or already holds some of them; never among
    somebody's other files.
    """
    if data is None or isinstance(recipe.data, PointData) or not data.exists():
        return
    if not data.is_dir():
        raise TrainingError(f"--data must be a folder for {recipe.name}, {data} is a file")
    names = {path.name for path in data.iterdir()}
    wanted = [path.name for path in recipe.data.files(data)]
    if names and not any(name in names or f"{name}.part" in names for name in wanted):
        raise TrainingError(
            f"{data} holds none of the files that {recipe.name} needs, such as {wanted[0]}; name "
            "their folder, or an empty one to make them in"
        )


def check_grids(recipe: Recipe) -> None:
    """Raise before training, not after it, where the evaluation asks for an impossible grid."""
    if isinstance(recipe.data, PointData):
        return
    for grid in recipe.evaluation.grids:
        if any(count > size for count, size in zip(grid, recipe.data.grid, strict=True)):
            raise TrainingError(
                f"evaluation.grids must fit into the {recipe.data.grid} grid of the data, "
                f"got {grid}"
            )


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
    described = read_run(run)
    if not isinstance(described.get("data"), str):
        raise TrainingError(f"{run / 'run.json'} does not name the data: add --data")
    return Path(described["data"])


def read_run(run: Path) -> dict[str, Any]:
    """What a run recorded of its data; nothing where that cannot be read."""
    try:
        described = json.loads((run / "run.json").read_text())
    except (OSError, ValueError):
        return {}
    return described if isinstance(described, dict) else {}


def fit_to_data(recipe: Recipe, data: Path) -> Recipe:
    """A recipe for a user's own file takes its sizes from that file."""
    if not isinstance(recipe.data, PointData):
        return recipe
    return own.fitted(recipe, recipe.data.describe(data))
