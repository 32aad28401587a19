"""Training in your own PyTorch loop.

A model of this package is an `nn.Module`. It needs no trainer: this is a loop of a dozen lines,
with two things worth knowing about standardisation and about the optimiser.
"""

# %%
# ## A problem
#
# The antiderivative: a function is seen at 40 random points of [0, 1], and its integral from 0 is
# wanted anywhere. Functions are sums of five sine waves, so the integral is known.
import math

import torch
from matplotlib import pyplot as plt

import fst
from fst.metrics import relative_l2, squared_relative_l2

STEPS = 500  # 2 in tests

torch.manual_seed(0)
WAVES = math.pi * torch.arange(1, 6)


def functions(amplitudes, positions):
    """The functions (b 5) at positions (b n 1)."""
    return (amplitudes[:, None] * torch.sin(WAVES * positions)).sum(dim=-1, keepdim=True)


def integrals(amplitudes, positions):
    parts = amplitudes[:, None] * (1 - torch.cos(WAVES * positions)) / WAVES
    return parts.sum(dim=-1, keepdim=True)


def batch(size):
    """Observations, queries and what is right there."""
    amplitudes = torch.randn(size, 5)
    where, queries = torch.rand(size, 40, 1), torch.rand(size, 64, 1)
    observations = fst.Observations(where, functions(amplitudes, where))
    return observations, queries, integrals(amplitudes, queries)


# %%
# ## A model on one axis
#
# `rows` gives the fixed positions on every axis but the adaptive one; on one axis there are none.
config = fst.FunctionSpaceConfig(
    low=(0.0,), high=(1.0,), rows=(), anchors_per_row=24, adaptive_axis=0, width=32, heads=4,
    fourier_bands=6, predictor_width=32, predictor_blocks=1, refinement_steps=2,
    points_from_anchors=12, points_from_sobol=12,
)  # fmt: skip
model = fst.FunctionSpaceTransformer(config)
print(f"{fst.parameter_count(model):,} parameters")

# %%
# ## Standardisation
#
# The model takes and gives values in your units. Inside it works with numbers of mean 0 and
# standard deviation 1, and the two sets of statistics are part of its weights. Set them once,
# from training data.
observations, queries, targets = batch(512)
model.standardize_values.set(observations.values.mean(), observations.values.std())
model.standardize_outputs.set(targets.mean(), targets.std())

# %%
# ## The optimiser
#
# Any optimiser works. Muon for the weight matrices and Adam for the rest reaches a low error in
# far fewer steps than Adam alone; see [Optimisers](../training.md). `torch.optim.Muon` needs
# PyTorch 2.9.
matrices = [p for p in model.parameters() if p.ndim == 2]
others = [p for p in model.parameters() if p.ndim != 2]
optimizers = [
    torch.optim.Muon(matrices, lr=3e-3, weight_decay=0, adjust_lr_fn="match_rms_adamw"),
    torch.optim.Adam(others, lr=3e-3),
]
schedules = [torch.optim.lr_scheduler.OneCycleLR(o, 3e-3, STEPS) for o in optimizers]

# %%
# ## The loop
#
# `model(observations)` gives a field, `field(queries)` the values. Evaluation points are drawn
# from the configuration's seeds, so the same call gives the same answer. In training, fresh ones
# in every step are better: `point_stream` gives them.
stream = model.point_stream(anchor_seed=1, sobol_seed=2)
losses = []
for _ in range(STEPS):
    observations, queries, targets = batch(32)
    field = model(observations, draws=stream.draw())
    loss = squared_relative_l2(field(queries), targets).mean()
    loss.backward()
    for optimizer, schedule in zip(optimizers, schedules, strict=True):
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    losses.append(loss.item())

model.eval()
observations, queries, targets = batch(256)
with torch.no_grad():
    error = relative_l2(model(observations)(queries), targets).mean()
print(f"relative L2 error on 256 new functions: {error:.4f}")

# %%
# ## Pictures
#
# The losses of all steps, and one new function with its integral.
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
left.semilogy(losses)
left.set(xlabel="step", ylabel="squared relative error")
line = torch.linspace(0, 1, 200)[None, :, None]
amplitudes = torch.randn(1, 5)
where = torch.rand(1, 40, 1)
with torch.no_grad():
    found = model(fst.Observations(where, functions(amplitudes, where)))(line)
right.plot(where[0], functions(amplitudes, where)[0], "k.", label="observed function")
right.plot(line[0], integrals(amplitudes, line)[0], "0.6", linewidth=4, label="its integral")
right.plot(line[0], found[0], label="predicted")
right.set_xlabel("x")
right.legend()
plt.show()
