"""Grids, tables and meshes become point files that hold the same numbers."""

import builtins

import numpy as np
import pytest

from fst.data import DataError, from_grid, from_meshes, from_table, from_xarray, read_points
from fst.data.conversion import bounding_box
from fst.data.point_files import Label, PointSample, write_points
from fst.types import Domain

X, Y = np.array([0.0, 0.5, 2.0]), np.array([-1.0, 3.0])
A = np.arange(24.0).reshape(4, 3, 2) + 1
U = A**2
NU = np.array([0.1, 0.2, 0.3, 0.4])


def check_grid(file, row):
    """Sample `row` pairs every grid point with its own values."""
    sample = file[row]
    assert sample.positions.shape == (6, 2)
    for (x, y), a, u in zip(sample.positions, sample.values, sample.targets, strict=True):
        i, j = X.tolist().index(x), Y.tolist().index(y)
        assert (a[0], u[0]) == (A[row, i, j], U[row, i, j])
    assert np.array_equal(sample.positions, sample.queries)
    assert sample.condition == pytest.approx([NU[row]])
    assert (file.domain.low, file.domain.high) == ((0.0, -1.0), (2.0, 3.0))


def test_a_grid_of_arrays(tmp_path):
    functions = from_grid({"a": A}, {"u": U}, {"x": X, "y": Y}, {"nu": NU}, {"u": "K"})
    write_points(tmp_path / "grid.h5", functions)
    file = read_points(tmp_path / "grid.h5")
    for row in range(4):
        check_grid(file, row)
    assert file.axes == (Label("x"), Label("y"))
    assert (file.targets, file.condition) == ((Label("u", "K"),), (Label("nu"),))


def test_masked_points_of_a_grid_are_left_out(tmp_path):
    hidden = np.ma.masked_greater(A, 20)
    write_points(tmp_path / "grid.h5", from_grid({"a": hidden}, {"u": U}, {"x": X, "y": Y}))
    sample = read_points(tmp_path / "grid.h5")[3]
    assert sample.values[:, 0].tolist() == [19.0, 20.0]
    assert len(sample.targets) == 6
    half = np.ma.array(A, mask=np.broadcast_to(X[:, None] > 1, A.shape))
    functions = from_grid({"a": half}, {"u": half}, {"x": X, "y": Y})
    assert functions.domain == Domain((0.0, -1.0), (2.0, 3.0))  # of the whole grid


@pytest.mark.parametrize("padding", [-999.0, np.nan])
@pytest.mark.parametrize("hide", ["mask", "positions", "values"])
def test_the_box_of_samples_ignores_padding(padding, hide):
    points = np.array([[0.25, 0.1], [1.0, 0.5], [padding, padding]])
    values, real = np.ones((3, 1)), np.array([True, True, False])
    mask = real if hide == "mask" else None
    seen, known = (
        np.ma.array(array, mask=np.repeat(~real[:, None], array.shape[1], 1) & (name == hide))
        for name, array in (("positions", points), ("values", values))
    )
    sample = PointSample(seen, known, seen, known, mask=mask, query_mask=mask)
    assert bounding_box([sample] * 2) == Domain((0.25, 0.1), (1.0, 0.5))


def test_samples_without_a_common_box_are_named():
    flat, line = (PointSample(p, [[1.0]], p, [[1.0]]) for p in ([[0.1, 0.2]], [[0.1]]))
    with pytest.raises(ValueError, match=r"points of as many axes, got \{1, 2\}"):
        bounding_box([flat, line])
    with pytest.raises(ValueError, match="as many axes, got none"):
        bounding_box([PointSample([[np.nan]], [[1.0]], [[np.nan]], [[1.0]])])
    with pytest.raises(TypeError, match="sample 1 must be PointSample, got 3"):
        bounding_box([line, 3])


def test_a_grid_of_the_wrong_shape_is_named():
    with pytest.raises(ValueError, match=r"a must have shape \(4, 3, 2\), got \(4, 2, 3\)"):
        from_grid({"a": A.transpose(0, 2, 1)}, {"u": U}, {"x": X, "y": Y})
    with pytest.raises(ValueError, match=r"axis x has shape \(3, 2\)"):
        from_grid({"a": A}, {"u": U}, {"x": A[0], "y": Y})


@pytest.mark.parametrize("engine", [None, "scipy", "h5netcdf", "netcdf4"])
def test_an_xarray_data_set_with_units(tmp_path, engine):
    xarray = pytest.importorskip("xarray")
    data = xarray.Dataset(
        {
            "a": (("day", "x", "y"), A, {"units": "m/s"}),
            "u": (("y", "day", "x"), U.transpose(2, 0, 1), {"units": "K"}),
            "nu": (("day",), NU),
        },
        coords={"x": ("x", X, {"units": "m"}), "y": Y},
    )
    if engine is not None:
        pytest.importorskip({"netcdf4": "netCDF4"}.get(engine, engine))
        data.to_netcdf(tmp_path / "data.nc", engine=engine)
        data = tmp_path / "data.nc"
    functions = from_xarray(data, ["a"], ["u"], sample="day", condition=["nu"])
    write_points(tmp_path / "grid.h5", functions)
    file = read_points(tmp_path / "grid.h5")
    if file.axes[0].name == "y":  # the order of the first target's dimensions
        assert (file.domain.low, file.domain.high) == ((-1.0, 0.0), (3.0, 2.0))
        assert file.axes == (Label("y"), Label("x", "m"))
    assert file.values == (Label("a", "m/s"),)
    assert file.targets == (Label("u", "K"),)
    for row in range(4):
        sample = file[row]
        for (y, x), a, u in zip(sample.positions, sample.values, sample.targets, strict=True):
            i, j = X.tolist().index(x), Y.tolist().index(y)
            assert (a[0], u[0]) == (A[row, i, j], U[row, i, j])
        assert sample.condition == pytest.approx([NU[row]])


def test_a_data_set_without_a_variable_is_named():
    xarray = pytest.importorskip("xarray")
    with pytest.raises(DataError, match="no variable 'b'"):
        from_xarray(xarray.Dataset({"a": ("sample", X)}), ["b"], ["a"])


def test_what_is_no_data_set_or_lies_on_other_axes_is_named():
    xarray = pytest.importorskip("xarray")
    data = xarray.Dataset({"a": (("day", "x", "y"), A), "land": (("x", "y"), A[0])})
    with pytest.raises(TypeError, match="data must be an xarray Dataset or a path, got DataArray"):
        from_xarray(data["a"], ["a"], ["a"], sample="day")
    with pytest.raises(DataError, match="'land' must have dimensions day, x, y, got x, y"):
        from_xarray(data, ["a", "land"], ["a"], sample="day")
    with pytest.raises(DataError, match="'land' must have dimensions day, got x, y"):
        from_xarray(data, ["a"], ["a"], sample="day", condition=["land"])


@pytest.mark.parametrize("stored", [False, True])
def test_a_table(tmp_path, stored):
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(
        {
            "day": ["mon", "mon", "mon", "tue", "tue"],
            "x": [0.0, 1.0, 2.0, 0.5, 1.5],
            "T": [10.0, 11.0, 12.0, np.nan, 14.0],
            "p": [1.0, 2.0, np.nan, 4.0, 5.0],
            "sensor": [True, False, True, True, True],
            "nu": [0.1, 0.1, 0.1, 0.2, 0.2],
        }
    )
    if stored:
        table.to_csv(tmp_path / "table.csv", index=False)
        table = str(tmp_path / "table.csv")
    functions = from_table(
        table, ["x"], ["T"], ["p"], sample="day", observed="sensor", condition=["nu"],
        units={"T": "K"},
    )  # fmt: skip
    write_points(tmp_path / "table.h5", functions)
    file = read_points(tmp_path / "table.h5")
    assert file.values == (Label("T", "K"),)
    assert file[0].positions[:, 0].tolist() == [0.0, 2.0]
    assert file[0].values[:, 0].tolist() == [10.0, 12.0]
    assert file[0].queries[:, 0].tolist() == [0.0, 1.0]
    assert file[0].targets[:, 0].tolist() == [1.0, 2.0]
    assert file.names(np.array([1, 0])) == ("tue", "mon")
    assert file[1].values[:, 0].tolist() == [14.0]
    assert file[1].targets[:, 0].tolist() == [4.0, 5.0]
    assert file[1].condition == pytest.approx([0.2])


def test_bad_tables_are_one_clear_error():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"sample": [0, 0], "x": [0.0, 1.0], "u": [1.0, 2.0], "nu": [1, 2]})
    with pytest.raises(DataError, match="no column 'v'; it has sample, x, u, nu"):
        from_table(table, ["x"], ["v"], ["u"])
    with pytest.raises(DataError, match="sample 0: nu must not change within it"):
        from_table(table, ["x"], ["u"], ["u"], condition=["nu"])


def test_a_table_needs_no_condition():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"sample": [0, 0, 1], "x": [0.0, 1.0, 2.0], "u": [1.0, 2.0, 3.0]})
    samples = from_table(table, ["x"], ["u"], ["u"]).samples
    assert [len(each.positions) for each in samples] == [2, 1]
    assert samples[0].condition is None


def test_cells_that_are_no_numbers_are_named():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"sample": [0, 0], "x": [0.0, 1.0], "u": [1.0, 2.0]})
    with pytest.raises(DataError, match="column u must hold numbers .*'warm'"):
        from_table(table.assign(u=["warm", "cold"]), ["x"], ["u"], ["u"])
    with pytest.raises(DataError, match="column x must hold real numbers.*timedelta64"):
        from_table(table.assign(x=pandas.Timestamp("2020-01-01")), ["x"], ["u"], ["u"])
    times = np.array(["2020-01-01", "2020-01-02"], "datetime64[s]")
    with pytest.raises(DataError, match="axis t must hold real numbers.*timedelta64"):
        from_grid({"u": np.ones((1, 2))}, {"u": np.ones((1, 2))}, {"t": times})
    with pytest.raises(DataError, match="column seen must hold true and false"):
        from_table(table.assign(seen=["yes", "no"]), ["x"], ["u"], ["u"], observed="seen")
    seen = from_table(table.assign(seen=[1.0, np.nan]), ["x"], ["u"], ["u"], observed="seen")
    assert len(seen.samples[0].positions) == 1


@pytest.mark.parametrize("missing", ["values", "targets"])
def test_a_table_a_mesh_and_a_grid_have_channels(missing):
    pandas, meshio = pytest.importorskip("pandas"), pytest.importorskip("meshio")
    table = pandas.DataFrame({"sample": [0, 0], "x": [0.0, 1.0], "u": [1.0, 2.0]})
    mesh = meshio.Mesh([[0.0], [1.0]], [], {"u": [1.0, 2.0]})
    names = {"values": ["u"], "targets": ["u"]} | {missing: []}
    fields = {kind: dict.fromkeys(found, np.ones((1, 2))) for kind, found in names.items()}
    for convert, given in (
        (from_table, {"table": table, "coordinates": ["x"]} | names),
        (from_meshes, {"meshes": [mesh]} | names),
        (from_grid, {"axes": {"x": [0.0, 1.0]}} | fields),
    ):
        with pytest.raises(ValueError, match=f"{missing} must name at least one, got none"):
            convert(**given)


def test_arrays_without_names_and_one_mesh_are_refused():
    with pytest.raises(TypeError, match="axes must be"):
        from_grid({"u": np.ones((1, 2))}, {"u": np.ones((1, 2))}, [X])
    pytest.importorskip("meshio")
    with pytest.raises(TypeError, match="meshes must be a sequence with one a sample"):
        from_meshes("a.vtu", ["u"], ["u"])


@pytest.mark.parametrize("stored", [False, True])
def test_meshes_keep_their_triangles(tmp_path, stored):
    meshio = pytest.importorskip("meshio")
    points = np.array([[0, 0, 0], [1, 0, 0], [1, 2, 0], [0, 2, 0], [2.0, 1, 0]])
    cells = [("quad", [[0, 1, 2, 3]]), ("triangle", [[1, 4, 2]])]
    load, moved = np.arange(5.0) + 1, np.ones((5, 2)) * [[1, 2]]
    mesh = meshio.Mesh(points, cells, {"load": load, "moved": moved})
    given = mesh
    if stored:
        mesh.write(tmp_path / "a.vtu")
        given = tmp_path / "a.vtu"
    write_points(tmp_path / "mesh.h5", from_meshes([given, mesh], ["load"], ["moved"]))
    file = read_points(tmp_path / "mesh.h5")
    assert [label.name for label in (*file.axes, *file.targets)] == ["x", "y", "moved 0", "moved 1"]
    for sample in file:
        assert np.array_equal(sample.queries, points[:, :2])
        assert sample.values[:, 0].tolist() == load.tolist()
        assert sorted(sample.cells.tolist()) == [[0, 1, 2], [0, 2, 3], [1, 4, 2]]
    with pytest.raises(DataError, match="mesh 0 has no point data 'stress'; it has load, moved"):
        from_meshes([mesh], ["load"], ["stress"])


def test_a_missing_package_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **more):
        if name == "meshio":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr("importlib.import_module", without)
    with pytest.raises(DataError, match=r"pip install 'function-space-transformer\[mesh\]'"):
        from_meshes(["a.vtu"], ["u"], ["u"])


def test_samples_are_named_by_their_coordinate_their_file_or_by_hand(tmp_path):
    xarray = pytest.importorskip("xarray")
    fields = np.ones((2, 3))
    data = xarray.Dataset({"a": (("day", "x"), fields)}, {"day": ["mon", "tue"], "x": [0.0, 1, 2]})
    assert [each.name for each in from_xarray(data, ["a"], ["a"], sample="day").samples] == [
        "mon",
        "tue",
    ]
    without = from_xarray(data.drop_vars("day"), ["a"], ["a"], sample="day")
    assert [each.name for each in without.samples] == [None, None]
    samples = [PointSample([[0.0]], [[1.0]], [[1.0]], [[1.0]], name=name) for name in ("a", None)]
    write_points(tmp_path / "named.h5", samples, Domain((0.0,), (1.0,)))
    assert read_points(tmp_path / "named.h5").names(np.arange(2)) == ("a", "1")
    write_points(tmp_path / "copy.h5", read_points(tmp_path / "named.h5"), Domain((0.0,), (1.0,)))
    assert [each.name for each in read_points(tmp_path / "copy.h5")] == ["a", "1"]
    write_points(tmp_path / "plain.h5", samples[1:], Domain((0.0,), (1.0,)))
    assert read_points(tmp_path / "plain.h5").names(np.arange(1)) is None


def test_other_files_of_the_user_s_are_refused_with_the_way_to_points(tmp_path):
    (tmp_path / "mine.csv").write_text("x,u\n")
    with pytest.raises(DataError, match=r"mine\.csv: is no fst point file.*fst\.data\.from_table"):
        read_points(tmp_path / "mine.csv")
