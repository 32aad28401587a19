"""How to choose sizes.

The paper's sizes are for solutions on 200,000 points and hours of training. A small problem wants a
small model. This page measures what each size costs, and shows what it buys on one problem.
"""

# %%
# ## What costs time
#
# One forward and backward pass of a batch, on this machine, with one size changed at a time. The
# base has 8 × 8 anchors, 32 features, 2 refinement steps and 64 evaluation points.
import math
import time
from dataclasses import replace

import torch
from matplotlib import pyplot as plt

import fst
from fst.metrics import relative_l2, squared_relative_l2

STEPS = 250  # 2 in tests
REPEATS = 5  # 1 in tests

torch.manual_seed(0)
base = fst.FunctionSpaceConfig(
    width=32, heads=4, fourier_bands=6, rows=(8,), anchors_per_row=8, predictor_width=32,
    predictor_blocks=1, refinement_steps=2, points_from_anchors=32, points_from_sobol=32,
)  # fmt: skip
more_points = {"points_from_anchors": 64, "points_from_sobol": 192}
variants = {
    "base": base,
    "twice the width": replace(base, width=64),
    "four times the anchors": replace(base, rows=(16,), anchors_per_row=16),
    "four times the evaluation points": replace(base, **more_points),
    "twice the refinement steps": replace(base, refinement_steps=4),
}


def cost(config):
    """Milliseconds of a forward and backward pass: the median of a few."""
    model = fst.FunctionSpaceTransformer(config)
    seen = fst.Observations(torch.rand(8, 200, 2), torch.randn(8, 200, 1))
    queries, times = torch.rand(8, 256, 2), []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        model(seen)(queries).square().mean().backward()
        times.append(time.perf_counter() - start)
    return 1000 * sorted(times[1:])[REPEATS // 2], fst.parameter_count(model)


for name, config in variants.items():
    milliseconds, parameters = cost(config)
    print(f"{name:34} {parameters:>9,} parameters {milliseconds:7.1f} ms")

# %%
# ## What it buys
#
# The same short training for three numbers of anchors, on fields with one steep front each, seen at
# 100 random points. More anchors help only until something else limits the error: here the short
# training and the distance between the observations.


def fronts(samples):
    angle, offset = 2 * math.pi * torch.rand(samples, 1), torch.rand(samples, 1) - 0.5
    return torch.cat((angle.cos(), angle.sin(), offset), dim=-1)[:, None]


def value(front, positions):
    across = (front[..., :2] * (positions - 0.5)).sum(dim=-1, keepdim=True)
    return torch.tanh((across - front[..., 2:]) / 0.05)


def trained(config):
    """The model after a short training, and its error on new fields."""
    torch.manual_seed(0)
    model = fst.FunctionSpaceTransformer(config)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizers = [
        torch.optim.Muon(matrices, lr=3e-3, weight_decay=0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.Adam(others, lr=3e-3),
    ]
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, 3e-3, STEPS) for o in optimizers]
    for _ in range(STEPS):
        front, where, queries = fronts(8), torch.rand(8, 100, 2), torch.rand(8, 128, 2)
        field = model(fst.Observations(where, value(front, where)))
        squared_relative_l2(field(queries), value(front, queries)).mean().backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    model.eval()
    front, where, queries = fronts(64), torch.rand(64, 100, 2), torch.rand(64, 500, 2)
    with torch.no_grad():
        found = model(fst.Observations(where, value(front, where)))(queries)
    return relative_l2(found, value(front, queries)).mean().item()


sides, errors = (4, 8, 16), []
for side in sides:
    points = {"points_from_anchors": min(32, side * side)}
    errors.append(trained(replace(base, rows=(side,), anchors_per_row=side, **points)))
    print(f"{side} × {side} anchors: relative L2 error {errors[-1]:.3f}")

plt.figure(figsize=(4.5, 2.8), layout="constrained")
plt.plot([f"{side} × {side}" for side in sides], errors, "o-")
plt.xlabel("anchors")
plt.ylabel("relative L2 error")
plt.ylim(0, 1.1 * max(errors))
plt.show()

# %%
# ## Rules of thumb
#
# These are starting points. Change one at a time, and watch the validation error.
#
# | size | start with | raise it when |
# |---|---|---|
# | anchors (`rows`, `anchors_per_row`) | a spacing near the smallest feature you need | details are smeared out |
# | `width` | 32 to 64 for hundreds of samples, 176 for thousands | training and validation error are both high |
# | `refinement_steps` | 2 | far parts of the domain influence each other |
# | evaluation points | as many as half the anchors | you have raised the anchors |
# | `fourier_bands` | the number of half waves that fit into the domain | fine oscillations are missed |
# | training steps | 1,000 | the validation error still falls at the end |
#
# If the validation error rises while the training loss falls, you have too few samples for the
# model: make it smaller, or augment.
