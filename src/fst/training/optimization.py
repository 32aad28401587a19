"""The optimiser with its learning-rate groups, and the moving average of the weights."""

import copy

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from fst.base import Model
from fst.training.errors import TrainingError
from fst.training.settings import TrainingSettings


def build_optimizer(model: Model, settings: TrainingSettings) -> torch.optim.Optimizer:
    """Adam or AdamW; each group keeps its base rate under `base`, which the schedule multiplies."""
    rates = {"main": settings.learning_rate, "predictor": settings.learning_rate}
    if settings.predictor_learning_rate is not None:
        rates["predictor"] = settings.predictor_learning_rate
    by_name = model.learning_rate_groups()
    grouped = [parameter for members in by_name.values() for parameter in members]
    if {id(p) for p in grouped} != {id(p) for p in model.parameters()} or not grouped:
        raise TrainingError(
            f"learning_rate_groups of {type(model).__name__} must cover every parameter"
        )
    spared = {id(parameter) for parameter in model.undecayed()}
    groups = []
    for name, members in by_name.items():
        decayed = [p for p in members if id(p) not in spared]
        others = [p for p in members if id(p) in spared]
        for chosen, decay in ((decayed, settings.weight_decay), (others, 0.0)):
            group = {"params": chosen, "weight_decay": decay, "name": name, "lr": rates[name]}
            groups += [group | {"base": rates[name]}] if chosen else []
    kind = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
    # The fused update takes no complex weights, which spectral models have.
    fused = all(p.is_cuda and p.is_floating_point() for p in grouped)
    return kind(groups, eps=settings.epsilon, fused=fused)


def set_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["base"] * factor


class Average:
    """An exponential moving average of a model's weights, kept as a second model.

    In step s the average moves by 1 - min(decay, (1 + s) / (10 + s)) towards the weights: it
    starts short, so that the untrained weights are soon forgotten.
    """

    def __init__(self, model: Model, decay: float) -> None:
        self.decay = decay
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self._averaged: list[Tensor] = list(self.model.parameters())
        self._current: list[nn.Parameter] = list(model.parameters())

    @torch.no_grad()
    def update(self, step: int) -> None:
        move = get_ema_multi_avg_fn(min(self.decay, (1 + step) / (10 + step)))
        move(self._averaged, self._current, None)
