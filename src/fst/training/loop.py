"""Training from start to end: one loop for every model.

Enters: a model with its statistics set, two splits and the settings. Leaves: a run folder with the
best weights, checkpoints, metrics and a summary. The loop updates, and at their intervals reads
the losses, logs, validates and saves; it ends when the schedule says so, or is interrupted.
"""

import copy
import logging
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin
from rich.console import Console
from torch import distributed

from fst.base import Model
from fst.data.samples import Rows
from fst.data.source import TrainingSplit, ValidationSplit
from fst.io import FileError, file_errors, write_json
from fst.terminal import Terminal
from fst.training import checkpoint
from fst.training.logging import Log, MetricsLog, Progress, Stopwatch
from fst.training.run_folder import RunFolder, held
from fst.training.settings import TrainingError, TrainingSettings
from fst.training.trainer import NonFiniteError, Trainer, compiles

SUMMARY = "summary.json"
Splits = tuple[TrainingSplit[Rows], ValidationSplit[Rows]]
# With one process, losses are read at least this often (seconds), for the progress line.
READ_EVERY = 1.0
# Signals closer than this (seconds) are one: `timeout` sends its own twice, for example.
TWICE_AT_ONCE = 1.0


class Interrupted(Exception):  # noqa: N818  (not a fault: the run was saved and can go on)
    """Ctrl-C or a termination signal: the step was finished and a checkpoint saved."""

    def __init__(self, folder: Path, step: int, processes: int = 1) -> None:
        # Several processes need what started them: fst train alone would go on with one.
        launcher = f" (under the launcher that started these {processes} processes)"
        super().__init__(
            f"interrupted after step {step:,}; the run is saved. "
            f"Resume with: fst train --resume {folder}{launcher if processes > 1 else ''}"
        )
        self.folder, self.step = folder, step


@dataclass(frozen=True)
class Summary:
    """How a run ended, over all its starts."""

    steps: int
    seconds: float
    """Updates, validation and saving; not the loading of data."""
    steps_per_second: float
    """Of the updates alone, compilation included."""
    peak_memory_gib: float | None
    """Allocated on the GPU of the main process since the last start; None on a CPU."""
    selected_step: int | None
    validation_error: float | None
    """Of the selected step: the first of the objective's errors."""
    reason: str
    update_seconds: float | None = None
    """Of the updates alone, compilation apart."""
    validation_errors: dict[str, float] = field(default_factory=dict)
    """Of the selected step: every error of the objective, by its name."""


def train(
    model: Model,
    training: TrainingSplit[Rows],
    validation: ValidationSplit[Rows],
    settings: TrainingSettings,
    folder: RunFolder,
    *,
    console: Console | None = None,
) -> Summary:
    """Train until the schedule ends, on the device that holds the data (or on all processes').

    On return `model` has the last weights; the best ones are in the folder's `best`. A resumed
    folder goes on from its checkpoint as if the run had never stopped.
    """
    accelerator = build_accelerator(settings, training.samples.device)
    trainer = Trainer(model, training.samples, validation.samples, settings, accelerator)
    main, state = accelerator.is_main_process, trainer.state
    console = (console or Terminal()) if main else Terminal(quiet=True)
    with ExitStack() as stack:
        stack.enter_context(held(folder.path))
        if folder.resume_from is not None:
            resume(trainer, folder, folder.resume_from)
            state = trainer.state
        stack.callback(trainer.batches.close)
        interruption = stack.enter_context(Interruption())
        start = state.step
        metrics = stack.enter_context(MetricsLog(folder, settings, start)) if main else None
        progress = stack.enter_context(Progress(console, start, settings.schedule.maximum))
        if compiles(settings, trainer.device):
            progress.say("the first step is compiled, which may take a minute")
        try:
            reason = run(trainer, folder, Log(trainer, metrics, progress), interruption)
        except (TrainingError, FileError) as error:
            error.args = (f"{error}. {folder.way_on(isinstance(error, NonFiniteError))}",)
            raise
        summary = summarize(trainer, reason)
        # A finished run that is resumed keeps the summary of its last start.
        if main and not (state.step == start and (folder.path / SUMMARY).exists()):
            write_json(folder.path / SUMMARY, asdict(summary))
        best = state.best
        selected = f"; best validation error {best[1]:.5f} at step {best[0]:,}" if best else ""
        progress.say(f"finished after step {summary.steps:,}: {reason}{selected}")
    accelerator.wait_for_everyone()
    return summary


def run(trainer: Trainer, folder: RunFolder, log: Log, interruption: "Interruption") -> str:
    """The loop itself; returns why it ended."""
    settings, state, schedule = trainer.settings, trainer.state, trainer.schedule
    watch = Stopwatch()
    reason = schedule.finished(state.step, state.history)
    while reason is None:
        trainer.update()
        step = state.step
        logs = step % settings.log_every == 0
        validates = step % settings.validate_every == 0 or step == schedule.maximum
        saves = step % settings.checkpoint_every == 0
        # Processes meet at the intervals above; one alone may look whenever it likes.
        looks = trainer.processes == 1 and (interruption.requested or watch.running > READ_EVERY)
        if not (logs or validates or saves or looks):
            continue

        trainer.read()  # waits for the device; every step so far is now known to be finite
        interrupted = trainer.any_process(interruption.requested)
        state.training_seconds += watch.lap()
        reading = log.read(write=logs)
        if validates:
            improved = trainer.validate()
            log.validated()
            if improved and log.metrics is not None:
                folder.save_best(trainer.selected)
        log.progress.show(step, reading, state.errors, now=validates)
        reason = schedule.finished(step, state.history)
        if (saves or interrupted or reason is not None) and log.metrics is not None:
            log.metrics.sync()
            folder.save_checkpoint(trainer.capture(), step, settings.keep)
        state.other_seconds += watch.lap()
        if interrupted and reason is None:
            trainer.accelerator.wait_for_everyone()  # until the checkpoint is there
            raise Interrupted(folder.path, step, trainer.processes)
    return reason


def resume(trainer: Trainer, folder: RunFolder, source: Path) -> None:
    """Bring the trainer, and the files that outlive a checkpoint, back to where it was saved."""
    trainer.restore(checkpoint.load(source))
    step = torch.tensor([trainer.state.step], device=trainer.device)
    if len(trainer.accelerator.gather(step).unique()) > 1:
        raise checkpoint.CheckpointError(f"{source}: not every process found this checkpoint")
    if trainer.accelerator.is_main_process:
        with file_errors(folder.checkpoints):
            checkpoint.clean(folder.checkpoints)
        folder.note_resumed(trainer.state.step)
        if trainer.best_weights:
            # The killed run may have gone on, and found better weights than this one will.
            best = copy.deepcopy(trainer.model)
            best.load_state_dict(trainer.best_weights)
            folder.save_best(best)


def build_accelerator(settings: TrainingSettings, device: torch.device) -> Accelerator:
    """Devices, processes, precision and compilation, by Hugging Face Accelerate."""
    # Accelerate caches its first settings; a process may train several models, one by one.
    AcceleratorState._reset_state()
    compiler = None
    if compiles(settings, device):
        compiler = TorchDynamoPlugin(backend="inductor", mode=settings.compile_mode, dynamic=False)
    return Accelerator(
        mixed_precision="bf16" if settings.precision == "bf16" else "no",
        cpu=device.type == "cpu",
        dynamo_plugin=compiler,
    )


def summarize(trainer: Trainer, reason: str) -> Summary:
    state = trainer.state
    step, error = state.best or (None, None)
    return Summary(
        steps=state.step,
        seconds=state.training_seconds + state.other_seconds,
        steps_per_second=state.step / max(state.training_seconds, 1e-9),
        peak_memory_gib=trainer.peak_memory_gib,
        selected_step=step,
        validation_error=error,
        reason=reason,
        update_seconds=state.training_seconds - state.compilation_seconds,
        validation_errors=state.best_errors,
    )


class Interruption:
    """Ctrl-C and termination signals as a flag for the loop; a later signal acts as ever."""

    def __init__(self) -> None:
        self.requested = False
        self._since = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # Python allows handlers in the main thread alone; elsewhere signals keep their meaning.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested, self._since = True, time.monotonic()
        elif time.monotonic() - self._since > TWICE_AT_ONCE:
            self.__exit__()
            signal.raise_signal(number)


def end_processes(code: int) -> None:
    """End this process with an exit code, if it has trained together with others.

    The threads by which processes exchange tensors go on once a wrapped model has used them, even
    when their group is destroyed (seen with PyTorch 2.13). While Python takes itself apart, such a
    thread can abort the process, though all work is done (pytorch/pytorch#179291 tells of the
    like). So nothing is taken apart here.

    All processes come here, or none: after an error of one, others may still wait for it.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return
    distributed.destroy_process_group()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
