"""`fst recipes`: what there is to train."""

import json
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fst.base import parameter_count
from fst.evaluation.rows import RELATIVE_L2
from fst.recipes import RECIPES, describe, find
from fst.recipes.recipe import Recipe, build_model

# Blanks around four columns and the edges.
PADDING = 13


def summary(recipe: Recipe) -> dict[str, Any]:
    """One recipe as a row of the table."""
    return {
        "name": recipe.name,
        "task": recipe.task,
        "model": recipe.model_name,
        "parameters": count_parameters(recipe),
        "paper_parameters": recipe.paper_parameters,
        "paper_error": recipe.paper_error,
        "error": recipe.training.objective.names[0],
        "description": describe(recipe.name).splitlines()[0],
    }


def count_parameters(recipe: Recipe) -> int | None:
    """None where a package that the model needs is not installed."""
    try:
        with torch.device("meta"):  # shapes without numbers
            return parameter_count(build_model(recipe.model))
    except ImportError:
        return None


def list_recipes(*, as_json: bool, console: Console) -> None:
    """Print all recipes as a table, or as JSON for programs."""
    rows = [summary(find(name)) for name in RECIPES]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    name, parameters, error = max(map(len, RECIPES)), len("parameters"), len("0.018528")
    table = Table(box=SIMPLE_HEAD)
    table.add_column("name", no_wrap=True, style="bold", min_width=name)
    table.add_column("parameters", no_wrap=True, justify="right", min_width=parameters)
    table.add_column("paper's\nerror", no_wrap=True, justify="right", min_width=error)
    # In a narrow terminal the descriptions give way, not the names and numbers.
    left = max(10, console.width - (name + parameters + error) - PADDING)
    table.add_column("what it is", no_wrap=True, overflow="ellipsis", max_width=left)
    for row in rows:
        count = "-" if row["parameters"] is None else f"{row['parameters']:,}"
        quoted = "-" if row["paper_error"] is None else _error(row)
        table.add_row(row["name"], count, quoted, row["description"])
    console.print(table)
    console.print("Errors: relative L2, or the share of wrong first guesses (%).", style="dim")
    console.print("One recipe with all its fields: fst recipes NAME", style="dim")


def readable(recipe: Recipe) -> dict[str, Any]:
    """The fields of a recipe; placeholders for class names that the data will give in short."""
    fields = recipe.to_json()
    names = fields["model"].get("class_names", [])
    if len(names) > 3:
        fields["model"]["class_names"] = [*names[:2], "...", names[-1]]
    return fields


def _error(row: dict[str, Any]) -> str:
    """Shares of wrong guesses in percent, to be told apart from relative L2."""
    percent = row["error"] != RELATIVE_L2
    return f"{100 * row['paper_error']:g} %" if percent else f"{row['paper_error']:g}"


def show_recipe(name: str, *, as_json: bool, console: Console) -> None:
    """Print one recipe: what it is, and every field that can be overridden."""
    recipe = find(name)
    if as_json:
        print(json.dumps(recipe.to_json(), indent=2))
        return
    console.print(f"[bold]{name}[/bold]")
    console.print(describe(name), markup=False, highlight=False)
    console.print_json(data=readable(recipe))
    console.print(f"Override any field: fst train {name} --help", style="dim")
