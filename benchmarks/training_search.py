"""Which training settings reach the lowest validation error in a given time of updates?

    python benchmarks/training_search.py fast/burgers-single/fst --seconds 45 --out search \\
        --trial "" --trial "batch_size=24" --trial "batch_size=24 model.points_from_sobol=128"

A trial changes fields of a recipe: of its training settings by their own names, of its model as
`model.NAME`, of its data as `data.NAME`; `warmup` and `shape` (cosine or linear) are those of the
schedule. `optimizer=soap` is that of `soap.py`, whose bases turn every `soap_frequency` steps (10).
`band_decay=p` and `value_scale=c` change first weights alone: those that read band k of the Fourier
features fall by k^-p, and those that read observed values are c times as large.
`first_order=moments` (or `stencil`) gives FST's decoder a blend of `first_order.py`; `row_beta=b`
and `polar=True` are the variants of Muon of `muon_variants.py`. `stratified=True` draws one target
from each of as many equal parts of the grid, in place of targets that know nothing of each other.
The number of steps follows from the time, unless a trial says `steps=N`: the rate is measured
during the warm-up, which is the same for any number, for a few seconds at most. Compilation and
validation are not counted.
Several processes with the same --turns share a GPU: each measures its rate while the others wait,
so that a trial has the steps, and is given the seconds, of a GPU of its own.
`validation` is the mean over validation samples and `median` their median, which a single sample
of small norm cannot decide. `nearest` is the mean of decoding from the 16 nearest anchors, and
`anchors_vary` the standard deviation of anchor positions between validation samples.

Every trial adds a line to `rows.jsonl` in --out, failures too; trials that have theirs are skipped.
"""

import argparse
import ast
import dataclasses
import fcntl
import json
import math
import os
import statistics
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO
from unittest.mock import patch

import torch
from first_order import first_order
from jaxtyping import Int
from muon_variants import variant
from soap import Soap
from torch import Tensor

from fst.anchors import GapTokens
from fst.baselines import PerceiverIO
from fst.commands import train as command
from fst.data import samples
from fst.data.samples import Samples
from fst.evaluation.protocol import measuring
from fst.field import Field
from fst.metrics import relative_l2
from fst.operators import Operator
from fst.recipes import find, fitted
from fst.recipes.recipe import Recipe
from fst.terminal import Terminal
from fst.training import optimizer
from fst.training.budget import release
from fst.training.loop import build_accelerator
from fst.training.run_folder import git_state
from fst.training.schedules import Schedule, Stage, Stages, WarmupCosine
from fst.training.trainer import Trainer

UNTIMED = 20  # steps before the clock starts
TIMED = {"cpu": 80, "cuda": 300}  # and until the rate is known, but no longer than
TIMED_SECONDS = 5.0
LAST = 200  # steps whose mean loss is kept
NEAREST = 16


def parse(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@dataclasses.dataclass(frozen=True)
class Course:
    """What a trial changes that is no field of a recipe."""

    warmup: int = 300
    shape: str = "cosine"
    steps: int | None = None
    soap_frequency: int = 10
    band_decay: float = 0.0
    value_scale: float = 1.0
    first_order: str | None = None
    row_beta: float | None = None
    polar: bool = False
    stratified: bool = False


@torch.no_grad()
def rescale(model: Any, course: Course) -> None:
    """Other first weights for FST and Perceiver IO, with the same mean square for all bands."""
    fourier = model.fourier
    bands = torch.arange(1, fourier.bands + 1) ** -course.band_decay
    bands /= bands.square().mean().sqrt()
    axes = model.domain.axes
    columns = torch.cat((torch.ones(axes), bands.repeat(2 * axes)))  # g
    if isinstance(model, PerceiverIO):
        model.embed_position[0].weight *= columns
        model.embed_value.weight *= course.value_scale
        return
    readers = [model.encode_values[0].weight]
    if isinstance(model.predict_anchors.tokens, GapTokens):
        readers.append(model.predict_anchors.tokens.observe[0].weight)
    for weight in readers:
        weight[:, : len(columns)] *= columns
        weight[:, len(columns) : len(columns) + model.value_channels] *= course.value_scale
    model.initial_position.weight *= columns
    for evaluate in (model.layer.update.evaluate, model.decoder.evaluate):
        start = evaluate.sizes[0]
        evaluate.first.weight[:, start : start + len(columns)] *= columns


def changed(recipe: Recipe, trial: str, seed: int) -> tuple[Recipe, Course, bool]:
    """The recipe with a trial's changes, the rest of them, and whether SOAP trains it."""
    changes: dict[str, dict[str, Any]] = {"training": {}, "model": {}, "data": {}}
    for word in trial.split():
        name, _, value = word.partition("=")
        part, _, field = name.rpartition(".")
        changes[part or "training"][field] = parse(value)
    settings = changes["training"]
    own = {field.name for field in dataclasses.fields(Course)} & set(settings)
    course = Course(**{name: settings.pop(name) for name in own})
    soap = settings.get("optimizer") == "soap"
    if soap:
        settings["optimizer"] = "muon"  # groups of parameters are Muon's; SOAP takes them over
    settings |= {"seed": recipe.training.seed + 1000 * seed, "tensorboard": False}
    parts = {
        name: dataclasses.replace(getattr(recipe, name), **values)
        for name, values in changes.items()
    }
    return dataclasses.replace(recipe, **parts), course, soap


def stratified(
    solutions: int, count: int, total: int, generator: torch.Generator
) -> Int[Tensor, "b k"]:
    """As `random_subsets`, one index from each of `count` consecutive parts of all indices.

    The parts begin at a random index, so that every index is as likely as any other.
    """
    device = generator.device
    ends = torch.arange(count + 1, device=device) * total // count
    where = torch.rand(solutions, count, generator=generator, device=device)
    start = torch.randint(total, (solutions, 1), generator=generator, device=device)
    return (start + ends[:-1] + (where * ends.diff()).long()) % total


def schedule(warmup: int, steps: int, shape: str) -> Schedule:
    if shape == "cosine":
        return WarmupCosine(warmup, steps)
    return Stages((Stage(warmup, 0.0, 1.0), Stage(steps, 1.0, 0.0, "linear")), maximum=steps)


class Turns:
    """Processes that use one GPU beside each other, or one of them alone for a moment."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        files = (folder.joinpath(name).open("w") for name in ("compiler", "gate", "gpu"))
        self.compiler, self.gate, self.gpu = files

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Nobody measures meanwhile: compilers take the cores from whoever launches kernels."""
        with locked(self.compiler, fcntl.LOCK_SH):
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        # Whoever compiles or trains comes to an end first, and nobody begins.
        with locked(self.compiler), locked(self.gate), locked(self.gpu):
            yield

    @contextmanager
    def shared(self) -> Iterator[None]:
        with locked(self.gate):
            fcntl.flock(self.gpu, fcntl.LOCK_SH)
        with locked(self.gpu, fcntl.LOCK_SH):
            yield


@contextmanager
def locked(file: TextIO, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    fcntl.flock(file, kind)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def errors(trainer: Trainer) -> dict[str, float]:
    """Of operators the median of the validation errors; for FST the mean from the nearest anchors,
    and how far anchors move with the input."""
    model, validation = trainer.selected, trainer.validation
    if not isinstance(model, Operator):
        return {}
    assert isinstance(validation, Samples)
    every, nearest, positions = [], [], []
    with measuring(model):
        for rows in torch.arange(len(validation), device=validation.device).split(8):
            batch = validation.batch(rows)
            output = model(batch.observations)
            every += relative_l2(output(batch.queries), batch.targets, batch.mask).tolist()
            if isinstance(output, Field):
                answer = output(batch.queries, neighbors=NEAREST)
                nearest += relative_l2(answer, batch.targets, batch.mask).tolist()
                positions.append(output.anchors.positions)
    found = {"median": statistics.median(every)}
    if positions:
        varying = torch.cat(positions).std(dim=0).max(dim=-1).values.mean()
        found |= {"nearest": statistics.fmean(nearest), "anchors_vary": varying.item()}
    return found


def train(trainer: Trainer, seconds: float, course: Course, turns: Turns | None) -> dict[str, Any]:
    """Spend the time, or make the steps, then validate."""
    every = trainer.settings.log_every

    def updates(last: int, most: float = math.inf, turns: Turns | None = None) -> float:
        """Up to a step, or for so many seconds; how long that took."""
        start = time.perf_counter()
        while trainer.state.step < last and time.perf_counter() - start < most:
            with turns.shared() if turns else nullcontext():
                for _ in range(min(every, last - trainer.state.step)):
                    trainer.update()
                trainer.read()
        return time.perf_counter() - start

    trainer.schedule = schedule(course.warmup, 10**6, "cosine")
    start = time.perf_counter()
    with turns.compiling() if turns else nullcontext():
        updates(UNTIMED)
    first = time.perf_counter() - start
    with turns.alone() if turns else nullcontext():
        measured = updates(TIMED[trainer.device.type], TIMED_SECONDS)
    timed = trainer.state.step
    rate = (timed - UNTIMED) / measured
    steps = max(course.steps or round(seconds * rate), timed + 1, course.warmup + 1)
    trainer.schedule = schedule(course.warmup, steps, course.shape)
    spent = updates(steps, turns=turns)
    if turns is None:
        rate = (steps - timed) / spent
    losses = [loss for loss, _ in trainer.state.pending]
    start = time.perf_counter()
    trainer.validate()
    return {
        "steps": steps,
        "steps_per_second": round(rate, 2),
        "seconds": round(steps / rate, 2),
        "compilation_seconds": round(first, 1),
        "validation_seconds": round(time.perf_counter() - start, 1),
        "loss": statistics.fmean(losses[-LAST:]),
        "validation": trainer.state.history[-1][1],
    } | errors(trainer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--trial", action="append", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--turns", type=Path, help="folder of locks of processes on one GPU")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no trial after this")
    arguments = parser.parse_args()
    begun = time.monotonic()
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "rows.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    done = {(r["recipe"], r["trial"], r["seed"], r["asked"]) for r in map(json.loads, lines)}
    loaded: dict[Any, Any] = {}
    for seed in arguments.seeds:
        for trial in arguments.trial:
            key = (arguments.recipe, trial, seed, arguments.seconds)
            if key in done or time.monotonic() - begun > 60 * arguments.minutes:
                continue
            row: dict[str, Any] = dict(zip(("recipe", "trial", "seed", "asked"), key, strict=True))
            try:
                recipe = find(arguments.recipe)
                data = command.data_path(recipe, arguments.data)
                recipe, course, soap = changed(fitted(recipe, data, device), trial, seed)
                turns = arguments.turns and Turns(arguments.turns)
                if recipe.data not in loaded:
                    loaded.clear()
                    with turns.compiling() if turns else nullcontext():  # it may have to be made
                        found = command.load(recipe, data, device, Terminal(quiet=True))
                    loaded[recipe.data] = found
                training, validation = loaded[recipe.data]
                model = command.prepare_model(recipe, training.samples)
                if (course.band_decay, course.value_scale) != (0.0, 1.0):
                    rescale(model, course)
                if course.first_order:
                    first_order(model, course.first_order)
                trainer = Trainer(
                    model, training.samples, validation.samples, recipe.training,
                    build_accelerator(recipe.training, device),
                )  # fmt: skip
                if soap:
                    groups, epsilon = trainer.optimizer.param_groups, recipe.training.epsilon
                    trainer.optimizer = Soap(
                        groups, frequency=course.soap_frequency, epsilon=epsilon
                    )
                orthogonalizer = variant(course.row_beta, course.polar)
                draw = stratified if course.stratified else samples.random_subsets
                with (
                    patch.object(optimizer, "Orthogonalizer", orthogonalizer),
                    patch.object(samples, "random_subsets", draw),
                ):
                    row |= train(trainer, arguments.seconds, course, turns)
                trainer.batches.close()
                del trainer
            except Exception as error:
                traceback.print_exc()
                row["error"] = f"{type(error).__name__}: {error}"
            release()
            row |= {"hardware": name, "threads": torch.get_num_threads()}
            row |= {"torch": torch.__version__, "commit": (git_state() or {}).get("commit")}
            with file.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
                stream.flush()
                os.fsync(stream.fileno())
            shown = row.get("validation", math.nan)
            print(
                f"{shown:.4f}  loss {row.get('loss', math.nan):.2e}  {row.get('steps', 0):6d} steps"
                f" {row.get('steps_per_second', 0):6.1f}/s  first {row.get('compilation_seconds')}"
                f"  seed {seed}  {trial or 'the recipe'}", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
