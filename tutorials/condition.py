"""A condition: viscosity.

Some inputs are one number for the whole problem: a viscosity, a Reynolds number, a load. The
model takes them as its *condition*. Here a model learns what becomes of a wave by time 0.5, for
every viscosity from 0.003 to 0.3.
"""

# %%
# ## Waves and viscosities
#
# Burgers' equation steepens waves and viscosity smears them. Each sample has its own initial
# condition, a sum of three sine waves, and its own viscosity. The exact solution is Cole-Hopf's.
import math

import torch
from matplotlib import pyplot as plt

import fst
from fst.data import burgers
from fst.data.cole_hopf import exact_trajectory

SAMPLES = 640  # 8 in tests
STEPS = 900  # 2 in tests

torch.manual_seed(0)
x = burgers.cell_centers(256)
LATER = torch.tensor([0.0, 0.5])


def waves(count):
    """Values at x (count 256), with smaller amplitudes for shorter waves."""
    amplitudes = torch.randn(count, 3, 1) / torch.tensor([1.0, 2.0, 3.0])[:, None]
    phases = 2 * math.pi * (torch.arange(1, 4)[:, None] * x + torch.rand(count, 3, 1))
    return (0.7 * amplitudes * phases.sin()).sum(dim=1)


def solved(initial, viscosities):
    """The solution at time 0.5, for each wave with its viscosity."""
    pairs = zip(initial, viscosities.tolist(), strict=True)
    return torch.stack([exact_trajectory(wave, nu, LATER)[1] for wave, nu in pairs])


initial = waves(SAMPLES)
viscosities = 0.003 * 100 ** torch.rand(SAMPLES)  # even in the logarithm
later = solved(initial, viscosities)

# %%
# ## A model with a condition
#
# `condition_channels` says how many numbers there are. With `log_condition` the model takes
# their logarithm itself, because viscosities span decades.
config = fst.FunctionSpaceConfig(
    low=(0.0,), high=(1.0,), rows=(), anchors_per_row=48, adaptive_axis=0, width=48, heads=4,
    fourier_bands=16, predictor_width=32, predictor_blocks=1, refinement_steps=2,
    points_from_anchors=24, points_from_sobol=24, condition_channels=1, log_condition=True,
)  # fmt: skip
model = fst.FunctionSpaceTransformer(config)
model.standardize_values.set(initial.mean(), initial.std())
model.standardize_outputs.set(later.mean(), later.std())
model.standardize_condition(viscosities[:, None])

# %%
# ## Training
#
# `condition` has one row per sample. The loop is that of [Your own PyTorch loop](own_loop.md), with
# the mean squared error: a relative error would give most weight to the samples that decay most.
positions = x.float()[:, None]


def observe(initial, viscosities):
    """Every fourth value of the wave, and the viscosity."""
    where = positions[::4].expand(len(initial), -1, -1)
    values = initial[:, ::4, None].float()
    return fst.Observations(where, values, condition=viscosities[:, None])


matrices = [p for p in model.parameters() if p.ndim == 2]
others = [p for p in model.parameters() if p.ndim != 2]
optimizers = [
    torch.optim.Muon(matrices, lr=3e-3, weight_decay=0, adjust_lr_fn="match_rms_adamw"),
    torch.optim.Adam(others, lr=3e-3),
]
schedules = [torch.optim.lr_scheduler.OneCycleLR(o, 3e-3, STEPS) for o in optimizers]
for _ in range(STEPS):
    rows, asked = torch.randint(SAMPLES, (16,)), torch.randint(256, (64,))
    field = model(observe(initial[rows], viscosities[rows]))
    found = field(positions[asked].expand(16, -1, -1))
    gap = found - later[rows][:, asked, None].float()
    (gap.square().mean() / later.var()).backward()
    for optimizer, schedule in zip(optimizers, schedules, strict=True):
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
model.eval()

# %%
# ## One new wave, four viscosities
#
# Only the condition differs between these predictions.
VISCOSITIES = torch.tensor([0.004, 0.016, 0.06, 0.24])
start = waves(1).expand(4, -1)
exact = solved(start, VISCOSITIES)
with torch.no_grad():
    found = model(observe(start, VISCOSITIES))(positions.expand(4, -1, -1))

figure, axes = plt.subplots(1, 4, figsize=(11, 2.6), layout="constrained", sharey=True)
for ax, viscosity, right, guess in zip(axes, VISCOSITIES, exact, found, strict=True):
    ax.plot(x, start[0], "0.8", linewidth=1, label="at time 0")
    ax.plot(x, right, "0.5", linewidth=4, label="exact")
    ax.plot(x, guess[:, 0], "C1", label="predicted")
    ax.set(title=f"viscosity {viscosity:g}", xlabel="space")
axes[0].set_ylabel("u at time 0.5")
axes[0].legend(fontsize=7)
plt.show()

# %%
# ## The error by viscosity
#
# Over new waves, with the size of what is left of them. Low viscosity is the hardest: fronts are
# steep. At high viscosity little is left to predict.
NEW = 64  # 2 in tests
start = waves(NEW)
for viscosity in VISCOSITIES:
    exact = solved(start, viscosity.expand(NEW))
    with torch.no_grad():
        found = model(observe(start, viscosity.expand(NEW)))(positions.expand(NEW, -1, -1))[..., 0]
    error, size = ((found - exact).square().mean().sqrt(), exact.square().mean().sqrt())
    print(f"viscosity {viscosity:5.3f}: root mean square error {error:.3f}, of a wave {size:.3f}")

# %%
# ## In your own data
#
# A condition in a file of your own: `PointSample(..., condition=[0.01])`, see [Own
# data](../data.md). The recipe `fast/burgers-all/fst` trains the whole solution for twelve
# viscosities; its weights ship as `burgers-all`, and `fst explore burgers-all` has a slider.
