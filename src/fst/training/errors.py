"""What can end a training run early, each with a message that says what to do next."""

from pathlib import Path


class TrainingError(RuntimeError):
    """Training cannot start or go on; the message is one clear line for the user."""


class CompilationError(TrainingError):
    """PyTorch's compiler failed on a training step."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"torch.compile failed ({reason}); to train without it: --training.compile False, or "
            'for a run that is resumed "compile": false in its recipe.json'
        )
        self.reason = reason


class CheckpointError(TrainingError):
    """A checkpoint is missing, damaged or belongs to another model."""


class NonFiniteError(TrainingError):
    """A loss, gradient or validation error is NaN or infinite."""

    def __init__(self, message: str, step: int, rows: list[int]) -> None:
        super().__init__(message)
        self.step, self.rows = step, rows


class Interrupted(Exception):  # noqa: N818  (not a fault: the run was saved and can go on)
    """Ctrl-C or a termination signal: the step was finished and a checkpoint saved."""

    def __init__(self, folder: Path, step: int, processes: int = 1) -> None:
        # Several processes need what started them: fst train alone would go on with one.
        launcher = f" (under the launcher that started these {processes} processes)"
        super().__init__(
            f"interrupted after step {step:,}; the run is saved. "
            f"Resume with: fst train --resume {folder}{launcher if processes > 1 else ''}"
        )
        self.folder, self.step = folder, step


def first_line(error: Exception) -> str:
    """What went wrong, in one line: the reason of a compiler, or an error's kind and first line."""
    if isinstance(error, CompilationError):
        return error.reason
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
