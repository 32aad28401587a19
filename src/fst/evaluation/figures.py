"""Pictures of saved fields: solutions and errors, profiles, anchors and length scales.

Enters: `Fields`. Leaves: a matplotlib Figure, without pyplot and its global state. The second axis
runs to the right and the first (time) upwards. Colours are told apart by colour-blind readers.
"""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PatchCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from matplotlib.ticker import MaxNLocator

from fst.evaluation.fields import Fields

STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.labelsize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}
SIGNED, UNSIGNED, ERROR = "RdBu_r", "viridis", "magma"

# Ellipses are drawn at this share of the length scales, as in the paper, and fade outwards.
ELLIPSE_SCALE = 0.35
ELLIPSE_LEVELS = (1.0, 0.8, 0.6, 0.4, 0.2)


@matplotlib.rc_context(STYLE)
def solutions(fields: Fields, samples: Sequence[int] | None = None) -> Figure:
    """Reference, prediction and absolute error side by side, one sample a row."""
    samples = range(len(fields)) if samples is None else samples
    figure, axes = new_figure(len(samples), 3, width=9.0, row_height=2.1)
    for line, sample in zip(axes, samples, strict=True):
        truth, prediction = fields.truth[sample], fields.prediction[sample]
        error = np.abs(prediction - truth)
        colors, scale = value_scale(truth)
        draw_field(line[0], fields, truth, colors, scale)
        mesh = draw_field(line[1], fields, prediction, colors, scale)
        figure.colorbar(
            mesh, ax=list(line[:2]), pad=0.02, aspect=14, extend=beyond(prediction, scale)
        )
        mesh = draw_field(line[2], fields, error, ERROR, Normalize(0, max(error.max(), 1e-12)))
        figure.colorbar(mesh, ax=line[2], pad=0.04, aspect=14)
        line[0].set_title(f"{fields.title(sample)}: reference")
        line[1].set_title(f"{fields.model} prediction")
        line[2].set_title(f"absolute error (relative L2: {fields.errors[sample]:.4f})")
    _label_outside(axes, fields)
    return figure


@matplotlib.rc_context(STYLE)
def profiles(models: Sequence[Fields], samples: Sequence[int] | None = None) -> Figure:
    """Cuts through the reference and each model's prediction; the colour says where the cut is.

    The models must have been asked for the same samples. Each row shares its limits.
    """
    fields = models[0]
    samples = range(len(fields)) if samples is None else samples
    figure, axes = new_figure(len(samples), 1 + len(models), width=9.0, row_height=1.9, share=True)
    colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.92, len(fields.cuts)))
    for line, sample in zip(axes, samples, strict=True):
        curves = [fields.profile_truth[sample]]
        curves += [model.profile_prediction[sample] for model in models]
        for place, those in zip(line, curves, strict=True):
            for values, color in zip(those, colors, strict=True):
                place.plot(fields.along, values, color=color, linewidth=1.1)
            place.set_xlim(fields.along[0], fields.along[-1])
    for place, title in zip(axes[0], ("reference", *(m.model for m in models)), strict=True):
        place.set_title(str(title))
    _label_outside(axes, fields)
    for place, sample in zip(axes[:, 0], samples, strict=True):
        place.set_ylabel(f"{fields.title(sample)}\nu")
    name = str(fields.axis_names[0]).split()[-1]
    labels = [f"{name} = {cut:.3g}" for cut in fields.cuts]
    figure.legend(
        handles=axes[0, 0].lines, labels=labels, loc="outside lower center", ncols=len(labels)
    )
    return figure


@matplotlib.rc_context(STYLE)
def anchors(fields: Fields, samples: Sequence[int] | None = None) -> Figure:
    """Anchors over the reference (top) and their decoding length scales (bottom)."""
    samples = range(min(4, len(fields))) if samples is None else samples
    figure, axes = new_figure(2, len(samples), width=2.0 * len(samples) + 1.2, row_height=2.2)
    # Colour measures in the unit square, whatever the units of the axes.
    sizes = np.sqrt(np.prod(fields.length_scales / fields.axis_ends, axis=-1))
    shown = sizes[list(samples)]
    scale = Normalize(shown.min(), shown.max() if shown.max() > shown.min() else shown.min() + 1e-6)
    for (top, bottom), sample in zip(axes.T, samples, strict=True):
        first, second = fields.anchors[sample].T
        draw_field(top, fields, fields.truth[sample], *value_scale(fields.truth[sample]))
        # A white rim keeps the dots apart from dark parts of the picture.
        top.scatter(
            *(second, first), s=4, c="black", edgecolors="white", lw=0.3, zorder=3, clip_on=False
        )
        top.set_title(fields.title(sample))
        draw_ellipses(bottom, fields, sample, sizes[sample], scale)
    _label_outside(axes, fields)
    figure.colorbar(
        ScalarMappable(scale, "viridis"),
        ax=list(axes[1]),
        label="√(ℓ₁ℓ₂) in the unit square",
        pad=0.01,
    )
    return figure


def draw_field(
    place: Axes, fields: Fields, values: Float[np.ndarray, "i j"], colors: str, scale: Normalize
) -> ScalarMappable:
    mesh = place.pcolormesh(
        fields.second, fields.first, values, cmap=colors, norm=scale, shading="nearest"
    )
    _frame(place, fields)
    return mesh


def draw_ellipses(
    place: Axes,
    fields: Fields,
    sample: int,
    sizes: Float[np.ndarray, " m"],
    scale: Normalize,
) -> None:
    """One soft ellipse an anchor: nested transparent ones that add up towards the middle."""
    colors = matplotlib.colormaps["viridis"](scale(sizes))
    for level in ELLIPSE_LEVELS:
        patches = [
            Ellipse(
                (x, t), 2 * ELLIPSE_SCALE * level * along_x, 2 * ELLIPSE_SCALE * level * along_t
            )
            for (t, x), (along_t, along_x) in zip(
                fields.anchors[sample], fields.length_scales[sample], strict=True
            )
        ]
        collection = PatchCollection(patches, facecolors=colors, edgecolors="none", alpha=0.3)
        place.add_collection(collection)
    _frame(place, fields)


def value_scale(values: Float[np.ndarray, "..."]) -> tuple[str, Normalize]:
    """Colours centred on zero for fields of both signs, and plain ones for the rest."""
    low, high = float(values.min()), float(values.max())
    if low < 0 < high:
        most = max(-low, high)
        return SIGNED, Normalize(-most, most)
    return UNSIGNED, Normalize(low, high if high > low else low + 1)


def beyond(values: Float[np.ndarray, "..."], scale: Normalize) -> str:
    """At which ends of a colour bar some values lie beyond its colours (`extend=`)."""
    below, above = bool(np.min(values) < scale.vmin), bool(np.max(values) > scale.vmax)
    return {(0, 0): "neither", (1, 0): "min", (0, 1): "max", (1, 1): "both"}[below, above]


def new_figure(
    rows: int, columns: int, *, width: float, row_height: float, share: bool = False
) -> tuple[Figure, np.ndarray]:
    """A figure of `rows` × `columns` axes, always as a two-dimensional array."""
    figure = Figure(figsize=(width, row_height * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey="row" if share else "none")
    return figure, axes


def _label_outside(axes: np.ndarray, fields: Fields) -> None:
    """Axis names and numbers at the left and at the bottom only, and few of them."""
    for place in axes.flat:
        place.xaxis.set_major_locator(MaxNLocator(2))
        place.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    for place in axes[:-1].flat:
        place.tick_params(labelbottom=False)
    for place in axes[:, 1:].flat:
        place.tick_params(labelleft=False)
    for place in axes[:, 0]:
        place.set_ylabel(str(fields.axis_names[0]))
    for place in axes[-1]:
        place.set_xlabel(str(fields.axis_names[1]))


def _frame(place: Axes, fields: Fields) -> None:
    place.set_xlim(fields.second[0], fields.second[-1])
    place.set_ylim(fields.first[0], fields.first[-1])
    for side in ("top", "right"):
        place.spines[side].set_visible(True)
