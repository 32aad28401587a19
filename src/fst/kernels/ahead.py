"""Kernels that another process compiles while torch.compile is still at work.

A compiler that traces a step calls every operator's fake (`fst.kernels.operators`) with tensors
that have shapes, strides and dtypes but no numbers. That says which kernels the operator will
launch, long before the first of them runs. `note` describes such a call to a process of its own
(`ahead_worker`), which compiles them, several at once; Triton keeps them on disk, where this
process finds them.

Nothing depends on it: a kernel that is not there when it is needed is compiled then. The process is
never waited for, and whatever fails here is logged for debugging and no more.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

# Kernels compiled at once, at most: not all processors, since others compile meanwhile.
MOST_AT_ONCE = 8


class GPU(NamedTuple):
    """What the launched kernels depend on, apart from their arguments."""

    major: int
    minor: int
    processors: int
    shared_memory: int
    """Bytes that a program can have."""


def describe(name: str, arguments: Sequence[Any]) -> str:
    """A call of an operator as a line of JSON; TypeError for sizes that are not yet known."""
    return json.dumps([name, [_described(argument) for argument in arguments]])


def _described(value: Any) -> Any:
    if isinstance(value, list):
        return [_described(each) for each in value]
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)}
    if not isinstance(value, Tensor):
        return value
    sizes = {"shape": list(value.shape), "stride": list(value.stride())}
    return sizes | {"offset": value.storage_offset(), "dtype": str(value.dtype)}


class _Worker:
    """The process, and what it was told."""

    def __init__(self, gpu: GPU, at_once: int) -> None:
        paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        # It sees no GPU, so it takes no memory there.
        environment = {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        # The user's interrupt is not for it; it ends when its input does.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fst.kernels.ahead_worker", json.dumps([gpu, at_once])],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=None if _log.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
            env=os.environ | environment,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._input = self._process.stdin.fileno()
        os.set_blocking(self._input, False)
        self._told: set[str] = set()

    def tell(self, line: str) -> None:
        """OSError if it does not listen: its input is full, or it has died."""
        if line not in self._told:
            self._told.add(line)
            os.write(self._input, f"{line}\n".encode())

    def end(self) -> None:
        """What it was told and has not begun is dropped; kernels being compiled are finished."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.terminate()
        self._process.wait(timeout=1)


_worker: _Worker | None = None


def note(name: str, arguments: Sequence[Any]) -> None:
    """Have the kernels compiled that this operator launches for arguments like these."""
    if _worker is None or not arguments[0].is_cuda:
        return
    try:
        _worker.tell(describe(name, arguments))
    except Exception as error:
        _log.debug("kernels of %s are not compiled ahead: %r", name, error)


def _at_once(processes: int) -> int:
    count = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 0
    return min(MOST_AT_ONCE, count // (2 * processes))


def _settle_environment(device: torch.device) -> None:
    """Set now what PyTorch's compiler would set later: Triton's cache depends on it."""
    from torch._inductor.runtime import compile_tasks
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    for name in ("_set_triton_ptxas_path", "_set_triton_libdevice_path"):
        getattr(compile_tasks, name, lambda: None)()
    os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(device.index or 0))


def _start(device: torch.device, processes: int) -> _Worker | None:
    at_once = _at_once(processes)
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    if at_once == 0 or interpreted or torch.version.hip or find_spec("triton") is None:
        return None
    try:
        _settle_environment(device)
        found = torch.cuda.get_device_properties(device)
        # Versions that do not tell: then it counts as enough.
        shared = getattr(found, "shared_memory_per_block_optin", 2**31)
        gpu = GPU(found.major, found.minor, found.multi_processor_count, shared)
        return _Worker(gpu, at_once)
    except Exception as error:
        _log.debug("no kernels are compiled ahead: %r", error)
        return None


@contextmanager
def compiled_ahead(device: torch.device, processes: int = 1) -> Iterator[None]:
    """Within, kernels that a compiler comes across are compiled ahead, if this is a GPU.

    `processes`: how many share this machine's processors.
    """
    global _worker
    if device.type != "cuda" or _worker is not None:
        yield
        return
    _worker = _start(device, processes)
    try:
        yield
    finally:
        ending, _worker = _worker, None
        try:
            if ending is not None:
                ending.end()
        except Exception as error:
            _log.debug("the process that compiles ahead does not end: %r", error)
