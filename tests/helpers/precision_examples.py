"""Surroundings in which float32 has to be asked for."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def lower_precision() -> Iterator[None]:
    """BF16 autocast on the CPU, and TF32 allowed in products and convolutions on a GPU."""
    with torch.autocast("cpu", torch.bfloat16):
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        try:
            yield
        finally:
            torch.set_float32_matmul_precision("highest")
