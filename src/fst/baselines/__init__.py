"""The paper's baselines, as operators and classifiers like FST.

One file per model. They share FST's call signature, so training, evaluation and the command line
treat all of them alike.
"""

from fst.baselines.deeponet import DeepONet, DeepONetConfig
from fst.baselines.fno import FNO, FNOConfig
from fst.baselines.perceiver_io import PerceiverIO, PerceiverIOConfig
from fst.baselines.transolver import (
    GridTransolver,
    GridTransolverConfig,
    Transolver,
    TransolverConfig,
)
from fst.baselines.vit import (
    CNNVisionTransformer,
    CNNViTConfig,
    VisionTransformer,
    ViTConfig,
)

__all__ = [
    "FNO",
    "CNNViTConfig",
    "CNNVisionTransformer",
    "DeepONet",
    "DeepONetConfig",
    "FNOConfig",
    "GridTransolver",
    "GridTransolverConfig",
    "PerceiverIO",
    "PerceiverIOConfig",
    "Transolver",
    "TransolverConfig",
    "ViTConfig",
    "VisionTransformer",
]
