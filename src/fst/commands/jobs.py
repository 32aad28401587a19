"""The job runner of `fst compare` and `fst search`, and the folder that they keep their results in.

`settings.json` says what the folder was made for. A later call with the same settings goes on; one
with others is refused, with the differences. While a call is at work, no other can be (`held`).
`data.json` holds the path at which the data were last found, and their fingerprint: data may be
moved, or made again on another machine, but not be others.

Each run of theirs is a job. Every stage of a job leaves a file when it is complete, and none is
repeated. A job runs in this process or in one of its own. There it has the device and its peak
memory to itself, and takes no other with it when it fails.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fst.commands import train as train_command
from fst.io import FileError, differences, file_errors, read_json, write_json, write_text
from fst.recipes.recipe import Recipe
from fst.terminal import Terminal, printable, speak_plainly
from fst.training import checkpoint
from fst.training.budget import first_line, release
from fst.training.loop import Interrupted, Interruption
from fst.training.run_folder import LOCK, held
from fst.training.settings import TrainingError

FAILED, INTERRUPTED = 1, 130
SETTINGS, DATA = "settings.json", "data.json"


@dataclass(frozen=True)
class Job(ABC):
    """One run in the folder of a comparison or a search."""

    folder: Path
    data: Path
    device: str | None

    @property
    @abstractmethod
    def name(self) -> str:
        """Of its run folder."""

    @property
    def run(self) -> Path:
        return self.folder / self.name

    @property
    def failure(self) -> Path:
        """Where the reason is kept if it fails: one line for the table, then the traceback."""
        return self.folder / "failures" / f"{self.name}.txt"

    @abstractmethod
    def work(self, console: Console) -> None:
        """Whatever is missing of the job."""

    def train(self, console: Console, start: Callable[[], object]) -> None:
        """Go on from the last checkpoint, or `start` where there is none."""
        finished = (self.run / "summary.json").is_file()
        if checkpoint.available(self.run / "checkpoints") and not finished:
            train_command.resume(self.run, data=self.data, device=self.device, console=console)
        else:
            clear(self.run)  # of a start that was killed before its first checkpoint
            start()


def run_here(job: Job, console: Console) -> None:
    console.rule(job.name)
    try:
        job.work(console)
    except Interrupted:
        raise KeyboardInterrupt from None  # to go on, the whole command is asked again
    release()


def run_apart(job: Job, console: Console, launch: Callable[[], int]) -> None:
    """Do a job in another process; if it fails, the reason is kept and the other jobs go on."""
    console.rule(job.name)
    with file_errors(job.failure):
        job.failure.unlink(missing_ok=True)
    code = launch()
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code != 0 and not job.failure.exists():
        ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else ""
        how = ended or f"ended with exit code {code}"
        hint = " (often: out of memory)" if code == -signal.SIGKILL else ""
        write_text(job.failure, f"its process {how}{hint}\n")


def launch_process(words: Sequence[str]) -> int:
    """Run a job in a process of its own, which holds the lock of its run; the exit code.

    `words` are the interpreter's arguments. In a process group of its own, it is not reached by
    Ctrl-C. It saves and ends when the pipe to it is closed: here, or because this process is gone.
    """
    with Interruption() as interruption:
        words = [sys.executable, *words]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, process_group=0)
        try:
            while process.poll() is None and not interruption.requested:
                time.sleep(0.05)
            process.communicate()  # closes the pipe, and waits until it has saved
        except KeyboardInterrupt:  # somebody insists
            process.kill()
            raise
        return INTERRUPTED if interruption.requested else process.returncode


def main(job: Job) -> int:
    """All that such a process does; its exit code."""

    def end_with_parent() -> None:
        # Nothing else tells a process whose parent was killed, and it would keep its lock. In
        # training the signal is a request to save; else there is nothing to save, and it ends.
        os.read(sys.stdin.fileno(), 1)  # returns when the other end of the pipe is closed
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, daemon=True).start()
    speak_plainly()
    return attempt(job)


def attempt(job: Job) -> int:
    """Do a job, and keep the reason if that fails; an exit code."""
    try:
        with held(job.run):  # until one ends that a killed command left behind
            job.work(Terminal())
    except (Interrupted, KeyboardInterrupt):
        return INTERRUPTED
    except Exception as error:
        known = isinstance(error, ValueError | TrainingError)
        reason = " ".join(str(error).split()) if known else first_line(error)
        with suppress(FileError):  # a full disk may be why it failed
            write_text(job.failure, f"{reason}\n\n{traceback.format_exc()}")
        print(printable(f"fst: {job} failed: {reason}"), file=sys.stderr)
        return FAILED
    return 0


def read_settings(folder: Path, kind: str) -> dict[str, Any] | None:
    """The settings that a folder was made with; None where it is empty or absent."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise TrainingError(f"a {kind} trains on one device: start it without a launcher")
    if folder.exists() and not folder.is_dir():
        raise TrainingError(f"{folder} is a file, expected a folder or a name for a new one")
    settings: dict[str, Any] | None = read_json(folder / SETTINGS)
    ours = {LOCK, f"{SETTINGS}.part"}  # all that a call killed at its very start leaves
    if settings is None and folder.is_dir() and {path.name for path in folder.iterdir()} - ours:
        raise TrainingError(
            f"{folder} already holds files, and nothing is overwritten; choose another folder"
        )
    if settings is not None and not (isinstance(settings, dict) and settings.get("kind") == kind):
        raise TrainingError(f"{folder} holds no {kind}: choose another folder")
    return settings


def require_same(path: Path, before: object, now: object) -> None:
    """Raise unless two descriptions agree, naming what differs; None is the first time."""
    if before is not None and (shown := differences(before, now)):
        raise TrainingError(f"{path} was made with other settings: {shown}; choose another folder")


def find_data(folder: Path, recipe: Recipe, data: Path | None) -> Path:
    """The path given, or the last one if it is still there, or the recipe's own."""
    if data is None:
        last = (read_json(folder / DATA) or {}).get("path")
        data = Path(last) if isinstance(last, str) and Path(last).exists() else None
    return train_command.data_path(recipe, data).resolve()


def prepare_data(
    folder: Path, recipe: Recipe, data: Path, device: torch.device, console: Console
) -> None:
    """Make what is missing of the data, and raise unless they are those of earlier calls."""
    recipe.data.prepare(data, device, console)
    release()  # the memory of the solvers
    recorded, found = read_json(folder / DATA) or {}, recipe.data.fingerprint(data)
    train_command.require_same_data(folder, recorded, found)
    if recorded.get("path") != str(data):
        write_json(folder / DATA, {"path": str(data)} | found)


def clear(folder: Path) -> None:
    """Remove all that is in a folder but its lock, which this process holds."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name != LOCK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
