"""Attention for many short heads, as Triton kernels: 24 numbers a head are 32 on chip, not 64.

Keys and values enter in one tensor (b n 2 h k), as the projection that makes both leaves them;
queries as (b h p k) in any layout whose last axis is dense. Where queries come from the same
tokens, all are one tensor (b n 3 h k), queries first. Gradients leave as what they belong to
entered, and go on through the projections without a copy. The mixture leaves as (b h p k), stored
(b p h k) so that joining the heads copies nothing, together with the logarithm of each query's
normaliser for the backward pass. With c = scale · log₂ e,

    P_ij = exp2(c q_i·k_j - log_i),   out_i = Σ_j P_ij v_j,

and going backward, with g the gradient of out and δ_i = g_i · out_i,

    ∂v_j = Σ_i P_ij g_i,   S_ij = P_ij scale (g_i · v_j - δ_i),   ∂q = S k,   ∂k = Sᵀ q.

Two passes, one over tiles of keys and one over tiles of queries: adding up ∂q from the first with
atomic operations takes longer on an H200 than computing P again. On Hopper `attention_hopper` takes
the forward pass where it can, and goes backward in one.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fst.kernels.launch import Gradients, from_module, launch_kernel, operator, try_on_hopper


@triton.jit
def _rows(base, stride, index, count, SIZE: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr):
    """The listed rows of one head, widened from SIZE to K numbers; zero beyond the last."""
    channels = tl.arange(0, K)
    pointers = base + index[:, None] * stride + channels[None, :]
    if EVEN:
        return tl.load(pointers, mask=(channels < SIZE)[None, :], other=0.0)
    mask = (index < count)[:, None] & (channels < SIZE)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _store_rows(
    base, b, h, H, index, count, values,
    SIZE: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Into one of the parts of a dense (b n PARTS h SIZE) tensor."""
    channels = tl.arange(0, K)
    pointers = base + ((b * count + index[:, None]) * (PARTS * H) + h) * SIZE + channels[None, :]
    mask = (index < count)[:, None] & (channels < SIZE)[None, :]
    tl.store(pointers, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _add_keys(
    q, k_base, v_base, k_stride, v_stride, start, N, c, highest, total, out,
    SIZE: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Take one tile of keys into the running maximum, sum and mixture."""
    index = start + tl.arange(0, BLOCK_N)
    k = _rows(k_base, k_stride, index, N, SIZE, K, EVEN)
    logits = tl.dot(q, tl.trans(k), input_precision="ieee")
    if not EVEN:
        logits = tl.where((index < N)[None, :], logits, -float("inf"))
    now = tl.maximum(highest, tl.max(logits, 1) * c)
    weights = tl.exp2(logits * c - now[:, None])
    shrink = tl.exp2(highest - now)
    total = total * shrink + tl.sum(weights, 1)
    v = _rows(v_base, v_stride, index, N, SIZE, K, EVEN)
    out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
    return now, total, out


@triton.jit
def attention_kernel(
    q, k, v, out, logarithms,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    H, M, N, c,
    SIZE: tl.constexpr, REAL: tl.constexpr, K: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_M: tl.constexpr,
):  # fmt: skip
    both = tl.program_id(1)
    b, h = (both // H).to(tl.int64), (both % H).to(tl.int64)
    q += (b * q_b + h * q_h) * UNIT
    k += (b * k_b + h * k_h) * UNIT
    v += (b * v_b + h * v_h) * UNIT
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    query = _rows(q, q_n * UNIT, rows, M, SIZE, K, EVEN_M)
    highest = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, K), tl.float32)
    whole = (N // BLOCK_N) * BLOCK_N
    for start in range(0, whole, BLOCK_N):
        highest, total, mixed = _add_keys(
            query, k, v, k_n * UNIT, v_n * UNIT, start, N, c, highest, total, mixed,
            SIZE, K, BLOCK_N, True,
        )  # fmt: skip
    if whole < N:
        highest, total, mixed = _add_keys(
            query, k, v, k_n * UNIT, v_n * UNIT, whole, N, c, highest, total, mixed,
            SIZE, K, BLOCK_N, False,
        )  # fmt: skip
    mixed = tl.where((tl.arange(0, K) == REAL)[None, :], 1.0, mixed / total[:, None])
    _store_rows(out, b, h, H, rows, M, mixed, SIZE, K, 1)
    tl.store(logarithms + both.to(tl.int64) * M + rows, highest + tl.log2(total), mask=rows < M)


@triton.jit
def attention_keys_kernel(
    grad, q, k, v, logarithms, delta, dk, dv,
    g_b, g_h, g_n, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    H, M, N, c, scale,
    SIZE: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_M: tl.constexpr,
):  # fmt: skip
    """A tile of keys against all queries."""
    both = tl.program_id(1)
    b, h = (both // H).to(tl.int64), (both % H).to(tl.int64)
    grad += (b * g_b + h * g_h) * UNIT
    q += (b * q_b + h * q_h) * UNIT
    k += (b * k_b + h * k_h) * UNIT
    v += (b * v_b + h * v_h) * UNIT
    logarithms += both.to(tl.int64) * M
    delta += both.to(tl.int64) * M
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    key = _rows(k, k_n * UNIT, columns, N, SIZE, K, False)
    value = _rows(v, v_n * UNIT, columns, N, SIZE, K, False)
    sum_k = tl.zeros((BLOCK_N, K), tl.float32)
    sum_v = tl.zeros((BLOCK_N, K), tl.float32)
    for start in range(0, M, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        query = _rows(q, q_n * UNIT, rows, M, SIZE, K, EVEN_M)
        g = _rows(grad, g_n * UNIT, rows, M, SIZE, K, EVEN_M)
        if EVEN_M:
            logarithm, along = tl.load(logarithms + rows), tl.load(delta + rows)
        else:
            logarithm = tl.load(logarithms + rows, mask=rows < M, other=float("inf"))
            along = tl.load(delta + rows, mask=rows < M, other=0.0)
        logits = tl.dot(key, tl.trans(query), input_precision="ieee")
        weights = tl.exp2(logits * c - logarithm[None, :])  # n m
        sum_v = tl.dot(weights.to(g.dtype), g, sum_v, input_precision="ieee")
        change = tl.dot(value, tl.trans(g), input_precision="ieee")
        change = weights * (change * scale - along[None, :])
        sum_k = tl.dot(change.to(query.dtype), query, sum_k, input_precision="ieee")
    _store_rows(dk, b, h, H, columns, N, sum_k, SIZE, K, PARTS)
    _store_rows(dv, b, h, H, columns, N, sum_v, SIZE, K, PARTS)


@triton.jit
def _add_query_gradients(
    query, g, k, v, k_n, v_n, start, N, c, scale, logarithm, along, sum_q,
    SIZE: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One tile of keys' share of the gradient of the queries."""
    index = start + tl.arange(0, BLOCK_N)
    key = _rows(k, k_n, index, N, SIZE, K, EVEN)
    value = _rows(v, v_n, index, N, SIZE, K, EVEN)
    logits = tl.dot(query, tl.trans(key), input_precision="ieee")
    if not EVEN:
        logits = tl.where((index < N)[None, :], logits, -float("inf"))
    weights = tl.exp2(logits * c - logarithm[:, None])
    change = tl.dot(g, tl.trans(value), input_precision="ieee")
    change = weights * (change * scale - along[:, None])
    return tl.dot(change.to(key.dtype), key, sum_q, input_precision="ieee")


@triton.jit
def attention_queries_kernel(
    grad, q, k, v, logarithms, delta, dq,
    g_b, g_h, g_n, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    H, M, N, c, scale,
    SIZE: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_M: tl.constexpr,
):  # fmt: skip
    """A tile of queries against all keys."""
    both = tl.program_id(1)
    b, h = (both // H).to(tl.int64), (both % H).to(tl.int64)
    grad += (b * g_b + h * g_h) * UNIT
    q += (b * q_b + h * q_h) * UNIT
    k += (b * k_b + h * k_h) * UNIT
    v += (b * v_b + h * v_h) * UNIT
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = rows < M
    query = _rows(q, q_n * UNIT, rows, M, SIZE, K, EVEN_M)
    g = _rows(grad, g_n * UNIT, rows, M, SIZE, K, EVEN_M)
    pointers = both.to(tl.int64) * M + rows
    logarithm = tl.load(logarithms + pointers, mask=real, other=float("inf"))
    along = tl.load(delta + pointers, mask=real, other=0.0)
    sum_q = tl.zeros((BLOCK_M, K), tl.float32)
    whole = (N // BLOCK_N) * BLOCK_N
    for start in range(0, whole, BLOCK_N):
        sum_q = _add_query_gradients(
            query, g, k, v, k_n * UNIT, v_n * UNIT, start, N, c, scale, logarithm, along, sum_q,
            SIZE, K, BLOCK_N, True,
        )  # fmt: skip
    if whole < N:
        sum_q = _add_query_gradients(
            query, g, k, v, k_n * UNIT, v_n * UNIT, whole, N, c, scale, logarithm, along, sum_q,
            SIZE, K, BLOCK_N, False,
        )  # fmt: skip
    _store_rows(dq, b, h, H, rows, M, sum_q, SIZE, K, PARTS)


def _tiles(queries: int, keys: int, warps: int, stages: int) -> dict[str, int]:
    return {"BLOCK_M": queries, "BLOCK_N": keys, "num_warps": warps, "num_stages": stages}


# The fastest of those tried on an H200.
FORWARD = _tiles(64, 64, 4, 4)
BACKWARD_KEYS = _tiles(64, 64, 4, 3)
BACKWARD_QUERIES = _tiles(64, 32, 4, 3)


def _widened(size: int) -> int:
    return max(16, int(triton.next_power_of_2(size)))


def _strides(*tensors: Tensor) -> tuple[list[int], int]:
    """Strides of batch, head and row, counted in a unit that the compiler knows.

    Rows that begin at a multiple of 8 numbers are loaded 16 bytes at a time, but only if the
    compiler can see it. It looks for multiples of 16 in arguments; 24 is none.
    """
    strides = [stride for tensor in tensors for stride in tensor.stride()[:3]]
    unit = 8 if all(stride % 8 == 0 for stride in strides) else 1
    return [stride // unit for stride in strides], unit


def _copied_by_hopper(*tensors: Tensor) -> bool:
    """Whether Hopper's copies take these heads: rows begin at multiples of 16 bytes."""
    return tensors[0].dtype in (torch.bfloat16, torch.float16) and all(
        tensor.dtype == tensors[0].dtype
        and tensor.shape[-1] in (24, 32)
        and tensor.stride(-1) == 1
        and tensor.data_ptr() % 16 == 0
        and all(stride > 0 and stride % 8 == 0 for stride in tensor.stride()[:3])
        for tensor in tensors
    )


def _suits_hopper_forward(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether the forward kernel of `attention_hopper` takes these heads.

    No less than a block of queries, and three tiles of keys: the ones beside a tile come two tiles
    later, and the next head is not begun while a group still waits for them.
    """
    counted = queries.shape[2] >= 128 and keys.shape[2] > 128 and len(queries) > 0
    return counted and _copied_by_hopper(queries, keys, values)


def _suits_hopper_backward(grad: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether the backward kernel of `attention_hopper` takes these heads.

    It keeps the gradients of one head's queries in shared memory. Each of its groups of warps
    needs keys, and two tiles of queries.
    """
    count = queries.shape[2]
    counted = 64 < count <= 1024 and count % 4 == 0 and keys.shape[2] > 128 and len(queries) > 0
    return counted and _copied_by_hopper(grad, queries, keys, values)


def _parts(keys_values: Tensor, queries: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as (b h n k)."""
    *own, keys, values = keys_values.permute(2, 0, 3, 1, 4).unbind()
    return own[0] if queries is None else queries, keys, values


def _joined(like: Tensor) -> Tensor:
    """An empty tensor (b h n k), stored (b n h k)."""
    batch, heads, count, size = like.shape
    return like.new_empty(batch, count, heads, size).transpose(1, 2)


@operator("fst::attention")
def attention_forward(
    keys_values: Tensor, queries: Tensor | None, scale: float, real: int
) -> tuple[Tensor, Tensor]:
    """The mixture, stored (b p h k), and the logarithm to base 2 of the normaliser (b h p).

    Values have `real` channels; if there are more, the first of the others leaves as one.
    """
    parts = _parts(keys_values, queries)
    batch, heads, count, size = parts[0].shape
    out, logarithms = _empty_mixture(keys_values, queries)
    given = *parts, scale, out, logarithms, real
    launch = from_module("attention_hopper", "forward", *given)
    suited = _suits_hopper_forward(*parts)
    if suited and try_on_hopper("attention forward", keys_values, launch):
        return out, logarithms
    strides, unit = _strides(*parts)
    launch_kernel(attention_kernel, (triton.cdiv(count, FORWARD["BLOCK_M"]), batch * heads),
        *parts, out, logarithms, *strides,
        heads, count, keys_values.shape[1], scale * math.log2(math.e),
        SIZE=size, REAL=real, K=_widened(size), UNIT=unit,
        EVEN_M=count % FORWARD["BLOCK_M"] == 0, **FORWARD,
    )  # fmt: skip
    return out, logarithms


@attention_forward.register_fake
def _empty_mixture(
    keys_values: Tensor, queries: Tensor | None, *rest: float
) -> tuple[Tensor, Tensor]:
    asked, _, _ = _parts(keys_values, queries)
    return _joined(asked), keys_values.new_empty(asked.shape[:3], dtype=torch.float32)


@operator("fst::attention_backward")
def attention_backward(
    grad: Tensor, keys_values: Tensor, queries: Tensor | None, logarithms: Tensor, delta: Tensor,
    scale: float,
) -> list[Tensor]:  # fmt: skip
    """The gradients of `keys_values` and, if they are apart, of queries, dense and stored as these.

    `delta` is scale Σ grad · out, over the channels.
    """
    parts, gradients = _parts(keys_values, queries), _empty_gradients(grad, keys_values, queries)
    batch, heads, count, size = parts[0].shape
    keys, wide, joint = keys_values.shape[1], _widened(size), keys_values.shape[2]
    apart = joint if queries is None else 1
    dq, dk, dv = _parts(gradients[0], None if queries is None else gradients[1])
    given = (grad, *parts, logarithms, delta)
    launch = from_module("attention_hopper", "backward", *given, scale, dq, dk, dv)
    suited = _suits_hopper_backward(grad, *parts)
    if suited and try_on_hopper("attention backward", keys_values, launch):
        return gradients
    strides, unit = _strides(grad, *parts)
    numbers = (*strides, heads, count, keys, scale * math.log2(math.e), scale)
    tiles = BACKWARD_KEYS
    launch_kernel(attention_keys_kernel, (triton.cdiv(keys, tiles["BLOCK_N"]), batch * heads),
        *given, dk, dv, *numbers,
        SIZE=size, K=wide, PARTS=joint, UNIT=unit, EVEN_M=count % tiles["BLOCK_M"] == 0, **tiles,
    )  # fmt: skip
    tiles = BACKWARD_QUERIES
    launch_kernel(attention_queries_kernel, (triton.cdiv(count, tiles["BLOCK_M"]), batch * heads),
        *given, dq, *numbers,
        SIZE=size, K=wide, PARTS=apart, UNIT=unit, EVEN_M=count % tiles["BLOCK_M"] == 0, **tiles,
    )  # fmt: skip
    return gradients


@attention_backward.register_fake
def _empty_gradients(
    grad: Tensor, keys_values: Tensor, queries: Tensor | None, *rest: Any
) -> list[Tensor]:
    """Of both, or of the one."""
    found = keys_values.new_empty(keys_values.shape)
    return [found] if queries is None else [found, _joined(queries)]


@attention_forward.gradients("keys_values", "queries", "scale", "real", outputs=True)
def _(
    ctx: Any, grad: Tensor, keys_values: Tensor, queries: Tensor | None, scale: float, real: int,
    out: Tensor, logarithms: Tensor,
) -> Gradients:  # fmt: skip
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    # What is no mixture of values moves no weight.
    mixture, moved = out[..., :real], grad[..., :real]
    delta = (moved.float() * mixture.float()).sum(dim=-1) * scale
    found = attention_backward(grad, keys_values, queries, logarithms, delta, scale)
    return dict(zip(("keys_values", "queries"), found, strict=False))


def short_attention(
    keys_values: Float[Tensor, "b n t h k"],
    queries: Float[Tensor, "b h p k"] | None,
    scale: float,
    real: int | None = None,
) -> Float[Tensor, "b h p k"]:
    """Softmax attention. A head size that is a multiple of 8 loads fastest.

    `keys_values` holds keys and values; without `queries`, the queries come first in it. If values
    have only `real` channels and zeros behind them, the first of these leaves as one: it can carry
    a bias through the product that follows.
    """
    size = keys_values.shape[-1]
    return attention_forward(keys_values, queries, scale, size if real is None else real)[0]
