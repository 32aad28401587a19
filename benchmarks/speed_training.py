"""Training: steps a second, memory and the wait for the first step.

Every step goes through `fst.training.trainer.Trainer`: the batch, its queries and the evaluation
points are drawn, the loss is differentiated, the gradient is clipped, and Adam moves the weights.
"""

import time
from dataclasses import replace

import torch
from speed_setting import (
    Conclusion,
    Row,
    Section,
    Setting,
    field_model,
    models,
    operator,
    path,
    peak_gib,
    release,
    samples,
)
from torch._dynamo.utils import compilation_time_metrics

from fst import parameter_count
from fst.training.loop import build_accelerator
from fst.training.schedules import WarmupCosine
from fst.training.settings import TrainingSettings
from fst.training.trainer import Trainer

# Steps after which compiled code is compiled, recorded and replayed.
WARMUP = 10
# How many times as long training is measured as a prediction.
LONGER = 3


def trainer(
    name: str,
    setting: Setting,
    settings: TrainingSettings,
    count: int,
    *,
    trained: bool = False,
) -> Trainer:
    """A model in training on waves; FNO is supervised on the whole grid."""
    config, device = setting.sizes.configs()[name], setting.device
    data = samples(setting.sizes, count, device, whole=name == "fno")
    network = field_model(setting).train() if trained else operator(config, device)
    if name == "fno":
        settings = replace(settings, queries=None)
    return Trainer(network, data, data, settings, build_accelerator(settings, device))


def training_settings(setting: Setting, *, compiled: bool, steps: int) -> TrainingSettings:
    sizes = setting.sizes
    return TrainingSettings(
        schedule=WarmupCosine(warmup=max(1, steps // 10), maximum=steps),
        clip=1.0,
        batch_size=sizes.batch,
        queries=sizes.queries,
        precision="bf16" if setting.cuda else "fp32",
        compile=compiled,
        compile_mode="reduce-overhead",
    )


def advance(training: Trainer, steps: int) -> float:
    """Seconds that so many updates take, the losses read as often as in a run."""
    start = time.perf_counter()
    for number in range(1, steps + 1):
        training.update()
        if number % training.settings.log_every == 0:
            training.read()
    training.read()
    return time.perf_counter() - start


def compilation_seconds() -> dict[str, float]:
    """What PyTorch says its compilers spent, phase by phase; phases contain others."""
    spent = {name: sum(times) for name, times in compilation_time_metrics.items()}
    longest = sorted(spent, key=spent.__getitem__, reverse=True)[:25]
    return {name: round(spent[name], 2) for name in longest}


class Training(Section):
    """Steps a second of every model; `plain` is ours with PyTorch's operations only.

    Ours goes on from the weights of `--run` where they are given: kernels that are fast with the
    small numbers of an untrained model may not be with others.
    """

    name = "training"
    columns = (
        "entry", "parameters", "steps_per_second", "ms", "peak_gib", "first_step_seconds",
        "ready_seconds",
    )  # fmt: skip

    def entries(self, setting: Setting) -> list[str]:
        ways = ("compiled", "eager") if setting.compiled else ("eager",)
        paths = ("fast", "plain")
        ours = [f"fst, {each}, {way}" for each in paths for way in ways]
        others = [name for name in models(setting) if name != "fst"]
        return ours + [f"{name}, {way}" for name in others for way in reversed(ways)]

    def alone(self, entry: str) -> bool:
        return True

    def forgetful(self, entry: str) -> bool:
        return "compiled" in entry

    def measure(self, entry: str, setting: Setting) -> Row:
        name, *middle, way = entry.split(", ")
        settings = training_settings(setting, compiled=way == "compiled", steps=100_000)
        release(setting.device)
        with path(middle[0] if middle else "fast"):
            start = time.perf_counter()
            trained = name == "fst" and setting.run is not None
            training = trainer(name, setting, settings, setting.sizes.samples, trained=trained)
            advance(training, 1)
            first = time.perf_counter() - start
            warmup = WARMUP if way == "compiled" else 2
            pace = advance(training, warmup) / warmup
            ready = time.perf_counter() - start
            if way == "compiled":  # the warm-up was slower than what follows
                pace = advance(training, 3) / 3
            steps = min(400, max(3, int(LONGER * setting.sizes.seconds / pace)))
            seconds = advance(training, steps)
        batch = next(training.batches.at(1))
        return {
            "model": name,
            "path": middle[0] if middle else None,
            "way": way,
            "trained": trained,
            "precision": settings.precision,
            "parameters": parameter_count(training.model),
            "batch": settings.batch_size,
            "observations": batch.observations.positions.shape[1],
            "queries": batch.queries.shape[1],
            "steps": steps,
            "steps_per_second": steps / seconds,
            "ms": 1e3 * seconds / steps,
            # Compilation included: replayed graphs allocate nothing that could be seen later.
            "peak_gib": peak_gib(setting.device),
            "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if setting.cuda else None,
            "first_step_seconds": first if way == "compiled" else None,
            "ready_seconds": ready if way == "compiled" else None,
            "compilation": compilation_seconds(),
        }

    def conclude(self, rows: list[Row], earlier: dict[str, list[Row]]) -> Conclusion:
        found = [row for row in rows if row["model"] == "fst"]
        by_path = {
            each: max((row["steps_per_second"] for row in found if row["path"] == each), default=0)
            for each in ("fast", "plain")
        }
        if not all(by_path.values()):
            return Conclusion()
        line = f"the fast path trains {by_path['fast'] / by_path['plain']:.2f} times as fast as"
        return Conclusion(lines=[f"{line} the plain one, each at its best"])
