"""Darcy flow.

Water seeps through ground of two kinds. The coefficient is 0.36 in one and 0.02 in the other, and
the pressure solves −∇·(a∇u) = 1 with u = 0 on the boundary. The weights `darcy` map
the coefficient on a 128 × 128 grid to the pressure at any point.
"""

# %%
# ## A sample
#
# Coefficient and solver are those of `fst.data.darcy`, the same as in NeuralOperator's data: a
# sample is solved on a fine grid, and every eighth node is kept. The model was trained on such
# samples with another seed.
import torch
from matplotlib import pyplot as plt

import fst
from fst.data import darcy
from fst.metrics import relative_l2

NODES = 128  # 32 in tests
FINE = 1024  # 64 in tests
high, solution = darcy.generate(1, NODES, seed=3, fine=FINE)  # (1, 128, 128) each
coefficient = torch.where(high, darcy.HIGH, darcy.LOW)
exact = solution[0]

# %%
# ## Prediction
#
# The model observes the coefficient at every node. The queries are every other node.
# Positions are scaled: the kept nodes run from 0 to 1.
model = fst.from_pretrained("darcy").eval()
axis = torch.linspace(0, 1, NODES)
nodes = torch.cartesian_prod(axis, axis)[None]
asked = torch.cartesian_prod(axis[::2], axis[::2])[None]
with torch.no_grad():
    field = model(fst.Observations(nodes, coefficient.reshape(1, -1, 1)))
    predicted = field(asked).view(NODES // 2, NODES // 2)
error = relative_l2(predicted.view(1, -1, 1), exact[::2, ::2].reshape(1, -1, 1)).item()
print(f"relative L2 error {error:.4f}")

# %%
# ## Pictures
#
# Pressure is high where the coefficient is low. Crosses are the anchors.
figure, axes = plt.subplots(1, 4, figsize=(11, 2.9), layout="constrained", sharey=True)
top = float(exact.max())
pictures = (
    ("coefficient", coefficient[0], {"cmap": "Greys"}),
    ("exact pressure", exact, {"vmin": 0, "vmax": top}),
    ("predicted, with anchors", predicted, {"vmin": 0, "vmax": top}),
    ("difference", predicted - exact[::2, ::2], {"cmap": "RdBu_r"}),
)
for ax, (name, picture, style) in zip(axes, pictures, strict=True):
    if name == "difference":
        limit = float(picture.abs().max())
        style = {**style, "vmin": -limit, "vmax": limit}
    image = ax.imshow(picture.T, origin="lower", extent=(0, 1, 0, 1), **style)
    ax.set(title=name, xticks=(0, 0.5, 1), xlabel="x")
    figure.colorbar(image, ax=ax, location="bottom", shrink=0.9)
axes[0].set_ylabel("y")
axes[2].plot(*field.anchors.positions[0].T, "w+", markersize=2, alpha=0.5)
plt.show()

# %%
# ## Which anchors matter
#
# The field can be decoded from a few near anchors. How much is lost depends on the length scales
# that the model has learned.
with torch.no_grad():
    for neighbors in (1024, 64, 16):
        found = field(asked, neighbors=neighbors)
        error = relative_l2(found, exact[::2, ::2].reshape(1, -1, 1)).item()
        print(f"from the {neighbors:4} nearest anchors: {error:.4f}")
