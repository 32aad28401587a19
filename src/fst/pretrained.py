"""Models on disk: `model.safetensors` beside `config.json`. Nothing is ever unpickled.

The configuration is a dataclass; the JSON names the model's class and spells its fields, and is
checked field by field when it is read.
"""

import json
import os
from pathlib import Path
from typing import Any, TypeVar

import cattrs
import safetensors
import safetensors.torch
from torch import Tensor

WEIGHTS, CONFIG = "model.safetensors", "config.json"
Config = TypeVar("Config")

converter = cattrs.Converter(forbid_extra_keys=True)


def _exactly(kind: type) -> Any:
    """JSON has one number type; a configuration does not silently turn 3.5 into 3."""

    def structure(value: object, _: type) -> object:
        if isinstance(value, bool) is not (kind is bool) or not isinstance(value, (kind, int)):
            raise ValueError(f"expected {kind.__name__}, got {value!r}")
        return kind(value)

    return structure


for plain in (int, float, bool):
    converter.register_structure_hook(plain, _exactly(plain))
converter.register_structure_hook(
    float | None, lambda value, _: None if value is None else converter.structure(value, float)
)


class PretrainedError(ValueError):
    """A folder does not hold a model that can be loaded."""


def to_json(config: object) -> dict[str, Any]:
    """A configuration as plain JSON values."""
    return converter.unstructure(config)


def from_json(data: object, kind: type[Config], source: str) -> Config:
    """A configuration from JSON values; `source` names their origin in errors."""
    try:
        return converter.structure(data, kind)
    except (cattrs.BaseValidationError, ValueError, TypeError, KeyError, AttributeError) as error:
        reasons = "; ".join(cattrs.transform_error(error, path=kind.__name__))
        raise PretrainedError(f"{source}: not a valid {kind.__name__}: {reasons}") from None


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file by a complete one: a reader sees the old or the new, never a part."""
    partial = path.with_name(path.name + ".part")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def save(name: str, config: object, weights: dict[str, Tensor], folder: Path) -> None:
    """Write a model's weights and configuration into `folder`, which is made if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {key: value.detach().cpu().contiguous() for key, value in weights.items()}
    write_atomically(folder / WEIGHTS, safetensors.torch.save(plain))
    description = {"model": name, "config": to_json(config)}
    write_atomically(folder / CONFIG, (json.dumps(description, indent=2) + "\n").encode())


def find(source: str | Path) -> Path:
    """A local folder with a model, or a download of that name from the Hugging Face hub."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.is_absolute() or len(folder.parts) != 2:
        raise PretrainedError(f"{source}: no such folder (a hub model is named owner/name)")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise PretrainedError(
            f"{source}: no such folder; to load from the hub, install fst[hub]"
        ) from None
    try:
        return Path(snapshot_download(str(source), allow_patterns=[WEIGHTS, CONFIG]))
    except Exception as error:
        raise PretrainedError(
            f"{source}: no such folder, and the Hugging Face hub did not give it: {error}"
        ) from None


def read(folder: Path) -> tuple[str, object, dict[str, Tensor]]:
    """The class name, the configuration as JSON values, and the weights."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            best = folder / "best"  # of a run's folder
            hint = f"; its best weights are in {best}" if (best / name).is_file() else ""
            raise PretrainedError(f"{folder}: {name} is missing{hint}")
    try:
        description = json.loads((folder / CONFIG).read_text())
        name, config = description["model"], description["config"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise PretrainedError(f"{folder / CONFIG}: not a model description: {error}") from None
    try:
        weights = safetensors.torch.load_file(folder / WEIGHTS)
    except (safetensors.SafetensorError, OSError) as error:
        raise PretrainedError(f"{folder / WEIGHTS}: damaged or incomplete: {error}") from None
    return name, config, weights
