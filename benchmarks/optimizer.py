"""The optimiser: whether recorded steps agree with exact ones, and how fast training is with them.

    python benchmarks/optimizer.py --out results/optimizer-h200
    python benchmarks/optimizer.py --out rows --device cpu --quick

Rows are written to `optimizer.json` in that folder as they come:

- `agreement`: ten steps on the parameters of FST with random gradients, recorded and eager, against
  the same steps in float64 (Newton-Schulz included, so that bfloat16 shows in Muon's rows);
- `step`: the time of one step of the optimiser alone, as the GPU and as the host sees it;
- `training`: steps per second of the model of `fast/burgers-single/fst` through
  `fst.training.trainer.Trainer`. One compiled model is trained with one optimiser after the other,
  several times around, so that a drift of the GPU's clock would be seen.

`torch` is PyTorch's fused Adam behind `clip_grad_norm_`. Needs what `fst` imports; PYTHONPATH=src
does where the package is not installed.
"""

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fst
from fst.base import Model
from fst.data.samples import (
    BurgersSamples,
    boundary_observation_indices,
    index_coordinates,
    index_product,
    subset_indices,
)
from fst.io import write_atomically
from fst.recipes import find
from fst.training.loop import build_accelerator
from fst.training.optimizer import (
    BETAS,
    COEFFICIENTS,
    EAGER_STEPS,
    LEAST_NORM,
    STEPS,
    Exchange,
    Optimizer,
    build_optimizer,
    matrix_shape,
)
from fst.training.run_folder import describe_environment
from fst.training.settings import TrainingSettings
from fst.training.trainer import Trainer

Row = dict[str, Any]

# Adam's first steps are signs of gradient and decay together. Where these cancel, rounding decides;
# in one matrix of demo/burgers a single weight does, and hides how near all the others are.
RECIPE, SMALL = "fast/burgers-single/fst", "demo/perceiver-io"
SEED = 2026091311
SAMPLES = 192
CHECKED_STEPS = 10
OPTIMIZERS = ("adam", "adamw", "muon")


def build(recipe: str, device: torch.device) -> Model:
    """Always with the same weights."""
    torch.manual_seed(SEED)
    return fst.build(recipe).to(device)


def waves(grid: tuple[int, int], supervision: tuple[int, int], count: int) -> BurgersSamples:
    """Travelling waves in the place of Burgers solutions: time does not depend on the values."""
    generator = torch.Generator().manual_seed(SEED)
    speed, phase = torch.rand(2, count, 1, generator=generator)

    def values(indices: Tensor) -> Tensor:
        time_, space = index_coordinates(indices, grid).unbind(dim=1)
        return torch.sin(2 * math.pi * (space - speed * time_ + phase))

    held = tuple(map(subset_indices, grid, supervision))
    seen = boundary_observation_indices(*grid)
    return BurgersSamples(
        grid=grid,
        held=held,
        targets=values(index_product(held)).unflatten(1, supervision),
        observed_positions=index_coordinates(seen, grid),
        observed_values=values(seen),
    )


def advance(trainer: Trainer, steps: int) -> float:
    """Seconds that so many updates take, the losses read as often as in a run."""
    start = time.perf_counter()
    for number in range(1, steps + 1):
        trainer.update()
        if number % trainer.settings.log_every == 0:
            trainer.read()
    trainer.read()
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class TorchAdam(Optimizer):
    """PyTorch's fused Adam in the place of ours."""

    def __init__(self, model: Model, settings: TrainingSettings) -> None:
        self.param_groups = build_optimizer(model, settings).param_groups
        fused = next(model.parameters()).is_cuda
        self._adam = torch.optim.Adam(
            [{"params": group["params"]} for group in self.param_groups],
            lr=settings.learning_rate, eps=settings.epsilon, fused=fused,
        )  # fmt: skip
        self._parameters = [p for group in self.param_groups for p in group["params"]]
        self._update = None  # nothing is recorded

    def clip_and_step(self, limit: float, exchange: Exchange | None = None) -> Tensor:
        assert exchange is None  # one process
        for ours, theirs in zip(self.param_groups, self._adam.param_groups, strict=True):
            theirs["lr"] = ours["lr"]
        norm = nn.utils.clip_grad_norm_(self._parameters, limit)
        self._adam.step()
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._adam.zero_grad(set_to_none)


def optimizer_for(name: str, model: Model, settings: TrainingSettings) -> Any:
    """`muon, recorded`, `adam, eager`, `adam, torch` …"""
    kind, way = name.split(", ")
    settings = replace(settings, optimizer=kind)
    if way == "torch":
        return TorchAdam(model, settings)
    optimizer = build_optimizer(model, settings)
    optimizer.capture = way == "recorded"
    return optimizer


def set_gradients(model: Model, step: int) -> None:
    """Numbers of the same distribution for every step, of another size for every parameter."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(SEED + step)
    for parameter in model.parameters():
        size = torch.rand((), generator=generator, device=device) / parameter.numel() ** 0.5
        noise = torch.randn(parameter.shape, generator=generator, device=device)
        parameter.grad = (noise * size).to(parameter.dtype)


def exact_orthogonal(matrix: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    x = x / x.norm().clamp(min=LEAST_NORM)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if x.shape == matrix.shape else x.mT


def exact_step(groups: list[Row], states: dict[Tensor, Row], settings: TrainingSettings) -> None:
    """One step in float64, parameter by parameter, as the equations read."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    nn.utils.clip_grad_norm_(parameters, settings.clip or math.inf)
    for group in groups:
        rate, decay = group["lr"], group["weight_decay"]
        for parameter in group["params"]:
            state, gradient = (
                states.setdefault(parameter, {"t": 0, "m": 0.0, "v": 0.0}),
                parameter.grad,
            )
            state["t"] += 1
            if group["matrices"]:
                mu = settings.momentum
                state["m"] = mu * state["m"] + (1 - mu) * gradient
                update = (1 - mu) * gradient + mu * state["m"]
                rows, columns = matrix_shape(parameter)
                update = exact_orthogonal(update.view(rows, columns)).reshape(parameter.shape)
                update = 0.2 * math.sqrt(max(rows, columns)) * update
            else:
                if settings.optimizer == "adam":
                    gradient = gradient + decay * parameter
                state["m"] = BETAS[0] * state["m"] + (1 - BETAS[0]) * gradient
                state["v"] = BETAS[1] * state["v"] + (1 - BETAS[1]) * gradient**2
                first, second = (1 - beta ** state["t"] for beta in BETAS)
                update = state["m"] / first / ((state["v"] / second).sqrt() + settings.epsilon)
            if settings.optimizer != "adam":
                parameter.mul_(1 - rate * decay)
            parameter.sub_(rate * update)


@torch.no_grad()
def agreement(recipe: str, kind: str, device: torch.device) -> Row:
    """How far from exact steps ours end, as a part of the way that the parameters have gone."""
    settings = TrainingSettings(optimizer=kind, clip=1.0, weight_decay=0.1)
    start = build(recipe, device)
    exact = copy.deepcopy(start).double()
    groups = build_optimizer(exact, settings).param_groups
    states: dict[Tensor, Row] = {}
    for step in range(CHECKED_STEPS):
        set_gradients(exact, step)
        exact_step(groups, states, settings)
    ends = {}
    for way in ("recorded", "eager"):
        model = copy.deepcopy(start)
        optimizer = optimizer_for(f"{kind}, {way}", model, settings)
        for step in range(CHECKED_STEPS):
            set_gradients(model, step)
            optimizer.clip_and_step(1.0)
        ends[way] = model
    muon = {id(p) for group in groups if group["matrices"] for p in group["params"]}
    row: Row = {"section": "agreement", "optimizer": kind, "steps": CHECKED_STEPS}
    pairs = zip(*(ends[way].parameters() for way in ends), strict=True)
    row["recorded_equals_eager"] = all(torch.equal(*pair) for pair in pairs)
    for way, model in ends.items():
        for name, wanted in (("adam", False), ("muon", True)):
            found = [
                ((one.double() - other).norm() / (other - old.double()).norm()).item()
                for one, other, old in zip(
                    model.parameters(), exact.parameters(), start.parameters(), strict=True
                )
                if (id(other) in muon) is wanted and (other - old.double()).any()
            ]
            row[f"{way}_{name}_parameters"] = max(found, default=None)
    return row


def timed(call: Callable[[], object], device: torch.device, times: int) -> tuple[float, float]:
    """Milliseconds of a call among many, waited for at the end, and of the host alone."""
    for _ in range(EAGER_STEPS + 3):
        call()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        call()
    host = time.perf_counter() - start
    synchronize(device)
    return 1e3 * (time.perf_counter() - start) / times, 1e3 * host / times


def step_alone(recipe: str, name: str, device: torch.device, times: int) -> Row:
    model = build(recipe, device)
    optimizer = optimizer_for(name, model, TrainingSettings(clip=1.0))
    set_gradients(model, 0)
    both, host = timed(lambda: optimizer.clip_and_step(1.0), device, times)
    return {"section": "step", "optimizer": name, "ms": both, "host_ms": host, "calls": times}


def training(recipe: str, names: list[str], device: torch.device, rounds: int) -> list[Row]:
    """Steps per second of one compiled model with one optimiser after the other."""
    settings = find(recipe).training
    model = build(recipe, device)
    paper = recipe == RECIPE
    grid, supervision = ((201, 1024), (100, 100)) if paper else ((41, 128), (20, 20))
    data = waves(grid, supervision, SAMPLES).to(device)
    trainer = Trainer(model, data, data, settings, build_accelerator(settings, device))
    first = advance(trainer, 1)
    advance(trainer, 10 if device.type == "cuda" else 1)
    optimizers = {name: optimizer_for(name, model, settings) for name in names}
    rates: dict[str, list[float]] = {name: [] for name in names}
    host: dict[str, list[float]] = {name: [] for name in names}
    steps = 200 if device.type == "cuda" else 2
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            trainer.optimizer = optimizer
            advance(trainer, EAGER_STEPS + 3)
            rates[name].append(steps / advance(trainer, steps))
            host[name].append(_host_ms(trainer, 10 if device.type == "cuda" else 1))
    return [
        {
            "section": "training",
            "optimizer": name,
            "steps_per_second": statistics.median(rates[name]),
            "all": rates[name],
            "host_ms": statistics.median(host[name]),
            "steps": steps,
            "first_step_seconds": first,
            "compiled": trainer.settings.compile is not False and device.type == "cuda",
            "recorded": _is_recorded(optimizers[name]),
        }
        for name in names
    ]


def _host_ms(trainer: Trainer, steps: int) -> float:
    """Of the host for a whole update, the device idle before: what a step costs at the least."""
    found = []
    for _ in range(steps):
        synchronize(trainer.device)
        start = time.perf_counter()
        trainer.update()
        found.append(1e3 * (time.perf_counter() - start))
        trainer.read()
    return statistics.median(found)


def _is_recorded(optimizer: Any) -> bool:
    update = optimizer._update if isinstance(optimizer, Optimizer) else None
    return update is not None and update.captured


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder for optimizer.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=3, help="of the training's optimisers")
    parser.add_argument("--quick", action="store_true", help="a small model: only that it runs")
    arguments = parser.parse_args(given)
    device = torch.device(arguments.device)
    recipe = SMALL if arguments.quick else RECIPE
    arguments.out.mkdir(parents=True, exist_ok=True)
    environment = describe_environment()
    environment["command"] = [Path(each).name for each in environment["command"]]
    rows: list[Row] = []

    def add(*new: Row) -> None:
        for row in new:
            rows.append(row)
            print(json.dumps(row), flush=True)
        content = {"environment": environment, "recipe": recipe, "rows": rows}
        write_atomically(arguments.out / "optimizer.json", json.dumps(content, indent=1).encode())

    ways = ("recorded", "eager") if device.type == "cuda" else ("eager",)
    names = [f"{kind}, {way}" for way in ways for kind in ("adam", "muon")] + ["adam, torch"]
    for kind in OPTIMIZERS:
        add(agreement(recipe, kind, device))
    for name in names:
        add(step_alone(recipe, name, device, 3 if arguments.quick else 200))
    add(*training(recipe, names, device, arguments.rounds))


if __name__ == "__main__":
    main()
