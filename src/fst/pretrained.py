"""Models on disk: `model.safetensors` beside `config.json`. Nothing is ever unpickled.

The configuration is a dataclass; the JSON names the model's class and spells its fields, and is
checked field by field when it is read. The weights carry a digest of themselves, and are compared
with it. Weights that ship with fst lie in folders of the same kind, and are known by their names.
"""

import hashlib
import math
import re
from pathlib import Path
from typing import Any, TypeVar

import cattrs
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fst.io import json_text, parse_json, write_atomically

WEIGHTS, CONFIG = "model.safetensors", "config.json"
HUB = "hf://"
SHIPPED = Path(__file__).parent / "weights"
DIGEST = "sha256"  # in the metadata of the weights
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
    values: dict[str, Any] = converter.unstructure(config)
    return values


def _reason(error: BaseException, kind: Any) -> str:
    """What is wrong with a value: in the words of a class that refused it, where it did."""
    refused = kind is None and type(error) is ValueError and str(error)
    return str(error) if refused else cattrs.v.format_exception(error, kind)


def from_json(data: object, kind: type[Config], source: str) -> Config:
    """A configuration from JSON values; `source` names their origin in errors."""
    try:
        return converter.structure(data, kind)
    except (cattrs.BaseValidationError, ValueError, TypeError, KeyError, AttributeError) as error:
        reasons = "; ".join(cattrs.transform_error(error, kind.__name__, _reason))
        raise PretrainedError(f"{source}: not a valid {kind.__name__}: {reasons}") from None


# Sizes beyond these are no model's, and some would take all memory or time before weights are
# compared with them.
LARGEST_SIZE = 2**20
LARGEST = dict.fromkeys(("refinement_steps", "layers", "predictor_blocks"), 256)
LARGEST |= dict.fromkeys(("points_from_anchors", "points_from_sobol"), 2**16)


def check_sizes(config: object, source: str) -> None:
    """Raise where JSON values from elsewhere ask for sizes that no model has."""
    for name, value in config.items() if isinstance(config, dict) else ():
        largest = LARGEST.get(name, math.inf if name.endswith("seed") else LARGEST_SIZE)
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(number, int) and number > largest for number in numbers):
            raise PretrainedError(f"{source}: {name} must be at most {largest:,}, got {value}")


def save(
    name: str, config: object, weights: dict[str, Tensor], folder: Path, labels: object = None
) -> None:
    """Write a model's weights and configuration into `folder`, which is made if missing; and the
    names and units of its data, as a run's run.json has them, where they are given."""
    described = {"model": name, "config": to_json(config)}
    description = json_text(described | ({"labels": labels} if labels else {})).encode()
    plain = {key: value.detach().cpu().contiguous() for key, value in weights.items()}
    data = safetensors.torch.save(plain, metadata={DIGEST: digest(plain)})
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / WEIGHTS, data)
    write_atomically(folder / CONFIG, description)


def digest(weights: dict[str, Tensor]) -> str:
    """Of all weights with their names, kinds and shapes."""
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def shipped() -> dict[str, Path]:
    """The weights that ship with this copy of fst, by name."""
    return {path.parent.name: path.parent for path in sorted(SHIPPED.glob(f"*/{WEIGHTS}"))}


def find(source: str | Path) -> Path:
    """A local folder, the folder of a shipped name or, for hf://owner/name, a download.

    A local folder comes before shipped weights of the same name.
    """
    if not isinstance(source, str | Path):
        raise TypeError(f"source must be a folder or {HUB}owner/name, got {type(source).__name__}")
    if str(source).startswith(HUB):
        return _download(str(source))
    if Path(source).is_dir():
        return Path(source)
    known = shipped()
    if str(source) not in known:
        raise PretrainedError(
            f"{source}: there is no such folder, and the weights that ship with fst are "
            f"{', '.join(known) or 'none'} (a model on the Hugging Face hub is named "
            f"{HUB}owner/name)"
        )
    return known[str(source)]


def _download(source: str) -> Path:
    name = source.removeprefix(HUB)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise PretrainedError(f"{source}: a model on the hub is named {HUB}owner/name")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise PretrainedError(
            f"{source}: to load from the hub, pip install 'function-space-transformer[hub]'"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=[WEIGHTS, CONFIG]))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise PretrainedError(f"{source}: the Hugging Face hub did not give it: {reason}") from None


def check_shapes(weights: dict[str, Tensor], expected: dict[str, torch.Size], source: str) -> None:
    """Raise unless the weights are those of a model, by name and shape."""
    for name in {**expected, **weights}:
        wanted = tuple(expected[name]) if name in expected else "none"
        found = tuple(weights[name].shape) if name in weights else "none"
        if wanted != found:
            raise PretrainedError(
                f"{source}: weights do not fit: {name} must be {wanted}, got {found}"
            )


def read(folder: Path) -> tuple[str, object, dict[str, Tensor]]:
    """The class name, the configuration as JSON values, and the weights."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            best = folder / "best"  # of a run's folder
            hint = f"; its best weights are in {best}" if (best / name).is_file() else ""
            raise PretrainedError(f"{folder}: {name} is missing{hint}")
    try:
        description = parse_json((folder / CONFIG).read_text())
        name, config = str(description["model"]), description["config"]
    except (ValueError, KeyError, TypeError) as error:
        raise PretrainedError(f"{folder / CONFIG}: not a model description: {error}") from None
    try:
        with safetensors.safe_open(folder / WEIGHTS, "pt") as file:
            stored = (file.metadata() or {}).get(DIGEST)
            weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError) as error:
        raise PretrainedError(f"{folder / WEIGHTS}: damaged or incomplete: {error}") from None
    if stored is not None and stored != digest(weights):  # older versions stored none
        raise PretrainedError(f"{folder / WEIGHTS}: damaged: its SHA-256 differs")
    return name, config, weights
