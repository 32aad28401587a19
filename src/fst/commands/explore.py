"""`fst explore`: a local page where one draws inputs and sees what a model predicts."""

import importlib.util
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from typing import cast

import torch
from rich.console import Console

from fst import pretrained
from fst.commands.evaluate import read_recipe
from fst.commands.predict import load_model
from fst.commands.train import data_of_run
from fst.data import BurgersData, DarcyData, PointData, TestSplit
from fst.data.point_samples import PointSamples
from fst.data.source import MadeData
from fst.explore.explorer import Explorer
from fst.explore.problems import BurgersProblem, DarcyProblem, PointsProblem, Problem
from fst.recipes import find
from fst.recipes.recipe import Recipe
from fst.types import parse_device


def explore(
    run: str,
    *,
    port: int,
    recipe: str | None,
    data: Path | None,
    device: str | None,
    console: Console,
) -> None:
    """Serve the page until interrupted. `recipe` names the data of weights without a run."""
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise ValueError(
            "fst explore needs Starlette and uvicorn: "
            "pip install 'function-space-transformer[explore]'"
        )
    from fst.explore.server import ADDRESS, listen, serve

    explorers = make_explorers(run, recipe, data, device)
    first = next(iter(explorers.values()))()
    torch.set_num_threads(1)  # explorers have threads of their own
    with listen(port) as listener:
        console.print("first prediction …", style="dim")
        warm_up(first)
        number = listener.getsockname()[1]
        console.print(f"{run}: open http://{ADDRESS}:{number} (Ctrl-C ends)", soft_wrap=True)
        with suppress(KeyboardInterrupt):
            serve(explorers, listener)


def make_explorers(
    run: str, recipe: str | None = None, data: Path | None = None, device: str | None = None
) -> Mapping[str, Callable[[], Explorer]]:
    """What the page offers, made when asked for: a run, or a shipped name before all the others."""
    make = partial(make_explorer, device=device, threads=torch.get_num_threads())
    made = {run: cache(partial(make, run, recipe, data))}
    if run in pretrained.shipped() and not Path(run).is_dir():
        for name, folder in pretrained.shipped().items():
            if name != run and isinstance(read_recipe(folder).data, MadeData):  # needs no file
                made[name] = cache(partial(make, name))
    return made


def make_explorer(
    run: str,
    recipe: str | None = None,
    data: Path | None = None,
    device: str | None = None,
    threads: int | None = None,
) -> Explorer:
    """The model of a run, of a folder of `save_pretrained` or of a shipped name."""
    folder = pretrained.find(run)
    if recipe is None and folder.is_dir() and not (folder / "recipe.json").is_file():
        raise ValueError(
            f"{folder} does not say what it was trained on: name a recipe with the same data, "
            "such as --recipe burgers-single/fst"
        )
    trained = read_recipe(folder) if recipe is None else find(recipe)
    model, problem = load_model(run), problem_of(trained, folder, data)
    if getattr(model.config, "grid", problem.grids[-1]) != problem.grids[-1]:
        raise ValueError(
            f"fst explore asks on a grid of {problem.grids[-1]} points here, and "
            f"{type(model).__name__} answers on one of {model.config.grid} alone: fst report shows "
            "its predictions"
        )
    # Without what makes predictions better and slower: a drawn input is answered at once.
    plain = {e.name: e.default for e in fields(model.config) if e.name.startswith("prediction_")}
    model.config = replace(model.config, **plain)
    chosen = parse_device(device)
    threads = (threads or torch.get_num_threads()) if chosen.type == "cpu" else 1
    return Explorer(model.to(chosen), problem, folder.resolve().name, threads)


def problem_of(recipe: Recipe, run: Path, data: Path | None = None) -> Problem:
    """What the page shows for the data of a recipe; a user's own points are read."""
    match recipe.data:
        case BurgersData() as source:
            return BurgersProblem(source)
        case DarcyData() as source:
            return DarcyProblem(source)
        case PointData() as source:
            path = data_of_run(recipe, run, data)
            source.check_fits(recipe, run, path)
            test = replace(source, storage="resident").load_test(path)
            assert isinstance(test.samples, PointSamples)
            return PointsProblem(cast(TestSplit[PointSamples], test))
    raise ValueError(f"fst explore shows Burgers, Darcy and own points, not {recipe.name}")


def warm_up(explorer: Explorer) -> None:
    """One answer, so that errors come before the page and the first one there is not slow."""
    described = explorer.describe()
    asked = {"input": explorer.problem.draw(0), "level": 0, "neighbors": None}
    explorer.answer(asked | {"viscosity": described.get("viscosity", {}).get("low")})
