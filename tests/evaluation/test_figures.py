"""Figures and charts draw the numbers they are given, and nothing global."""

import math
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.collections import PathCollection, QuadMesh, TriMesh
from matplotlib.text import Text

from evaluation_fakes import (
    GRID,
    ORIGIN,
    SCORED,
    SETTINGS,
    ConstantModel,
    grouped_row,
    made_row,
    some_model,
    some_points,
    some_test,
)
from fst.evaluation import figures
from fst.evaluation.fields import Fields, empty_parts
from fst.evaluation.protocol import EvaluationSettings, OverDomain, View, sample_fields
from fst.evaluation.report import png
from fst.evaluation.rows import METRICS, Curves
from fst.evaluation.trivial import TrainingFacts

RELATIVE = METRICS["relative_l2"]


@pytest.fixture(scope="module")
def fields():
    facts = TrainingFacts((0.1,), (1.0,))
    return SETTINGS.score(some_model(), some_test(), SCORED, facts, None)[1]


@pytest.fixture(scope="module")
def points():
    settings = EvaluationSettings(grids=(), batch_size=2, view=View(samples=3))
    over = OverDomain(some_points().samples, settings)
    return sample_fields(some_model(), some_points(), settings, ORIGIN, over=over)


def is_png(figure):
    data = png(figure)
    return data.startswith(b"\x89PNG") and len(data) > 5_000


def meshes(axes):
    return [each for each in axes.collections if isinstance(each, QuadMesh)]


def test_solutions_show_reference_prediction_and_error(fields):
    figure = figures.solutions(fields, samples=[2])
    shown = [meshes(panel)[0] for panel in figure.axes if meshes(panel)][:3]
    truth, prediction = (each.reshape(GRID) for each in fields.answers(2))
    for mesh, expected in zip(shown, (truth, prediction, np.abs(prediction - truth)), strict=True):
        np.testing.assert_array_equal(mesh.get_array(), expected)
    assert shown[0].norm is shown[1].norm  # reference and prediction share their colours
    assert f"{fields.errors[2]:.4f}" in "".join(panel.get_title() for panel in figure.axes)
    assert is_png(figure)


@pytest.mark.parametrize(
    ("low", "high", "extend"),
    [(0.0, 1.0, "neither"), (-0.2, 1.0, "min"), (0.0, 1.3, "max"), (-0.2, 1.3, "both")],
)
def test_colour_bars_say_whether_predictions_lie_beyond_them(fields, low, high, extend):
    ramp = np.linspace(0, 1, math.prod(GRID)).reshape(1, -1, 1).repeat(len(fields), axis=0)
    shown = replace(fields, truth=ramp, prediction=low + (high - low) * ramp)
    figure = figures.solutions(shown, samples=[0])
    bars = [
        mesh.colorbar.extend for panel in figure.axes for mesh in meshes(panel) if mesh.colorbar
    ]
    assert bars == [extend, "neither"]  # of the values, and of the error


@pytest.mark.parametrize(("error", "most"), [(1e-16, 1e-16), (1e20, 1e20), (0.0, 1.0)])
def test_colours_of_errors_end_at_the_largest(fields, error, most):
    zero = np.zeros_like(fields.truth)
    figure = figures.solutions(replace(fields, truth=zero, prediction=zero + error), samples=[0])
    scale = [meshes(panel)[0] for panel in figure.axes if meshes(panel)][2].norm
    assert (scale.vmin, scale.vmax) == (0, np.float32(most))


def test_colours_of_a_constant_are_in_its_units():
    for constant in (1e-16, -1e20):
        _, scale = figures.value_scale(np.full((1, 3), constant), np.array([3]))
        assert (scale.vmin, scale.vmax) == (constant, constant + abs(constant))


def test_the_axes_say_what_they_are(fields):
    figure = figures.solutions(replace(fields, target_labels=np.array(["u (m/s)"])), samples=[0])
    panel = figure.axes[0]
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("space x", "time t")
    assert panel.get_xlim() == pytest.approx((0, 1))
    assert panel.get_ylim() == pytest.approx((0, 2))
    bars = {each.get_ylabel() for each in figure.axes}
    assert {"u (m/s)", "|error|, u (m/s)"} <= bars


def test_x_runs_to_the_right_with_its_true_length(points):
    wide = replace(points, axis_labels=np.array(["x (m)", "y (m)"]), high=np.array([3.0, 1.0]))
    panel = figures.solutions(wide, samples=[0]).axes[0]
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("x (m)", "y (m)")
    assert (panel.get_xlim(), panel.get_aspect()) == ((0, 3), 1.0)
    other = replace(points, axis_labels=np.array(["x (m)", "y (s)"]))
    assert figures.solutions(other, samples=[0]).axes[0].get_aspect() == "auto"
    turned = replace(points, axis_labels=np.array(["y", "x"]))
    assert figures.solutions(turned, samples=[0]).axes[0].get_xlabel() == "x"


def test_scattered_points_are_drawn_where_they_are(points):
    figure = figures.solutions(points, samples=[0])
    kinds = [c for panel in figure.axes for c in panel.collections if isinstance(c, PathCollection)]
    seen, truth, prediction, error = kinds[:4]
    positions, values = points.observations(0)
    right, found = (each[:, 0] for each in points.answers(0))
    np.testing.assert_array_equal(seen.get_offsets(), positions)
    np.testing.assert_array_equal(seen.get_array(), values[:, 0])
    for shown, expected in ((truth, right), (prediction, found), (error, np.abs(found - right))):
        np.testing.assert_array_equal(shown.get_offsets(), points.points(0))
        np.testing.assert_array_equal(shown.get_array(), expected)
    assert truth.norm is prediction.norm
    assert prediction.colorbar.extend == "min"  # an untrained model is far below
    assert is_png(figure)


def test_squares_are_large_where_points_leave_room(points):
    plane = figures.Plane(points)
    low, high = plane.low, plane.high
    shares = np.random.default_rng(0).random((1500, 2))
    everywhere = low + shares * (high - low)
    expected = figures.AREA * plane.aspect / 1500
    assert figures.square_size(everywhere, plane) == pytest.approx(expected, rel=0.1)
    on_an_edge = everywhere.copy()
    on_an_edge[:, 0] = low[0]
    assert figures.square_size(on_an_edge, plane) == figures.LARGEST > 2 * expected


def test_meshes_are_drawn_as_triangles(points):
    meshed = replace(points, triangles=np.array([[0, 0, 1, 2], [0, 2, 3, 4]]))
    figure = figures.solutions(meshed, samples=[0])
    drawn = [c for panel in figure.axes for c in panel.collections if isinstance(c, TriMesh)]
    assert len(drawn) == 3
    np.testing.assert_array_equal(drawn[0].get_array(), points.answers(0)[0][:, 0])
    assert is_png(figure)


def test_one_axis_is_drawn_as_curves_in_the_order_of_the_axis():
    parts = empty_parts(1, 1, 1) | {
        "model": np.array("FST"),
        "axis_labels": np.array(["t (s)"]),
        "value_labels": np.array(["h"]),
        "target_labels": np.array(["h"]),
        "low": np.array([-1.0]),
        "high": np.array([4.0]),
        "rows": np.array([7]),
        "numbers": np.array([7]),
        "roles": np.array([""]),
        "errors": np.array([0.25]),
        "observed": np.array([2]),
        "positions": np.array([[[0.5], [2.5]]]),
        "values": np.array([[[5.0], [6.0]]]),
        "queried": np.array([3]),
        "queries": np.array([[[3.0], [1.0], [2.0], [0.0]]]),  # the last one is padding
        "truth": np.array([[[30.0], [10.0], [20.0], [0.0]]]),
        "prediction": np.array([[[31.0], [12.0], [17.0], [9.0]]]),
    }
    figure = figures.curves(Fields(**parts))
    answers, error = figure.axes
    truth, prediction, seen = answers.lines
    np.testing.assert_array_equal(seen.get_xydata(), [[0.5, 5], [2.5, 6]])
    np.testing.assert_array_equal(truth.get_xydata(), [[1, 10], [2, 20], [3, 30]])
    np.testing.assert_array_equal(prediction.get_xydata(), [[1, 12], [2, 17], [3, 31]])
    np.testing.assert_array_equal(error.lines[0].get_xydata(), [[1, 2], [2, 3], [3, 1]])
    assert all(panel.get_xlim() == (-1, 4) for panel in figure.axes)
    assert (answers.get_title(), answers.get_xlabel()) == ("sample 7", "t (s)")
    assert "0.2500" in error.get_title()


def test_three_axes_are_drawn_in_slices():
    grid = np.stack(np.meshgrid(*[np.linspace(0, 1, 5)] * 3, indexing="ij"), axis=-1)
    queries = grid.reshape(1, -1, 3)
    parts = empty_parts(1, 3, 1) | {
        "model": np.array("FST"),
        "axis_labels": np.array(["x", "y", "z"]),
        "value_labels": np.array(["a"]),
        "target_labels": np.array(["p"]),
        "low": np.zeros(3),
        "high": np.ones(3),
        "rows": np.array([0]),
        "numbers": np.array([0]),
        "roles": np.array([""]),
        "errors": np.array([0.1]),
        "queried": np.array([125]),
        "queries": queries,
        "truth": queries @ np.array([[100.0], [10.0], [1.0]]),
        "prediction": queries @ np.array([[100.0], [10.0], [2.0]]),
    }
    for normal, names in ((0, ("y", "z")), (1, ("x", "z")), (2, ("x", "y"))):
        panel = figures.solutions(Fields(**parts), [0], 0, normal).axes[0]
        assert (panel.get_xlabel(), panel.get_ylabel()) == names
        weights = np.delete([100.0, 10.0, 1.0], normal)
        middle = 0.5 * (100.0, 10.0, 1.0)[normal]
        even = np.linspace(0, 1, 5)
        expected = middle + weights[0] * even + weights[1] * even[:, None]
        np.testing.assert_allclose(meshes(panel)[0].get_array(), expected)


def test_profiles_lie_over_the_reference(fields):
    other = replace(fields, model=np.array("FNO"), prediction=fields.truth + 1)
    figure = figures.profiles([("mine", fields), ("theirs", other)], most=1)
    assert figure.axes[0].get_title(loc="left") == fields.title(0)
    assert [panel.get_title(loc="right") for panel in figure.axes] == [
        "mine (dashed) and reference", "theirs (dashed) and reference"
    ]  # fmt: skip
    cuts, along, truth, prediction = figures.sections(fields, 0)
    np.testing.assert_array_equal(truth[0], fields.truth[0, : GRID[1], 0])
    for panel, expected in zip(figure.axes, (prediction, truth + 1), strict=True):
        for reference, found, right, wanted in zip(
            panel.lines[::2], panel.lines[1::2], truth, expected
        ):
            np.testing.assert_array_equal(reference.get_ydata(), right)
            np.testing.assert_allclose(found.get_xydata(), np.stack([along, wanted], axis=1))
    assert len({panel.get_ylim() for panel in figure.axes}) == 1
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [f"t = {cut:.3g}" for cut in cuts]
    assert is_png(figure)


def test_anchors_stand_where_they_are(fields):
    figure = figures.anchors(fields, samples=[0, 3])
    points = [each for each in figure.axes[1].collections if isinstance(each, PathCollection)]
    np.testing.assert_allclose(points[0].get_offsets(), fields.anchors[3][:, ::-1], rtol=1e-6)
    assert is_png(figure)


def test_the_dense_field_ends_where_the_queries_end(points):
    half = replace(points, queries=points.queries * np.array([0.3, 1.0], np.float32))
    positions, values = figures.dense_field(half, 1)
    far = positions[:, 0] > 0.8
    assert np.ma.getmaskarray(values)[far].all()
    assert not np.ma.getmaskarray(values).all()


def test_the_error_over_time_is_relative_to_the_solution_then(fields):
    figure = figures.along_axes([("FST", fields)])
    curve, spectrum = figure.axes[0].lines[0].get_ydata(), figure.axes[1]
    error, target = (
        each[:, 0].reshape(GRID).sum(axis=1)
        for each in (fields.squared_error, fields.squared_target)
    )
    np.testing.assert_allclose(curve, np.sqrt(error / target), rtol=1e-6)
    assert figure.axes[0].get_xlabel() == "time t"
    assert [line.get_label() for line in spectrum.lines] == ["reference", "FST", "FST, error"]
    assert is_png(figures.over_domain(fields))
    small = {name: getattr(fields, name) * 1e-35 for name in ("squared_error", "squared_target")}
    small["squared_target"][: GRID[1]] = 0  # no error is relative to a solution of zero
    again = figures.along_axes([("FST", replace(fields, **small))]).axes[0].lines[0].get_ydata()
    assert np.isnan(again[0])
    np.testing.assert_allclose(again[1:], curve[1:], rtol=1e-5)


def test_the_spread_of_errors_stands_beside_trivial_predictors():
    rows = [made_row(), made_row(model="mean", parameters=0, errors=(0.7, 0.8, 0.9))]
    (panel,) = figures.histogram(rows).axes
    assert sum(bar.get_height() for bar in panel.patches) == 3
    assert [float(line.get_xdata()[0]) for line in panel.lines] == pytest.approx([0.3, 0.8])
    assert figures.histogram([made_row(errors=(0.1,))]) is None


def test_colours_are_centred_on_zero_for_both_signs():
    name, scale = figures.value_scale(np.array([[-1.0, 3.0, -9.0]]), np.array([2]))
    assert (name, scale.vmin, scale.vmax) == (figures.SIGNED, -3, 3)
    name, scale = figures.value_scale(np.array([[1.0, 3.0]]), np.array([2]))
    assert (name, scale.vmin, scale.vmax) == (figures.UNSIGNED, 1, 3)
    name, scale = figures.value_scale(np.zeros((1, 2)), np.array([2]))
    assert scale.vmin < scale.vmax


def test_nothing_enters_the_global_state(fields):
    before = dict(plt.rcParams)
    figures.profiles([("mine", fields)], most=1)
    figures.training([("a", Curves(((1, 1.0),), ((1, 1.0),)))], RELATIVE)
    assert plt.get_fignums() == []
    assert dict(plt.rcParams) == before


def test_models_without_anchors_can_be_drawn():
    fields = sample_fields(ConstantModel(), some_test(), SETTINGS, ORIGIN)
    assert is_png(figures.solutions(fields, samples=[0]))


def test_the_difference_to_fno_is_in_percent_of_fno():
    fst = grouped_row({"0.01": 0.1, "1.0": 0.3})
    fno = grouped_row({"0.01": 0.2, "1.0": 0.25}, model="FNO")
    figure = figures.viscosity([fst, fno])
    errors, change = figure.axes
    np.testing.assert_array_equal(errors.lines[0].get_ydata(), [0.1, 0.3])
    np.testing.assert_array_equal(errors.lines[1].get_ydata(), [0.2, 0.25])
    heights = [bar.get_height() for bar in change.patches]
    np.testing.assert_allclose(heights, [-50, 20])
    assert [text.get_text() for text in change.get_xticklabels()] == ["0.01", "1.0"]
    assert is_png(figure)


def test_without_fno_there_is_no_difference():
    fst = grouped_row({"0.01": 0.1, "1.0": 0.3})
    assert len(figures.viscosity([fst]).axes) == 1
    other_groups = grouped_row({"0.01": 0.1, "4.0": 0.3}, model="FNO")
    assert len(figures.viscosity([fst, other_groups]).axes) == 1
    assert figures.viscosity([made_row()]) is None


def test_local_decoding_against_all_anchors():
    rows = [made_row(errors=(0.1,))]
    rows += [made_row(errors=(0.1 + 1 / k,), neighbors=k) for k in (1, 4, 16)]
    (panel,) = figures.local_decoding(rows).axes
    curve, level = panel.lines
    assert list(curve.get_xdata()) == [1, 4, 16]
    np.testing.assert_allclose(curve.get_ydata(), [1.1, 0.35, 0.1625])
    assert set(level.get_ydata()) == {0.1}
    assert figures.local_decoding(rows[:1]) is None


def test_training_curves():
    loss = tuple((step, 1 / step) for step in range(1, 1001))
    figure = figures.training(
        [("a", Curves(loss, ((500, 0.2), (1000, 0.1)))), ("b", Curves())], RELATIVE
    )
    left, right = figure.axes
    assert len(left.lines[0].get_xdata()) == 250  # means of four steps each
    first = sum(1 / step for step in range(1, 5)) / 4
    assert math.isclose(left.lines[0].get_ydata()[0], first)
    np.testing.assert_array_equal(right.lines[0].get_xydata(), [(500, 0.2), (1000, 0.1)])
    assert is_png(figure)
    assert figures.training([("b", Curves())], RELATIVE) is None
    own = figures.training([("a", Curves(loss, measure="standardized relative L2"))], RELATIVE)
    assert own.axes[0].get_title() == "training loss (mean squared standardized relative L2)"
    assert own.axes[1].get_title() == "validation error (mean standardized relative L2)"


def test_steps_are_whole_and_thousands_are_short():
    def ticks(last: int) -> set[str]:
        losses = tuple((step, 1 / step) for step in np.linspace(1, last, 3).astype(int).tolist())
        figure = figures.training([("a", Curves(losses))], RELATIVE)
        figure.canvas.draw()
        return {label.get_text() for label in figure.axes[0].get_xticklabels()}

    assert ticks(3) >= {"1", "2", "3"}
    assert all(text.removeprefix("\N{MINUS SIGN}").isdigit() for text in ticks(3))
    assert {"0", "10k", "20k"} <= ticks(20_000)


def test_labels_of_colour_bars_are_no_longer_than_the_bars(fields):
    flat = replace(fields, target_labels=np.array(["temperature of the wall (K)"]))
    figure = figures.solutions(flat)
    figure.canvas.draw()
    bars = [panel for panel in figure.axes if panel.get_label() == "<colorbar>"]
    assert bars
    for bar in bars:
        assert bar.yaxis.label.get_window_extent().height <= 1.2 * bar.get_window_extent().height


def test_ticks_of_colour_bars_do_not_depend_on_the_layout(fields):
    # Otherwise labels of ticks can become wider after their room is measured, and one is cut off.
    figure = figures.solutions(fields, samples=[0])
    bars = [panel for panel in figure.axes if panel.get_label() == "<colorbar>"]
    before = [bar.get_yticks().tolist() for bar in bars]
    for height in (1.2, 9.0):
        figure.set_size_inches(figures.WIDTH, height)
        figure.draw_without_rendering()
        assert [bar.get_yticks().tolist() for bar in bars] == before


@pytest.mark.parametrize(
    ("labels", "across", "equal"),
    [
        (("lat (degrees_north)", "lon (degrees_east)"), 1, True),
        (("longitude (°E)", "latitude (°N)"), 0, True),
        (("y (m)", "x (m)"), 1, True),
        (("x (m)", "elevation (km)"), 0, False),
        (("depth (m)", "x (m)"), 1, True),
        (("time (s)", "y (s)"), 1, False),
        (("a", "b"), 0, True),
    ],
)
def test_axes_run_where_readers_expect_them(fields, labels, across, equal):
    plane = figures.Plane(replace(fields, axis_labels=np.array(labels)))
    assert plane.shown == [across, 1 - across]
    assert plane.equal == equal


def test_samples_are_called_as_the_user_calls_them():
    test = replace(some_test(), names=tuple(f"mon $x^{row}$" for row in range(10)))
    named = sample_fields(ConstantModel(), test, SETTINGS, ORIGIN)
    assert all(f"sample mon $x^{row}$" in named.title(i) for i, row in enumerate(named.rows))
    figure = figures.solutions(named, samples=[0])
    assert png(figure)
    titles = [text for text in figure.findobj(Text) if "mon" in text.get_text()]
    assert titles
    assert not any(text.get_parse_math() for text in titles)  # a name, no formula
