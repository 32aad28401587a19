"""The command line: parsing, and turning errors into one clear line.

A function here says what can be asked of a command; tyro derives the options from it. What the
command does is a function of the same arguments in `fst.commands`, which is imported, and PyTorch
with it, when the command runs: help and a mistyped name are answered at once. `fst train` takes an
option for every field of its recipe.
"""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg
from tyro.extras import SubcommandApp

from fst.commands import data as data_commands
from fst.terminal import Terminal, did_you_mean, one_line, printable, speak_plainly
from fst.version import __version__

USER_ERROR, INTERRUPTED = 2, 130
COMMANDS: list[str] = []
RESUMED = {"--resume", "--checkpoint", "--rate-factor", "--data", "--device", "--help"}
Function = Callable[..., None]
Device = Annotated[str | None, arg(help="cpu or cuda; a GPU where there is one.")]
ELSEWHERE = "The data, where they are no longer where the run was trained."
Moved = Annotated[Path | None, arg(help=ELSEWHERE)]
MADE = "Data folder, or your own file; ./data/... when not given, and made there if missing."
Data = Annotated[Path | None, arg(help=MADE)]

app = SubcommandApp()
data_app = SubcommandApp()
console = Terminal()


def command(work: str) -> Callable[[Function], Function]:
    """A command whose work is done by `module.function` of `fst.commands`."""
    module, _, name = work.partition(".")

    def register(described: Function) -> Function:
        @functools.wraps(described)
        def call(*words: Any, **options: Any) -> None:
            function = getattr(import_module(f"fst.commands.{module}"), name)
            function(*words, **options, console=console)

        return listed(call)

    return register


def listed(function: Function) -> Function:
    COMMANDS.append(function.__name__)
    app.command(function)
    return function


@command("recipes.recipes")
def recipes(name: Positional[str | None] = None, /, *, json: bool = False) -> None:
    """List the recipes, or show one with every field.

    Args:
        name: Show this recipe alone.
        json: Print JSON, for programs.
    """


@listed
def train(
    recipe: Positional[str | None] = None,
    /,
    *,
    out: Path | None = None,
    data: Data = None,
    device: Device = None,
    resume: Path | None = None,
    checkpoint: str | None = None,
    rate_factor: float | None = None,
) -> None:
    """Train a recipe: fst train RECIPE --out DIR, or continue: fst train --resume DIR.

    Every field of a recipe is an option: fst train RECIPE --help lists them, with short ones
    (--minutes 10, --steps, --lr, --batch-size, --seeds). --config recipe.json takes a recipe from
    a file; fst train --from RUN --out DIR trains a finished run longer.

    Args:
        recipe: Name of the recipe; fst recipes lists them.
        out: Folder for a new run; it must be empty or absent.
        resume: Continue the run in this folder.
        checkpoint: With --resume: continue from this checkpoint instead of the newest.
        rate_factor: With --resume: multiply the learning rates by this from here on, for a run
            that became NaN or infinite.
    """
    del recipe, out  # a recipe's options are parsed by train_recipe, before this is reached
    if resume is None:
        raise ValueError("name a recipe (fst train RECIPE --out DIR) or --resume DIR")
    from fst.commands.train import resume as go_on

    go_on(
        resume,
        checkpoint=checkpoint,
        rate_factor=rate_factor,
        data=data,
        device=device,
        console=console,
    )


@command("evaluate.evaluate")
def evaluate(
    run: Positional[Path],
    /,
    *,
    data: Moved = None,
    device: Device = None,
    again: bool = False,
    unfinished: bool = False,
) -> None:
    """Score a trained run on its test set, beside trivial predictors, and keep the rows with it.

    Args:
        run: The run's folder; for weights that ship with fst their name shows the stored rows.
        again: Score anew and replace the stored rows.
        unfinished: Score a run that was stopped before its end.
    """


@command("evaluate.report")
def report(runs: Positional[tuple[Path, ...]], /, *, out: Path) -> None:
    """Turn the rows and fields of scored runs into one page with tables and figures.

    Args:
        runs: Folders of runs that fst evaluate has scored.
        out: Folder for the page; it must be absent, empty or hold a report already.
    """


@command("ship.ship")
def ship(
    run: Positional[Path],
    /,
    *,
    name: str,
    out: Path | None = None,
    data: Moved = None,
    device: Device = None,
    force: bool = False,
) -> None:
    """Write the weights of a scored run, with a card, as weights that are known by a name.

    Args:
        run: Folder of a run that fst evaluate has scored.
        name: The name for fst.from_pretrained, such as burgers-single.
        out: Folder of all shipped weights; where this copy of fst looks for them if not given.
        data: The data, where they have moved; not read for weights that were scored in float16.
        force: Replace weights of this name.
    """


@command("predict.answer")
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
    device: Device = None,
    force: bool = False,
) -> None:
    """Ask a trained model for values at queries, or a classifier for the classes of images.

    Args:
        run: A run folder, the name of weights that ship with fst, a folder of save_pretrained, or
            hf://owner/name for the hub.
        out: File for the answer: .npz, .h5, .csv, .vtu or .nc; for images .csv.
        observations: What was observed: an fst point file (.h5), .npz, .csv, .vtu or .nc.
        queries: Where to ask: a file of the same kinds, or a grid such as 201x1024.
        images: For a classifier: an image, a folder of images, or a tar file of images.
        neighbors: Decode from this many nearest anchors only.
        condition: The condition of every sample, where the observations hold none.
        force: Replace the file if it exists.
    """


@command("explore.explore")
def explore(
    run: Positional[str] = "burgers-single",
    /,
    *,
    port: int = 8765,
    recipe: str | None = None,
    data: Moved = None,
    device: Device = None,
) -> None:
    """Serve a page on this machine where one draws inputs and sees what a model predicts.

    Args:
        run: A run folder, a folder of save_pretrained, or the name of weights that ship with fst.
        port: Port of the page, on 127.0.0.1 only; 0 takes a free one.
        recipe: For weights outside a run folder: a recipe with the data they were trained on.
    """


@command("demo.demo")
def demo(*, out: Path = Path("runs/demo"), device: Device = None) -> None:
    """Generate a small Burgers set, train a small FST, evaluate it and draw a page.

    Args:
        out: Folder for the run and the page; it must be empty or absent.
    """


@command("compare.compare")
def compare(
    task: Positional[str],
    /,
    *,
    budget: str,
    out: Path,
    models: tuple[str, ...] = (),
    seeds: int = 1,
    data: Data = None,
    device: Device = None,
    compile: bool = True,
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] | None = None,
    size: Literal["paper", "small"] | None = None,
    changes: Annotated[tuple[str, ...], arg(name="set")] = (),
) -> None:
    """Train the models of a task with the same budget and write one table, or go on with it.

    Args:
        task: What stands before the last / of a recipe's name, such as darcy.
        budget: For each model: training time (90s, 10m, 2h) or steps (20000steps).
        out: Folder for the comparison; called again with it, nothing complete is repeated.
        models: Models of the task, such as fst fno; all of them when not given.
        seeds: Train every model with this many seeds.
        compile: Compile every model that can be compiled, on a GPU.
        compile_mode: Compile with this mode of torch.compile, on a CPU as well.
        size: For own: the paper's sizes or small ones; small on a CPU when not given.
        changes: Other values for fields of single models: fst.model.width=64 fno.model.width=32.
    """


@command("search.search")
def search(
    recipe: Positional[str],
    /,
    *,
    out: Path,
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 5e-3),
    steps: int = 4_000,
    confirm: int = 8_000,
    data: Data = None,
    device: Device = None,
) -> None:
    """Search the learning rate of a recipe as the paper does for Darcy, or continue a search.

    Args:
        recipe: Name of the recipe; fst recipes lists them.
        out: Folder for the search; called again with it, nothing complete is repeated.
        rates: Learning rates to try.
        steps: Steps of each trial.
        confirm: Steps that the best trial is carried on for; 0 leaves them out.
    """


for _command in (data_commands.burgers, data_commands.darcy, data_commands.check):
    data_app.command(_command)
COMMANDS.append("data")
app.command(data_app, name="data", help="Make or check data files.")


def run(words: Sequence[str]) -> None:
    """Parse the words and run the command that they name."""
    if words[:1] == ["train"] and len(words) > 1:
        named = not words[1].startswith("-")
        given = {word.partition("=")[0] for word in words}
        if named or given & {"--config", "--from"}:
            from fst.commands.recipe_options import train_recipe

            name = words[1] if named else None
            train_recipe(name, words[2:] if named else words[1:], console=console)
            return
        others = {word.replace("_", "-") for word in given if word.startswith("--")} - RESUMED
        if "--resume" in given and others:
            raise ValueError(
                f"--resume takes no {sorted(others)[0]}: a run goes on with its own recipe; "
                "fst train --from RUN --out DIR trains a finished one longer"
            )
    app.cli(
        prog="fst",
        description="The Function-Space Transformer. fst --version prints its version.",
        args=words or ["--help"],
    )


def check_command(words: Sequence[str]) -> None:
    """An unknown command is answered with the nearest ones."""
    if not words or words[0].startswith("-") or words[0] in COMMANDS:
        return
    hint = did_you_mean(words[0], COMMANDS, cutoff=0.6)
    raise ValueError(
        f"unknown command {printable(words[0])!r}: {hint}there are {', '.join(COMMANDS)}"
    )


def check_options(words: Sequence[str]) -> None:
    """Of an option given twice the last counts, as usual; one with a list would lose a part."""
    for name in ("--set", "--models"):
        if sum(word.partition("=")[0] == name for word in words) > 1:
            raise ValueError(f"{name} is given twice; give it once, with all its values")


def is_out_of_memory(error: Exception) -> bool:
    """Whether something was too large to be allocated; PyTorch says so in words alone."""
    words = ("can't allocate memory", "Storage size calculation overflowed", "out of memory")
    said = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return said or isinstance(error, MemoryError)


def exit_code(error: Exception) -> int | None:
    """Print the one line of an error that is the user's to read; None for any other error."""
    reason = f"error: {one_line(error)}"
    if is_out_of_memory(error):
        reason = f"error: not enough memory for this ({one_line(error)[:200]})"
    elif not isinstance(error, ValueError):
        from fst.training.loop import Interrupted, end_processes
        from fst.training.settings import TrainingError

        if isinstance(error, Interrupted):
            if os.environ.get("RANK", "0") == "0":  # one voice for all processes
                print(f"fst: {one_line(error)}", file=sys.stderr)
            end_processes(INTERRUPTED)  # all stopped at the same step
            return INTERRUPTED
        if not isinstance(error, TrainingError):
            return None
    print(f"fst: {reason}", file=sys.stderr)
    return USER_ERROR


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. User errors are one line on standard error and exit code 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--version"]:
        print(f"function-space-transformer {__version__}")
        return 0
    speak_plainly()
    try:
        check_command(words)
        check_options(words)
        run(words)
        from fst.training.loop import end_processes

        end_processes(0)
    except BrokenPipeError:  # whoever read the output, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        return 0
    except KeyboardInterrupt:
        goes_on = words[:1] in (["data"], ["compare"], ["search"])
        hint = "; the same command goes on where it stopped" if goes_on else ""
        print(f"fst: interrupted{hint}", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        # Errors about what a user gave are ValueErrors or TrainingErrors, and say what to do.
        code = exit_code(error)
        if code is None:
            raise
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
