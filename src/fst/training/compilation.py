"""Whether the steps of a run are compiled, and what to say where they cannot be."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from accelerate import PartialState

from fst.training.errors import CompilationError
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
        and find_spec("triton") is not None
        and torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY
        and _python_is_known()
    )


def _python_is_known() -> bool:
    """Whether the compiler takes this version of Python."""
    from torch._dynamo.eval_frame import is_dynamo_supported  # takes a second: not before

    return is_dynamo_supported()


@contextmanager
def explained() -> Iterator[None]:
    """Within, a failure of the compiler says how to do without it."""
    from torch._dynamo.exc import TorchDynamoException  # takes a second: not before it is needed

    try:
        yield
    except TorchDynamoException as error:
        reason = " ".join(str(error).partition("\n\n")[0].split())  # then come hints for developers
        raise CompilationError(reason or type(error).__name__) from error
