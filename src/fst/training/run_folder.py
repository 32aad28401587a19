"""A run's folder, which explains itself.

    recipe.json        the resolved recipe; written last of what a start writes
    run.json           where the data lie, and by what they are known again
    environment.json   versions, git state, hardware and command line of every start
    metrics.jsonl      one JSON object a line: training and validation
    checkpoints/       the newest few, each complete; what resuming needs
    best/              the weights with the lowest validation error, for `from_pretrained`
    tensorboard/       the same numbers as metrics.jsonl
    summary.json       written when training ends
    .lock              held by the process that is at work here

With several processes only the main one writes; the others hold the same paths.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout

from fst.base import Model
from fst.io import FileError, file_errors, parse_json, write_json
from fst.pretrained import WEIGHTS
from fst.training import checkpoint
from fst.training.settings import TrainingError
from fst.version import __version__

PACKAGES = ("torch", "numpy", "accelerate", "safetensors", "triton", "neuraloperator")
LOCK = ".lock"
# A process that was told to end may still be saving.
PATIENCE = 20.0
# All that a start leaves that was killed before its recipe was written.
STARTING = {LOCK, "run.json", "environment.json"}
STARTING |= {f"{name}.part" for name in ("run.json", "environment.json", "recipe.json")}


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder, which is made if missing; nested, it is one lock.

    Of several processes that train together the first holds the lock, and all of them learn
    whether it could. However a process ends, the lock is free again.
    """
    lock = FileLock(folder / LOCK, is_singleton=True)
    first, problem = _is_first(), [""]
    if first:
        try:
            with file_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
                lock.acquire(timeout=PATIENCE, poll_interval=0.2)
        except FileError as error:
            problem = [str(error)]
            if isinstance(error.__cause__, Timeout):
                problem = [f"another process is at work in {folder}; try again when it has ended"]
    if PartialState._shared_state and PartialState().num_processes > 1:
        broadcast_object_list(problem)  # or the others would wait for the first in vain
    if problem[0]:
        raise TrainingError(problem[0])
    try:
        yield
    finally:
        if first:
            lock.release()


def _is_first() -> bool:
    """Of processes that were started together, as torchrun and accelerate number them."""
    return os.environ.get("RANK", "0") == "0"


@dataclass(frozen=True)
class RunFolder:
    """Paths and whole-file writes of one run; `resume_from` is the checkpoint to go on from."""

    path: Path
    recipe: dict[str, Any]
    resume_from: Path | None = None

    @classmethod
    def create(
        cls, path: Path | str, recipe: dict[str, Any], described: dict[str, Any] | None = None
    ) -> Self:
        """A new run, its data `described`. A folder that holds anything else is an error."""
        folder = cls(Path(path), recipe)
        if not _is_first():
            return folder
        cls.require_free(path)
        with file_errors(folder.path):
            folder.path.mkdir(parents=True, exist_ok=True)
        if described is not None:
            write_json(folder.path / "run.json", described)
        write_json(folder.path / "environment.json", describe_environment() | {"resumed": []})
        write_json(folder.path / "recipe.json", recipe)
        return folder

    @staticmethod
    def require_free(path: Path | str) -> None:
        """Raise where a new run would overwrite something."""
        path = Path(path)
        with file_errors(path):
            for each in (path, *path.parents):
                if each.exists() and not each.is_dir():
                    message = f"{each} is a file, expected a folder or a name for a new one"
                    raise TrainingError(message)
            held_files = path.iterdir() if _is_first() and path.is_dir() else ()
            if any(each.name not in STARTING for each in held_files):
                raise TrainingError(
                    f"{path} already holds files, and nothing is overwritten; choose another "
                    f"folder, or continue a run with: fst train --resume {path}"
                )

    @classmethod
    def resume(cls, path: Path | str, checkpoint_name: str | None = None) -> Self:
        """An existing run at its newest checkpoint, or at the one named.

        A damaged checkpoint is never skipped silently: reading it fails with an error that names
        the newest good one, and `checkpoint_name` selects that.
        """
        path = Path(path)
        if (path / WEIGHTS).is_file():  # such as RUN/best, in which a new run would start
            raise TrainingError(f"{path} holds weights and is no run folder: give that of its run")
        try:
            recipe = parse_json((path / "recipe.json").read_text())
        except OSError:
            raise TrainingError(f"{path} is no run folder: recipe.json cannot be read") from None
        except ValueError:
            raise TrainingError(f"{path / 'recipe.json'} is damaged: no JSON") from None
        found = {each.name: each for each in checkpoint.available(path / "checkpoints")}
        # A run killed before its first checkpoint starts again from the beginning.
        name = next(reversed(found), None) if checkpoint_name is None else checkpoint_name
        if name is not None and name not in found:
            names = ", ".join(found) or "none"
            raise checkpoint.CheckpointError(
                f"{path} has no checkpoint {name!r}; there are: {names}"
            )
        return cls(path, recipe, None if name is None else found[name])

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def require_there(self) -> None:
        """Raise where the folder was moved or removed: a new one would hold half a run."""
        if not (self.path / "recipe.json").is_file():
            raise TrainingError(f"{self.path} was moved or removed while the run was at work")

    def save_best(self, model: Model) -> None:
        """Replace the best weights; a reader sees the old or the new ones, never a part."""
        self.require_there()
        best = self.path / "best"
        with file_errors(best):
            model.save_pretrained(best)
            write_json(best / "recipe.json", self.recipe)

    def save_checkpoint(self, state: checkpoint.Checkpoint, step: int, keep: int) -> None:
        self.require_there()
        with file_errors(self.checkpoints):
            checkpoint.save(state, self.checkpoints, step, self.recipe)
            checkpoint.prune(self.checkpoints, keep, step)

    def way_on(self, diverged: bool) -> str:
        """For an error message: the last checkpoint, and how a run that `diverged` gets past it."""
        found = checkpoint.available(self.checkpoints)
        if not found:
            anew = "; start anew with a lower --training.learning-rate"
            return f"There is no checkpoint yet{anew if diverged else ''}"
        lower = (
            "; resumed as it is, the run repeats this step. To go on with lower rates: fst train "
            f"--resume {self.path} --rate-factor 0.5 (--checkpoint takes an earlier one)"
        )
        return f"The last good checkpoint is {found[-1]}{lower if diverged else ''}"

    def note_resumed(self, step: int) -> None:
        """Add this start to environment.json, which may be another machine than the first."""
        file = self.path / "environment.json"
        try:
            description = parse_json(file.read_text())
            description["resumed"] = [*description.get("resumed", [])]
        except (OSError, ValueError, TypeError, AttributeError):  # it is no use to the run
            description = {"resumed": []}
        description["resumed"].append({"step": step} | describe_environment())
        write_json(file, description)


def describe_environment() -> dict[str, Any]:
    """Plain JSON values. What cannot be found out is None; this never fails."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        # The program by its name alone: where it was installed is nobody's business.
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": {"python": platform.python_version(), **_versions()},
        "git": git_state(),
        "hardware": _hardware(),
    }


def git_state(folder: Path = Path(__file__).parent) -> dict[str, Any] | None:
    """Commit, and whether the tree differs; None unless under git. A copy may set FST_COMMIT."""
    if "FST_COMMIT" in os.environ:
        return {"commit": os.environ["FST_COMMIT"], "modified": None}
    commit = _git(folder, "rev-parse", "HEAD")
    # An installed copy may lie inside a repository that is not its own.
    if commit is None or not _git(folder, "ls-files", "."):
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "modified": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    words = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"fst": __version__} | dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    found["torch"] = torch.__version__  # with its build, which the package metadata may leave out
    return found


def _hardware() -> dict[str, Any]:
    hardware: dict[str, Any] = {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }
    if torch.cuda.is_available():
        gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        hardware["gpus"] = [
            {"name": gpu.name, "memory_gib": round(gpu.total_memory / 2**30, 1)} for gpu in gpus
        ]
        hardware["cuda"] = torch.version.cuda
    return hardware
