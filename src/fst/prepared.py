"""What one forward pass makes of its parameters, kept for all steps of that pass."""

from collections.abc import Callable
from typing import Any

from torch import nn


class Prepared:
    """What the parameters of layers become for products and kernels, made at first asking.

    Refinement steps share their layers, so one of these goes along with all steps of a pass: each
    layer is prepared once, and going backward the gradients of all steps are added up before they
    go through the preparation.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[nn.Module, ...], Any] = {}

    def once(self, layers: tuple[nn.Module, ...], make: Callable[[], Any]) -> Any:
        if layers not in self._made:
            self._made[layers] = make()
        return self._made[layers]
