"""`fst recipes`: what there is to train."""

import json
from contextlib import suppress
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fst.base import build_model, parameter_count
from fst.evaluation.rows import RELATIVE_L2
from fst.recipes import RECIPES, describe, find
from fst.recipes.recipe import Recipe


def recipes(name: str | None, *, json: bool, console: Console) -> None:
    if name is None:
        list_recipes(as_json=json, console=console)
    else:
        show_recipe(name, as_json=json, console=console)


def summary(recipe: Recipe) -> dict[str, Any]:
    """One recipe as a row of the table."""
    parameters = None
    with suppress(ImportError), torch.device("meta"):  # shapes without numbers
        parameters = parameter_count(build_model(recipe.model))
    return {
        "name": recipe.name,
        "task": recipe.task,
        "model": recipe.model_name,
        "parameters": parameters,
        "paper_parameters": recipe.paper_parameters,
        "paper_error": recipe.paper_error,
        "error": recipe.training.objective.names[0],
        "description": describe(recipe.name).splitlines()[0],
    }


def list_recipes(*, as_json: bool, console: Console) -> None:
    """Print all recipes as a table, or as JSON for programs."""
    rows = [summary(find(name)) for name in RECIPES]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(box=SIMPLE_HEAD)
    # One column for both: beside the longest name a narrow terminal has no room for words.
    table.add_column("name, and what it is", min_width=max(map(len, RECIPES)))
    table.add_column("parameters", no_wrap=True, justify="right")
    table.add_column("paper's\nerror", no_wrap=True, justify="right")
    for row in rows:
        count = "-" if row["parameters"] is None else f"{row['parameters']:,}"
        quoted = "-"
        if row["paper_error"] is not None:
            share = row["error"] != RELATIVE_L2  # of wrong guesses, to be told apart
            quoted = f"{100 * row['paper_error']:g} %" if share else f"{row['paper_error']:g}"
        words = Padding(Text(row["description"], style="dim"), (0, 0, 0, 2))
        table.add_row(Group(Text(row["name"], style="bold"), words), count, quoted)
    console.print(table)
    console.print("Errors: relative L2, or the share of wrong first guesses (%).", style="dim")
    console.print("One recipe with all its fields: fst recipes NAME", style="dim")


def show_recipe(name: str, *, as_json: bool, console: Console) -> None:
    """Print one recipe: what it is, and every field that can be overridden."""
    fields = find(name).to_json()
    if as_json:
        print(json.dumps(fields, indent=2))
        return
    console.print(name, style="bold", markup=False, highlight=False)
    console.print(describe(name), markup=False, highlight=False)
    names = fields["model"].get("class_names", [])
    if len(names) > 3:  # placeholders, until the data name them
        fields["model"]["class_names"] = [*names[:2], "...", names[-1]]
    console.print_json(data=fields)
    console.print(f"Override any field: fst train {name} --help", style="dim")
