"""Operators of PyTorch's that launch our kernels."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Make a function an operator; it runs with the GPU of its first tensor as the current one.

    Triton launches on the current GPU, which need not be the one that holds the tensors.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def run(*arguments: Any) -> Any:
            first = arguments[0]
            with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
                return function(*arguments)

        return torch.library.custom_op(name, run, mutates_args=())

    return decorate
