"""Small models and inputs that the tests share."""

import torch
from torch import Tensor, nn

from fst import FunctionSpaceConfig, FunctionSpaceTransformer, Observations

SMALL = {
    "width": 16,
    "heads": 2,
    "fourier_bands": 4,
    "condition_width": 8,
    "rows": (4,),
    "anchors_per_row": 5,
    "predictor_width": 8,
    "predictor_heads": 2,
    "refinement_steps": 3,
    "points_from_anchors": 6,
    "points_from_sobol": 8,
}
ROWS = {1: (), 2: (4,), 3: (2, 3)}


def small_config(**changes: object) -> FunctionSpaceConfig:
    return FunctionSpaceConfig(**{**SMALL, **changes})


def config_on(axes: int, **changes: object) -> FunctionSpaceConfig:
    """A small model on 1 to 3 axes."""
    box = {"low": (0.0,) * axes, "high": (1.0,) * axes}
    fewer = {"points_from_anchors": 3} if axes == 1 else {}
    return small_config(rows=ROWS[axes], adaptive_axis=axes - 1, **box, **fewer, **changes)


def stirred(model: nn.Module) -> nn.Module:
    """Move every parameter off its initial value: zero-initialised heads hide mistakes."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def small_model(config: FunctionSpaceConfig | None = None) -> FunctionSpaceTransformer:
    """In evaluation mode: the same call gives the same answer."""
    return stirred(FunctionSpaceTransformer(config or small_config()).double()).eval()


def some_observations(
    model: FunctionSpaceTransformer, batch: int = 2, count: int = 11
) -> Observations:
    domain = model.domain
    positions = domain.from_unit(torch.rand(batch, count, domain.axes, dtype=torch.float64))
    values = torch.randn(batch, count, model.value_channels, dtype=torch.float64)
    condition = None
    if model.condition_channels:
        condition = 0.1 + torch.rand(batch, model.condition_channels, dtype=torch.float64)
    return Observations(positions, values, condition)


def some_queries(model: FunctionSpaceTransformer, batch: int = 2, count: int = 9) -> Tensor:
    domain = model.domain
    return domain.from_unit(torch.rand(batch, count, domain.axes, dtype=torch.float64))
