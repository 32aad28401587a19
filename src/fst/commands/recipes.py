"""`fst recipes`: what there is to train."""

import json
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fst.operators import parameter_count
from fst.recipes import RECIPES, describe, find
from fst.recipes.recipe import Recipe, build_model


def summary(recipe: Recipe) -> dict[str, Any]:
    """One recipe as a row of the table."""
    return {
        "name": recipe.name,
        "task": recipe.task,
        "model": recipe.model_name,
        "parameters": count_parameters(recipe),
        "paper_parameters": recipe.paper_parameters,
        "paper_error": recipe.paper_error,
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
    table = Table(title="Recipes")
    table.add_column("name", no_wrap=True, style="bold")
    table.add_column("parameters", justify="right")
    table.add_column("paper's error", justify="right")
    table.add_column("what it is", no_wrap=True, overflow="ellipsis")
    for row in rows:
        parameters = "-" if row["parameters"] is None else f"{row['parameters']:,}"
        error = "-" if row["paper_error"] is None else f"{row['paper_error']:g}"
        table.add_row(row["name"], parameters, error, row["description"])
    console.print(table)
    console.print("One recipe with all its fields: fst recipes NAME", style="dim")


def show_recipe(name: str, *, as_json: bool, console: Console) -> None:
    """Print one recipe: what it is, and every field that can be overridden."""
    recipe = find(name)
    if as_json:
        print(json.dumps(recipe.to_json(), indent=2))
        return
    console.print(f"[bold]{name}[/bold]")
    console.print(describe(name), highlight=False)
    console.print_json(data=recipe.to_json())
    console.print(f"Override any field: fst train {name} --help", style="dim")
