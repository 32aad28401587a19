"""Where kernels for Hopper run instead of others: they are tried, and one that fails is given up.

They are written in Gluon, a young language whose names change between versions of Triton, so the
modules that hold them are imported only by the `launch` that is passed in here.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

_given_up: set[str] = set()
# What says nothing about a kernel.
_FAILURES_OF_THE_GPU = (
    torch.OutOfMemoryError,
    getattr(torch, "AcceleratorError", torch.OutOfMemoryError),
)


@functools.cache
def _answer(question: Callable[[torch.device], Any], device: torch.device) -> Any:
    """What PyTorch says of a GPU; it is asked with every launch."""
    return question(device)


def _on_hopper(tensor: Tensor) -> bool:
    return tensor.is_cuda and _answer(torch.cuda.get_device_capability, tensor.device)[0] == 9


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    count: int = _answer(torch.cuda.get_device_properties, device).multi_processor_count
    return count


def try_on_hopper(family: str, tensor: Tensor, launch: Callable[[], None]) -> bool:
    """Whether `launch` ran, on the GPU that holds the tensor.

    If it fails, a warning says so and no kernel of the family is tried again.
    """
    if family in _given_up or not _on_hopper(tensor):
        return False
    try:
        launch()
    except _FAILURES_OF_THE_GPU:
        raise
    except Exception as error:  # whatever another version of a young language may raise
        _given_up.add(family)
        warnings.warn(
            f"the {family} kernels for Hopper do not work with Triton {triton.__version__}; slower "
            f"ones run instead ({type(error).__name__}: {error})",
            stacklevel=2,
        )
        return False
    return True
