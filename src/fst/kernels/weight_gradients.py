"""The gradients of both layers' weights of an MLP: aᵀ b (m n) in float32 of a (t m) and b (t n).

There are many tokens t and few channels. On Hopper, in half precision, one launch of
`weight_gradients_hopper` serves both pairs: it divides the tokens into shares and leaves the sum of
each; a second launch adds the shares, always in the same order. A library takes two launches for
each pair, and reads the operands from the cache more often. Everywhere else, and for one pair
alone, the library does it: there it is as fast. If the Hopper kernel cannot be imported or
compiled, a warning says so once and it is never tried again.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fst.kernels.hopper import try_on_hopper
from fst.kernels.launching import launch_kernel
from fst.kernels.tiles import tiles_in

Pair = tuple[Tensor, Tensor]

# Tokens that are copied at once. Groups of warps in a program, and channels of each of them.
TOKENS, GROUPS, GROUP = 64, 3, 64
# Programs that the largest Hopper GPU runs at once.
PROGRAMS = 132
# Fewer tokens, or two operands of more channels than this, are for the library.
LEAST_TOKENS, MOST_NARROW = 4096, 2 * GROUPS * GROUP
# Of a program against 64 tokens, by the channels of the wide operand it takes: cycles of a
# multiprocessor, the larger of its products' and its shared memory's.
CYCLES = {256: 1540, 128: 900, 64: 640}
# An H200: cycles a second; bytes a second from memory, from the cache while multiplying, and of
# shares that are written and read again.
CLOCK, MEMORY, CACHE, SHARES = 1.7e9, 4.2e12, 7e12, 4e12
# Numbers that a program adds up, shares that it reads at once (each warp some of them), and warps.
ADDED, AT_ONCE, WARPS = 512, 8, 4


class Product(NamedTuple):
    """Tokens, and the channels of the operand with more of them and of the other."""

    tokens: int
    wide: int
    narrow: int

    def tiles(self, wide: int) -> int:
        return math.ceil(self.wide / wide) * math.ceil(self.narrow / (GROUPS * GROUP))

    def blocks(self) -> int:
        return math.ceil(self.tokens / TOKENS)


class Division(NamedTuple):
    """Channels of the wide operand that a program takes, and every product's number of shares."""

    wide: int
    shares: tuple[int, ...]


def _divided(products: Sequence[Product], wide: int) -> Division:
    """As few blocks of tokens for a program as PROGRAMS allows, the same for all products."""
    sizes = [(product.tiles(wide), product.blocks()) for product in products]
    steps = max(1, math.ceil(sum(tiles * blocks for tiles, blocks in sizes) / PROGRAMS))
    most = max(blocks for _, blocks in sizes)
    while steps < most and sum(n * math.ceil(blocks / steps) for n, blocks in sizes) > PROGRAMS:
        steps += 1
    return Division(wide, tuple(math.ceil(blocks / steps) for _, blocks in sizes))


def _seconds(products: Sequence[Product], division: Division) -> float:
    """An estimate, to choose by."""
    memory = cache = shares = cycles = 0.0
    for product, number in zip(products, division.shares, strict=True):
        tokens, wide, narrow = product
        memory += 2 * tokens * (wide + narrow)
        again = math.ceil(wide / division.wide)
        cache += 2 * tokens * (wide * math.ceil(narrow / (GROUPS * GROUP)) + narrow * again)
        shares += 2 * 4 * number * wide * narrow
        cycles = max(cycles, math.ceil(product.blocks() / number) * CYCLES[division.wide])
    return max(memory / MEMORY, cache / CACHE, cycles / CLOCK) + shares / SHARES


def divide(products: Sequence[Product]) -> Division:
    """Depends on sizes alone, not on the GPU: sums are the same everywhere."""
    return _best_division(tuple(products))


@lru_cache(1024)
def _best_division(products: tuple[Product, ...]) -> Division:
    divisions = [_divided(products, wide) for wide in CYCLES]
    return min(divisions, key=lambda division: _seconds(products, division))


def sizes(pair: Pair) -> Product:
    (tokens, m), n = pair[0].shape, pair[1].shape[1]
    return Product(tokens, max(m, n), min(m, n))


@triton.jit
def _add(shares, out, program, size, number, ADDED: tl.constexpr, AT_ONCE: tl.constexpr):
    place = program * ADDED + tl.arange(0, ADDED)
    sums = tl.zeros((AT_ONCE, ADDED), tl.float32)
    for first in range(0, number, AT_ONCE):
        share = first + tl.arange(0, AT_ONCE)
        values = shares + share.to(tl.int64)[:, None] * size + place[None, :]
        there = (share < number)[:, None] & (place < size)[None, :]
        sums += tl.load(values, mask=there, other=0.0)
    tl.store(out + place, tl.sum(sums, 0), mask=place < size)


@triton.jit(do_not_specialize=["size0", "number0", "size1", "number1", "start"])
def add_shares_kernel(
    shares0, out0, size0, number0, shares1, out1, size1, number1, start,
    ADDED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Sizes are counted in 8 numbers, so that the compiler sees it. From `start` on, programs take
    the second result."""
    program = tl.program_id(0)
    if program < start:
        _add(shares0, out0, program, size0 * 8, number0, ADDED, AT_ONCE)
    else:
        _add(shares1, out1, program - start, size1 * 8, number1, ADDED, AT_ONCE)


def add_shares(shares: Sequence[Tensor]) -> list[Tensor]:
    """Of two (s m n) the sums over s; m n is a multiple of 8."""
    if all(len(given) == 1 for given in shares):
        return [given[0] for given in shares]
    sums = [torch.empty_like(given[0]) for given in shares]
    programs = [tiles_in(total.numel(), ADDED) for total in sums]
    both = [
        (given, total, total.numel() // 8, len(given))
        for given, total in zip(shares, sums, strict=True)
    ]
    launch_kernel(
        add_shares_kernel, (sum(programs),),
        *both[0], *both[1], programs[0], ADDED=ADDED, AT_ONCE=AT_ONCE, num_warps=WARPS,
    )  # fmt: skip
    return sums


def _suits(pair: Pair) -> bool:
    """Whether the Hopper kernel takes it: rows must begin at multiples of 16 bytes."""
    product = sizes(pair)
    return (
        pair[0].dtype == pair[1].dtype
        and pair[0].dtype in (torch.bfloat16, torch.float16)
        and product.tokens >= LEAST_TOKENS
        and product.narrow <= MOST_NARROW
        and all(
            x.data_ptr() % 16 == 0
            and x.shape[1] % 8 == 0
            and x.stride(0) % 8 == 0
            and x.stride(1) == 1
            for x in pair
        )
    )


def transposed_product(a: Float[Tensor, "t m"], b: Float[Tensor, "t n"]) -> Float[Tensor, "m n"]:
    """aᵀ b of one pair, by the library."""
    if a.is_cuda and a.element_size() == 2:
        return torch.mm(a.t(), b, out_dtype=torch.float32)
    return a.float().t() @ b.float()


def weight_gradients(first: Pair, second: Pair) -> list[Float[Tensor, "m n"]]:
    """aᵀ b of both pairs."""
    pairs, found = (first, second), []

    def launch() -> None:
        from fst.kernels import weight_gradients_hopper as hopper

        found.extend(add_shares(hopper.shares(pairs, divide([sizes(pair) for pair in pairs]))))

    alike = first[0].dtype == second[0].dtype and first[0].device == second[0].device
    suited = alike and all(map(_suits, pairs))
    if suited and try_on_hopper("weight gradients", first[0], launch):
        return found
    return [transposed_product(*pair) for pair in pairs]
