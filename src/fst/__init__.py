"""The Function-Space Transformer: a neural operator with adaptive anchors.

Names are loaded, and PyTorch with them, when they are first used.
"""

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fst.version import __version__

if TYPE_CHECKING:
    from fst import data, kernels
    from fst.base import Model, parameter_count
    from fst.commands.fit import fit
    from fst.config import FunctionSpaceConfig
    from fst.cuda_graph import CUDAGraphModel
    from fst.data import PointDataset, PointSample, collate, write_points
    from fst.field import Field
    from fst.metrics import relative_l2
    from fst.model import FunctionSpaceTransformer
    from fst.rbf import rbf_blend
    from fst.recipes import build
    from fst.types import Anchors, Domain, Observations

# OpenMP threads that wait by spinning starve each other as soon as the machine has other work: a
# small model then trained fifty times slower on two cores. This counts if torch is not loaded yet.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

__all__ = [
    "Anchors",
    "CUDAGraphModel",
    "Domain",
    "Field",
    "FunctionSpaceConfig",
    "FunctionSpaceTransformer",
    "Model",
    "Observations",
    "PointDataset",
    "PointSample",
    "__version__",
    "build",
    "collate",
    "data",
    "fit",
    "from_pretrained",
    "kernels",
    "parameter_count",
    "rbf_blend",
    "relative_l2",
    "write_points",
]

_SUBMODULES = ("base", "config", "data", "field", "kernels", "model", "rbf", "types")
_NAMES = {
    "base": ("Model", "parameter_count"),
    "commands.fit": ("fit",),
    "config": ("FunctionSpaceConfig",),
    "cuda_graph": ("CUDAGraphModel",),
    "data": ("PointDataset", "PointSample", "collate", "write_points"),
    "field": ("Field",),
    "metrics": ("relative_l2",),
    "model": ("FunctionSpaceTransformer",),
    "rbf": ("rbf_blend",),
    "recipes": ("build",),
    "types": ("Anchors", "Domain", "Observations"),
}
_MODULES = {name: f"fst.{module}" for module, names in _NAMES.items() for name in names}


def from_pretrained(source: str | Path) -> "Model":
    """A model of any kind: from a folder, by a shipped name, or from the hub (hf://owner/name)."""
    from fst.base import Model

    for models in ("fst.baselines", "fst.vision"):  # so that their classes are known
        importlib.import_module(models)
    return Model.from_pretrained(source)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"fst.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'fst' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
