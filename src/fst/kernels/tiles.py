"""Tiles by which a kernel is launched, and what to do where they do not fit."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import triton

Tiles = dict[str, int]
Result = TypeVar("Result")


def first_that_fits(candidates: Sequence[Tiles], launch: Callable[[Tiles], Result]) -> Result:
    """With the first of these tiles that this GPU has the shared memory for."""
    for tiles in candidates[:-1]:
        try:
            return launch(tiles)
        except triton.OutOfResources:
            continue
    return launch(candidates[-1])
