"""Recipes on equal terms, with each other and with the paper.

The models of one task are each trained with the same budget (`models_of`, `equal_terms`). The
paper's numbers stand beside ours only where data and test grids are those of the recipe shipped
under a run's name (`comparable`); how a model was trained may differ: that is what the comparison
is about.

A task is what stands before the last stroke of a recipe's name, a model what stands after it. Only
where that would mix data of different kinds (own/fst, own/images-fst) does a recipe's own task
name it.

The learning-rate search of the paper's Darcy models (Appendix C) is there for any recipe (`trial`,
`confirmation`):

    "we compare four learning rates over 4,000 steps, select the rate with the lowest mean of the
    last three validation errors, and train for an additional 8,000 steps to confirm"

Our reading, where the paper is silent: a trial warms up as the recipe's final training does and
then keeps its rate; it is validated eight times, because the 2,000 steps between validations of
the final training would leave two errors; the confirmation is the winning trial carried on with
the same rate, not a new run; a predictor's own rate keeps its proportion to the main one.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from fst.pretrained import to_json
from fst.recipes import RECIPES, find, own
from fst.recipes.recipe import Recipe, recipe_from_json
from fst.terminal import did_you_mean
from fst.training.schedules import Stage, Stages

CompileMode = Literal["default", "reduce-overhead", "max-autotune"]
# "no" leaves models as they are, None leaves it to their recipes.
Compilation = CompileMode | Literal["no"] | None

# Settings of data sources that say how they are read, and change nothing in what is read.
READING = {"storage", "workers"}
# Apart enough that the streams which a run derives from its seed are its own.
SEED_STRIDE = 1_000
# The paper does not say which four; these hold every rate that it selects for Darcy.
RATES = (3e-4, 1e-3, 3e-3, 5e-3)
STEPS, MORE_STEPS = 4_000, 8_000
VALIDATIONS = 8


def tasks() -> dict[str, dict[str, str]]:
    """The models of every task, each with the name of its recipe."""
    found: dict[str, dict[str, str]] = {}
    for name, make in RECIPES.items():
        task, _, model = name.rpartition("/")
        if task == own.TASK:
            task = make().task  # points and images are two
        found.setdefault(task, {})[model] = name
    return found


def models_of(task: str, wanted: tuple[str, ...] = ()) -> dict[str, str]:
    """The models wanted, or all of the task, each with the name of its recipe."""
    known = tasks()
    if task not in known:
        hint = did_you_mean(task, known, most=1)
        raise ValueError(f"unknown task {task!r}: {hint}there are {', '.join(known)}")
    for model in wanted:
        if model not in known[task]:
            raise ValueError(f"{task} has no model {model!r}; it has {', '.join(known[task])}")
    return {model: known[task][model] for model in wanted or known[task]}


def equal_terms(recipe: Recipe, compilation: Compilation = None) -> Recipe:
    """The recipe without what only costs time here: the same model, data, loss and test grids."""
    training = replace(recipe.training, tensorboard=False, wandb=False)
    if compilation == "no":
        training = replace(training, compile=False)
    elif compilation is not None:
        training = replace(training, compile=True, compile_mode=compilation)
    return replace(recipe, training=training, evaluation=recipe.evaluation.without_extras())


def changes_by_model(
    changes: Sequence[str], recipes: dict[str, Recipe]
) -> dict[str, dict[str, str]]:
    """Of `fst.model.width=64` the field and the value, for every model named."""
    found: dict[str, dict[str, str]] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        model, _, field = name.partition(".")
        if not equals or model not in recipes:
            raise ValueError(
                f"--set takes MODEL.FIELD=VALUE such as fst.model.width=64, with a model of "
                f"{', '.join(recipes)}; got {change!r}"
            )
        found.setdefault(model, {})[field] = value
    return found


def changed(recipe: Recipe, changes: dict[str, str]) -> Recipe:
    """The recipe with other values, as JSON, of fields such as model.width."""
    values = recipe.to_json()
    for name, value in changes.items():
        *parents, last = name.split(".")
        part: Any = values
        for parent in parents:
            part = part.get(parent) if isinstance(part, dict) else None
        if not isinstance(part, dict) or last not in part or isinstance(part[last], dict):
            raise ValueError(f"the recipe of {recipe.model_name} has no field {name!r} to set")
        try:
            part[last] = json.loads(value)
        except ValueError:
            part[last] = value  # a word
    return recipe_from_json(values, f"{recipe.model_name} as changed")


def seed_of(recipe: Recipe, number: int) -> int:
    """The `number`th seed, counted from 1, which is the recipe's own."""
    return recipe.training.seed + SEED_STRIDE * (number - 1)


def comparable(recipe: Recipe) -> Recipe:
    """The recipe, without the paper's numbers where they are about another problem."""
    if recipe.name in RECIPES and problem(recipe) == problem(find(recipe.name)):
        return recipe
    return replace(recipe, evaluation=recipe.evaluation.without_paper(), paper_error=None)


def problem(recipe: Recipe) -> tuple[dict[str, Any], object]:
    """What is learned and where it is tested."""
    data = {name: value for name, value in to_json(recipe.data).items() if name not in READING}
    return data, getattr(recipe.evaluation, "grids", None)


def trial(recipe: Recipe, rate: float, steps: int = STEPS) -> Recipe:
    """One learning rate, tried for a few thousand steps."""
    settings = recipe.training
    if not rate > 0:
        raise ValueError(f"rates must be above 0, got {rate}")
    if steps < VALIDATIONS or steps % VALIDATIONS:
        raise ValueError(f"steps must be a multiple of {VALIDATIONS}, got {steps}")
    predictor = settings.predictor_learning_rate
    if predictor is not None:
        predictor *= rate / settings.learning_rate
    warmup = max(1, min(settings.schedule.warmup, steps // 4))
    training = replace(
        settings,
        learning_rate=rate,
        predictor_learning_rate=predictor,
        schedule=Stages((Stage(warmup, 0.0, 1.0),), maximum=steps),
        validate_every=steps // VALIDATIONS,
        checkpoint_every=steps // VALIDATIONS,
        tensorboard=False,
    )
    return recipe.derive(f"{recipe.name}@{rate:g}", training=training)


def confirmation(tried: Recipe, steps: int = MORE_STEPS) -> Recipe:
    """A trial with more steps. Nothing else differs, so it goes on from the trial's last one."""
    schedule = tried.training.schedule
    if steps < 1:
        raise ValueError(f"confirm must be at least 1 step, got {steps}")
    longer = replace(schedule, maximum=schedule.maximum + steps)
    return replace(tried, training=replace(tried.training, schedule=longer))
