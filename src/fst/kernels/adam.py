"""Clipping of the gradient and Adam's step, for all parameters together in two launches.

Parameters θ, their gradients g, Adam's averages m and v and the counts t of steps enter, all but g
change in place, and the norm of the whole gradient leaves. With rate η, and decay that is either
coupled (λ) or decoupled (μ),

    t ← t + 1,   g ← g min(1, limit / (‖g‖ + 10⁻⁶)) + λ θ,
    m ← β₁ m + (1 - β₁) g,   v ← β₂ v + (1 - β₂) g²,
    θ ← θ - η μ θ - η / (1 - β₁ᵗ) m / (√v / √(1 - β₂ᵗ) + ε).

Tensors are cut into blocks, one to a program; a table says where in memory each block lies. The
first kernel sums the squares of each block of the gradient. In the second every program adds up all
these sums again, in the same order, which is cheaper than a launch in between.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int64
from torch import Tensor

BLOCK = 2048
WARPS = {"squares": 4, "update": 8}
# Sums of blocks that a program reads at once.
SUMS = 1024

# The columns of the table are those of `Place`, with the addresses of the block and 0 for `step`
# unless the block is its tensor's first; `tensor` comes last.
COLUMNS = tl.constexpr(8)
RATES = tl.constexpr(6)  # the fields of `Rates`
COEFFICIENTS = tl.constexpr(9)


class Place(NamedTuple):
    """Where a parameter and what belongs to it begin, how long it is, and its group."""

    parameter: int
    gradient: int
    average: int
    square: int
    step: int
    length: int
    group: int


class Rates(NamedTuple):
    """The numbers of a group of parameters."""

    rate: float
    beta1: float
    beta2: float
    epsilon: float
    coupled: float
    decoupled: float


@triton.jit
def _floats(address, FOURS: tl.constexpr):
    """The pointer; numbers move by fours where it is a multiple of their bytes."""
    pointer = address.to(tl.pointer_type(tl.float32))
    return tl.multiple_of(pointer, 16) if FOURS else pointer


@triton.jit
def _places(count, BLOCK: tl.constexpr, FOURS: tl.constexpr):
    """The places of a block, and which of them are the tensor's."""
    places = tl.arange(0, BLOCK)
    return places, (places // 4 < count // 4 if FOURS else places < count)


@triton.jit
def _count_step(step, rates, out):
    """One step more; what the update of this tensor needs, in float32.

    In float64 until then: float32 would leave 1 - β₂ with four digits.
    """
    count = tl.load(step) + 1.0
    tl.store(step, count)
    rate = tl.load(rates)
    beta1 = tl.load(rates + 1)
    beta2 = tl.load(rates + 2)
    t = count.to(tl.float64)
    tl.store(out, (rate / (1.0 - tl.exp(t * tl.log(beta1)))).to(tl.float32))
    tl.store(out + 1, tl.sqrt(1.0 - tl.exp(t * tl.log(beta2))).to(tl.float32))
    tl.store(out + 2, beta1.to(tl.float32))
    tl.store(out + 3, (1.0 - beta1).to(tl.float32))
    tl.store(out + 4, beta2.to(tl.float32))
    tl.store(out + 5, (1.0 - beta2).to(tl.float32))
    tl.store(out + 6, tl.load(rates + 3).to(tl.float32))
    tl.store(out + 7, tl.load(rates + 4).to(tl.float32))
    tl.store(out + 8, (rate * tl.load(rates + 5)).to(tl.float32))


@triton.jit
def _sum_squares(gradient, count, BLOCK: tl.constexpr, FOURS: tl.constexpr):
    places, there = _places(count, BLOCK, FOURS)
    g = tl.load(_floats(gradient, FOURS) + places, mask=there, other=0.0)
    return tl.sum(g * g)


@triton.jit
def squares_kernel(table, rates, coefficients, squares, BLOCK: tl.constexpr):
    """The sum of squares of each block of the gradient; the coefficients of each tensor."""
    block = tl.program_id(0)
    row = table + block * COLUMNS
    gradient = tl.load(row + 1)
    step = tl.load(row + 4)
    count = tl.load(row + 5)
    if (count % 4 == 0) & (gradient % 16 == 0):
        tl.store(squares + block, _sum_squares(gradient, count, BLOCK, True))
    else:
        tl.store(squares + block, _sum_squares(gradient, count, BLOCK, False))
    if step != 0:
        group = tl.load(row + 6)
        tensor = tl.load(row + 7)
        _count_step(
            _floats(step, False), rates + group * RATES, coefficients + tensor * COEFFICIENTS
        )


@triton.jit
def _norm(squares, blocks, SUMS: tl.constexpr):
    places = tl.arange(0, SUMS)
    total = tl.zeros((SUMS,), tl.float32)
    for start in range(0, blocks, SUMS):
        total += tl.load(squares + start + places)
    return tl.sqrt_rn(tl.sum(total))


@triton.jit
def _update(
    parameter, gradient, average, square, coefficients, squares, norm, limit, blocks, count,
    BLOCK: tl.constexpr, SUMS: tl.constexpr, FOURS: tl.constexpr,
):  # fmt: skip
    places, there = _places(count, BLOCK, FOURS)
    parameter = _floats(parameter, FOURS) + places
    average = _floats(average, FOURS) + places
    square = _floats(square, FOURS) + places
    g = tl.load(_floats(gradient, FOURS) + places, mask=there, other=0.0)
    p = tl.load(parameter, mask=there, other=0.0)
    m = tl.load(average, mask=there, other=0.0)
    v = tl.load(square, mask=there, other=0.0)
    rate = tl.load(coefficients)
    root = tl.load(coefficients + 1)
    beta1 = tl.load(coefficients + 2)
    rest1 = tl.load(coefficients + 3)
    beta2 = tl.load(coefficients + 4)
    rest2 = tl.load(coefficients + 5)
    epsilon = tl.load(coefficients + 6)
    coupled = tl.load(coefficients + 7)
    shrink = tl.load(coefficients + 8)
    # Behind the loads above, which are under way meanwhile.
    total = _norm(squares, blocks, SUMS)
    if tl.program_id(0) == 0:
        tl.store(norm, total)
    factor = limit / (total + 1e-6)
    factor = tl.where(factor > 1.0, 1.0, factor)  # so that NaN stays
    g = g * factor + coupled * p
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    p -= shrink * p
    p -= rate * m / (tl.sqrt(v) / root + epsilon)
    tl.store(average, m, mask=there)
    tl.store(square, v, mask=there)
    tl.store(parameter, p, mask=there)


@triton.jit(do_not_specialize=["limit", "blocks"])
def update_kernel(
    table, coefficients, squares, norm, limit, blocks,
    BLOCK: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    row = table + tl.program_id(0) * COLUMNS
    parameter = tl.load(row)
    gradient = tl.load(row + 1)
    average = tl.load(row + 2)
    square = tl.load(row + 3)
    count = tl.load(row + 5)
    coefficients += tl.load(row + 7) * COEFFICIENTS
    if (count % 4 == 0) & ((parameter | gradient | average | square) % 16 == 0):
        _update(
            parameter, gradient, average, square, coefficients, squares, norm, limit, blocks, count,
            BLOCK, SUMS, True,
        )  # fmt: skip
    else:
        _update(
            parameter, gradient, average, square, coefficients, squares, norm, limit, blocks, count,
            BLOCK, SUMS, False,
        )  # fmt: skip


def block_table(places: Sequence[Place]) -> Int64[np.ndarray, "blocks columns"]:
    """One row a block, tensor after tensor."""
    given = np.array(places, dtype=np.int64)
    counts = given[:, 5]
    blocks = np.maximum(-(-counts // BLOCK), 1)
    tensor = np.repeat(np.arange(len(given)), blocks)
    number = np.arange(len(tensor)) - np.repeat(blocks.cumsum() - blocks, blocks)
    table = np.empty((len(tensor), COLUMNS.value), dtype=np.int64)
    table[:, :7] = given[tensor]
    table[:, :4] += (number * BLOCK * torch.float32.itemsize)[:, None]
    table[:, 4] *= number == 0
    table[:, 5] = np.minimum(counts[tensor] - number * BLOCK, BLOCK)
    table[:, 7] = tensor
    return table


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """On the device, without the host's waiting for it."""
    if device.type != "cuda":
        return values
    return values.pin_memory().to(device, non_blocking=True)


class ClippedStep:
    """Clips the gradient and updates the parameters of these places, in memory of `device`.

    Whoever calls this answers for the places: contiguous float32, of the lengths stated.
    """

    def __init__(self, places: Sequence[Place], device: torch.device) -> None:
        self.device = device
        table = block_table(places)
        self._blocks = len(table)
        self._table = _sent(torch.from_numpy(table), device)
        # Zeros up to a multiple of what is read at once.
        self._squares = torch.zeros(-(-self._blocks // SUMS) * SUMS, device=device)
        self._coefficients = torch.empty(len(places), COEFFICIENTS.value, device=device)
        self._sent_rates: list[Rates] = []
        self._rates = torch.empty(0)

    def __call__(self, rates: list[Rates], limit: float) -> Float[Tensor, ""]:
        """With the rates of each group; the norm before clipping."""
        if rates != self._sent_rates:
            self._rates = _sent(torch.tensor(rates, dtype=torch.float64), self.device)
            self._sent_rates = rates
        norm = torch.empty((), device=self.device)
        # Triton launches on the current GPU, which need not be this one.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            squares_kernel[(self._blocks,)](
                self._table, self._rates, self._coefficients, self._squares,
                BLOCK=BLOCK, num_warps=WARPS["squares"],
            )  # fmt: skip
            update_kernel[(self._blocks,)](
                self._table, self._coefficients, self._squares, norm, float(limit), self._blocks,
                BLOCK=BLOCK, SUMS=SUMS, num_warps=WARPS["update"],
            )  # fmt: skip
        return norm
