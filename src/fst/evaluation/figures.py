"""Pictures of saved fields, and charts of result rows and training curves.

Enters: `Fields`, `ImageFields`, rows or curves. Leaves: matplotlib Figures, without pyplot and its
global state. x runs to the right; y and time run upwards. Axes of the same unit have one scale.
Colours are told apart by colour-blind readers (Okabe-Ito for lines).
"""

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.collections import EllipseCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from matplotlib.tri import Triangulation

from fst.evaluation.fields import Array, Fields, ImageFields, SavedFields, full_grid
from fst.evaluation.rows import Curves, Metric, Row
from fst.evaluation.tables import by_model
from fst.evaluation.tables import full_grid as last_grid

InPlane = Float[Array, "m 2"]
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
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
# Colours of a target, of an observed quantity that is no target, and of errors.
SIGNED, UNSIGNED, ERROR = "RdBu_r", "viridis", "magma"
OTHER_SIGNED, OTHER_UNSIGNED = "PuOr_r", "cividis"
WIDTH = 10.0
"""Of a figure in inches: a laptop's screen shows it whole."""
MOST_CHANNELS = 4
BINS = 250
# Ellipses are drawn at this share of the length scales, as in the paper, and fade outwards.
ELLIPSE_SCALE = 0.35
ELLIPSE_LEVELS = (1.0, 0.8, 0.6, 0.4, 0.2)
EMPTY = "0.92"
# Square points of paper that the patches of one picture cover between them, and limits of one.
AREA, SMALLEST, LARGEST, RIMMED = 16_000, 1.5, 30.0, 25.0
# Half the share of an axis that a slice through scattered points on three axes takes in.
SLICE = 0.06
COLUMNS, LETTERS = 4, 24
# Of a letter of a label, in inches; and letters of a label along the side of a small picture.
LETTER_WIDTH, LABEL = 0.072, 14


@dataclass(frozen=True)
class Picture:
    """A figure with the name of its file (without ending) and what it shows, in words."""

    name: str
    caption: str
    figure: Figure


# Of two axes, the one that runs upwards: the higher number. Axes with other names have zero.
UPWARDS = {"y": 1, "lat": 1, "latitude": 1, "northing": 1, "t": 3, "time": 3}
UPWARDS |= dict.fromkeys(("z", "elevation", "altitude", "height", "depth", "level"), 2)


def _unit(label: str) -> str:
    """The unit of an axis; degrees of latitude and longitude are drawn as one."""
    unit = label.partition("(")[2]
    return "°" if unit.startswith(("degree", "°")) else unit


class Plane:
    """The axes that are drawn of one, two or three, and the points that lie in the picture.

    Of three axes a picture shows a slice: `normal` is the one that it does not show.
    """

    def __init__(self, fields: Fields, normal: int = 0) -> None:
        self.normal = normal if fields.axes == 3 else None
        shown = [axis for axis in range(fields.axes) if axis != self.normal]
        names = fields.axis_names
        if len(shown) == 2 and UPWARDS.get(names[shown[0]], 0) > UPWARDS.get(names[shown[1]], 0):
            shown = shown[::-1]
        self.fields, self.shown = fields, shown
        self.low, self.high = fields.low[shown], fields.high[shown]
        units = [_unit(str(fields.axis_labels[axis])) for axis in shown]
        time = fields.time_axis() in shown
        self.equal = len(shown) == 2 and not time and units[0] == units[1]
        width, height = (self.high - self.low).tolist() if len(shown) == 2 else (1.0, 1.0)
        self.aspect = min(max(height / width, 0.25), 2.0) if self.equal else 0.8

    def inside(self, points: Float[Array, "p s"]) -> Int[Array, " k"]:
        """Which points lie in the picture: on three axes those in a slice around the middle."""
        if self.normal is None:
            return np.arange(len(points))
        low, high = self.fields.low[self.normal], self.fields.high[self.normal]
        along, middle, grid = points[:, self.normal], (low + high) / 2, full_grid(points)
        if grid is not None:
            axis = grid[0][self.normal]
            return np.flatnonzero(along == axis[np.abs(axis - middle).argmin()])
        return np.flatnonzero(np.abs(along - middle) <= SLICE * (high - low))

    def frame(self, panel: Axes) -> None:
        """Limits, ticks and names of the axes; `label_outer` takes names from inner panels."""
        across, up = (str(self.fields.axis_labels[axis]) for axis in self.shown)
        panel.set(xlabel=across, ylabel=textwrap.fill(up, LABEL, break_long_words=False))
        panel.set(xlim=(self.low[0], self.high[0]), ylim=(self.low[1], self.high[1]))
        panel.xaxis.set_major_locator(MaxNLocator(4))
        panel.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        panel.set_aspect("equal" if self.equal else "auto")
        panel.spines[["top", "right"]].set_visible(True)


def value_scale(
    values: Float[Array, "n p"], counts: Int[Array, " n"], *, other: bool = False
) -> tuple[str, Normalize]:
    """The colours of one quantity, which all samples share; `counts` leaves out the padding.

    They are centred on zero for fields of both signs, and plain for the rest.
    """
    values = np.concatenate([row[:count] for row, count in zip(values, counts, strict=True)])
    low, high = float(values.min()), float(values.max())
    if low < 0 < high:
        most = max(-low, high)
        return OTHER_SIGNED if other else SIGNED, Normalize(-most, most)
    name = OTHER_UNSIGNED if other else UNSIGNED
    return name, Normalize(low, high if high > low else low + (abs(low) or 1))


def beyond(values: Float[Array, " p"], scale: Normalize) -> str:
    """At which ends of a colour bar some values lie beyond its colours (`extend=`)."""
    below, above = bool((values < scale.vmin).any()), bool((values > scale.vmax).any())
    return {(0, 0): "neither", (1, 0): "min", (0, 1): "max", (1, 1): "both"}[below, above]


def new_figure(
    rows: int, columns: int, *, width: float, row_height: float, share: bool = False
) -> tuple[Figure, Array]:
    """A figure of `rows` × `columns` axes, always as a two-dimensional array."""
    figure = Figure(figsize=(width, row_height * rows + 0.5), layout="compressed")
    return figure, figure.subplots(rows, columns, squeeze=False, sharey="row" if share else "none")


def color_bar(
    drawn: ScalarMappable, panels: list[Axes], label: str, height: float, **looks: Any
) -> None:
    """A colour bar beside panels so many inches high, along which its label is broken to fit."""
    letters = max(10, int(height / LETTER_WIDTH))
    words = textwrap.fill(label, letters, break_long_words=False)
    # As many ticks whatever the layout does: otherwise it may leave the label too little room.
    ticks = MaxNLocator(int(np.clip(height / 0.25, 2, 5)), steps=[1, 2, 2.5, 5, 10])
    looks = {"pad": 0.03, "aspect": 18} | looks
    panels[0].figure.colorbar(drawn, ax=panels, label=words, ticks=ticks, **looks)


def draw_points(
    panel: Axes,
    plane: Plane,
    points: Float[Array, "p s"],
    values: Float[Array, " p"],
    colors: str,
    scale: Normalize,
    cells: Int[Array, "t 3"] | None = None,
) -> ScalarMappable:
    """Each point in its colour: a triangulation of its mesh, cells of a full grid, or squares."""
    inside = plane.inside(points)
    flat, chosen = points[inside][:, plane.shown], values[inside]
    grid = full_grid(flat)
    drawn: ScalarMappable
    if cells is not None and len(cells) and plane.normal is None:
        mesh = Triangulation(flat[:, 0], flat[:, 1], cells)
        drawn = panel.tripcolor(mesh, chosen, cmap=colors, norm=scale, shading="gouraud")
    elif grid is not None:
        (across, up), order = grid
        table = chosen[order].reshape(len(across), len(up)).T
        drawn = panel.pcolormesh(across, up, table, cmap=colors, norm=scale, shading="nearest")
    else:
        # A rim shows pale points on white, where there are few enough to look at one by one.
        rim = 0.3 if AREA * plane.aspect > RIMMED * len(flat) else 0.0
        # Whole squares on the edges of the domain, where boundary values are.
        looks: dict[str, Any] = {"marker": "s", "lw": rim, "edgecolors": "0.4", "clip_on": False}
        size = square_size(flat, plane)
        panel.set_facecolor(EMPTY)  # pale values are seen before it
        drawn = panel.scatter(
            flat[:, 0], flat[:, 1], c=chosen, s=size, cmap=colors, norm=scale, zorder=3, **looks
        )
    plane.frame(panel)
    return drawn


def square_size(flat: Float[Array, "p 2"], plane: Plane) -> float:
    """The area of the squares that draw scattered points: large where the points leave room."""
    side = math.ceil(math.sqrt(max(len(flat), 1)))
    ends = np.stack((plane.low, plane.high), axis=1)
    taken = np.histogram2d(flat[:, 0], flat[:, 1], bins=side, range=ends)[0]
    # Of as many bins as points, points at random take all but 1/e.
    spread = np.count_nonzero(taken) / (1 - 1 / math.e)
    return float(np.clip(AREA * plane.aspect / max(spread, 1), SMALLEST, LARGEST))


def draw_ellipses(
    panel: Axes, centers: InPlane, lengths: InPlane, sizes: Float[Array, " m"], scale: Normalize
) -> None:
    """One soft ellipse an anchor: nested transparent ones that add up towards the middle."""
    colors = matplotlib.colormaps["viridis"](scale(sizes))
    # Large ones first, so that small ones are not hidden.
    order = np.argsort(-sizes, kind="stable")
    for level in ELLIPSE_LEVELS:
        across, up = 2 * ELLIPSE_SCALE * level * lengths[order].T
        looks = {"facecolors": colors[order], "edgecolors": "none", "alpha": 0.3}
        where = {"offsets": centers[order], "offset_transform": panel.transData}
        angles = np.zeros(len(order))
        panel.add_collection(EllipseCollection(across, up, angles, units="xy", **where, **looks))


def draw_anchors(panel: Axes, centers: InPlane, size: float = 4.0) -> None:
    # A white rim keeps the dots apart from dark parts of the picture.
    rim: dict[str, Any] = {"edgecolors": "white", "lw": 0.3, "zorder": 3, "clip_on": False}
    panel.scatter(centers[:, 0], centers[:, 1], s=size, c="black", **rim)


@matplotlib.rc_context(STYLE)
def solutions(
    fields: Fields, samples: Sequence[int] = (), channel: int = 0, normal: int = 0
) -> Figure:
    """Observations, if any, reference, prediction and absolute error: a row for each sample."""
    samples = samples or range(len(fields))
    plane = Plane(fields, normal)
    label, given = str(fields.target_labels[channel]), fields.value_labels.tolist()
    observed = given.index(label) if label in given else channel if channel < len(given) else 0
    seen = bool(fields.observed.max())
    columns = 4 if seen else 3
    colors, scale = look = value_scale(fields.truth[..., channel], fields.queried)
    if seen and given[observed] != label:
        look = value_scale(fields.values[..., observed], fields.observed, other=True)
    height = plane.aspect * 0.7 * WIDTH / columns
    figure, axes = new_figure(len(samples), columns, width=WIDTH, row_height=height + 0.7)
    for line, sample in zip(axes, samples, strict=True):
        points, cells = fields.points(sample), fields.cells(sample)
        truth, prediction = (each[:, channel] for each in fields.answers(sample))
        error = np.abs(prediction - truth)
        inside = plane.inside(points)
        left, middle, right = line[-3:]
        titles = ["reference", f"{fields.model} prediction"]
        titles.append(f"absolute error\n(relative L2: {fields.errors[sample]:.4f})")
        if seen:
            positions, values = fields.observations(sample)
            mesh = cells if np.array_equal(positions, points) else None
            drawn = draw_points(line[0], plane, positions, values[:, observed], *look, mesh)
            color_bar(drawn, [line[0]], given[observed], height)
            titles.insert(0, "observations")
        draw_points(left, plane, points, truth, colors, scale, cells)
        drawn = draw_points(middle, plane, points, prediction, colors, scale, cells)
        ends = beyond(prediction[inside], scale)
        color_bar(drawn, [left, middle], label, height, pad=0.02, extend=ends)
        least = Normalize(0, error[inside].max(initial=0) or 1)
        drawn = draw_points(right, plane, points, error, ERROR, least, cells)
        color_bar(drawn, [right], f"|error|, {label}", height)
        titles[0] = f"{fields.title(sample)}\n{titles[0]}"
        for panel, title in zip(line, titles, strict=True):
            panel.set_title(title)
            panel.label_outer()
    return figure


@matplotlib.rc_context(STYLE)
def curves(fields: Fields, samples: Sequence[int] = (), channel: int = 0) -> Figure:
    """On one axis: observations, reference and prediction together, and absolute error."""
    samples = samples or range(len(fields))
    figure, axes = new_figure(len(samples), 2, width=WIDTH, row_height=2.1)
    label, limits = str(fields.target_labels[channel]), (fields.low[0], fields.high[0])
    for sample, (left, right) in zip(samples, axes, strict=True):
        positions, values = fields.observations(sample)
        order = np.argsort(fields.points(sample)[:, 0], kind="stable")
        points = fields.points(sample)[order, 0]
        truth, prediction = (each[order, channel] for each in fields.answers(sample))
        left.plot(points, truth, color=PALETTE[0], linewidth=1.6, label="reference")
        name = str(fields.model)
        left.plot(points, prediction, "--", color=PALETTE[1], linewidth=1.3, label=name)
        if label in fields.value_labels and len(values):
            given = values[:, fields.value_labels.tolist().index(label)]
            left.plot(positions[:, 0], given, ".k", markersize=3, label="observations")
        for anchor in fields.anchors[sample, :, 0]:
            left.axvline(anchor, ymax=0.03, color="0.5", linewidth=0.6)
        right.plot(points, np.abs(prediction - truth), color="black", linewidth=1.0)
        right.set_ylim(bottom=0)
        left.set(xlim=limits, ylabel=label, title=fields.title(sample))
        error = f"absolute error (relative L2: {fields.errors[sample]:.4f})"
        right.set(xlim=limits, ylabel=f"|error|, {label}", title=error)
    axes[0, 0].legend()
    for panel in axes[-1]:
        panel.set_xlabel(str(fields.axis_labels[0]))
    return figure


def sections(fields: Fields, sample: int) -> tuple[Array, Array, Array, Array] | None:
    """Cuts of the first axis, the second axis, and reference and prediction there; on grids only.

    Where no cuts were asked for they are a quarter, a half and three quarters of the first axis.
    """
    grid = full_grid(fields.points(sample)) if fields.axes == 2 else None
    if grid is None:
        return None
    (first, second), order = grid
    wanted = fields.cuts if len(fields.cuts) else np.quantile(first, (0.25, 0.5, 0.75))
    which = [int(np.abs(first - cut).argmin()) for cut in wanted]
    shape = (len(first), len(second))
    truth, prediction = (each[order, 0].reshape(shape)[which] for each in fields.answers(sample))
    return first[which], second, truth, prediction


@matplotlib.rc_context(STYLE)
def profiles(runs: Sequence[tuple[str, Fields]], most: int = 4) -> Figure:
    """Cuts through predictions (dashed) over the reference, of at most so many common samples."""
    models = [fields for _, fields in runs]
    fields, rows = models[0], common_rows(models)[:most]
    width = min(WIDTH, 3.5 + 3.6 * len(models))
    figure, axes = new_figure(len(rows), len(models), width=width, row_height=1.9, share=True)
    labels: list[str] = []
    name = str(fields.axis_labels[0]).partition("(")[0].split()[-1]
    for line, row in zip(axes, rows, strict=True):
        for panel, model in zip(line, models, strict=True):
            found = sections(model, model.rows.tolist().index(row))
            assert found is not None
            cuts, along, truth, prediction = found
            colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.92, len(cuts)))
            for right, answer, color in zip(truth, prediction, colors, strict=True):
                panel.plot(along, right, color=color, linewidth=1.1)
                panel.plot(along, answer, color=color, linewidth=1.3, linestyle=(0, (3, 2)))
            panel.set_xlim(along[0], along[-1])
            labels = [f"{name} = {cut:.3g}" for cut in cuts]
        line[0].set_title(fields.title(fields.rows.tolist().index(row)), loc="left")
        line[0].set_ylabel(str(fields.target_labels[0]))
    for panel, (run, _) in zip(axes[0], runs, strict=True):
        panel.set_title(f"{run} (dashed) and reference", loc="right")
    for panel in axes[-1]:
        panel.set_xlabel(str(fields.axis_labels[1]))
    columns = 3 if width < WIDTH else 6
    figure.legend(axes[0, 0].lines[::2], labels, loc="outside lower center", ncols=columns)
    return figure


@matplotlib.rc_context(STYLE)
def anchors(fields: Fields, samples: Sequence[int] = ()) -> Figure:
    """Anchors over the dense field (top) and their decoding length scales (bottom)."""
    samples = samples or range(min(4, len(fields)))
    plane = Plane(fields)
    width = min(WIDTH, 2.3 * len(samples) + 1.2)
    height = plane.aspect * 0.85 * (width - 1.2) / len(samples)
    figure, axes = new_figure(2, len(samples), width=width, row_height=height + 0.45)
    # Colour measures in the unit box, whatever the units of the axes.
    lengths = fields.length_scales / (fields.high - fields.low)
    sizes = np.prod(lengths, axis=-1) ** (1 / fields.axes)
    shown = sizes[list(samples)]
    scale = Normalize(shown.min(), shown.max() if shown.max() > shown.min() else shown.min() + 1e-6)
    colors = value_scale(fields.truth[..., 0], fields.queried)
    for (top, bottom), sample in zip(axes.T, samples, strict=True):
        points, values = dense_field(fields, sample)
        inside = plane.inside(fields.anchors[sample])
        centers = fields.anchors[sample][inside][:, plane.shown]
        mesh = None if fields.dense.shape[1] else fields.cells(sample)
        drawn = draw_points(top, plane, points, values, *colors, mesh)
        draw_anchors(top, centers)
        top.set_title(fields.title(sample))
        reach = fields.length_scales[sample][inside][:, plane.shown]
        draw_ellipses(bottom, centers, reach, sizes[sample][inside], scale)
        plane.frame(bottom)
        for panel in (top, bottom):
            panel.label_outer()
    label = "√(ℓ₁ℓ₂) in the unit square" if fields.axes == 2 else "mean length scale (unit box)"
    name, bar = str(fields.target_labels[0]), ScalarMappable(scale, "viridis")
    color_bar(drawn, list(axes[0]), name, height, pad=0.01, extend="both")
    color_bar(bar, list(axes[1]), label, height, pad=0.01)
    return figure


def dense_field(fields: Fields, sample: int) -> tuple[Float[Array, "p s"], Float[Array, " p"]]:
    """The prediction on an even grid, or at queries on a grid; masked far from any query."""
    points = fields.points(sample)
    if not fields.dense.shape[1]:
        return points, fields.answers(sample)[1][:, 0]
    shape = fields.dense_shape.tolist()
    unit = [np.linspace(0, 1, count) for count in shape]
    unit = [np.array([0.5])] * (fields.axes - len(shape)) + unit
    even = np.stack(np.meshgrid(*unit, indexing="ij"), axis=-1).reshape(-1, fields.axes)
    near = (points - fields.low) / (fields.high - fields.low)
    far = np.zeros(len(even), bool)
    if fields.axes == 2:
        # Queries and even points share coarse cells, and their neighbours count as near.
        count = int(np.clip(np.sqrt(len(near)) / 1.5, 4, 48))
        table = np.zeros((count + 2, count + 2), bool)
        table[tuple((np.clip((near * count).astype(int), 0, count - 1) + 1).T)] = True
        wide = table.copy()
        for step in (-1, 1):
            wide |= np.roll(table, step, axis=0) | np.roll(table, step, axis=1)
        far = ~wide[tuple((np.clip((even * count).astype(int), 0, count - 1) + 1).T)]
    points = fields.low + even * (fields.high - fields.low)
    return points, np.ma.masked_where(far, fields.dense[sample, :, 0])


def binned(fields: Fields, keep: Sequence[int], channel: int) -> tuple[Array, Array, Array]:
    """Squared errors, squared targets and points along one or two axes, summed over the others."""
    others = tuple(axis for axis in range(fields.axes) if axis not in keep)
    parts = (fields.squared_error[:, channel], fields.squared_target[:, channel], fields.counts)
    sums = (each.reshape(fields.bins).sum(axis=others) for each in parts)
    error, target, count = (each.transpose(np.argsort(keep)) for each in sums)
    return error, target, count


@matplotlib.rc_context(STYLE)
def over_domain(fields: Fields) -> Figure | None:
    """Root mean square error of all test samples over the domain, one picture a target channel."""
    if not len(fields.counts):
        return None
    channels = range(min(len(fields.target_labels), MOST_CHANNELS))
    planes = [Plane(fields, normal) for normal in range(3 if fields.axes == 3 else 1)]
    columns = min(len(channels) * len(planes), 4)
    width = WIDTH if columns > 1 else 5.4
    lines = -(-len(channels) * len(planes) // columns)
    height = min(planes[0].aspect * 0.75 * width / columns + 0.5, 3.6) if fields.axes > 1 else 2.4
    figure, axes = new_figure(lines, columns, width=width, row_height=height)
    pairs = [(channel, plane) for channel in channels for plane in planes]
    _blank(axes.flat[len(pairs) :])
    for panel, (channel, plane) in zip(axes.flat, pairs, strict=False):
        label = str(fields.target_labels[channel])
        error, _, count = binned(fields, plane.shown, channel)
        with np.errstate(invalid="ignore", divide="ignore"):
            rms = np.sqrt(error / count)
        edges = [
            np.linspace(fields.low[axis], fields.high[axis], fields.bins[axis] + 1)
            for axis in plane.shown
        ]
        if fields.axes == 1:
            panel.stairs(rms, edges[0], color="black")
            panel.set(xlabel=str(fields.axis_labels[0]), ylabel=f"RMS error, {label}")
            continue
        table = np.ma.masked_invalid(rms.T)
        drawn = panel.pcolormesh(*edges, table, cmap=ERROR, norm=Normalize(0, table.max()))
        plane.frame(panel)
        color_bar(drawn, [panel], f"RMS error, {label}", height - 0.5)
    return figure


@matplotlib.rc_context(STYLE)
def along_axes(models: Sequence[tuple[str, Fields]]) -> Figure | None:
    """Relative error along time, where there is a time axis, and spectra, where there is a grid."""
    timed = [each for each in models if len(each[1].counts) and each[1].time_axis() is not None]
    waves = [each for each in models if each[1].spectra.shape[1] > 1]
    panels = bool(timed) + bool(waves)
    if not panels:
        return None
    figure, axes = new_figure(1, panels, width=WIDTH if panels == 2 else 5.4, row_height=2.9)
    lines = []
    for name, fields in timed:
        axis = fields.time_axis() or 0
        error, target, _ = binned(fields, [axis], 0)
        middle = (np.arange(len(error)) + 0.5) / len(error)
        times = fields.low[axis] + middle * (fields.high[axis] - fields.low[axis])
        lines.append((name, times, np.sqrt(error / np.where(target > 0, target, np.nan))))
        axes[0, 0].set_xlabel(str(fields.axis_labels[axis]))
    if timed:
        title = "error over time, all test samples"
        chart(axes[0, 0], lines, log=False, ylabel="relative L2 error at that time", title=title)
        axes[0, 0].set_ylim(bottom=0)
    panel = axes[0, -1]
    for index, (name, fields) in enumerate(waves):
        power = fields.spectra[len(fields.spectra) // 2, 1:]
        order = np.arange(1, len(power) + 1)
        if index == 0:
            panel.loglog(order, power[:, 0], color="black", linewidth=1.4, label="reference")
        color = PALETTE[index % len(PALETTE)]
        panel.loglog(order, power[:, 1], "--", color=color, linewidth=1.3, label=name)
        panel.loglog(order, power[:, 2], ":", color=color, linewidth=1.1, label=f"{name}, error")
        short, cut = str(fields.axis_labels[0]).split()[-1], fields.cuts[len(fields.cuts) // 2]
        panel.set(
            title=f"mean power spectrum at {short} = {cut:.3g}",
            xlabel=f"wavenumber along {fields.axis_labels[1]}",
            ylabel=f"power of {fields.target_labels[0]}",
        )
        panel.set_ylim(bottom=max(power[:, 0].max() * 1e-12, power[power > 0].min(initial=1e-30)))
        panel.legend()
    return figure


def chart(
    panel: Axes, lines: Iterable[tuple[str, Any, Any]], *, log: bool = True, **names: str
) -> None:
    """Lines of (name, across, values), each with its colour and marker; `names` are of the axes."""
    for index, (label, across, values) in enumerate(lines):
        draw_line(panel, across, values, index, label)
    if log:
        _log(panel)
    panel.set(**names)
    panel.legend()


def _log(panel: Axes) -> None:
    """Decimal numbers on a logarithmic axis, also where it spans less than a decade."""
    panel.set_yscale("log")
    low, high = panel.get_ylim()
    wide = high > 8 * low
    _decimal(panel.yaxis, (1.0, 2.0, 5.0) if wide else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0))


def _decimal(axis: Axis, multiples: tuple[float, ...]) -> None:
    """Numbers at these multiples of the powers of ten."""
    axis.set_major_locator(LogLocator(subs=multiples))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def draw_line(panel: Axes, across: Any, values: Any, index: int, label: str) -> None:
    looks: dict[str, Any] = {"markersize": 4, "linewidth": 1.3, "label": label}
    looks |= {"color": PALETTE[index % len(PALETTE)], "marker": MARKERS[index % len(MARKERS)]}
    panel.plot(across, values, markevery=max(1, len(across) // 15), **looks)


@matplotlib.rc_context(STYLE)
def histogram(rows: Sequence[Row]) -> Figure | None:
    """How the errors of single test samples are spread, with the trivial predictors' means."""
    found = [row for row in last_grid(rows) if not row.trivial and row.samples > 2]
    if not found:
        return None
    figure, [[panel]] = new_figure(1, 1, width=6.4, row_height=2.7)
    every = np.concatenate([np.asarray(row.errors) for row in found])
    low, high = max(every.min(), 1e-8), max(every.max(), 2e-8)
    edges = np.geomspace(0.98 * low, 1.02 * high, int(np.clip(np.sqrt(len(every)) * 2, 8, 40)))
    for index, row in enumerate(found):
        color = PALETTE[index % len(PALETTE)]
        panel.hist(row.errors, edges, color=color, alpha=0.6, label=f"{row.model} ({row.run})")
        panel.axvline(row.error, color=color, linewidth=1.2)
    trivial = {row.model: row.error for row in last_grid(rows) if row.trivial}
    for number, (name, error) in enumerate(sorted(trivial.items(), key=lambda item: item[1])[:2]):
        style = ("--", ":")[number]
        panel.axvline(error, color="0.3", linestyle=style, linewidth=1.2, label=name)
    panel.set_xscale("log")
    _decimal(panel.xaxis, (1.0, 2.0, 5.0))
    panel.set(xlabel="relative L2 error of a test sample", ylabel="test samples")
    panel.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    panel.legend()
    return figure


@matplotlib.rc_context(STYLE)
def viscosity(rows: Iterable[Row]) -> Figure | None:
    """Error by viscosity, and how far FST is from FNO (paper, Figure 3); None with one group."""
    grouped = [row for row in last_grid(rows) if len(row.groups) > 1 and not row.trivial]
    if not grouped:
        return None
    names = [group.name for group in grouped[0].groups]
    models = [(row.model, {each.name: each.error for each in row.groups}) for row in grouped]
    fst, fno = (dict(models).get(name, {}) for name in ("FST", "FNO"))
    both = bool(fst) and list(fst) == list(fno)
    figure, axes = new_figure(1, 2 if both else 1, width=8.0, row_height=2.9)
    across, title = range(len(names)), "test error of each viscosity"
    lines = [
        (model, across, [each.get(name, math.nan) for name in names]) for model, each in models
    ]
    chart(axes[0, 0], lines, ylabel="mean relative L2 error", title=title)
    if both:
        change = [100 * (fst[name] - fno[name]) / fno[name] for name in names]
        colors = [PALETTE[0] if value < 0 else PALETTE[1] for value in change]
        axes[0, 1].bar(across, change, color=colors, width=0.7)
        axes[0, 1].axhline(0, color="black", linewidth=0.8)
        title = "100 (FST − FNO) / FNO; below zero FST is better"
        axes[0, 1].set(ylabel="error of FST over FNO's (%)", title=title)
    for panel in axes[0]:
        panel.set_xticks(across, names, rotation=45)
        panel.set_xlabel("viscosity ν")
    return figure


@matplotlib.rc_context(STYLE)
def local_decoding(rows: Iterable[Row]) -> Figure | None:
    """Error by the number of nearest anchors each query uses; None where nothing was swept."""
    swept = [those for those in by_model(rows).values() if any(r.neighbors for r in those)]
    if not swept:
        return None
    figure, [[panel]] = new_figure(1, 1, width=5.2, row_height=3.0)
    counts: set[int] = set()
    for index, those in enumerate(swept):
        near = {row.neighbors: row.error for row in those if row.neighbors is not None}
        whole = [row for row in those if row.neighbors is None][-1]
        counts |= near.keys()
        draw_line(panel, list(near), list(near.values()), index, f"{whole.model}, nearest k")
        color, label = PALETTE[index % len(PALETTE)], f"{whole.model}, all anchors"
        panel.axhline(whole.error, linewidth=1.0, linestyle="--", color=color, label=label)
    panel.set_xscale("log", base=2)
    panel.set_xticks(sorted(counts), map(str, sorted(counts)))
    panel.xaxis.set_minor_locator(NullLocator())
    chart(panel, (), xlabel="anchors used per query, k", ylabel="mean relative L2 error")
    return figure


@matplotlib.rc_context(STYLE)
def by_grid(rows: Iterable[Row]) -> Figure | None:
    """Error by test grid; None with fewer than two grids."""
    shown = by_model(row for row in rows if row.neighbors is None and not row.trivial)
    models = [[(math.prod(row.grid), row) for row in those if row.grid] for those in shown.values()]
    models = [those for those in models if len(those) > 1]
    if not models:
        return None
    figure, [[panel]] = new_figure(1, 1, width=5.2, row_height=2.7)
    panel.set_xscale("log")
    lines = []
    for those in models:
        points, found = zip(*those, strict=True)
        lines.append((found[0].model, points, [row.error for row in found]))
    chart(panel, lines, xlabel="test grid", ylabel="mean relative L2 error")
    grids = {points: row.column for those in models for points, row in those}
    panel.set_xticks(list(grids), list(grids.values()), rotation=20)
    panel.xaxis.set_minor_locator(NullLocator())
    return figure


@matplotlib.rc_context(STYLE)
def training(runs: Sequence[tuple[str, Curves]], measure: Metric) -> Figure | None:
    """Loss and validation error, of one measure, by step; None where no run recorded any."""
    runs = [(name, curves) for name, curves in runs if curves.loss or curves.validation]
    if not runs:
        return None
    figure, axes = new_figure(1, 2, width=8.0, row_height=2.9)
    for index, (name, curves) in enumerate(runs):
        color = PALETTE[index % len(PALETTE)]
        if curves.loss:
            axes[0, 0].plot(*_averaged(curves.loss), color=color, linewidth=1.2, label=name)
        if curves.validation:
            steps, errors = zip(*curves.validation, strict=True)
            draw_line(axes[0, 1], steps, errors, index, name)
    own = runs[0][1].measure
    loss, error = measure.loss, measure.validation
    if own is not None:
        loss, error = f"mean squared {own}", f"mean {own}"
    titles = (f"training loss ({loss})", f"validation error ({error})")
    for panel, title in zip(axes[0], titles, strict=True):
        panel.set(title=title, xlabel="step")
        if panel.lines:
            _log(panel)
        panel.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))  # 20k
    if len(runs) > 1:
        axes[0, 1].legend()
    return figure


def _averaged(curve: Sequence[tuple[int, float]]) -> Float[Array, "2 k"]:
    """Steps and means over stretches of equal length: a long curve without its hair."""
    size = -(-len(curve) // BINS)
    parts = [curve[start : start + size] for start in range(0, len(curve), size)]
    return np.transpose([np.mean(part, axis=0) for part in parts])


@matplotlib.rc_context(STYLE)
def guesses(fields: ImageFields) -> Figure:
    """Images with class, guess and probability; where there are anchors, these and their scales."""
    lines, deep = -(-len(fields) // COLUMNS), 2 if fields.anchors.shape[1] else 1
    width, height = (9.8, 2.45) if deep == 2 else (9.2, 2.7)
    figure, axes = new_figure(deep * lines, COLUMNS, width=width, row_height=height)
    _blank(axes[-deep:, (len(fields) - 1) % COLUMNS + 1 :].flat)
    for sample in range(len(fields)):
        panel = axes[deep * (sample // COLUMNS), sample % COLUMNS]
        panel.imshow(fields.pictures[sample], extent=(0, 1, 1, 0), interpolation="bilinear")
        _frame_image(panel, fields)
        guess, label = (str(names[sample]) for names in (fields.guesses, fields.labels))
        other = "" if guess == label else f"\ntaken for {_shortened(guess)}"
        panel.set_title(f"{_shortened(label)}{other} ({fields.probabilities[sample]:.2f})")
    if deep == 1:
        return figure
    sizes = np.sqrt(np.prod(fields.length_scales, axis=-1))
    scale = Normalize(sizes.min(), max(sizes.max(), sizes.min() + 1e-6))
    for sample in range(len(fields)):
        top, bottom = axes[2 * (sample // COLUMNS) :, sample % COLUMNS][:2]
        centers, reach = fields.anchors[sample][:, ::-1], fields.length_scales[sample][:, ::-1]
        draw_anchors(top, centers, size=2.2)
        draw_ellipses(bottom, centers, reach, sizes[sample], scale)
        _frame_image(bottom, fields)
    label, bar = "length scale ℓ in the unit square", ScalarMappable(scale, "viridis")
    figure.colorbar(bar, ax=list(axes.flat), label=label, pad=0.01, aspect=40)
    return figure


def _shortened(text: str) -> str:
    return text if len(text) <= LETTERS else text[: LETTERS - 1] + "…"


def _blank(panels: Iterable[Axes]) -> None:
    """No frames where there is nothing to show."""
    for panel in panels:
        panel.set_axis_off()


def _frame_image(panel: Axes, fields: ImageFields) -> None:
    height, width = fields.pictures.shape[1:3]
    panel.set(xlim=(0, 1), ylim=(1, 0), aspect=height / width, xticks=[], yticks=[])
    panel.spines[["top", "right"]].set_visible(True)


def pictures(fields: SavedFields, name: str) -> list[Picture]:
    """All pictures of one run's saved fields; `name` is the run's."""
    if isinstance(fields, ImageFields):
        return [_image_picture(fields, name)]
    assert isinstance(fields, Fields)
    file, found = file_name(name), []
    ranked = [sample for sample in range(len(fields)) if fields.roles[sample]]
    others = [sample for sample in range(len(fields)) if not fields.roles[sample]]
    ranked_words = "the test samples with the lowest, the median and the highest error"
    groups = ((ranked, "ranked", ranked_words), (others, "solutions", "test samples by position"))
    channels = range(min(len(fields.target_labels), MOST_CHANNELS))
    for samples, kind, words in groups:
        for channel in channels if samples else ():
            number = f"-{channel + 1}" if channel else ""
            of = f" of {fields.target_labels[channel]}" if len(channels) > 1 else ""
            draw = curves if fields.axes == 1 else solutions
            caption = f"{name}: {words}: reference, prediction and absolute error{of}."
            if fields.axes == 3:
                caption += f" A slice through the middle of {fields.axis_labels[0]}."
            figure = draw(fields, samples, channel)
            found.append(Picture(f"{file}-{kind}{number}", caption, figure))
    if fields.axes == 3:
        for normal in (1, 2):
            middle = fields.axis_labels[normal]
            caption = f"{name}: slices through the middle of {middle}."
            figure = solutions(fields, (ranked or others)[:3], 0, normal)
            found.append(Picture(f"{file}-slice-{normal + 1}", caption, figure))
    if (over := over_domain(fields)) is not None:
        caption = f"{name}: root mean square error over the domain, of all test samples."
        found.append(Picture(f"{file}-over-domain", caption, over))
    if fields.anchors.shape[1] and fields.axes > 1:
        caption = (
            f"{name}: anchors over the predicted field (top), and their decoding length scales as "
            f"soft ellipses at {ELLIPSE_SCALE}× scale (bottom)."
        )
        found.append(Picture(f"{file}-anchors", caption, anchors(fields)))
    return found


def _image_picture(fields: ImageFields, name: str) -> Picture:
    """Anchors over images where there are anchors, and guesses alone where there are none."""
    says = "the class of each, what it was taken for if another, and the probability of that"
    count = fields.anchors.shape[1]
    if not count:
        caption, kind = f"{name}: test images ({says}).", "guesses"
    else:
        kind = "anchors"
        caption = (
            f"{name}: {count:,} anchors over test images ({says}). Below each image the refinement "
            "length scales of the anchors, by colour and as soft circles at "
            f"{ELLIPSE_SCALE}× scale. Vertical rows are fixed; the horizontal coordinate of an "
            f"anchor has a standard deviation of {fields.spread():.4f} of the width between these "
            "images, on average over anchors."
        )
    return Picture(f"{file_name(name)}-{kind}", caption, guesses(fields))


def shared_pictures(saved: Sequence[tuple[str, SavedFields]]) -> list[Picture]:
    """Of operators: profiles, of those asked about the same samples; error over time; spectra."""
    runs = [(name, fields) for name, fields in saved if isinstance(fields, Fields)]
    if not runs:
        return []
    found, file = [], file_name(runs[0][0])
    for number, those in enumerate(_same_samples(runs), start=1):
        first = those[0][1]
        if sections(first, 0) is not None:
            names = ", ".join(name for name, _ in those)
            cut, along = first.axis_labels
            caption = f"{names}: profiles along {along} at fixed {cut}."
            found.append(Picture(f"{file}-profiles-{number}", caption, profiles(those)))
    if (along := along_axes(runs)) is not None:
        caption = "Error over time and mean power spectra, over the whole test set."
        found.append(Picture(f"{file}-time-and-spectra", caption, along))
    return found


def _same_samples(runs: Sequence[tuple[str, Fields]]) -> list[list[tuple[str, Fields]]]:
    """Runs that were asked about the same solutions, together."""
    found: list[list[tuple[str, Fields]]] = []
    for run in runs:
        alike = (those for those in found if _same_solutions(those[0][1], run[1]))
        if (those := next(alike, None)) is None:
            found.append(those := [])
        those.append(run)
    return found


def _same_solutions(one: Fields, other: Fields) -> bool:
    rows = common_rows([one, other])
    first, second = ([each.truth[each.rows == row] for row in rows] for each in (one, other))
    return bool(rows) and np.shape(first) == np.shape(second) and np.allclose(first, second)


def common_rows(models: Sequence[Fields]) -> list[int]:
    """Test samples that all models were asked for, in the order of the first."""
    others = [set(model.rows.tolist()) for model in models[1:]]
    return [row for row in models[0].rows.tolist() if all(row in rows for rows in others)]


def file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
