"""The blend from the anchors that matter: no point looks at all of them.

Points are sorted into compact tiles. The bounding box of a tile tells which anchors can matter to
any point in it, so that everything of the size points × anchors becomes points × candidates:

- the k nearest: an anchor is a candidate unless k others are nearer to every point of the box;
- by weight: anchors are left out when all of them together weigh less than the rounding of the
  features' dtype, for every point of the box.

Both bounds are rigorous. So the k nearest are exactly those of the dense formula, and the blend by
weight is the full blend to rounding.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fst.rbf import (
    TIE,
    among_nearest,
    axis_gaps,
    blend,
    gap_logits,
    rbf_logits,
    squared_lengths,
)

# Points in a tile: more share one list of candidates, fewer have shorter lists.
TILE = 64
# Numbers that one group of tiles may hold at once: such a group stays in a CPU's cache.
GROUP_NUMBERS = {"cpu": 2**21, "cuda": 2**26}
# Weights of a group of tiles: from points, candidates with their length scales, and which are real.
Weights = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def nearest_blend(
    points: Float[Tensor, "b q s"],
    anchors: Float[Tensor, "b m s"],
    length_scales: Float[Tensor, "b m s"],
    features: Float[Tensor, "b m d"],
    neighbors: int,
) -> Float[Tensor, "b q d"]:
    """The blend of the `neighbors` nearest anchors of each point, and of ties with the last."""
    samples = zip(_wide(points), _wide(anchors), _wide(length_scales), features, strict=True)
    return _stacked([_nearest(*sample, neighbors) for sample in samples])


def weighty_blend(
    points: Float[Tensor, "b q s"],
    anchors: Float[Tensor, "b m s"],
    length_scales: Float[Tensor, "b m s"],
    features: Float[Tensor, "b m d"],
) -> Float[Tensor, "b q d"]:
    """The full blend to rounding: anchors that weigh nothing are left out."""
    samples = zip(_wide(points), _wide(anchors), _wide(length_scales), features, strict=True)
    return _stacked([_weighty(*sample) for sample in samples])


def _stacked(blends: list[Float[Tensor, "q d"]]) -> Float[Tensor, "b q d"]:
    """Together; one alone as it is, for a copy takes as long as the products."""
    return blends[0].unsqueeze(0) if len(blends) == 1 else torch.stack(blends)


def _wide(coordinates: Tensor) -> Tensor:
    """Distances are taken in float32 or better, whatever the features are kept in."""
    return coordinates.to(torch.promote_types(torch.float32, coordinates.dtype))


def _nearest(
    points: Float[Tensor, "q s"],
    anchors: Float[Tensor, "m s"],
    length_scales: Float[Tensor, "m s"],
    features: Float[Tensor, "m d"],
    neighbors: int,
) -> Float[Tensor, "q d"]:
    tiles, rows = _in_tiles(points)
    least, most = map(squared_lengths, _gaps(tiles, anchors))  # t m
    nearest = most.topk(neighbors, dim=1, largest=False, sorted=False).values
    # Wider than the ties below, so that no candidate is missed.
    keep = least <= nearest.amax(dim=1, keepdim=True) * (1 + 2 * TIE)

    def weights(near: Tensor, places: Tensor, scales: Tensor, real: Tensor) -> Tensor:
        gaps = list(axis_gaps(near, places))
        with torch.no_grad():
            distances = squared_lengths(gaps).masked_fill_(~real, torch.inf)
            others = ~among_nearest(distances, neighbors)
        return gap_logits(gaps, scales).masked_fill(others, -torch.inf).softmax(dim=-1)

    return _by_groups(
        tiles, rows, anchors, length_scales, features, keep, least, weights, len(points)
    )


def _weighty(
    points: Float[Tensor, "q s"],
    anchors: Float[Tensor, "m s"],
    length_scales: Float[Tensor, "m s"],
    features: Float[Tensor, "m d"],
) -> Float[Tensor, "q d"]:
    tiles, rows = _in_tiles(points)
    # Twice the negative logits: at least `least`, and for some anchor at most the smallest `most`.
    least, most = (
        squared_lengths([gap / length_scales[:, axis] for axis, gap in enumerate(gaps)])
        for gaps in _gaps(tiles, anchors)
    )  # t m
    tolerance = torch.finfo(features.dtype).eps / 2
    slack = 2 * math.log(len(anchors) / tolerance)
    keep = least <= most.amin(dim=1, keepdim=True) + slack

    def weights(near: Tensor, places: Tensor, scales: Tensor, real: Tensor) -> Tensor:
        return rbf_logits(near, places, scales).masked_fill(~real, -torch.inf).softmax(dim=-1)

    return _by_groups(
        tiles, rows, anchors, length_scales, features, keep, least, weights, len(points)
    )


def _in_tiles(points: Float[Tensor, "q s"]) -> tuple[Float[Tensor, "t p s"], Int[Tensor, "t p"]]:
    """Points in compact tiles, and the row of each in the result.

    Cut into equal slabs along the first axis, each of these along the next, and so on. The last
    point fills up what is missing; its copies go to a row beyond the others.
    """
    count, axes = points.shape
    tiles = math.ceil(count / TILE)
    slabs = [math.ceil(tiles ** (1 / axes))] * (axes - 1)
    slabs.append(math.ceil(tiles / math.prod(slabs)))
    rows = torch.arange(math.prod(slabs) * TILE, device=points.device).clamp(max=count)
    rows = rows[None]
    for axis, parts in enumerate(slabs):
        along = points.detach()[rows.clamp(max=count - 1), axis]
        rows = rows.gather(1, along.argsort(dim=1)).reshape(len(rows) * parts, -1)
    return points[rows.clamp(max=count - 1)], rows


@torch.no_grad()
def _gaps(
    tiles: Float[Tensor, "t p s"], anchors: Float[Tensor, "m s"]
) -> tuple[list[Float[Tensor, "t m"]], list[Float[Tensor, "t m"]]]:
    """Least and greatest distance along each axis between an anchor and the box of a tile."""
    least, most = [], []
    for axis in range(anchors.shape[1]):
        places, along = anchors[:, axis], tiles[..., axis]  # m, t p
        below = along.amin(dim=1, keepdim=True) - places
        above = places - along.amax(dim=1, keepdim=True)
        least.append(torch.maximum(below, above).clamp_(min=0))
        most.append(torch.maximum(below.abs_(), above.abs_()))
    return least, most


def _by_groups(
    tiles: Float[Tensor, "t p s"],
    rows: Int[Tensor, "t p"],
    anchors: Float[Tensor, "m s"],
    length_scales: Float[Tensor, "m s"],
    features: Float[Tensor, "m d"],
    keep: Bool[Tensor, "t m"],
    rank: Float[Tensor, "t m"],
    weights: Weights,
    points: int,
) -> Float[Tensor, "q d"]:
    """Blend each tile from its candidates, tiles with lists of similar length together."""
    counts, by_count = keep.sum(dim=1).sort()
    blends = []
    start, lengths = 0, counts.tolist()
    while start < len(lengths):
        stop = _group_end(lengths, start, features.shape[1], features.device.type)
        group = by_count[start:stop]
        ranked = rank[group].masked_fill(~keep[group], torch.inf)
        found, chosen = ranked.topk(lengths[stop - 1], dim=1, largest=False)  # g c
        near = weights(
            tiles[group], anchors[chosen], length_scales[chosen], found.isfinite()[:, None]
        )
        blends.append(blend(near, features[chosen]).flatten(0, 1))  # gp d
        start = stop
    # Rows are taken from where they are: putting each where it belongs takes a CPU twice as long.
    order = rows[by_count].flatten().argsort()[:points]
    return torch.cat(blends).index_select(0, order)


def _group_end(lengths: list[int], start: int, channels: int, device: str) -> int:
    """As many tiles, from the shortest list on, as fit in memory at once."""
    allowed = GROUP_NUMBERS.get(device, GROUP_NUMBERS["cuda"])
    stop = start + 1
    while stop < len(lengths):
        each = lengths[stop] * (channels + 4 * TILE) + TILE * channels
        if (stop + 1 - start) * each > allowed:
            break
        stop += 1
    return stop
