"""The figures of the page on the method, each drawn by the functions that it explains."""

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from fst.anchors import ordered_positions
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


FIGURES: dict[str, Callable[[], Figure]] = {"blend": blend, "points": points, "gaps": gaps}


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
