"""`fst demo`: the whole story on a laptop, from an empty folder to a page with pictures."""

from pathlib import Path

from rich.console import Console

from fst.commands.evaluate import evaluate
from fst.commands.train import resume, train
from fst.evaluation.report import report
from fst.recipes import find


def demo(out: Path, *, device: str | None = None, console: Console | None = None) -> None:
    """Generate data, train, evaluate against two trivial predictors, and draw.

    Asked again, it goes on with a training that was interrupted, and does not repeat one that
    has ended.
    """
    console = console or Console()
    console.rule("1. Data and training")
    if (out / "summary.json").is_file():
        console.print(f"{out} is trained already; choose another folder to train anew")
    elif (out / "recipe.json").is_file():
        resume(out, device=device, console=console)
    else:
        train(find("demo/burgers"), out, device=device, console=console)
    console.rule("2. Held-out solutions")
    evaluate(out, device=device, trivial=True, console=console)
    console.rule("3. Page")
    page = report([out], out / "report")
    console.print(f"Open {page} in a browser. The weights are in {out / 'best'}.")
