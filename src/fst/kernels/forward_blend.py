"""The forward kernel of the blend: a tile of points against all anchors, or against a list of them.

Points, anchors, reciprocal length scales and features enter; the blend and the logarithm of each
point's normaliser leave (the equations are in `fst.kernels.blend`).

The features come with a column of ones behind their last channel (`with_ones`), so that the tensor
cores sum the weights as they see them: a constant field comes out constant. Nothing in the loop
crosses the rows of a tile or the threads of a warp, which lets the compiler make the weights where
the tensor cores want them, in registers.

Every exponent is at most zero, so no maximum has to be subtracted to prevent overflow. Where a
point is so far from all anchors that its weights come near the smallest float32, a second launch
does its tile again with the highest exponent subtracted. With lists one launch is enough: they say
beforehand of which tiles that may be so.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from fst.kernels.launching import launch_kernel
from fst.kernels.tiles import tiles_in

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
    return min(PART, max(16, triton.next_power_of_2(channels + 1)))


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
def _coordinate(points, Q, rows, real, axis: tl.constexpr, AXES: tl.constexpr):
    if axis < AXES:
        return tl.load(points + axis * Q + rows, mask=real, other=0.0)[:, None]
    return tl.zeros((rows.shape[0], 1), tl.float32)


@triton.jit
def _exponents(shift, x0, x1, x2, anchors, inverse, columns, R, AXES: tl.constexpr):
    """shift - Σ_s ((x_s - a_s) i_s)². The differences come first: no cancellation."""
    u = (x0 - tl.load(anchors + columns)[None, :]) * tl.load(inverse + columns)[None, :]
    t = shift - u * u
    if AXES > 1:
        u = (x1 - tl.load(anchors + R + columns)[None, :]) * tl.load(inverse + R + columns)[None, :]
        t -= u * u
    if AXES > 2:
        columns += 2 * R
        u = (x2 - tl.load(anchors + columns)[None, :]) * tl.load(inverse + columns)[None, :]
        t -= u * u
    return t


@triton.jit
def _highest(
    shift, x0, x1, x2, anchors, inverse, chosen, count, R,
    AXES: tl.constexpr, BLOCK_Q: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """The highest exponent of each point of a tile."""
    highest = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
    for start in range(0, count, FEW):
        columns = _columns(chosen, start, FEW, LISTED)
        found = _exponents(shift[:, None], x0, x1, x2, anchors, inverse, columns, R, AXES)
        highest = tl.maximum(highest, tl.max(found, 1))
    return highest


@triton.jit
def _part(features, columns, part: tl.constexpr, P: tl.constexpr, W: tl.constexpr):
    return tl.load(features + columns[:, None] * P + (part * W + tl.arange(0, W))[None, :])


@triton.jit
def _put(output, rows, real, part: tl.constexpr, values, D: tl.constexpr, W: tl.constexpr):
    channels = part * W + tl.arange(0, W)
    place = output + rows.to(tl.int64)[:, None] * D + channels[None, :]
    mask = real[:, None] & (channels < D)[None, :]
    tl.store(place, values.to(output.dtype.element_ty), mask=mask)


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
    shift, x0, x1, x2, anchors, inverse, features, chosen, count, R,
    output, logarithms, rows, real,
    D: tl.constexpr, P: tl.constexpr, W: tl.constexpr, AXES: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, LISTED: tl.constexpr, PRECISION: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """Store the blend of a tile with `shift` added to the exponents.

    There are at most five parts. Triton has no lists of tiles that change in a loop.
    """
    sum0 = tl.zeros((BLOCK_Q, W), tl.float32)
    sum1 = tl.zeros((BLOCK_Q, W), tl.float32)
    sum2 = tl.zeros((BLOCK_Q, W), tl.float32)
    sum3 = tl.zeros((BLOCK_Q, W), tl.float32)
    sum4 = tl.zeros((BLOCK_Q, W), tl.float32)
    for start in range(0, count, BLOCK_M):
        columns = _columns(chosen, start, BLOCK_M, LISTED)
        exponents = _exponents(shift[:, None], x0, x1, x2, anchors, inverse, columns, R, AXES)
        weights = tl.exp2(exponents).to(features.dtype.element_ty)
        z = _part(features, columns, 0, P, W)
        sum0 = tl.dot(weights, z, sum0, input_precision=PRECISION)
        if P == W:
            sum0 = settled(sum0, COMPILED)
        if P > W:
            z = _part(features, columns, 1, P, W)
            sum1 = tl.dot(weights, z, sum1, input_precision=PRECISION)
            if P == 2 * W:
                sum1 = settled(sum1, COMPILED)
        if P > 2 * W:
            z = _part(features, columns, 2, P, W)
            sum2 = tl.dot(weights, z, sum2, input_precision=PRECISION)
            if P == 3 * W:
                sum2 = settled(sum2, COMPILED)
        if P > 3 * W:
            z = _part(features, columns, 3, P, W)
            sum3 = tl.dot(weights, z, sum3, input_precision=PRECISION)
            if P == 4 * W:
                sum3 = settled(sum3, COMPILED)
        if P > 4 * W:
            z = _part(features, columns, 4, P, W)
            sum4 = tl.dot(weights, z, sum4, input_precision=PRECISION)
            if P == 5 * W:
                sum4 = settled(sum4, COMPILED)
    last = sum0
    if P > W:
        last = sum1
    if P > 2 * W:
        last = sum2
    if P > 3 * W:
        last = sum3
    if P > 4 * W:
        last = sum4
    total = tl.sum(tl.where((P - W + tl.arange(0, W) == D)[None, :], last, 0.0), 1)
    scale = 1.0 / total[:, None]
    _put(output, rows, real, 0, sum0 * scale, D, W)
    if D > W:
        _put(output, rows, real, 1, sum1 * scale, D, W)
    if D > 2 * W:
        _put(output, rows, real, 2, sum2 * scale, D, W)
    if D > 3 * W:
        _put(output, rows, real, 3, sum3 * scale, D, W)
    tl.store(logarithms + rows, tl.log2(total) - shift, mask=real)


@triton.jit
def blend_kernel(
    points, anchors, inverse, features, chosen, counts, remote, output, logarithms,
    Q, R, point_stride,
    D: tl.constexpr, P: tl.constexpr, W: tl.constexpr, AXES: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, LISTED: tl.constexpr, PRECISION: tl.constexpr,
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
    x0 = _coordinate(points, Q, rows, real, 0, AXES)
    x1 = _coordinate(points, Q, rows, real, 1, AXES)
    x2 = _coordinate(points, Q, rows, real, 2, AXES)
    shift = tl.zeros((BLOCK_Q,), tl.float32)
    if SHIFTED:
        # Nothing to do for a tile that came out well the first time.
        if tl.min(tl.load(logarithms + rows, mask=real, other=0.0)) < LEAST_LOGARITHM:
            shift = -_highest(
                shift, x0, x1, x2, anchors, inverse, chosen, count, R, AXES, BLOCK_Q, LISTED
            )
            _blend_tile(
                shift, x0, x1, x2, anchors, inverse, features, chosen, count, R,
                output, logarithms, rows, real,
                D, P, W, AXES, BLOCK_Q, BLOCK_M, LISTED, PRECISION, COMPILED,
            )  # fmt: skip
    else:
        if LISTED:  # noqa: SIM102, known when the kernel is compiled
            if tl.load(remote) > 0:
                shift = -_highest(
                    shift, x0, x1, x2, anchors, inverse, chosen, count, R, AXES, BLOCK_Q, LISTED
                )
        _blend_tile(
            shift, x0, x1, x2, anchors, inverse, features, chosen, count, R,
            output, logarithms, rows, real,
            D, P, W, AXES, BLOCK_Q, BLOCK_M, LISTED, PRECISION, COMPILED,
        )  # fmt: skip


def run_blend(
    points: Float[Tensor, "#b s q"],
    anchors: Float[Tensor, "b s m"],
    inverse: Float[Tensor, "b s m"],
    features: Float[Tensor, "b m p"],
    channels: int,
    rows: int,
    tiles: dict[str, int],
    precision: str,
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
    logarithms = (
        anchors.new_full((batch, queries), -torch.inf)
        if narrow
        else anchors.new_empty(batch, queries)
    )
    if more := rows - count:
        anchors, inverse = with_far(anchors, inverse, more)
        features = F.pad(features, (0, 0, 0, more))
    # Without lists, any tensor stands in for them.
    listed = lists or (anchors, anchors, anchors)
    given = (points, anchors, inverse, features, *listed, output, logarithms)
    stride = 0 if points.shape[0] == 1 else axes * queries  # one set may serve the whole batch
    launches = [False, True]
    if narrow:
        launches = [True]
    elif lists:
        launches = [False]
    for shifted in launches:
        launch_kernel(
            blend_kernel, (tiles_in(queries, tiles["BLOCK_Q"]), batch),
            *given, queries, rows, stride,
            D=channels, P=features.shape[2], W=part_width(channels), AXES=axes,
            LISTED=lists is not None, SHIFTED=shifted, PRECISION=precision,
            COMPILED=features.is_cuda, **tiles,
        )  # fmt: skip
    return output, logarithms
