"""Training from start to end: one loop for every model.

Enters: a model with its statistics set, two splits and the settings. Leaves: a run folder with the
best weights, checkpoints, metrics and a summary. The loop updates, and at their intervals reads
the losses, logs, validates and saves; it ends when the schedule says so, or is interrupted.
"""

import copy
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, TorchDynamoPlugin
from rich.console import Console

from fst.base import Model
from fst.data.samples import Rows
from fst.data.splits import TrainingSplit, ValidationSplit
from fst.terminal import Terminal
from fst.training import checkpoint
from fst.training.compilation import compiles
from fst.training.errors import (
    CheckpointError,
    Interrupted,
    NonFiniteError,
    TrainingError,
    clear_file_errors,
)
from fst.training.interruption import Interruption
from fst.training.journal import Journal, Stopwatch
from fst.training.progress import Progress
from fst.training.records import Records
from fst.training.run_folder import RunFolder, held
from fst.training.settings import TrainingSettings
from fst.training.trainer import Trainer

# With one process, losses are read at least this often (seconds), for the progress line.
READ_EVERY = 1.0


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

    On return `model` has the last weights; the best ones are in `folder.best`. A resumed folder
    goes on from its checkpoint as if the run had never stopped.
    """
    accelerator = build_accelerator(settings, training.samples.device)
    trainer = Trainer(model, training.samples, validation.samples, settings, accelerator)
    main = accelerator.is_main_process
    console = (console or Terminal()) if main else Terminal(quiet=True)
    if trainer.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(trainer.device)
    with ExitStack() as stack:
        stack.enter_context(held(folder.path))
        if folder.resume_from is not None:
            resume(trainer, folder, folder.resume_from)
        stack.callback(trainer.batches.close)
        interruption = stack.enter_context(Interruption())
        start = trainer.progression.step
        records = stack.enter_context(Records(folder, settings, start)) if main else None
        progress = stack.enter_context(Progress(console, start, settings.schedule.maximum))
        if compiles(settings, trainer.device):
            progress.say("the first step is compiled, which may take a minute")
        try:
            reason = run(trainer, folder, Journal(trainer, records, progress), interruption)
        except TrainingError as error:
            advice = folder.lower_rates() if isinstance(error, NonFiniteError) else ""
            error.args = (f"{error}. {folder.last_checkpoint()}{advice}",)
            raise
        summary = summarize(trainer, reason)
        # A finished run that is resumed keeps the summary of its last start.
        if main and not (trainer.progression.step == start and folder.summary.exists()):
            folder.write_json(folder.summary.name, asdict(summary))
        best = trainer.progression.best
        selected = f"; best validation error {best[1]:.5f} at step {best[0]:,}" if best else ""
        progress.say(f"finished after step {summary.steps:,}: {reason}{selected}")
    accelerator.wait_for_everyone()
    return summary


def run(trainer: Trainer, folder: RunFolder, journal: Journal, interruption: Interruption) -> str:
    """The loop itself; returns why it ended."""
    settings, progression, schedule = trainer.settings, trainer.progression, trainer.schedule
    main = trainer.accelerator.is_main_process
    watch = Stopwatch()
    reason = schedule.finished(progression.step, progression.history)
    while reason is None:
        trainer.update()
        step = progression.step
        logs = step % settings.log_every == 0
        validates = step % settings.validate_every == 0 or step == schedule.maximum
        saves = step % settings.checkpoint_every == 0
        # Processes meet at the intervals above; one alone may look whenever it likes.
        looks = trainer.processes == 1 and (interruption.requested or watch.running > READ_EVERY)
        if not (logs or validates or saves or looks):
            continue

        trainer.read()  # waits for the device; every step so far is now known to be finite
        interrupted = trainer.any_process(interruption.requested)
        progression.training_seconds += watch.lap()
        journal.read()
        if logs:
            journal.log()
        if validates:
            improved = trainer.validate()
            journal.validated()
            if improved and main:
                folder.save_best(trainer.selected)
        journal.show(validated=validates)
        reason = schedule.finished(step, progression.history)
        if (saves or interrupted or reason is not None) and main:
            journal.sync()
            folder.save_checkpoint(trainer.capture(), step, settings.keep)
        progression.other_seconds += watch.lap()
        if interrupted and reason is None:
            trainer.accelerator.wait_for_everyone()  # until the checkpoint is there
            raise Interrupted(folder.path, step, trainer.processes)
    return reason


def resume(trainer: Trainer, folder: RunFolder, source: Path) -> None:
    """Bring the trainer, and the files that outlive a checkpoint, back to where it was saved."""
    trainer.restore(checkpoint.load(source))
    step = torch.tensor([trainer.progression.step], device=trainer.device)
    if len(trainer.accelerator.gather(step).unique()) > 1:
        raise CheckpointError(f"{source}: not every process found this checkpoint")
    if trainer.accelerator.is_main_process:
        with clear_file_errors(folder.checkpoints):
            checkpoint.clean(folder.checkpoints)
        folder.note_resumed(trainer.progression.step)
        if trainer.best_weights:
            # The killed run may have gone on, and found better weights than this one will.
            best = copy.deepcopy(trainer.model)
            best.load_state_dict(trainer.best_weights)
            folder.save_best(best)


def build_accelerator(settings: TrainingSettings, device: torch.device) -> Accelerator:
    """Devices, processes, precision and compilation, by Hugging Face Accelerate."""
    # Accelerate remembers its first settings; a process may train several models, one by one.
    AcceleratorState._reset_state()
    compiler = None
    if compiles(settings, device):
        compiler = TorchDynamoPlugin(backend="inductor", mode=settings.compile_mode, dynamic=False)
    return Accelerator(
        mixed_precision="bf16" if settings.precision == "bf16" else "no",
        cpu=device.type == "cpu",
        dynamo_plugin=compiler,
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )


def summarize(trainer: Trainer, reason: str) -> Summary:
    progression, memory = trainer.progression, None
    if trainer.device.type == "cuda":
        memory = torch.cuda.max_memory_allocated(trainer.device) / 2**30
    step, error = progression.best or (None, None)
    return Summary(
        steps=progression.step,
        seconds=progression.training_seconds + progression.other_seconds,
        steps_per_second=progression.step / max(progression.training_seconds, 1e-9),
        peak_memory_gib=memory,
        selected_step=step,
        validation_error=error,
        reason=reason,
        update_seconds=progression.training_seconds - progression.compilation_seconds,
        validation_errors=progression.best_errors,
    )
