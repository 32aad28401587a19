"""The figures of the page on the method, each drawn by the functions that it explains."""

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

import fst
from fst.anchors import ordered_positions
from fst.data import BurgersSamples, burgers
from fst.evaluation_points import ResampledPoints
from fst.rbf import rbf_blend, rbf_weights


def blend() -> Figure:
    """Equation 1 on a line: weights above, the blend of four features below."""
    x = torch.linspace(0, 1, 400)[None, :, None]
    anchors = torch.tensor([0.1, 0.35, 0.5, 0.85])[None, :, None]
    lengths = torch.tensor([0.08, 0.06, 0.06, 0.15])[None, :, None]
    features = torch.tensor([0.2, 1.0, -0.5, 0.6])[None, :, None]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(6, 3.4), sharex=True, layout="constrained")
    top.plot(x[0, :, 0], rbf_weights(x, anchors, lengths)[0])
    top.set_ylabel("weights")
    bottom.plot(x[0, :, 0], rbf_blend(x, anchors, lengths, features)[0], "k")
    for index in range(4):
        top.axvline(float(anchors[0, index]), color=f"C{index}", linewidth=0.5)
        bottom.plot(anchors[0, index], features[0, index], "o", color=f"C{index}")
    bottom.set(xlabel="x", ylabel="blend; dots: features")
    return figure


def points() -> Figure:
    """Evaluation points of two steps: drawn anchors and Sobol points."""
    stream = ResampledPoints(2, 256, 64, 64, 2, 1, 2)
    draws = stream.draw()
    axis = torch.linspace(0, 1, 16)
    anchors = torch.cartesian_prod(axis, axis)
    figure, axes = plt.subplots(1, 2, figsize=(6.4, 3.2), sharey=True, layout="constrained")
    for step, ax in enumerate(axes):
        ax.plot(*anchors.T, ".", color="0.8", markersize=3, label="anchors")
        ax.plot(*anchors[draws.anchor_indices[step]].T, "C0.", markersize=6, label="drawn anchors")
        ax.plot(*draws.uniform[step].T, "C1+", label="Sobol points")
        ax.set(title=f"step {step + 1}", aspect="equal")
    axes[0].legend(fontsize=7, loc="upper right")
    return figure


def gaps() -> Figure:
    """Equations 8 and 9: scores of gaps above, the positions they give below."""
    order = torch.arange(15.0)
    scores = torch.stack([torch.zeros(15), -3 * torch.exp(-((order - 5) ** 2) / 6)])
    positions = ordered_positions(scores[None])[0]
    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.4), layout="constrained")
    for row, name in enumerate(("all scores 0", "low scores in the middle")):
        left.plot(order + 1, scores[row], "o-", markersize=3, label=name)
        right.plot(positions[row], torch.full((16,), -float(row)), "o", color=f"C{row}")
    left.set(xlabel="gap", ylabel="score α")
    left.legend(fontsize=7)
    right.set(xlabel="position on the row", yticks=[], ylim=(-1.5, 0.5))
    return figure


def layouts() -> Figure:
    """Anchors of three kinds: in line, staggered, and where shipped weights put them."""
    figure, axes = plt.subplots(1, 3, figsize=(8.4, 3.3), sharey=True, layout="constrained")
    for ax, kind in zip(axes, ("uniform", "staggered"), strict=False):
        sizes = fst.FunctionSpaceConfig(
            coordinates=kind, rows=(8,), anchors_per_row=16, points_from_anchors=64
        )
        seen = fst.Observations(torch.rand(1, 5, 2), torch.rand(1, 5, 1))
        with torch.no_grad():
            anchors = fst.FunctionSpaceTransformer(sizes)(seen).anchors.positions[0]
        ax.plot(*anchors.T, "k.", markersize=4)
        ax.set(title=kind, xlabel="first axis, across the rows", box_aspect=1)
    initial = burgers.sample_initial(1, 1024, seed=7)
    exact = burgers.solve(initial, 0.01, burgers.saved_times()).float()
    batch = BurgersSamples.from_solutions(exact).batch(torch.tensor([0]))
    with torch.no_grad():
        field = fst.from_pretrained("burgers-single")(batch.observations)
        grid = torch.cartesian_prod(torch.linspace(0, 1, 60), torch.linspace(0, 1, 120))
        values = field(grid[None]).view(60, 120)
    where = {"origin": "lower", "extent": (0, 1, 0, 1), "aspect": "auto"}
    axes[2].imshow(values.T.numpy(), cmap="RdBu_r", vmin=-2, vmax=2, **where)
    axes[2].plot(*field.anchors.positions[0].T, "k.", markersize=1.5)
    axes[2].set(title="adaptive", xlabel="time, scaled", box_aspect=1)
    axes[0].set(ylabel="second axis, along the rows", ylim=(-0.03, 1.03))
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "blend": blend,
    "points": points,
    "gaps": gaps,
    "layouts": layouts,
}


def draw(folder: Path) -> dict[str, Path]:
    """All figures as files, by their names."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    with mpl.rc_context({"figure.dpi": 110, "font.size": 9}):
        plt.switch_backend("agg")
        for name, make in FIGURES.items():
            drawn[f"{name}.png"] = folder / f"{name}.png"
            make().savefig(folder / f"{name}.png")
            plt.close("all")
    return drawn
