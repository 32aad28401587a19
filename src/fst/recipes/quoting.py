"""Where the paper's numbers may stand beside ours.

Enters: the recipe of a run, with whatever options it was given. Leaves: the same recipe, with the
paper's numbers only if its data and its test grids are those of the recipe shipped under its name.
How a model was trained may differ: that is what the comparison is about.
"""

from dataclasses import replace
from typing import Any

from fst.pretrained import to_json
from fst.recipes import RECIPES, find
from fst.recipes.recipe import Recipe

# Settings of data sources that say how they are read, and change nothing in what is read.
READING = {"storage", "workers"}


def comparable(recipe: Recipe) -> Recipe:
    """The recipe, without the paper's numbers where they are about another problem."""
    if recipe.name in RECIPES and problem(recipe) == problem(find(recipe.name)):
        return recipe
    return replace(recipe, evaluation=recipe.evaluation.without_paper(), paper_error=None)


def problem(recipe: Recipe) -> tuple[dict[str, Any], object]:
    """What is learned and where it is tested."""
    data = {name: value for name, value in to_json(recipe.data).items() if name not in READING}
    return data, getattr(recipe.evaluation, "grids", None)
