"""Prediction: one solution on the whole grid, and very many queries of one field.

Refinement stands for all that is done before the first query, whatever the model.

Three ways to ask: `call` is the documented `model(observations)(queries)`, checked and in chunks;
`direct` skips the checks, draws FST's evaluation points once and decodes in one piece; `recorded`
replays CUDA graphs: `fst.CUDAGraphModel` for FST, the direct way for the plain path and the others.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from speed_setting import (
    Conclusion,
    Row,
    Section,
    Setting,
    clock,
    field_model,
    grid_queries,
    models,
    observations,
    operator,
    path,
    peak_gib,
    precision,
    recorded,
    release,
)

from fst import CUDAGraphModel, FunctionSpaceTransformer, kernels
from fst.operators import Operator

# Into how many equal pieces the many queries are cut where the field is asked directly.
PIECES = 40


@dataclass(frozen=True)
class Predictor:
    """One way to ask: everything, and its two parts."""

    whole: Callable[[], object]
    refine: Callable[[], object]
    decode: Callable[[], object]


def predictor(name: str, way: str, setting: Setting) -> Predictor:
    """A model with one set of observations, ready to be asked for the whole grid."""
    sizes, device = setting.sizes, setting.device
    network = asked_model(name, setting)
    given, queries = observations(sizes, 1, device), grid_queries(sizes.grid, device)
    ours = isinstance(network, FunctionSpaceTransformer)
    if way == "call" or (way == "recorded" and ours and kernels.fused(network)):
        ask = CUDAGraphModel(network) if way == "recorded" else network
        field = ask(given)
        return Predictor(lambda: ask(given)(queries), lambda: ask(given), lambda: field(queries))
    draws = network.draws_for(given) if ours else None
    output = network.represent(given, draws)
    calls = (
        lambda: network.represent(given, draws).decode(queries),
        lambda: network.represent(given, draws),
        lambda: output.decode(queries),
    )
    return Predictor(*(recorded(call, device) if way == "recorded" else call for call in calls))


def asked_model(name: str, setting: Setting) -> Operator:
    """Untrained; FST with the weights of `--run` where there are any, as in use."""
    if name == "fst" and setting.run is not None:
        return field_model(setting)
    return operator(setting.sizes.configs()[name], setting.device).eval()


def ways(setting: Setting) -> tuple[str, ...]:
    return ("recorded", "call") if setting.cuda else ("call",)


class Prediction(Section):
    """Milliseconds for one solution on the whole grid, as the host sees them."""

    name = "prediction"
    columns = ("entry", "queries", "whole_ms", "refinement_ms", "decoding_ms", "peak_gib")

    def entries(self, setting: Setting) -> list[str]:
        ours = [
            f"fst {each}, {number}, {way}"
            for number in setting.precisions
            for each in ("fast", "plain")
            for way in (*ways(setting), "direct")
        ]
        others = [name for name in models(setting) if name != "fst"]
        return ours + [
            f"{name}, {number}, {way}"
            for name in others
            for number in setting.precisions
            for way in ways(setting)
        ]

    @torch.no_grad()
    def measure(self, entry: str, setting: Setting) -> Row:
        called, number, way = entry.split(", ")
        name, *rest = called.split()
        each = rest[0] if rest else "fast"
        release(setting.device)
        with path(each), precision(number, setting.device):
            asked = predictor(name, way, setting)
            parts = {
                "whole": clock(asked.whole, setting),
                "refinement": clock(asked.refine, setting),
                "decoding": clock(asked.decode, setting),
            }
        row: Row = {
            "model": name,
            "path": each,
            "precision": number,
            "way": way,
            "trained": name == "fst" and setting.run is not None,
            "queries": setting.sizes.grid[0] * setting.sizes.grid[1],
        }
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
        return [f"{each}, {number}, {way}" for each in paths for way in ("direct", "call")]

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
            field = asked_model("fst", setting)(observations(setting.sizes, 1, device))
            ask = field if way == "call" else field.decode

            def decode() -> None:
                pairs = zip(queries.split(size, dim=1), values.split(size, dim=1), strict=True)
                for some, result in pairs:
                    result.copy_(ask(some))

            seconds = clock(decode, setting, warmup=1, most=20)["ms"] / 1e3
        peak, given = peak_gib(device), (queries.nbytes + values.nbytes) / 2**30
        return {
            "path": each,
            "precision": number,
            "way": way,
            "trained": setting.run is not None,
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
