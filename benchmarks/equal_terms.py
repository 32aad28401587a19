"""`fst compare` for several tasks at once, with their runs beside each other on one GPU.

    python benchmarks/equal_terms.py runs/equal --budget 2m --workers 3 \\
        fast/burgers-single fast/darcy:fst*3,fno,perceiver-io

trains every model of the first task, and three of the second, FST with three seeds.

A model that trains does not fill the GPU, and compiling, validating and scoring leave it idle. So
data are made and models compiled side by side. When nobody does either, each model is measured
alone, which gives the steps that the budget pays for. The runs of a task begin once its models are
measured, --workers of them at a time, further seeds after all others. Whoever trains waits while
another measures, also where several commands (or `training_search.py`) share a GPU by the same
--turns. A run has the steps of a GPU of its own, and its times in the table are those: steps over
the rate that was measured alone.

OUT/TASK is a folder of `fst compare` with its table; called again, all that is complete is kept.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from training_search import Turns

from fst.commands import jobs
from fst.commands import train as command
from fst.commands.compare import ModelJob, compare
from fst.commands.evaluate import evaluate
from fst.commands.train import choose_device
from fst.data.source import DataSource
from fst.evaluation.comparison import Comparison, Result, write_report
from fst.io import read_json, write_json
from fst.recipes import find
from fst.recipes.comparison import models_of
from fst.recipes.recipe import Recipe
from fst.terminal import Terminal
from fst.training import TrainingError
from fst.training.budget import Calibration, Plan, parse_budget
from fst.training.loop import build_accelerator
from fst.training.trainer import Trainer, compiles

UNTIMED = 20  # updates before the clock starts
SHARED = (
    "Runs shared the GPU, each with the steps that its model makes on an idle one in the budget: "
    "time and steps/s are those of the idle GPU, compilation apart."
)
Make = Callable[[str], Recipe]


def with_seeds(models: str) -> dict[int, list[str]]:
    """Of "fst*3,fno" the models with one seed, with two and so on; of "" all models with one."""
    found: dict[int, list[str]] = {} if models else {1: []}
    for each in models.split(",") if models else ():
        model, star, seeds = each.partition("*")
        if star and not seeds.isdecimal():
            raise ValueError(f"a model is MODEL or MODEL*SEEDS such as fst*3, got {each!r}")
        found.setdefault(int(seeds or 1), []).append(model)
    return found


def check(options: argparse.Namespace) -> None:
    """Raise where a task or model is unknown, before anything is made."""
    known: set[str] = set()
    for asked in options.tasks:
        task, _, models = asked.partition(":")
        for those in with_seeds(models).values():
            known |= set(models_of(task, tuple(those)))
    for change in options.set:
        if change.partition(".")[0] not in known:
            wanted = ", ".join(sorted(known))
            raise ValueError(f"--set takes MODEL.FIELD=VALUE with a model of {wanted}: {change!r}")


class Wanted:
    """The jobs of one task in its folder of `fst compare`."""

    def __init__(self, asked: str, options: argparse.Namespace, make: Make) -> None:
        task, _, models = asked.partition(":")
        self.task, self.folder = task, options.out / task.replace("/", "-")
        self.jobs: list[ModelJob] = []
        # Everything is settled and prepared as ever, and no job is started yet.
        for seeds, those in with_seeds(models).items():
            named = those or models_of(task)
            with suppress(TrainingError):
                compare(
                    task,
                    self.folder,
                    budget=options.budget,
                    models=those,
                    seeds=seeds,
                    data=options.data,
                    device=options.device,
                    changes=[each for each in options.set if each.partition(".")[0] in named],
                    console=Terminal(quiet=True),
                    make=make,
                    launch=self._note,
                )
        settings = read_json(self.folder / jobs.SETTINGS)
        if settings is None:
            raise TrainingError(f"{self.folder}: the comparison of {asked} could not be prepared")
        self.runs: list[tuple[str, int]] = [(model, number) for model, number in settings["runs"]]

    def _note(self, job: ModelJob) -> int:
        self.jobs.append(job)
        return 0

    def report(self, device: str | None) -> Comparison:
        """The table of all runs of the folder, with the times of an idle GPU."""
        data = Path(read_json(self.folder / jobs.DATA)["path"])
        found = [ModelJob(self.folder, data, device, *run) for run in self.runs]
        results = tuple(_alone(job.result(None)) for job in found)
        budget = parse_budget(read_json(self.folder / jobs.SETTINGS)["budget"]).words()
        comparison = Comparison.read(self.folder, self.task, budget, results, SHARED)
        write_report(self.folder / "comparison", comparison)
        return comparison


def _alone(result: Result) -> Result:
    """A result with the times of a GPU of its own."""
    rate = result.calibrated_steps_per_second
    if result.status != "done" or rate is None or result.steps is None:
        return result
    seconds, last = result.steps / rate, result.curve[-1][0] if result.curve else 1.0
    images = result.images_per_second
    if images is not None and result.steps_per_second:
        images *= rate / result.steps_per_second
    curve = tuple((round(when / last * seconds, 2), error) for when, error in result.curve)
    return replace(
        result,
        training_seconds=seconds,
        all_seconds=None,
        steps_per_second=rate,
        images_per_second=images,
        curve=curve,
    )


def measure(job: ModelJob, turns: Turns) -> None:
    """Compile a model beside others, measure it alone, and keep the plan of its runs."""
    recipe, device, console = job.recipe(), choose_device(job.device), Terminal(quiet=True)
    training, validation = command.load(recipe, job.data, device, console)
    budget = parse_budget(read_json(job.folder / jobs.SETTINGS)["budget"])
    model = command.prepare_model(recipe, training.samples)
    accelerator = build_accelerator(recipe.training, device)
    trainer = Trainer(model, training.samples, validation.samples, recipe.training, accelerator)

    def updates(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            trainer.update()
        trainer.read()  # waits for the device
        trainer.state.pending.clear()
        return time.perf_counter() - start

    every = recipe.training.log_every
    with turns.compiling():
        for _ in range(0, UNTIMED, every):
            updates(min(every, UNTIMED))
    with turns.alone():
        made, seconds = 0, 0.0
        while seconds < budget.calibration_seconds:
            # Of a slow model no more than it takes.
            count = 1 if not made else max(1, min(every, round(made / seconds)))
            seconds += updates(count)
            made += count
    trainer.batches.close()
    compiling = trainer.state.compilation_seconds
    calibration = Calibration(made, seconds, trainer.peak_memory_gib, 0.0, compiling)
    steps = budget.steps(calibration.steps_per_second)
    plan = Plan(steps, compiles(recipe.training, device), calibration)
    write_json(job.plan_file, asdict(plan))


def measure_apart(turns: Path, job: ModelJob) -> None:
    subprocess.run([sys.executable, __file__, "--measure", *words_of(job, turns)], check=False)


class TakingTurns:
    """The updates and the scoring of a run, which wait while another process measures."""

    def __init__(self, turns: Turns) -> None:
        self.turns, self.held = turns, ExitStack()
        self.compiled, self.idle = False, True
        self.update, self.read = Trainer.update, Trainer.read

    def updating(self, trainer: Trainer) -> None:
        if self.idle:  # the first since the last reading
            turn = self.turns.shared() if self.compiled else self.turns.compiling()
            self.held.enter_context(turn)
            self.idle = False
        self.update(trainer)

    def reading(self, trainer: Trainer) -> None:
        self.read(trainer)  # waits for the device
        self.held.close()
        self.compiled = self.idle = True

    def evaluating(self, *given: Any, **options: Any) -> None:
        with self.turns.shared():
            evaluate(*given, **options)

    def do(self, job: ModelJob) -> int:
        with (
            patch.object(Trainer, "update", lambda trainer: self.updating(trainer)),
            patch.object(Trainer, "read", lambda trainer: self.reading(trainer)),
            patch("fst.commands.compare.evaluate", self.evaluating),
        ):
            return jobs.main(job)


def words_of(job: ModelJob, turns: Path) -> list[str]:
    return [*map(str, (job.folder, job.data, job.model, job.number, turns)), job.device or ""]


def work(job: ModelJob, turns: Path) -> None:
    """One run, in a process of its own."""
    words = [__file__, "--run", *words_of(job, turns)]
    jobs.run_apart(job, Terminal(), partial(jobs.launch_process, words))


def prepare(data: DataSource, path: Path, device: str | None, turns: Path) -> None:
    """Make what is missing of a task's data; nobody measures meanwhile."""
    with Turns(turns).compiling():
        data.prepare(path, choose_device(device), Terminal(quiet=True))


def run(options: argparse.Namespace, make: Make = find) -> list[Comparison]:
    check(options)
    context = torch.multiprocessing.get_context("spawn")
    turns = options.turns or options.out / "turns"
    compilers = ThreadPoolExecutor(options.compilers)

    def planned(asked: str) -> Wanted:
        """A task with its data and a plan for every model that can be measured; its runs begin."""
        recipe = make(next(iter(models_of(asked.partition(":")[0]).values())))
        path = command.data_path(recipe, options.data)
        making = context.Process(target=prepare, args=(recipe.data, path, options.device, turns))
        making.start()
        making.join()
        wanted = Wanted(asked, options, make)
        first = {job.plan_file: job for job in wanted.jobs if not job.plan_file.is_file()}
        list(compilers.map(partial(measure_apart, turns), first.values()))
        for plan, job in first.items():
            if not plan.is_file():
                print(f"{job} could not be measured, and is left out", file=sys.stderr)
        wanted.jobs = [job for job in wanted.jobs if job.plan_file.is_file()]
        begin(job for job in wanted.jobs if job.number == 1)
        return wanted

    def begin(asked: Iterable[ModelJob]) -> None:
        running.extend(runs.submit(work, job, turns) for job in asked)

    running: list[Future[None]] = []
    with compilers, ProcessPoolExecutor(options.workers, context) as runs:
        try:
            with ThreadPoolExecutor(len(options.tasks)) as pool:
                wanted = list(pool.map(planned, options.tasks))
            begin(job for each in wanted for job in each.jobs if job.number > 1)
            while not all(each.done() for each in running):
                time.sleep(options.report_every)
                for each in wanted:  # what is done so far
                    each.report(options.device)
        except BaseException:
            runs.shutdown(wait=False, cancel_futures=True)
            raise
    return [each.report(options.device) for each in wanted]


def main(given: list[str] | None = None) -> None:
    given = sys.argv[1:] if given is None else given
    if given[:1] in (["--measure"], ["--run"]):
        what, folder, data, model, number, where, device = given
        job = ModelJob(Path(folder), Path(data), device or None, model, int(number))
        turns = Turns(Path(where))
        if what == "--measure":
            measure(job, turns)
            return
        sys.exit(TakingTurns(turns).do(job))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("tasks", nargs="+", help="TASK or TASK:MODEL*SEEDS,MODEL")
    parser.add_argument("--budget", required=True, help="as of fst compare: 2m, 4000steps")
    parser.add_argument("--workers", type=int, default=3, help="runs on the GPU at once")
    parser.add_argument("--compilers", type=int, default=6, help="models compiled at once")
    parser.add_argument("--turns", type=Path, help="folder of locks of all commands on the GPU")
    parser.add_argument("--data", type=Path, help="of a single task; else the recipes' own")
    parser.add_argument("--device")
    parser.add_argument("--set", action="append", default=[], help="MODEL.FIELD=VALUE, every task")
    parser.add_argument("--report-every", type=float, default=20.0, help="seconds between tables")
    for comparison in run(parser.parse_args(given)):
        comparison.show(Terminal())


if __name__ == "__main__":
    main()
