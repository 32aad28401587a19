"""What the kernels for Hopper share (Gluon), and names that differ between versions of Triton.

Threads that read shared memory come before a copy that overwrites it only with
`fence_async_shared`, then a barrier, between the two.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_memory = gl.shared_memory_descriptor
# Triton 3.6 has other names for these than later versions.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
seen_as = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret

# In shared memory: rows of attention's heads as they come, (1 row 1 number).
BOX = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=4))


@gluon.jit
def nothing():
    """For tuples to begin with."""
    return ()


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Each is passed once so many have arrived."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def _end_set(bars):
    COUNT: gl.constexpr = bars.shape[0]
    for i in gl.static_range(COUNT):
        mbarrier.invalidate(bars.index(i))


@gluon.jit
def end_barriers(sets):
    """Behind everything else, for all sets of `barriers` of a kernel.

    Until a barrier is made invalid, its memory must not serve for anything else: when the GPU turns
    to another process and back, the barrier may come to lie there again. Triton gives away the
    memory of a barrier that is not named any more.
    """
    for i in gl.static_range(len(sets)):
        _end_set(sets[i])


@gluon.jit
def advance(stage, turn, STAGES: gl.constexpr):
    """The next slot of a ring, and the parity of its barriers there."""
    stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
    return stage, gl.where(stage == 0, turn ^ 1, turn)


@gluon.jit
def copy_heads(source, b, first, h, bar, target):
    """Rows of one head of attention, from the first on."""
    box = seen_as(target, target.dtype, [1, target.shape[0], 1, target.shape[1]], BOX)
    copy_in(source, [b, first, h, 0], bar, box)


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


# Descriptions without their tensors, by all that they depend on; no more than this at once.
_descriptions: dict[tuple[Any, ...], dict[str, Any]] = {}
MOST_DESCRIPTIONS = 4096


def describe(
    tensor: Tensor,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    layout: gl.NVMMASharedLayout,
) -> TensorDescriptor:
    """Boxes of a tensor, of which shape and strides are given, for copies into shared memory.

    Triton checks every description, which takes the host longer than a launch. Here one is checked
    for all tensors that differ in nothing but where they begin.
    """
    key = (shape, strides, box, id(layout), tensor.dtype, tensor.data_ptr() % 16)
    fields = _descriptions.get(key)
    if fields is None:
        checked = TensorDescriptor(tensor, list(shape), list(strides), list(box), layout)
        if len(_descriptions) >= MOST_DESCRIPTIONS:
            _descriptions.clear()
        # The layout is among them: its `id` stays its own.
        fields = _descriptions[key] = vars(checked) | {
            "base": None,
            "seen": (tensor.dtype, *key[2:4]),
        }
    found = object.__new__(TensorDescriptor)
    found.__dict__.update(fields, base=tensor)
    return found


@cache
def matrix_layout(rows: int, width: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Of boxes of a matrix in half precision."""
    kind = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([rows, width], kind)


def described(tensor: Tensor, rows: int, *widths: int) -> list[TensorDescriptor]:
    """Boxes of a matrix in half precision, one width after the other."""
    given, dtype = (tensor, tensor.shape, tensor.stride()), tensor.dtype
    return [describe(*given, (rows, width), matrix_layout(rows, width, dtype)) for width in widths]
