"""What one forward pass makes of its parameters, kept for all steps of that pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Prepared:
    """What the parameters of layers become for products and kernels, made at first asking.

    Refinement steps share their layers, so one of these goes along with all steps of a pass: each
    layer is prepared once, and going backward the gradients of all steps are added up before they
    go through the preparation.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[nn.Module | bool | None, ...], Any] = {}

    def once(self, layers: tuple[nn.Module | None, ...], make: Callable[[], Any]) -> Any:
        # What was made without gradients has none to give.
        key = (torch.is_grad_enabled(), *layers)
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
