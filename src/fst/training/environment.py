"""Where and with what a run was made: versions, source state, hardware, command line."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fst.version import __version__

PACKAGES = ("torch", "numpy", "accelerate", "safetensors", "triton", "neuraloperator")


def describe() -> dict[str, Any]:
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
    """Commit and whether the tree differs from it; None unless this source is under git.

    A copy without its repository may say its commit by the variable FST_COMMIT.
    """
    if "FST_COMMIT" in os.environ:
        return {"commit": os.environ["FST_COMMIT"], "modified": None}
    commit = _git(folder, "rev-parse", "HEAD")
    # An installed copy may lie inside a repository that is not its own.
    if commit is None or not _git(folder, "ls-files", "."):
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "modified": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"fst": __version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
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
        properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        hardware["gpus"] = [
            {"name": each.name, "memory_gib": round(each.total_memory / 2**30, 1)}
            for each in properties
        ]
        hardware["cuda"] = torch.version.cuda
    return hardware
