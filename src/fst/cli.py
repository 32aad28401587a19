"""The command line: parsing, and turning errors into one clear line.

Each command is a story in `fst.commands`. Options are derived from types by tyro; `fst train`
takes an option for every field of its recipe.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import AvoidSubcommands, Positional, arg
from tyro.extras import SubcommandApp

from fst.commands import compare as compare_command
from fst.commands import data as data_commands
from fst.commands import demo as demo_command
from fst.commands import evaluate as evaluate_command
from fst.commands import predict as predict_command
from fst.commands import predict_images as predict_images_command
from fst.commands import recipes as recipe_commands
from fst.commands import search as search_command
from fst.commands import train as train_command
from fst.commands.records import write_records
from fst.data import PointData
from fst.evaluation.protocol import EvaluationError
from fst.evaluation.report import report as write_report
from fst.recipes import find, own_images
from fst.recipes.comparison import CompileMode
from fst.recipes.recipe import Recipe
from fst.recipes.search import MORE_STEPS, RATES, STEPS
from fst.terminal import Terminal, one_line
from fst.training.errors import Interrupted, TrainingError
from fst.training.processes import end

USER_ERROR, INTERRUPTED = 2, 130
# Every error about what a user gave is one of these, and its message says what to do.
ERRORS = (ValueError, TrainingError)

app = SubcommandApp()
data_app = SubcommandApp()
console = Terminal()


@app.command(name="recipes")
def list_recipes(name: Positional[str | None] = None, /, *, json: bool = False) -> None:
    """List the recipes, or show one with every field.

    Args:
        name: Show this recipe alone.
        json: Print JSON, for programs.
    """
    if name is None:
        recipe_commands.list_recipes(as_json=json, console=console)
    else:
        recipe_commands.show_recipe(name, as_json=json, console=console)


@dataclass(frozen=True)
class TrainOptions:
    """Options of a new run besides the fields of its recipe."""

    recipe: Annotated[Recipe, arg(name="")]
    out: Path
    """Folder for the run; it must be empty or absent."""
    data: Path | None = None
    """Data folder, or your own file; ./data/... when not given, and made there if missing."""
    device: str | None = None
    """cpu or cuda; a GPU where there is one."""


@dataclass(frozen=True)
class DataOption:
    """The one option that decides what the others mean."""

    data: Path | None = None


def _without_help(arguments: Sequence[str]) -> list[str]:
    return [word for word in arguments if word not in ("-h", "--help")]


@app.command
def train(
    recipe: Positional[str | None] = None,
    /,
    *,
    out: Path | None = None,
    data: Path | None = None,
    device: str | None = None,
    resume: Path | None = None,
    checkpoint: str | None = None,
) -> None:
    """Train a recipe: fst train RECIPE --out DIR, or continue: fst train --resume DIR.

    Every field of a recipe is an option: fst train RECIPE --help lists them.

    Args:
        recipe: Name of the recipe; fst recipes lists them.
        out: Folder for a new run; it must be empty or absent.
        data: Data folder, or your own file; ./data/... when not given, and made there if missing.
        device: cpu or cuda; a GPU where there is one.
        resume: Continue the run in this folder.
        checkpoint: With --resume: continue from this checkpoint instead of the newest.
    """
    del recipe, out  # a recipe's options are parsed by train_recipe, before this is reached
    if resume is None:
        raise TrainingError("name a recipe (fst train RECIPE --out DIR) or --resume DIR")
    train_command.resume(resume, checkpoint=checkpoint, data=data, device=device, console=console)


def train_recipe(name: str, arguments: Sequence[str]) -> None:
    """A new run: all fields of the recipe are options, with its values as defaults."""
    recipe = find(name)
    if isinstance(recipe.data, PointData):
        # Sizes come from the file, so it is read before the other options are understood.
        named, _ = tyro.cli(DataOption, args=_without_help(arguments), return_unknown_args=True)
        if named.data is not None:
            recipe = train_command.fit_to_data(recipe, named.data)
    recipe = own_images.unnamed(recipe)
    default = TrainOptions(recipe, out=tyro.MISSING)
    options = tyro.cli(
        AvoidSubcommands[TrainOptions], default=default, args=arguments, prog=f"fst train {name}"
    )
    own_images.check(options.recipe)
    train_command.train(
        options.recipe, options.out, data=options.data, device=options.device, console=console
    )


@app.command
def evaluate(
    run: Positional[Path],
    /,
    *,
    data: Path | None = None,
    device: str | None = None,
    again: bool = False,
    trivial: bool = False,
    unfinished: bool = False,
) -> None:
    """Score a trained run on its test set and keep the rows with it.

    Args:
        run: The run's folder.
        data: The data, where they are no longer where the run was trained.
        device: cpu or cuda; a GPU where there is one.
        again: Score anew and replace the stored rows.
        trivial: For Burgers: also score zero, and the initial condition held in time.
        unfinished: Score a run that was stopped before its end.
    """
    evaluate_command.evaluate(
        run,
        data=data,
        device=device,
        again=again,
        trivial=trivial,
        unfinished=unfinished,
        console=console,
    )


@app.command
def report(runs: Positional[tuple[Path, ...]], /, *, out: Path) -> None:
    """Turn the rows and fields of scored runs into one page with tables and figures.

    Args:
        runs: Folders of runs that fst evaluate has scored.
        out: Folder for the page; it must be absent, empty or hold a report already.
    """
    if not runs:
        raise EvaluationError("name at least one run: fst report RUN... --out DIR")
    console.print(f"wrote {write_report(list(runs), out)}")


@app.command
def records(runs: Positional[tuple[Path, ...]], /, *, out: Path) -> None:
    """Add what scored runs reached, in how many seconds and on what, to a list (JSON).

    Args:
        runs: Folders of runs that fst evaluate has scored.
        out: The list; runs of the same name in it are replaced.
    """
    if not runs:
        raise EvaluationError("name at least one run: fst records RUN... --out FILE")
    for record in write_records(list(runs), out):
        console.print(
            f"{record['run']}: {record['error']:.5f} after {record['seconds']:g} s of updates"
        )


@app.command
def predict(
    run: Positional[str],
    /,
    *,
    out: Path,
    observations: Path | None = None,
    queries: str | None = None,
    images: Path | None = None,
    neighbors: int | None = None,
    condition: tuple[float, ...] = (),
    device: str | None = None,
    force: bool = False,
) -> None:
    """Ask a trained model for values at queries, or a classifier for the classes of images.

    Args:
        run: A run folder, a folder of save_pretrained, or hf://owner/name for the hub.
        out: File for the answer, .npz or .h5; for images .csv.
        observations: What was observed: an fst point file (.h5), .npz or .csv.
        queries: Where to ask: a file of the same kinds, or a grid such as 201x1024.
        images: For a classifier: an image, a folder of images, or a tar file of images.
        neighbors: Decode from this many nearest anchors only.
        condition: The condition of every sample, where the observations hold none.
        device: cpu or cuda; a GPU where there is one.
        force: Replace the file if it exists.
    """
    if images is not None:
        if observations is not None or queries is not None or condition or neighbors is not None:
            raise ValueError("--images goes alone: a classifier takes no other questions")
        predict_images_command.predict_images(
            run, images, out, device=device, force=force, console=console
        )
        return
    if observations is None or queries is None:
        raise ValueError("give --observations and --queries or, for a classifier, --images")
    predict_command.predict(
        run,
        observations,
        queries,
        out,
        neighbors=neighbors,
        condition=condition,
        device=device,
        force=force,
        console=console,
    )


@app.command
def explore(
    run: Positional[str] = "burgers-single",
    /,
    *,
    port: int = 8765,
    recipe: str | None = None,
    data: Path | None = None,
    device: str | None = None,
) -> None:
    """Serve a page on this machine where one draws inputs and sees what a model predicts.

    Args:
        run: A run folder, a folder of save_pretrained, or the name of weights that ship with fst.
        port: Port of the page, on 127.0.0.1 only; 0 takes a free one.
        recipe: For weights outside a run folder: a recipe with the data they were trained on.
        data: Your own points, where they are no longer where the run was trained.
        device: cpu or cuda; a GPU where there is one.
    """
    from fst.commands import explore as explore_command

    explore_command.explore(
        run, port=port, recipe=recipe, data=data, device=device, console=console
    )


@app.command
def demo(*, out: Path = Path("runs/demo"), device: str | None = None) -> None:
    """Generate a small Burgers set, train a small FST, evaluate it and draw a page.

    Args:
        out: Folder for the run and the page; it must be empty or absent.
        device: cpu or cuda; a GPU where there is one.
    """
    demo_command.demo(out, device=device, console=console)


@app.command
def compare(
    task: Positional[str],
    /,
    *,
    budget: str,
    out: Path,
    models: tuple[str, ...] = (),
    seeds: int = 1,
    data: Path | None = None,
    device: str | None = None,
    compile: bool = True,
    compile_mode: CompileMode | None = None,
) -> None:
    """Train the models of a task with the same budget and write one table; also goes on with one.

    Args:
        task: What stands before the last / of a recipe's name, such as darcy.
        budget: For each model: training time (90s, 10m, 2h) or steps (20000steps).
        out: Folder for the comparison; called again with it, nothing complete is repeated.
        models: Models of the task, such as fst fno; all of them when not given.
        seeds: Train every model with this many seeds.
        data: Data folder; ./data/... when not given, and made there if missing.
        device: cpu or cuda; a GPU where there is one.
        compile: Compile every model that can be compiled, on a GPU.
        compile_mode: Compile with this mode of torch.compile, on a CPU as well.
    """
    compare_command.compare(
        task,
        out,
        budget=budget,
        models=models,
        seeds=seeds,
        data=data,
        device=device,
        compilation=compile_mode if compile else "no",
        console=console,
    )


@app.command
def search(
    recipe: Positional[str],
    /,
    *,
    out: Path,
    rates: tuple[float, ...] = RATES,
    steps: int = STEPS,
    confirm: int = MORE_STEPS,
    data: Path | None = None,
    device: str | None = None,
) -> None:
    """Search the learning rate of a recipe as the paper does for Darcy; also goes on with one.

    Args:
        recipe: Name of the recipe; fst recipes lists them.
        out: Folder for the search; called again with it, nothing complete is repeated.
        rates: Learning rates to try.
        steps: Steps of each trial.
        confirm: Steps that the best trial is carried on for; 0 leaves them out.
        data: Data folder, or your own file; ./data/... when not given, and made there if missing.
        device: cpu or cuda; a GPU where there is one.
    """
    search_command.search(
        find(recipe),
        out,
        rates=rates,
        steps=steps,
        confirm=confirm,
        data=data,
        device=device,
        console=console,
    )


@data_app.command
def check(path: Positional[Path], /) -> None:
    """Read a data file, or every data file of a folder, from end to end and describe it.

    Args:
        path: The file or folder to read.
    """
    data_commands.check(path)


data_app.command(data_commands.burgers)
data_app.command(data_commands.darcy)
app.command(data_app, name="data", help="Make or check data files.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. User errors are one line on standard error and exit code 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words[:1] == ["train"] and len(words) > 1 and not words[1].startswith("-"):
            train_recipe(words[1], words[2:])
        else:
            app.cli(prog="fst", args=words or ["--help"])
        end(0)
    except Interrupted as interruption:
        if os.environ.get("RANK", "0") == "0":  # one voice for all processes
            print(f"fst: {one_line(interruption)}", file=sys.stderr)
        end(INTERRUPTED)  # all stopped at the same step
        return INTERRUPTED
    except KeyboardInterrupt:
        goes_on = words[:1] in (["data"], ["compare"], ["search"])
        hint = "; the same command goes on where it stopped" if goes_on else ""
        print(f"fst: interrupted{hint}", file=sys.stderr)
        return INTERRUPTED
    except ERRORS as error:
        print(f"fst: error: {one_line(error)}", file=sys.stderr)
        return USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
