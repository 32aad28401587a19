"""Charts of result rows and training curves: error by viscosity, local decoding, loss.

Enters: rows, or the curves of a run. Leaves: a matplotlib Figure. Models differ by colour (the
Okabe-Ito palette, made for colour-blind readers) and by marker.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from fst.evaluation.figures import STYLE, new_figure
from fst.evaluation.rows import Row
from fst.evaluation.runs import Curves
from fst.evaluation.tables import by_model, full_grid

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
BINS = 250


@matplotlib.rc_context(STYLE)
def viscosity(rows: Iterable[Row]) -> Figure | None:
    """Error by viscosity, and how far FST is from FNO where both are there (paper, Figure 3).

    None with fewer than two groups: there is nothing to compare.
    """
    grouped = [row for row in full_grid(rows) if len(row.groups) > 1]
    if not grouped:
        return None
    names = [group.name for group in grouped[0].groups]
    pair = _pair(grouped)
    figure, axes = new_figure(1, 1 if pair is None else 2, width=8.0, row_height=2.9)
    for index, row in enumerate(grouped):
        errors = {group.name: group.error for group in row.groups}
        _line(
            axes[0, 0],
            range(len(names)),
            [errors.get(name, math.nan) for name in names],
            index,
            row.model,
        )
    axes[0, 0].set_yscale("log")
    _plain_numbers(axes[0, 0])
    axes[0, 0].set_ylabel("mean relative L2 error")
    axes[0, 0].set_title("test error of each viscosity")
    axes[0, 0].legend()
    if pair is not None:
        ours, other = ({group.name: group.error for group in row.groups} for row in pair)
        change = [100 * (ours[name] - other[name]) / other[name] for name in names]
        colors = [PALETTE[0] if value < 0 else PALETTE[1] for value in change]
        axes[0, 1].bar(range(len(names)), change, color=colors, width=0.7)
        axes[0, 1].axhline(0, color="black", linewidth=0.8)
        axes[0, 1].set_ylabel("error of FST over FNO's (%)")
        axes[0, 1].set_title("100 (FST − FNO) / FNO; below zero FST is better")
    for place in axes[0]:
        place.set_xticks(range(len(names)), names, rotation=45)
        place.set_xlabel("viscosity ν")
    return figure


@matplotlib.rc_context(STYLE)
def local_decoding(rows: Iterable[Row]) -> Figure | None:
    """Error by the number of nearest anchors each query uses; None where nothing was swept."""
    swept = [those for those in by_model(rows).values() if any(r.neighbors for r in those)]
    if not swept:
        return None
    figure, axes = new_figure(1, 1, width=5.2, row_height=3.0)
    place = axes[0, 0]
    counts: set[int] = set()
    for index, those in enumerate(swept):
        near = [(row.neighbors, row.error) for row in those if row.neighbors is not None]
        whole = [row for row in those if row.neighbors is None][-1]
        counts |= {count for count, _ in near}
        across, errors = zip(*near, strict=True)
        _line(place, across, errors, index, f"{whole.model}, nearest k")
        color = PALETTE[index % len(PALETTE)]
        label = f"{whole.model}, all anchors"
        place.axhline(whole.error, color=color, linestyle="--", linewidth=1.0, label=label)
    place.set_xscale("log", base=2)
    place.set_yscale("log")
    place.xaxis.set_major_locator(FixedLocator(sorted(counts)))
    place.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    place.xaxis.set_minor_locator(NullLocator())
    _plain_numbers(place)
    place.set_xlabel("anchors used per query, k")
    place.set_ylabel("mean relative L2 error")
    place.legend()
    return figure


@matplotlib.rc_context(STYLE)
def training(
    runs: Sequence[tuple[str, Curves]],
    loss: str = "mean squared relative L2",
    error: str = "mean relative L2",
) -> Figure | None:
    """Loss and validation error by step; None where no run recorded any."""
    runs = [(name, curves) for name, curves in runs if curves.loss or curves.validation]
    if not runs:
        return None
    figure, axes = new_figure(1, 2, width=8.0, row_height=2.9)
    for index, (name, curves) in enumerate(runs):
        color = PALETTE[index % len(PALETTE)]
        if curves.loss:
            axes[0, 0].plot(*_binned(curves.loss), color=color, linewidth=1.2, label=name)
        if curves.validation:
            steps, errors = zip(*curves.validation, strict=True)
            _line(axes[0, 1], steps, errors, index, name)
    titles = (f"training loss ({loss})", f"validation error ({error})")
    for place, title in zip(axes[0], titles, strict=True):
        place.set_title(title)
        place.set_xlabel("step")
        if place.lines:
            place.set_yscale("log")
            _plain_numbers(place)
        place.xaxis.set_major_formatter(FuncFormatter(_thousands))
    if len(runs) > 1:
        axes[0, 1].legend()
    return figure


@matplotlib.rc_context(STYLE)
def error_over_seconds(
    models: Mapping[str, Sequence[Sequence[tuple[float, float]]]], title: str
) -> Figure | None:
    """Validation error over seconds of updates, a line for each seed; None without any."""
    if not models:
        return None
    figure, axes = new_figure(1, 1, width=7.0, row_height=3.6)
    place = axes[0, 0]
    for index, (name, curves) in enumerate(models.items()):
        for number, curve in enumerate(curves):
            seconds, errors = zip(*curve, strict=True)
            _line(place, seconds, errors, index, "_" if number else name)
    place.set_yscale("log")
    _plain_numbers(place)
    place.set_xlim(left=0)
    place.set_xlabel("seconds of updates, compilation apart")
    place.set_ylabel("validation error (relative L2)")
    place.set_title(title)
    place.legend()
    return figure


def _pair(rows: list[Row]) -> tuple[Row, Row] | None:
    """FST and FNO, if both were scored on the same groups."""
    found = {row.model: row for row in rows}
    if "FST" not in found or "FNO" not in found:
        return None
    ours, other = found["FST"], found["FNO"]
    same = [group.name for group in ours.groups] == [group.name for group in other.groups]
    return (ours, other) if same else None


def _line(
    place: Axes, across: Sequence[float], values: Sequence[float], index: int, label: str
) -> None:
    place.plot(
        across,
        values,
        color=PALETTE[index % len(PALETTE)],
        marker=MARKERS[index % len(MARKERS)],
        markevery=max(1, len(across) // 15),
        markersize=4,
        linewidth=1.3,
        label=label,
    )


def _plain_numbers(place: Axes) -> None:
    """Decimal numbers on a logarithmic axis, also where it spans less than a decade."""
    low, high = place.get_ylim()
    marks = (1.0, 2.0, 5.0) if high > 8 * low else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    place.yaxis.set_major_locator(LogLocator(subs=marks))
    place.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    place.yaxis.set_minor_formatter(NullFormatter())


def _binned(curve: Sequence[tuple[int, float]]) -> tuple[list[float], list[float]]:
    """Steps and means over stretches of equal length: a long curve without its hair."""
    size = -(-len(curve) // BINS)
    parts = [curve[start : start + size] for start in range(0, len(curve), size)]
    means = [[sum(column) / len(part) for column in zip(*part, strict=True)] for part in parts]
    return [step for step, _ in means], [value for _, value in means]


def _thousands(value: float, _: object) -> str:
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"
