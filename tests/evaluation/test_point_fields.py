"""Pictures of a user's own points: what is kept of a few samples, how it is drawn, and its page."""

import numpy as np
import pytest
import torch
from matplotlib.collections import PathCollection, QuadMesh

from evaluation_fakes import ORIGIN, ConstantModel, some_model
from fst.data.errors import DataError
from fst.data.point_samples import PointSamples, Ragged
from fst.data.splits import TestSplit
from fst.evaluation import point_fields, point_figures
from fst.evaluation.arrays import save_fields
from fst.evaluation.fields import sample_fields
from fst.evaluation.once import FIELDS, score_once
from fst.evaluation.page import png
from fst.evaluation.point_fields import PointFields, load_point_fields
from fst.evaluation.protocol import EvaluationSettings, View, evaluate
from fst.evaluation.report import report
from fst.evaluation.runs import RESULTS, read_run
from fst.types import Domain

SIZES = [5, 8, 3, 6, 4, 7]
SETTINGS = EvaluationSettings(grids=(), batch_size=2, view=View(samples=3))


def ragged(sizes):
    """Points at random, each with the sum of its coordinates."""
    positions = torch.rand(sum(sizes), 2, generator=torch.Generator().manual_seed(0))
    return Ragged.of(positions, 1 + positions.sum(dim=1, keepdim=True), torch.tensor(sizes))


def some_points():
    samples = PointSamples(Domain.unit(2), ragged(SIZES[::-1]), ragged(SIZES))
    return TestSplit(samples)


def test_fields_are_the_predictions_that_were_scored():
    model, test = some_model(), some_points()
    (row,) = evaluate(model, test, SETTINGS, ORIGIN)
    fields = sample_fields(model, test, SETTINGS, ORIGIN)
    assert isinstance(fields, PointFields)
    assert fields.rows.tolist() == [0, 1, 2]
    assert (fields.axes, int(fields.channels)) == (2, 1)
    np.testing.assert_allclose(fields.errors, row.errors[:3], rtol=1e-5)
    for sample in range(3):
        queries, truth, prediction = fields.answers(sample)
        positions, values = fields.observations(sample)
        assert (len(truth), len(values)) == (SIZES[sample], SIZES[::-1][sample])
        # Padding repeats a point; what is kept are the points themselves.
        np.testing.assert_allclose(truth, 1 + queries.sum(axis=1), rtol=1e-6)
        np.testing.assert_allclose(values, 1 + positions.sum(axis=1), rtol=1e-6)
        error = np.linalg.norm(prediction - truth) / np.linalg.norm(truth)
        np.testing.assert_allclose(error, fields.errors[sample], rtol=1e-4)


def test_very_many_points_are_thinned(monkeypatch):
    monkeypatch.setattr(point_fields, "POINTS", 4)
    fields = sample_fields(ConstantModel(), some_points(), SETTINGS, ORIGIN)
    assert fields.queried.tolist() == [4, 4, 3]
    assert fields.observed.tolist() == [4, 4, 4]
    for sample in range(3):
        queries, truth, _ = fields.answers(sample)
        assert len(np.unique(queries, axis=0)) == len(queries)
        np.testing.assert_allclose(truth, 1 + queries.sum(axis=1), rtol=1e-6)


@pytest.fixture
def saved(tmp_path):
    fields = sample_fields(some_model(), some_points(), SETTINGS, ORIGIN)
    save_fields(tmp_path / FIELDS, fields)
    return tmp_path / FIELDS, fields


def test_fields_come_back_as_they_were(saved):
    path, fields = saved
    again = load_point_fields(path)
    for name, array in vars(fields).items():
        np.testing.assert_array_equal(getattr(again, name), array)


@pytest.mark.parametrize("name", ["prediction", "queries", "high", "observed", "positions"])
def test_shapes_that_do_not_fit_are_refused(saved, name):
    path, fields = saved
    arrays = {**vars(fields), name: getattr(fields, name)[..., :-1]}
    np.savez(path, **arrays)
    with pytest.raises(DataError, match=f"{name} must have shape"):
        load_point_fields(path)


def drawn(figure, kind):
    shown = [each for place in figure.axes for each in place.collections if isinstance(each, kind)]
    return [each for each in shown if each.get_array() is not None]


def test_scattered_points_are_drawn_where_they_are():
    fields = sample_fields(some_model(), some_points(), SETTINGS, ORIGIN)
    figure = point_figures.patches(fields)
    seen, truth, prediction, error = drawn(figure, PathCollection)[:4]
    positions, values = fields.observations(0)
    queries, right, found = fields.answers(0)
    np.testing.assert_array_equal(seen.get_offsets(), positions[:, ::-1])
    np.testing.assert_array_equal(seen.get_array(), values)
    for shown, expected in ((truth, right), (prediction, found), (error, np.abs(found - right))):
        np.testing.assert_array_equal(shown.get_offsets(), queries[:, ::-1])
        np.testing.assert_array_equal(shown.get_array(), expected)
    assert truth.norm is prediction.norm
    assert prediction.colorbar.extend == "min"  # an untrained model is far below
    assert png(figure).startswith(b"\x89PNG")


def test_points_on_a_full_grid_are_drawn_as_its_cells():
    first, second = np.meshgrid([0.0, 0.2, 1.0], [0.0, 0.5, 0.6, 1.0], indexing="ij")
    points = np.stack([first.ravel(), second.ravel()], axis=1)
    order = np.random.default_rng(0).permutation(12)  # in whatever order they are stored
    along_first, along_second, table = point_figures.full_grid(points[order], order.astype(float))
    np.testing.assert_array_equal(along_first, [0.0, 0.2, 1.0])
    np.testing.assert_array_equal(along_second, [0.0, 0.5, 0.6, 1.0])
    np.testing.assert_array_equal(table, np.arange(12.0).reshape(3, 4))
    assert point_figures.full_grid(points[:-1], np.ones(11)) is None
    repeated = np.concatenate([points[:-1], points[:1]])  # as many points, but not all pairs
    assert point_figures.full_grid(repeated, np.ones(12)) is None
    values = np.arange(12.0)[None]
    fields = PointFields(
        model=np.array("FST"),
        channels=np.array(1),
        low=np.zeros(2),
        high=np.ones(2),
        rows=np.array([4]),
        errors=np.array([0.1]),
        observed=np.array([0]),  # nothing was observed, as with a condition alone
        positions=np.zeros((1, 0, 2)),
        values=np.zeros((1, 0)),
        queried=np.array([12]),
        queries=points[None],
        truth=values,
        prediction=values + 1,
    )
    cells = drawn(point_figures.patches(fields), QuadMesh)
    np.testing.assert_array_equal(cells[0].get_array(), table)
    np.testing.assert_array_equal(cells[1].get_array(), table + 1)


def test_one_axis_is_drawn_as_curves_in_the_order_of_the_axis():
    queries = np.array([[[3.0], [1.0], [2.0], [0.0]]])  # the last one is padding
    fields = PointFields(
        model=np.array("FST"),
        channels=np.array(1),
        low=np.array([-1.0]),
        high=np.array([4.0]),
        rows=np.array([7]),
        errors=np.array([0.25]),
        observed=np.array([2]),
        positions=np.array([[[0.5], [2.5]]]),
        values=np.array([[5.0, 6.0]]),
        queried=np.array([3]),
        queries=queries,
        truth=np.array([[30.0, 10.0, 20.0, 0.0]]),
        prediction=np.array([[31.0, 12.0, 17.0, 9.0]]),
    )
    figure = point_figures.curves(fields)
    seen, answers, error = figure.axes
    np.testing.assert_array_equal(seen.lines[0].get_xydata(), [[0.5, 5], [2.5, 6]])
    truth, prediction = answers.lines
    np.testing.assert_array_equal(truth.get_xydata(), [[1, 10], [2, 20], [3, 30]])
    np.testing.assert_array_equal(prediction.get_xydata(), [[1, 12], [2, 17], [3, 31]])
    np.testing.assert_array_equal(error.lines[0].get_xydata(), [[1, 2], [2, 3], [3, 1]])
    assert all(place.get_xlim() == (-1, 4) for place in figure.axes)
    assert "test sample 7" in seen.get_title()
    assert "0.2500" in error.get_title()
    assert png(figure).startswith(b"\x89PNG")


def test_own_points_have_a_picture_on_their_page(tmp_path):
    model, test = some_model(), some_points()

    def compute():
        rows = evaluate(model, test, SETTINGS, ORIGIN, protocol="p")
        return rows, sample_fields(model, test, SETTINGS, ORIGIN)

    score_once(tmp_path / "mine" / RESULTS, "p", compute)
    assert isinstance(read_run(tmp_path / "mine").fields, PointFields)
    report([tmp_path / "mine"], tmp_path / "page")
    assert [path.name for path in (tmp_path / "page/figures").iterdir()] == ["mine-points.png"]
    assert "samples in the figures" in (tmp_path / "page/report.md").read_text()
