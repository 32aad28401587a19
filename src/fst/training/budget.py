"""A budget for training: a number of steps, or a time that is turned into one by measuring.

Enters: "10m", "90s", "2h" or "20000steps". Leaves: the training settings that spend it,

    factor(s) = s / w             for s < w,    w = min(1000, n / 10),
                (1 + cos π(s - w)/(n - w)) / 2  from there to the last step n,

the same shape for every model and every budget, whatever schedule the settings came with. A time
is that of the updates alone: n = time × rate, and `calibrate` measures the rate.
"""

import gc
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, ClassVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from fst.base import Model
from fst.data.samples import Rows
from fst.data.source import TrainingSplit, ValidationSplit
from fst.training.logging import Stopwatch
from fst.training.loop import Splits, build_accelerator
from fst.training.schedules import WarmupCosine
from fst.training.settings import TrainingError, TrainingSettings
from fst.training.trainer import CompilationError, Trainer, compiles

# Below this many steps there is nothing to divide into warm-up, validations and the rest.
FEWEST_STEPS = 10
VALIDATIONS = 10
# Part of a time that validations may take.
MOST_VALIDATING = 0.2
MOST_WARMUP = 1_000
# However long the run, no more than this is lost when it is killed.
MOST_STEPS_UNSAVED, MOST_SECONDS_UNSAVED = 10_000, 300.0

# Updates before the clock starts: compiling, choosing algorithms and recording graphs take three;
# up to five where they are quick.
FEWEST_UNTIMED, MOST_UNTIMED, UNTIMED_SECONDS = 3, 5, 3.0

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_BUDGET = re.compile(r"(\d+(?:\.\d+)?) ?(s|m|h|steps?)")


@dataclass(frozen=True)
class StepBudget:
    """The same number of steps whatever the model's rate."""

    count: int
    calibration_seconds: ClassVar[float] = 1.0
    """How long to measure the model's rate."""

    def __post_init__(self) -> None:
        if self.count < FEWEST_STEPS:
            raise ValueError(f"budget must be at least {FEWEST_STEPS} steps, got {self.count}")

    def steps(self, rate: float) -> int:
        """The steps that it allows at `rate` steps a second."""
        return self.count

    def words(self) -> str:
        return f"{self.count:,} steps"

    def __str__(self) -> str:
        return f"{self.count}steps"


@dataclass(frozen=True)
class TimeBudget:
    """The same time in updates, so that faster models make more of them."""

    seconds: float

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"budget must be above 0 and finite, got {self.seconds:g} s")

    @property
    def calibration_seconds(self) -> float:
        # A fortieth, but long enough for a measurement, and no long part of a short budget.
        return min(max(2.0, self.seconds / 40), 5.0, self.seconds / 4)

    def steps(self, rate: float) -> int:
        count = round(self.seconds * rate)
        if count < FEWEST_STEPS:
            raise TrainingError(
                f"a budget of {self} allows {count} steps of this model at {rate:.2g} a second, "
                f"and it takes at least {FEWEST_STEPS}"
            )
        return count

    def words(self) -> str:
        minutes = self.seconds / 60
        round_number = minutes >= 2 and minutes == round(minutes, 1)
        return f"{minutes:g} minutes" if round_number else f"{self.seconds:g} seconds"

    def __str__(self) -> str:
        return f"{Decimal(repr(self.seconds)).normalize():f}s"  # every digit, and no exponent


# What one model may spend, and how it is made.
Budget = StepBudget | TimeBudget
Build = Callable[[], Model]


def parse_budget(text: str) -> Budget:
    plain = text.strip().lower().replace(",", "").replace("_", "")
    match = _BUDGET.fullmatch(plain)
    if match is None:
        raise ValueError(
            f"budget must be a time such as 90s, 10m or 2h, or a number of steps such as "
            f"20000steps, got {text!r}"
        )
    number, unit = match.groups()
    if unit in _UNITS:
        return TimeBudget(float(number) * _UNITS[unit])
    if not number.isdigit():
        raise ValueError(f"budget must be a whole number of steps, got {text!r}")
    return StepBudget(int(number))


def spend(
    settings: TrainingSettings, steps: int, rate: float = math.inf, validations: int = VALIDATIONS
) -> TrainingSettings:
    """The settings with a schedule of exactly this many steps, validated about ten times.

    `rate` is the number of steps a second, and only decides how often the run is saved.
    """
    if steps < FEWEST_STEPS:
        raise ValueError(f"steps must be at least {FEWEST_STEPS}, got {steps}")
    interval = math.ceil(steps / validations)
    unsaved = int(min(interval, MOST_STEPS_UNSAVED, rate * MOST_SECONDS_UNSAVED))
    return replace(
        settings,
        schedule=WarmupCosine(warmup=min(MOST_WARMUP, steps // 10), maximum=steps),
        validate_every=interval,
        checkpoint_every=max(1, unsaved),
    )


@dataclass(frozen=True)
class Calibration:
    """A short measurement of updates with a scratch model."""

    updates: int
    seconds: float
    peak_memory_gib: float | None
    """Most memory allocated on the GPU by updates, the data on it included; None on a CPU."""
    validation_seconds: float = 0.0
    """Of one validation, where it was measured."""
    compilation_seconds: float = 0.0
    """Of the first updates, where they are compiled; a second trainer finds much of it done."""

    @property
    def steps_per_second(self) -> float:
        return self.updates / max(self.seconds, 1e-9)


def calibrate(
    model: Model,
    training: TrainingSplit[Rows],
    validation: ValidationSplit[Rows],
    settings: TrainingSettings,
    seconds: float,
    *,
    validate: bool = False,
) -> Calibration:
    """Measure the rate of updates. This changes the model's weights, so train a fresh one.

    The first few updates, which compile, are not timed. What was allocated is given back.
    """
    accelerator = build_accelerator(settings, training.samples.device)
    trainer = Trainer(model, training.samples, validation.samples, settings, accelerator)

    def update(count: int) -> float:
        """Make updates; their seconds, the same on all processes, which must make as many."""
        watch = Stopwatch()
        for _ in range(count):
            trainer.update()
        trainer.read()  # waits for the device
        trainer.state.pending.clear()
        passed = torch.tensor(watch.running, device=trainer.device)
        return float(accelerator.reduce(passed, "mean"))

    try:
        untimed = 0.0
        for number in range(MOST_UNTIMED):
            if number < FEWEST_UNTIMED or untimed < UNTIMED_SECONDS:
                untimed += update(1)
        updates, passed, count = 0, 0.0, 1
        while passed < seconds:
            passed += update(count)
            updates += count
            # As many as should fill the time, but no more than losses are kept for.
            count = min(math.ceil((seconds - passed) * updates / passed), settings.log_every)
        memory = trainer.peak_memory_gib
        watch, validating = Stopwatch(), 0.0
        if validate:
            trainer.validate()
            validating = watch.running
        return Calibration(updates, passed, memory, validating, trainer.state.compilation_seconds)
    finally:
        trainer.batches.close()
        del trainer, accelerator
        release()


@dataclass(frozen=True)
class Plan:
    """How a model spends the budget, the same for all its seeds; fixed before it is trained."""

    steps: int
    compiled: bool
    calibration: Calibration
    note: str | None = None


def make_plan(
    budget: Budget, build: Build, settings: TrainingSettings, splits: Splits, validate: bool = False
) -> Plan:
    """Measure a fresh model from `build`, uncompiled if compilation fails."""

    def measure(settings: TrainingSettings) -> Calibration:
        seconds = budget.calibration_seconds
        return calibrate(build(), *splits, settings, seconds, validate=validate)

    note, measured = None, None
    if compiles(settings, splits[0].samples.device):
        try:
            measured = measure(settings)
        except Exception as error:  # compilers fail in too many ways to name
            note = f"compiled it failed ({first_line(error)}), so it was trained uncompiled"
    compiled = measured is not None
    if measured is None:
        release()  # the failed attempt, which its error held until now
        measured = measure(replace(settings, compile=False))
    return Plan(budget.steps(measured.steps_per_second), compiled, measured, note)


def first_line(error: Exception) -> str:
    """What went wrong, in one line: the reason of a compiler, or an error's kind and first line."""
    if isinstance(error, CompilationError):
        return error.reason
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def fit_to_time(
    seconds: float, most_steps: float, build: Build, settings: TrainingSettings, splits: Splits
) -> tuple[TrainingSettings, Plan]:
    """Settings whose whole run takes about so long, measurement and validations included."""
    watch, whole = Stopwatch(), TimeBudget(seconds)
    plan = make_plan(whole, build, settings, splits, validate=True)
    rate, each = plan.calibration.steps_per_second, plan.calibration.validation_seconds
    # The run itself compiles once more.
    left = max(seconds - watch.running - plan.calibration.compilation_seconds, seconds / 2)
    validations = max(1, min(VALIDATIONS, int(left * MOST_VALIDATING / max(each, 1e-9))))
    steps = int(min(round(max(left - validations * each, left / 2) * rate), most_steps))
    if steps < FEWEST_STEPS:
        raise TrainingError(
            f"{whole.words()} allow {steps} steps of this model at {rate:.2g} a second, beside the "
            f"measurement and the validations, and it takes at least {FEWEST_STEPS}"
        )
    numbers: list[Any] = [steps, rate, validations]
    if PartialState().num_processes > 1:
        broadcast_object_list(numbers)  # what the first process measured serves all
    return spend(settings, *numbers), replace(plan, steps=numbers[0])


def release() -> None:
    """Give back the memory of what is no longer used, and forget what was compiled for it."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
