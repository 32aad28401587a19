"""Several processes that train together, and how they part."""

import gc

from torch import distributed


def part() -> None:
    """Leave the other processes, where there are any, while Python is still whole.

    Threads that exchange tensors live until nobody holds the group. One that lets go of a tensor
    while Python ends aborts the process, though all its work is done (pytorch/pytorch#179291).
    Wrapped models hold the group, so they are collected first. All processes come here, or none:
    after an error of one, the others may still be exchanging something.
    """
    if distributed.is_available() and distributed.is_initialized():
        gc.collect()
        distributed.destroy_process_group()
