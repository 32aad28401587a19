"""Saved fields: the samples chosen, what is kept of them, and files that cannot be trusted."""

from pathlib import Path

import numpy as np
import pytest
import torch

from evaluation_fakes import (
    GRID,
    ORIGIN,
    SETTINGS,
    SIZES,
    ConstantModel,
    burgers_test,
    some_model,
    some_points,
    some_test,
    waves,
)
from fst.data.files import DataError
from fst.data.point_samples import PointSamples, Ragged
from fst.data.source import TestSplit
from fst.evaluation import fields as fields_module
from fst.evaluation.fields import (
    choose_rows,
    empty_parts,
    full_grid,
    ranked_rows,
    read_fields,
    save_fields,
)
from fst.evaluation.protocol import (
    EvaluationSettings,
    OverDomain,
    View,
    evaluate,
    sample_fields,
    views_of,
)
from fst.types import Domain

POINTS = EvaluationSettings(grids=(), batch_size=2, view=View(samples=3))
RESULTS = Path(__file__).parents[2] / "results"


def test_samples_are_the_first_of_each_group():
    groups = ("0.1", "0.1", "0.1", "1", "1", "4")
    assert choose_rows(groups, 6, 2) == [0, 3]
    assert choose_rows(groups, 6, 4) == [0, 1, 3, 5]
    assert choose_rows(groups, 6, 99) == [0, 1, 2, 3, 4, 5]
    assert choose_rows(None, 6, 2) == [0, 1]


def test_the_best_the_median_and_the_worst_are_shown():
    assert ranked_rows([0.3, 0.1, 0.5, 0.2, 0.4]) == {1: "best", 0: "median", 2: "worst"}
    assert ranked_rows([0.3, 0.1]) == {}
    test, settings = some_test(), EvaluationSettings(grids=(GRID,), view=View(samples=1))
    model = some_model()
    (row,) = evaluate(model, test, settings, ORIGIN)
    numbered = TestSplit(test.samples, numbers=tuple(range(100, 110)))
    fields = sample_fields(model, numbered, settings, ORIGIN, row.errors)
    order = np.argsort(row.errors)
    assert fields.rows[:3].tolist() == order[[0, 5, 9]].tolist()
    assert fields.roles[:3].tolist() == ["best", "median", "worst"]
    assert fields.title(2) == f"worst: sample {100 + order[9]}"
    np.testing.assert_allclose(fields.errors, np.array(row.errors)[fields.rows], rtol=1e-5)


@pytest.mark.parametrize("reset", ["grid", "batch"])
def test_fields_are_the_predictions_that_were_scored(reset):
    # Rows 0, 4 and 8 lie in three different batches, which have their own evaluation points.
    groups = ("a",) * 4 + ("b",) * 4 + ("c",) * 2
    test = burgers_test(waves(10), groups)
    settings = EvaluationSettings(grids=(GRID,), batch_size=4, reset=reset, view=View(samples=3))
    model = some_model()
    (row,) = evaluate(model, test, settings, ORIGIN)
    fields = sample_fields(model, test, settings, ORIGIN)
    assert fields.rows.tolist() == [0, 4, 8]
    assert fields.groups.tolist() == ["a", "b", "c"]
    np.testing.assert_allclose(fields.errors, np.array(row.errors)[[0, 4, 8]], rtol=1e-5)
    truth, prediction = fields.truth[..., 0], fields.prediction[..., 0]
    again = np.linalg.norm(prediction - truth, axis=1) / np.linalg.norm(truth, axis=1)
    np.testing.assert_allclose(again, fields.errors, rtol=1e-4)


def test_points_are_kept_without_their_padding():
    model, test, sizes = some_model(), some_points(), SIZES
    (row,) = evaluate(model, test, POINTS, ORIGIN)
    fields = sample_fields(model, test, POINTS, ORIGIN)
    np.testing.assert_allclose(fields.errors, row.errors[:3], rtol=1e-5)
    for sample in range(3):
        queries, (truth, prediction) = fields.points(sample), fields.answers(sample)
        positions, values = fields.observations(sample)
        assert (len(truth), len(values)) == (sizes[sample], sizes[::-1][sample])
        np.testing.assert_allclose(truth[:, 0], 1 + queries.sum(axis=1), rtol=1e-6)
        np.testing.assert_allclose(values[:, 0], 1 + positions.sum(axis=1), rtol=1e-6)
        error = np.linalg.norm(prediction - truth) / np.linalg.norm(truth)
        np.testing.assert_allclose(error, fields.errors[sample], rtol=1e-4)
    assert fields.dense.shape == (3, 96 * 96, 1)  # the field where no query lies


def test_coordinates_are_in_the_units_of_the_axes():
    view = View(samples=2, axis_ends=(2.0, 1.0), profiles=(0.0, 0.43, 2.0))
    settings = EvaluationSettings(grids=(GRID,), batch_size=4, view=view)
    over = OverDomain(views_of(some_test().samples, settings)[-1], settings)
    evaluate(some_model(), some_test(), settings, ORIGIN, over=over)
    fields = sample_fields(some_model(), some_test(), settings, ORIGIN, over=over)
    (first, second), order = full_grid(fields.points(1))
    np.testing.assert_allclose(first, np.linspace(0, 2, GRID[0]), atol=1e-6)
    np.testing.assert_allclose(second, np.linspace(0, 1, GRID[1]), atol=1e-6)
    np.testing.assert_array_equal(fields.truth[1, order, 0].reshape(GRID), waves(10)[1])
    np.testing.assert_allclose(fields.cuts, [0.0, 0.4, 2.0], atol=1e-6)  # the nearest saved times
    np.testing.assert_allclose(fields.high, [2, 1])
    assert fields.axis_labels.tolist() == ["time t", "space x"]
    assert fields.anchors.shape == (2, 20, 2)
    times = np.unique(fields.anchors[..., 0])
    np.testing.assert_allclose([times[0], times[-1]], [0, 2], atol=1e-6)
    assert fields.anchors[..., 1].max() <= 1 + 1e-6


def test_errors_over_the_domain_and_spectra_are_of_all_test_samples():
    settings = EvaluationSettings(grids=(GRID,), batch_size=4, view=View(profiles=(1.0,)))
    test, model = some_test(), ConstantModel(0.0)
    over = OverDomain(test.samples, settings)
    evaluate(model, test, settings, ORIGIN, over=over)
    found = over.arrays(np.array([2.0, 1.0]))
    squares = waves(10).double().square().sum(dim=0).flatten()
    np.testing.assert_allclose(found["squared_target"][:, 0], squares, rtol=1e-5)
    np.testing.assert_allclose(found["squared_error"], found["squared_target"], rtol=1e-5)
    assert (found["counts"] == 10).all()
    expected = (np.abs(np.fft.rfft(waves(10)[:, 5].double(), norm="forward")) ** 2).mean(axis=0)
    np.testing.assert_allclose(found["spectra"][0, :, 0], expected, rtol=1e-4, atol=1e-12)
    np.testing.assert_allclose(found["spectra"][0, :, 2], expected, rtol=1e-4, atol=1e-12)
    assert not found["spectra"][0, :, 1].any()


def test_large_samples_are_thinned(monkeypatch):
    monkeypatch.setattr(fields_module, "PICTURE", (6, 12))
    monkeypatch.setattr(fields_module, "POINTS", 4)
    fields = sample_fields(some_model(), some_test(), SETTINGS, ORIGIN)
    rows = np.linspace(0, 10, 6).round().astype(int)
    columns = np.linspace(0, 23, 12).round().astype(int)
    expected = waves(10)[:4].numpy()[:, rows][:, :, columns]
    np.testing.assert_array_equal(fields.truth.reshape(4, 6, 12), expected)
    fields = sample_fields(ConstantModel(), some_points(), POINTS, ORIGIN)
    assert fields.queried.tolist() == [4, 4, 3]
    assert fields.observed.tolist() == [4, 4, 4]
    for sample in range(3):
        queries, (truth, _) = fields.points(sample), fields.answers(sample)
        assert len(np.unique(queries, axis=0)) == len(queries)
        np.testing.assert_allclose(truth[:, 0], 1 + queries.sum(axis=1), rtol=1e-6)


def test_models_without_anchors_have_none():
    fields = sample_fields(ConstantModel(), some_test(), SETTINGS, ORIGIN)
    assert fields.anchors.shape == (4, 0, 2)
    none = EvaluationSettings(grids=(), view=View(samples=0))
    assert sample_fields(ConstantModel(), some_points(), none, ORIGIN) is None


def test_names_units_and_triangles_are_kept():
    points = Ragged.of(torch.rand(8, 2), torch.ones(8, 1), torch.tensor([4, 4]))
    test = TestSplit(
        PointSamples(Domain.unit(2), points, points),
        numbers=(0, 1),
        cells=lambda number: np.array([[0, 1, 2]]) + number,
        axes=(("x", "m"), ("y", "m")),
        values=(("T", "K"),),
        targets=(("T", "K"),),
    )
    fields = sample_fields(ConstantModel(), test, POINTS, ORIGIN)
    assert fields.axis_labels.tolist() == ["x (m)", "y (m)"]
    assert fields.value_labels.tolist() == fields.target_labels.tolist() == ["T (K)"]
    np.testing.assert_array_equal(fields.cells(1), [[1, 2, 3]])


def test_points_on_a_full_grid_are_known_in_any_order():
    first, second = np.meshgrid([0.0, 0.2, 1.0], [0.0, 0.5, 0.6, 1.0], indexing="ij")
    points = np.stack([first.ravel(), second.ravel()], axis=1)
    shuffled = np.random.default_rng(0).permutation(12)
    (across, up), order = full_grid(points[shuffled])
    np.testing.assert_array_equal(across, [0.0, 0.2, 1.0])
    np.testing.assert_array_equal(up, [0.0, 0.5, 0.6, 1.0])
    np.testing.assert_array_equal(shuffled[order], np.arange(12))
    assert full_grid(points[:-1]) is None
    assert full_grid(np.concatenate([points[:-1], points[:1]])) is None  # not all pairs


@pytest.fixture
def saved(tmp_path):
    fields = sample_fields(some_model(), some_test(), SETTINGS, ORIGIN)
    save_fields(tmp_path / "fields.npz", fields)
    return tmp_path / "fields.npz", fields


def test_fields_come_back_as_they_were(saved):
    path, fields = saved
    again = read_fields(path)
    for name, array in vars(fields).items():
        np.testing.assert_array_equal(getattr(again, name), array)
        assert getattr(again, name).dtype == array.dtype
    assert again.title(1) == "sample 1"


def test_fields_of_a_kept_run_are_read():
    old = read_fields(RESULTS / "fast-burgers-single-h200" / "results" / "fields.npz")
    assert old.axis_labels.tolist() == ["time t", "space x"]
    error = np.linalg.norm(old.prediction - old.truth, axis=1)
    error /= np.linalg.norm(old.truth, axis=1)
    np.testing.assert_allclose(error[:, 0], old.errors, rtol=0.01)


def test_what_not_every_field_has_is_empty():
    assert {len(array) for name, array in empty_parts(0, 2, 1).items() if name != "bins"} == {0}


def rewritten(path, **changes):
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **{**arrays, **changes})


def test_a_pickle_inside_is_not_opened(saved):
    path, _ = saved

    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was opened",))

    rewritten(path, truth=np.array([Trap()], dtype=object))
    with pytest.raises(DataError, match="cannot be read as saved fields"):
        read_fields(path)


@pytest.mark.parametrize("name", ["prediction", "queries", "high", "observed", "positions"])
def test_shapes_that_do_not_fit_are_refused(saved, name):
    path, fields = saved
    rewritten(path, **{name: getattr(fields, name)[..., :-1]})
    with pytest.raises(DataError, match=f"{name} must have shape"):
        read_fields(path)


@pytest.mark.parametrize("name", ["groups", "queries"])
def test_arrays_that_do_not_fit_together_are_refused(saved, name):
    path, fields = saved
    array = getattr(fields, name)
    rewritten(path, **{name: np.zeros((2, *array.shape[1:]), array.dtype)})
    with pytest.raises(DataError, match=rf"fields\.npz: {name} must"):
        read_fields(path)


@pytest.mark.parametrize("scale", [1e-30, 3e6, 1e30])
def test_fields_may_have_any_units(saved, scale):
    path, fields = saved
    axes = ("low", "high", "anchors", "length_scales", "positions", "queries")
    large = {name: getattr(fields, name) * np.float32(scale) for name in axes}
    squares = {name: np.full((4, 1), 1e36) for name in ("squared_error", "squared_target")}
    rewritten(path, **large, **squares, counts=np.ones(4), bins=np.array([2, 2]))
    np.testing.assert_array_equal(read_fields(path).anchors, large["anchors"])


@pytest.mark.parametrize("name", ["anchors", "length_scales"])
def test_anchors_beyond_any_picture_are_refused(saved, name):
    path, fields = saved
    rewritten(path, **{name: getattr(fields, name) + np.float32(3e6)})
    with pytest.raises(DataError, match=rf"{name} must be within 1e\+06 sizes of the domain, got"):
        read_fields(path)
    rewritten(path, **{name: getattr(fields, name) + np.float32(np.inf)})
    with pytest.raises(DataError, match=f"{name} must be finite"):
        read_fields(path)


def test_a_domain_without_a_size_is_refused(saved):
    path, fields = saved
    rewritten(path, high=fields.low)
    with pytest.raises(DataError, match="high must be above low"):
        read_fields(path)


@pytest.mark.parametrize("length", [0, 10, 400, -30])
def test_a_truncated_file_is_refused(saved, length):
    path, _ = saved
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DataError, match=r"fields\.npz"):
        read_fields(path)


def test_a_damaged_file_is_refused(saved):
    path, _ = saved
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(64)
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"fields\.npz"):
        read_fields(path)


def test_a_missing_array_is_named(saved):
    path, _ = saved
    with np.load(path) as file:
        arrays = {name: file[name] for name in file if name != "anchors"}
    np.savez(path, **arrays)
    with pytest.raises(DataError, match="anchors"):
        read_fields(path)
