"""Full-size checks of the Burgers solver and law; prints a table, writes JSON rows.

    python benchmarks/burgers_check.py --device cpu --reference DIR --out burgers_check.json
    python benchmarks/burgers_check.py --device cuda --full --out burgers_check_gpu.json

The law's statistics; relative L2 over whole trajectories (201 times, 1,024 cells) against the
Cole-Hopf solution; order of convergence on smooth data; with `--reference`, a folder of PDEBench
trajectories named nu{ν}.npz (`u`, `t`), the distance to them; the time of 64 trajectories at two
viscosities; generation of the data set of all viscosities (`--full`: 26,200 trajectories, results
dropped). It needs nothing besides what `fst` imports; PYTHONPATH=src does where the package is
not installed.
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from fst.data import burgers
from fst.data.cole_hopf import exact_solution

Row = dict[str, Any]

SEED = 2026
POINTS = 1024
EVERYTHING = 26_200


def main() -> None:
    arguments = parse_arguments()
    rows = []
    for row in checks(arguments, torch.device(arguments.device)):
        show(row)
        rows.append(row)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


def checks(arguments: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    yield hardware(device)
    yield law()
    burgers.solve(burgers.sample_initial(2, 64, SEED).to(device), 0.1, burgers.saved_times(2))
    yield from two_viscosities(device)
    if arguments.reference:
        yield from reference_rows(arguments.reference, device)
    yield from convergence(device)
    samples = arguments.samples or (64 if arguments.full else 16)
    for viscosity in arguments.viscosities:
        yield accuracy(viscosity, samples, arguments.every, device)
    yield generation(EVERYTHING if arguments.full else arguments.count, arguments.batch, device)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--reference", type=Path, help="folder of nu{ν}.npz")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--full", action="store_true", help=f"generate {EVERYTHING} trajectories")
    parser.add_argument("--count", type=int, default=120, help="trajectories without --full")
    parser.add_argument("--batch", type=int, default=2184, help="trajectories solved together")
    parser.add_argument("--samples", type=int, help="compared with Cole-Hopf (16; full: 64)")
    parser.add_argument("--every", type=int, default=1, help="compare every so many saved times")
    parser.add_argument(
        "--viscosities",
        type=float,
        nargs="*",
        default=[0.001, 0.002, 0.004, 0.01, 0.1, 1.0, 4.0],
        help="compared with Cole-Hopf",
    )
    return parser.parse_args()


def hardware(device: torch.device) -> Row:
    cuda = device.type == "cuda"
    return {
        "check": "hardware",
        "device": torch.cuda.get_device_name(device) if cuda else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def law() -> Row:
    watch = Stopwatch(torch.device("cpu"))
    values = burgers.sample_initial(10_000, POINTS, SEED)
    return {
        "check": "law, 10,000 samples",
        "least": values.min().item(),
        "greatest": values.max().item(),
        "deviation": values.std().item(),
        **watch.read(),
    }


def two_viscosities(device: torch.device) -> Iterator[Row]:
    initial = burgers.sample_initial(64, POINTS, SEED).to(device)
    taken = {}
    for viscosity in (0.01, 4.0):
        watch = Stopwatch(device)
        burgers.solve(initial, viscosity, burgers.saved_times())
        taken[viscosity] = watch.read()
        yield {"check": "64 trajectories", "viscosity": viscosity, **taken[viscosity]}
    ratio = taken[4.0]["seconds"] / taken[0.01]["seconds"]
    yield {"check": "time at 4 over time at 0.01", "ratio": ratio}


def reference_rows(folder: Path, device: torch.device) -> Iterator[Row]:
    for path in sorted(folder.glob("nu*.npz")):
        with numpy.load(path, allow_pickle=False) as file:
            expected = torch.from_numpy(file["u"]).double().to(device)
            times = torch.from_numpy(file["t"]).double()
        viscosity = float(path.stem.removeprefix("nu"))
        solution = burgers.solve(expected[:, 0], viscosity, times)
        errors = relative_l2(solution, expected)
        exact = exact_solution(expected[:, 0], viscosity, times, burgers.cell_centers(POINTS))
        yield {
            "check": "distance to PDEBench",
            "viscosity": viscosity,
            "trajectories": len(errors),
            "together": ((solution - expected).norm() / expected.norm()).item(),
            "worst": max(errors),
            "of the exact solution": max(relative_l2(exact, expected)),
        }


def convergence(device: torch.device) -> Iterator[Row]:
    """sin(2πx) until just before its shock would form.

    At the smallest ν the order jumps once, where the solver begins to divide cells.
    """
    times = torch.tensor([0.0, 0.05, 0.1, 0.15], dtype=torch.float64)
    for viscosity in (0.001, 0.01, 0.1):
        errors = []
        for points in (64, 128, 256, 512, 1024):
            centers = burgers.cell_centers(points).to(device)
            initial = torch.sin(2 * math.pi * centers)[None]
            exact = exact_solution(initial, viscosity, times, centers)
            errors += relative_l2(burgers.solve(initial, viscosity, times), exact)
        orders = [math.log2(a / b) for a, b in pairwise(errors)]
        yield {
            "check": "order, 64 to 1,024 cells",
            "viscosity": viscosity,
            "orders": orders,
            "error at 1,024": errors[-1],
        }


def accuracy(viscosity: float, samples: int, every: int, device: torch.device) -> Row:
    initial = burgers.sample_initial(samples, POINTS, SEED).to(device)
    watch = Stopwatch(device)
    solution = burgers.solve(initial, viscosity, burgers.saved_times())
    taken = watch.read()
    times = burgers.saved_times()[::every]
    exact = exact_solution(initial, viscosity, times, burgers.cell_centers(POINTS))
    errors = relative_l2(solution[:, ::every], exact)
    variation = (solution.roll(-1, dims=2) - solution).abs().sum(dim=2)
    growth = (variation[:, 1:] - variation[:, :-1]) / variation[:, :1]
    drift = solution.mean(dim=2) - initial.mean(dim=1, keepdim=True)
    return {
        "check": "error against Cole-Hopf",
        "viscosity": viscosity,
        "samples": samples,
        "mean": sum(errors) / samples,
        "worst": max(errors),
        "growth of variation": growth.max().item(),
        "drift of mean": drift.abs().max().item(),
        **taken,
    }


def generation(count: int, batch: int, device: torch.device) -> Row:
    """All viscosities in equal parts; results in float32, as files store them, then dropped."""
    watch = Stopwatch(device)
    each, left = divmod(count, len(burgers.VISCOSITIES))
    slowest = 0.0
    for index, viscosity in enumerate(burgers.VISCOSITIES):
        part = Stopwatch(device)
        rows = each + (index < left)
        for start in range(0, rows, batch):
            number = min(batch, rows - start)
            initial = burgers.sample_initial(number, POINTS, SEED, start=start).to(device)
            solution = burgers.solve(initial, viscosity, burgers.saved_times()).float()
            if not solution.isfinite().all():
                raise ArithmeticError(f"viscosity {viscosity}: the solution is not finite")
        slowest = max(slowest, part.read()["seconds"])
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    return {
        "check": "generation of all viscosities",
        "trajectories": count,
        **watch.read(),
        "slowest viscosity": slowest,
        "peak GiB": peak,
    }


class Stopwatch:
    """Seconds by the wall and by the processors since it was made, once the device is done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.start = self._now()

    def read(self) -> dict[str, float]:
        wall, processor = self._now()
        return {"seconds": wall - self.start[0], "CPU seconds": processor - self.start[1]}

    def _now(self) -> tuple[float, float]:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter(), time.process_time()


def relative_l2(solution: Tensor, exact: Tensor) -> list[float]:
    difference = (solution - exact).flatten(start_dim=1).norm(dim=1)
    return (difference / exact.flatten(start_dim=1).norm(dim=1)).tolist()


def show(row: Row) -> None:
    cells = [f"{row['check']:30}"]
    for name, value in row.items():
        if name == "check" or value is None:
            continue
        if isinstance(value, list):
            value = " ".join(f"{entry:.3g}" for entry in value)
        cells.append(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}")
    print("  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
