"""Predictions in every format hold the same numbers, with the names and units of the data."""

import csv
import json

import h5py
import numpy as np
import pytest
import torch

import fst
from data_examples import DOMAIN
from fst.commands.predict import predict
from fst.commands.prediction_files import _read
from fst.data import DataError, Label, Labels, PointSample, read_points, write_points

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


def test_vtu_takes_any_name(given):
    meshio = pytest.importorskip("meshio")
    names = Labels(targets=[Label('T <"wall">', "K&s"), "p'"])
    write_points(given / "names.h5", read_points(given / "one.h5"), DOMAIN, labels=names)
    predict(given / "model", given / "names.h5", given / "names.h5", given / "out.vtu")
    assert [*meshio.read(given / "out.vtu").point_data] == ['T <"wall"> [K&s]', "p'"]


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


@pytest.fixture
def run(given):
    """A run folder, which knows the names that it was trained with."""
    (given / "run").mkdir()
    (given / "model").rename(given / "run" / "best")
    labels = {
        "axes": [["x", "m"], ["y", "m"]], "values": [["a", ""]],
        "targets": [["T", "K"], ["p", ""]], "condition": [],
    }  # fmt: skip
    (given / "run" / "run.json").write_text(json.dumps({"labels": labels}))
    return given / "run"


def same_from_npz(run, positions, values, queries):
    """What the same numbers without names bring."""
    np.savez(run / "in.npz", positions=positions, values=values)
    np.savez(run / "where.npz", queries=queries)
    return predict(run, run / "in.npz", run / "where.npz", run / "out.csv", force=True)


def test_a_run_knows_its_names_whatever_the_input(run):
    answer = same_from_npz(run, [[[0.5, 0.5]]], [[[1.0]]], [[1.0, 0.0]])
    assert (run / "out.csv").read_text().splitlines()[0] == "sample,x [m],y [m],T [K],p"
    assert answer.predictions.shape == (1, 1, 2)


@pytest.mark.parametrize(
    ("observations", "queries"),
    [
        ("x,y,a", "x,y"),
        ("a,y,x", "y,x"),
        ('"a", y [m] ,x [m]', "\ufeffy [m],x"),
        ("A,Y,X", "Y,X"),
        ('"A",Y [M],x [m]', "Y [m],X"),
        ("a,y,X", "y,X"),
        ("u,v,w", "u,v"),  # names that the run does not know
    ],
)
def test_columns_of_a_table_are_found_by_name(run, observations, queries):
    points, values, asked = [[0.5, -0.5], [1.0, 0.25]], [[1.0], [2.0]], [[2.0, 0.5], [1.5, -1.0]]
    plain = same_from_npz(run, [points], [values], asked)
    for name, header, table in (("o", observations, np.hstack([points, values])),
                                ("q", queries, np.array(asked))):  # fmt: skip
        known = header.casefold()
        table = table if "x" not in known or known[0] == "x" else table[:, ::-1]
        np.savetxt(run / f"{name}.csv", table, delimiter=",", header=header, comments="",
                   encoding="utf-8")  # fmt: skip
    answer = predict(run, run / "o.csv", run / "q.csv", run / "out.npz")
    np.testing.assert_array_equal(answer.predictions, plain.predictions)


X, Y, A = Label("x", "m"), Label("y", "m"), Label("a")


def points_file(path, positions, values, queries, axes=(X, Y), seen=(A,), targets=("T", "p")):
    """A point file of one sample, whose axes and channels are called so."""
    sample = PointSample(positions, values, queries, np.zeros((len(queries), len(targets))))
    write_points(path, [sample], DOMAIN, labels=Labels(axes, seen, targets))


def test_axes_and_channels_of_a_point_file_are_found_by_name(tmp_path):
    positions, values, condition = [[0.5, 1.0]], [[1.0, 2.0]], [3.0, 4.0]
    sample = PointSample(positions, values, positions, [[0.0]], condition)
    names = Labels(["y", "X"], ["b", Label("a", "K")], ["q"], ["d", "c"])
    write_points(tmp_path / "o.h5", [sample], fst.Domain((0.0, 0.0), (1.0, 1.0)), labels=names)
    known = Labels([X, "y"], [Label("a", "K"), "b"], ["p"], ["c", "d"])
    given = _read(tmp_path / "o.h5", 2, 2, known)
    assert given.positions.tolist() == [[[1.0, 0.5]]]
    assert given.values.tolist() == [[[2.0, 1.0]]]
    assert given.condition.tolist() == [[4.0, 3.0]]
    assert _read(tmp_path / "o.h5", 2, 0, known).positions.tolist() == [[[1.0, 0.5]]]
    for labels in (None, Labels(), Labels(["x", "y"], ["values 0", "values 1"], ["targets 0"])):
        assert _read(tmp_path / "o.h5", 2, 2, labels).values.tolist() == [values]


def test_point_files_without_names_are_taken_as_they_come(tmp_path):
    sample = PointSample([[0.5, 1.0]], [[1.0, 2.0]], [[0.5, 1.0]], [[0.0]])
    write_points(tmp_path / "o.h5", [sample], fst.Domain((0.0, 0.0), (1.0, 1.0)))
    given = _read(tmp_path / "o.h5", 2, 2, Labels(["lat", "lon"], ["u", "v"]))
    assert given.positions.tolist() == [[[0.5, 1.0]]]
    assert given.values.tolist() == [[[1.0, 2.0]]]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"axes": (X, Label("z"))}, "axes must be x, y as in the run, got x, z"),
        ({"axes": (X, Label("y", "mm"))}, "y must be in m as in the run, got mm"),
        ({"seen": ("b",)}, "values must be a as in the run, got b"),
    ],
)
def test_point_files_of_other_names_or_units_are_refused(run, names, message):
    points_file(run / "other.h5", [[0.5, 0.5]], [[1.0]], [[0.5, 0.5]], **names)
    with pytest.raises(DataError, match=rf"other\.h5: {message}"):
        predict(run, run / "other.h5", "3x3", run / "out.csv")


def test_the_run_names_the_answer_not_the_queries(run):
    inputs = [[0.5, -0.5], [1.0, 0.25]], [[1.0], [2.0]], [[2.0, 0.5]]
    plain = same_from_npz(run, [inputs[0]], [inputs[1]], inputs[2])
    points_file(run / "o.h5", *inputs)
    points_file(run / "q.h5", *inputs, targets=(Label("p", "bar"), "T"))
    for folder in (run, run / "best"):
        answer = predict(folder, run / "o.h5", run / "q.h5", run / "out.csv", force=True)
        assert (run / "out.csv").read_text().startswith("sample,x [m],y [m],T [K],p\n")
        np.testing.assert_array_equal(answer.predictions, plain.predictions)
    (run / "run.json").unlink()
    predict(run, run / "in.npz", run / "q.h5", run / "out.csv", force=True)
    assert (run / "out.csv").read_text().startswith("sample,axis 0,axis 1,prediction 0,")


def test_other_units_of_every_column_are_refused(run):
    (run / "q.csv").write_text("x [mm],y [mm]\n0.5,0.5\n")
    np.savez(run / "o.npz", positions=[[0.5, 0.5]], values=[[1.0]])
    with pytest.raises(DataError, match=r"q\.csv: the columns must be x, y, got x \[mm\], y"):
        predict(run, run / "o.npz", run / "q.csv", run / "out.npz")


@pytest.mark.parametrize("header", ["y,z", "x,z", "x,x", "y"])
def test_columns_of_which_some_are_known_are_refused(run, header):
    np.savez(run / "o.npz", positions=[[0.5, 0.5]], values=[[1.0]])
    (run / "q.csv").write_text(f"{header}\n0.5,0.5\n")
    with pytest.raises(DataError, match=rf"q\.csv: the columns must be x, y, got {header[0]}"):
        predict(run, run / "o.npz", run / "q.csv", run / "out.npz")


@pytest.mark.parametrize("header", ["T,y,p,x", "T,Y,p,X", "T [K],y [m],p,x [m]"])
def test_values_without_names_may_be_called_anything(tmp_path, header):
    (tmp_path / "o.csv").write_text(f"{header}\n1,2,3,4\n")
    given = _read(tmp_path / "o.csv", 2, 2, Labels(["x", "y"], ["values 0", "values 1"]))
    assert given.positions.tolist() == [[[4, 2]]]
    assert given.values.tolist() == [[[1, 3]]]


def test_a_mesh_is_answered_by_a_mesh(run):
    meshio = pytest.importorskip("meshio")
    points = np.array([[0.0, 0, 7], [1, 0, 7], [1, 0.5, 7], [0, 0.5, 7]])
    values = np.array([1.0, 2.0, 3.0, 4.0])
    mesh = meshio.Mesh(points, [("quad", [[0, 1, 2, 3]])], {"a": values})
    mesh.write(run / "in.vtu")
    answer = predict(run, run / "in.vtu", run / "in.vtu", run / "out.vtu")
    plain = same_from_npz(run, points[None, :, :2], values[None, :, None], points[:, :2])
    np.testing.assert_allclose(answer.predictions, plain.predictions, rtol=1e-5, atol=1e-6)
    found = meshio.read(run / "out.vtu")
    assert np.array_equal(found.points, points)
    assert found.cells_dict["quad"].tolist() == [[0, 1, 2, 3]]
    np.testing.assert_allclose(found.point_data["T [K]"], answer.predictions[0, :, 0], rtol=1e-6)
    meshio.Mesh(points, mesh.cells, {"b": values}).write(run / "other.vtu")
    with pytest.raises(DataError, match=r"other\.vtu: has no point data 'a'; it has b"):
        predict(run, run / "other.vtu", "3x3", run / "no.vtu")


def test_vectors_of_a_mesh_are_read_by_their_parts(run):
    meshio = pytest.importorskip("meshio")
    points, pair = np.array([[0.0, 0, 0], [1, 0, 0]]), np.array([[1.0, 2.0], [3.0, 4.0]])
    meshio.Mesh(points, [("line", [[0, 1]])], {"u": pair}).write(run / "in.vtu")
    labels = Labels(axes=["x", "y"], values=["u 1", "u 0"])
    given = _read(run / "in.vtu", 2, 2, labels)
    assert given.observations.values.tolist() == [[[2, 1], [4, 3]]]


@pytest.mark.parametrize("several", [True, False])
def test_a_netcdf_file_is_answered_by_one(run, several):
    xarray = pytest.importorskip("xarray")
    x, y = np.array([0.0, 1.0, 2.0]), np.array([-1.0, 0.5])
    numbers = np.arange(12.0).reshape(2, 2, 3)  # day y x
    numbers[0, 0, 1] = np.nan
    data = xarray.Dataset(
        {"a": (("day", "y", "x"), numbers)}, {"day": [10, 20], "x": ("x", x), "y": ("y", y)}
    )
    (data if several else data.isel(day=0, drop=True)).to_netcdf(run / "in.nc")
    answer = predict(run, run / "in.nc", run / "in.nc", run / "out.nc")
    points = np.stack(np.meshgrid(x, y, indexing="ij"), axis=-1).reshape(-1, 2)
    values = numbers[0].T.reshape(-1, 1)
    real = np.isfinite(values[:, 0])
    plain = same_from_npz(run, points[None, real], values[None, real], points)
    np.testing.assert_allclose(answer.predictions[0], plain.predictions[0], rtol=1e-4, atol=1e-5)
    with xarray.open_dataset(run / "out.nc") as found:
        counted = "day" if several else "sample"
        assert found["T"].dims == (counted, "x", "y")
        assert found["T"].attrs["units"] == "K"
        if several:
            assert found["day"].values.tolist() == [10, 20]
        np.testing.assert_allclose(
            found["p"].values[0], answer.predictions[0, :, 1].reshape(3, 2), rtol=1e-6
        )


def test_wrong_netcdf_files_are_named(run):
    xarray = pytest.importorskip("xarray")
    numbers = np.ones((2, 2, 3))
    numbers[1] = np.nan
    days = np.array(["2020-01-01", "2020-01-02"], "datetime64[ns]")
    data = xarray.Dataset(
        {"a": (("day", "x", "y"), numbers)}, {"day": days, "x": [0, 1], "y": [-1, 0, 1]}
    )
    data["y"].attrs["units"] = "m"
    good = data.isel(day=[0])
    inches = good.copy(deep=True)
    inches["y"].attrs["units"] = "in"
    for wrong, message in (
        (data, "all values at day 2020-01-02T00:00:00.* are NaN"),
        (data.isel(day=1, drop=True), "all values are NaN"),
        (good.drop_vars("y"), "has no coordinate y; it has a, day, x"),
        (inches, "y must be in m as in the run, got in"),
    ):
        wrong.to_netcdf(run / "wrong.nc")
        with pytest.raises(DataError, match=rf"wrong\.nc: {message}"):
            predict(run, run / "wrong.nc", "3x3", run / "out.csv")
    good.to_netcdf(run / "good.nc")
    predict(run, run / "good.nc", run / "good.nc", run / "out.csv")


@pytest.mark.parametrize("targets", [["p/p0", "T"], ["x", "T"], ["T", "sample"]])
def test_names_that_netcdf_cannot_hold_are_refused_before_the_prediction(run, targets, monkeypatch):
    labels = json.loads((run / "run.json").read_text())["labels"]
    labels["targets"] = [[name, ""] for name in targets]
    (run / "run.json").write_text(json.dumps({"labels": labels}))
    np.savez(run / "o.npz", positions=[[0.5, 0.5]], values=[[1.0]])
    predict(run, run / "o.npz", "3x3", run / "out.h5")
    monkeypatch.setattr("fst.commands.predict.ask", lambda *_: pytest.fail("was computed"))
    with pytest.raises(DataError, match=r"out\.nc: names in a \.nc file must be .* write \.h5 or"):
        predict(run, run / "o.npz", "3x3", run / "out.nc")


def test_names_are_needed_to_read_a_mesh(given):
    pytest.importorskip("meshio")
    with pytest.raises(DataError, match=r"in\.vtu: only a run folder knows the names"):
        predict(given / "model", given / "in.vtu", "3x3", given / "out.csv")


def test_names_that_differ_in_capitals_alone_stay_apart(tmp_path):
    (tmp_path / "o.csv").write_text("T,t,x\n1,2,3\n")
    given = _read(tmp_path / "o.csv", 2, 1, Labels(["x", "t"], ["T"]))
    assert given.positions.tolist() == [[[3, 2]]]
    assert given.values.tolist() == [[[1]]]
