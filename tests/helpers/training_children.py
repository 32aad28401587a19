"""Training in a process of its own, which can kill itself at any step or file operation."""

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # noqa: F401  (the optimiser needs it: once here, not in every child)

from fst.training import Summary
from fst.training.settings import TrainingSettings
from fst.training.trainer import Trainer
from training_fakes import tiny_train

# One server imports torch once; each child is forked from it in milliseconds.
CONTEXT = multiprocessing.get_context("forkserver")


@contextlib.contextmanager
def child_server() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        patch.setenv("OMP_NUM_THREADS", "1")
        CONTEXT.set_forkserver_preload(["training_children", "training_images"])
        forkserver.ensure_running()
    yield


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_update(number: int) -> None:
    """Die in the middle of this process's n-th update, before its batch is drawn."""
    draw, seen = Trainer._draw, set()

    def deadly(trainer: Trainer, stream: Any) -> Any:
        seen.add(trainer.state.step)
        if len(seen) == number:
            die()
        return draw(trainer, stream)

    Trainer._draw = deadly  # type: ignore[method-assign]


def kill_at_file_event(number: int | None, counter: Path | None = None) -> None:
    """Die just before the n-th sync or rename; a file then being synced is cut in half first."""
    seen = 0

    def event(descriptor: int | None = None) -> None:
        nonlocal seen
        seen += 1
        if counter is not None:
            counter.write_text(str(seen))
        if seen == number:
            if descriptor is not None:
                name = Path(f"/proc/self/fd/{descriptor}").readlink()
                # Metrics before the last sync are safe; a half line at the end is what can happen.
                keep = name.stat().st_size - 9 if name.name == "metrics.jsonl" else 0
                with contextlib.suppress(OSError):  # a folder cannot be cut
                    os.truncate(name, max(keep, name.stat().st_size // 2))
            die()

    def before(action: Callable[..., Any], *, synced: bool = False) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            event(arguments[0] if synced else None)
            return action(*arguments, **options)

        return wrapped

    os.fsync = before(os.fsync, synced=True)
    os.rename = before(os.rename)
    os.replace = before(os.replace)
    os.rmdir = before(os.rmdir)


def run_child(
    path: Path,
    settings: TrainingSettings,
    *,
    resume: bool = False,
    dropout: float = 0.0,
    train: Callable[..., Summary] = tiny_train,
    update: int | None = None,
    event: int | None = None,
    counter: Path | None = None,
) -> int:
    """Train in a child that dies in `update` or at file `event`; its exit code."""
    arguments = (path, settings, resume, dropout, train, update, event, counter)
    child = CONTEXT.Process(target=_train, args=arguments)
    child.start()
    child.join()
    assert child.exitcode is not None
    return child.exitcode


def _train(
    path: Path,
    settings: TrainingSettings,
    resume: bool,
    dropout: float,
    train: Callable[..., Summary],
    update: int | None,
    event: int | None,
    counter: Path | None,
) -> None:
    with Path(os.devnull).open("w") as nothing, contextlib.redirect_stdout(nothing):
        if update is not None:
            kill_in_update(update)
        if event is not None or counter is not None:
            kill_at_file_event(event, counter)
        train(path, settings, resume=resume, dropout=dropout)
