"""Full-size checks of the Darcy solver and law; prints a table, writes JSON rows.

    python benchmarks/darcy_check.py --device cpu --reference DIR --out darcy_check.json
    python benchmarks/darcy_check.py --device cuda --full --out darcy_check_gpu.json

Iterations and residual from 64 to 1,024 nodes; the time of 64 samples at 256 nodes; generation of
the data set (`--full`: 6,000 samples at 128 × 128) and its statistics; with `--reference`, a folder
that holds the published darcy_{train,test}_16.pt, the comparison with them. It needs
nothing besides what `fst` imports; PYTHONPATH=src does where the package is not installed.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from fst.data import darcy
from fst.data.darcy import iteration_bound

Row = dict[str, Any]

SEED = 2026
COARSE = 16  # the resolution at which the published files are compared


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
    darcy.solve(darcy.sample_coefficient(1, 64, SEED, device=device))  # libraries load here
    for nodes in (64, 128, 256, 512, 1024):
        yield iterations(nodes, device)
    yield sixty_four_at_256(device)
    fine = arguments.fine or (1024 if arguments.full else 512)
    count = 6000 if arguments.full else arguments.count
    row, inputs, solutions = generation(count, fine, device)
    yield row
    # 128 is 8 × 16, so every eighth node of the larger grid is the published smaller one.
    yield statistics("generated", inputs[:, ::8, ::8], solutions[:, ::8, ::8])
    if arguments.reference:
        yield from reference_rows(arguments.reference, device)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--reference", type=Path, help="folder of darcy_{train,test}_16.pt")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--full", action="store_true", help="generate 6,000 samples")
    parser.add_argument("--count", type=int, default=256, help="samples without --full")
    parser.add_argument("--fine", type=int, help="intervals of the fine grid (512; full: 1024)")
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


def iterations(nodes: int, device: torch.device) -> Row:
    count = 32 if device.type == "cuda" else 4
    coefficient = darcy.sample_coefficient(count, nodes, SEED, device=device)
    began = now(device)
    _, report = darcy.solve_with_report(coefficient)
    seconds = now(device) - began
    return {
        "check": "iterations",
        "nodes": nodes,
        "samples": count,
        "least": report.iterations.min().item(),
        "mean": report.iterations.double().mean().item(),
        "most": report.iterations.max().item(),
        "bound": iteration_bound(darcy.HIGH / darcy.LOW, nodes, darcy.TOLERANCE),
        "residual": report.residual.max().item(),
        "seconds": seconds,
    }


def sixty_four_at_256(device: torch.device) -> Row:
    began, work = now(device), time.process_time()
    coefficient = darcy.sample_coefficient(64, 256, SEED, device=device)
    _, report = darcy.solve_with_report(coefficient)
    return {
        "check": "64 samples at 256 nodes",
        "seconds": now(device) - began,
        "processor_seconds": time.process_time() - work,
        "residual": report.residual.max().item(),
    }


def generation(count: int, fine: int, device: torch.device) -> tuple[Row, Tensor, Tensor]:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    began = now(device)
    inputs, solutions = darcy.generate(count, 128, SEED, fine=fine, device=device)
    row = {
        "check": "generate at 128",
        "samples": count,
        "fine": fine,
        "seconds": now(device) - began,
    }
    if device.type == "cuda":
        row["peak_GiB"] = torch.cuda.max_memory_allocated(device) / 2**30
    return row, inputs, solutions


def statistics(name: str, inputs: Tensor, solutions: Tensor) -> Row:
    """Means over samples; each `_error` is the standard error of the number before it.

    The first line of nodes lies at 1/fine, so `mean_first_line` matches the published files only
    for a fine grid of 1,024 intervals.
    """
    down = (inputs[:, 1:] != inputs[:, :-1]).double().mean(dim=(1, 2))
    across = (inputs[:, :, 1:] != inputs[:, :, :-1]).double().mean(dim=(1, 2))
    solutions = solutions.double()
    row: Row = {"check": "statistics at 16", "of": name, "samples": len(inputs)}
    for label, values in (
        ("neighbours_differ", (down + across) / 2),
        ("fraction_true", inputs.double().mean(dim=(1, 2))),
        ("mean", solutions.mean(dim=(1, 2))),
        ("square", solutions.square().mean(dim=(1, 2))),
        ("mean_first_line", (solutions[:, 0] + solutions[:, :, 0]).mean(dim=1) / 2),
    ):
        row[label] = values.mean().item()
        row[f"{label}_error"] = (values.std() / len(values) ** 0.5).item()
    row["std"] = solutions.std().item()
    row["mean_where_true"] = solutions[inputs].mean().item()
    row["mean_where_false"] = solutions[~inputs].mean().item()
    row["negative_solutions"] = (solutions < 0).flatten(1).any(dim=1).double().mean().item()
    return row


def reference_rows(folder: Path, device: torch.device) -> Iterator[Row]:
    for name in ("train", "test"):
        path = folder / f"darcy_{name}_{COARSE}.pt"
        content = torch.load(path, weights_only=True)
        inputs, solutions = content["x"].bool(), content["y"]
        yield statistics(path.name, inputs, solutions)
        if name == "train":
            for polarity in (True, False):
                yield rebuilt(path.name, inputs[:200], solutions[:200], polarity, device)


def rebuilt(
    name: str, inputs: Tensor, solutions: Tensor, polarity: bool, device: torch.device
) -> Row:
    """The published inputs, interpolated to a finer grid, solved and compared with their solutions.

    Sixteen nodes do not hold the interfaces, so the comparison is rough sample by sample; the slope
    of the regression through the origin tells which value True stands for, and the scale.
    """
    nodes = 257
    axis = torch.linspace(0, 1, nodes, dtype=torch.float64)
    # Node j of the coarse grid lies at (1 + 64j)/1024; grid_sample wants −1..1 from first to last.
    coarse = (axis * 1024 - 1) / 64 * (2 / (COARSE - 1)) - 1
    points = torch.stack(torch.meshgrid(coarse, coarse, indexing="ij")[::-1], dim=-1)
    signs = inputs.double()[:, None] * 2 - 1
    grid = points.expand(len(inputs), -1, -1, -1)
    fine = grid_sample(signs, grid, padding_mode="border", align_corners=True)[:, 0]
    high = (fine > 0) == polarity
    coefficient = torch.full_like(fine, darcy.LOW).masked_fill_(high, darcy.HIGH).to(device)
    solved = torch.cat([darcy.solve(part).cpu() for part in coefficient.split(8)])
    kept = coarse_positions().expand(len(inputs), -1, -1, -1)
    values = grid_sample(solved[:, None], kept, align_corners=True)
    values, solutions = values.flatten(), solutions.double().flatten()
    return {
        "check": "published inputs solved",
        "of": name,
        "True is": darcy.HIGH if polarity else darcy.LOW,
        "samples": len(inputs),
        "mean_ratio": (solutions.mean() / values.mean()).item(),
        "slope": ((values @ solutions) / (values @ values)).item(),
        "correlation": torch.corrcoef(torch.stack([values, solutions]))[0, 1].item(),
    }


def coarse_positions() -> Tensor:
    """The coarse nodes as grid_sample's coordinates on a grid that spans [0,1]²."""
    axis = (1 + 64 * torch.arange(COARSE, dtype=torch.float64)) / 1024 * 2 - 1
    return torch.stack(torch.meshgrid(axis, axis, indexing="ij")[::-1], dim=-1)


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def show(row: Row) -> None:
    cells = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
        if name != "check"
    ]
    print(f"{row['check']:<24} " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
