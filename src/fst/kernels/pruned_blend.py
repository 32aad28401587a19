"""The blend from the anchors that matter: no point looks at all of them.

Points are sorted into compact tiles. The bounding box of a tile tells which anchors can matter to
any point in it, so that everything of the size points × anchors becomes points × candidates:

- the k nearest: an anchor is a candidate unless k others are nearer to every point of the box;
- by weight: anchors are left out when all of them together weigh less than the rounding of the
  features' dtype, for every point of the box.

Both bounds are rigorous. So the k nearest are exactly those of the dense formula, and the blend by
weight is the full blend to rounding. An anchor without a number is always a candidate: a model that
has diverged is seen to have.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fst.rbf import TIE
from fst.types import product_dtype

# Points in a tile, at most: more share one list of candidates, fewer have shorter lists.
TILE = 64
# Numbers that one group of tiles may hold at once: such a group stays in a CPU's cache.
GROUP_NUMBERS = {"cpu": 2**21, "cuda": 2**26}
# With more threads PyTorch looks for the nearest faster than NumPy.
FEW_THREADS = 4
# Shorter lists are filled up with an anchor so far away that it weighs nothing.
FAR = 1e18
# Added to a logit, this leaves no weight.
NEVER = -1e38
# Which anchors are candidates, of each of some tiles.
Candidates = Callable[[Tensor], Tensor]
# Weights of a group of tiles: from points, and candidates with their length scales.
Weights = Callable[[Tensor, Tensor, Tensor], Tensor]
# Both, from one sample's anchors, length scales and features.
Rule = Callable[[Tensor, Tensor, Tensor], tuple[Candidates, Weights]]
# What is made of a sample's blends (1 p d) and their points (1 p s) while they are in the cache.
Then = Callable[[Tensor, Tensor], Tensor]


def nearest_blend(
    points: Float[Tensor, "b q s"],
    anchors: Float[Tensor, "b m s"],
    length_scales: Float[Tensor, "b m s"],
    features: Float[Tensor, "b m d"],
    neighbors: int,
    then: Sequence[Then] | None = None,
) -> Float[Tensor, "b q o"]:
    """The blend of the `neighbors` nearest anchors of each point, and of ties with the last."""
    rule = functools.partial(_nearest, neighbors=neighbors)
    return _of_each(rule, points, anchors, length_scales, features, then)


def pruned_blend(
    points: Float[Tensor, "b q s"],
    anchors: Float[Tensor, "b m s"],
    length_scales: Float[Tensor, "b m s"],
    features: Float[Tensor, "b m d"],
    then: Sequence[Then] | None = None,
) -> Float[Tensor, "b q o"]:
    """The full blend to rounding: anchors that weigh nothing are left out."""
    return _of_each(_by_weight, points, anchors, length_scales, features, then)


def _of_each(
    rule: Rule,
    points: Float[Tensor, "b q s"],
    anchors: Float[Tensor, "b m s"],
    length_scales: Float[Tensor, "b m s"],
    features: Float[Tensor, "b m d"],
    then: Sequence[Then] | None,
) -> Float[Tensor, "b q o"]:
    """One sample after the other, for their lists differ."""
    if points.numel() == 0:
        shape = (*points.shape[:2], features.shape[2])
        return features.new_empty(shape, dtype=product_dtype(features))
    given = _wide(points), _wide(anchors), _wide(length_scales), features
    following = itertools.repeat(None, len(points)) if then is None else then
    blends = [_by_groups(rule, *sample) for sample in zip(*given, following, strict=True)]
    # One alone as it is: a copy takes as long as the products.
    return blends[0].unsqueeze(0) if len(blends) == 1 else torch.stack(blends)


def _wide(coordinates: Tensor) -> Tensor:
    """Distances are taken in float32 or better, whatever the dtype of the features."""
    return coordinates.to(torch.promote_types(torch.float32, coordinates.dtype))


def _nearest(
    anchors: Float[Tensor, "m s"],
    length_scales: Float[Tensor, "m s"],
    features: Float[Tensor, "m d"],
    neighbors: int,
) -> tuple[Candidates, Weights]:
    def candidates(tiles: Tensor) -> Tensor:
        least, most = map(_sum, _squared_gaps(tiles, anchors))  # t m
        nearest = most.topk(neighbors, dim=1, largest=False, sorted=False).values
        # Wider than the ties below, so that no candidate is missed.
        return ~(least > nearest.amax(dim=1, keepdim=True) * (1 + 2 * TIE))

    def weights(near: Tensor, anchors: Tensor, scales: Tensor) -> Tensor:
        squares = _squares(near, anchors)
        with torch.no_grad():
            distances = functools.reduce(torch.add, squares)
            others = distances > _smallest(distances, neighbors) * (1 + TIE)
        # Several times as fast on a CPU as to fill them with -inf.
        return _logits(squares, scales).add_(others, alpha=NEVER).softmax(dim=-1)

    return candidates, weights


def _by_weight(
    anchors: Float[Tensor, "m s"],
    length_scales: Float[Tensor, "m s"],
    features: Float[Tensor, "m d"],
) -> tuple[Candidates, Weights]:
    inverse = length_scales.detach().square().reciprocal()
    tolerance = torch.finfo(features.dtype).eps / 2
    slack = 2 * math.log(len(anchors) / tolerance)

    def candidates(tiles: Tensor) -> Tensor:
        # Twice the negative logits: at least `least`, for some anchor at most the smallest `most`.
        least, most = (
            _sum([square.mul_(inverse[:, axis]) for axis, square in enumerate(squares)])
            for squares in _squared_gaps(tiles, anchors)
        )  # t m
        return ~(least > most.amin(dim=1, keepdim=True) + slack)

    def weights(near: Tensor, anchors: Tensor, scales: Tensor) -> Tensor:
        return _logits(_squares(near, anchors), scales).softmax(dim=-1)

    return candidates, weights


def _squares(
    points: Float[Tensor, "g p s"], anchors: Float[Tensor, "g c s"]
) -> list[Float[Tensor, "g p c"]]:
    """gap_s² along each axis."""
    axes = range(points.shape[-1])
    return [(points[..., s, None] - anchors[:, None, :, s]).square_() for s in axes]


def _logits(
    squares: list[Float[Tensor, "g p c"]], length_scales: Float[Tensor, "g c s"]
) -> Float[Tensor, "g p c"]:
    """-½ Σ_s gap_s² / ℓ_s²."""
    factors = -0.5 * length_scales.square().reciprocal()[:, None]  # g 1 c s
    total = squares[0] * factors[..., 0]
    for axis, square in enumerate(squares[1:], start=1):
        total.addcmul_(square, factors[..., axis])
    return total


def _smallest(values: Float[Tensor, "*r m"], number: int) -> Float[Tensor, "*r 1"]:
    """Of each row the number that so many, itself included, do not exceed.

    On short rows NumPy takes a seventh of PyTorch's time, but never more than one thread.
    """
    if values.device.type == "cpu" and torch.get_num_threads() <= FEW_THREADS:
        parted = np.partition(values.numpy(), number - 1, axis=-1)
        return torch.from_numpy(parted[..., number - 1 : number])
    found = values.topk(number, dim=-1, largest=False, sorted=False).values
    return found.amax(dim=-1, keepdim=True)


def _order(values: Float[Tensor, "r n"]) -> Int[Tensor, "r n"]:
    """What sorts each row; NumPy takes half of PyTorch's time on one thread."""
    if values.device.type == "cpu" and torch.get_num_threads() <= FEW_THREADS:
        return torch.from_numpy(np.argsort(values.numpy(), axis=1))
    return values.argsort(dim=1)


def _in_tiles(points: Float[Tensor, "q s"]) -> tuple[Float[Tensor, "t p s"], Int[Tensor, "t p"]]:
    """Points in compact tiles, and the row of each in the result.

    Cut into equal slabs along the first axis, each of these along the next, and so on. The last
    point fills up what is missing; its copies go to a row beyond the others.
    """
    count, axes = points.shape
    tiles = math.ceil(count / TILE)
    slabs = [math.ceil(tiles ** (1 / axes))] * (axes - 1)
    slabs.append(math.ceil(tiles / math.prod(slabs)))
    size = math.ceil(count / math.prod(slabs))  # at most TILE, with as few copies as can be
    rows = torch.arange(math.prod(slabs) * size, device=points.device).clamp(max=count)
    rows = rows[None]
    for axis, parts in enumerate(slabs):
        along = points.detach()[:, axis][rows.clamp(max=count - 1)]
        rows = rows.gather(1, _order(along)).reshape(len(rows) * parts, -1)
    return points[rows.clamp(max=count - 1)], rows


def _sum(parts: list[Float[Tensor, "t m"]]) -> Float[Tensor, "t m"]:
    """Of tensors that nobody else needs: fresh memory takes a CPU longer than the additions."""
    return functools.reduce(torch.Tensor.add_, parts)


@torch.no_grad()
def _squared_gaps(
    tiles: Float[Tensor, "t p s"], anchors: Float[Tensor, "m s"]
) -> tuple[list[Float[Tensor, "t m"]], list[Float[Tensor, "t m"]]]:
    """Least and greatest distance² along each axis between an anchor and the box of a tile."""
    least, most = [], []
    for axis in range(anchors.shape[1]):
        position, along = anchors[:, axis], tiles[..., axis]  # m, t p
        below = along.amin(dim=1, keepdim=True) - position
        above = position - along.amax(dim=1, keepdim=True)
        least.append(torch.maximum(below, above).clamp_(min=0).square_())
        most.append(torch.maximum(below.square_(), above.square_()))
    return least, most


def _by_groups(
    rule: Rule,
    points: Float[Tensor, "q s"],
    anchors: Float[Tensor, "m s"],
    length_scales: Float[Tensor, "m s"],
    features: Float[Tensor, "m d"],
    then: Then | None,
) -> Float[Tensor, "q o"]:
    """Blend each tile from its candidates, tiles with lists of similar length together."""
    candidates, weights = rule(anchors, length_scales, features)
    tiles, rows = _in_tiles(points)
    at_once = max(1, _allowed(features) // (4 * len(anchors)))
    keep = torch.cat([candidates(some) for some in tiles.split(at_once)])  # t m
    counts, by_count = keep.sum(dim=1, dtype=torch.int32).sort()
    lists = _lists(keep[by_count], counts)
    tiles, rows = tiles[by_count], rows[by_count].flatten()
    anchors = F.pad(anchors, (0, 0, 0, 1), value=FAR)
    length_scales = F.pad(length_scales, (0, 0, 0, 1), value=1.0)
    features = F.pad(features, (0, 0, 0, 1)).to(product_dtype(features))
    parts: list[Tensor] = []
    start, lengths = 0, counts.tolist()
    while start < len(lengths):
        stop = _group_end(lengths, start, tiles.shape[1], features.shape[1], _allowed(features))
        chosen = lists[start:stop, : lengths[stop - 1]]  # g c
        # Several times as fast on a CPU as to index by `chosen`.
        positions, scales, values = (
            each.index_select(0, chosen.flatten()).unflatten(0, chosen.shape)
            for each in (anchors, length_scales, features)
        )
        near = tiles[start:stop]
        part = weights(near, positions, scales).to(values.dtype) @ values  # g p d
        if then is not None:
            part = then(part.view(1, -1, part.shape[-1]), near.view(1, -1, near.shape[-1]))
        parts.append(part.flatten(0, 1))
        start = stop
    # Back to the order of the points; the copies that fill up tiles lie in the row beyond.
    order = torch.empty_like(rows).scatter_(0, rows, torch.arange(len(rows), device=rows.device))
    return torch.cat(parts).index_select(0, order[: len(points)])


def _lists(keep: Bool[Tensor, "t m"], counts: Int[Tensor, " t"]) -> Int[Tensor, "t c"]:
    """The candidates of each tile, shorter lists filled up with the number beyond."""
    tile, anchor = keep.nonzero(as_tuple=True)
    before = counts.cumsum(dim=0) - counts
    position = torch.arange(len(tile), device=keep.device) - before[tile]
    lists = tile.new_full((len(keep), int(counts[-1])), keep.shape[1])
    lists[tile, position] = anchor
    return lists


def _allowed(features: Tensor) -> int:
    """How many numbers a group may hold on this device."""
    return GROUP_NUMBERS.get(features.device.type, GROUP_NUMBERS["cuda"])


def _group_end(lengths: list[int], start: int, tile: int, channels: int, allowed: int) -> int:
    """As many tiles, from the shortest list on, as hold so many numbers at once."""
    stop = start + 1
    while stop < len(lengths):
        each = lengths[stop] * (channels + 4 * tile) + tile * channels
        if (stop + 1 - start) * each > allowed:
            break
        stop += 1
    return stop
