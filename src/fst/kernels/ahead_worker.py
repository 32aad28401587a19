"""The process that compiles kernels for another: `fst.kernels.ahead` starts it and tells it which.

Enters: the other's GPU, as the argument, and calls of operators, one on each line of the input.
Leaves: kernels in Triton's cache on disk.

Operators run here as they would there, but on tensors without memory. Where one comes to a kernel
that is new, the process copies itself (fork). The copy compiles that kernel and ends, while the
original goes on as if it had been launched. A copy that finds out that the GPU has not enough
shared memory goes on instead, to what the operator tries next. Neither ever touches a GPU.
"""

import json
import os
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.cache import triton_key
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from fst.kernels import local_blend  # noqa: F401, for its operator
from fst.kernels.ahead import GPU
from fst.kernels.operators import FUNCTIONS


class Described(Tensor):
    """A tensor of which only shape, strides and dtype are known; it claims to be on a GPU."""

    is_cuda = True

    def data_ptr(self) -> int:
        """As if its memory began at 0: allocators return multiples of more than kernels ask for."""
        return int(self.storage_offset()) * self.element_size()


def made(value: Any) -> Any:
    """What `fst.kernels.ahead.describe` described."""
    if isinstance(value, list):
        return [made(each) for each in value]
    if not isinstance(value, dict):
        return value
    dtype = getattr(torch, value["dtype"].removeprefix("torch."))
    if "shape" not in value:
        return dtype
    shape, stride, offset = value["shape"], value["stride"], value["offset"]
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    memory = torch.empty(max(0, offset + last + 1), dtype=dtype, device="meta")
    return memory.as_strided(shape, stride, offset).as_subclass(Described)


class NoDriver:
    """What Triton asks of a GPU's driver in order to compile for it."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def pretend(gpu: GPU) -> None:
    """Let Triton and our operators see this GPU."""
    target = GPUTarget("cuda", 10 * gpu.major + gpu.minor, 32)
    triton.runtime.driver.set_active(NoDriver(target))
    torch.cuda.get_device_capability = lambda device=None: (gpu.major, gpu.minor)
    properties: Any = SimpleNamespace(multi_processor_count=gpu.processors)
    torch.cuda.get_device_properties = lambda device=None: properties
    # Every copy would look into many files for these, of which Triton remembers the result.
    triton_key()
    make_backend(target).hash()


class Compilation:
    """What stands where Triton compiles a kernel that it is to launch."""

    def __init__(self, gpu: GPU, at_once: int) -> None:
        self._gpu, self._at_once = gpu, at_once
        self._compile = JITFunction._do_compile
        self._seen: set[tuple[int, str]] = set()
        self._running = 0
        self.is_copy = False

    def __call__(self, kernel: JITFunction, key: str, *rest: Any) -> None:
        if not (self.is_copy or self._copied(kernel, key)):
            return
        compiled = self._compile(kernel, key, *rest)
        if compiled.metadata.shared > self._gpu.shared_memory:
            limit = self._gpu.shared_memory
            raise OutOfResources(compiled.metadata.shared, limit, "shared memory")
        _build_launcher(compiled)
        os._exit(0)

    def wait(self, running: int) -> None:
        """Until no more copies than this are running."""
        while self._running > running:
            os.wait()
            self._running -= 1

    def _copied(self, kernel: JITFunction, key: str) -> bool:
        """Whether this is a copy that is to compile the kernel; if nobody is, one is made."""
        if (id(kernel), key) in self._seen:
            return False
        self._seen.add((id(kernel), key))
        self.wait(self._at_once - 1)
        self.is_copy = os.fork() == 0
        self._running += 1
        return self.is_copy


def _build_launcher(compiled: Any) -> None:
    """Some versions of Triton have a launcher in C, which they compile and keep on disk as well."""
    from triton.backends.nvidia.driver import CudaLauncher

    with suppress(Exception):
        CudaLauncher(compiled.src, compiled.metadata)


def work(lines: Iterable[str], gpu: GPU, at_once: int) -> None:
    pretend(gpu)
    compilation = Compilation(gpu, at_once)
    # Not the object itself: it must be called as a method, with the kernel in front.
    JITFunction._do_compile = lambda *arguments: compilation(*arguments)
    for line in lines:
        try:
            name, arguments = json.loads(line)
            FUNCTIONS[name](*map(made, arguments))
        except Exception:
            traceback.print_exc()
        finally:
            if compilation.is_copy:
                os._exit(1)
    compilation.wait(0)


if __name__ == "__main__":
    found, number = json.loads(sys.argv[1])
    work(sys.stdin, GPU(*found), number)
