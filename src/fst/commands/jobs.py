"""The job runner of `fst compare` and `fst search`: each run of theirs is a job.

Every stage of a job leaves a file when it is complete, and none is repeated. A job runs in this
process or in one of its own. There it has the device and its peak memory to itself, and takes no
other with it when it fails.
"""

import os
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

from rich.console import Console

from fst.commands import train as train_command
from fst.commands.result_store import clear
from fst.io import FileError, file_errors, write_text
from fst.terminal import Terminal, printable
from fst.training import checkpoint
from fst.training.budget import release
from fst.training.errors import Interrupted, TrainingError, first_line
from fst.training.loop import Interruption
from fst.training.run_folder import held

FAILED, INTERRUPTED = 1, 130


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
    """Do a job in this process."""
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
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        hint = " (often: out of memory)" if code == -signal.SIGKILL else ""
        write_text(job.failure, f"its process {how}{hint}\n")


def launch_process(words: Sequence[str]) -> int:
    """Run a job in a process of its own, which holds the lock of its run; the exit code.

    `words` are its module and arguments. In a process group of its own, it is not reached by
    Ctrl-C. It saves and ends when the pipe to it is closed: here, or because this process is gone.
    """
    with Interruption() as interruption:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", *words], stdin=subprocess.PIPE, process_group=0
        )
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
