"""`fst demo`: the whole story on a laptop, from an empty folder to a page with pictures."""

import math
import time
from pathlib import Path

import torch
from rich.console import Console

from fst.commands.evaluate import evaluate, read_recipe
from fst.commands.train import choose_device, resume, train
from fst.data import BurgersData, BurgersSamples, TestSplit, burgers
from fst.evaluation.fields import Fields
from fst.evaluation.figures import solutions
from fst.evaluation.protocol import EvaluationSettings, View, sample_fields
from fst.evaluation.report import report
from fst.evaluation.rows import Origin
from fst.operators import Operator
from fst.recipes import find
from fst.terminal import Terminal
from fst.training.settings import TrainingError

RECIPE = "demo/burgers"
SHIPPED, VISCOSITY = "burgers-single", 0.01
SIZES = (201, 1024)


def draw_new_solutions(weights: str, picture: Path, *, samples: int = 1, seed: int = 7) -> Fields:
    """Predict new Burgers solutions from the distribution of the training data; draw them
    beside the exact ones."""
    model = Operator.from_pretrained(weights)
    initial = burgers.sample_initial(samples, SIZES[1], seed)
    exact = burgers.solve(initial, VISCOSITY, burgers.saved_times()).float()
    names = BurgersData.value_names, BurgersData.target_names
    test = TestSplit(BurgersSamples.from_solutions(exact), values=names[0], targets=names[1])
    settings = EvaluationSettings(grids=(SIZES,), view=View(samples=samples))
    origin = Origin(run="example", recipe="", task="burgers", model=weights)
    fields = sample_fields(model, test, settings, origin)
    assert isinstance(fields, Fields)
    picture.parent.mkdir(parents=True, exist_ok=True)
    solutions(fields).savefig(picture, dpi=130, metadata={"Software": None})
    return fields


def demo(out: Path, *, device: str | None = None, console: Console | None = None) -> None:
    """Ask shipped weights; then generate data, train, evaluate beside predictors without
    parameters, and draw.

    Asked again, it goes on with a training that was interrupted, and does not repeat one that
    has ended.
    """
    console = console or Terminal()
    if (out / "recipe.json").is_file() and (name := read_recipe(out).name) != RECIPE:
        raise TrainingError(f"{out} holds a run of {name}, not of {RECIPE}: choose another folder")
    console.rule("1. Weights that ship")
    picture = out.with_name(f"{out.name}-at-once.png")  # a new run's folder must be empty
    start = time.perf_counter()
    [error] = draw_new_solutions(SHIPPED, picture).errors
    console.print(
        f"A new initial condition, ν = {VISCOSITY}, answered at {math.prod(SIZES):,} points by the "
        f"weights {SHIPPED}: relative L2 error {error:.4f}. With the solver and the picture "
        f"{picture} this took {time.perf_counter() - start:.1f} s.",
        highlight=False,
        soft_wrap=True,
    )
    console.rule("2. Data and training")
    if choose_device(device).type == "cpu":
        torch.set_num_threads(1)  # its tensors are so small that a second thread makes it slower
    if (out / "summary.json").is_file():
        console.print(f"{out} is trained already; choose another folder to train anew")
    elif (out / "recipe.json").is_file():
        resume(out, device=device, console=console)
    else:
        train(find(RECIPE), out, device=device, console=console)
    console.rule("3. Held-out solutions")
    evaluate(out, device=device, console=console)
    console.rule("4. Page")
    page = report([out], out / "report")
    console.print(f"Open {page} in a browser. The weights are in {out / 'best'}.")
