"""The numbers of a run as they come: JSON lines always, TensorBoard and Weights & Biases if asked.

A resumed run first forgets what was recorded after its checkpoint, so each step is recorded once.
"""

import json
import os
import threading
from collections.abc import Iterator
from typing import Any, Self

from fst.pretrained import parse_json, write_atomically
from fst.training.errors import TrainingError, clear_file_errors
from fst.training.run_folder import RunFolder
from fst.training.settings import TrainingSettings


class Records:
    """Where the main process writes; the other processes have none."""

    def __init__(self, folder: RunFolder, settings: TrainingSettings, step: int) -> None:
        self.folder = folder
        with clear_file_errors(folder.metrics):
            kept = list(_until(folder, step))
            write_atomically(folder.metrics, b"".join(kept))
            self._file = folder.metrics.open("ab")
        self._tensorboard = _tensorboard(folder, step) if settings.tensorboard else None
        self._wandb = _wandb(folder) if settings.wandb else None

    def __enter__(self) -> Self:
        self._hook, threading.excepthook = threading.excepthook, self._report
        return self

    def _report(self, error: threading.ExceptHookArgs) -> None:
        """TensorBoard writes in a thread, whose errors nobody catches. Where the folder is gone,
        the run itself says so in one line."""
        if not (isinstance(error.exc_value, OSError) and not self.folder.tensorboard.is_dir()):
            self._hook(error)

    def __exit__(self, *_: object) -> None:
        threading.excepthook = self._hook
        self._file.close()
        if self._tensorboard is not None and self.folder.tensorboard.is_dir():
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def add(self, kind: str, step: int, values: dict[str, float]) -> None:
        """Record numbers of one step; `kind` is "training" or "validation"."""
        self.folder.require_there()
        line = {"kind": kind, "step": step, **values}
        with clear_file_errors(self.folder.metrics):
            self._file.write((json.dumps(line, allow_nan=False) + "\n").encode())
            self._file.flush()
            if self._tensorboard is not None:
                for name, value in values.items():
                    self._tensorboard.add_scalar(f"{kind}/{name}", value, step)
        if self._wandb is not None:
            self._wandb.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)

    def sync(self) -> None:
        """Bring the lines to the disk: a checkpoint counts on those before it."""
        with clear_file_errors(self.folder.metrics):
            os.fsync(self._file.fileno())


def _until(folder: RunFolder, step: int) -> Iterator[bytes]:
    """The complete lines up to `step`. A killed writer may leave half a line at the end."""
    if not folder.metrics.exists():
        return
    for line in folder.metrics.read_bytes().splitlines(keepends=True):
        try:
            if parse_json(line)["step"] <= step:
                yield line.rstrip(b"\n") + b"\n"
        except (ValueError, KeyError, TypeError):
            continue


def _tensorboard(folder: RunFolder, step: int) -> Any:
    # Imported here because it takes seconds, which not every run needs to spend.
    from torch.utils.tensorboard import SummaryWriter

    with clear_file_errors(folder.tensorboard):
        return SummaryWriter(str(folder.tensorboard), purge_step=step + 1)


def check_wandb(settings: TrainingSettings) -> None:
    """Raise where Weights & Biases is asked for but not to be had, before anything is written."""
    if not settings.wandb:
        return
    wandb = _import_wandb()
    try:
        wandb.login(verify=False)  # asks in a terminal; needs no network
    except wandb.Error as error:
        raise TrainingError(f"wandb is on, but Weights & Biases says: {error}") from None


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError:
        raise TrainingError(
            "wandb is on, but Weights & Biases is not installed: "
            "pip install 'function-space-transformer[wandb]'"
        ) from None
    return wandb


def _wandb(folder: RunFolder) -> Any:
    wandb = _import_wandb()
    try:
        # The folder's name identifies the run, so that a resumed one goes on in the same place.
        return wandb.init(
            project="fst",
            dir=str(folder.path),
            config=folder.recipe,
            id=folder.path.resolve().name,
            resume="allow",
        )
    except wandb.Error as error:
        raise TrainingError(f"wandb is on, but Weights & Biases says: {error}") from None
