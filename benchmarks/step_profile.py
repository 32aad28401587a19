"""Where does a training step spend its time, by operation?

    python benchmarks/step_profile.py fast/burgers-single/fst-small \\
        fast/burgers-single/perceiver-io --out results/step-profile/h200.json

Each recipe is trained for a few updates as `fst train` would (on a GPU compiled and captured),
timed with nothing watching, and then watched: kernels on a GPU, PyTorch's operations on a CPU. The
table has calls and milliseconds a step. `step` is the time of one without the profiler, and `busy`
the sum of all operations: where that is less than the step, the device waits.
"""

import argparse
import dataclasses
import re
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from fst.commands import train as command
from fst.evaluation.protocol import device_name
from fst.io import write_json
from fst.recipes import find, fitted
from fst.terminal import Terminal
from fst.training.budget import release
from fst.training.loop import build_accelerator
from fst.training.run_folder import git_state
from fst.training.trainer import Trainer

UNTIMED, TIMED, WATCHED = 30, 100, 10  # updates
SHOWN = 25  # operations


def plain(name: str) -> str:
    """A kernel's name without the numbers by which compilers tell variants apart."""
    return re.sub(r"(_\d+)+(?=\b|_)|<.*", "", name.removeprefix("void "))


def watch(trainer: Trainer, updates: int) -> dict[str, tuple[float, float]]:
    """Calls and milliseconds a step of every operation, the longest first."""
    on_gpu = trainer.device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as profiler:
        advance(trainer, updates)
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    calls: dict[str, int] = defaultdict(int)
    microseconds: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if event.device_type == wanted and spent:
            calls[plain(event.key)] += event.count
            microseconds[plain(event.key)] += spent
    names = sorted(microseconds, key=microseconds.__getitem__, reverse=True)
    return {name: (calls[name] / updates, microseconds[name] / 1000 / updates) for name in names}


def advance(trainer: Trainer, updates: int) -> float:
    """Seconds that so many updates take, to their end on the device."""
    start = time.perf_counter()
    for number in range(1, updates + 1):
        trainer.update()
        if number % trainer.settings.log_every == 0 or number == updates:
            trainer.read()
    trainer.state.pending.clear()
    return time.perf_counter() - start


def measure(name: str, data: Path | None, device: torch.device, timed: int) -> dict[str, Any]:
    recipe = find(name)
    path = command.data_path(recipe, data)
    recipe.data.prepare(path, device, Terminal(quiet=True))
    recipe = fitted(recipe, path, device)
    training, validation = command.load(recipe, path, device, Terminal(quiet=True))
    settings = dataclasses.replace(recipe.training, tensorboard=False)
    model = command.prepare_model(recipe, training.samples)
    accelerator = build_accelerator(settings, device)
    trainer = Trainer(model, training.samples, validation.samples, settings, accelerator)
    advance(trainer, UNTIMED)
    step = advance(trainer, timed) * 1000 / timed
    found = watch(trainer, WATCHED)
    trainer.batches.close()
    return {
        "recipe": name,
        "batch_size": settings.batch_size,
        "step_ms": step,
        "busy_ms": sum(spent for _, spent in found.values()),
        "calls": sum(count for count, _ in found.values()),
        "operations": found,
        "hardware": device_name(device),
        "torch": torch.__version__,
        "commit": (git_state() or {}).get("commit"),
    }


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--steps", type=int, default=TIMED, help="that are timed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(given)
    rows = []
    for name in options.recipes:
        row = measure(name, options.data, torch.device(options.device), options.steps)
        release()
        rows.append(row)
        write_json(options.out, rows)
        print(
            f"\n{name}: step {row['step_ms']:.2f} ms, busy {row['busy_ms']:.2f} ms in "
            f"{row['calls']:.0f} calls, batches of {row['batch_size']}",
        )
        for operation, (count, spent) in list(row["operations"].items())[:SHOWN]:
            print(f"{spent:8.3f} ms {count:7.1f}  {operation[:90]}", flush=True)


if __name__ == "__main__":
    main()
