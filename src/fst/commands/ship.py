"""`fst ship`: the weights of a scored run as a folder that ships with fst, with a card.

FOLDER/NAME/model.safetensors, config.json   what `fst.from_pretrained(NAME)` loads
FOLDER/NAME/recipe.json                      what it was trained with
FOLDER/NAME/results/rows.json                its test errors, as `fst evaluate` found them
FOLDER/NAME/README.md                        the card: data, recipe, cost, scores and limits

Matrices are stored in half precision if that moves the validation error by less than a hundredth of
itself. The test set is not scored again.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from fst import pretrained
from fst.commands.device import choose_device
from fst.commands.evaluate import read_recipe
from fst.commands.results import describe
from fst.commands.train import check_same_data, data_of_run
from fst.data.samples import Samples
from fst.evaluation.protocol import EvaluationSettings, batch_draws, measuring, row_batches
from fst.evaluation.rows import RESULTS, ROWS, Row, read_rows
from fst.evaluation.tables import error_table
from fst.io import file_errors, read_object, write_text
from fst.metrics import relative_l2
from fst.operators import Operator
from fst.pretrained import WEIGHTS
from fst.recipes.comparison import comparable
from fst.recipes.recipe import Recipe
from fst.terminal import Terminal

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
    name: str,
    *,
    out: Path | None = None,
    data: Path | None = None,
    device: str | None = None,
    force: bool = False,
    console: Console | None = None,
) -> Path:
    """Write the folder of a scored run; `out` is where such folders lie, fst's own by default."""
    console = console or Terminal()
    folder = (out or pretrained.SHIPPED) / name
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise ValueError(f"name must be lower-case words joined by hyphens, got {name!r}")
    if folder.exists() and not force:
        raise ValueError(f"{folder} is there already, and nothing is overwritten (--force does)")
    recipe, record = comparable(read_recipe(run)), describe(run)
    settings = recipe.evaluation
    if not isinstance(settings, EvaluationSettings):
        raise ValueError(f"only operators are shipped, {run} holds a classifier")
    rows = read_rows(run / RESULTS / ROWS)
    best = run / "best" / WEIGHTS
    if not best.is_file():
        raise ValueError(f"{run} has no weights: best/{WEIGHTS} is missing")
    if rows[0].protocol != recipe.evaluation.fingerprint(best.read_bytes(), recipe.data):
        raise ValueError(f"{run}: best/{WEIGHTS} are not the weights that were scored")

    model = Operator.from_pretrained(best.parent)
    path, chosen = data_of_run(recipe, run, data), choose_device(device)
    check_same_data(run, recipe.data, path)
    validation = recipe.data.load(path, chosen)[1].samples
    assert isinstance(validation, Samples)
    weights = pretrained.read(best.parent)[2]
    half = halved(weights)
    rounding = Rounding(
        validation_error(model.to(chosen), validation, settings),
        validation_error(loaded(model, half), validation, settings),
    )
    with file_errors(folder):
        if folder.exists():
            shutil.rmtree(folder)
        stored = half if rounding.chosen else weights
        pretrained.save(type(model).__name__, model.config, stored, folder)
        (folder / RESULTS).mkdir()
        shutil.copy(run / "recipe.json", folder / "recipe.json")
        shutil.copy(run / RESULTS / ROWS, folder / RESULTS / ROWS)
    sizes = megabytes(folder / WEIGHTS), megabytes(best)
    command = read_object(run / "environment.json").get("command") or []
    write_text(
        folder / "README.md", card(name, recipe, record, rows, rounding, sizes, list(command))
    )
    console.print(f"{rounding.words()}.")
    console.print(f"{folder}: {sizes[0]:.1f} MB of weights, {sizes[1]:.1f} MB before")
    return folder


def command_line(words: list[str]) -> str:
    """The command of a run, as one would type it; folders of one machine by their names alone."""
    return " ".join(["fst", *(Path(w).name if Path(w).is_absolute() else w for w in words[1:])])


def megabytes(path: Path) -> float:
    return path.stat().st_size / 1e6


def halved(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices in float16; vectors, which are few, and statistics stay as they are."""
    return {
        name: value.half() if value.ndim > 1 and value.is_floating_point() else value
        for name, value in weights.items()
    }


def loaded(model: Operator, weights: dict[str, Tensor]) -> Operator:
    """The model with other weights."""
    model.load_state_dict(weights)
    return model


def validation_error(model: Operator, samples: Samples, settings: EvaluationSettings) -> float:
    """The mean relative L2 on the validation grid, in float32."""
    draws, errors = batch_draws(model, settings), []
    with measuring(model):
        for rows in row_batches(samples, settings):
            batch = samples.batch(rows)
            prediction = model(batch.observations, next(draws))(batch.queries)
            errors.append(relative_l2(prediction, batch.targets, batch.mask))
    return float(torch.cat(errors).double().mean())


def card(
    name: str,
    recipe: Recipe,
    record: dict[str, Any],
    rows: list[Row],
    rounding: Rounding,
    sizes: tuple[float, float],
    command: list[str],
) -> str:
    """The README of shipped weights, all of it from the run's files."""
    described = (type(recipe.data).__doc__ or "").partition("\n")[0]
    fields = pretrained.to_json(recipe.data)
    data = ", ".join(f"{key} {value}" for key, value in fields.items() if key != "kind")
    commit = record["commit"] or "not recorded"
    changed = " (modified)" if record["modified"] else ""
    lines = {
        "Model": f"{record['model']}, {record['parameters']:,} parameters",
        "Recipe": f"`{record['recipe']}`, seed {record['seed']}; all of it in `recipe.json`",
        "Command": f"`{command_line(command)}`",
        "Data": f"{described} Generated by fst unless a file was given: {data}",
        "Training": f"{record['steps']:,} steps, {record['seconds']:,.0f} s of updates "
        f"(compilation, validation and saving: {record['compilation_and_validation_seconds']:,.0f} "
        f"s more); weights of step {record['selected_step']:,}, validation error "
        f"{record['validation_error']:.5f}",
        "Hardware": f"{record['hardware']}, torch {record['torch']}",
        "Commit": f"{commit}{changed}",
        "Weights": f"{rounding.words()}; {sizes[0]:.1f} MB, in float32 {sizes[1]:.1f} MB",
    }
    table = "\n".join(
        f"| {key} | {value.replace('|', chr(92) + '|')} |" for key, value in lines.items()
    )
    grid = "x".join(map(str, rows[-1].grid)) if rows[-1].grid else "FILE"
    return f"""# {name}

```python
import fst

model = fst.from_pretrained("{name}")
```

`fst predict {name} --observations FILE --queries {grid} --out answer.npz` asks it on the command
line, `fst explore {name}` on a page, and `fst evaluate {name}` shows its scores.

| | |
| :--- | :--- |
{table}

## Scores

Mean relative L2 on the test set, scored once, with the weights in float32.

{error_table(rows).markdown()}
## Limits

{recipe.data.limits}
"""
