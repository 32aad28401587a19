"""`fst train`: data, model, loop, run folder, in that order."""

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console

from fst.base import Model, build_model
from fst.commands.kept import write_json
from fst.commands.same_recipe import check_same_recipe
from fst.data import ImageData, PointData, ResidentImages, StreamedImages
from fst.data.errors import DataError
from fst.data.samples import Rows, Samples, moments
from fst.data.splits import TrainingSplit, ValidationSplit
from fst.evaluation.protocol import EvaluationSettings
from fst.operators import Operator
from fst.pretrained import parse_json
from fst.recipes import own, own_images
from fst.recipes.recipe import DataSource, Recipe, recipe_from_json
from fst.terminal import Terminal
from fst.training.batches import check_batch_size
from fst.training.errors import TrainingError
from fst.training.loop import Summary
from fst.training.loop import train as run_training
from fst.training.records import check_wandb
from fst.training.run_folder import RunFolder, held


class OtherDataError(TrainingError):
    """The data are not those that something was begun with."""


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
    check_batch_size(recipe.training, PartialState().num_processes)
    if PartialState().is_main_process:
        check_wandb(recipe.training)
    training, validation = load(recipe, data, place, console)
    return start(recipe, out, data, training, validation, console)


def start(
    recipe: Recipe,
    out: Path,
    data: Path,
    training: TrainingSplit[Rows],
    validation: ValidationSplit[Rows],
    console: Console | None = None,
) -> Summary:
    """Train from the beginning with `data`, which are loaded: a start that fails earlier leaves no
    folder behind."""
    model = prepare_model(recipe, training.samples)
    described = {"data": str(data.resolve())} | describe(training.samples)
    described |= recipe.data.fingerprint(data) | left_out(training.samples)
    with held(out):
        folder = RunFolder.create(out, recipe.to_json(), described)
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
    RunFolder.resume(out, checkpoint)  # a mistake is told at once
    with held(out):
        return _resume(RunFolder.resume(out, checkpoint), data, place, console)


def _resume(
    folder: RunFolder, data: Path | None, place: torch.device, console: Console | None
) -> Summary:
    out = folder.path
    if (out / "summary.json").is_file():
        raise TrainingError(f"{out} has finished; score it with: fst evaluate {out}")
    recipe = recipe_from_json(folder.recipe, source=str(out / "recipe.json"))
    check_same_recipe(folder)
    path = data_of_run(recipe, out, data)
    check_fits(recipe, out, path)
    training, validation = load(recipe, path, place, console)
    check_same_data(out, recipe.data, path, training.samples)
    if data is not None and PartialState().is_main_process:
        record_data(out, data)
    model = prepare_model(recipe, training.samples)
    return run_training(model, training, validation, recipe.training, folder, console=console)


def load(
    recipe: Recipe, data: Path, device: torch.device, console: Console | None
) -> tuple[TrainingSplit[Rows], ValidationSplit[Rows]]:
    """Training and validation on the device; missing files are made first, by one process."""
    voice = console if PartialState().is_main_process else Terminal(quiet=True)
    with PartialState().main_process_first():
        recipe.data.prepare(data, device, voice)
    augment = recipe.training.augment
    if isinstance(recipe.data, ImageData):  # which also says what it had to leave out
        return recipe.data.load(data, device, augment=augment, console=voice)
    return recipe.data.load(data, device, augment=augment)


def describe(training: Rows) -> dict[str, Any]:
    """Enough of the training data to notice when others have taken their place."""
    if isinstance(training, ResidentImages | StreamedImages):
        names = "\n".join(training.names).encode()
        labels = json.dumps(training.labels.tolist()).encode()
        return {
            "training_samples": len(training),
            "class_names": list(training.class_names),
            "fingerprint": hashlib.sha256(names + labels).hexdigest()[:16],
        }
    assert isinstance(training, Samples)
    statistics = training.statistics()
    condition_mean, condition_deviation = moments(training.conditions())
    return {
        "training_samples": len(training),
        "output_mean": statistics.output_mean.reshape(-1).tolist(),
        "output_deviation": statistics.output_deviation.reshape(-1).tolist(),
        "value_mean": statistics.value_mean.reshape(-1).tolist(),
        "value_deviation": statistics.value_deviation.reshape(-1).tolist(),
        "condition_mean": condition_mean.tolist(),
        "condition_deviation": condition_deviation.tolist(),
    }


def left_out(training: Rows) -> dict[str, Any]:
    """Images that cannot be read do not stop a run, but it keeps their names."""
    if not isinstance(training, ResidentImages | StreamedImages):
        return {}
    return {"skipped": [f"{item.name}: {item.reason}" for item in training.skipped]}


def check_fits(recipe: Recipe, run: Path, data: Path) -> None:
    """Raise where a user's own points are of another kind than those a run was trained on."""
    if not isinstance(recipe.data, PointData):
        return
    file = recipe.data.describe(data)
    different = own.differences(recipe, file)
    if different:
        shown = (f"{name} was {before}, is {now}" for name, (before, now) in different.items())
        raise DataError(
            f"{file.path}: is of another kind than the data that {run} was started with: "
            f"{'; '.join(shown)}"
        )


def check_same_data(
    run: Path, source: DataSource, data: Path, training: Rows | None = None
) -> None:
    """Raise unless `data` hold the splits that a run was started with; `training` where loaded."""
    found = ({} if training is None else describe(training)) | source.fingerprint(data)
    require_same_data(run, read_run(run), found, source=f" in {data}")


def require_same_data(
    folder: Path, recorded: dict[str, Any], found: dict[str, Any], source: str = ""
) -> None:
    """Raise where a description of data differs from the one recorded in a folder.

    What an older version did not record cannot be compared.
    """
    for name, value in found.items():
        before = recorded.get(name, value)
        if not _same(before, value):
            raise OtherDataError(
                f"the training data{source} are not those that {folder} was started with: "
                f"{name} was {_short(before)}, is {_short(value)}"
            )


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(_same, before, now))
    if isinstance(before, str) or isinstance(now, str):
        return bool(before == now)
    # Sums on another device may differ in their last digits.
    return math.isclose(float(before), float(now), rel_tol=1e-5, abs_tol=1e-7)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_data_folder(recipe: Recipe, data: Path | None) -> None:
    """Raise where --data names something that is not this recipe's data.

    Files are made in a folder that is absent, empty or already holds some of them; never among
    somebody's other files.
    """
    if data is None or isinstance(recipe.data, PointData | ImageData) or not data.exists():
        return
    if not data.is_dir():
        raise TrainingError(f"--data must be a folder for {recipe.name}, {data} is a file")
    names = {path.name for path in data.iterdir()}
    wanted = [path.name for path in recipe.data.files(data)]
    if names and not any(
        f"{name}{end}" in names for name in wanted for end in ("", ".part", ".part.new")
    ):
        raise TrainingError(
            f"{data} holds none of the files that {recipe.name} needs, such as {wanted[0]}; name "
            "their folder, or an empty one to make them in"
        )


def check_grids(recipe: Recipe) -> None:
    """Raise before training, not after it, where the evaluation asks for an impossible grid."""
    if not isinstance(recipe.evaluation, EvaluationSettings):
        return
    if isinstance(recipe.data, PointData):
        if recipe.evaluation.grids:
            raise TrainingError(
                f"evaluation.grids must be empty for {recipe.name}, whose points lie on no grid, "
                f"got {recipe.evaluation.grids}"
            )
        return
    if isinstance(recipe.data, ImageData):
        return
    for grid in recipe.evaluation.grids:
        if any(count > size for count, size in zip(grid, recipe.data.grid, strict=True)):
            raise TrainingError(
                f"evaluation.grids must fit into the {recipe.data.grid} grid of the data, "
                f"got {grid}"
            )


def prepare_model(recipe: Recipe, training: Rows) -> Model:
    """The untrained model; an operator with the statistics of the training data."""
    torch.manual_seed(recipe.training.seed)
    try:
        model = build_model(recipe.model)
    except ImportError as error:  # of a package that not every user needs
        raise TrainingError(str(error)) from None
    recipe.training.objective.check(model, training)
    if not isinstance(model, Operator):
        return model
    assert isinstance(training, Samples)
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
    if name not in ("cpu", "cuda"):
        hint = "; CUDA_VISIBLE_DEVICES=N chooses a GPU" if name.startswith("cuda:") else ""
        raise TrainingError(f"device must be cpu or cuda, got {name!r}{hint}")
    if name == "cuda" and not torch.cuda.is_available():
        raise TrainingError("device cuda was asked for, but PyTorch sees no GPU")
    device: torch.device = PartialState(cpu=name == "cpu").device
    return device


def data_path(recipe: Recipe, data: Path | None) -> Path:
    """Where a recipe's data lie: the path given, or its own folder under ./data."""
    if data is not None:
        return data
    if isinstance(recipe.data, PointData):
        raise TrainingError(f"recipe {recipe.name} needs a file of yours: add --data FILE")
    if not recipe.data_folder:
        raise TrainingError(f"recipe {recipe.name} needs images of yours: add --data FOLDER")
    return Path("data") / recipe.data_folder


def recorded_data(run: Path) -> Path:
    """The data that a run was trained on."""
    described = read_run(run)
    if not isinstance(described.get("data"), str):
        raise TrainingError(f"{run / 'run.json'} does not name the data: add --data")
    return Path(described["data"])


def record_data(run: Path, data: Path) -> None:
    """Note where the data of a run were found: whoever asks next looks there."""
    described = read_run(run)
    if described.get("data") != str(data.resolve()):
        write_json(run / "run.json", described | {"data": str(data.resolve())})


def data_of_run(recipe: Recipe, run: Path, data: Path | None) -> Path:
    """The path given, or the one recorded; an error where the user's own data have moved."""
    path = data or recorded_data(run)
    if data is None and isinstance(recipe.data, PointData | ImageData) and not path.exists():
        raise TrainingError(
            f"{path}: the data of {run} are no longer there; say with --data where they are now"
        )
    return path


def read_run(run: Path) -> dict[str, Any]:
    """What a run recorded of its data; nothing where that cannot be read."""
    try:
        described = parse_json((run / "run.json").read_text())
    except (OSError, ValueError):
        return {}
    return described if isinstance(described, dict) else {}


def fit_to_data(recipe: Recipe, data: Path) -> Recipe:
    """A recipe takes from the data what they decide: the sizes of points, the classes of images.

    Also how many images are held out, where the recipe asks for a share of them.
    """
    if isinstance(recipe.data, ImageData):
        recipe = own_images.with_share_held_out(recipe, data)
        assert isinstance(recipe.data, ImageData)
        return own_images.fitted(recipe, recipe.data.describe(data))
    if not isinstance(recipe.data, PointData):
        return recipe
    return own.fitted(recipe, recipe.data.describe(data))
