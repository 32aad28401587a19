"""The Function-Space Transformer: a neural operator with adaptive anchors."""

import os

# OpenMP threads that wait by spinning starve each other as soon as the machine has other work: a
# small model then trained fifty times slower on two cores. This counts if torch is not loaded yet.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fst.base import Model, parameter_count
from fst.config import FunctionSpaceConfig
from fst.field import Field
from fst.model import FunctionSpaceTransformer
from fst.rbf import rbf_blend
from fst.types import Anchors, Domain, Observations

if TYPE_CHECKING:
    from fst import data, kernels
    from fst.cuda_graph import CUDAGraphModel
    from fst.recipes import build

__version__ = "0.1.0"

__all__ = [
    "Anchors",
    "CUDAGraphModel",
    "Domain",
    "Field",
    "FunctionSpaceConfig",
    "FunctionSpaceTransformer",
    "Observations",
    "build",
    "data",
    "from_pretrained",
    "kernels",
    "parameter_count",
    "rbf_blend",
]


def from_pretrained(source: str | Path) -> Model:
    """The model, of whatever kind, in a local folder or, by hf://owner/name, on the hub."""
    for models in ("fst.baselines", "fst.vision"):  # so that their classes are known
        importlib.import_module(models)
    return Model.from_pretrained(source)


def __getattr__(name: str) -> Any:
    """Load what the model alone does not need when it is first asked for."""
    if name == "build":
        return importlib.import_module("fst.recipes").build
    if name == "CUDAGraphModel":
        return importlib.import_module("fst.cuda_graph").CUDAGraphModel
    if name in ("data", "kernels"):
        return importlib.import_module(f"fst.{name}")
    raise AttributeError(f"module 'fst' has no attribute {name!r}")
