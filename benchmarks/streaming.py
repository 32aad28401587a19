"""Training steps a second with points on the device, and with points streamed from their file.

    python benchmarks/streaming.py --out results/speed-h200/streaming.json

Every step goes through `fst.training.trainer.Trainer`, as in `fst train own/fst`. The file holds
scattered waves: 1,000 observations and 10,000 queries a sample, of which a step draws 2,500. One
trainer takes its batches from either in turn, so that it is compiled once. The table gives medians.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import fst
from fst.data import PointData, PointSample, write_points
from fst.data.samples import Samples
from fst.recipes import own
from fst.training.loop import build_accelerator
from fst.training.run_folder import describe_environment
from fst.training.schedules import WarmupCosine
from fst.training.settings import TrainingSettings
from fst.training.trainer import Batches, Trainer

DOMAIN = fst.Domain((0.0, 0.0), (1.0, 1.0))
SMALL = own.SMALL[fst.FunctionSpaceConfig] | own.SMALL_LAYOUTS[2]
WARMUP = 10  # steps before each pass: worker processes start anew in a pass


def waves(count: int, observations: int, queries: int) -> Iterator[PointSample]:
    for row in range(count):
        random = np.random.default_rng(row)
        wave = random.uniform(1, 6, 2)
        seen, asked = random.random((observations, 2)), random.random((queries, 2))
        values = [np.sin(points @ wave)[:, None] + 2 for points in (seen, asked)]
        yield PointSample(seen, values[0], asked, values[1])


def trainer(samples: Samples, validation: Samples, asked: argparse.Namespace) -> Trainer:
    cuda = asked.device == "cuda"
    settings = TrainingSettings(
        schedule=WarmupCosine(warmup=100, maximum=100_000),
        batch_size=asked.batch,
        queries=asked.drawn,
        precision="bf16" if cuda else "fp32",
        compile=cuda,
    )
    torch.manual_seed(0)
    sizes = {"value_channels": 1, "output_channels": 1, "low": DOMAIN.low, "high": DOMAIN.high}
    model = fst.build("own/fst", **sizes, **(SMALL if asked.quick else {}))
    model.fit_statistics(samples)
    accelerator = build_accelerator(settings, torch.device(asked.device))
    return Trainer(model, samples, validation, settings, accelerator)


def advance(training: Trainer, steps: int) -> float:
    """Steps a second."""
    start = time.perf_counter()
    for _ in range(steps):
        training.update()
        if training.state.step % training.settings.log_every == 0:
            training.read()
    training.read()
    return steps / (time.perf_counter() - start)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--observations", type=int, default=1000)
    parser.add_argument("--queries", type=int, default=10_000)
    parser.add_argument("--drawn", type=int, default=2500)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--quick", action="store_true", help="a small model, for a test")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--steps", type=int, default=100, help="of each pass")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "waves.h5"
        write_points(path, waves(asked.samples, asked.observations, asked.queries), DOMAIN)
        size = path.stat().st_size
        pace: dict[str, list[float]] = {"resident": [], "streamed": []}
        loaded = {
            storage: PointData(storage=storage, workers=asked.workers).load(path, asked.device)
            for storage in pace
        }
        trained = trainer(*(split.samples for split in loaded["resident"]), asked)
        batches = {
            storage: Batches(training.samples, trained.settings)
            for storage, (training, _) in loaded.items()
        }
        for _ in range(asked.passes):
            for storage, found in pace.items():
                trained.batches = batches[storage]
                advance(trained, WARMUP)
                found.append(advance(trained, asked.steps))
                trained.batches.close()
    median = {storage: statistics.median(found) for storage, found in pace.items()}
    gpu = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    print(f"{gpu}, {os.cpu_count()} cores, torch {torch.__version__}, file {size / 1e9:.2f} GB")
    print("| points | steps a second | slowest to fastest pass | of resident |")
    print("|---|---|---|---|")
    for storage, found in pace.items():
        share = median[storage] / median["resident"]
        spread = f"{min(found):.2f} to {max(found):.2f}"
        print(f"| {storage} | {median[storage]:.2f} | {spread} | {share:.1%} |")
    if asked.out is not None:
        settings = {name: value for name, value in vars(asked).items() if name != "out"}
        row = {"environment": describe_environment(), "device": gpu, "bytes": size}
        row |= {"settings": settings, "steps_per_second": pace}
        asked.out.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
