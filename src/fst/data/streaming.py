"""Batches that worker processes read from the disk while the device computes.

Enters: a plan, which says of each batch what it holds, and how to read one. Leaves: the batches, in
the plan's order, pinned where they go to a GPU. What a batch holds is a function of what was asked
alone, so neither the number of workers nor where a run was resumed changes it.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Storage = Literal["auto", "resident", "streamed"]

# "auto" keeps a split on the device where it takes at most this.
_CPU_BYTES = 4 * 2**30
_GPU_SHARE = 0.25
_AHEAD = 4  # batches that a worker may have ready


class Asked(NamedTuple):
    """One batch of a plan: rows, the seed of what is random (None: nothing), targets a row."""

    rows: Int[Tensor, " b"]
    seed: int | None = None
    queries: int | None = None


class _Planned(Dataset[Any]):
    def __init__(self, read: Callable[[Asked], Any]) -> None:
        self.read = read

    def __getitem__(self, asked: Asked) -> Any:
        return self.read(asked)


def stream(
    read: Callable[[Asked], Any], plan: Iterable[Asked], workers: int, device: torch.device
) -> Iterator[Any]:
    """What `read` makes of each entry of the plan, on the host, read ahead by `workers`."""
    loader: DataLoader[Any] = DataLoader(
        _Planned(read),
        sampler=plan,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=_AHEAD if workers else None,
        collate_fn=_as_it_is,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # or the loader draws from everyone's
    )
    yield from loader


def _as_it_is(batch: Any) -> Any:
    return batch


def device_memory(device: torch.device) -> int | None:
    """Bytes of a GPU's memory; None for other devices."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def is_small(size: int, device: torch.device) -> bool:
    """Whether so many bytes are kept on the device where nothing else is asked for."""
    memory = device_memory(device)
    return size <= (_CPU_BYTES if memory is None else _GPU_SHARE * memory)
