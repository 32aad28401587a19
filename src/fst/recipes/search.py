"""The learning-rate search of the paper's Darcy models (Appendix C), for any recipe.

    "we compare four learning rates over 4,000 steps, select the rate with the lowest mean of the
    last three validation errors, and train for an additional 8,000 steps to confirm"

Our reading, where the paper is silent: a trial warms up as the recipe's final training does and
then keeps its rate; it is validated eight times, because the 2,000 steps between validations of
the final training would leave two errors; the confirmation is the winning trial carried on with
the same rate, not a new run; a predictor's own rate keeps its proportion to the main one.
"""

from dataclasses import replace

from fst.recipes.recipe import Recipe
from fst.training.schedules import Stage, Stages

# The paper does not say which four; these hold every rate that it selects for Darcy.
RATES = (3e-4, 1e-3, 3e-3, 5e-3)
STEPS, MORE_STEPS = 4_000, 8_000
VALIDATIONS = 8


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
