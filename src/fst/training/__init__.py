"""Training: the loop, its schedules and stopping rules, and what it leaves on disk."""

from fst.training.checkpoint import CheckpointError
from fst.training.loop import Interrupted, Summary, train
from fst.training.run_folder import RunFolder
from fst.training.settings import TrainingError, TrainingSettings
from fst.training.trainer import NonFiniteError

__all__ = [
    "CheckpointError",
    "Interrupted",
    "NonFiniteError",
    "RunFolder",
    "Summary",
    "TrainingError",
    "TrainingSettings",
    "train",
]
