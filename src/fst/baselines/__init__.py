"""The paper's baselines for partial differential equations, as operators like FST.

One file a model. They share FST's call signature, so training, evaluation and the command line
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
from fst.operators import Operator

BaselineConfig = (
    FNOConfig | PerceiverIOConfig | TransolverConfig | GridTransolverConfig | DeepONetConfig
)

__all__ = [
    "FNO",
    "BaselineConfig",
    "DeepONet",
    "DeepONetConfig",
    "FNOConfig",
    "GridTransolver",
    "GridTransolverConfig",
    "PerceiverIO",
    "PerceiverIOConfig",
    "Transolver",
    "TransolverConfig",
    "build",
]


def build(config: BaselineConfig) -> Operator:
    """The untrained model a configuration describes."""
    match config:
        case FNOConfig():
            return FNO(config)
        case PerceiverIOConfig():
            return PerceiverIO(config)
        case GridTransolverConfig():  # before the kind it derives from
            return GridTransolver(config)
        case TransolverConfig():
            return Transolver(config)
        case DeepONetConfig():
            return DeepONet(config)
    raise TypeError(f"config must describe a baseline, got {type(config).__name__}")
