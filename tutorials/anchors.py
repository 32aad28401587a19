"""Which anchors and length scales the model chose.

The field of a model is stored at its anchors. Where they stand and how far each reaches can be read
off the field: nothing needs to be hooked or recomputed.
"""

# %%
# ## Two inputs
#
# Two Burgers solutions with the weights `burgers-single`, which come with the package.
import torch
from matplotlib import pyplot as plt
from matplotlib.collections import EllipseCollection

import fst
from fst.data import burgers

TIMES = 201  # 11 in tests
CELLS = 1024  # 64 in tests
initial = burgers.sample_initial(12, CELLS, seed=1)[[2, 8]]
exact = burgers.solve(initial, 0.01, torch.linspace(0, 2, TIMES)).float()
t, x = torch.linspace(0, 1, TIMES), torch.linspace(0, 1, CELLS)
grid = torch.cartesian_prod(t, x)
observed = (grid[:, 0] == 0) | (((grid[:, 1] == 0) | (grid[:, 1] == 1)) & (grid[:, 0] > 0))
values = exact.reshape(2, -1, 1)

model = fst.from_pretrained("burgers-single").eval()
with torch.no_grad():
    field = model(fst.Observations(grid[observed].expand(2, -1, -1), values[:, observed]))

# %%
# ## Positions
#
# `field.anchors` has positions and two sets of length scales, for decoding and for refinement, in
# the units of the domain. Anchors stand on rows of constant time and move in space.
positions = field.anchors.positions  # (2, m, 2)
rows = model.config.row_count
along = positions.view(2, rows, -1, 2)[..., 1]  # (2, rows, anchors per row)
even = torch.linspace(0, 1, along.shape[-1])
print(f"{positions.shape[1]} anchors on {rows} rows")
print(f"farthest from even spacing: {(along - even).abs().max():.3f}")
print(f"largest difference between the two inputs: {(along[0] - along[1]).abs().max():.3f}")

figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", sharey=True)
for ax, solution, anchors in zip(axes, exact, positions, strict=True):
    ax.imshow(solution[:, ::8].T, origin="lower", extent=(0, 1, 0, 1), aspect="auto", cmap="RdBu_r")
    ax.plot(*anchors.T, "k.", markersize=1.5)
    ax.set_xlabel("time, scaled")
axes[0].set_ylabel("space")
plt.show()

# %%
# ## Length scales
#
# Each axis has its own length. The lines show how the lengths of all anchors are distributed; the
# spacing of even anchors is drawn for comparison.
figure, axes = plt.subplots(1, 2, figsize=(8, 2.6), layout="constrained", sharey=True)
for ax, axis, name in zip(axes, (0, 1), ("time", "space"), strict=True):
    for kind in ("length_scales", "refinement_length_scales"):
        lengths = getattr(field.anchors, kind)[..., axis].flatten().sort().values
        ax.plot(lengths, torch.linspace(0, 1, len(lengths)), label=kind)
    ax.axvline(1 / (rows - 1) if axis == 0 else float(even[1]), color="0.7", label="even spacing")
    ax.set(xlabel=f"length in {name}", xlim=(0, None))
axes[0].set_ylabel("part of the anchors below")
axes[1].legend(fontsize=7)
plt.show()

# %%
# ## As ellipses
#
# A quarter of the anchors, each with an ellipse of its decoding length scales.
figure, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
ax.imshow(exact[0, :, ::8].T, origin="lower", extent=(0, 1, 0, 1), aspect="auto", cmap="Greys")
some = slice(None, None, 4)
lengths = field.anchors.length_scales[0, some].numpy()
ellipses = EllipseCollection(
    2 * lengths[:, 0], 2 * lengths[:, 1], 0 * lengths[:, 0], units="xy",
    offsets=positions[0, some].numpy(), offset_transform=ax.transData, facecolors="none",
    edgecolors="C0", linewidths=0.6,
)  # fmt: skip
ax.add_collection(ellipses)
ax.set(xlabel="time, scaled", ylabel="space", xlim=(0, 1), ylim=(0, 1))
plt.show()
