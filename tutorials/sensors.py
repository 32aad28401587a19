"""Sparse sensors to a field.

A few sensors lie anywhere in the plane, and we want the field between them. The positions and the
number of the sensors change from sample to sample, so nothing here is a grid. How does the error
fall with the number of sensors?
"""

# %%
# ## Fields
#
# Smooth random fields: sums of waves with random directions and phases. Their covariance is
# known, so there is a best linear estimate (kriging) to compare with. The model is not told the
# covariance.
import math

import torch
from matplotlib import pyplot as plt

import fst
from fst.metrics import relative_l2, squared_relative_l2

STEPS = 2000  # 2 in tests
REACH = 0.25  # the distance over which the field forgets itself

torch.manual_seed(0)


def waves(samples, count=64):
    """Wave numbers, phases: a Gaussian random field as the number of waves grows."""
    return torch.randn(samples, count, 2) / REACH, 2 * math.pi * torch.rand(samples, count, 1)


def value(wave, positions):
    numbers, phases = wave
    angles = numbers @ positions.transpose(1, 2) + phases
    return (math.sqrt(2 / numbers.shape[1]) * angles.cos().sum(dim=1))[..., None]


# %%
# ## A small model, trained here
#
# 8 × 8 anchors and 32 features. Rows are staggered, and length scales follow the spacing: see
# [Which anchors](../anchors.md). Refinement evaluates the field at every anchor. Every step draws
# new fields and new sensors: between 5 and 60 of them, padded to 60. `mask` says which are real.
config = fst.FunctionSpaceConfig(
    width=32, heads=4, fourier_bands=6, rows=(8,), anchors_per_row=8, predictor_width=32,
    predictor_blocks=1, refinement_steps=2, points_from_anchors=64, points_from_sobol=0,
    coordinates="staggered", length_scales="spacing",
)  # fmt: skip
model = fst.FunctionSpaceTransformer(config)


def sensors(wave, count):
    positions = torch.rand(len(wave[0]), 60, 2)
    mask = torch.arange(60) < torch.as_tensor(count).reshape(-1, 1)
    mask = mask.expand(len(positions), -1)
    return fst.Observations(positions, value(wave, positions), mask=mask)


# Weight matrices by Muon, everything else by Adam: with few steps, the better choice by far.
matrices = [p for p in model.parameters() if p.ndim == 2]
others = [p for p in model.parameters() if p.ndim != 2]
optimizers = [
    torch.optim.Muon(matrices, lr=6e-3, weight_decay=0, adjust_lr_fn="match_rms_adamw"),
    torch.optim.Adam(others, lr=6e-3),
]
schedules = [torch.optim.lr_scheduler.OneCycleLR(o, 6e-3, STEPS) for o in optimizers]

losses = []
for _ in range(STEPS):
    wave, queries = waves(16), torch.rand(16, 128, 2)
    field = model(sensors(wave, torch.randint(5, 61, (16,))))
    loss = squared_relative_l2(field(queries), value(wave, queries)).mean()
    loss.backward()
    for optimizer, schedule in zip(optimizers, schedules, strict=True):
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    losses.append(loss.item())
print(f"loss of the first step {losses[0]:.2f}, mean of the last 50 {sum(losses[-50:]) / 50:.3f}")

# %%
# ## Error against the number of sensors
#
# 64 new fields. Kriging solves one linear system per field with the true covariance: no estimate
# that is linear in the sensors' values has a lower expected squared error. The nearest sensor is
# the simplest estimate there is.


def kriging(observations, queries, count):
    seen, known = observations.positions[:, :count], observations.values[:, :count]

    def covariance(a, b):
        return torch.exp(-0.5 * torch.cdist(a.double(), b.double()).square() / REACH**2)

    inner = covariance(seen, seen) + 1e-8 * torch.eye(count)
    return (covariance(queries, seen) @ torch.linalg.solve(inner, known.double())).float()


def nearest(observations, queries, count):
    index = torch.cdist(queries, observations.positions[:, :count]).argmin(dim=-1)
    return observations.values.gather(1, index[..., None])


model.eval()
counts = (5, 10, 20, 30, 40, 60)
errors = {"FST": [], "kriging, true covariance": [], "nearest sensor": []}
wave, queries = waves(64), torch.rand(64, 500, 2)
exact = value(wave, queries)
for count in counts:
    observations = sensors(wave, count)
    with torch.no_grad():
        guesses = (
            model(observations)(queries),
            kriging(observations, queries, count),
            nearest(observations, queries, count),
        )
    for name, guess in zip(errors, guesses, strict=True):
        errors[name].append(relative_l2(guess, exact).mean().item())
for name, row in errors.items():
    print(f"{name:26}" + "".join(f"{error:8.3f}" for error in row))

plt.figure(figsize=(5, 3.2), layout="constrained")
for name, row in errors.items():
    plt.plot(counts, row, "o-", label=name)
plt.xlabel("sensors")
plt.ylabel("mean relative L2 error, 64 new fields")
plt.yscale("log")
plt.legend()
plt.show()

# %%
# ## One field
#
# The dots are the 30 sensors, coloured by what they measured.
axis = torch.linspace(0, 1, 48)
grid = torch.cartesian_prod(axis, axis)[None]
one = tuple(part[:1] for part in wave)
observations = sensors(one, 30)
with torch.no_grad():
    predicted = model(observations)(grid)
figure, axes = plt.subplots(1, 2, figsize=(7, 3.2), layout="constrained", sharey=True)
exact = value(one, grid)
limit = float(exact.abs().max())
style = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
for ax, name, picture in zip(axes, ("exact", "predicted"), (exact, predicted), strict=True):
    ax.imshow(picture.view(48, 48).T, origin="lower", extent=(0, 1, 0, 1), **style)
    seen = observations.positions[0, :30]
    ax.scatter(*seen.T, c=observations.values[0, :30, 0], edgecolors="k", s=25, **style)
    ax.set_title(name)
plt.show()
