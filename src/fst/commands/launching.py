"""The processes that the entrants of a comparison run in, and the signals that end them."""

import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fst.commands.contestant import ComparisonFolder
from fst.training.interruption import TWICE_AT_ONCE

Launch = Callable[[ComparisonFolder, str, int, Path, str | None], int]


def launch_process(
    folder: ComparisonFolder, model: str, number: int, data: Path, device: str | None
) -> int:
    """Run one entrant in a process of its own; its exit code.

    A group of its own, so that Ctrl-C reaches this process alone. It holds the lock of its run,
    and saves and ends when the pipe to it is closed: here, or because this process is gone.
    """
    words = [str(folder.path), model, str(number), str(data), *([device] if device else [])]
    with interruptible():
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fst.commands.contestant", *words],
            stdin=subprocess.PIPE,
            process_group=0,
        )
        try:
            return process.wait()
        except KeyboardInterrupt:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait()  # until it has saved
            except KeyboardInterrupt:
                process.kill()
            raise


@contextmanager
def interruptible() -> Iterator[None]:
    """A termination signal, as batch systems send it before their limit, acts like Ctrl-C.

    Some programs send theirs twice at once (`timeout` to its child, then to the group): only one
    that comes later means that somebody insists.
    """
    last = -math.inf

    def interrupt(*_: object) -> None:
        nonlocal last
        now, before = time.monotonic(), last
        last = now
        if now - before > TWICE_AT_ONCE:
            raise KeyboardInterrupt

    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows none
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as shells do in the background
                    stack.callback(signal.signal, number, signal.signal(number, interrupt))
        yield


def how_it_ended(code: int) -> str:
    """The exit code of a process in words."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"its process was ended by {name}" + (
        " (often: out of memory)" if name == "SIGKILL" else ""
    )
