"""The paper's ablations, all on single-viscosity Burgers (Section 4.2).

Unless a name says otherwise: 32×32 anchors, adaptive coordinates, length scales fixed at their
initial value, four refinement steps, attention to the observations in every step.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

from fst.config import FunctionSpaceConfig
from fst.evaluation.protocol import EvaluationSettings
from fst.recipes import burgers
from fst.recipes.recipe import Recipe

# Table 4 of the paper: coordinates, length scales, anchors a side.
ANCHOR_ERRORS: dict[tuple[Literal["uniform", "adaptive"], Literal["fixed", "adaptive"], int], float]
ANCHOR_ERRORS = {
    ("uniform", "fixed", 32): 0.04604,
    ("uniform", "fixed", 16): 0.04571,
    ("adaptive", "fixed", 32): 0.04069,
    ("adaptive", "fixed", 16): 0.05784,
    ("uniform", "adaptive", 32): 0.05482,
    ("uniform", "adaptive", 16): 0.05094,
    ("adaptive", "adaptive", 32): 0.04185,
    ("adaptive", "adaptive", 16): 0.04480,
}
REFINEMENT_ERRORS = {1: 0.06209, 2: 0.04442, 4: 0.04069, 8: 0.06496}


def _variant(name: str, model: FunctionSpaceConfig, error: float) -> Recipe:
    base = burgers.single_fst()
    evaluation = EvaluationSettings(grids=((201, 1024),), paper_errors=(error,))
    return base.derive(
        f"ablation/{name}", task="ablation", model=model, evaluation=evaluation, paper_error=error
    )


def anchors(
    coordinates: Literal["uniform", "adaptive"], scales: Literal["fixed", "adaptive"], side: int
) -> Recipe:
    """Anchor coordinates and length scales, at two anchor counts (Table 4).

    Cost: as burgers-single/fst; less with 16×16 anchors.
    """
    model = FunctionSpaceConfig(coordinates=coordinates, length_scales=scales)
    if side == 16:
        model = replace(
            model, rows=(16,), anchors_per_row=16, points_from_anchors=128, points_from_sobol=384
        )
    error = ANCHOR_ERRORS[coordinates, scales, side]
    return _variant(f"anchors-{coordinates}-{scales}-{side}", model, error)


def update_anchor_attention() -> Recipe:
    """Two self-attention blocks on the anchors instead of evaluation, mixing and write-back.

    Cost: as burgers-single/fst.
    Paper: 0.05212 (against 0.04069 with the function-space update).
    """
    model = FunctionSpaceConfig(length_scales="fixed", update="anchor-attention")
    return _variant("update-anchor-attention", model, 0.05212)


def refine(steps: int) -> Recipe:
    """The number of refinement steps (Table 6).

    Cost: grows with the number of steps.
    """
    model = FunctionSpaceConfig(length_scales="fixed", refinement_steps=steps)
    return _variant(f"refine-{steps}", model, REFINEMENT_ERRORS[steps])


def observe_first() -> Recipe:
    """Attention to the observations in the first step only (Table 6).

    Cost: less than burgers-single/fst.
    Paper: 0.05971 (against 0.04069 with attention in every step).
    """
    model = FunctionSpaceConfig(length_scales="fixed", observe="first-step")
    return _variant("observe-first", model, 0.05971)


def recipes() -> list[Callable[[], Recipe]]:
    return [
        *(partial(anchors, *key) for key in ANCHOR_ERRORS),
        update_anchor_attention,
        *(partial(refine, steps) for steps in REFINEMENT_ERRORS),
        observe_first,
    ]
