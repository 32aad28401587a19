"""Training steps a second of one process alone and of one in a group, and the losses of two.

    python benchmarks/ddp.py --out results/speed-h200/ddp.json

Every step goes through `fst.training.trainer.Trainer`, with the settings of a recipe and made-up
solutions. Three ways to train take turns on one GPU, and the table gives medians:

- alone: one process without a group, as `fst train` on one GPU;
- in a group: one process in a group of one, which exchanges its gradient in every step, as each
  process of several does;
- DDP, not compiled: the same group by `DistributedDataParallel`, as it was before.

Then torchrun starts two processes that share the GPU (over gloo: NCCL wants a GPU for each), and
their losses are compared with those of one.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import fst
from fst.data import BurgersSamples
from fst.recipes import find
from fst.training.loop import build_accelerator, end_processes
from fst.training.run_folder import describe_environment
from fst.training.settings import TrainingSettings
from fst.training.trainer import Trainer

WARMUP = 10
SMALL = {"width": 16, "heads": 2, "fourier_bands": 4, "rows": (4,), "anchors_per_row": 4}
SMALL |= {"predictor_width": 8, "predictor_heads": 2, "predictor_blocks": 1}
SMALL |= {"refinement_steps": 2, "points_from_anchors": 8, "points_from_sobol": 8}


def waves(count: int, grid: tuple[int, int]) -> BurgersSamples:
    """Travelling waves where solutions would be: training takes the same time on them."""
    random = torch.Generator().manual_seed(0)
    amplitude, number, speed = torch.rand(3, count, 1, 1, generator=random)
    t, x = torch.linspace(0, 2, grid[0])[:, None], torch.linspace(0, 1, grid[1])
    waves = (0.5 + amplitude) * torch.sin(6.3 * (1 + (3 * number).floor()) * (x - speed * t))
    return BurgersSamples.from_solutions(waves)


def trainer(asked: argparse.Namespace, **changes: Any) -> Trainer:
    recipe = find(asked.recipe)
    settings: TrainingSettings = replace(recipe.training, augment=False, **changes)
    sizes = {}
    if asked.quick:
        settings = replace(settings, batch_size=8, queries=64)
        sizes = SMALL
    samples = waves(4 * settings.batch_size, (21, 64) if asked.quick else (201, 1024))
    torch.manual_seed(0)
    model = fst.build(asked.recipe, **sizes)
    model.fit_statistics(samples)
    device = torch.device(asked.device)
    data = samples.to(device)
    return Trainer(model, data, data, settings, build_accelerator(settings, device))


def steps_per_second(training: Trainer, seconds: float) -> float:
    start, steps = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(min(20, training.settings.log_every)):
            training.update()
            steps += 1
        training.read()  # waits for the device
    return steps / (time.perf_counter() - start)


def losses(training: Trainer, steps: int) -> list[float]:
    for step in range(1, steps + 1):
        training.update()
        if step % training.settings.log_every == 0:
            training.read()
    training.read()
    return [loss for loss, _ in training.state.pending]


def join_group_of_one(device: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=0,
        world_size=1,
    )


def speed(asked: argparse.Namespace) -> dict[str, list[float]]:
    compiled = asked.device == "cuda" if asked.compile is None else asked.compile
    ways = {
        "alone": trainer(asked, compile=compiled),
        "in a group": trainer(asked, compile=compiled),
    }
    join_group_of_one(asked.device)
    ways["in a group"].exchange = distributed.all_reduce
    wrapped = ways["DDP, not compiled"] = trainer(asked, compile=False)
    wrapped.module = DistributedDataParallel(wrapped.module, gradient_as_bucket_view=True)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for training in ways.values():
        losses(training, WARMUP)
    for _ in range(asked.passes):
        for name, training in ways.items():
            found[name].append(steps_per_second(training, asked.seconds))
    distributed.destroy_process_group()
    return found


def agreement(asked: argparse.Namespace) -> dict[str, float]:
    """The largest relative difference between the losses of two processes and of one."""
    found = {}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "losses.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        command += ["--master-addr=127.0.0.1", f"--master-port={port}", __file__, "--worker"]
        command += ["--recipe", asked.recipe, "--device", asked.device, "--steps", str(asked.steps)]
        command += ["--quick"] * asked.quick
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if asked.device == "cpu":
            environment["ACCELERATE_USE_CPU"] = "1"
        subprocess.run([*command, "--out", str(out)], check=True, env=environment)
        together = json.loads(out.read_text())
    for precision, two in together.items():
        one = losses(trainer(asked, compile=False, precision=precision), asked.steps)
        pairs = zip(one, two, strict=True)
        found[precision] = max(abs(b - a) / abs(a) for a, b in pairs)
    return found


def worker(asked: argparse.Namespace) -> None:
    """One of two processes: losses in float32 and, on a GPU, with the fused kernels."""
    distributed.init_process_group("gloo")
    precisions = ["fp32", "bf16"] if asked.device == "cuda" else ["fp32"]
    found = {
        precision: losses(trainer(asked, compile=False, precision=precision), asked.steps)
        for precision in precisions
    }
    if distributed.get_rank() == 0:
        asked.out.write_text(json.dumps(found))
    end_processes(0)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="fast/burgers-single/fst")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction)
    parser.add_argument("--seconds", type=float, default=2.5, help="of each pass")
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20, help="whose losses are compared")
    parser.add_argument("--quick", action="store_true", help="a tiny model, for a test")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(arguments)
    if asked.worker:
        worker(asked)
    pace = speed(asked)
    median = {name: statistics.median(found) for name, found in pace.items()}
    device = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    print(f"{asked.recipe} on {device}, torch {torch.__version__}")
    print("| one process | steps a second | slowest to fastest pass | of alone |")
    print("|---|---|---|---|")
    for name, found in pace.items():
        share, spread = median[name] / median["alone"], f"{min(found):.2f} to {max(found):.2f}"
        print(f"| {name} | {median[name]:.2f} | {spread} | {share:.1%} |")
    row = {"environment": describe_environment(), "device": device, "steps_per_second": pace}
    if asked.out is not None:  # what is known so far, should the second part fail
        asked.out.write_text(json.dumps(row, indent=1) + "\n")
    row["largest_relative_difference_of_losses"] = differences = agreement(asked)
    for precision, difference in differences.items():
        print(f"{precision}: losses of two processes are within {difference:.1e} of those of one")
    if asked.out is not None:
        asked.out.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
