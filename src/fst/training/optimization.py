"""The optimiser with its learning-rate groups, and the moving average of the weights."""

import copy

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from fst.base import Model
from fst.training.errors import TrainingError
from fst.training.muon import matrices
from fst.training.optimizer import Optimizer
from fst.training.settings import TrainingSettings


def build_optimizer(model: Model, settings: TrainingSettings) -> Optimizer:
    """Each group keeps its base rate under `base`, which the schedule multiplies."""
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
    muon = {id(matrix) for matrix in matrices(model)} if settings.optimizer == "muon" else set()
    groups = []
    for name, members in by_name.items():
        for by_muon in (False, True):
            rate = rates[name] * (settings.matrix_rate if by_muon else 1.0)
            chosen = [p for p in members if (id(p) in muon) is by_muon]
            decayed = [p for p in chosen if id(p) not in spared]
            others = [p for p in chosen if id(p) in spared]
            for each, decay in ((decayed, settings.weight_decay), (others, 0.0)):
                group = {"params": each, "matrices": by_muon, "weight_decay": decay, "name": name}
                groups += [group | {"lr": rate, "base": rate}] if each else []
    return Optimizer(
        groups,
        epsilon=settings.epsilon,
        momentum=settings.momentum,
        decoupled=settings.optimizer != "adam",
    )


def set_rates(optimizer: Optimizer, factor: float) -> None:
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
