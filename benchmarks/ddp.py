"""Training steps a second of one process alone and of one in a group, and the losses of two.

    python benchmarks/ddp.py --out results/speed-h200/ddp.json

Every step goes through `fst.training.trainer.Trainer`, with the settings of a recipe and made-up
solutions. Three ways to train take turns on one GPU, and the table gives medians:

- alone: one process without a group, as `fst train` on one GPU;
- in a group: the same process in a group of one, which exchanges its gradient in every step, as
  each process of several does;
- DDP, not compiled: the same group by `DistributedDataParallel`, as it was before.

Meanwhile, until the first pass, torchrun starts two processes that share the GPU (over gloo: NCCL
wants a GPU for each) and one alone, and their losses are compared.
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
NAMES = ("alone", "in a group", "DDP, not compiled")
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join_group_of_one(device: str) -> None:
    distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{free_port()}",
        rank=0,
        world_size=1,
    )


class Ways:
    """The ways to train, each ready for its next step."""

    def __init__(self, asked: argparse.Namespace) -> None:
        join_group_of_one(asked.device)
        compiled = asked.device == "cuda" if asked.compile is None else asked.compile
        # Compiled once: the exchange comes after what is compiled.
        self.own = trainer(asked, compile=compiled)
        self.wrapped = trainer(asked, compile=False)
        module = DistributedDataParallel(self.wrapped.loss, gradient_as_bucket_view=True)
        self.wrapped.loss = module
        for name in NAMES:
            losses(self[name], WARMUP)

    def __getitem__(self, name: str) -> Trainer:
        self.own.exchange = distributed.all_reduce if name == "in a group" else None
        return self.wrapped if name == "DDP, not compiled" else self.own


class Group:
    """Processes that torchrun has started, to write the losses of the first steps."""

    def __init__(self, asked: argparse.Namespace, processes: int, out: Path) -> None:
        self.out = out
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += [f"--nproc-per-node={processes}", "--master-addr=127.0.0.1"]
        command += [f"--master-port={free_port()}", __file__, "--worker", "--out", str(out)]
        command += ["--recipe", asked.recipe, "--device", asked.device, "--steps", str(asked.steps)]
        command += ["--quick"] * asked.quick
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if asked.device == "cpu":
            environment["ACCELERATE_USE_CPU"] = "1"
        self.running = subprocess.Popen(command, env=environment)

    def losses(self) -> dict[str, list[float]]:
        """By precision, once the processes have ended."""
        if self.running.wait() != 0:
            sys.exit(f"processes that share a batch ended with {self.running.returncode}")
        found: dict[str, list[float]] = json.loads(self.out.read_text())
        return found


def agreement(together: Group, alone: Group) -> dict[str, float]:
    """The largest relative difference between the losses of two processes and of one."""
    two, one = together.losses(), alone.losses()
    return {
        precision: max(
            abs(b - a) / abs(a) for a, b in zip(one[precision], two[precision], strict=True)
        )
        for precision in one
    }


def worker(asked: argparse.Namespace) -> None:
    """A process of a group: losses in float32 and, on a GPU, with the fused kernels."""
    distributed.init_process_group("gloo")
    precisions = ["fp32", "bf16"] if asked.device == "cuda" else ["fp32"]
    found = {
        precision: losses(trainer(asked, compile=False, precision=precision), asked.steps)
        for precision in precisions
    }
    if distributed.get_rank() == 0:
        asked.out.write_text(json.dumps(found))
    end_processes(0)


def measured(asked: argparse.Namespace, ways: Ways) -> dict[str, Any]:
    """Time the ways in turn, and print a table."""
    pace: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(asked.passes):
        for name, found in pace.items():
            found.append(steps_per_second(ways[name], asked.seconds))
    distributed.destroy_process_group()
    median = {name: statistics.median(found) for name, found in pace.items()}
    device = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    print(f"{asked.recipe} on {device}, torch {torch.__version__}")
    print("| one process | steps a second | slowest to fastest pass | of alone |")
    print("|---|---|---|---|")
    for name, found in pace.items():
        share, spread = median[name] / median["alone"], f"{min(found):.2f} to {max(found):.2f}"
        print(f"| {name} | {median[name]:.2f} | {spread} | {share:.1%} |")
    return {"environment": describe_environment(), "device": device, "steps_per_second": pace}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="fast/burgers-single/fst")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each pass")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="whose losses are compared")
    parser.add_argument("--quick", action="store_true", help="a tiny model, for a test")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(arguments)
    if asked.worker:
        worker(asked)
    with tempfile.TemporaryDirectory() as folder:
        groups = [Group(asked, count, Path(folder) / f"{count}.json") for count in (2, 1)]
        ways = Ways(asked)
        for group in groups:
            group.running.wait()
        row = measured(asked, ways)
        if asked.out is not None:  # what is known so far, should a group have failed
            asked.out.write_text(json.dumps(row, indent=1) + "\n")
        row["largest_relative_difference_of_losses"] = differences = agreement(*groups)
    for precision, difference in differences.items():
        print(f"{precision}: losses of two processes are within {difference:.1e} of those of one")
    if asked.out is not None:
        asked.out.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
