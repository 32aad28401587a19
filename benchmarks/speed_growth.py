"""How the cost of a forward and backward pass grows with N, M, S and Q, against the paper's order

    C = R (M N + M S + S² + M²) + M Q.

One size at a time is doubled around the paper's. The part of the cost that depends on it has the
exponent p of the best fit of a + b xᵖ; C is fitted at the same sizes in the same way, and so are
the counted operations. The local exponent, d log cost / d log x, is that of the whole cost.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from speed_setting import (
    Conclusion,
    Row,
    Section,
    Setting,
    clock,
    observed_positions,
    operator,
    peak_gib,
    precision,
    recorded,
    release,
    waves,
)
from speed_sizes import Sizes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fst import FunctionSpaceConfig, FunctionSpaceTransformer, Observations, kernels
from fst.evaluation_points import PointDraws
from fst.metrics import squared_relative_l2

AXES = {"N": "observations", "M": "anchors", "S": "evaluation points", "Q": "queries"}


@dataclass(frozen=True)
class Counts:
    """The sizes that the cost depends on."""

    batch: int
    observations: int
    queries: int
    config: FunctionSpaceConfig

    @classmethod
    def of(cls, sizes: Sizes) -> "Counts":
        observed = len(observed_positions(sizes, torch.device("cpu")))
        return cls(sizes.batch, observed, sizes.queries, sizes.fst)

    def grown(self, axis: str, factor: float) -> "Counts":
        config = self.config
        match axis:
            case "N":
                return replace(self, observations=int(factor * self.observations))
            case "M":  # more rows: the predictor's tokens, one for each gap of a row, stay as many
                rows = (int(factor * config.rows[0]), *config.rows[1:])
                return replace(self, config=replace(config, rows=rows))
            case "S":
                more = replace(
                    config,
                    points_from_anchors=int(factor * config.points_from_anchors),
                    points_from_sobol=int(factor * config.points_from_sobol),
                )
                return replace(self, config=more)
            case _:
                return replace(self, queries=int(factor * self.queries))

    @property
    def letters(self) -> dict[str, int]:
        config = self.config
        points = config.points_from_anchors + config.points_from_sobol
        return {"N": self.observations, "M": config.anchors, "S": points, "Q": self.queries}

    @property
    def order(self) -> int:
        """The paper's C."""
        n, m, s, q = (self.letters[letter] for letter in AXES)
        return self.config.refinement_steps * (m * n + m * s + s**2 + m**2) + m * q


def _attention_flops(query: list[int], key: list[int], *_: object, **__: object) -> int:
    batch, heads, rows, size = query
    return 4 * batch * heads * rows * key[2] * size


def _attention_backward_flops(
    _: object, query: list[int], key: list[int], *__: object, **___: object
) -> int:
    return 2 * _attention_flops(query, key)


_aten = torch.ops.aten
# PyTorch counts these on a GPU only, and there with the recomputation that saves memory.
ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


def count_flops(counts: Counts, *, backward: bool = True) -> dict[str, int]:
    """Operations in matrix products that the equations need, in refinement and in decoding.

    Counted on tensors without memory along the plain path: no padding, nothing computed twice.
    Exponentials, norms and the like are left out.
    """
    config, batch = counts.config, counts.batch
    axes = len(config.low)
    steps = config.refinement_steps
    with FakeTensorMode():
        network = kernels.fuse(FunctionSpaceTransformer(config))
        given = Observations(
            torch.empty(batch, counts.observations, axes),
            torch.empty(batch, counts.observations, config.value_channels),
        )
        draws = PointDraws(
            torch.zeros(steps, config.points_from_anchors, dtype=torch.long),
            torch.empty(steps, config.points_from_sobol, axes),
        )
        asked = torch.empty(batch, counts.queries, axes)
        with FlopCounterMode(display=False, custom_mapping=ATTENTION) as refinement:
            field = network.represent(given, draws)
        with FlopCounterMode(display=False, custom_mapping=ATTENTION) as decoding:
            values = field.decode(asked)
        with FlopCounterMode(display=False, custom_mapping=ATTENTION) as gradients:
            if backward:
                values.sum().backward()
    return {
        "refinement": refinement.get_total_flops(),
        "decoding": decoding.get_total_flops(),
        "backward": gradients.get_total_flops(),
    }


def part_exponent(sizes: list[float], costs: list[float]) -> float | None:
    """The exponent p of the best fit of a + b xᵖ, a and b not negative; None where there is none.

    Where the part is small or the clock is noisy, the best exponent lies at an end of the range.
    """
    x, cost = np.asarray(sizes) / sizes[0], np.asarray(costs) / costs[0]
    best = (np.inf, np.nan)
    tried = np.arange(0.02, 4.0, 0.02)
    for p in tried:
        basis = np.stack((np.ones_like(x), x**p), axis=1)
        share = np.clip(
            np.linalg.lstsq(basis / cost[:, None], np.ones_like(x), rcond=None)[0], 0, None
        )
        best = min(best, (float(np.square(basis @ share / cost - 1).sum()), float(p)))
    return best[1] if tried[0] < best[1] < tried[-1] else None


def local_exponent(sizes: list[float], costs: list[float]) -> float:
    """The slope of log cost over log size, by least squares over all sizes."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


class Growth(Section):
    """Milliseconds of a forward and backward pass of the fast path, uncompiled.

    On a GPU it is recorded once and replayed: the host would take longer than the GPU.
    """

    name = "growth"
    columns = ("entry", "size", "ms", "device_ms", "gigaflops", "order", "peak_gib")

    def entries(self, setting: Setting) -> list[str]:
        factors = setting.sizes.growth
        # The paper's own size is the same on every axis.
        return [
            f"{axis} × {factor}"
            for axis in AXES
            for factor in factors
            if factor != 1 or axis == "N"
        ]

    def measure(self, entry: str, setting: Setting) -> Row:
        axis, factor = entry.split(" × ")
        counts = Counts.of(setting.sizes).grown(axis, float(factor))
        device, number = setting.device, setting.precisions[0]
        release(device)
        network = operator(counts.config, device)
        stream = network.point_stream(0, 1)
        assert stream is not None
        draws = stream.draw().to(device, torch.float32)
        given, queries, targets = problem(counts, device)

        def step() -> None:
            with precision(number, device):
                values = network.represent(given, draws).decode(queries)
            squared_relative_l2(values, targets).mean().backward()
            network.zero_grad()

        times = clock(recorded(step, device), setting, most=50)
        return {
            "axis": axis,
            "factor": float(factor),
            "size": counts.letters[axis],
            **counts.letters,
            "precision": number,
            **times,
            "gigaflops": sum(count_flops(counts).values()) / 1e9,
            "order": counts.order,
            "peak_gib": peak_gib(device),
        }

    def conclude(self, rows: list[Row], earlier: dict[str, list[Row]]) -> Conclusion:
        fitted = []
        for axis, meaning in AXES.items():
            found = [row for row in rows if row["axis"] == axis or row["factor"] == 1]
            if len(found) < 3:
                continue
            found.sort(key=lambda row: row["factor"])
            x = [float(row[axis]) for row in found]
            costs = {
                "time": [row["ms"] for row in found],
                "operations": [row["gigaflops"] for row in found],
                "paper": [float(row["order"]) for row in found],
            }
            row: Row = {"entry": f"{axis}, {meaning}"}
            row |= {f"{name}_local": local_exponent(x, cost) for name, cost in costs.items()}
            row |= {f"{name}_part": part_exponent(x, cost) for name, cost in costs.items()}
            fitted.append(row)
        return Conclusion(fitted)


def problem(
    counts: Counts, device: torch.device
) -> tuple[Observations, torch.Tensor, torch.Tensor]:
    """Waves observed and asked anywhere."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.rand(counts.observations + counts.queries, 2, generator=generator).to(device)
    values = waves(counts.batch, positions)[..., None]
    sizes = (counts.observations, counts.queries)
    (seen, asked), (given, targets) = positions.split(sizes), values.split(sizes, dim=1)
    seen, asked = (some.expand(counts.batch, -1, -1) for some in (seen, asked))
    return Observations(seen, given), asked, targets
