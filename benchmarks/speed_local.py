"""Local blends against the full one, at the same queries of the same field in the same run.

Blends alone, on the grid: the k nearest anchors, and all anchors that weigh more than rounding.
Then the whole field, where the decoder's MLPs come on top, on a CPU at fewer queries. How many
anchors matter depends on the length scales, so a trained field says more than an untrained one, all
of whose scales are at their initial value.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch
from speed_setting import (
    Conclusion,
    Row,
    Section,
    Setting,
    clock,
    field_model,
    grid_queries,
    observations,
    peak_gib,
    precision,
    recorded,
    release,
)
from torch import Tensor

import fst
from fst import kernels
from fst.kernels import modules
from fst.kernels.pruned_blend import nearest_blend, pruned_blend
from fst.rbf import Blend
from fst.types import product_dtype

NEIGHBORS = 16
# Queries at once where a blend is made piece by piece. On a CPU more take up to three times as
# long, if malloc happens to hand out fresh memory for each piece.
PIECE = {"cpu": 2**8, "cuda": 2**15}
FULL, PIECEWISE, DENSE = "full blend", "full blend, in pieces", "full blend, plain"
NEAREST, PRUNED = "k nearest", "by weight"
MLPS, WHOLE, WHOLE_NEAREST = "decoder's MLPs", "field(queries)", "field(queries, neighbors=k)"
WHOLE_PLAIN = "field, plain, in one piece"
FIELDS = (WHOLE, WHOLE_PLAIN, WHOLE_NEAREST)
# On a GPU these are recorded, several in a row, and replayed: Python would take longer than the
# GPU, and the start of a replay counts beside one of them. What users call is timed as they call
# it, and so are the k nearest, whose groups the host has to know.
PARTS = (FULL, PIECEWISE, DENSE, PRUNED, MLPS)
IN_A_ROW = 10


class Local(Section):
    """Milliseconds of each blend, compared with the faster of the full ones.

    `times plain` compares with PyTorch's operations on everything at once.
    """

    name = "local"
    columns = ("entry", "queries", "ms", "times_as_fast", "times_plain", "difference", "peak_gib")

    def entries(self, setting: Setting) -> list[str]:
        kinds = (FULL, PIECEWISE, DENSE, NEAREST, PRUNED, MLPS, *FIELDS)
        return [f"{number}, {kind}" for number in setting.precisions for kind in kinds]

    @torch.no_grad()
    def measure(self, entry: str, setting: Setting) -> Row:
        number, kind = entry.split(", ", 1)
        release(setting.device)
        field = prepared(setting, number)
        queries = queries_of(kind, setting)
        with precision(number, setting.device):
            call = calls(field, queries)[kind]
            exact = calls(field, queries)[DENSE]() if kind in (FULL, PIECEWISE, PRUNED) else None
            difference = None
            if exact is not None:
                difference = ((call() - exact).norm() / exact.norm()).item()
                del exact
            release(setting.device)
            part = kind in PARTS
            row = IN_A_ROW if part and setting.cuda else 1
            timed = recorded(call, setting.device, row) if part else call
            times = clock(timed, setting, times=row)
        scales = field.anchors.length_scales
        return {
            "precision": number,
            "kind": kind,
            "queries": queries.shape[1],
            "anchors": scales.shape[1],
            "neighbors": NEIGHBORS if kind in (NEAREST, WHOLE_NEAREST) else None,
            "trained": setting.run is not None,
            "length_scales": [scales.min().item(), scales.median().item(), scales.max().item()],
            **times,
            "difference": difference,
            "peak_gib": peak_gib(setting.device),
        }

    def conclude(self, rows: list[Row], earlier: dict[str, list[Row]]) -> Conclusion:
        lines = []
        for number in dict.fromkeys(row["precision"] for row in rows):
            found = {row["kind"]: row for row in rows if row["precision"] == number}
            compare(found, (FULL, PIECEWISE), (FULL, PIECEWISE, DENSE, NEAREST, PRUNED))
            compare(found, (WHOLE,), FIELDS)
            compare(found, (DENSE,), (FULL, PIECEWISE, NEAREST, PRUNED), "times_plain")
            compare(found, (WHOLE_PLAIN,), (WHOLE, WHOLE_NEAREST), "times_plain")
            lines += [
                f"{number}: with '{kind}' the decoder's MLPs take {share:.0%} of the time"
                for kind in (FULL, NEAREST, PRUNED)
                if (share := mlp_share(found, kind)) is not None
            ]
        if rows:
            least, median, most = rows[0]["length_scales"]
            source = "a trained field" if rows[0]["trained"] else "an untrained field"
            lines.append(f"{source}: length scales {least:.3g}, {median:.3g}, {most:.3g} "
                         "(least, median, most)")  # fmt: skip
        return Conclusion(lines=lines)


def compare(
    found: dict[str, Row],
    with_: tuple[str, ...],
    kinds: tuple[str, ...],
    column: str = "times_as_fast",
) -> None:
    """Note in the rows how many times as fast each kind is as the fastest of `with_`."""
    times = [found[kind]["ms"] for kind in with_ if kind in found]
    for kind in kinds:
        if times and kind in found:
            found[kind][column] = min(times) / found[kind]["ms"]


def mlp_share(found: dict[str, Row], kind: str) -> float | None:
    """The MLPs' part of a decoding with this blend."""
    if MLPS not in found or kind not in found:
        return None
    return found[MLPS]["ms"] / (found[MLPS]["ms"] + found[kind]["ms"])


@cache
def prepared(setting: Setting, number: str) -> fst.Field:
    """One field for every entry."""
    with torch.no_grad(), precision(number, setting.device):
        return field_model(setting)(observations(setting.sizes, 1, setting.device))


def queries_of(kind: str, setting: Setting) -> Tensor:
    """The same for all blends, and for all fields."""
    sizes, device = setting.sizes, setting.device
    if kind not in FIELDS or sizes.local_queries is None:
        return grid_queries(sizes.local_grid, device)
    generator = torch.Generator(device).manual_seed(0)
    return torch.rand(1, sizes.local_queries, 2, generator=generator, device=device)


def calls(field: fst.Field, queries: Tensor) -> dict[str, Callable[[], Tensor]]:
    anchors = field.unit_anchors
    # One dtype for the blends that check it; the precision still decides that of the products.
    features = field.features.to(anchors.positions.dtype)
    given = (queries, anchors.positions, anchors.length_scales, features)

    size = PIECE.get(queries.device.type, PIECE["cuda"])
    blended = features.new_zeros(
        *queries.shape[:2], features.shape[2], dtype=product_dtype(features)
    )

    fast = kernels.fuse(Blend())

    def full(points: Tensor) -> Tensor:
        """With all anchors, whatever they weigh."""
        if not modules.takes_anchors(anchors.positions, features.shape[2]):
            return Blend()(points, *given[1:])
        return modules.blend.fused_blend(points, *given[1:3], features.to(product_dtype(features)))

    def pieces() -> Tensor:
        return torch.cat([full(part) for part in queries.split(size, dim=1)], dim=1)

    def dense() -> Tensor:
        return Blend()(*given)

    plain = replace(field, decoder=kernels.unfuse(copy.deepcopy(field.decoder)))

    return {
        FULL: partial(full, queries),
        PIECEWISE: pieces,
        DENSE: dense,
        NEAREST: partial(nearest_blend, *given, NEIGHBORS),
        PRUNED: partial(fast if queries.is_cuda else pruned_blend, *given),
        MLPS: partial(field.decoder.pointwise, blended, queries, field.condition),
        WHOLE: partial(field, queries),
        WHOLE_PLAIN: partial(plain.decode, queries),
        WHOLE_NEAREST: partial(field, queries, neighbors=NEIGHBORS),
    }
