"""Whether the steps of a run are compiled, and what to say where they cannot be."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import PartialState

from fst.training.errors import TrainingError
from fst.training.settings import TrainingSettings

# The oldest GPUs that PyTorch's compiler writes code for.
OLDEST_CAPABILITY = (7, 0)


def compiles(settings: TrainingSettings, device: torch.device) -> bool:
    """As the settings say; where they leave it open, if one process trains on one GPU."""
    if settings.compile is not None:
        return settings.compile
    return (
        device.type == "cuda"
        and PartialState().num_processes == 1
        and importlib.util.find_spec("triton") is not None
        and torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY
    )


@contextmanager
def explained() -> Iterator[None]:
    """Within, a failure of the compiler says how to do without it."""
    from torch._dynamo.exc import TorchDynamoException  # takes a second: not before it is needed

    try:
        yield
    except TorchDynamoException as error:
        reason = " ".join(str(error).partition("\n\n")[0].split())  # then come hints for developers
        raise TrainingError(
            f"torch.compile failed ({reason or type(error).__name__}); "
            "--training.compile False trains without it"
        ) from error
