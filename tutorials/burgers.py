"""Burgers in ten lines.

The Burgers equation steepens a wave until viscosity stops it. A model that was trained on many such
solutions predicts one from its initial and boundary values alone, at any point of time and space.

The weights `burgers-single` come with the package: ν = 0.01, times 0 to 2, periodic in space. Both
axes are scaled to [0, 1], and positions are (time, space).
"""

# %%
# ## What the model is given
#
# An initial condition from the distribution that the model was trained on, and its solution by
# `fst.data.burgers`. We need the solution for the values on the boundary and for the error.
import torch
from matplotlib import pyplot as plt

import fst
from fst.data import burgers

TIMES = 201  # 11 in tests
CELLS = 1024  # 64 in tests
initial = burgers.sample_initial(1, CELLS, seed=7)
exact = burgers.solve(initial, 0.01, torch.linspace(0, 2, TIMES))[0]  # (201, 1024)

# %%
# ## Ten lines
#
# The model observes the first time, and the first and last cell at the 200 later times: 1,424
# values. It turns them into a field once. The field can then be evaluated anywhere.
model = fst.from_pretrained("burgers-single").eval()

t, x = torch.linspace(0, 1, TIMES), torch.linspace(0, 1, CELLS)
grid = torch.cartesian_prod(t, x)  # (205824, 2)
EACH = 16  # 1 in tests
observed = (grid[:, 0] == 0) | (((grid[:, 1] == 0) | (grid[:, 1] == 1)) & (grid[:, 0] > 0))
values = exact.float().reshape(-1, 1)

with torch.no_grad():
    field = model(fst.Observations(grid[None, observed], values[None, observed]))
    predicted = field(grid[None, ::EACH])  # every 16th point of the grid

error = (predicted[0] - values[::EACH]).norm() / values[::EACH].norm()
print(f"{int(observed.sum())} observations, relative L2 error {error:.4f}")

# %%
# ## The first picture
#
# The same field, exact and predicted, and the difference on a scale of its own.
shown = CELLS // EACH
pictures = {
    "exact": exact[:, ::EACH].float(),
    "predicted": predicted.view(TIMES, shown),
    "difference": predicted.view(TIMES, shown) - exact[:, ::EACH].float(),
}
figure, axes = plt.subplots(1, 3, figsize=(9, 2.8), layout="constrained", sharey=True)
for ax, (name, picture) in zip(axes, pictures.items(), strict=True):
    limit = float((pictures["exact"] if name != "difference" else picture).abs().max())
    image = ax.imshow(
        picture.T, origin="lower", extent=(0, 2, 0, 1), aspect="auto", cmap="RdBu_r",
        vmin=-limit, vmax=limit,
    )  # fmt: skip
    ax.set(title=name, xlabel="time")
    figure.colorbar(image, ax=ax)
axes[0].set_ylabel("space")
plt.show()

# %%
# ## Queries anywhere
#
# A query need not lie on a grid. Here is the steepest front at time 1, at 400 points within a tenth
# of the domain.
steepest = float(x[exact[TIMES // 2].diff().abs().argmax()])
near = torch.linspace(max(0, steepest - 0.05), min(1, steepest + 0.05), 400)
with torch.no_grad():
    profile = field(torch.stack((torch.full_like(near, 0.5), near), dim=-1)[None])[0, :, 0]
plt.figure(figsize=(5, 2.6), layout="constrained")
plt.plot(x, exact[TIMES // 2], "k.", markersize=4, label="exact, grid points")
plt.plot(near, profile, label="predicted")
plt.xlim(near[0], near[-1])
plt.xlabel("space")
plt.ylabel("u at time 1")
plt.legend()
plt.show()
