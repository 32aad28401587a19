"""Whether the fast path costs accuracy: its rounding along a training, and its loss curves.

Two trainings that differ by one rounding drift apart, as all trainings do. So every curve of the
fast path has one of the plain path from the same weights, and both have others whose first weights
are moved by at most a rounding of bfloat16: how far those of one path are apart is the noise. What
rounding does before it is magnified shows in single gradients, compared with float64 on the way.
"""

import copy
import statistics
from dataclasses import replace
from itertools import combinations

import torch
from speed_setting import (
    SEED,
    Conclusion,
    Row,
    Section,
    Setting,
    burgers_samples,
    operator,
    path,
    precision,
    release,
)
from speed_training import advance, training_settings
from torch import Tensor

from fst import Observations
from fst.data.samples import Batch
from fst.evaluation_points import PointDraws
from fst.kernels import fuse, unfuse
from fst.metrics import squared_relative_l2
from fst.operators import Operator
from fst.training.loop import build_accelerator
from fst.training.schedules import WarmupCosine
from fst.training.trainer import Trainer

PATHS = ("plain", "fast")
# A fifth of the recipe's, at which single steps double the loss now and then (LOG.md).
LEARNING_RATE = 2e-4
# Steps, as in the recipes `fast/...`: rates that start high magnify every rounding.
WARMUP = 300
# A relative change of a weight that rounding to bfloat16 may make or undo.
ROUNDING = 2.0**-9
# Steps at the beginning, before differences are magnified very much.
FIRST = 20
# How often a training is interrupted to look at its gradients.
CHECKS = 10
# Samples of such a gradient: float64 takes several times the memory. With fewer, some kernels
# would not be used (`fst.kernels.weights.LEAST_TOKENS`).
SAMPLES = 8


def training_on_burgers(start: int, setting: Setting) -> Trainer:
    """A model in training; the first start has the weights as they are, others move them a bit."""
    sizes, device = setting.sizes, setting.device
    network = operator(sizes.fst, device)
    if start > 1:
        torch.manual_seed(SEED + start)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(1 + ROUNDING * (2 * torch.rand_like(parameter) - 1))
    data = burgers_samples(sizes, sizes.agreement_samples, device)
    settings = training_settings(setting, compiled=setting.compiled, steps=setting.steps)
    schedule = WarmupCosine(warmup=min(WARMUP, setting.steps - 1), maximum=setting.steps)
    settings = replace(settings, learning_rate=LEARNING_RATE, schedule=schedule)
    return Trainer(network, data, data, settings, build_accelerator(settings, device))


class Agreement(Section):
    """The loss on Burgers with and without the fast path: same weights, samples and draws."""

    name = "agreement"
    timeless = True
    columns = ("entry", "steps", "first_loss", "last_loss")

    def entries(self, setting: Setting) -> list[str]:
        starts = range(1, setting.starts + 1)
        return [f"{each}, start {number}" for number in starts for each in PATHS]

    def alone(self, entry: str) -> bool:
        return True

    def measure(self, entry: str, setting: Setting) -> Row:
        name, start = entry.split(", start ")
        release(setting.device)
        with path(name):
            training = training_on_burgers(int(start), setting)
            advance(training, setting.steps)
        losses = [loss for loss, _ in training.state.pending]
        return {
            "path": name,
            "start": int(start),
            "precision": training.settings.precision,
            "compiled": training.settings.compile,
            "steps": setting.steps,
            "first_loss": losses[0],
            "last_loss": statistics.fmean(losses[-smoothing(losses) :]),
            "losses": losses,
        }

    def conclude(self, rows: list[Row], earlier: dict[str, list[Row]]) -> Conclusion:
        curves = {name: _curves(rows, name) for name in PATHS}
        fast, plain = curves["fast"], curves["plain"]
        pairs = {
            "fast against plain, same start": [(fast[n], plain[n]) for n in fast if n in plain]
        }
        for name, found in curves.items():
            pairs[f"{name}, two starts"] = list(combinations(found.values(), 2))
        compared = [
            {"entry": entry, **differences(those)} for entry, those in pairs.items() if those
        ]
        return Conclusion(compared, verdict(curves))


def _curves(rows: list[Row], name: str) -> dict[int, list[float]]:
    return {row["start"]: row["losses"] for row in rows if row["path"] == name}


def smoothing(losses: list[float]) -> int:
    """How many steps a smoothed loss averages."""
    return max(1, min(100, len(losses) // 5))


def smoothed(losses: list[float]) -> Tensor:
    """Logarithms of the means over windows of steps."""
    width = smoothing(losses)
    windows = len(losses) // width
    kept = torch.tensor(losses, dtype=torch.float64)[: windows * width]
    return kept.view(windows, width).mean(dim=1).log()


def differences(pairs: list[tuple[list[float], list[float]]]) -> Row:
    """Root mean squares, over pairs of loss curves, of the logarithm of one over the other; of the
    first steps also the largest difference, relative to the second curve."""
    ours, theirs = torch.tensor(pairs, dtype=torch.float64)[:, :, :FIRST].log().unbind(dim=1)
    first = ours - theirs
    apart = torch.stack([smoothed(a) - smoothed(b) for a, b in pairs])
    return {
        "pairs": len(pairs),
        "first_step": _root_mean_square(first[:, 0]),
        "first_steps": _root_mean_square(first),
        "largest_of_first": first.expm1().abs().max().item(),
        "smoothed": _root_mean_square(apart),
        "largest": apart.abs().max().item(),
        "last": _root_mean_square(apart[:, -1]),
        "window": smoothing(pairs[0][0]),
    }


def _root_mean_square(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


def verdict(curves: dict[str, dict[int, list[float]]]) -> list[str]:
    """The ratio of the losses, geometric means over starts, at the end and on the way."""
    if any(len(found) < 2 for found in curves.values()):
        return []
    fast, plain = (
        torch.stack([smoothed(losses) for losses in curves[name].values()])
        for name in ("fast", "plain")
    )  # starts windows
    apart = fast.mean(dim=0) - plain.mean(dim=0)
    errors = (fast.var(dim=0) / len(fast) + plain.var(dim=0) / len(plain)).sqrt()
    ranges = ", ".join(
        f"{name} {each[:, -1].min().exp():.4g} to {each[:, -1].max().exp():.4g}"
        for name, each in (("plain", plain), ("fast", fast))
    )
    ratio, most = apart[-1].exp(), (apart.abs() / errors).max()
    return [
        f"last losses: {ranges}; fast over plain {ratio:.3f} (standard error {errors[-1]:.1%})",
        f"means of {len(apart)} windows: at most {most:.1f} standard errors apart",
    ]


class Rounding(Section):
    """Errors of a loss and its gradient against float64, at weights along one training.

    The passes that are compared are not compiled; the training is.
    """

    name = "rounding"
    timeless = True
    errors = ("fast_loss", "plain_loss", "fast_gradient", "plain_gradient")
    columns = ("entry", "steps", "checks", *errors)

    def entries(self, setting: Setting) -> list[str]:
        return ["medians along a training"]

    def alone(self, entry: str) -> bool:
        return True

    def measure(self, entry: str, setting: Setting) -> Row:
        release(setting.device)
        training = training_on_burgers(1, setting)
        every = max(1, setting.steps // CHECKS)
        found = []
        for step in range(0, setting.steps + 1, every):
            advance(training, step - training.state.step)
            found.append({"step": step, **rounding(training, setting.precisions[0])})
        medians = {name: statistics.median(each[name] for each in found) for name in self.errors}
        return {"steps": found[-1]["step"], "checks": len(found), **medians, "found": found}

    def conclude(self, rows: list[Row], earlier: dict[str, list[Row]]) -> Conclusion:
        lines = []
        for each in (row["found"] for row in rows):
            ratios = [check["fast_gradient"] / check["plain_gradient"] for check in each]
            farther = sum(ratio > 1 for ratio in ratios)
            lines.append(
                f"errors of the gradient: fast over plain {statistics.geometric_mean(ratios):.2f} "
                f"(geometric mean), above 1 in {farther} of {len(each)} checks"
            )
        return Conclusion(lines=lines)


def rounding(training: Trainer, number: str) -> Row:
    """Relative errors of both paths on a part of the next batch, with the weights as they are."""
    network, device = training.model, training.device
    batch = _few(next(training.batches.at(training.state.step + 1)))
    draws = network.point_stream(SEED, SEED + 1).draw().to(device, torch.float32)
    exact = unfuse(copy.deepcopy(network)).double()
    precise = Batch(
        batch.observations.to(torch.float64), batch.queries.double(), batch.targets.double()
    )
    wanted = _loss_and_gradient(exact, precise, draws.to(device, torch.float64), "float64")
    row = {"loss": wanted[0].item()}
    for name, change in (("plain", unfuse), ("fast", fuse)):
        loss, gradient = _loss_and_gradient(change(network), batch, draws, number)
        row[f"{name}_loss"] = (loss / wanted[0] - 1).abs().item()
        row[f"{name}_gradient"] = ((gradient - wanted[1]).norm() / wanted[1].norm()).item()
    return row


def _few(batch: Batch) -> Batch:
    given = batch.observations
    observations = Observations(given.positions[:SAMPLES], given.values[:SAMPLES])
    return Batch(observations, batch.queries[:SAMPLES], batch.targets[:SAMPLES])


def _loss_and_gradient(
    network: Operator, batch: Batch, draws: PointDraws, number: str
) -> tuple[Tensor, Tensor]:
    with precision(number, batch.queries.device):
        prediction = network.represent(batch.observations, draws).decode(batch.queries)
    return differentiated(network, prediction, batch.targets)


def differentiated(network: Operator, prediction: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and all of its gradients in one row."""
    loss = squared_relative_l2(prediction, targets).mean()
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    return loss.detach(), torch.cat([each.flatten() for each in gradients])
