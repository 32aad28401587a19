"""A product and the residual it is added to, in one pass: y = r + x Wᵀ.

Tokens x (t c), residual r (t d) and weight W (d c) enter, y (t d) leaves, all in one dtype. Sums
are in float32 and rounded once. A library takes r in the place of y, so PyTorch copies r there
first; on Hopper, in half precision, the kernel here reads it where it is. It keeps the weight on
the chip while tokens pass by. Everywhere else this is `torch.addmm`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fst.kernels.hopper import processors, try_on_hopper
from fst.kernels.launching import launch_kernel
from fst.kernels.operators import operator
from fst.kernels.tiles import tiles_in

# Wider than this, the weight leaves no room for tokens. Places are counted in 32 bits.
WIDEST, MOST_NUMBERS = 192, 2**31
# The fastest of those tried on an H200, one program for each multiprocessor.
TILES = {"BLOCK_T": 64, "STAGES": 3, "num_warps": 4}


@triton.jit(do_not_specialize=["T"])
def residual_product_kernel(
    x, w, r, y, T,
    C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    BLOCK_T: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some tiles of tokens; channels and outputs are in two parts each, powers of two."""
    c0, c1 = tl.arange(0, C0), C0 + tl.arange(0, C1)
    d0, d1 = tl.arange(0, D0)[None, :], D0 + tl.arange(0, D1)[None, :]
    in0, in1, out0, out1 = c0 < C, c1 < C, d0 < D, d1 < D
    w00 = tl.load(w + d0 * C + c0[:, None], mask=in0[:, None] & out0, other=0.0)
    w01 = tl.load(w + d1 * C + c0[:, None], mask=in0[:, None] & out1, other=0.0)
    w10 = tl.load(w + d0 * C + c1[:, None], mask=in1[:, None] & out0, other=0.0)
    w11 = tl.load(w + d1 * C + c1[:, None], mask=in1[:, None] & out1, other=0.0)
    first, programs = tl.program_id(0), tl.num_programs(0)
    for tile in tl.range(first, tl.cdiv(T, BLOCK_T), programs, num_stages=STAGES):
        rows = (tile * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
        there = rows < T
        x0 = tl.load(x + rows * C + c0[None, :], mask=there & in0[None, :], other=0.0)
        x1 = tl.load(x + rows * C + c1[None, :], mask=there & in1[None, :], other=0.0)
        r0 = tl.load(r + rows * D + d0, mask=there & out0, other=0.0).to(tl.float32)
        r1 = tl.load(r + rows * D + d1, mask=there & out1, other=0.0).to(tl.float32)
        s0 = tl.dot(x1, w10, tl.dot(x0, w00, input_precision="ieee"), input_precision="ieee")
        s1 = tl.dot(x1, w11, tl.dot(x0, w01, input_precision="ieee"), input_precision="ieee")
        tl.store(y + rows * D + d0, (s0 + r0).to(y.dtype.element_ty), mask=there & out0)
        tl.store(y + rows * D + d1, (s1 + r1).to(y.dtype.element_ty), mask=there & out1)


def _parts(size: int) -> tuple[int, int]:
    """Two powers of two that hold so many."""
    first = min(128, max(16, triton.next_power_of_2(size)))
    return first, max(16, triton.next_power_of_2(max(size - first, 1)))


def fill(out: Tensor, residual: Tensor, tokens: Tensor, weight: Tensor, programs: int) -> None:
    """Launch the kernel."""
    (count, channels), width = tokens.shape, len(weight)
    (c0, c1), (d0, d1) = _parts(channels), _parts(width)
    launch_kernel(
        residual_product_kernel, (min(programs, tiles_in(count, TILES["BLOCK_T"])),),
        tokens, weight, residual, out, count,
        C=channels, C0=c0, C1=c1, D=width, D0=d0, D1=d1, **TILES,
    )  # fmt: skip


def _suits(given: Sequence[Tensor]) -> bool:
    """Whether the kernel takes these: rows must be whole 16 bytes, and dense."""
    return all(
        each.dtype in (torch.bfloat16, torch.float16)
        and each.is_contiguous()
        and each.shape[1] % 8 == 0
        and each.shape[1] <= WIDEST
        and each.data_ptr() % 16 == 0
        and 0 < each.numel() < MOST_NUMBERS
        for each in given
    )


@operator("fst::residual_product")
def residual_product_forward(residual: Tensor, tokens: Tensor, weight: Tensor) -> Tensor:
    """Residual (t d) + tokens (t c) weightᵀ (d c)."""
    given = residual, tokens, weight
    if _suits(given):
        out = torch.empty_like(residual)

        def launch() -> None:
            fill(out, *given, processors(out.device))

        if try_on_hopper("residual product", tokens, launch):
            return out
    return torch.addmm(residual, tokens, weight.t())


@residual_product_forward.register_fake
def _(residual: Tensor, tokens: Tensor, weight: Tensor) -> Tensor:
    return residual.new_empty(residual.shape)


def _remember(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """In plain PyTorch, as a compiler would see it behind `torch.addmm`."""
    tokens, weight = ctx.saved_tensors
    _, for_tokens, for_weight = ctx.needs_input_grad
    return (
        grad,
        grad @ weight if for_tokens else None,
        grad.t() @ tokens if for_weight else None,
    )


residual_product_forward.register_autograd(_differentiate, setup_context=_remember)


def residual_product(
    residual: Float[Tensor, "b p d"],
    tokens: Float[Tensor, "b p c"],
    weight: Float[Tensor, "d c"],
) -> Float[Tensor, "b p d"]:
    """r + x Wᵀ, the weight rounded to the dtype of the tokens, which the residual has too."""
    rows = residual.flatten(0, 1), tokens.flatten(0, 1)
    return residual_product_forward(*rows, weight.to(tokens.dtype)).view(residual.shape)
