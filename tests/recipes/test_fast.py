"""The `fast/...` recipes: what they change in the paper's; every model takes moved samples."""

from dataclasses import fields, replace

import pytest
import torch
from rich.console import Console

from comparison_recipes import shrink_model
from data_examples import BURGERS, DARCY, POINTS, TIMES
from fst.base import build_model, parameter_count
from fst.baselines.fno import FNOConfig
from fst.baselines.shared import GridOutput
from fst.data import BurgersData, DarcyData
from fst.data.samples import subset_indices
from fst.recipes import RECIPES, describe, find
from fst.recipes.comparison import models_of
from fst.recipes.fast import TASKS
from fst.recipes.recipe import Recipe
from fst.training.loop import build_accelerator
from fst.training.trainer import Batches, Trainer

FAST = [name for name in RECIPES if name.startswith("fast/")]
CHANGED = {
    *("schedule", "optimizer", "learning_rate", "predictor_learning_rate", "clip", "queries"),
    *("augment", "checkpoint_every", "matrix_rate", "weight_decay", "momentum", "batch_size"),
}
# Where length scales are tied to the spacing of anchors.
LOCAL = ("fast/burgers-single/fst", "fast/burgers-all/fst")
MENDED = [name for name in FAST if name.endswith("-mended")]
SMALL = [name for name in FAST if name.endswith("-small")]


@pytest.mark.parametrize("name", [name for name in FAST if name not in MENDED + SMALL])
def test_only_training_scales_and_the_choice_of_targets_differ_from_the_papers_recipe(name):
    fast, paper = find(name), find(name.removeprefix("fast/"))
    symmetry = "transpose" if isinstance(paper.data, DarcyData) else "odd-reflection"
    model = replace(paper.model, prediction_symmetry=symmetry)
    if name.endswith("/fst"):
        scales = "local" if name in LOCAL else model.length_scales
        model = replace(model, length_scales=scales, prediction_points="all-anchors")
        with torch.device("meta"):
            assert parameter_count(build_model(model)) == paper.paper_parameters
    expected = replace(paper.derive(name), model=model)
    assert replace(fast, training=paper.training, data=paper.data) == expected
    if isinstance(paper.data, DarcyData):
        assert fast.data == replace(paper.data, symmetries="square")
    else:
        assert fast.data.supervision_grid == (paper.data.supervision_grid and (201, 100))
        assert fast.data.validation_grid == (201, 100)
        grids = {"supervision_grid": None, "validation_grid": (201, 100)}
        assert replace(fast.data, **grids) == replace(paper.data, **grids)
    names = [field.name for field in fields(fast.training)]
    different = {n for n in names if getattr(fast.training, n) != getattr(paper.training, n)}
    assert different <= CHANGED
    assert fast.training.augment
    assert fast.training.clip == 1.0


@pytest.mark.parametrize("name", [name for name in FAST if "burgers" in name])
def test_every_saved_time_of_burgers_is_among_the_targets(name):
    data = find(name).data
    times = (data.supervision_grid or data.grid)[0]
    assert subset_indices(data.times, times).tolist() == list(range(data.times))


@pytest.mark.parametrize("name", MENDED)
def test_mended_fno_differs_from_the_published_one_by_that_alone(name):
    ours, published = find(name), find(name.removesuffix("-mended"))
    assert ours.model == replace(published.model, odd_axes="mended")
    assert ours.training == published.training
    assert ours.data == published.data
    assert ours.model_name != published.model_name
    assert ours.evaluation.grids == published.evaluation.grids
    assert not ours.evaluation.paper_errors  # which are the published FNO's


@pytest.mark.parametrize("name", SMALL)
def test_small_fst_differs_from_the_papers_by_its_sizes_alone(name):
    ours, papers = find(name), find(name.removesuffix("-small"))
    assert ours.model.anchors * 4 == papers.model.anchors
    assert ours.model_name != papers.model_name
    sizes = ("rows", "anchors_per_row", "points_from_anchors", "points_from_sobol")
    names = (*sizes, "refinement_steps")
    assert replace(papers.model, **{n: getattr(ours.model, n) for n in names}) == ours.model
    assert ours.data == papers.data
    assert not ours.evaluation.paper_errors


@pytest.mark.parametrize("task", TASKS)
def test_every_model_of_a_task_has_the_same_schedule(task):
    models = models_of(f"fast/{task}")
    published = {model for model in models if not model.endswith(("-mended", "-small"))}
    assert published == set(models_of(task))
    assert ("fno-mended" in models) is (find(models["fno"]).data.grid[0] % 2 == 1)
    schedules = {find(name).training.schedule for name in models.values()}
    assert len(schedules) == 1
    assert schedules.pop().warmup == 300


@pytest.mark.parametrize("name", FAST)
def test_the_description_gives_the_command_of_the_recipe(name):
    assert f"Command: fst train {name} --out " in describe(name)
    assert f"{find(name).training.schedule.maximum:,} steps" in describe(name)


def shrunk(name: str) -> Recipe:
    """The recipe with a model and data of seconds; precision and augmentation as they are."""
    recipe = find(name)
    whole = recipe.training.queries is None
    if isinstance(recipe.data, BurgersData):
        condition = recipe.data.condition
        data = replace(
            BURGERS,
            viscosities=(0.1, 0.5) if condition else (0.1,),
            condition=condition,
            supervision_grid=None if whole else BURGERS.supervision_grid,
        )
        grid, observed = (TIMES, POINTS), POINTS + 2 * (TIMES - 1)
    else:
        data, grid, observed = DARCY, (16, 16), 16 * 16
    model = shrink_model(recipe.model)
    sizes = {"grid": grid, "observations": observed}
    model = replace(model, **{n: size for n, size in sizes.items() if hasattr(model, n)})
    training = replace(recipe.training, batch_size=6, queries=None if whole else 16)
    return replace(recipe, model=model, data=data, training=training)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(params=FAST)
def prepared(request, folder):
    if "/fno" in request.param:
        pytest.importorskip("neuralop")
    recipe = shrunk(request.param)
    recipe.data.prepare(folder, "cpu", Console(quiet=True))
    return recipe, *recipe.data.load(folder, augment=True)


def test_every_model_takes_moved_samples(prepared):
    """By the checked path, which refuses observations and queries that a model does not know."""
    recipe, training, _ = prepared
    batch = next(Batches(training.samples, recipe.training).at(1))
    plain = next(Batches(training.samples, replace(recipe.training, augment=False)).at(1))
    assert not torch.equal(batch.targets, plain.targets)
    model = build_model(recipe.model)
    with torch.no_grad():
        prediction = model(batch.observations)(batch.queries)
    assert prediction.shape == batch.targets.shape
    assert bool(prediction.isfinite().all())
    if isinstance(recipe.model, FNOConfig):
        # Targets in the order of the grid: a perfect prediction answers with them.
        assert torch.equal(
            GridOutput(model.domain, recipe.model.grid, batch.targets)(batch.queries), batch.targets
        )


def test_every_model_makes_steps_of_its_recipe(prepared):
    recipe, training, validation = prepared
    model = build_model(recipe.model)
    settings = replace(recipe.training, log_every=3)
    accelerator = build_accelerator(settings, torch.device("cpu"))
    trainer = Trainer(model, training.samples, validation.samples, settings, accelerator)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(3):
        trainer.update()
    trainer.read()  # raises where a loss is not finite
    moved = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
    assert sum(moved) > len(moved) / 2
