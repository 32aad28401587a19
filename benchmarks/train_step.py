"""Training steps a second and peak memory of FST and the four baselines, side by side.

    python benchmarks/train_step.py --device cuda --out train_step.json
    python benchmarks/train_step.py --device cuda --tasks darcy --models fst fno --compile
    python benchmarks/train_step.py --device cpu --steps 3 --warmup 1

On a GPU the sizes are the paper's: batch 48, 1,424 observations and 2,500 queries for Burgers
(FNO: its whole 201 × 1,024 grid), the whole 128 × 128 grid for Darcy, BF16 autocast (FNO's Fourier
transforms in FP32). On a CPU grids, batch and queries are reduced and the precision is FP32; the
widths stay. A step is forward, loss, backward and Adam on values drawn at random: time and memory
do not depend on them. It needs nothing besides what `fst` imports, and neuraloperator for FNO;
PYTHONPATH=src does where the package is not installed.
"""

import argparse
import dataclasses
import gc
import json
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fst import FunctionSpaceConfig, Observations, model, parameter_count
from fst.base import PointDraws
from fst.baselines import (
    DeepONetConfig,
    FNOConfig,
    GridTransolverConfig,
    PerceiverIOConfig,
    TransolverConfig,
    build,
)
from fst.data.views import (
    boundary_observation_indices,
    index_coordinates,
    index_product,
    subset_indices,
)
from fst.metrics import squared_relative_l2
from fst.operators import Operator

Row = dict[str, Any]

SEED = 2026091311
WITH_VISCOSITY = {"condition_channels": 1, "log_condition": True}


@dataclasses.dataclass(frozen=True)
class Size:
    """How large a task is."""

    grid: tuple[int, int]
    supervision: tuple[int, int]
    batch: int
    queries: int | None


PAPER = {
    "burgers-single": Size((201, 1024), (100, 100), 48, 2_500),
    "burgers-all": Size((201, 1024), (100, 100), 48, 2_500),
    "darcy": Size((128, 128), (128, 128), 48, None),
}
REDUCED = {
    "burgers-single": Size((33, 64), (32, 32), 2, 256),
    "burgers-all": Size((33, 64), (32, 32), 2, 256),
    "darcy": Size((32, 32), (32, 32), 2, None),
}


def builders(task: str, size: Size) -> dict[str, Callable[[], Operator]]:
    """Every model of a task, at the paper's widths."""
    grid, places = size.grid, size.grid[0] * size.grid[1]
    if task == "darcy":
        fno = FNOConfig(grid=grid, modes=(16, 16), width=50, mask_channel=False)
        deep = DeepONetConfig(
            observations=places, branch=(160, 256, 256, 256), trunk=(256, 256, 256, 256)
        )
        return {
            "fst": lambda: model.build(FunctionSpaceConfig()),
            "fno": lambda: build(fno),
            "perceiver-io": lambda: build(PerceiverIOConfig()),
            "transolver": lambda: build(GridTransolverConfig(grid=grid)),
            "deeponet": lambda: build(deep),
        }
    if task == "burgers-all":
        return {
            "fst": lambda: model.build(FunctionSpaceConfig(**WITH_VISCOSITY)),
            "fno": lambda: build(FNOConfig(grid=grid, **WITH_VISCOSITY)),
            "perceiver-io": lambda: build(PerceiverIOConfig(**WITH_VISCOSITY)),
        }
    observed = len(boundary_observation_indices(*grid))
    return {
        "fst": lambda: model.build(FunctionSpaceConfig()),
        "fno": lambda: build(FNOConfig(grid=grid)),
        "perceiver-io": lambda: build(PerceiverIOConfig()),
        "transolver": lambda: build(TransolverConfig()),
        "deeponet": lambda: build(DeepONetConfig(observations=observed)),
    }


@dataclasses.dataclass(frozen=True)
class Problem:
    """One batch, on one device."""

    observations: Observations
    queries: Tensor
    targets: Tensor


def problem(task: str, name: str, size: Size, device: torch.device) -> Problem:
    """Observations where the data have them, queries where the paper supervises this model."""
    torch.manual_seed(SEED)
    whole = index_product(tuple(torch.arange(points) for points in size.grid))
    observed = whole if task == "darcy" else boundary_observation_indices(*size.grid)
    positions = index_coordinates(observed, size.grid).expand(size.batch, -1, -1)
    condition = None
    if task == "burgers-all":
        condition = torch.logspace(-3, 0.6, size.batch)[:, None].to(device)
    axes = tuple(map(subset_indices, size.grid, size.supervision))
    asked = whole if name == "fno" else index_product(axes)
    places = index_coordinates(asked, size.grid).expand(size.batch, -1, -1)
    if name != "fno" and size.queries is not None:
        chosen = torch.rand(places.shape[:2]).argsort(dim=1)[:, : size.queries, None]
        places = places.gather(1, chosen.expand(-1, -1, 2))
    return Problem(
        Observations(
            positions.to(device), torch.randn(*positions.shape[:2], 1, device=device), condition
        ),
        places.to(device),
        torch.randn(*places.shape[:2], 1, device=device),
    )


class Loss(nn.Module):
    """What is differentiated, as one module for the compiler."""

    def __init__(self, operator: Operator) -> None:
        super().__init__()
        self.operator = operator

    def forward(
        self, observations: Observations, queries: Tensor, targets: Tensor, draws: PointDraws | None
    ) -> Tensor:
        prediction = self.operator.represent(observations, draws).decode(queries)
        return squared_relative_l2(prediction, targets).mean()


def steps(operator: Operator, given: Problem, arguments: argparse.Namespace) -> Iterator[None]:
    """Training steps without end."""
    device = torch.device(arguments.device)
    parameters = list(operator.parameters())
    # The fused update takes no complex weights, which FNO has.
    fused = all(p.is_cuda and p.is_floating_point() for p in parameters)
    optimizer = torch.optim.Adam(parameters, lr=1e-4, fused=fused)
    loss: nn.Module = Loss(operator)
    if arguments.compile:
        loss.compile()
    stream = operator.point_stream(SEED, SEED + 1)
    while True:
        draws = None if stream is None else stream.draw().to(device, torch.float32)
        half = arguments.precision == "bf16"
        with torch.autocast(device.type, torch.bfloat16) if half else nullcontext():
            value = loss(given.observations, given.queries, given.targets, draws)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(operator: Operator, given: Problem, arguments: argparse.Namespace) -> Row:
    device = torch.device(arguments.device)
    run = steps(operator, given, arguments)
    started = time.perf_counter()
    for _ in range(arguments.warmup):
        next(run)
    synchronize(device)
    warm = time.perf_counter()
    if (
        device.type == "cuda"
    ):  # after warming up: compilation measures candidates, training does not
        torch.cuda.reset_peak_memory_stats()
    for _ in range(arguments.steps):
        next(run)
    synchronize(device)
    seconds = time.perf_counter() - warm
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return {
        "warmup_seconds": round(warm - started, 3),
        "seconds": round(seconds, 4),
        "steps_per_second": round(arguments.steps / seconds, 3),
        "peak_gib": None if peak is None else round(peak, 2),
    }


def row(task: str, name: str, arguments: argparse.Namespace) -> Row:
    """One model's measurement, or why there is none: the others' rows must not be lost."""
    device = torch.device(arguments.device)
    size = (PAPER if device.type == "cuda" else REDUCED)[task]
    size = dataclasses.replace(size, batch=arguments.batch or size.batch)
    result: Row = {"task": task, "model": name, "batch": size.batch, "error": None}
    try:
        operator = builders(task, size)[name]().to(device)
        given = problem(task, name, size, device)
        result["parameters"] = parameter_count(operator)
        result["observations"] = given.observations.positions.shape[1]
        result["queries"] = given.queries.shape[1]
        result.update(measure(operator, given, arguments))
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def conditions(arguments: argparse.Namespace) -> Row:
    """What every row was measured with."""
    try:
        neuraloperator = metadata.version("neuraloperator")
    except metadata.PackageNotFoundError:
        neuraloperator = None
    cuda = arguments.device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "threads": None if cuda else torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "neuraloperator": neuraloperator,
        "precision": arguments.precision,
        "compiled": arguments.compile,
        "steps": arguments.steps,
        "warmup": arguments.warmup,
    }


def show(result: Row) -> None:
    line = f"{result['task']:15} {result['model']:13}"
    if result["error"]:
        print(f"{line} {result['error']}", flush=True)
        return
    peak = "-" if result["peak_gib"] is None else f"{result['peak_gib']:.2f}"
    print(
        f"{line} {result['parameters']:>10,} {result['observations']:>7,} {result['queries']:>8,} "
        f"{result['steps_per_second']:>8.2f} {peak:>9}",
        flush=True,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    available = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=available)
    parser.add_argument("--tasks", nargs="+", choices=list(PAPER), default=list(PAPER))
    parser.add_argument("--models", nargs="+", help="such as fst fno; all when not given")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--batch", type=int, help="solutions in a step; the paper's when not given")
    parser.add_argument("--precision", choices=["bf16", "fp32"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.warmup < 1:
        parser.error("--steps and --warmup must be at least 1")
    if arguments.precision is None:
        arguments.precision = "bf16" if arguments.device.startswith("cuda") else "fp32"
    return arguments


def main() -> None:
    arguments = parse_arguments()
    shared = conditions(arguments)
    print(", ".join(f"{name} {value}" for name, value in shared.items()))
    header = ("task", "model", "parameters", "observed", "queries", "steps/s", "peak GiB")
    print("{:15} {:13} {:>10} {:>7} {:>8} {:>8} {:>9}".format(*header))
    rows = []
    for task in arguments.tasks:
        size = PAPER[task]
        for name in builders(task, size):
            if arguments.models and name not in arguments.models:
                continue
            rows.append({**row(task, name, arguments), **shared})
            show(rows[-1])
            if arguments.out:
                arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
