"""Checkpoints on disk: complete or absent, and verified before use. Nothing is ever unpickled.

A checkpoint is a folder of files with a `manifest.json` that gives each file's size and SHA-256.
It is written under a temporary name, synced to the disk, and renamed; a killed writer leaves only
a temporary folder, which the next writer removes. What the file system damages afterwards is found
by the manifest when the checkpoint is read.
"""

import hashlib
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from fst.io import json_text, parse_json, sync, write_synced
from fst.training.settings import TrainingError

MANIFEST, WEIGHTS = "manifest.json", "model.safetensors"
TENSORS, VALUES = "state.safetensors", "state.json"
_FOLDER = re.compile(r"step-\d+")
_TEMPORARY = ".partial-"


class CheckpointError(TrainingError):
    """A checkpoint is missing, damaged or belongs to another model."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to go on: weights, other tensors, and plain JSON values."""

    weights: dict[str, Tensor]
    tensors: dict[str, Tensor]
    values: dict[str, Any]


def save(checkpoint: Checkpoint, parent: Path, step: int, recipe: dict[str, Any]) -> Path:
    """Write a checkpoint as `parent/step-<step>`, the recipe beside its weights."""
    files = {
        WEIGHTS: _to_bytes(checkpoint.weights),
        TENSORS: _to_bytes(checkpoint.tensors),
        VALUES: json_text(checkpoint.values).encode(),
        "recipe.json": json_text(recipe).encode(),
    }
    target = parent / f"step-{step:08d}"
    parent.mkdir(exist_ok=True)
    clean(parent)
    partial = parent / f"{_TEMPORARY}{target.name}"
    partial.mkdir()
    try:
        entries = {}
        for name, data in files.items():
            write_synced(partial / name, data)
            entries[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest = json_text({"format": 1, "step": step, "files": entries})
        write_synced(partial / MANIFEST, manifest.encode())
        sync(partial)
    except OSError:
        # A full disk must not stay full of what is of no use.
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if target.exists():  # of a run that was resumed from an earlier step, or damaged
        target.rename(parent / f"{_TEMPORARY}replaced-{target.name}")
    partial.rename(target)
    sync(parent)
    clean(parent)
    return target


def load(folder: Path) -> Checkpoint:
    """Read and verify a checkpoint; the error for a damaged one offers the newest good one."""
    try:
        files = _verified(folder)
        weights, tensors = (_unpack(folder / name, files[name]) for name in (WEIGHTS, TENSORS))
        values = None
        with suppress(ValueError):
            values = parse_json(files[VALUES])
        if not isinstance(values, dict):
            raise CheckpointError(f"{folder}: {VALUES} is no JSON object")
        return Checkpoint(weights, tensors, values)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {_offer(folder)}") from None


def available(parent: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first; whether they are whole is not looked at."""
    found = parent.iterdir() if parent.is_dir() else ()
    return sorted((path for path in found if _FOLDER.fullmatch(path.name)), key=step_of)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def prune(parent: Path, keep: int, step: int) -> None:
    """Remove all but the newest `keep` up to `step`, and those a resumed run has left behind."""
    folders = available(parent)
    current = [folder for folder in folders if step_of(folder) <= step]
    for folder in folders:
        if folder not in current[-keep:]:
            # Renamed first: a half-removed folder must not look like a checkpoint.
            doomed = parent / f"{_TEMPORARY}removed-{folder.name}"
            folder.rename(doomed)
            shutil.rmtree(doomed)


def clean(parent: Path) -> None:
    """Remove what a killed writer left."""
    for path in parent.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path)


def _verified(folder: Path) -> dict[str, bytes]:
    """The files of a checkpoint, each compared with the manifest."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such checkpoint")
    try:
        entries = parse_json((folder / MANIFEST).read_bytes())["files"]
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in entries.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: {MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{folder}: {MANIFEST} is damaged") from None
    missing = {WEIGHTS, TENSORS, VALUES} - expected.keys()
    if missing:
        raise CheckpointError(f"{folder}: {MANIFEST} does not list {', '.join(sorted(missing))}")
    files = {}
    for name, (size, digest) in expected.items():
        try:
            data = (folder / name).read_bytes()
        except OSError as error:
            reason = error.strerror or error
            raise CheckpointError(f"{folder}: {name} cannot be read ({reason})") from None
        if len(data) != size:
            raise CheckpointError(f"{folder}: {name} has {len(data)} bytes, expected {size}")
        if hashlib.sha256(data).hexdigest() != digest:
            raise CheckpointError(f"{folder}: {name} is damaged (its SHA-256 differs)")
        files[name] = data
    return files


def _offer(folder: Path) -> str:
    """The newest other checkpoint that reads as whole, earlier ones first."""
    others = [path for path in available(folder.parent) if path != folder]
    earlier = [path for path in others if folder.name > path.name]
    run = folder.parent.parent
    for path in (*reversed(earlier), *(path for path in others if path not in earlier)):
        with suppress(CheckpointError):
            _verified(path)
            return f"{path.name} is good: fst train --resume {run} --checkpoint {path.name}"
    return "There is no other good checkpoint; start the run anew in another folder"


def _to_bytes(tensors: dict[str, Tensor]) -> bytes:
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.save(plain)


def _unpack(path: Path, data: bytes) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(data)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path.parent}: {path.name} is no safetensors file") from error
