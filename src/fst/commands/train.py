"""`fst train`: data, model, loop, run folder, in that order."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from torch import Tensor

from fst.base import Model, build_model, parameter_count
from fst.config import OperatorConfig
from fst.data.samples import Rows
from fst.data.source import DataSource
from fst.evaluation.rows import hardware_name
from fst.io import differences, flat, read_json, read_object, write_json
from fst.pretrained import check_shapes, find, read
from fst.recipes.recipe import Recipe, recipe_from_json
from fst.terminal import Terminal, duration
from fst.training.budget import FEWEST_STEPS, Plan, StepBudget, TimeBudget, fit_to_time, make_plan
from fst.training.checkpoint import load as load_checkpoint
from fst.training.logging import check_wandb
from fst.training.loop import Splits, Summary
from fst.training.loop import train as run_training
from fst.training.run_folder import RunFolder, held
from fst.training.settings import TrainingError, TrainingSettings
from fst.training.trainer import check_batch_size
from fst.types import parse_device

RATE_FACTOR = "rate_factor"
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


def choose_device(name: str | None) -> torch.device:
    """The device of this process, which may be one of several that train together.

    To be called first: Accelerate settles on a device when it is first asked for anything.
    """
    device: torch.device = PartialState(cpu=parse_device(name).type == "cpu").device
    return device


def train(
    recipe: Recipe,
    out: Path,
    *,
    data: Path | None = None,
    device: str | None = None,
    minutes: float | None = None,
    most_minutes: float | None = None,
    weights: str | Path | None = None,
    reasons: Mapping[str, str] | None = None,
    console: Console | None = None,
) -> Summary:
    """Start a new run in `out`, which must be empty or absent.

    With `minutes` its steps fill this time; with `most_minutes` they are those of the schedule, or
    fewer. `weights` are a run or a saved model to start from. `reasons` say why a recipe is as it
    is, for one block of text before training starts.
    """
    chosen = choose_device(device)
    RunFolder.require_free(out)
    if minutes is not None:
        TimeBudget(60 * minutes)  # raises before the data are read
    recipe.data.check_options(recipe)  # before training, not after it
    data = data_path(recipe, data)
    recipe = recipe.data.fit(recipe, data)
    if weights is not None:
        with torch.device("meta"):  # shapes alone, before the data are read
            untrained = _build(recipe)
        read_weights(untrained, weights)
    check_batch_size(recipe.training, PartialState().num_processes)
    if PartialState().is_main_process:
        check_wandb(recipe.training)
    splits = load(recipe, data, chosen, console)
    # A run of a few steps is over before it is measured.
    told = reasons is not None and recipe.training.schedule.maximum >= FEWEST_STEPS
    if minutes is not None or told:
        recipe = fit_to_budget(recipe, minutes, most_minutes, reasons or {}, splits, console)
    return start(recipe, out, data, splits, console, weights=weights)


def fit_to_budget(
    recipe: Recipe,
    minutes: float | None,
    most_minutes: float | None,
    reasons: Mapping[str, str],
    splits: Splits,
    console: Console | None,
) -> Recipe:
    """Measure the recipe on this machine, fit its steps into a time, and say what follows."""
    settings, most = recipe.training, recipe.training.schedule.maximum
    time, samples = minutes if minutes is not None else most_minutes, splits[0].samples
    build = partial(prepare_model, recipe, samples)
    voice = (console or Terminal()) if PartialState().is_main_process else Terminal(quiet=True)
    voice.print("measuring how long a step takes on this machine", highlight=False)
    if time is None:
        plan = make_plan(StepBudget(most), build, settings, splits, validate=True)
    else:
        # A time that somebody asked for is used up; one that was chosen ends with the schedule.
        most_steps = most if minutes is None else math.inf
        settings, plan = fit_to_time(60 * time, most_steps, build, settings, splits)
        if minutes is not None or plan.steps < most:
            fitted = f"as many as fit into {time:g} minutes; --steps or --minutes"
            reasons = {**reasons, "steps": fitted}
    if plan.note is not None:
        voice.print(plan.note, highlight=False)
        settings = replace(settings, compile=False)
    recipe = replace(recipe, training=settings)
    block = _block(recipe, reasons, plan, build(), len(samples))
    voice.print(block, highlight=False, soft_wrap=True)
    return recipe


def _block(
    recipe: Recipe, reasons: Mapping[str, str], plan: Plan, model: Model, samples: int
) -> str:
    """What a run will do, why, and how long it will take."""
    settings, measured, config = recipe.training, plan.calibration, recipe.model
    condition = ""  # of models that see none
    if isinstance(config, OperatorConfig) and config.condition_channels:
        condition = "its logarithm" if config.log_condition else "as it is"
    rate, compiling = measured.steps_per_second, measured.compilation_seconds
    validations = math.ceil(plan.steps / settings.validate_every)
    seconds = plan.steps / rate + validations * measured.validation_seconds
    speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
    drawn = "all targets" if settings.queries is None else f"{settings.queries:,} targets"
    average = "no average" if settings.average is None else f"weights averaged ({settings.average})"
    epochs = plan.steps * settings.batch_size / samples
    lines = {
        "model": f"{parameter_count(model):,} parameters",
        "condition": condition,
        "loss": settings.objective.loss_name,
        "batch": f"{settings.batch_size} samples, {drawn} of each",
        "steps": f"{plan.steps:,}, which is {epochs:,.0f} epochs",
        "regularisation": f"weight decay {settings.weight_decay:g}, {average}, best on validation",
        "time": f"{duration(seconds)} at {speed} steps a second (measured)"
        + (f", and at most {duration(compiling)} to compile" if compiling >= 1 else ""),
    }
    shown = [
        f"  {name:15}{text}{f'  [{reasons[name]}]' if name in reasons else ''}"
        for name, text in lines.items()
        if text
    ]
    return "\n".join((recipe.name, *shown))


def start(
    recipe: Recipe,
    out: Path,
    data: Path,
    splits: Splits,
    console: Console | None = None,
    *,
    weights: str | Path | None = None,
) -> Summary:
    """Train from the beginning with `data`, which are loaded: a start that fails earlier leaves no
    folder behind."""
    samples, settings = splits[0].samples, recipe.training
    model = prepare_model(recipe, samples)
    described = {"data": str(data.resolve())} | samples.describe()
    described |= recipe.data.fingerprint(data) | samples.left_out()
    described["labels"] = recipe.data.labels(data)
    if weights is not None:
        model.load_state_dict(read_weights(model, weights))
        before = read_object(Path(weights) / "run.json").get("data")
        if recipe.data.own and before != str(data.resolve()):
            model.fit_statistics(samples, recipe.standardization)  # the user's own units
        described["from"] = str(Path(weights).resolve() if Path(weights).exists() else weights)
        described["before"] = trained_before(weights)
    with held(out):
        folder = RunFolder.create(out, recipe.to_json(), described)
        summary = run_training(model, *splits, settings, folder, console=console)
    tell_error(recipe, summary, splits, data, console)
    return summary


def trained_before(weights: str | Path) -> list[dict[str, Any]]:
    """What training the weights of a run has cost: that run last, before it those it came from."""
    described, summary, environment = (
        read_object(Path(weights) / f"{name}.json") for name in ("run", "summary", "environment")
    )
    if not summary:
        return []
    own = {name: summary.get(name) for name in ("steps", "update_seconds")}
    own |= {"hardware": hardware_name(environment.get("hardware") or {})}
    own |= {"commit": (environment.get("git") or {}).get("commit")}
    return [*described.get("before", []), own]


def resume(
    out: Path,
    *,
    checkpoint: str | None = None,
    rate_factor: float | None = None,
    data: Path | None = None,
    device: str | None = None,
    console: Console | None = None,
) -> Summary:
    """Continue a run; `rate_factor` multiplies the learning rates, of later starts as well."""
    chosen = choose_device(device)
    if rate_factor is not None and not 0 < rate_factor <= 1:
        raise TrainingError(f"rate_factor must be above 0 and at most 1, got {rate_factor}")
    RunFolder.resume(out, checkpoint)  # a mistake is told at once
    with held(out):
        folder = RunFolder.resume(out, checkpoint)
        if (out / "summary.json").is_file():
            raise TrainingError(
                f"{out} has finished; score it with: fst evaluate {out}, or train it longer in a "
                f"new folder: fst train --from {out} --out NEW --steps N"
            )
        recipe = recipe_from_json(folder.recipe, source=str(out / "recipe.json"))
        check_same_recipe(folder)
        path = data_of_run(recipe, out, data)
        recipe.data.check_fits(recipe, out, path)
        splits = load(recipe, path, chosen, console)
        check_same_data(out, recipe.data, path, splits[0].samples)
        if data is not None and PartialState().is_main_process:
            record_data(out, data)
        model = prepare_model(recipe, splits[0].samples)
        settings = _with_lower_rates(recipe.training, out, rate_factor or 1.0)
        summary = run_training(model, *splits, settings, folder, console=console)
        tell_error(recipe, summary, splits, path, console)
        return summary


def tell_error(
    recipe: Recipe, summary: Summary, splits: Splits, data: Path, console: Console | None
) -> None:
    """The last line: how good the validation error is beside trivial predictors."""
    # By the measure of the test, whatever selected the weights.
    error = summary.validation_errors.get("relative_l2", summary.validation_error)
    if console is None or error is None or not PartialState().is_main_process:
        return
    words = recipe.evaluation.describe_validation(error, splits, recipe.data, data)
    console.print(words, markup=False, highlight=False, soft_wrap=True)


def _with_lower_rates(settings: TrainingSettings, run: Path, factor: float) -> TrainingSettings:
    """The settings with rates times all factors that a run was ever resumed with."""
    described = read_object(run / "run.json")
    before = described.get(RATE_FACTOR)
    total = factor * (before if isinstance(before, float) else 1.0)
    PartialState().wait_for_everyone()  # until all have read
    if factor != 1 and PartialState().is_main_process:
        write_json(run / "run.json", described | {RATE_FACTOR: total})
    predictor = settings.predictor_learning_rate
    return replace(
        settings,
        learning_rate=total * settings.learning_rate,
        predictor_learning_rate=None if predictor is None else total * predictor,
    )


def load(recipe: Recipe, data: Path, device: torch.device, console: Console | None) -> Splits:
    """Training and validation on the device; missing files are made first, by one process."""
    voice = console if PartialState().is_main_process else Terminal(quiet=True)
    with PartialState().main_process_first():
        recipe.data.prepare(data, device, voice)
    return recipe.data.load(data, device, augment=recipe.training.augment, console=voice)


def check_same_data(
    run: Path, source: DataSource, data: Path, loaded: Rows | None = None
) -> dict[str, Any]:
    """Raise unless `data` hold the splits of a run; `loaded` is its training split, if it is.

    Their fingerprint, which is empty where `data` hold a test alone.
    """
    fingerprint = source.fingerprint(data)
    found = ({} if loaded is None else loaded.describe()) | fingerprint
    require_same_data(run, read_object(run / "run.json"), found, source=f" in {data}")
    return fingerprint


def require_same_data(
    folder: Path, recorded: dict[str, Any], found: dict[str, Any], source: str = ""
) -> None:
    """Raise where data differ from those that a folder recorded; older ones recorded less."""
    for name, value in found.items():
        before = recorded.get(name, value)
        if name.endswith("_deviation"):  # older runs recorded 1 for a constant channel
            before, value = ([each or 1.0 for each in std] for std in (before, value))
        if not _same(before, value):
            raise TrainingError(
                f"the training data{source} are not those that {folder} was started with: "
                f"{name} was {before!s:.80}, is {value!s:.80}"
            )


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(_same, before, now))
    if isinstance(before, str) or isinstance(now, str):
        return bool(before == now)
    # Sums on another device may differ in their last digits.
    return math.isclose(float(before), float(now), rel_tol=1e-5, abs_tol=1e-7)


def prepare_model(recipe: Recipe, training: Rows) -> Model:
    """The untrained model, with the statistics of the training data."""
    torch.manual_seed(recipe.training.seed)
    model = _build(recipe)
    recipe.training.objective.check(model, training)
    model.fit_statistics(training, recipe.standardization)
    return model


def _build(recipe: Recipe) -> Model:
    try:
        return build_model(recipe.model)
    except ImportError as error:  # of a package that not every user needs
        raise TrainingError(str(error)) from None


def saved_model(source: str | Path) -> Path:
    """The folder of weights that a run, or a folder of save_pretrained, holds."""
    best = Path(source) / "best"
    return best if best.is_dir() else find(source)


def saved_config(source: str | Path, recipe: Recipe) -> Any:
    """The configuration that weights were saved with, of the recipe's kind of model."""
    config = Model.from_pretrained(saved_model(source)).config
    if type(config) is not type(recipe.model):
        raise TrainingError(
            f"{source}: holds a {type(config).__name__}, {recipe.name} trains a "
            f"{type(recipe.model).__name__}"
        )
    return config


def read_weights(model: Model, source: str | Path) -> dict[str, Tensor]:
    """Weights, with the statistics that they were trained with; raise unless they fit the model."""
    _, saved, weights = read(saved_model(source))
    names = saved.get("class_names") if isinstance(saved, dict) else None
    wanted: Any = getattr(model.config, "class_names", None)
    if names and wanted and len(names) != len(wanted):
        raise TrainingError(
            f"{source}: its classifier has {len(names)} classes, the data have {len(wanted)}"
        )
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    check_shapes(weights, expected, str(source))
    return weights


def data_path(recipe: Recipe, data: Path | None) -> Path:
    """Where a recipe's data lie: the path given, or its own folder under ./data.

    Files are made in a folder that is absent, empty or already holds some of them; never among
    somebody's other files.
    """
    if data is None:
        if recipe.data.own and not recipe.data_folder:
            raise TrainingError(f"recipe {recipe.name} needs {recipe.data.own}")
        return Path("data") / recipe.data_folder
    if recipe.data.own or not data.exists():
        return data
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
    return data


def stored_data_path(run: Path) -> Path:
    described = read_object(run / "run.json")
    if not isinstance(described.get("data"), str):
        raise TrainingError(f"{run / 'run.json'} does not name the data: add --data")
    return Path(described["data"])


def record_data(run: Path, data: Path) -> None:
    """Note where the data of a run were found: whoever asks next looks there."""
    described = read_object(run / "run.json")
    if described.get("data") != str(data.resolve()):
        write_json(run / "run.json", described | {"data": str(data.resolve())})


def data_of_run(recipe: Recipe, run: Path, data: Path | None) -> Path:
    """The path given, or the one recorded; an error where the user's own data have moved."""
    path = data or stored_data_path(run)
    if data is None and recipe.data.own and not path.exists():
        raise TrainingError(
            f"{path}: the data of {run} are no longer there; say with --data where they are now"
        )
    return path


def check_same_recipe(folder: RunFolder) -> None:
    """Raise where recipe.json is no longer what the checkpoint to go on from was trained with."""
    if folder.resume_from is None:
        return
    load_checkpoint(folder.resume_from)  # or the error offers a good one
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
