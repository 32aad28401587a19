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
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_memory = gl.shared_memory_descriptor
# Triton 3.6 has other names for these than later versions.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
seen_as = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret

ROWS = gl.constexpr(64)  # tokens of a group of warps, in the kernels of the MLPs
TILE = gl.constexpr(128)  # channels of their first tile
# In shared memory: rows of attention's heads as they come, (1 row 1 number).
BOX = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=4))


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Each is passed once so many have arrived."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def end_barriers(bars):
    """Behind everything else, for every set of `barriers` of a kernel.

    Until a barrier is made invalid, its memory must not serve for anything else: when the GPU turns
    to another process and back, the barrier may come to lie there again. Triton gives away the
    memory of a barrier that is not named any more.
    """
    COUNT: gl.constexpr = bars.shape[0]
    for i in gl.static_range(COUNT):
        mbarrier.invalidate(bars.index(i))


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


@gluon.jit
def _tail(a):
    """Φ(-a), as in `fst.kernels.feed_forward`: Gluon kernels cannot call Triton's functions."""
    p = a * -0.0005002620746381581 + 0.007282395847141743
    p = p * a - 0.05234328657388687
    p = p * a - 0.4594140350818634
    p = p * a - 1.1510521173477173
    p = p * a - 1.0000019073486328
    return exp2(p)


@gluon.jit
def gelu(x):
    a = gl.abs(x)
    return gl.maximum(x, 0.0) - a * _tail(a)


@gluon.jit
def gelu_and_slope(x):
    a = gl.abs(x)
    tail = _tail(a)
    s = tail - a * exp2(x * x * -0.7213475204444817 - 1.3257480647361593)
    return gl.maximum(x, 0.0) - a * tail, gl.where(x > 0.0, 1.0 - s, s)


@gluon.jit
def _tokens(x, rows, T, D: gl.constexpr, FIRST: gl.constexpr, WIDE: gl.constexpr):
    """Columns of the tokens in float32, zeros behind the last, and whether they are channels."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDE, WIDE // 8], [4, 1], [1, 0])
    r = rows + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    c = FIRST + gl.arange(0, WIDE, layout=gl.SliceLayout(0, L))
    there = (c < D)[None, :]
    f = gl.load(x + r[:, None] * D + c[None, :], mask=(r < T)[:, None] & there, other=0.0)
    return f.to(gl.float32), there


@gluon.jit
def _like(values, WIDE: gl.constexpr):
    """A number of each token, as tiles of this width have it."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDE, WIDE // 8], [4, 1], [1, 0])
    return gl.convert_layout(values, gl.SliceLayout(1, L))


@gluon.jit
def _store_normed(own, f, scale, D: gl.constexpr, FIRST: gl.constexpr, WIDE: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDE, WIDE // 8], [4, 1], [1, 0])
    c = FIRST + gl.arange(0, WIDE, layout=gl.SliceLayout(0, L))
    ones = gl.where((c == D) | (c == D + 2), 1.0, 0.0)[None, :]
    own.store((f * _like(scale, WIDE)[:, None] + ones).to(own.dtype))


@gluon.jit
def normalise(x, rows, T, eps, D: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr, own):
    """The normalised tokens into shared memory; mean and reciprocal standard deviation."""
    f0, _ = _tokens(x, rows, T, D, 0, TILE)
    f1, in1 = _tokens(x, rows, T, D, TILE, D1)
    total = gl.sum(f0, 1) + _like(gl.sum(f1, 1), TILE)
    if D2 > 0:
        f2, in2 = _tokens(x, rows, T, D, TILE + D1, D2)
        total += _like(gl.sum(f2, 1), TILE)
    mean = total / D
    f0 = f0 - mean[:, None]
    f1 = gl.where(in1, f1 - _like(mean, D1)[:, None], 0.0)
    square = gl.sum(f0 * f0, 1) + _like(gl.sum(f1 * f1, 1), TILE)
    if D2 > 0:
        f2 = gl.where(in2, f2 - _like(mean, D2)[:, None], 0.0)
        square += _like(gl.sum(f2 * f2, 1), TILE)
    scale = 1.0 / gl.sqrt(square / D + eps)
    own[0].store((f0 * scale[:, None]).to(own[0].dtype))
    _store_normed(own[1], f1, scale, D, TILE, D1)
    if D2 > 0:
        _store_normed(own[2], f2, scale, D, TILE + D1, D2)
    fence_async_shared()
    barrier()
    return mean, scale


@gluon.jit
def copy_tokens(tokens, rows, bar, D1: gl.constexpr, D2: gl.constexpr, own):
    """Tokens as they are into shared memory; `bar` tells when they are there."""
    mbarrier.expect(bar, ROWS * (TILE + D1 + D2) * 2)
    copy_in(tokens[0], [rows, 0], bar, own[0])
    copy_in(tokens[1], [rows, TILE], bar, own[1])
    if D2 > 0:
        copy_in(tokens[2], [rows, TILE + D1], bar, own[2])


@gluon.jit
def load_term(term, rows, T, P, i, H: gl.constexpr, HID: gl.constexpr):
    """Tile i of the rows' position terms, as the product lies; token t takes row t mod P."""
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HID, 16])
    r = rows + gl.arange(0, ROWS, layout=gl.SliceLayout(1, M))
    c = i * HID + gl.arange(0, HID, layout=gl.SliceLayout(0, M))
    mask = (r < T)[:, None] & (c < H)[None, :]
    return gl.load(term + (r % P)[:, None] * H + c[None, :], mask=mask, other=0.0)


@gluon.jit
def weight_tiles(
    weights, D1: gl.constexpr, D2: gl.constexpr, HID: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Room for so many tiles of both weights."""
    dtype: gl.constexpr = weights[0].dtype
    first0 = gl.allocate_shared_memory(dtype, [STAGES, HID, TILE], weights[0].layout)
    first1 = gl.allocate_shared_memory(dtype, [STAGES, HID, D1], weights[1].layout)
    second0 = gl.allocate_shared_memory(dtype, [STAGES, HID, TILE], weights[2].layout)
    second1 = gl.allocate_shared_memory(dtype, [STAGES, HID, D1], weights[3].layout)
    if D2 > 0:
        first2 = gl.allocate_shared_memory(dtype, [STAGES, HID, D2], weights[4].layout)
        second2 = gl.allocate_shared_memory(dtype, [STAGES, HID, D2], weights[5].layout)
        return first0, first1, second0, second1, first2, second2
    else:
        return first0, first1, second0, second1


@gluon.jit
def token_tiles(like, D1: gl.constexpr, D2: gl.constexpr, GROUPS: gl.constexpr):
    """All tiles of the tokens of every group."""
    dtype: gl.constexpr = like[0].dtype
    own0 = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, TILE], like[0].layout)
    own1 = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, D1], like[1].layout)
    if D2 > 0:
        return own0, own1, gl.allocate_shared_memory(dtype, [GROUPS, ROWS, D2], like[2].layout)
    else:
        return own0, own1


@gluon.jit
def of_group(tiles, D2: gl.constexpr, G: gl.constexpr):
    """One group's part of `token_tiles`."""
    if D2 > 0:
        return tiles[0].index(G), tiles[1].index(G), tiles[2].index(G)
    else:
        return tiles[0].index(G), tiles[1].index(G)


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


def described_heads(tensor: Tensor, rows: int, wide: int) -> TensorDescriptor:
    """Boxes of rows of one head of a (b h n k) tensor, widened with zeros."""
    batch, heads, count, size = tensor.shape
    b, h, n, _ = tensor.stride()
    shape, strides = (batch, count, heads, size), (b, n, h, 1)
    return describe(tensor, shape, strides, (1, rows, 1, wide), BOX.value)
