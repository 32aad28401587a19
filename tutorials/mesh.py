"""A mesh whose shape changes from sample to sample.

A fluid flows through a channel and is heated by its walls. The length of the channel and the width
along it change from sample to sample, and so does the mesh. The temperature on the boundary is
given; the temperature inside is wanted at the nodes.

FST needs no mapping to a common shape: observations and queries are points, wherever they lie.
"""

# %%
# ## Samples
#
# Lines of flow follow the walls, so with η across the channel from 0 to 1 the temperature obeys
# T_x = T_ηη / (Pe h(x)), where h is the width. It starts at 0, and the walls have temperature 1. We
# step along the channel with a small implicit solver.
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.tri import Triangulation

import fst
from fst.cli import main as fst_command
from fst.data import PointSample, write_points

SAMPLES = 200  # 12 in tests
STEPS = 800  # 2 in tests
ALONG, ACROSS = 48, 15


def channel(seed):
    """Nodes (n 2), temperatures (n 1) and where the nodes are on the boundary."""
    random = np.random.default_rng(seed)
    length, peclet = random.uniform(1.5, 3.0), random.uniform(8.0, 20.0)
    narrow, centre = random.uniform(0.0, 0.45), random.uniform(0.3, 0.7) * length
    x = np.linspace(0, length, ALONG)
    width = 1 - narrow * np.exp(-(((x - centre) / 0.3) ** 2))
    spacing = 1 / (ACROSS - 1)
    second = (np.eye(ACROSS, k=1) - 2 * np.eye(ACROSS) + np.eye(ACROSS, k=-1)) / spacing**2
    second[[0, -1]] = 0  # the walls keep their temperature
    state = np.zeros(ACROSS)
    state[[0, -1]] = 1
    columns = [state]
    for step in range(1, ALONG):
        rate = (x[step] - x[step - 1]) / (peclet * width[step])
        state = np.linalg.solve(np.eye(ACROSS) - rate * second, state)
        columns.append(state)
    across = np.linspace(-0.5, 0.5, ACROSS)
    nodes = np.stack((np.repeat(x, ACROSS), np.outer(width, across).ravel() + 0.5), axis=-1)
    edge = np.zeros((ALONG, ACROSS), bool)
    edge[0], edge[:, 0], edge[:, -1] = True, True, True
    return nodes, np.array(columns).reshape(-1, 1), edge.ravel(), peclet


# %%
# ## One file for all of them
#
# Each sample has its own nodes. The boundary is observed, the temperature at all nodes is the
# target, and the Péclet number is the condition. The domain is a box that holds every channel.


def samples():
    for seed in range(SAMPLES):
        nodes, temperature, edge, peclet = channel(seed)
        yield PointSample(
            positions=nodes[edge],
            values=temperature[edge],
            queries=nodes,
            targets=temperature,
            condition=[peclet],
        )


folder = Path(tempfile.mkdtemp())
write_points(folder / "channels.h5", samples(), fst.Domain((0.0, 0.0), (3.0, 1.0)))

# %%
# ## Training
#
# The same as on the command line:
# `fst train own/fst --data channels.h5 --out run --model.width 32 …`. Channels and domain come from
# the file. The sizes here are small, to finish within a minute on a laptop.
command = (
    f"train own/fst --data {folder}/channels.h5 --out {folder}/run --device cpu "
    "--model.width 32 --model.heads 4 --model.fourier-bands 6 --model.rows 10 "
    "--model.anchors-per-row 8 --model.predictor-width 32 --model.predictor-blocks 1 "
    "--model.refinement-steps 2 --model.points-from-anchors 32 --model.points-from-sobol 32 "
    f"--training.batch-size 8 --training.queries 256 --training.learning-rate 3e-3 "
    f"--training.precision fp32 --training.schedule.maximum {STEPS} "
    f"--training.schedule.warmup {max(1, STEPS // 10)} --training.validate-every {STEPS} "
    "--training.no-tensorboard"
)
assert fst_command(command.split()) == 0
model = fst.from_pretrained(folder / "run" / "best").eval()

# %%
# ## New shapes
#
# Three channels that the model has not seen. Triangles are drawn between the nodes for the picture
# only: the model knows no triangles.


def triangles(nodes):
    corner = np.arange(ALONG * ACROSS).reshape(ALONG, ACROSS)
    a, b, c, d = (part.ravel() for part in (corner[:-1, :-1], corner[1:, :-1], corner[1:, 1:],
                                            corner[:-1, 1:]))  # fmt: skip
    return Triangulation(*nodes.T, np.concatenate((np.stack((a, b, c), 1), np.stack((a, c, d), 1))))


figure, axes = plt.subplots(3, 3, figsize=(10, 4.2), layout="constrained", sharex=True, sharey=True)
for row, seed in enumerate((10_001, 10_002, 10_003)):
    nodes, temperature, edge, peclet = channel(seed)
    where, values = (torch.tensor(part, dtype=torch.float32)[None] for part in (nodes, temperature))
    seen = fst.Observations(where[:, edge], values[:, edge], torch.tensor([[peclet]]).float())
    with torch.no_grad():
        found = model(seen)(where)
    error = float((found - values).norm() / values.norm())
    print(f"channel {row + 1}: relative L2 error {error:.4f}")
    pictures = (values, found, (found - values).abs())
    for ax, picture, name in zip(axes[row], pictures, ("exact", "predicted", "error"), strict=True):
        top = 1 if name != "error" else 0.1
        image = ax.tripcolor(
            triangles(nodes), picture[0, :, 0], shading="gouraud", vmin=0, vmax=top, cmap="inferno"
        )
        ax.set(title=name if row == 0 else "", aspect="equal", xlim=(0, 3))
        if row == 0:
            figure.colorbar(image, ax=axes[:, list(axes[0]).index(ax)], shrink=0.6)
plt.show()

# %%
# ## A published mesh: the Graetz problem
#
# The Python package smithers (licence MIT) has 200 solutions of a heated channel on an unstructured
# mesh of 5,160 nodes, with two parameters each. All of them lie on one mesh there, so the parameters
# are the condition, and the observations only say where the channel is. Save the arrays `points`,
# `snapshots`, `params` and `triangles` as one `.npz` file, and name it in the variable `FST_GRAETZ`
# to run this part.
graetz = Path(os.environ.get("FST_GRAETZ", "data/graetz.npz"))
if graetz.is_file():
    data = np.load(graetz)
    points, parameters = data["points"].astype(float), data["params"]

    def solutions():
        for nodes, parameter, solution in zip(points, parameters, data["snapshots"], strict=True):
            seen = nodes[::20]
            yield PointSample(seen, np.ones((len(seen), 1)), nodes, solution[:, None], parameter)

    box = fst.Domain(tuple(points.min(axis=(0, 1))), tuple(points.max(axis=(0, 1))))
    rows = np.random.default_rng(0).permutation(len(points)).tolist()
    first, second = int(0.3 * len(rows)), int(0.35 * len(rows))
    splits = {"training": rows[:first], "validation": rows[first:second], "test": rows[second:]}
    write_points(folder / "graetz.h5", solutions(), box, splits=splits)
    assert (
        fst_command(command.replace("channels.h5", "graetz.h5").replace("/run", "/two").split())
        == 0
    )
    model = fst.from_pretrained(folder / "two" / "best").eval()

    row = splits["test"][0]
    where = torch.tensor(points[row], dtype=torch.float32)[None]
    seen = fst.Observations(
        where[:, ::20], torch.ones_like(where[:, ::20, :1]), torch.tensor(parameters[[row]])
    )
    with torch.no_grad():
        found = model(seen)(where)[0, :, 0].numpy()
    exact = data["snapshots"][row]
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    print(f"Graetz, one test sample: relative L2 error {error:.4f}")
    figure, axes = plt.subplots(1, 3, figsize=(10, 1.8), layout="constrained", sharey=True)
    pictures = {"exact": exact, "predicted": found, "error": abs(found - exact)}
    for ax, (name, picture) in zip(axes, pictures.items(), strict=True):
        mesh = Triangulation(*points[row].T, data["triangles"])
        image = ax.tripcolor(mesh, picture, shading="gouraud", cmap="inferno")
        ax.set(title=name, aspect="equal")
        figure.colorbar(image, ax=ax, shrink=0.7)
    plt.show()
