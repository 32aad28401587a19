"""The RBF blend as Triton kernels: nothing of size points × anchors is ever in memory.

Points, anchors, reciprocal length scales and features enter; the blend and, for the backward pass,
the logarithm of each point's normaliser leave:

    out_i = Σ_j w_ij z_j,   w_ij = exp2(t_ij - log_i),   t_ij = -Σ_s ((x_is - a_js) c / ℓ_js)²,

with c² = ½ log₂ e, so that exp2(t) is the Gaussian. Logits and their normalisation run in float32;
the product with the features runs on the tensor cores in the features' dtype. Going backward,
with g_i the gradient of out_i and δ_i = g_i · out_i, the weights are computed again and

    ∂z_j = Σ_i w_ij g_i,   ∂logit_ij = w_ij (g_i · z_j - δ_i),

from which the chain rule gives coordinates and length scales.

The forward kernel takes a tile of points against all anchors, or against a list of them. The
features come with a column of ones behind their last channel (`with_ones`), so that the tensor
cores sum the weights as they see them: a constant field comes out constant. Nothing in the loop
crosses the rows of a tile or the threads of a warp, which lets the compiler make the weights where
the tensor cores want them, in registers. Every exponent is at most zero, so no maximum has to be
subtracted to prevent overflow. Where a point is so far from all anchors that its weights come near
the smallest float32, a second launch does its tile again with the highest exponent subtracted. With
lists one launch is enough: they say beforehand of which tiles that may be so.

For the backward kernels, points, logarithms and δ come filled up to a whole number of tiles, QP
instead of Q, with infinite logarithms: the weights there are zero. Rows of features hold P numbers,
of which D count.

`pruned_blend` is the same, exact to rounding and without gradients, from the anchors that matter.
Neighbouring points of the input make a tile. A first kernel bounds the exponents t between an
anchor and the bounding box of each tile and lists, tile by tile, the anchors with

    highest t_j in the box ≥ max_k (lowest t_k in the box) - slack,   slack = log₂(M / tolerance).

Every other anchor weighs, at every point of the tile, less than `tolerance` / M of the heaviest:
all of them together are below the rounding of the features' dtype. The same bounds tell which tiles
may need their highest exponent subtracted. Anchors are listed one by one, because length scales
vary so much from one anchor to the next that among a few neighbours there is nearly always a wide
one. How much there is to win depends on the order of the points: `compact_order` sorts scattered
ones.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from fst.kernels.launch import Gradients, launch_kernel, operator, tiles_in

# c above: ½ and the change to base 2, as a factor of the reciprocal length scales.
EXP2_SCALE = math.sqrt(0.5 * math.log2(math.e))


def tile_sizes(points: int, anchors: int, warps: int, stages: int) -> dict[str, int]:
    """What a kernel is launched with."""
    return {"BLOCK_Q": points, "BLOCK_M": anchors, "num_warps": warps, "num_stages": stages}


# By the size of a feature in bytes. Three blocks of the forward kernel fit a multiprocessor.
FORWARD_TILES = {2: tile_sizes(64, 64, 4, 3), 4: tile_sizes(32, 32, 4, 2)}
BACKWARD_TILES = {2: tile_sizes(32, 64, 4, 3), 4: tile_sizes(32, 32, 4, 2)}


def _channel_tiles(channels: int) -> dict[str, int]:
    """Channels in at most two power-of-two tiles, for the points: 176 is 128 + 64, not 256."""
    first = min(128, max(16, triton.next_power_of_2(channels)))
    second = max(16, triton.next_power_of_2(max(channels - first, 1)))
    return {"D0": first, "D1": second}


# Anchors that only fill up a tile lie so far away that they weigh nothing.
FAR = 1e18
# Channels that are multiplied at once. One width for all parts: the weights are then made once,
# in the one layout that all products share.
PART = 64
# Weights whose sum has a lower logarithm need the highest exponent subtracted. Of a higher sum,
# what float32 loses below 2^-126 is less than 2^-36, with 2^10 anchors.
LEAST_LOGARITHM = tl.constexpr(-80.0)
# Anchors at once while the highest exponent is looked for: few, to leave registers to the rest.
FEW = tl.constexpr(16)


def part_width(channels: int) -> int:
    return min(PART, max(16, int(triton.next_power_of_2(channels + 1))))


def with_ones(features: Float[Tensor, "b m d"], more: int = 0) -> Float[Tensor, "b r p"]:
    """Features for the kernel: a column of ones, and more of them up to a whole number of parts.

    `more`: rows of ones for anchors that weigh nothing. Not inside an operator, so that a compiler
    can make it one with what makes the features.
    """
    channels = features.shape[2]
    width = part_width(channels)
    missing = width * triton.cdiv(channels + 1, width) - channels
    return F.pad(features, (0, missing, 0, more), value=1.0)


def with_far(
    anchors: Float[Tensor, "b s m"], inverse: Float[Tensor, "b s m"], more: int
) -> tuple[Float[Tensor, "b s r"], Float[Tensor, "b s r"]]:
    """Anchors and reciprocal length scales, and `more` anchors that weigh nothing."""
    return F.pad(anchors, (0, more), value=FAR), F.pad(inverse, (0, more), value=1.0)


class AnchorLists(NamedTuple):
    """For each tile of points the anchors that matter to it, as `blend_kernel` reads them."""

    chosen: Int[Tensor, "b t r"]
    counts: Int[Tensor, "b t"]
    remote: Int[Tensor, "b t"]
    """Whether some point may be so far from all anchors that its exponents need the highest."""


@triton.jit
def _columns(chosen, start, BLOCK: tl.constexpr, LISTED: tl.constexpr):
    columns = start + tl.arange(0, BLOCK)
    if LISTED:
        columns = tl.load(chosen + columns)
    return columns


@triton.jit
def nothing():
    """For tuples to begin with."""
    return ()


@triton.jit
def zero_tiles(COUNT: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr):
    """So many tiles of zeros."""
    tiles = nothing()
    for _ in tl.static_range(COUNT):
        tiles += (tl.zeros((ROWS, W), tl.float32),)
    return tiles


@triton.jit
def _axes(base, count, index, mask, AXES: tl.constexpr):
    """The coordinates of the listed points."""
    found = nothing()
    for axis in tl.static_range(AXES):
        found += (tl.load(base + axis * count + index, mask=mask, other=0.0)[:, None],)
    return found


@triton.jit
def _exponents(shift, x, anchors, inverse, columns, R, AXES: tl.constexpr):
    """shift - Σ_s ((x_s - a_s) i_s)². The differences come first: no cancellation."""
    u = (x[0] - tl.load(anchors + columns)[None, :]) * tl.load(inverse + columns)[None, :]
    t = shift - u * u
    if AXES > 1:
        anchor = tl.load(anchors + R + columns)[None, :]
        u = (x[1] - anchor) * tl.load(inverse + R + columns)[None, :]
        t -= u * u
    if AXES > 2:
        columns += 2 * R
        u = (x[2] - tl.load(anchors + columns)[None, :]) * tl.load(inverse + columns)[None, :]
        t -= u * u
    return t


@triton.jit
def _highest(
    shift, x, anchors, inverse, chosen, count, R,
    AXES: tl.constexpr, BLOCK_Q: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """The highest exponent of each point of a tile."""
    highest = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
    for start in range(0, count, FEW):
        columns = _columns(chosen, start, FEW, LISTED)
        found = _exponents(shift[:, None], x, anchors, inverse, columns, R, AXES)
        highest = tl.maximum(highest, tl.max(found, 1))
    return highest


@triton.jit
def _store_part(output, rows, real, part: tl.constexpr, values, D: tl.constexpr, W: tl.constexpr):
    if part * W < D:
        channels = part * W + tl.arange(0, W)
        pointers = output + rows.to(tl.int64)[:, None] * D + channels[None, :]
        mask = real[:, None] & (channels < D)[None, :]
        tl.store(pointers, values.to(output.dtype.element_ty), mask=mask)


@triton.jit
def settled(values, COMPILED: tl.constexpr):
    """The values, no longer under way: an instruction that does nothing uses them.

    Weights go to the tensor cores from registers, which Triton 3.6 may write again while products
    of the last round still read them (triton-lang/triton#9433). Whatever uses a result makes it
    wait for all products before it. The interpreter knows no instructions.
    """
    if COMPILED:
        values = tl.inline_asm_elementwise("", "=r,0", [values], tl.float32, is_pure=True, pack=1)
    return values


@triton.jit
def _blend_tile(
    shift, x, anchors, inverse, features, chosen, count, R,
    output, logarithms, rows, real,
    D: tl.constexpr, P: tl.constexpr, W: tl.constexpr, AXES: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, LISTED: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Store the blend of a tile with `shift` added to the exponents."""
    PARTS: tl.constexpr = P // W
    sums = zero_tiles(PARTS, BLOCK_Q, W)
    for start in range(0, count, BLOCK_M):
        columns = _columns(chosen, start, BLOCK_M, LISTED)
        exponents = _exponents(shift[:, None], x, anchors, inverse, columns, R, AXES)
        weights = tl.exp2(exponents).to(features.dtype.element_ty)
        added = nothing()
        for part in tl.static_range(PARTS):
            z = tl.load(features + columns[:, None] * P + (part * W + tl.arange(0, W))[None, :])
            found = tl.dot(weights, z, sums[part], input_precision="ieee")
            if part == PARTS - 1:
                found = settled(found, COMPILED)
            added += (found,)
        sums = added
    last = sums[PARTS - 1]
    total = tl.sum(tl.where((P - W + tl.arange(0, W) == D)[None, :], last, 0.0), 1)
    scale = 1.0 / total[:, None]
    for part in tl.static_range(PARTS):
        _store_part(output, rows, real, part, sums[part] * scale, D, W)
    tl.store(logarithms + rows, tl.log2(total) - shift, mask=real)


@triton.jit
def blend_kernel(
    points, anchors, inverse, features, chosen, counts, remote, output, logarithms,
    Q, R, point_stride,
    D: tl.constexpr, P: tl.constexpr, W: tl.constexpr, AXES: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, LISTED: tl.constexpr,
    SHIFTED: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """A tile of points. There are R anchors, those that only fill up included.

    LISTED: the tile looks at the `counts` anchors that it finds in its row of `chosen`, which is
    filled up to a multiple of BLOCK_M, with the highest exponent subtracted if it is `remote`.
    SHIFTED: only tiles whose logarithms are too low are done, with the highest exponent subtracted.
    """
    batch = tl.program_id(1).to(tl.int64)
    points += batch * point_stride
    anchors += batch * R * AXES
    inverse += batch * R * AXES
    features += batch * R * P
    output += batch * Q * D
    logarithms += batch * Q
    count = R
    if LISTED:
        tile = batch * tl.num_programs(0) + tl.program_id(0)
        chosen += tile * R
        count = tl.load(counts + tile)
        remote += tile

    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    real = rows < Q
    x = _axes(points, Q, rows, real, AXES)
    shift = tl.zeros((BLOCK_Q,), tl.float32)
    if SHIFTED:
        # Nothing to do for a tile that came out well the first time.
        if tl.min(tl.load(logarithms + rows, mask=real, other=0.0)) < LEAST_LOGARITHM:
            shift = -_highest(shift, x, anchors, inverse, chosen, count, R, AXES, BLOCK_Q, LISTED)
            _blend_tile(
                shift, x, anchors, inverse, features, chosen, count, R,
                output, logarithms, rows, real,
                D, P, W, AXES, BLOCK_Q, BLOCK_M, LISTED, COMPILED,
            )  # fmt: skip
    else:
        if LISTED:  # noqa: SIM102, known when the kernel is compiled
            if tl.load(remote) > 0:
                shift = -_highest(
                    shift, x, anchors, inverse, chosen, count, R, AXES, BLOCK_Q, LISTED
                )
        _blend_tile(
            shift, x, anchors, inverse, features, chosen, count, R,
            output, logarithms, rows, real,
            D, P, W, AXES, BLOCK_Q, BLOCK_M, LISTED, COMPILED,
        )  # fmt: skip


def run_blend(
    points: Float[Tensor, "#b s q"],
    anchors: Float[Tensor, "b s m"],
    inverse: Float[Tensor, "b s m"],
    features: Float[Tensor, "b m p"],
    channels: int,
    rows: int,
    tiles: dict[str, int],
    lists: AnchorLists | None = None,
) -> tuple[Float[Tensor, "b q d"], Float[Tensor, "b q"]]:
    """The blend and the logarithms to base 2 of the normalisers, by all anchors or by `lists`.

    The features come from `with_ones`. `rows`: as many anchors as the kernel is to see; those
    beyond the last weigh nothing.
    """
    (batch, axes, count), queries = anchors.shape, points.shape[2]
    output = features.new_empty(batch, queries, channels)
    # Half precision has too few exponents to do without the highest: all of it in one shifted go.
    narrow = features.dtype == torch.float16
    logarithms = anchors.new_empty(batch, queries)
    if narrow:
        logarithms.fill_(-torch.inf)
    if more := rows - count:
        anchors, inverse = with_far(anchors, inverse, more)
        features = F.pad(features, (0, 0, 0, more))
    # Without lists, any tensor stands in for them.
    listed = lists or (anchors, anchors, anchors)
    given = (points, anchors, inverse, features, *listed, output, logarithms)
    stride = 0 if points.shape[0] == 1 else axes * queries  # one set may serve the whole batch
    # With lists one launch is enough.
    for shifted in (True,) if narrow else (False,) if lists else (False, True):
        launch_kernel(
            blend_kernel, (tiles_in(queries, tiles["BLOCK_Q"]), batch),
            *given, queries, rows, stride,
            D=channels, P=features.shape[2], W=part_width(channels), AXES=axes,
            LISTED=lists is not None, SHIFTED=shifted, COMPILED=features.is_cuda, **tiles,
        )  # fmt: skip
    return output, logarithms


@triton.jit
def _channel_tile(
    base, rows, row_mask, stride: tl.constexpr, first: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Channels first .. first + BLOCK of the listed rows, zero beyond the last of D."""
    channels = first + tl.arange(0, BLOCK)
    mask = row_mask[:, None]
    if first + BLOCK > D:
        mask = mask & (channels < D)[None, :]
    return tl.load(base + rows[:, None] * stride + channels[None, :], mask=mask, other=0.0)


@triton.jit
def _parts(base, rows, row_mask, stride: tl.constexpr, D: tl.constexpr, W: tl.constexpr):
    """All D channels of the listed rows, W at a time."""
    found = nothing()
    for first in tl.static_range(0, D, W):
        found += (_channel_tile(base, rows, row_mask, stride, first, D, W),)
    return found


@triton.jit
def _store_channels(
    base, rows, row_mask, stride: tl.constexpr, first: tl.constexpr, values,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if first < D:
        channels = first + tl.arange(0, BLOCK)
        mask = row_mask[:, None] & (channels < D)[None, :]
        pointers = base + rows[:, None] * stride + channels[None, :]
        tl.store(pointers, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def blend_anchors_kernel(
    grad, logarithms, delta, points, anchors, inverse, features,
    grad_anchors, grad_inverse, grad_features,
    Q, QP, M, point_stride, rescale,
    D: tl.constexpr, P: tl.constexpr, W: tl.constexpr, AXES: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of anchors, from all points."""
    batch = tl.program_id(1).to(tl.int64)
    points += batch * point_stride
    anchors += batch * M * AXES
    inverse += batch * M * AXES
    grad_anchors += batch * M * AXES
    grad_inverse += batch * M * AXES
    features += batch * M * P
    grad_features += batch * M * P
    grad += batch * Q * D
    logarithms += batch * QP
    delta += batch * QP

    columns = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = columns < M
    PARTS: tl.constexpr = (D + W - 1) // W
    a = _axes(anchors, M, columns, there, AXES)
    i = _axes(inverse, M, columns, there, AXES)
    z = _parts(features, columns, there, P, D, W)
    dz = zero_tiles(PARTS, BLOCK_M, W)
    moments = nothing()  # the first and second moments about each anchor, along each axis
    for _ in tl.static_range(2 * AXES):
        moments += (tl.zeros((BLOCK_M,), tl.float32),)
    for start in range(0, QP, BLOCK_Q):
        rows = start + tl.arange(0, BLOCK_Q)
        real = rows < Q
        g = nothing()
        along = tl.zeros((BLOCK_M, BLOCK_Q), tl.float32)
        for part in tl.static_range(PARTS):
            g += (_channel_tile(grad, rows, real, D, part * W, D, W),)
            along = tl.dot(z[part], tl.trans(g[part]), along, input_precision="ieee")
        # The zeros tie the weights to the layout of the product: they are then made only once, and
        # go to the tensor cores from where they are.
        exponents = along * 0.0 - tl.load(logarithms + rows)[None, :]
        gaps = nothing()
        for axis in tl.static_range(AXES):
            gap = tl.load(points + axis * QP + rows)[None, :] - a[axis]
            u = gap * i[axis]
            exponents -= u * u
            gaps += (gap,)
        weights = tl.exp2(exponents)  # m q; zero beyond the last point
        rounded = weights.to(grad.dtype.element_ty)
        added = nothing()
        for part in tl.static_range(PARTS):
            added += (tl.dot(rounded, g[part], dz[part], input_precision="ieee"),)
        dz = added
        change = weights * (along - tl.load(delta + rows)[None, :])
        added = nothing()
        for axis in tl.static_range(AXES):
            moment = change * gaps[axis]
            first, second = tl.sum(moment, 1), tl.sum(moment * gaps[axis], 1)
            added += (moments[2 * axis] + first, moments[2 * axis + 1] + second)
        moments = added
    for part in tl.static_range(PARTS):
        _store_channels(grad_features, columns, there, P, part * W, dz[part], D, W)
    # The logit is -gap² i² / (2c²) with gap = x - a; `rescale` is 1/c² (and the ½ goes with the 2).
    for axis in tl.static_range(AXES):
        found = moments[2 * axis][:, None] * i[axis] * i[axis] * rescale
        tl.store(grad_anchors + axis * M + columns[:, None], found, mask=there[:, None])
    for axis in tl.static_range(AXES):
        found = -moments[2 * axis + 1][:, None] * i[axis] * rescale
        tl.store(grad_inverse + axis * M + columns[:, None], found, mask=there[:, None])


@triton.jit
def blend_points_kernel(
    grad, logarithms, delta, points, anchors, inverse, features, grad_points,
    Q, QP, M, point_stride, rescale,
    D: tl.constexpr, P: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, AXES: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of points, from all anchors; only where the points are learned."""
    batch = tl.program_id(1).to(tl.int64)
    points += batch * point_stride
    grad_points += batch * Q * AXES
    anchors += batch * M * AXES
    inverse += batch * M * AXES
    features += batch * M * P
    grad += batch * Q * D
    logarithms += batch * QP
    delta += batch * QP

    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    real = rows < Q
    x = _axes(points, QP, rows, real, AXES)
    logarithm = tl.load(logarithms + rows, mask=real, other=float("inf"))[:, None]
    projection = tl.load(delta + rows, mask=real, other=0.0)[:, None]
    g0 = _channel_tile(grad, rows, real, D, 0, D, D0)
    g1 = _channel_tile(grad, rows, real, D, D0, D, D1)
    found = nothing()
    for _ in tl.static_range(AXES):
        found += (tl.zeros((BLOCK_Q,), tl.float32),)
    for start in range(0, M, BLOCK_M):
        columns = start + tl.arange(0, BLOCK_M)
        there = columns < M
        gaps, scales = nothing(), nothing()
        for axis in tl.static_range(AXES):
            anchor = tl.load(anchors + axis * M + columns, mask=there, other=0.0)
            gaps += (x[axis] - anchor[None, :],)
        for axis in tl.static_range(AXES):
            scale = tl.load(inverse + axis * M + columns, mask=there, other=0.0)
            scales += (scale[None, :],)
        u = gaps[0] * scales[0]
        logits = -u * u
        for axis in tl.static_range(1, AXES):
            u = gaps[axis] * scales[axis]
            logits -= u * u
        logits = tl.where(there[None, :], logits, -float("inf"))
        weights = tl.exp2(logits - logarithm)
        z0 = _channel_tile(features, columns, there, P, 0, D, D0)
        along = tl.dot(g0, tl.trans(z0), input_precision="ieee")
        if D > D0:
            z1 = _channel_tile(features, columns, there, P, D0, D, D1)
            along = tl.dot(g1, tl.trans(z1), along, input_precision="ieee")
        change = weights * (along - projection)
        added = nothing()
        for axis in tl.static_range(AXES):
            scale = scales[axis]
            added += (found[axis] - tl.sum(change * gaps[axis] * scale * scale, 1),)
        found = added
    for axis in tl.static_range(AXES):
        gradient = found[axis] * rescale
        tl.store(grad_points + axis * Q + rows, gradient, mask=real)


@operator("fst::rbf_blend")
def blend_forward(
    points: Tensor, anchors: Tensor, inverse: Tensor, features: Tensor, channels: int
) -> tuple[Tensor, Tensor]:
    """The blend (b q d) and the logarithm to base 2 of the normaliser (b q).

    The features come from `with_ones`; so many of their channels count.
    """
    tiles = FORWARD_TILES[features.element_size()]
    rows = triton.cdiv(anchors.shape[2], tiles["BLOCK_M"]) * tiles["BLOCK_M"]
    return run_blend(points, anchors, inverse, features, channels, rows, tiles)


@blend_forward.register_fake
def _(
    points: Tensor, anchors: Tensor, inverse: Tensor, features: Tensor, channels: int
) -> tuple[Tensor, Tensor]:
    shape = (anchors.shape[0], points.shape[2])
    return features.new_empty(*shape, channels), anchors.new_empty(shape)


@operator("fst::rbf_blend_backward")
def blend_backward(
    grad: Tensor,
    logarithms: Tensor,
    delta: Tensor,
    points: Tensor,
    anchors: Tensor,
    inverse: Tensor,
    features: Tensor,
    learned_points: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of points (empty unless they are learned), anchors, inverse and features.

    Points, logarithms and δ are filled up to a whole number of tiles (`_filled`). Only the channels
    of the features that count have a gradient; the others are not written.
    """
    (batch, axes, count), (queries, channels) = anchors.shape, grad.shape[1:]
    given = (grad, logarithms, delta, points, anchors, inverse, features)
    grad_points, *others = found = _empty_gradients(*given, learned_points)
    tiles = BACKWARD_TILES[features.element_size()]
    # Points of one set may serve the whole batch.
    stride = 0 if points.shape[0] == 1 else axes * points.shape[2]
    sizes = (queries, points.shape[2], count, stride, EXP2_SCALE**-2)
    parts = {"D": channels, "P": features.shape[2], "AXES": axes}
    launch_kernel(
        blend_anchors_kernel, (tiles_in(count, tiles["BLOCK_M"]), batch),
        *given, *others, *sizes,
        **parts, W=min(PART, max(16, triton.next_power_of_2(channels))),
        **tiles,
    )  # fmt: skip
    if learned_points:
        grid = (tiles_in(queries, tiles["BLOCK_Q"]), batch)
        constants = parts | _channel_tiles(channels) | tiles
        launch_kernel(blend_points_kernel, grid, *given, grad_points, *sizes, **constants)
    return found


@blend_backward.register_fake
def _empty_gradients(grad: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, points, anchors, inverse, features, learned_points = given
    shape = (*anchors.shape[:2], grad.shape[1]) if learned_points else (0,)
    alike = torch.empty_like(anchors), torch.empty_like(inverse), torch.empty_like(features)
    return points.new_empty(shape), *alike


def _filled(tensor: Tensor, missing: int, value: float) -> Tensor:
    """Here and not inside the operator, so that a compiler can make it part of something else."""
    return F.pad(tensor, (0, missing), value=value) if missing else tensor


@blend_forward.gradients("points", "anchors", "inverse", "features", outputs=True)
def _(
    ctx: Any, grad: Tensor, points: Tensor, anchors: Tensor, inverse: Tensor, features: Tensor,
    output: Tensor, logarithms: Tensor,
) -> Gradients:  # fmt: skip
    learned, grad = ctx.needs_input_grad[0], grad.contiguous()
    delta = (grad.float() * output.float()).sum(dim=-1)
    missing = -grad.shape[1] % BACKWARD_TILES[features.element_size()]["BLOCK_Q"]
    filled = (_filled(logarithms, missing, torch.inf), _filled(delta, missing, 0.0))
    given = _filled(points, missing, 0.0), anchors, inverse, features
    of_points, *found = blend_backward(grad, *filled, *given, learned)
    others = zip(("anchors", "inverse", "features"), found, strict=True)
    return {"points": of_points if learned else None, **dict(others)}


def by_axis(coordinates: Float[Tensor, "b m s"]) -> Float[Tensor, "b s m"]:
    """In float32, one axis after the other: neighbouring threads read neighbouring numbers."""
    return coordinates.float().transpose(1, 2).contiguous()


def fused_blend(
    points: Float[Tensor, "#b q s"],
    anchors: Float[Tensor, "b m s"],
    length_scales: Float[Tensor, "b m s"],
    features: Float[Tensor, "b m d"],
) -> Float[Tensor, "b q d"]:
    """The blend in the features' dtype, which is also that of the product; the rest in float32."""
    if torch.is_grad_enabled() and points.requires_grad and len(points) != len(anchors):
        raise ValueError("points shared by the batch cannot be learned")
    given = map(by_axis, (points, anchors, EXP2_SCALE / length_scales.float()))
    return blend_forward(*given, with_ones(features), features.shape[2])[0]


# Tiles of the forward kernel by the size of a feature in bytes. Of wider features in half precision
# the registers hold no more than a smaller tile.
PRUNED_TILES = {2: tile_sizes(128, 32, 4, 2), 4: tile_sizes(32, 32, 4, 2)}
WIDE_FEATURES, WIDE_TILES = 192, tile_sizes(64, 32, 4, 3)
# What is left out weighs at most this part of a feature's rounding.
PRUNED_SHARE = 1 / 8
# All anchors are looked at together when a list is made.
MOST_ANCHORS = 4096
# Cells of one axis among which points are sorted, as a power of two.
CELL_BITS = {1: 12, 2: 6, 3: 5}
# Points count as sorted if so many in a row span, on average, at most this part of an axis.
IN_A_ROW, SORTED_SPAN = 64, 0.25


@triton.jit
def _span(points, Q, rows, anchors, inverse, R, columns, there, axis: tl.constexpr):
    """The squared distances along an axis from each anchor to the tile's box, least and most."""
    x = tl.load(points + axis * Q + rows)
    low, high = tl.min(x, 0), tl.max(x, 0)
    a = tl.load(anchors + axis * R + columns, mask=there, other=0.0)
    i = tl.load(inverse + axis * R + columns, mask=there, other=0.0)
    least = tl.maximum(tl.maximum(low - a, a - high), 0.0) * i
    most = tl.maximum(a - low, high - a) * i
    return least * least, most * most


@triton.jit
def list_kernel(
    points, anchors, inverse, chosen, counts, remote,
    Q, M, R, point_stride, slack,
    AXES: tl.constexpr, SPAN: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The anchors that matter to a tile of points, how many there are, and whether it is remote.

    M anchors are real; of the R in all, those beyond weigh nothing.
    """
    batch = tl.program_id(1).to(tl.int64)
    tile = batch * tl.num_programs(0) + tl.program_id(0)
    points += batch * point_stride
    anchors += batch * R * AXES
    inverse += batch * R * AXES
    chosen += tile * R
    rows = tl.minimum(tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q), Q - 1)
    columns = tl.arange(0, SPAN)
    there = columns < M
    least, most = _span(points, Q, rows, anchors, inverse, R, columns, there, 0)
    for axis in tl.static_range(1, AXES):
        more = _span(points, Q, rows, anchors, inverse, R, columns, there, axis)
        least, most = least + more[0], most + more[1]
    bound = tl.min(tl.where(there, most, float("inf")), 0)
    # So that an anchor without a number, of a model that has diverged, is kept and seen.
    negligible = least > bound + slack
    keep = (there & ~negligible).to(tl.int32)
    tl.store(chosen + tl.cumsum(keep, 0) - 1, columns, mask=keep > 0)
    count = tl.sum(keep, 0)
    tl.store(counts + tile, count)
    # At every point the weights add up to 2^-bound or more.
    tl.store(remote + tile, (bound > -LEAST_LOGARITHM).to(tl.int32))
    # A list ends with a whole block.
    rest = count + tl.arange(0, BLOCK_M)
    tl.store(chosen + rest, M, mask=rest < tl.cdiv(count, BLOCK_M) * BLOCK_M)


def anchor_lists(
    points: Float[Tensor, "#b s q"],
    anchors: Float[Tensor, "b s r"],
    inverse: Float[Tensor, "b s r"],
    count: int,
    tolerance: float,
    tiles: dict[str, int],
) -> AnchorLists:
    """For each tile of points those of `count` anchors that matter to it."""
    (batch, axes, rows), queries = anchors.shape, points.shape[2]
    number = triton.cdiv(queries, tiles["BLOCK_Q"])
    chosen = anchors.new_empty(batch, number, rows, dtype=torch.int32)
    counts, remote = (anchors.new_empty(batch, number, dtype=torch.int32) for _ in range(2))
    launch_kernel(list_kernel, (number, batch),
        points, anchors, inverse, chosen, counts, remote,
        queries, count, rows, 0 if points.shape[0] == 1 else axes * queries,
        math.log2(count / tolerance),
        AXES=axes, SPAN=triton.next_power_of_2(count),
        BLOCK_Q=tiles["BLOCK_Q"], BLOCK_M=tiles["BLOCK_M"], num_warps=4,
    )  # fmt: skip
    return AnchorLists(chosen, counts, remote)


def _pruned_tiles(features: Tensor, channels: int) -> dict[str, int]:
    size = features.element_size()
    return WIDE_TILES if size == 2 and channels >= WIDE_FEATURES else PRUNED_TILES[size]


@operator("fst::pruned_rbf_blend")
def pruned_blend_forward(
    points: Tensor, anchors: Tensor, inverse: Tensor, features: Tensor, count: int, channels: int
) -> Tensor:
    """The blend (b q d) of those of `count` anchors that matter; what weighs nothing follows them.

    The features come from `with_ones`.
    """
    tiles = _pruned_tiles(features, channels)
    tolerance = PRUNED_SHARE * torch.finfo(features.dtype).eps
    lists = anchor_lists(points, anchors, inverse, count, tolerance, tiles)
    given = points, anchors, inverse, features, channels, anchors.shape[2], tiles
    return run_blend(*given, lists)[0]


@pruned_blend_forward.register_fake
def _(points: Tensor, anchors: Tensor, _: Tensor, features: Tensor, *counts: int) -> Tensor:
    return features.new_empty(anchors.shape[0], points.shape[2], counts[1])


def pruned_blend(
    points: Float[Tensor, "#b q s"],
    anchors: Float[Tensor, "b m s"],
    length_scales: Float[Tensor, "b m s"],
    features: Float[Tensor, "b m d"],
) -> Float[Tensor, "b q d"]:
    """The full blend to rounding, in the features' dtype, from the anchors that matter."""
    count, channels = features.shape[1:]
    # At least one more, to fill up lists with, and a whole number of blocks.
    more = 1 + -(count + 1) % _pruned_tiles(features, channels)["BLOCK_M"]
    inverse = EXP2_SCALE / length_scales.float()
    far = with_far(anchors.float().transpose(1, 2), inverse.transpose(1, 2), more)
    return pruned_blend_forward(by_axis(points), *far, with_ones(features, more), count, channels)


def scattered(points: Float[Tensor, "b q s"]) -> bool:
    """Whether neighbours in the order of points of the unit box are far from each other.

    This looks at the numbers, so it waits for the GPU.
    """
    if points.shape[1] < 2 * IN_A_ROW:
        return False
    whole = points.shape[1] // IN_A_ROW * IN_A_ROW
    rows = points[:, :whole].unflatten(1, (-1, IN_A_ROW))
    return bool((rows.amax(dim=2) - rows.amin(dim=2)).mean() > SORTED_SPAN)


def compact_order(points: Float[Tensor, "b q s"]) -> Int[Tensor, "b q"]:
    """An order in which points of the unit box come in compact tiles.

    They are sorted into the cells of a grid, which follow each other along a curve whose
    neighbours are neighbours (the bits of the axes interlaced).
    """
    axes = points.shape[2]
    bits = CELL_BITS[axes]
    cells = (points * 2**bits).to(torch.int16).clamp(0, 2**bits - 1)
    code = torch.zeros_like(cells[..., 0])
    for bit in range(bits):
        for axis in range(axes):
            code |= ((cells[..., axis] >> bit) & 1) << (bit * axes + axis)
    return code.argsort(dim=1)
