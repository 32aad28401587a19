"""`fst demo`: the whole story on a laptop, from an empty folder to a page with pictures."""

from pathlib import Path

import torch
from rich.console import Console

from fst.commands.device import choose_device
from fst.commands.evaluate import evaluate, read_recipe
from fst.commands.train import resume, train
from fst.evaluation.report import report
from fst.recipes import find
from fst.terminal import Terminal
from fst.training.errors import TrainingError

RECIPE = "demo/burgers"


def demo(out: Path, *, device: str | None = None, console: Console | None = None) -> None:
    """Generate data, train, evaluate against predictors without parameters, and draw.

    Asked again, it goes on with a training that was interrupted, and does not repeat one that
    has ended.
    """
    console = console or Terminal()
    if choose_device(device).type == "cpu":
        torch.set_num_threads(1)  # its tensors are so small that a second thread makes it slower
    if (out / "recipe.json").is_file() and (name := read_recipe(out).name) != RECIPE:
        raise TrainingError(f"{out} holds a run of {name}, not of {RECIPE}: choose another folder")
    console.rule("1. Data and training")
    if (out / "summary.json").is_file():
        console.print(f"{out} is trained already; choose another folder to train anew")
    elif (out / "recipe.json").is_file():
        resume(out, device=device, console=console)
    else:
        train(find(RECIPE), out, device=device, console=console)
    console.rule("2. Held-out solutions")
    evaluate(out, device=device, console=console)
    console.rule("3. Page")
    page = report([out], out / "report")
    console.print(f"Open {page} in a browser. The weights are in {out / 'best'}.")
