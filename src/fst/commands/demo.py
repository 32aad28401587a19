"""`fst demo`: the whole story on a laptop, from an empty folder to a page with pictures."""

from pathlib import Path

from rich.console import Console

from fst.commands.evaluate import evaluate
from fst.commands.train import train
from fst.evaluation.report import report
from fst.recipes import find


def demo(out: Path, *, device: str | None = None, console: Console | None = None) -> None:
    """Generate data, train, evaluate against two trivial predictors, and draw."""
    console = console or Console()
    console.rule("1. Data and training")
    train(
        find("demo/burgers"),
        out,
        data=out.with_name(out.name + "-data"),
        device=device,
        console=console,
    )
    console.rule("2. Held-out solutions")
    evaluate(out, device=device, trivial=True, console=console)
    console.rule("3. Page")
    page = report([out], out / "report")
    console.print(f"Open {page} in a browser. Weights: {out / 'best'}")
