"""Pictures of a user's own points: what was observed, reference, prediction and error.

Enters: `PointFields`. Leaves: a matplotlib Figure. One axis is drawn as curves. Of two axes the
second runs to the right and the first upwards, and every point is a patch of colour: a cell where
the points form a full grid, else a square of one size. Nothing is interpolated.
"""

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from fst.evaluation.charts import PALETTE
from fst.evaluation.figures import ERROR, STYLE, beyond, new_figure, value_scale
from fst.evaluation.point_fields import PointFields

# Square points of paper that the patches of one picture cover between them, and limits of one.
AREA, SMALLEST, LARGEST = 16_000, 1.5, 30.0
RIMMED = 25.0


@matplotlib.rc_context(STYLE)
def curves(fields: PointFields) -> Figure:
    """On one axis: observations, reference with prediction, and absolute error; a sample a row."""
    figure, axes = new_figure(len(fields), 3, width=10.0, row_height=2.0)
    for sample, line in enumerate(axes):
        positions, values = fields.observations(sample)
        queries, truth, prediction = fields.answers(sample)
        order = np.argsort(queries[:, 0], kind="stable")
        across, truth, prediction = queries[order, 0], truth[order], prediction[order]
        line[0].plot(positions[:, 0], values, ".", color="black", markersize=3)
        line[1].plot(across, truth, color=PALETTE[0], linewidth=1.4, label="reference")
        dashed = {"linestyle": "--", "color": PALETTE[1], "label": str(fields.model)}
        line[1].plot(across, prediction, linewidth=1.2, **dashed)
        line[2].plot(across, np.abs(prediction - truth), color="black", linewidth=1.0)
        line[2].set_ylim(bottom=0)
        for place in line:
            place.set_xlim(fields.low[0], fields.high[0])
    axes[0, 1].legend()
    for place in axes[-1]:
        place.set_xlabel("axis 1")
    _name(fields, axes)
    return figure


@matplotlib.rc_context(STYLE)
def patches(fields: PointFields) -> Figure:
    """On two axes: observations, reference, prediction and absolute error; one sample a row."""
    figure, axes = new_figure(len(fields), 4, width=10.6, row_height=2.2)
    for sample, line in enumerate(axes):
        positions, values = fields.observations(sample)
        queries, truth, prediction = fields.answers(sample)
        error = np.abs(prediction - truth)
        colors, scale = value_scale(truth)
        if len(values):
            drawn = draw_points(line[0], fields, positions, values, *value_scale(values))
            figure.colorbar(drawn, ax=line[0], pad=0.04, aspect=14)
        draw_points(line[1], fields, queries, truth, colors, scale)
        drawn = draw_points(line[2], fields, queries, prediction, colors, scale)
        ends = beyond(prediction, scale)
        figure.colorbar(drawn, ax=list(line[1:3]), pad=0.02, aspect=14, extend=ends)
        least = Normalize(0, max(error.max(), 1e-12))
        drawn = draw_points(line[3], fields, queries, error, ERROR, least)
        figure.colorbar(drawn, ax=line[3], pad=0.04, aspect=14)
        for place in line[1:]:
            place.tick_params(labelleft=False)
        line[0].set_ylabel("axis 1")
    for place in axes[:-1].flat:
        place.tick_params(labelbottom=False)
    for place in axes[-1]:
        place.set_xlabel("axis 2")
    _name(fields, axes)
    return figure


def draw_points(
    place: Axes,
    fields: PointFields,
    points: Float[np.ndarray, "p 2"],
    values: Float[np.ndarray, " p"],
    colors: str,
    scale: Normalize,
) -> ScalarMappable:
    """Each point in its colour: as a cell of a full grid, or as a square."""
    if (grid := full_grid(points, values)) is not None:
        first, second, table = grid
        drawn: ScalarMappable = place.pcolormesh(
            second, first, table, cmap=colors, norm=scale, shading="nearest"
        )
    else:
        size = float(np.clip(AREA / len(points), SMALLEST, LARGEST))
        # A rim shows pale points on white, where there are few enough to look at one by one.
        rim = 0.3 if size > RIMMED else 0.0
        drawn = place.scatter(
            *(points[:, 1], points[:, 0]),
            c=values,
            s=size,
            marker="s",
            lw=rim,
            edgecolors="0.4",
            cmap=colors,
            norm=scale,
        )
    place.set_xlim(fields.low[1], fields.high[1])
    place.set_ylim(fields.low[0], fields.high[0])
    for side in ("top", "right"):
        place.spines[side].set_visible(True)
    return drawn


def full_grid(
    points: Float[np.ndarray, "p 2"], values: Float[np.ndarray, " p"]
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Both axes and the values on them, where the points are all pairs of the axes' places."""
    (first, row), (second, column) = (np.unique(axis, return_inverse=True) for axis in points.T)
    if min(len(first), len(second)) < 2 or len(first) * len(second) != len(points):
        return None
    table = np.full((len(first), len(second)), np.nan, values.dtype)
    table[row, column] = values
    return None if np.isnan(table).any() else (first, second, table)


def _name(fields: PointFields, axes: np.ndarray) -> None:
    """What each picture is; the last one of a row with the sample's error."""
    for sample, line in enumerate(axes):
        line[0].set_title(f"{fields.title(sample)}: observations")
        line[1].set_title("reference")
        if len(line) == 4:
            line[2].set_title(f"{fields.model} prediction")
        else:
            line[1].set_title("reference and prediction")
        line[-1].set_title(f"absolute error (rel. L2: {fields.errors[sample]:.4f})")
