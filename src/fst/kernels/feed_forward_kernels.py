"""The pointwise MLPs as Triton kernels: the hidden layer stays on the chip going forward.

Tokens x (t d) enter and leave; `place` chooses between the two forms of the equation,

    y = x + W2 gelu(W1 LN(x) + b1) + b2     without it,
    y = W2 gelu(W1 x + place) + b2          with it: token t takes row t mod P.

LayerNorm is folded into the first product. With w = W1 γ, u = Σ_d w and c = b1 + W1 β,

    W1 LN(x) + b1 = (x w - mean u + deviation c) / deviation,

and the bracket is one product: columns behind the channels, there as padding anyway, hold
(deviation, mean) in the tokens and (c, -u) in the weights, each split in two numbers of the
product's dtype. So the operand is the tokens as they come, and can lie in shared memory.

gelu(x) = max(x, 0) - |x| Φ(-|x|), and Φ(-a) = 2^P(a) with a polynomial P: one exponential, no
branch. Going backward the hidden layer is computed again; it leaves together with its gradient and
the normalised tokens, for the products which make the weights' gradients. The normalised tokens
are stored with a column of ones: the same product then gives the gradients of b1 and β.

Channels are divided in two tiles: D0 from the first on, D1 that end beyond the last.
"""

import triton
import triton.language as tl

from fst.kernels.forward_blend import settled


@triton.jit
def _exp2(x, ASM: tl.constexpr):
    """On a GPU without the scaling that would keep denormal results."""
    if ASM:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def _tail(a, EXACT: tl.constexpr, ASM: tl.constexpr):
    """Φ(-a) for a >= 0; the shorter polynomial is far below what half precision resolves."""
    if EXACT:
        p = a * -2.275922270200681e-06 + 3.296868089819327e-05
        p = p * a - 0.00015728228027001023
        p = p * a - 0.00020246939675416797
        p = p * a + 0.007142767310142517
        p = p * a - 0.0525464229285717
        p = p * a - 0.45919305086135864
        p = p * a - 1.1511069536209106
        p = p * a - 0.9999999403953552
    else:
        p = a * -0.0005002620746381581 + 0.007282395847141743
        p = p * a - 0.05234328657388687
        p = p * a - 0.4594140350818634
        p = p * a - 1.1510521173477173
        p = p * a - 1.0000019073486328
    return _exp2(p, ASM)


@triton.jit
def gelu(x, EXACT: tl.constexpr, ASM: tl.constexpr):
    a = tl.abs(x)
    return tl.maximum(x, 0.0) - a * _tail(a, EXACT, ASM)


@triton.jit
def gelu_and_slope(x, EXACT: tl.constexpr, ASM: tl.constexpr):
    """The slope is s or 1 - s with s = Φ(-a) - a φ(a), a = |x|."""
    a = tl.abs(x)
    tail = _tail(a, EXACT, ASM)
    density = _exp2(x * x * -0.7213475204444817 - 1.3257480647361593, ASM)
    s = tail - a * density
    return tl.maximum(x, 0.0) - a * tail, tl.where(x > 0.0, 1.0 - s, s)


@triton.jit
def weight_tile(base, start, first, W: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of a packed matrix, whose shape is a multiple of the tile."""
    rows, columns = start + tl.arange(0, ROWS), first + tl.arange(0, BLOCK)
    return tl.load(base + rows[:, None] * W + columns[None, :])


@triton.jit
def token_tile(base, rows, T, first, D: tl.constexpr, BLOCK: tl.constexpr):
    channels = first + tl.arange(0, BLOCK)
    mask = (rows < T)[:, None] & (channels < D)[None, :]
    return tl.load(base + rows[:, None] * D + channels[None, :], mask=mask, other=0.0)


@triton.jit
def put_tile(base, rows, T, first, values, D: tl.constexpr, BLOCK: tl.constexpr):
    channels = first + tl.arange(0, BLOCK)
    mask = (rows < T)[:, None] & (channels < D)[None, :]
    place = base + rows[:, None] * D + channels[None, :]
    tl.store(place, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def vector_tile(base, first, D: tl.constexpr, BLOCK: tl.constexpr):
    channels = first + tl.arange(0, BLOCK)
    return tl.load(base + channels, mask=channels < D, other=0.0)


@triton.jit
def _place(place, spots, start, H: tl.constexpr, HP: tl.constexpr, BLOCK_H: tl.constexpr):
    """A tile of hidden units of the given rows."""
    columns = (start + tl.arange(0, BLOCK_H))[None, :]
    if HP == H:
        return tl.load(place + spots + columns).to(tl.float32)
    return tl.load(place + spots + columns, mask=columns < H, other=0.0).to(tl.float32)


@triton.jit
def put_hidden(
    base, rows, T, start, values, H: tl.constexpr, HP: tl.constexpr, BLOCK_H: tl.constexpr
):
    columns = (start + tl.arange(0, BLOCK_H))[None, :]
    place = rows[:, None] * H + columns  # not yet an address: two tiles of these are many registers
    if HP == H:
        tl.store(base + place, values, mask=(rows < T)[:, None])
    else:
        tl.store(base + place, values, mask=(rows < T)[:, None] & (columns < H))


@triton.jit
def statistics(x0, x1, eps, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    """Mean and standard deviation of each token."""
    f0, f1 = x0.to(tl.float32), x1.to(tl.float32)
    mean = (tl.sum(f0, 1) + tl.sum(f1, 1)) / D
    c0 = tl.where((tl.arange(0, D0) < D)[None, :], f0 - mean[:, None], 0.0)
    c1 = tl.where((D0 + tl.arange(0, D1) < D)[None, :], f1 - mean[:, None], 0.0)
    return mean, tl.sqrt((tl.sum(c0 * c0, 1) + tl.sum(c1 * c1, 1)) / D + eps)


@triton.jit
def with_moments(
    x, rows, T, mean, deviation,
    D: tl.constexpr, E: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
):  # fmt: skip
    """The second tile of the tokens with deviation and mean, each in two parts, from column E."""
    dtype = x.dtype.element_ty
    channels = D0 + tl.arange(0, D1)
    high_d, high_m = deviation.to(dtype), mean.to(dtype)
    low_d = (deviation - high_d.to(tl.float32)).to(dtype)
    low_m = (mean - high_m.to(tl.float32)).to(dtype)
    k = (channels - E)[None, :]
    extra = tl.where((k == 0) | (k == 2), high_d[:, None], 0.0)
    extra = tl.where(k == 1, low_d[:, None], extra)
    extra = tl.where((k == 3) | (k == 5), high_m[:, None], extra)
    extra = tl.where(k == 4, low_m[:, None], extra)
    mask = (rows < T)[:, None] & (channels < D)[None, :]
    place = x + rows[:, None] * D + channels[None, :]
    return tl.load(place, mask=mask, other=extra.to(dtype))


@triton.jit
def normed_operand(
    x, rows, T, eps, D: tl.constexpr, E: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr
):
    """Both tiles of the tokens for the first product, with their mean and reciprocal deviation."""
    x0 = token_tile(x, rows, T, 0, D, D0)
    mean, deviation = statistics(x0, token_tile(x, rows, T, D0, D, D1), eps, D, D0, D1)
    return x0, with_moments(x, rows, T, mean, deviation, D, E, D0, D1), mean, 1.0 / deviation


@triton.jit
def through_norm(
    d0, d1, x, rows, T, mean, scale, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr
):
    """The gradient of the tokens from that of the normalised ones.

    The tokens are read again: kept in registers, they would push the sums out.
    """
    d0 = tl.where((tl.arange(0, D0) < D)[None, :], d0, 0.0)
    d1 = tl.where((D0 + tl.arange(0, D1) < D)[None, :], d1, 0.0)
    n0 = (token_tile(x, rows, T, 0, D, D0).to(tl.float32) - mean[:, None]) * scale[:, None]
    n1 = (token_tile(x, rows, T, D0, D, D1).to(tl.float32) - mean[:, None]) * scale[:, None]
    level = (tl.sum(d0, 1) + tl.sum(d1, 1)) / D
    along = (tl.sum(d0 * n0, 1) + tl.sum(d1 * n1, 1)) / D
    d0 = (d0 - level[:, None] - n0 * along[:, None]) * scale[:, None]
    return d0, (d1 - level[:, None] - n1 * along[:, None]) * scale[:, None]


@triton.jit(do_not_specialize=["T", "P"])
def feed_forward_kernel(
    x, place, w1, w2, b2, y, T, P, eps,
    D: tl.constexpr, E: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    H: tl.constexpr, HP: tl.constexpr, EXACT: tl.constexpr, ASM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    W: tl.constexpr = D0 + D1
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    dtype = x.dtype.element_ty
    x0 = token_tile(x, rows, T, 0, D, D0)
    x1 = token_tile(x, rows, T, D0, D, D1)
    if place is None:
        mean, deviation = statistics(x0, x1, eps, D, D0, D1)
        x1 = with_moments(x, rows, T, mean, deviation, D, E, D0, D1)
        scale = 1.0 / deviation
    else:
        spots = (rows % P)[:, None] * H
    s0 = tl.zeros((BLOCK_T, D0), tl.float32)
    s1 = tl.zeros((BLOCK_T, D1), tl.float32)
    for start in range(0, HP, BLOCK_H):
        a0 = tl.trans(weight_tile(w1, start, 0, W, BLOCK_H, D0))
        a1 = tl.trans(weight_tile(w1, start, D0, W, BLOCK_H, D1))
        pre = tl.dot(x0, a0, input_precision="ieee")
        pre = tl.dot(x1, a1, pre, input_precision="ieee")
        if place is None:
            pre = pre * scale[:, None]
        else:
            pre += _place(place, spots, start, H, HP, BLOCK_H)
        h = gelu(pre, EXACT, ASM).to(dtype)
        s0 = tl.dot(h, weight_tile(w2, start, 0, W, BLOCK_H, D0), s0, input_precision="ieee")
        s1 = tl.dot(h, weight_tile(w2, start, D0, W, BLOCK_H, D1), s1, input_precision="ieee")
        s1 = settled(s1, ASM)
    s0 += vector_tile(b2, 0, D, D0)[None, :]
    s1 += vector_tile(b2, D0, D, D1)[None, :]
    if place is None:  # read again: kept in registers, the tokens would push the sums out
        s0 += token_tile(x, rows, T, 0, D, D0).to(tl.float32)
        s1 += token_tile(x, rows, T, D0, D, D1).to(tl.float32)
    put_tile(y, rows, T, 0, s0, D, D0)
    put_tile(y, rows, T, D0, s1, D, D1)


@triton.jit
def put_normed(normed, rows, T, x, mean, scale, channels, D: tl.constexpr, EXTRA: tl.constexpr):
    """The normalised tokens, then a column of ones, then zeros."""
    n = (x.to(tl.float32) - mean[:, None]) * scale[:, None]
    n = tl.where((channels < D)[None, :], n, tl.where((channels == D)[None, :], 1.0, 0.0))
    mask = (rows < T)[:, None] & (channels < D + EXTRA)[None, :]
    place = normed + rows[:, None] * (D + EXTRA) + channels[None, :]
    tl.store(place, n.to(normed.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "P"])
def feed_forward_backward_kernel(
    dy, x, place, w1, w2, dx, normed, hidden, change, sums, T, P, eps,
    D: tl.constexpr, E: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    H: tl.constexpr, HP: tl.constexpr, EXACT: tl.constexpr, ASM: tl.constexpr,
    EXTRA: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """dx; gelu and the gradient of its argument (`change`); each tile's share of Σ_t dy."""
    W: tl.constexpr = D0 + D1
    tile = tl.program_id(0)
    rows = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    dtype = x.dtype.element_ty
    c0, c1 = tl.arange(0, D0), D0 + tl.arange(0, D1)
    x0 = token_tile(x, rows, T, 0, D, D0)
    x1 = token_tile(x, rows, T, D0, D, D1)
    if place is None:
        mean, deviation = statistics(x0, x1, eps, D, D0, D1)
        x1 = with_moments(x, rows, T, mean, deviation, D, E, D0, D1)
        scale = 1.0 / deviation
        put_normed(normed, rows, T, x0, mean, scale, c0, D, EXTRA)
        put_normed(normed, rows, T, x1, mean, scale, c1, D, EXTRA)
    else:
        spots = (rows % P)[:, None] * H
    g0 = token_tile(dy, rows, T, 0, D, D0)
    g1 = token_tile(dy, rows, T, D0, D, D1)
    tl.store(sums + tile * D + c0, tl.sum(g0.to(tl.float32), 0), mask=c0 < D)
    tl.store(sums + tile * D + c1, tl.sum(g1.to(tl.float32), 0), mask=c1 < D)
    d0 = tl.zeros((BLOCK_T, D0), tl.float32)
    d1 = tl.zeros((BLOCK_T, D1), tl.float32)
    for start in range(0, HP, BLOCK_H):
        a0 = weight_tile(w1, start, 0, W, BLOCK_H, D0)
        a1 = weight_tile(w1, start, D0, W, BLOCK_H, D1)
        pre = tl.dot(x0, tl.trans(a0), input_precision="ieee")
        pre = tl.dot(x1, tl.trans(a1), pre, input_precision="ieee")
        v0 = tl.trans(weight_tile(w2, start, 0, W, BLOCK_H, D0))
        dh = tl.dot(g0, v0, input_precision="ieee")
        v1 = tl.trans(weight_tile(w2, start, D0, W, BLOCK_H, D1))
        dh = tl.dot(g1, v1, dh, input_precision="ieee")
        if place is None:
            pre = pre * scale[:, None]
        else:
            pre += _place(place, spots, start, H, HP, BLOCK_H)
        h, slope = gelu_and_slope(pre, EXACT, ASM)
        put_hidden(hidden, rows, T, start, h.to(dtype), H, HP, BLOCK_H)
        back = (dh * slope).to(dtype)
        put_hidden(change, rows, T, start, back, H, HP, BLOCK_H)
        d0 = tl.dot(back, a0, d0, input_precision="ieee")
        d1 = settled(tl.dot(back, a1, d1, input_precision="ieee"), ASM)
    if place is None:
        d0, d1 = through_norm(d0, d1, x, rows, T, mean, scale, D, D0, D1)
        d0 += token_tile(dy, rows, T, 0, D, D0).to(tl.float32)
        d1 += token_tile(dy, rows, T, D0, D, D1).to(tl.float32)
    put_tile(dx, rows, T, 0, d0, D, D0)
    put_tile(dx, rows, T, D0, d1, D, D1)
