"""Saved fields: the samples chosen, what is kept of them, and files that cannot be trusted."""

import numpy as np
import pytest
import torch

from evaluation_fakes import (
    GRID,
    ORIGIN,
    SETTINGS,
    ConstantModel,
    burgers_test,
    some_model,
    some_test,
    waves,
)
from fst.data.errors import DataError
from fst.data.point_samples import PointSamples, Ragged
from fst.data.splits import TestSplit
from fst.evaluation import fields as fields_module
from fst.evaluation.arrays import save_fields
from fst.evaluation.fields import choose_rows, load_fields, sample_fields
from fst.evaluation.protocol import EvaluationSettings, View, evaluate
from fst.types import Domain


def test_samples_are_the_first_of_each_group():
    test = burgers_test(waves(6), ("0.1", "0.1", "0.1", "1", "1", "4"))
    assert choose_rows(test, 2) == [0, 3]
    assert choose_rows(test, 4) == [0, 1, 3, 5]
    assert choose_rows(test, 99) == [0, 1, 2, 3, 4, 5]
    assert choose_rows(some_test(6), 2) == [0, 1]


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
    truth, prediction = fields.truth.reshape(3, -1), fields.prediction.reshape(3, -1)
    again = np.linalg.norm(prediction - truth, axis=1) / np.linalg.norm(truth, axis=1)
    np.testing.assert_allclose(again, fields.errors, rtol=1e-4)


def test_coordinates_are_in_the_units_of_the_axes():
    view = View(samples=2, axis_ends=(2.0, 1.0), profiles=(0.0, 0.43, 2.0))
    settings = EvaluationSettings(grids=(GRID,), batch_size=4, view=view)
    fields = sample_fields(some_model(), some_test(), settings, ORIGIN)
    np.testing.assert_allclose(fields.first, np.linspace(0, 2, GRID[0]), atol=1e-6)
    np.testing.assert_allclose(fields.second, np.linspace(0, 1, GRID[1]), atol=1e-6)
    np.testing.assert_allclose(fields.cuts, [0.0, 0.4, 2.0], atol=1e-6)  # the nearest saved times
    np.testing.assert_array_equal(fields.profile_truth, waves(10)[:2, [0, 2, 10]].numpy())
    assert fields.anchors.shape == (2, 20, 2)
    times = np.unique(fields.anchors[..., 0])
    np.testing.assert_allclose([times[0], times[-1]], [0, 2], atol=1e-6)
    assert fields.anchors[..., 1].max() <= 1 + 1e-6


def test_pictures_are_thinned_and_profiles_are_not(monkeypatch):
    monkeypatch.setattr(fields_module, "PICTURE", (6, 12))
    fields = sample_fields(some_model(), some_test(), SETTINGS, ORIGIN)
    assert fields.truth.shape == fields.prediction.shape == (4, 6, 12)
    assert fields.profile_truth.shape[2] == GRID[1]
    rows = np.linspace(0, 10, 6).round().astype(int)
    columns = np.linspace(0, 23, 12).round().astype(int)
    expected = waves(10)[:4].numpy()[:, rows][:, :, columns]
    np.testing.assert_array_equal(fields.truth, expected)
    np.testing.assert_allclose(fields.second, columns / 23, atol=1e-6)


def test_models_without_anchors_have_none():
    fields = sample_fields(ConstantModel(), some_test(), SETTINGS, ORIGIN)
    assert fields.anchors.shape == (4, 0, 2)


def test_points_on_three_axes_have_no_fields():
    points = Ragged.of(torch.rand(4, 3), torch.ones(4, 1), torch.tensor([2, 2]))
    test = TestSplit(PointSamples(Domain.unit(3), points, points))
    settings = EvaluationSettings(grids=())
    assert sample_fields(ConstantModel(), test, settings, ORIGIN) is None


@pytest.fixture
def saved(tmp_path):
    fields = sample_fields(some_model(), some_test(), SETTINGS, ORIGIN)
    save_fields(tmp_path / "fields.npz", fields)
    return tmp_path / "fields.npz", fields


def test_fields_come_back_as_they_were(saved):
    path, fields = saved
    again = load_fields(path)
    for name, array in vars(fields).items():
        np.testing.assert_array_equal(getattr(again, name), array)
        assert getattr(again, name).dtype == array.dtype
    assert again.title(1) == "test sample 1"


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
        load_fields(path)


def test_shapes_that_do_not_fit_are_refused(saved):
    path, fields = saved
    rewritten(path, prediction=fields.prediction[:, :-1])
    with pytest.raises(DataError, match="prediction must have shape"):
        load_fields(path)


@pytest.mark.parametrize("length", [0, 10, 400, -30])
def test_a_truncated_file_is_refused(saved, length):
    path, _ = saved
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DataError, match=r"fields\.npz"):
        load_fields(path)


def test_a_damaged_file_is_refused(saved):
    path, _ = saved
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(64)
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"fields\.npz"):
        load_fields(path)


def test_a_missing_array_is_named(saved):
    path, _ = saved
    with np.load(path) as file:
        arrays = {name: file[name] for name in file if name != "anchors"}
    np.savez(path, **arrays)
    with pytest.raises(DataError, match="anchors"):
        load_fields(path)
