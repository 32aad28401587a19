"""Every recipe by its name. A recipe is a function that returns a complete run description."""

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from fst.base import Model, build_model
from fst.config import DomainConfig
from fst.data.dataset import PointDataset
from fst.recipes import ablation, burgers, darcy, demo, fast, images, own
from fst.recipes.recipe import Recipe
from fst.terminal import did_you_mean
from fst.types import check_argument

_FUNCTIONS: list[Callable[[], Recipe]] = [
    burgers.single_fst,
    burgers.single_fno,
    burgers.single_perceiver_io,
    burgers.single_transolver,
    burgers.single_deeponet,
    burgers.all_fst,
    burgers.all_fno,
    burgers.all_perceiver_io,
    darcy.fst,
    darcy.fno,
    darcy.perceiver_io,
    darcy.transolver,
    darcy.deeponet,
    images.imagenet_fst,
    images.imagenet_vit,
    images.imagenet_cnn_vit,
    *ablation.recipes(),
    demo.burgers,
    demo.fno,
    demo.perceiver_io,
    *own.RECIPES,
    images.own_fst,
    images.own_fst_256,
    images.own_vit,
    images.own_cnn_vit,
    *fast.recipes(),
]
RECIPES: dict[str, Callable[[], Recipe]] = {make().name: make for make in _FUNCTIONS}
CHOOSE = {own.TASK: own.choose, images.OWN: images.choose}
"""For tasks on a user's own data: what fits a recipe to the data and the device."""
_COSTS = {own.TASK: own.COST, images.OWN: images.OWN_COST}


def fitted(
    recipe: Recipe, data: Path, device: torch.device, size: own.Size | None = None
) -> Recipe:
    """The recipe that `fst train` trains with these data on this device."""
    if recipe.task in CHOOSE:
        return CHOOSE[recipe.task](recipe, data, device, size).recipe
    return recipe.data.fit(recipe, data)


class UnknownRecipeError(ValueError):
    """No recipe has this name; the message offers the nearest."""


def find(name: str) -> Recipe:
    if not isinstance(name, str):
        raise TypeError(f"name must be the name of a recipe, got {name!r}")
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES)
        raise UnknownRecipeError(
            f"unknown recipe {name!r}: {hint}`fst recipes` lists all {len(RECIPES)}"
        )
    return RECIPES[name]()


def describe(name: str) -> str:
    """Command, cost and the paper's score; the docstring says what the recipe itself does not."""
    make, recipe = RECIPES[name], find(name)
    text = inspect.cleandoc(getattr(make, "func", make).__doc__ or "")
    summary, _, rest = text.partition("\n\n")
    lines = [summary, ""]
    if "Command:" not in text:
        data = f" {recipe.data.own.partition('add ')[2]}" if recipe.data.own else ""
        lines.append(f"Command: fst train {name}{data} --out runs/{name.replace('/', '-')}")
    if recipe.task in _COSTS:
        lines.append(f"Cost: {_COSTS[recipe.task]}")
    if rest:
        lines.append(rest)
    if recipe.paper_error is not None and "Paper:" not in text:
        grid = "×".join(map(str, getattr(recipe.evaluation, "grids", ((),))[-1]))
        lines.append(f"Paper: relative L2 {recipe.paper_error:g} on the full {grid} grid.")
    return "\n".join(lines)


def build(name: str, data: PointDataset | None = None, **overrides: Any) -> Model:
    """The untrained model of a recipe, on the CPU in float32.

    `data` decides channels and domain, and overrides are fields of the model's configuration:
    `fst.build("own/fst", data, width=64)`.
    """
    check_argument("data", data, PointDataset | None)
    config: Any = find(name).model
    known = [field.name for field in fields(config)]
    unknown = [given for given in overrides if given not in known]
    if unknown:
        hint = did_you_mean(unknown[0], known).strip() or f"there are {', '.join(known)}"
        raise TypeError(f"{name} has no setting {unknown[0]!r}: {hint}")
    if data is not None:
        if not isinstance(config, DomainConfig):
            raise TypeError(f"{name} takes images, and data are points")
        overrides = data.decided(config) | overrides
    return build_model(replace(config, **overrides))
