"""Figures and charts draw the numbers they are given, and nothing global."""

import math
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.collections import PatchCollection, QuadMesh
from matplotlib.colors import Normalize

from evaluation_fakes import (
    ORIGIN,
    SETTINGS,
    ConstantModel,
    grouped_row,
    made_row,
    some_model,
    some_test,
)
from fst.evaluation import charts, figures
from fst.evaluation.fields import sample_fields
from fst.evaluation.page import png
from fst.evaluation.runs import Curves


@pytest.fixture(scope="module")
def fields():
    return sample_fields(some_model(), some_test(), SETTINGS, ORIGIN)


def is_png(figure):
    data = png(figure)
    return data.startswith(b"\x89PNG") and len(data) > 5_000


def meshes(axes):
    return [each for each in axes.collections if isinstance(each, QuadMesh)]


def test_solutions_show_reference_prediction_and_error(fields):
    figure = figures.solutions(fields, samples=[2])
    shown = [meshes(place)[0] for place in figure.axes if meshes(place)][:3]
    truth, prediction = fields.truth[2], fields.prediction[2]
    for mesh, expected in zip(shown, (truth, prediction, np.abs(prediction - truth)), strict=True):
        np.testing.assert_array_equal(mesh.get_array(), expected)
    assert shown[0].norm is shown[1].norm  # reference and prediction share their colours
    assert f"{fields.errors[2]:.4f}" in "".join(place.get_title() for place in figure.axes)
    assert is_png(figure)


@pytest.mark.parametrize(
    ("low", "high", "extend"),
    [(0.0, 1.0, "neither"), (-0.2, 1.0, "min"), (0.0, 1.3, "max"), (-0.2, 1.3, "both")],
)
def test_colour_bars_say_whether_predictions_lie_beyond_them(fields, low, high, extend):
    ramp = np.linspace(0, 1, fields.truth[0].size).reshape(fields.truth[:1].shape)
    ramp = ramp.repeat(len(fields), axis=0)
    shown = replace(fields, truth=ramp, prediction=low + (high - low) * ramp)
    figure = figures.solutions(shown, samples=[0])
    bars = [
        mesh.colorbar.extend for place in figure.axes for mesh in meshes(place) if mesh.colorbar
    ]
    assert bars == [extend, "neither"]  # of the values, and of the error


def test_the_axes_say_what_they_are(fields):
    figure = figures.solutions(fields, samples=[0])
    place = figure.axes[0]
    assert (place.get_xlabel(), place.get_ylabel()) == ("space x", "time t")
    assert place.get_xlim() == pytest.approx((0, 1))
    assert place.get_ylim() == pytest.approx((0, 2))


def test_profiles_are_the_saved_ones(fields):
    other = replace(fields, model=np.array("FNO"), profile_prediction=fields.profile_truth + 1)
    figure = figures.profiles([fields, other], samples=[1])
    assert [place.get_title() for place in figure.axes] == ["reference", "FST", "FNO"]
    expected = (fields.profile_truth[1], fields.profile_prediction[1], fields.profile_truth[1] + 1)
    for place, curves in zip(figure.axes, expected, strict=True):
        for line, values in zip(place.lines, curves, strict=True):
            np.testing.assert_array_equal(line.get_xdata(), fields.along)
            np.testing.assert_array_equal(line.get_ydata(), values)
    assert len({place.get_ylim() for place in figure.axes}) == 1
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [f"t = {cut:.3g}" for cut in fields.cuts]
    assert is_png(figure)


def test_anchors_stand_where_they_are(fields):
    figure = figures.anchors(fields, samples=[0, 3])
    points = [each for each in figure.axes[1].collections if not isinstance(each, QuadMesh)]
    np.testing.assert_allclose(points[0].get_offsets(), fields.anchors[3][:, ::-1], rtol=1e-6)
    assert is_png(figure)


def test_ellipses_are_drawn_at_a_third_of_the_length_scales(fields):
    _, axes = figures.new_figure(1, 1, width=3, row_height=3)
    sizes = np.linspace(0, 1, fields.anchors.shape[1])
    figures.draw_ellipses(axes[0, 0], fields, 0, sizes, Normalize(0, 1))
    collections = [c for c in axes[0, 0].collections if isinstance(c, PatchCollection)]
    largest = collections[0].get_paths()  # in units of the axes, x first
    for path, center, lengths in zip(
        largest, fields.anchors[0], fields.length_scales[0], strict=True
    ):
        box = path.get_extents()
        np.testing.assert_allclose((box.x0 + box.x1) / 2, center[1], atol=1e-5)
        np.testing.assert_allclose((box.y0 + box.y1) / 2, center[0], atol=1e-5)
        np.testing.assert_allclose((box.width, box.height), 0.7 * lengths[::-1], rtol=1e-3)


def test_colours_are_centred_on_zero_for_both_signs():
    name, scale = figures.value_scale(np.array([[-1.0, 3.0]]))
    assert (name, scale.vmin, scale.vmax) == (figures.SIGNED, -3, 3)
    name, scale = figures.value_scale(np.array([[1.0, 3.0]]))
    assert (name, scale.vmin, scale.vmax) == (figures.UNSIGNED, 1, 3)
    name, scale = figures.value_scale(np.zeros((1, 2)))
    assert scale.vmin < scale.vmax


def test_nothing_enters_the_global_state(fields):
    before = dict(plt.rcParams)
    figures.profiles([fields], samples=[0])
    charts.training([("a", Curves(((1, 1.0),), ((1, 1.0),)))])
    assert plt.get_fignums() == []
    assert dict(plt.rcParams) == before


def test_models_without_anchors_can_be_drawn():
    fields = sample_fields(ConstantModel(), some_test(), SETTINGS, ORIGIN)
    assert is_png(figures.solutions(fields, samples=[0]))


def test_the_difference_to_fno_is_in_percent_of_fno():
    fst = grouped_row({"0.01": 0.1, "1.0": 0.3})
    fno = grouped_row({"0.01": 0.2, "1.0": 0.25}, model="FNO")
    figure = charts.viscosity([fst, fno])
    errors, change = figure.axes
    np.testing.assert_array_equal(errors.lines[0].get_ydata(), [0.1, 0.3])
    np.testing.assert_array_equal(errors.lines[1].get_ydata(), [0.2, 0.25])
    heights = [bar.get_height() for bar in change.patches]
    np.testing.assert_allclose(heights, [-50, 20])
    assert [text.get_text() for text in change.get_xticklabels()] == ["0.01", "1.0"]
    assert is_png(figure)


def test_without_fno_there_is_no_difference():
    fst = grouped_row({"0.01": 0.1, "1.0": 0.3})
    assert len(charts.viscosity([fst]).axes) == 1
    other_groups = grouped_row({"0.01": 0.1, "4.0": 0.3}, model="FNO")
    assert len(charts.viscosity([fst, other_groups]).axes) == 1
    assert charts.viscosity([made_row()]) is None


def test_local_decoding_against_all_anchors():
    rows = [made_row(errors=(0.1,))]
    rows += [made_row(errors=(0.1 + 1 / k,), neighbors=k) for k in (1, 4, 16)]
    (place,) = charts.local_decoding(rows).axes
    curve, level = place.lines
    assert list(curve.get_xdata()) == [1, 4, 16]
    np.testing.assert_allclose(curve.get_ydata(), [1.1, 0.35, 0.1625])
    assert set(level.get_ydata()) == {0.1}
    assert charts.local_decoding(rows[:1]) is None


def test_training_curves():
    loss = tuple((step, 1 / step) for step in range(1, 1001))
    figure = charts.training([("a", Curves(loss, ((500, 0.2), (1000, 0.1)))), ("b", Curves())])
    left, right = figure.axes
    assert len(left.lines[0].get_xdata()) == 250  # means of four steps each
    first = sum(1 / step for step in range(1, 5)) / 4
    assert math.isclose(left.lines[0].get_ydata()[0], first)
    np.testing.assert_array_equal(right.lines[0].get_xydata(), [(500, 0.2), (1000, 0.1)])
    assert is_png(figure)
    assert charts.training([("b", Curves())]) is None
