"""Recipes: the fixed names, the paper's numbers, and JSON that gives the same recipe back."""

import json
from dataclasses import replace

import pytest

import fst
from fst.commands.recipes import summary
from fst.config import FunctionSpaceConfig
from fst.pretrained import PretrainedError
from fst.recipes import RECIPES, UnknownRecipeError, describe, find
from fst.recipes.comparison import comparable
from fst.recipes.recipe import recipe_from_json

BASELINES = ("fno", "perceiver-io", "transolver", "deeponet")
NAMES = {
    *(f"burgers-single/{m}" for m in ("fst", "fno", "perceiver-io", "transolver", "deeponet")),
    *(f"burgers-all/{m}" for m in ("fst", "fno", "perceiver-io")),
    *(f"darcy/{m}" for m in ("fst", "fno", "perceiver-io", "transolver", "deeponet")),
    *(f"imagenet/{m}" for m in ("fst", "vit", "cnn-vit")),
    *(
        f"ablation/anchors-{c}-{s}-{n}"
        for c in ("uniform", "adaptive")
        for s in ("fixed", "adaptive")
        for n in (32, 16)
    ),
    "ablation/update-anchor-attention",
    *(f"ablation/refine-{r}" for r in (1, 2, 4, 8)),
    "ablation/observe-first",
    *(f"demo/{m}" for m in ("burgers", "fno", "perceiver-io")),
    *(f"own/{m}" for m in ("fst", "fno", "perceiver-io", "transolver", "deeponet")),
    *(f"own/images-{m}" for m in ("fst", "fst-256", "vit", "cnn-vit")),
    *(f"fast/burgers-single/{m}" for m in (*BASELINES, "fst", "fst-small", "fno-mended")),
    *(f"fast/burgers-all/{m}" for m in ("fst", "fno", "fno-mended", "perceiver-io")),
    *(f"fast/darcy/{m}" for m in (*BASELINES, "fst", "fst-small")),
    *(f"minute/{task}/fst" for task in ("burgers-single", "darcy")),
}


def test_the_names_are_the_fixed_ones():
    assert set(RECIPES) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_recipe_survives_json(name):
    recipe = find(name)
    text = json.dumps(recipe.to_json(), allow_nan=False)
    assert recipe_from_json(json.loads(text), "test") == recipe


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_recipe_explains_itself(name):
    assert find(name).name == name
    assert "Command: fst " in describe(name)
    assert "Cost:" in describe(name)


@pytest.mark.parametrize("name", sorted(name for name in NAMES if find(name).paper_parameters))
def test_parameter_counts_are_the_papers(name):
    row = summary(find(name))
    if row["parameters"] is None:
        pytest.skip("the package of this baseline is not installed")
    assert row["parameters"] == row["paper_parameters"]


def test_build_gives_a_model_on_the_cpu_in_float32():
    model = fst.build("demo/burgers")
    parameter = next(model.parameters())
    assert (parameter.device.type, str(parameter.dtype)) == ("cpu", "torch.float32")


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("burgers-singel/fst", "burgers-single/fst"), ("darcy/fts", "darcy/fst")],
)
def test_an_unknown_name_offers_the_nearest(wrong, near):
    with pytest.raises(UnknownRecipeError, match=near):
        fst.build(wrong)
    with pytest.raises(TypeError, match="name must be the name of a recipe, got None"):
        fst.build(None)
    with pytest.raises(ValueError, match="fst recipes"):
        fst.build("something else entirely")


def test_a_damaged_recipe_is_named():
    stored = find("burgers-single/fst").to_json()
    stored["training"]["learning_rate"] = "fast"
    with pytest.raises(PretrainedError, match=r"run/recipe.json.*learning_rate"):
        recipe_from_json(stored, "run/recipe.json")


def test_single_viscosity_settings():
    recipe = find("burgers-single/fst")
    assert (recipe.data.training, recipe.data.validation, recipe.data.test) == (2000, 100, 84)
    assert (recipe.training.batch_size, recipe.training.queries) == (48, 2500)
    assert recipe.training.schedule.maximum == 250_000
    assert recipe.evaluation.grids[-1] == (201, 1024)
    rates = {m: find(f"burgers-single/{m}").training.learning_rate for m in ("fst", "fno")}
    assert rates == {"fst": 1e-3, "fno": 3e-3}
    assert find("burgers-single/deeponet").data.validation_grid == (64, 64)


def test_all_viscosity_settings():
    recipe = find("burgers-all/fst")
    counts = recipe.data.training * len(recipe.data.viscosities), recipe.data.test
    assert counts == (24_000, 1_000)
    assert recipe.training.predictor_learning_rate == 1e-5
    assert recipe.standardization == (-0.012048, 0.621534)
    schedule = recipe.training.schedule
    assert schedule.factor(200_000, ()) == 1
    assert schedule.factor(250_000, ()) == pytest.approx(0.05)
    assert schedule.factor(900_000, ()) == 0.05


def test_darcy_settings():
    recipe = find("darcy/fst")
    assert (recipe.data.split_seed, recipe.training.seed) == (2026092001, 2026091311)
    assert (recipe.training.clip, recipe.training.queries) == (1.0, None)
    assert (recipe.evaluation.reset, recipe.evaluation.anchor_seed) == ("batch", 2026391325)
    assert find("darcy/fno").training.learning_rate == 5e-3


def test_ablations_change_what_they_say():
    base = FunctionSpaceConfig(length_scales="fixed")
    assert find("ablation/anchors-adaptive-fixed-32").model == base
    assert find("ablation/refine-4").model == base
    small = find("ablation/anchors-adaptive-adaptive-16").model
    assert (small.anchors, small.points_from_anchors, small.points_from_sobol) == (256, 128, 384)
    assert find("ablation/observe-first").model.observe == "first-step"
    # The 32×32 model with both adaptive is the main single-viscosity model.
    assert find("ablation/anchors-adaptive-adaptive-32").model == find("burgers-single/fst").model


def test_extras_are_off_in_the_papers_recipes():
    for name in NAMES:
        if name.split("/")[0] in ("burgers-single", "burgers-all", "darcy", "ablation"):
            recipe = find(name)
            assert recipe.training.average is None
            assert not recipe.training.augment


def changed(name, **changes):
    """A recipe with some fields of its parts replaced, as options do."""
    recipe = find(name)
    parts = {part: replace(getattr(recipe, part), **those) for part, those in changes.items()}
    return replace(recipe, **parts)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_the_papers_numbers_stand_beside_recipes_as_shipped(name):
    stored = recipe_from_json(json.loads(json.dumps(find(name).to_json())), "test")
    assert comparable(stored) == find(name)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("darcy/fst", {"training": {"learning_rate": 0.1}, "evaluation": {"neighbors": ()}}),
        ("burgers-all/fst", {"model": {"width": 96}}),
        ("imagenet/vit", {"data": {"workers": 3, "storage": "streamed"}}),
    ],
)
def test_the_papers_numbers_stay_where_only_the_training_differs(name, changes):
    recipe = changed(name, **changes)
    assert comparable(recipe) == recipe
    assert recipe.evaluation.paper_errors


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("darcy/fst", {"evaluation": {"grids": ((16, 16),)}}),
        ("darcy/fno", {"data": {"training": 30}}),
        ("darcy/fst", {"data": {"resolution": 16, "fine": 32, "validation_grid": (5, 5)}}),
        ("burgers-single/fst", {"data": {"viscosities": (1.0,)}}),
        ("burgers-all/fst", {"data": {"test": 12}}),
        ("imagenet/fst", {"data": {"held_out": 100}}),
    ],
)
def test_the_papers_numbers_are_not_set_beside_another_problem(name, changes):
    recipe = changed(name, **changes)
    found = comparable(recipe)
    assert recipe.evaluation.paper_errors
    assert (found.evaluation.paper_errors, found.paper_error) == ((), None)
    assert not getattr(found.evaluation, "paper_groups", ())
    # All else is as it was, so that the rows have the fingerprint of the run.
    kept = {"paper_errors": recipe.evaluation.paper_errors}
    if name == "burgers-all/fst":
        kept["paper_groups"] = recipe.evaluation.paper_groups
    again = replace(found.evaluation, **kept)
    assert replace(found, evaluation=again, paper_error=recipe.paper_error) == recipe


def test_the_paper_knows_nothing_of_recipes_by_other_names():
    recipe = replace(find("darcy/fst"), name="darcy/mine")
    assert comparable(recipe).evaluation.paper_errors == ()
