"""Predictions in every format hold the same numbers, with the names and units of the data."""

import csv

import h5py
import numpy as np
import pytest
import torch

import fst
from data_examples import DOMAIN
from fst.commands.predict import predict
from fst.data import DataError, Label, Labels, PointSample, write_points

LABELS = Labels([Label("x", "m"), Label("y", "m")], ["a"], [Label("T", "K"), Label("p")])
SMALL = {
    "width": 16, "rows": (2,), "anchors_per_row": 3, "points_from_anchors": 4,
    "points_from_sobol": 4, "low": DOMAIN.low, "high": DOMAIN.high, "value_channels": 1,
    "output_channels": 2,
}  # fmt: skip
CELLS = np.array([[0, 1, 2], [1, 2, 3]])


@pytest.fixture
def given(tmp_path):
    """A model and a file of two samples at the same queries."""
    torch.manual_seed(0)
    fst.build("own/fst", **SMALL).save_pretrained(tmp_path / "model")
    random = np.random.default_rng(0)
    queries = random.uniform(DOMAIN.low, DOMAIN.high, (4, 2))
    samples = [
        PointSample(
            random.uniform(DOMAIN.low, DOMAIN.high, (6, 2)), random.normal(size=(6, 1)),
            queries, random.normal(size=(4, 2)), cells=CELLS,
        )
        for _ in range(2)
    ]  # fmt: skip
    write_points(tmp_path / "my.h5", samples, DOMAIN, labels=LABELS)
    write_points(tmp_path / "one.h5", samples[:1], DOMAIN, labels=LABELS)
    return tmp_path


def test_csv_has_a_line_for_every_query_with_names_and_units(given):
    answer = predict(given / "model", given / "my.h5", given / "my.h5", given / "out.csv")
    with (given / "out.csv").open() as file:
        header, *lines = csv.reader(file)
    assert header == ["sample", "x [m]", "y [m]", "T [K]", "p"]
    table = np.array(lines, dtype=float)
    assert table[:, 0].tolist() == [0] * 4 + [1] * 4
    np.testing.assert_allclose(table[:, 3:], answer.predictions.reshape(8, 2), rtol=1e-6)
    np.testing.assert_allclose(table[:4, 1:3], answer.queries.positions[0], rtol=1e-6)


def test_hdf5_and_npz_keep_the_labels(given):
    for name in ("out.h5", "out.npz"):
        answer = predict(given / "model", given / "my.h5", given / "my.h5", given / name)
    with h5py.File(given / "out.h5") as file:
        assert list(file["predictions"].attrs["names"]) == ["T", "p"]
        assert list(file["predictions"].attrs["units"]) == ["K", ""]
        assert list(file["queries"].attrs["names"]) == ["x", "y"]
    with np.load(given / "out.npz") as file:
        assert file["channel_names"].tolist() == ["T [K]", "p"]
        assert np.array_equal(file["predictions"], answer.predictions)


def test_vtu_keeps_the_mesh(given):
    meshio = pytest.importorskip("meshio")
    answer = predict(given / "model", given / "one.h5", given / "one.h5", given / "out.vtu")
    mesh = meshio.read(given / "out.vtu")
    assert np.array_equal(mesh.cells_dict["triangle"], CELLS)
    np.testing.assert_allclose(mesh.points[:, :2], answer.queries.positions[0], rtol=1e-6)
    np.testing.assert_allclose(mesh.point_data["T [K]"], answer.predictions[0, :, 0], rtol=1e-6)
    with pytest.raises(DataError, match=r"many\.vtu: a \.vtu file holds one mesh, but these are 2"):
        predict(given / "model", given / "my.h5", given / "my.h5", given / "many.vtu")
    assert not (given / "many.vtu").exists()


def test_netcdf_holds_a_grid(given):
    xarray = pytest.importorskip("xarray")
    answer = predict(given / "model", given / "my.h5", "3x5", given / "out.nc")
    with xarray.open_dataset(given / "out.nc") as data:
        assert data["T"].dims == ("sample", "x", "y")
        assert data["T"].attrs["units"] == "K"
        assert data["x"].values[[0, -1]].tolist() == [DOMAIN.low[0], DOMAIN.high[0]]
        folded = answer.predictions.reshape(2, 3, 5, 2)
        np.testing.assert_allclose(data["p"].values, folded[..., 1], rtol=1e-6)
    with pytest.raises(DataError, match=r"a \.nc file holds a grid: ask for one"):
        predict(given / "model", given / "my.h5", given / "my.h5", given / "no.nc")
