"""Training: the loop, its schedules and stopping rules, and what it leaves on disk."""

from fst.training.errors import CheckpointError, Interrupted, NonFiniteError, TrainingError
from fst.training.loop import Summary, train
from fst.training.run_folder import RunFolder
from fst.training.settings import TrainingSettings

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
