"""The paper's ablations (Tables 4 to 6) and decoding from nearby anchors, with the fast recipe.

    python benchmarks/ablations.py --minutes 25 --workers 3 --seeds 1 2   # one GPU; then again

Each row is a model of `ablation/...`, trained on Burgers at ν = 0.01 with the optimiser, rate,
augmentation and batch of `fast/burgers-single/fst`, --steps steps with a cosine to zero, and then
scored once on the test set, full grid, with its last weights: from all anchors, and from the k
nearest. Recipes with the same model (`refine-4` is `anchors-adaptive-fixed-32`) are trained once.

Every run adds a line to OUT; called again, runs that have theirs are skipped. A failure is a line
too, and is tried again. Weights are kept nowhere. A run is not started where it should not end
within --minutes. `benchmarks/results.py` turns the lines into a table beside the paper's.
"""

import argparse
import json
import math
import os
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from results import ablation_table

from fst.commands import train as command
from fst.config import FunctionSpaceConfig
from fst.evaluation.protocol import EvaluationSettings, device_name, measure, measuring, represented
from fst.operators import Operator
from fst.recipes import ablation, find
from fst.recipes.burgers import NEIGHBORS
from fst.recipes.comparison import seed_of
from fst.recipes.recipe import Recipe
from fst.terminal import Terminal
from fst.training.budget import release
from fst.training.loop import build_accelerator
from fst.training.run_folder import git_state
from fst.training.schedules import WarmupCosine
from fst.training.trainer import Trainer

FAST, WARMUP = "fast/burgers-single/fst", 300
# The most minutes that a run was seen to take is not known before the first has ended.
FIRST_GUESS = 2.5


@dataclass(frozen=True)
class Job:
    """One model with one seed; `names` are the ablations that it is a row of."""

    names: tuple[str, ...]
    model: FunctionSpaceConfig
    number: int
    steps: int

    def key(self) -> tuple[str, int, int]:
        return self.names[0], self.number, self.steps

    def recipe(self) -> Recipe:
        fast = find(FAST)
        training = replace(
            fast.training,
            schedule=WarmupCosine(warmup=min(WARMUP, self.steps // 10), maximum=self.steps),
            validate_every=self.steps,
            seed=seed_of(fast, self.number),
            tensorboard=False,
        )
        assert isinstance(fast.evaluation, EvaluationSettings)
        nearest = tuple(k for k in NEIGHBORS if k < self.anchors)
        evaluation = EvaluationSettings(grids=fast.evaluation.grids[-1:], neighbors=nearest)
        return replace(fast, model=self.model, training=training, evaluation=evaluation)

    @property
    def anchors(self) -> int:
        return math.prod(self.model.rows) * self.model.anchors_per_row


def jobs(seeds: list[int], steps: int, only: list[str]) -> list[Job]:
    """Every different model of the ablations, seed by seed."""
    models: dict[FunctionSpaceConfig, tuple[str, ...]] = {}
    for make in ablation.recipes():
        recipe = make()
        assert isinstance(recipe.model, FunctionSpaceConfig)
        name = recipe.name.removeprefix("ablation/")
        models[recipe.model] = (*models.get(recipe.model, ()), name)
    return [
        Job(names, model, seed, steps)
        for seed in seeds
        for model, names in models.items()
        if not only or set(only) & set(names)
    ]


def execute(job: Job, recipe: Recipe, data: Path, device: torch.device) -> dict[str, Any]:
    """Train, validate and score; what was reached and what it cost."""
    training, validation = command.load(recipe, data, device, Terminal(quiet=True))
    test = recipe.data.load_test(data, device)
    model = command.prepare_model(recipe, training.samples)
    trainer = Trainer(
        model, training.samples, validation.samples, recipe.training,
        build_accelerator(recipe.training, device),
    )  # fmt: skip
    start = time.monotonic()
    while trainer.state.step < job.steps:
        trainer.update()
        if trainer.state.step % recipe.training.log_every == 0:
            trainer.read()
            trainer.state.pending.clear()
    trainer.read()
    seconds = time.monotonic() - start - trainer.state.compilation_seconds
    trainer.validate()
    trainer.batches.close()
    selected, settings = trainer.selected, recipe.evaluation
    assert isinstance(selected, Operator)
    assert isinstance(settings, EvaluationSettings)
    with measuring(selected):
        found = measure(represented(selected, settings), test.samples, settings)
    errors = {each.neighbors: sum(each.errors) / len(each.errors) for each in found}
    return {
        "seconds": round(seconds, 1),
        "validation": trainer.state.history[-1][1],
        "error": errors.pop(None),
        "nearest": {str(k): error for k, error in errors.items()},
    }


def append(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


def work(queue: Any, options: argparse.Namespace) -> None:
    """One process: takes jobs until none is left that would end in time."""
    device, longest = torch.device(options.device), 60 * FIRST_GUESS
    while (job := queue.get()) is not None:
        if time.time() + longest > options.started + 60 * options.minutes:
            continue
        start, recipe = time.time(), job.recipe()
        row: dict[str, Any] = {
            "names": job.names, "number": job.number, "seed": recipe.training.seed,
            "steps": job.steps,
        }  # fmt: skip
        try:
            row |= execute(job, recipe, command.data_path(recipe, options.data), device)
            print(f"{row['error']:.5f}  {row['seconds']:6.1f} s  {job.key()}", flush=True)
        except Exception as problem:
            traceback.print_exc()
            row["failure"] = f"{type(problem).__name__}: {problem}".partition("\n")[0]
        release()
        git = git_state() or {}
        row |= {"hardware": device_name(device), "workers": options.workers}
        row |= {"torch": torch.__version__, "commit": git.get("commit")}
        append(options.out, row)
        longest = max(longest, time.time() - start)


class InTurn:
    """A queue for one process."""

    def __init__(self, items: list[Job | None]) -> None:
        self.items = iter(items)

    def get(self) -> Job | None:
        return next(self.items)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results/ablations/rows.jsonl"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="counted from 1")
    parser.add_argument("--steps", type=int, default=6_000)
    parser.add_argument("--only", nargs="+", default=[], help="rows such as refine-8")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--workers", type=int, default=1, help="processes on the GPU at once")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(given)
    options.started = time.time()
    done = {
        (row["names"][0], row["number"], row["steps"])
        for row in read(options.out)
        if "error" in row
    }
    todo = [
        job for job in jobs(options.seeds, options.steps, options.only) if job.key() not in done
    ]
    print(f"{len(todo)} runs to do, {len(done)} rows there", flush=True)
    if todo:
        recipe = todo[0].recipe()
        data = command.data_path(recipe, options.data)
        recipe.data.prepare(data, options.device, Terminal(quiet=True))
        items = [*todo, *[None] * options.workers]
        if options.workers == 1:
            work(InTurn(items), options)
        else:
            context = torch.multiprocessing.get_context("spawn")
            queue = context.Queue()
            for item in items:
                queue.put(item)
            workers = [
                context.Process(target=work, args=(queue, options)) for _ in range(options.workers)
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
    Terminal().print(ablation_table(read(options.out)).terminal())


if __name__ == "__main__":
    main()
