"""`fst ship`: the weights of a scored run as a folder that ships with fst, with a card.

FOLDER/NAME/model.safetensors, config.json   what `fst.from_pretrained(NAME)` loads, with
                                             the names and units of the data
FOLDER/NAME/recipe.json                      what it was trained with
FOLDER/NAME/results/rows.json                its test errors, as `fst evaluate` found them
FOLDER/NAME/README.md                        the card: data, recipe, cost, scores and limits

Matrices are stored in half precision if that moves the validation error by less than a hundredth of
itself, or if they were so when they were scored. The test set is not scored again.
"""

import re
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from jinja2 import Environment
from rich.console import Console
from torch import Tensor

from fst import pretrained
from fst.commands.evaluate import read_recipe
from fst.commands.train import check_same_data, choose_device, data_of_run
from fst.data.samples import Samples
from fst.evaluation.protocol import EvaluationSettings, measure, measuring, represented
from fst.evaluation.rows import RESULTS, ROWS, Row, read_run
from fst.evaluation.tables import error_table, group_table
from fst.io import file_errors, read_object, write_text
from fst.operators import Operator
from fst.pretrained import WEIGHTS
from fst.recipes.comparison import comparable
from fst.recipes.recipe import Recipe

CARD = Environment(trim_blocks=True, keep_trailing_newline=True).from_string(
    Path(__file__).with_name("card.md").read_text()
)
# All that such a folder holds: nothing else is ever removed.
LAYOUT = {"README.md", "config.json", "recipe.json", WEIGHTS, f"{RESULTS}/{ROWS}"}
LARGEST_MOVE = 0.01
"""Of the validation error, relative to itself, that half precision may cost."""


@dataclass(frozen=True)
class Rounding:
    """What half precision did to the validation error, and whether it was chosen."""

    full: float
    half: float

    @property
    def chosen(self) -> bool:
        return abs(self.half - self.full) < LARGEST_MOVE * self.full  # not if it is NaN

    def words(self) -> str:
        kept = "Matrices are stored in float16" if self.chosen else "Weights are stored in float32"
        return (
            f"{kept}: float16 moves the validation error from {self.full:.6f} to {self.half:.6f} "
            f"({(self.half / self.full - 1):+.2%})"
        )


def ship(
    run: Path,
    *,
    name: str,
    out: Path | None,
    data: Path | None,
    device: str | None,
    force: bool,
    console: Console,
) -> None:
    """Write the folder of a scored run; `out` is where such folders lie, fst's own by default."""
    folder = (out or pretrained.SHIPPED) / name
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise ValueError(f"name must be lower-case words joined by hyphens, got {name!r}")
    check_replaceable(folder, run, force)
    recipe, rows = comparable(read_recipe(run)), read_run(run).rows
    settings, best = recipe.evaluation, run / "best" / WEIGHTS
    if not isinstance(settings, EvaluationSettings):
        raise ValueError(f"only operators are shipped, {run} holds a classifier")
    if not best.is_file():
        raise ValueError(f"{run} has no weights: best/{WEIGHTS} is missing")
    if rows[0].protocol != settings.fingerprint(best.read_bytes(), recipe.data, recipe.model):
        raise ValueError(f"{run}: best/{WEIGHTS} are not the weights that were scored")
    lines = card_lines(run, recipe, rows[0])

    model, weights = Operator.from_pretrained(best.parent), pretrained.read(best.parent)[2]
    stored, scored = weights, "as they are stored here"
    words = "Matrices are stored in float16"
    if not any(value.dtype == torch.float16 for value in weights.values()):
        path, chosen = data_of_run(recipe, run, data), choose_device(device)
        check_same_data(run, recipe.data, path)
        validation = recipe.data.load(path, chosen)[1].samples
        half = halved(weights)
        rounding = measured(model.to(chosen), weights, half, validation, settings)
        stored, scored = half if rounding.chosen else weights, "in float32"
        words = rounding.words()
    grid = "x".join(map(str, rows[-1].grid)) if rows[-1].grid else "FILE"
    tables = filter(None, (error_table(rows), group_table(rows)))
    scores = "\n".join(table.markdown() for table in tables)
    known: dict[str, Any] = {
        "name": name,
        "grid": grid,
        "lines": lines,
        "limits": recipe.data.limits,
    }
    known |= {"scored": scored, "scores": scores, "own": recipe.data.own}
    with file_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Complete before the old one goes.
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as temporary:
            made = Path(temporary, "made")
            labels = read_object(run / "run.json").get("labels")
            pretrained.save(type(model).__name__, model.config, stored, made, labels)
            (made / RESULTS).mkdir()
            for file in ("recipe.json", f"{RESULTS}/{ROWS}"):
                shutil.copy(run / file, made / file)
            small = (made / WEIGHTS).stat().st_size / 1e6
            large = (
                4 * sum(each.numel() * (1 + each.is_complex()) for each in weights.values()) / 1e6
            )
            lines["Weights"] = f"{words}; {small:.1f} MB, in float32 {large:.1f} MB"
            write_text(made / "README.md", CARD.render(**known))
            before = Path(temporary, "before")
            if folder.exists():
                folder.rename(before)
            try:
                made.rename(folder)
            except OSError:
                if before.exists():
                    before.rename(folder)
                raise
    console.print(f"{words}.")
    console.print(f"{folder}: {small:.1f} MB of weights, in float32 {large:.1f} MB")


def check_replaceable(folder: Path, run: Path, force: bool) -> None:
    """Raise unless `folder` is free or, with `force`, holds shipped weights and nothing else."""
    ours, theirs = folder.resolve(), run.resolve()
    if ours == theirs or ours in theirs.parents or theirs in ours.parents:
        raise ValueError(f"{folder} and the run {run} must lie apart: choose another name or --out")
    if not folder.exists():
        return
    if not force:
        raise ValueError(f"{folder} is there already, and nothing is overwritten (--force does)")
    held = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    if not folder.is_dir() or (held and set(held) != LAYOUT):
        others = sorted(set(held) ^ LAYOUT)[:1] or [folder.name]
        raise ValueError(
            f"{folder} does not hold shipped weights alone ({others[0]}): not replaced"
        )


def measured(
    model: Operator,
    full: dict[str, Tensor],
    half: dict[str, Tensor],
    validation: Samples,
    settings: EvaluationSettings,
) -> Rounding:
    """The validation errors of a model with its own weights and with those in half precision."""
    asked = replace(settings.without_paper(), grids=(), neighbors=())

    def error(weights: dict[str, Tensor]) -> float:
        model.load_state_dict(weights)
        with measuring(model):
            (found,) = measure(represented(model, asked), validation, asked)
        return fmean(found.errors)

    return Rounding(error(full), error(half))


def halved(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices in float16; vectors, which are few, and statistics stay as they are."""
    return {
        name: value.half() if value.ndim > 1 and value.is_floating_point() else value
        for name, value in weights.items()
    }


def command_line(words: list[str]) -> str:
    """The command of a run, as one would type it; folders of one machine by their names alone."""
    if len(words) < 2:
        return "fst.fit"  # of a script
    return " ".join(["fst", *(Path(w).name if Path(w).is_absolute() else w for w in words[1:])])


def card_lines(run: Path, recipe: Recipe, row: Row) -> dict[str, str]:
    """The lines of a card's table, from the run's files."""
    summary, environment = map(read_object, (run / "summary.json", run / "environment.json"))
    seconds = summary.get("update_seconds")
    if seconds is None or row.training is None:
        raise ValueError(f"{run}: summary.json does not say the seconds of its updates")
    versions = environment.get("versions") or {}
    before = "".join(
        f"{each['steps']:,} steps, {each['update_seconds']:,.0f} s on {each['hardware']}; then "
        for each in read_object(run / "run.json").get("before", [])
    )
    described = (type(recipe.data).__doc__ or "").partition("\n")[0]
    fields = pretrained.to_json(recipe.data)
    own = recipe.data.own
    shown = [f"{key} {fields[key]}" for key in fields if key not in {"kind", "file"}]
    origin = f"File: {row.data};" if own else "Generated by fst unless a file was given:"
    return {
        "Model": f"{row.model}, {row.parameters:,} parameters",
        "Recipe": f"`{row.recipe}`, seed {row.seed}; all of it in `recipe.json`",
        "Command": f"`{command_line(list(environment.get('command') or []))}`",
        "Data": f"{described} {origin} {', '.join(shown)}",
        "Training": f"{before}{row.training.steps:,} steps, {seconds:,.0f} s of updates "
        f"(compilation, validation and saving: {row.training.seconds - seconds:,.0f} s more); "
        f"weights of step {summary['selected_step']:,}, "
        f"validation error {summary['validation_error']:.5f}",
        "Hardware": f"{row.training.device}, torch {versions.get('torch')}",
        "Commit": row.git_hash or "not recorded",
    }
