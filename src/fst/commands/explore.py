"""`fst explore`: a local page where one draws inputs and sees what a model predicts."""

import importlib.util
from dataclasses import replace
from functools import singledispatch
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fst import pretrained
from fst.commands.device import parse_device
from fst.commands.evaluate import read_recipe
from fst.commands.predict import load_model
from fst.commands.train import data_of_run
from fst.data import BurgersData, DarcyData, PointData
from fst.data.point_samples import PointSamples
from fst.data.source import DataSource
from fst.explore.explorer import Explorer
from fst.explore.problems import BurgersProblem, DarcyProblem, PointsProblem, Problem
from fst.recipes import find
from fst.recipes.recipe import Recipe
from fst.terminal import Terminal


def explore(
    run: str = "burgers-single",
    *,
    port: int = 8765,
    recipe: str | None = None,
    data: Path | None = None,
    device: str | None = None,
    console: Console | None = None,
) -> None:
    """Serve the page until interrupted. `recipe` names the data of weights without a run."""
    console = console or Terminal()
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise ValueError(
            "fst explore needs Starlette and uvicorn: "
            "pip install 'function-space-transformer[explore]'"
        )
    from fst.explore.server import ADDRESS, listen, serve

    explorer = make_explorer(run, recipe, data, device)
    torch.set_num_threads(1)  # the explorer has threads of its own
    with listen(port) as listener:
        console.print("first prediction …", style="dim")
        warm_up(explorer)
        number = listener.getsockname()[1]
        console.print(f"{run}: open http://{ADDRESS}:{number} (Ctrl-C ends)", soft_wrap=True)
        try:
            serve(explorer, listener)
        except KeyboardInterrupt:
            return


def make_explorer(
    run: str,
    recipe: str | None = None,
    data: Path | None = None,
    device: str | None = None,
) -> Explorer:
    """The model of a run, of a folder of `save_pretrained` or of a shipped name."""
    folder = pretrained.find(run)
    trained = find(recipe) if recipe is not None else _recipe_of(folder)
    model = load_model(run)
    problem = problem_of(trained, folder, data)
    chosen = parse_device(device)
    threads = torch.get_num_threads() if chosen.type == "cpu" else 1
    return Explorer(model.to(chosen), problem, folder.resolve().name, threads)


def _recipe_of(folder: Path) -> Recipe:
    if folder.is_dir() and not (folder / "recipe.json").is_file():
        raise ValueError(
            f"{folder} does not say what it was trained on: name a recipe with the same data, "
            "such as --recipe burgers-single/fst"
        )
    return read_recipe(folder)


def problem_of(recipe: Recipe, run: Path, data: Path | None = None) -> Problem:
    """What the page shows for the data of a recipe; a user's own points are read."""
    return _problem(recipe.data, recipe, run, data)


@singledispatch
def _problem(source: DataSource, recipe: Recipe, run: Path, data: Path | None) -> Problem:
    raise ValueError(f"fst explore shows Burgers, Darcy and own points, not {recipe.name}")


@_problem.register
def _(source: BurgersData, *_: Any) -> Problem:
    return BurgersProblem(source)


@_problem.register
def _(source: DarcyData, *_: Any) -> Problem:
    return DarcyProblem(source)


@_problem.register
def _(source: PointData, recipe: Recipe, run: Path, data: Path | None) -> Problem:
    path = data_of_run(recipe, run, data)
    source.check_fits(recipe, run, path)
    samples = replace(source, storage="resident").load_test(path).samples
    assert isinstance(samples, PointSamples)
    return PointsProblem(samples)


def warm_up(explorer: Explorer) -> None:
    """One answer, so that errors come before the page and the first one there is not slow."""
    described = explorer.describe()
    asked = {"input": explorer.problem.draw(0), "level": 0, "neighbors": None}
    explorer.answer(asked | {"viscosity": described.get("viscosity", {}).get("low")})
