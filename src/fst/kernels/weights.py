"""Parameters packed for the kernels, and the products that give their gradients.

Kernels take weights in the dtype of the products and in whole tiles, h × W: hidden units up to a
whole number of tiles, channels in two tiles of powers of two, with EXTRA columns behind them.
Behind a LayerNorm with γ and β, a layer W LN(x) + b acts on normalised tokens x̂ and a one as

    [W γ, c],   c = b + W β,

and is packed with c and -u = -Σ_d w in two parts each behind the channels; the tokens there hold
(std, its rest, std, mean, its rest, mean), with the mean and standard deviation of each token.
Several projections of the same tokens become one layer, the rows of each head followed by zeros up
to a wider one. The second weight of an MLP is packed along with the first.

The kernels that use a layer find gradients dL of [W γ, c], which belong to no tensor with numbers.
A slot stands for it: a tensor that nobody reads, so that autograd adds up what all uses found and
brings it to

    dW = dL γ + dc βᵀ,   db = dc,   dγ = Σ_n dL w,   dβ = Σ_n dc w,

with sums over the rows in a fixed order. Everything before the last rounding is in float32.

`weight_gradients` is aᵀ b (m n) in float32 of a (t m) and b (t n), for both layers of an MLP. There
are many tokens t and few channels. On Hopper, in half precision, one launch of `weights_hopper`
serves both pairs: it divides the tokens into shares and leaves the sum of each; a second launch
adds the shares, always in the same order. A library takes two launches for each pair, and reads the
operands from the cache more often. Everywhere else, and for one pair alone, the library does it:
there it is as fast.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fst.kernels.launch import Gradients, launch_kernel, operator, tiles_in, try_on_hopper

EXTRA = 8  # columns behind the channels; six are used
HIDDEN_MULTIPLE = 64
_NARROWEST, _WIDEST = 16, 128


def takes_sizes(width: int, hidden: int) -> bool:
    """Whether the kernels are made for an MLP of this size."""
    return width % 8 == 0 and hidden % 8 == 0 and 0 < width <= 2 * _WIDEST - EXTRA and hidden > 0


def tile_widths(width: int) -> tuple[int, int]:
    """The channels in two tiles, powers of two; the second has room for EXTRA columns more."""
    first = _NARROWEST
    while 2 * first <= min(width, _WIDEST):
        first *= 2
    second = _WIDEST // 2 if first == _WIDEST else _NARROWEST
    while first + second < max(width, first) + EXTRA:
        second *= 2
    return first, second


def first_extra(width: int) -> int:
    """The column where what is behind the channels begins: in the second tile."""
    return max(width, tile_widths(width)[0])


def channel_tiles(width: int) -> dict[str, int]:
    """The constants by which every kernel here divides the channels."""
    first, second = tile_widths(width)
    return {"D": width, "E": first_extra(width), "D0": first, "D1": second}


def padded_hidden(hidden: int) -> int:
    """Up to whole tiles."""
    return hidden + -hidden % HIDDEN_MULTIPLE


def hopper_took(family: str, launch: Callable[[], None], *given: Tensor) -> bool:
    """Whether the Hopper kernel ran on these (tokens first): it wants rows of whole 16 bytes."""
    suited = all(
        each.dtype == torch.bfloat16 and each.data_ptr() % 16 == 0 and each.shape[1] % 8 == 0
        for each in given
    )
    wide = tile_widths(given[0].shape[1])[0] == _WIDEST and len(given[0]) > 0
    return suited and wide and try_on_hopper(family, given[0], launch)


# Projections of the same tokens: queries, keys and values.
MOST_WEIGHTS = 3
# Rows that a program packs; channels, and rows at once, whose gradients one makes.
PACKED_ROWS = 8
CHANNELS, MOST_ROWS = 8, 512


@triton.jit
def _in_parts(values, dtype: tl.constexpr):
    high = values.to(dtype)
    return high.to(tl.float32), values - high.to(tl.float32)


@triton.jit
def pack_normed_kernel(
    gamma, beta, w0, w1, w2, b0, b1, b2, second, packed, packed_second, STRIDE,
    COUNT: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of the packed layer, from COUNT weights (N D) with heads of SIZE rows, widened to WIDE;
    without γ the weight alone. The same rows of the transpose of the second weight (D N).

    Packed rows have D0 + D1 columns; what is behind the channels begins at E.
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, COLUMNS)
    EACH: tl.constexpr = N // SIZE * WIDE
    dtype: tl.constexpr = packed.dtype.element_ty
    which, head, inside = rows // EACH, rows % EACH // WIDE, rows % WIDE
    source = head * SIZE + inside
    channels = (columns < D)[None, :]
    weight = tl.zeros((BLOCK, COLUMNS), tl.float32)
    constant = tl.zeros((BLOCK,), tl.float32)
    weights, biases = (w0, w1, w2), (b0, b1, b2)
    for i in tl.static_range(COUNT):
        mine = (which == i) & (inside < SIZE)
        pointers = weights[i] + source[:, None] * STRIDE + columns[None, :]
        found = tl.load(pointers, mask=mine[:, None] & channels, other=0.0).to(tl.float32)
        weight = tl.where(mine[:, None], found, weight)
        if gamma is not None:
            found = tl.load(biases[i] + source, mask=mine, other=0.0).to(tl.float32)
            constant = tl.where(mine, found, constant)
    if gamma is not None:
        g = tl.load(gamma + columns, mask=columns < D, other=0.0).to(tl.float32)
        b = tl.load(beta + columns, mask=columns < D, other=0.0).to(tl.float32)
        constant += tl.sum(weight * b[None, :], 1)
        weight = (weight * g[None, :]).to(dtype).to(tl.float32)
        c, c_rest = _in_parts(constant, dtype)
        # Of the rounded weights: what the product with a constant token really gives.
        u, u_rest = _in_parts(-tl.sum(weight, 1), dtype)
        behind = (columns - E)[None, :]
        weight = tl.where((behind == 0) | (behind == 1), c[:, None], weight)
        weight = tl.where(behind == 2, c_rest[:, None], weight)
        weight = tl.where((behind == 3) | (behind == 4), u[:, None], weight)
        weight = tl.where(behind == 5, u_rest[:, None], weight)
    put = rows[:, None] * (D0 + D1) + columns[None, :]
    tl.store(packed + put, weight.to(dtype), mask=(columns < D0 + D1)[None, :])
    if second is not None:
        there = (rows < N)[:, None] & channels
        found = tl.load(second + columns[None, :] * N + rows[:, None], mask=there, other=0.0)
        found = found.to(tl.float32).to(dtype)
        tl.store(packed_second + put, found, mask=(columns < D0 + D1)[None, :])


@triton.jit
def pack_normed_backward_kernel(
    grad, gamma, beta, w0, w1, w2, dgamma, dbeta, dw0, db0, dw1, db1, dw2, db2,
    COUNT: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
    D: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A few channels' gradients in every row, from the gradient of the layer, whose rows have G
    columns: D channels, then the constant."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    EACH: tl.constexpr = N // SIZE * WIDE
    channels = columns < D
    g = tl.load(gamma + columns, mask=channels, other=0.0).to(tl.float32)
    b = tl.load(beta + columns, mask=channels, other=0.0).to(tl.float32)
    of_gamma = tl.zeros((ROWS, COLUMNS), tl.float32)
    of_beta = tl.zeros((ROWS, COLUMNS), tl.float32)
    weights, dweights, dbiases = (w0, w1, w2), (dw0, dw1, dw2), (db0, db1, db2)
    for i in tl.static_range(COUNT):
        for start in range(0, N, ROWS):
            rows = start + tl.arange(0, ROWS)
            offsets = (i * EACH + rows // SIZE * WIDE + rows % SIZE) * G
            there = (rows < N)[:, None] & channels[None, :]
            change = tl.load(grad + offsets[:, None] + columns[None, :], mask=there, other=0.0)
            constant = tl.load(grad + offsets + D, mask=rows < N, other=0.0)
            at = rows[:, None] * D + columns[None, :]
            weight = tl.load(weights[i] + at, mask=there, other=0.0).to(tl.float32)
            of_gamma += change * weight
            of_beta += constant[:, None] * weight
            found = change * g[None, :] + constant[:, None] * b[None, :]
            tl.store(dweights[i] + at, found, mask=there)
            if tl.program_id(0) == 0:
                tl.store(dbiases[i] + rows, constant, mask=rows < N)
    tl.store(dgamma + columns, tl.sum(of_gamma, 0), mask=channels)
    tl.store(dbeta + columns, tl.sum(of_beta, 0), mask=channels)


def _head_sizes(count: int, rows: int, heads: int, widened: int) -> dict[str, int]:
    return {"COUNT": count, "N": rows, "SIZE": rows // heads, "WIDE": widened}


def _contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if each is None else each.contiguous() for each in tensors)


@operator("fst::pack_normed_layers")
def pack_normed_forward(
    gamma: Tensor | None,
    beta: Tensor | None,
    w0: Tensor,
    b0: Tensor | None,
    w1: Tensor | None,
    b1: Tensor | None,
    w2: Tensor | None,
    b2: Tensor | None,
    second: Tensor | None,
    heads: int,
    widened: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The slot, the packed layer, and the packed second weight (empty without one).

    Without a norm there is one weight, and its bias is not packed.
    """
    given = gamma, beta, w0, b0, w1, b1, w2, b2, second
    slot, packed, packed_second = found = _empty_layers(*given, heads, widened, dtype)
    # One weight may be part of a wider one; several must lie alike.
    if w1 is not None or w0.stride(1) != 1:
        w0 = w0.contiguous()
    parameters = *_contiguous(gamma, beta), w0, *_contiguous(w1, w2, b0, b1, b2, second)
    launch_kernel(
        pack_normed_kernel,
        (len(packed) // PACKED_ROWS,),
        *parameters, packed, packed_second, w0.stride(0),
        **_head_sizes(len(slot) // (heads * widened), len(w0), heads, widened),
        **channel_tiles(w0.shape[1]),
        COLUMNS=triton.next_power_of_2(packed.shape[1]),
        BLOCK=PACKED_ROWS,
        num_warps=4,
    )  # fmt: skip
    return found


@pack_normed_forward.register_fake
def _empty_layers(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The slot, and room for the packed layer and the packed second weight, if there is one."""
    _, _, w0, _, w1, _, w2, _, second, heads, widened, dtype = given
    rows = sum(each is not None for each in (w0, w1, w2)) * heads * widened
    slot = w0.new_empty(1, dtype=torch.float32).expand(rows, w0.shape[1] + EXTRA)
    packed = w0.new_empty(padded_hidden(rows), sum(tile_widths(w0.shape[1])), dtype=dtype)
    return slot, packed, packed.new_empty(0) if second is None else torch.empty_like(packed)


@operator("fst::pack_normed_layers_backward")
def pack_normed_backward(
    grad: Tensor,
    gamma: Tensor,
    beta: Tensor,
    w0: Tensor,
    w1: Tensor | None,
    w2: Tensor | None,
    heads: int,
    widened: int,
) -> list[Tensor]:
    """Of γ, β, and each weight and bias, in float32."""
    grad = grad.contiguous()
    norm, weights = _contiguous(gamma, beta), _contiguous(w0, w1, w2)
    found = _empty_gradients(grad, gamma, beta, w0, w1, w2)
    (rows, width), count = w0.shape, len(found) // 2 - 1
    launch_kernel(
        pack_normed_backward_kernel,
        (tiles_in(width, CHANNELS),),
        grad, *norm, *weights, *found, *(None,) * (2 * (MOST_WEIGHTS - count)),
        **_head_sizes(count, rows, heads, widened),
        D=width,
        G=grad.shape[1],
        ROWS=min(MOST_ROWS, triton.next_power_of_2(rows)),
        COLUMNS=CHANNELS,
        num_warps=8,
    )  # fmt: skip
    return found


@pack_normed_backward.register_fake
def _empty_gradients(grad: Tensor, gamma: Tensor, beta: Tensor, *given: Any) -> list[Tensor]:
    shapes = [gamma.shape, beta.shape]
    for weight in given[:MOST_WEIGHTS]:
        if weight is not None:
            shapes += [weight.shape, weight.shape[:1]]
    return [gamma.new_empty(shape, dtype=torch.float32) for shape in shapes]


@pack_normed_forward.gradients("gamma", "beta", "w0", "w1", "w2", "heads", "widened")
def _(ctx: Any, grad: Tensor, *given: Any) -> Gradients:
    # Autograd rounds them to the parameters' dtype, and drops those that nobody wants.
    names = "gamma", "beta", "w0", "b0", "w1", "b1", "w2", "b2"
    return dict(zip(names, pack_normed_backward(grad, *given), strict=False))


def pack_normed_layers(
    gamma: Float[Tensor, " d"],
    beta: Float[Tensor, " d"],
    weights: Sequence[Float[Tensor, "n d"]],
    biases: Sequence[Float[Tensor, " n"]],
    dtype: torch.dtype,
    *,
    heads: int = 1,
    widened: int | None = None,
    second: Float[Tensor, "d n"] | None = None,
) -> tuple[Float[Tensor, "r e"], Float[Tensor, "R W"], Float[Tensor, "..."]]:
    """The slot of the layers behind a LayerNorm as one, that layer packed, and the second weight.

    Each layer has this many heads, every one widened to so many rows.
    """
    if not 0 < len(weights) <= MOST_WEIGHTS:
        raise ValueError(f"weights must be one to {MOST_WEIGHTS}, got {len(weights)}")
    wide = len(weights[0]) // heads if widened is None else widened
    pairs: list[Tensor | None] = []
    for weight, bias in zip(weights, biases, strict=True):
        pairs += [weight, bias]
    pairs += [None] * (2 * (MOST_WEIGHTS - len(weights)))
    if second is not None:
        second = second.detach()
    return pack_normed_forward(gamma, beta, *pairs, second, heads, wide, dtype)


def pack_layers(
    weight: Float[Tensor, "h d"], second: Float[Tensor, "d h"], dtype: torch.dtype
) -> tuple[Float[Tensor, "H W"], Float[Tensor, "H W"]]:
    """Both weights of an MLP without a norm, hidden units down, channels across."""
    pairs = weight.detach(), *(None,) * 5
    _, *packed = pack_normed_forward(None, None, *pairs, second.detach(), 1, len(weight), dtype)
    return packed[0], packed[1]


Pair = tuple[Tensor, Tensor]

# Gradients of weights: tokens that are copied at once; groups of warps in a program, and channels
# of each of them.
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


@lru_cache(1024)
def divide(*products: Product) -> Division:
    """Depends on product_sizes alone, not on the GPU: sums are the same everywhere."""
    divisions = [_divided(products, wide) for wide in CYCLES]
    return min(divisions, key=lambda division: _seconds(products, division))


def product_sizes(pair: Pair) -> Product:
    (tokens, m), n = pair[0].shape, pair[1].shape[1]
    return Product(tokens, max(m, n), min(m, n))


@triton.jit
def _add(shares, out, program, size, number, ADDED: tl.constexpr, AT_ONCE: tl.constexpr):
    index = program * ADDED + tl.arange(0, ADDED)
    sums = tl.zeros((AT_ONCE, ADDED), tl.float32)
    for first in range(0, number, AT_ONCE):
        share = first + tl.arange(0, AT_ONCE)
        sources = shares + share.to(tl.int64)[:, None] * size + index[None, :]
        there = (share < number)[:, None] & (index < size)[None, :]
        sums += tl.load(sources, mask=there, other=0.0)
    tl.store(out + index, tl.sum(sums, 0), mask=index < size)


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


def _suits_hopper(pair: Pair) -> bool:
    """Whether the Hopper kernel takes it: rows must begin at multiples of 16 bytes."""
    product = product_sizes(pair)
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
        from fst.kernels import weights_hopper as hopper

        found.extend(add_shares(hopper.shares(pairs, divide(*map(product_sizes, pairs)))))

    alike = first[0].dtype == second[0].dtype and first[0].device == second[0].device
    suited = alike and all(map(_suits_hopper, pairs))
    if suited and try_on_hopper("weight gradients", first[0], launch):
        return found
    return [transposed_product(*pair) for pair in pairs]
