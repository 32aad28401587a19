"""A condition: viscosity.

Some inputs are one number for the whole problem: a viscosity, a Reynolds number, a load. The
model takes them as its *condition*. The weights `burgers-all` are trained on twelve
viscosities from 0.001 to 4.
"""

# %%
# ## One start, many viscosities
#
# The same initial condition, solved with four viscosities. Low viscosity makes steep fronts, high
# viscosity wipes the wave out.
import torch
from matplotlib import pyplot as plt

import fst
from fst.data import burgers
from fst.metrics import relative_l2

TIMES = 201  # 11 in tests
CELLS = 1024  # 64 in tests
VISCOSITIES = torch.tensor([0.001, 0.01, 0.1, 1.0])
initial = burgers.sample_initial(1, CELLS, seed=5)
times = torch.linspace(0, 2, TIMES)
exact = burgers.solve(initial.expand(4, -1), VISCOSITIES.double(), times).float()  # (4, 201, 1024)

# %%
# ## Prediction
#
# `condition` has one row per function. This model takes the logarithm itself, because viscosities
# span decades (`log_condition` in its configuration).
model = fst.from_pretrained("burgers-all").eval()
t, x = torch.linspace(0, 1, TIMES), torch.linspace(0, 1, CELLS)
grid = torch.cartesian_prod(t, x)
EACH = 32  # 1 in tests
observed = (grid[:, 0] == 0) | (((grid[:, 1] == 0) | (grid[:, 1] == 1)) & (grid[:, 0] > 0))
values = exact.reshape(4, -1, 1)
with torch.no_grad():
    field = model(
        fst.Observations(
            grid[observed].expand(4, -1, -1), values[:, observed], condition=VISCOSITIES[:, None]
        )
    )
    predicted = field(grid[::EACH].expand(4, -1, -1))
for viscosity, error in zip(VISCOSITIES, relative_l2(predicted, values[:, ::EACH]), strict=True):
    print(f"viscosity {viscosity:5.3f}: relative L2 error {error:.4f}")

# %%
# ## Profiles at time 0.5
figure, axes = plt.subplots(1, 4, figsize=(11, 2.4), layout="constrained", sharey=True)
moment = TIMES // 4
with torch.no_grad():
    where = torch.stack((t[moment].expand(len(x) // 4), x[::4]), dim=-1)
    profiles = field(where.expand(4, -1, -1))
for ax, viscosity, right, found in zip(axes, VISCOSITIES, exact, profiles, strict=True):
    ax.plot(x, right[moment], "0.7", linewidth=4, label="exact")
    ax.plot(x[::4], found[:, 0], label="predicted")
    ax.set(title=f"viscosity {viscosity:g}", xlabel="space")
axes[0].set_ylabel("u at time 0.5")
axes[0].legend()
plt.show()

# %%
# ## In your own data
#
# A condition in a file of your own: `PointSample(..., condition=[0.01])`, see [Own
# data](../data.md). In a configuration: `FunctionSpaceConfig(condition_channels=1,
# log_condition=True)`.
