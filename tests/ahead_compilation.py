"""Runs operators as a process with a Hopper GPU would, up to the launches, which only compile.

The argument is a file with a call on each line. Prints for each kernel, in JSON, its name and
whether Triton found it on disk. A process of its own: where Triton's interpreter is on, nothing is
compiled.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from fst.kernels.operators import FUNCTIONS


class OnGPU(torch.Tensor):
    """Claims to be there; its memory is real."""

    is_cuda = True


def made(value):
    if isinstance(value, list):
        return [made(each) for each in value]
    if not isinstance(value, dict):
        return value
    dtype = getattr(torch, value["dtype"].removeprefix("torch."))
    if "shape" not in value:
        return dtype
    return torch.empty_strided(value["shape"], value["stride"], dtype=dtype).as_subclass(OnGPU)


class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def listen(*, src, cache_hit, **rest):
    found.append((src.name, cache_hit))


found = []
launch = JITFunction.run
JITFunction.run = lambda *given, grid, warmup, **options: launch(
    *given, grid=grid, warmup=True, **options
)
triton.runtime.driver.set_active(Driver())
triton.knobs.compilation.listener = listen
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=132)
for line in Path(sys.argv[1]).read_text().splitlines():
    name, arguments = json.loads(line)
    FUNCTIONS[name](*map(made, arguments))
print(json.dumps(found))
