"""Prediction: one solution on the whole grid, and very many queries of one field.

Refinement stands for all that is done before the first query, whatever the model.

Three ways to ask: `call` is the documented `model(observations)(queries)`, checked and in chunks;
`direct` skips the checks, draws the evaluation points once and decodes in one piece; `compiled`
is the same after torch.compile, with CUDA graphs on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from speed_setting import (
    Conclusion,
    Row,
    Section,
    Setting,
    clock,
    grid_queries,
    models,
    observations,
    operator,
    path,
    peak_gib,
    precision,
    release,
)
from torch import Tensor

from fst import Anchors, Field, FunctionSpaceTransformer, Observations
from fst.base import PointDraws

# Into how many equal pieces the many queries are cut where the field is asked directly.
PIECES = 40

# What a field is made of: features, anchor positions and both kinds of length scales.
Parts = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Predictor:
    """One way to ask: what refines, what decodes, and what must precede both."""

    refine: Callable[[], Any]
    decode: Callable[[Any, Tensor], Tensor]
    begin: Callable[[], None]

    def whole(self, queries: Tensor) -> Tensor:
        self.begin()
        return self.decode(self.refine(), queries)


def predictor(name: str, way: str, setting: Setting) -> Predictor:
    """A model with one set of observations, ready to be asked."""
    sizes, device = setting.sizes, setting.device
    network = operator(sizes.configs()[name], device).eval()
    given = observations(sizes, 1, device)
    if way == "call":
        return Predictor(lambda: network(given), lambda field, asked: field(asked), lambda: None)

    assert isinstance(network, FunctionSpaceTransformer)
    stream = network.point_stream(sizes.fst.anchor_seed, sizes.fst.sobol_seed)
    draws = stream.draw().to(device, torch.float32)

    def refine(positions: Tensor, values: Tensor, indices: Tensor, uniform: Tensor) -> Parts:
        field = network.represent(Observations(positions, values), PointDraws(indices, uniform))
        anchors = field.unit_anchors
        return (
            field.features,
            anchors.positions,
            anchors.length_scales,
            anchors.refinement_length_scales,
        )

    def decode(parts: Parts, queries: Tensor) -> Tensor:
        features, *anchors = parts
        field = Field(
            network.domain,
            Anchors(*anchors),
            features,
            None,
            network.decoder,
            network.standardize_outputs,
        )
        return field.decode(queries)

    def begin() -> None:
        pass

    if way == "compiled":
        refine = torch.compile(refine, mode="reduce-overhead", dynamic=False)
        decode = torch.compile(decode, mode="reduce-overhead", dynamic=False)
        # The memory of a replayed graph may be used again from here on.
        begin = torch.compiler.cudagraph_mark_step_begin
    return Predictor(lambda: refine(given.positions, given.values, *draws), decode, begin)


def held(parts: object) -> object:
    """A copy that the next replay of a CUDA graph does not overwrite."""
    return tuple(part.clone() for part in parts) if isinstance(parts, tuple) else parts


def ways(setting: Setting) -> tuple[str, ...]:
    return ("compiled", "direct", "call") if setting.compiled else ("direct", "call")


class Prediction(Section):
    """Milliseconds for one solution on the whole grid, as the host sees them."""

    name = "prediction"
    columns = ("entry", "queries", "whole_ms", "refinement_ms", "decoding_ms", "peak_gib")

    def entries(self, setting: Setting) -> list[str]:
        ours = [
            f"fst {each}, {number}, {way}"
            for number in setting.precisions
            for each in ("fast", "plain")
            for way in ways(setting)
        ]
        others = [name for name in models(setting) if name != "fst"]
        return ours + [
            f"{name}, {number}, call" for name in others for number in setting.precisions
        ]

    @torch.no_grad()
    def measure(self, entry: str, setting: Setting) -> Row:
        called, number, way = entry.split(", ")
        name, *rest = called.split()
        each = rest[0] if rest else "fast"
        queries = grid_queries(setting.sizes, setting.device)
        release(setting.device)
        with path(each), precision(number, setting.device):
            asked = predictor(name, way, setting)

            def refine() -> None:
                asked.begin()
                asked.refine()

            whole = clock(lambda: asked.whole(queries), setting)
            refinement = clock(refine, setting)
            asked.begin()
            field = held(asked.refine())

            def decode() -> None:
                asked.begin()
                asked.decode(field, queries)

            decoding = clock(decode, setting)
        row: Row = {
            "model": name,
            "path": each,
            "precision": number,
            "way": way,
            "queries": queries.shape[1],
        }
        parts = {"whole": whole, "refinement": refinement, "decoding": decoding}
        for part, times in parts.items():
            row |= {f"{part}_{name}": value for name, value in times.items()}
        return row | {"peak_gib": peak_gib(setting.device)}


class Decoding(Section):
    """Queries a second of one field, and the memory needed besides queries and values."""

    name = "decoding"
    columns = ("entry", "queries", "queries_per_second", "seconds", "peak_gib", "beyond_gib")

    def entries(self, setting: Setting) -> list[str]:
        number = setting.precisions[0]
        paths = ("fast", "plain")
        return [f"{each}, {number}, {way}" for each in paths for way in ways(setting)]

    @torch.no_grad()
    def measure(self, entry: str, setting: Setting) -> Row:
        each, number, way = entry.split(", ")
        device, count = setting.device, setting.sizes.many_queries
        release(device)
        generator = torch.Generator(device).manual_seed(0)
        queries = torch.rand(1, count, 2, generator=generator, device=device)
        values = torch.empty(1, count, 1, device=device)
        size = count if way == "call" else count // PIECES
        with path(each), precision(number, device):
            asked = predictor("fst", way, setting)
            asked.begin()
            field = held(asked.refine())

            def decode() -> None:
                pairs = zip(queries.split(size, dim=1), values.split(size, dim=1), strict=True)
                for some, result in pairs:
                    asked.begin()
                    result.copy_(asked.decode(field, some))

            seconds = clock(decode, setting, warmup=1, most=20)["ms"] / 1e3
        peak, given = peak_gib(device), (queries.nbytes + values.nbytes) / 2**30
        return {
            "path": each,
            "precision": number,
            "way": way,
            "queries": count,
            "at_once": size,
            "queries_per_second": count / seconds,
            "seconds": seconds,
            "peak_gib": peak,
            "beyond_gib": None if peak is None else peak - given,
        }

    def conclude(self, rows: list[Row], earlier: dict[str, list[Row]]) -> Conclusion:
        best = max(rows, key=lambda row: row["queries_per_second"], default=None)
        if best is None:
            return Conclusion()
        rate = best["queries_per_second"] / 1e6
        return Conclusion(lines=[f"best: {rate:.3g} million queries/s ({best['entry']})"])
