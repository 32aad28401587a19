"""The optimiser with its learning-rate groups, and the moving average of the weights."""

import copy
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import get_ema_multi_avg_fn

from fst import kernels
from fst.base import Model
from fst.training.errors import TrainingError
from fst.training.settings import TrainingSettings

if kernels.fused_blend is not None:
    from fst.kernels import adam


class ClippedAdam(torch.optim.Adam):
    """Torch's Adam, or AdamW with decoupled decay, that can clip and step in one go.

    The state is torch's in any case, so that checkpoints know no difference. With `fused`,
    kernels of our own take over where there is a state already and they take all tensors.
    """

    _places: "list[adam.Place] | None" = None
    _kernels: "adam.ClippedStep | None" = None

    @torch.no_grad()
    def clip_and_step(self, limit: float) -> Float[Tensor, ""]:
        """Clip the norm of the whole gradient to `limit`, and step; the norm before that.

        Gradients are used up: whether they are left clipped is open. Hooks of `step` run with
        torch's own only.
        """
        members: list[tuple[int, Tensor, Tensor]] = []
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if parameter.is_contiguous() and not gradient.is_contiguous():
                    # Torch's fused step trusts in their order of memory, too.
                    gradient = parameter.grad = gradient.contiguous()
                members.append((index, parameter, gradient))
        parameters = [parameter for _, parameter, _ in members]
        step = self._own_step(members)
        if step is None:
            norm = clip_grad_norm_(parameters, limit)
            self.step()
        else:
            norm = step([_rates(group) for group in self.param_groups], limit)
            increment_version(parameters)  # autograd does not see what kernels change
        return norm

    def _own_step(self, members: list[tuple[int, Tensor, Tensor]]) -> "adam.ClippedStep | None":
        """The kernels, ready for these groups, parameters and gradients, if they take them."""
        states: list[Any] = [self.state.get(parameter) for _, parameter, _ in members]
        if kernels.fused_blend is None or not self.defaults["fused"] or not members:
            return None
        if not all(states) or not kernels.takes_together([gradient for _, _, gradient in members]):
            return None
        tensors = [
            (parameter, gradient, state["exp_avg"], state["exp_avg_sq"], state["step"])
            for (_, parameter, gradient), state in zip(members, states, strict=True)
        ]
        places = [
            adam.Place(
                parameter.data_ptr(), gradient.data_ptr(), average.data_ptr(), square.data_ptr(),
                count.data_ptr(), parameter.numel(), group,
            )
            for (group, _, _), (parameter, gradient, average, square, count)
            in zip(members, tensors, strict=True)
        ]  # fmt: skip
        if places != self._places:
            taken = kernels.takes_together([tensor for own in tensors for tensor in own])
            self._kernels = adam.ClippedStep(places, tensors[0][0].device) if taken else None
            self._places = places
        return self._kernels


def _rates(group: dict[str, Any]) -> "adam.Rates":
    rate, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
    coupled, decoupled = (0.0, decay) if group["decoupled_weight_decay"] else (decay, 0.0)
    return adam.Rates(rate, beta1, beta2, group["eps"], coupled, decoupled)


def build_optimizer(model: Model, settings: TrainingSettings) -> ClippedAdam:
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
    # The fused update takes no complex weights, which spectral models have.
    fused = all(p.is_cuda and p.is_floating_point() for p in grouped)
    decoupled = settings.optimizer == "adamw"
    return ClippedAdam(groups, eps=settings.epsilon, fused=fused, decoupled_weight_decay=decoupled)


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
