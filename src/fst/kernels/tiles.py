"""Tiles by which a kernel is launched, and what to do where they do not fit."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import triton

Tiles = dict[str, int]
Result = TypeVar("Result")


def tiles_in(count: int, size: int) -> int:
    """As many of this size as hold so many; Triton's `cdiv` takes the host several µs."""
    return -(-count // size)


def first_that_fits(candidates: Sequence[Tiles], launch: Callable[[Tiles], Result]) -> Result:
    """With the first of these tiles that this GPU has the shared memory for."""
    for tiles in candidates[:-1]:
        try:
            return launch(tiles)
        except triton.OutOfResources:
            continue
    return launch(candidates[-1])
