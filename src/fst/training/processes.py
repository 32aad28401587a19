"""Several processes that train together, and how each of them ends."""

import logging
import os
import sys

from torch import distributed


def end(code: int) -> None:
    """End this process with an exit code, if it has trained together with others.

    The threads by which processes exchange tensors go on once a wrapped model has used them, even
    when their group is destroyed (seen with PyTorch 2.13). While Python takes itself apart, such a
    thread can abort the process, though all work is done: we have seen two processes in some three
    hundred do so, and pytorch/pytorch#179291 tells of the like. So nothing is taken apart here.

    All processes come here, or none: after an error of one, others may still wait for it.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return
    distributed.destroy_process_group()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
