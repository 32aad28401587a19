"""Points in three dimensions.

Sources of heat lie somewhere in a box. Sensors at random places measure the temperature, and we ask
for it elsewhere. Nothing changes but the number of axes.
"""

# %%
# ## Samples
#
# Three smooth sources per sample, 120 sensors and 400 queries, all at random positions in the unit
# box.
import tempfile
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot as plt

import fst
from fst.cli import main as fst_command
from fst.data import Label, Labels, PointSample, write_points

SAMPLES = 800  # 12 in tests
STEPS = 1000  # 2 in tests


def temperature(sources, positions):
    gap = positions[:, None] - sources["at"]  # points, sources, axes
    return (sources["heat"] * np.exp(-(gap**2).sum(axis=-1) / 0.08)).sum(axis=1, keepdims=True)


def sample(seed):
    random = np.random.default_rng(seed)
    sources = {"at": random.uniform(0.1, 0.9, (3, 3)), "heat": random.uniform(0.5, 1.5, 3)}
    where, asked = random.random((120, 3)), random.random((400, 3))
    return sources, PointSample(
        where, temperature(sources, where), asked, temperature(sources, asked)
    )


folder = Path(tempfile.mkdtemp())
write_points(
    folder / "heat.h5",
    (sample(seed)[1] for seed in range(SAMPLES)),
    fst.Domain.unit(3),
    labels=Labels(axes=["x", "y", "z"], values=[Label("T", "K")], targets=[Label("T", "K")]),
)

# %%
# ## Training
#
# On three axes `rows` has two numbers: 5 × 5 rows of 5 anchors each, which move along the last
# axis.
command = (
    f"train own/fst --data {folder}/heat.h5 --out {folder}/run --device cpu "
    "--model.width 32 --model.heads 4 --model.fourier-bands 4 --model.rows 5 5 "
    "--model.anchors-per-row 5 --model.adaptive-axis 2 --model.predictor-width 32 "
    "--model.predictor-blocks 1 --model.refinement-steps 2 --model.points-from-anchors 32 "
    "--model.points-from-sobol 32 --training.batch-size 8 --training.queries 200 "
    "--training.learning-rate 3e-3 --training.precision fp32 "
    f"--training.schedule.maximum {STEPS} --training.schedule.warmup {max(1, STEPS // 10)} "
    f"--training.validate-every {STEPS} --training.no-tensorboard"
)
assert fst_command(command.split()) == 0
model = fst.from_pretrained(folder / "run" / "best").eval()

# %%
# ## A slice through a new sample
#
# The field is evaluated on a plane at height 0.5. No sensor lies exactly in it. Sensors within 0.1
# of the plane are drawn.
sources, new = sample(100_000)
seen = fst.Observations(
    torch.tensor(new.positions, dtype=torch.float32)[None],
    torch.tensor(new.values, dtype=torch.float32)[None],
)
axis = np.linspace(0, 1, 60)
plane = np.stack(np.meshgrid(axis, axis, [0.5], indexing="ij"), axis=-1).reshape(-1, 3)
with torch.no_grad():
    found = model(seen)(torch.tensor(plane, dtype=torch.float32)[None])[0, :, 0].numpy()
exact = temperature(sources, plane)[:, 0]
error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
print(f"relative L2 error on the plane: {error:.3f}")

figure, axes = plt.subplots(1, 2, figsize=(7.5, 3.2), layout="constrained", sharey=True)
near = new.positions[abs(new.positions[:, 2] - 0.5) < 0.1]
for ax, name, picture in zip(axes, ("exact", "predicted"), (exact, found), strict=True):
    image = ax.imshow(
        picture.reshape(60, 60).T, origin="lower", extent=(0, 1, 0, 1), vmin=0, vmax=exact.max(),
        cmap="inferno",
    )  # fmt: skip
    ax.plot(near[:, 0], near[:, 1], "w+")
    ax.set(title=f"{name}, z = 0.5", xlabel="x")
axes[0].set_ylabel("y")
figure.colorbar(image, ax=axes, label="T (K)")
plt.show()

# %%
# ## Sensors and queries in the box
figure = plt.figure(figsize=(5, 4), layout="constrained")
ax = figure.add_subplot(projection="3d")
points = ax.scatter(*new.queries.T, c=new.targets[:, 0], s=6, cmap="inferno")
ax.scatter(*new.positions.T, c="k", marker="+", s=20, label="sensors")
ax.set(xlabel="x", ylabel="y", zlabel="z")
ax.legend()
figure.colorbar(points, ax=ax, label="T (K) at the queries", shrink=0.7)
plt.show()
