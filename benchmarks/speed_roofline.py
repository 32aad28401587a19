"""What the hardware allows, and how much of it is reached.

Measured in the same run: the fastest large matrix product and the fastest large copy. Counted: the
operations in matrix products that a training step needs, and the bytes that it must move at least:

- every tensor kept for the backward pass of the uncompiled fast path, written once and read once;
- each parameter read in both passes, its gradient written and read, and by Adam the parameter and
  both moments read and written.

Neither may be quicker than its peak, so the longer of the two is the least time of a step.
"""

import statistics

import torch
from speed_growth import Counts, count_flops, problem
from speed_setting import (
    Conclusion,
    Row,
    Section,
    Setting,
    clock,
    operator,
    precision,
    release,
)
from speed_training import advance, trainer, training_settings
from torch import Tensor

from fst.metrics import squared_relative_l2

PRODUCT, COPY, STEP = "matrix product", "copy", "training step"
# Of one float32 parameter: value twice, gradient twice, then Adam's reads (4) and writes (3).
PARAMETER_BYTES = 4 * (2 + 2 + 4 + 3)


class Roofline(Section):
    """Peaks, counts, and the share of the peak that the steps of this run reach."""

    name = "roofline"
    columns = ("entry", "tera_per_second", "teraflop", "gigabytes", "ms")

    def entries(self, setting: Setting) -> list[str]:
        return [PRODUCT, COPY, STEP]

    def measure(self, entry: str, setting: Setting) -> Row:
        release(setting.device)
        if entry == PRODUCT:
            return matrix_product(setting)
        return copy(setting) if entry == COPY else step(setting)

    def conclude(self, rows: list[Row], earlier: dict[str, list[Row]]) -> Conclusion:
        found = {row["entry"]: row for row in rows}
        if not {PRODUCT, COPY, STEP} <= set(found):
            return Conclusion()
        flops, bandwidth = (found[name]["tera_per_second"] for name in (PRODUCT, COPY))
        counted = found[STEP]
        limits = {
            "arithmetic": counted["teraflop"] / flops,
            "memory": counted["gigabytes"] / 1e3 / bandwidth,
        }
        bound = max(limits, key=lambda name: limits[name])
        least = limits[bound]
        timed = [row for row in earlier.get("training", []) if row["model"] == "fst"]
        steps = {f"training, {row['entry']}": row["ms"] for row in timed}
        steps = steps or {"training, fst, fast, eager": counted["ms"]}
        shares: list[Row] = [
            {
                "entry": name,
                "ms": ms,
                "least_ms": 1e3 * least,
                "teraflop_per_second": 1e3 * counted["teraflop"] / ms,
                "share_of_arithmetic": 1e3 * limits["arithmetic"] / ms,
                "share_of_memory": 1e3 * limits["memory"] / ms,
                "share_of_limit": 1e3 * least / ms,
            }
            for name, ms in steps.items()
        ]
        shares += [_decoding(row, counted, flops) for row in earlier.get("decoding", [])]
        line = (
            f"a training step: {counted['teraflop']:.3g} TFLOP in matrix products, at least "
            f"{counted['gigabytes']:.3g} GB moved; measured peaks {flops:.3g} TFLOP/s and "
            f"{bandwidth:.3g} TB/s allow {1 / least:.3g} steps/s, limited by {bound}"
        )
        return Conclusion(shares, [line])


def _decoding(row: Row, counted: Row, flops: float) -> Row:
    """Many queries of one field: arithmetic alone, for a field is small."""
    needed = row["queries"] * counted["flop_per_query"] / 1e12
    return {
        "entry": f"decoding, {row['entry']}",
        "ms": 1e3 * row["seconds"],
        "least_ms": 1e3 * needed / flops,
        "teraflop_per_second": needed / row["seconds"],
        "share_of_arithmetic": needed / row["seconds"] / flops,
        "share_of_limit": needed / row["seconds"] / flops,
    }


def matrix_product(setting: Setting) -> Row:
    size = setting.sizes.matrix
    dtype = torch.bfloat16 if setting.cuda else torch.float32
    left, right, out = (torch.randn(size, size, device=setting.device).to(dtype) for _ in range(3))
    times = clock(lambda: torch.mm(left, right, out=out), setting)
    teraflop = 2 * size**3 / 1e12
    return {
        "size": size,
        "dtype": str(dtype).removeprefix("torch."),
        **times,
        "teraflop": teraflop,
        "tera_per_second": 1e3 * teraflop / _fastest(times),
    }


def copy(setting: Setting) -> Row:
    source = torch.zeros(setting.sizes.copied, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    times = clock(lambda: target.copy_(source), setting)
    gigabytes = 2 * setting.sizes.copied / 1e9
    return {**times, "gigabytes": gigabytes, "tera_per_second": gigabytes / _fastest(times)}


def _fastest(times: Row) -> float:
    """Milliseconds of one call; on a GPU without the host's share."""
    return times["least_ms"] if times["least_device_ms"] is None else times["least_device_ms"]


def step(setting: Setting) -> Row:
    """Counts of one step of training FST, and its time uncompiled."""
    counts = Counts.of(setting.sizes)
    flops = count_flops(counts)
    one = Counts(1, counts.observations, counts.queries, counts.config)
    per_query = count_flops(one, backward=False)["decoding"] / counts.queries
    parameters, kept = kept_bytes(counts, setting)
    release(setting.device)
    settings = training_settings(setting, compiled=False, steps=100_000)
    training = trainer("fst", setting, settings, setting.sizes.samples)
    advance(training, 3)
    times = [advance(training, 3) / 3 for _ in range(3)]
    return {
        "teraflop": sum(flops.values()) / 1e12,
        "flops": flops,
        "flop_per_query": per_query,
        "parameter_bytes": parameters * PARAMETER_BYTES,
        "kept_bytes": kept,
        "gigabytes": (2 * kept + parameters * PARAMETER_BYTES) / 1e9,
        "precision": settings.precision,
        "ms": 1e3 * statistics.median(times),
    }


def kept_bytes(counts: Counts, setting: Setting) -> tuple[int, int]:
    """Parameters, and bytes that the backward pass finds kept: every storage once, no parameter."""
    device = setting.device
    network = operator(counts.config, device)
    stream = network.point_stream(0, 1)
    assert stream is not None
    draws = stream.draw().to(device, torch.float32)
    given, queries, targets = problem(counts, device)
    parameters = {each.untyped_storage().data_ptr() for each in network.parameters()}
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        # Kept storages live until the backward pass, so that no address serves twice.
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with precision(setting.precisions[0], device):
            values = network.represent(given, draws).decode(queries)
        loss = squared_relative_l2(values, targets).mean()
    del loss
    return sum(each.numel() for each in network.parameters()), sum(storages.values())
