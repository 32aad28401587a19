"""`fst data`: files are made, kept and described."""

import inspect

import pytest

from fst.commands import data as commands
from fst.data import DarcyData, DataError, burgers
from fst.data.burgers_data import file_name, open_trajectories

SMALL = {"training": 3, "validation": 1, "test": 1, "points": 32, "times": 5, "final_time": 0.1}


def test_burgers_makes_a_file_for_each_viscosity_and_keeps_it(tmp_path, capsys):
    for word in ("written", "there already"):
        commands.burgers(out=tmp_path, viscosity=(0.1, 1.0), device="cpu", **SMALL)
        assert capsys.readouterr().out.replace("\n", "").count(word) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "1D_Burgers_Sols_Nu0.1.hdf5",
        "1D_Burgers_Sols_Nu1.0.hdf5",
    ]
    assert open_trajectories(tmp_path / file_name(1.0)).rows == 5


def test_all_viscosities_are_those_of_pdebench(tmp_path):
    commands.burgers(out=tmp_path, all_viscosities=True, device="cpu", **SMALL)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {file_name(viscosity) for viscosity in burgers.VISCOSITIES}
    assert len(names) == 12


def test_darcy_makes_both_files(tmp_path, capsys):
    commands.darcy(out=tmp_path, resolution=8, fine=16, training=4, test=2, device="cpu")
    assert capsys.readouterr().out.count("written") == 2
    data = DarcyData(resolution=8, fine=16, training=3, validation=1, test=2, training_file=4,
                     validation_grid=(4, 4))  # fmt: skip
    training, validation = data.load(tmp_path)
    assert (len(training.samples), len(validation.samples)) == (3, 1)
    assert len(data.load_test(tmp_path).samples) == 2


def test_the_commands_defaults_suit_the_recipes():
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(commands.darcy).parameters.items()
    }
    data = DarcyData()
    assert defaults["training"] == data.training_file == 5000
    assert (defaults["test"], defaults["resolution"]) == (data.test, data.resolution)


def test_check_describes_a_file_and_a_folder(tmp_path, capsys):
    commands.burgers(out=tmp_path, viscosity=(0.1,), device="cpu", **SMALL)
    capsys.readouterr()
    commands.check(tmp_path / file_name(0.1))
    shown = capsys.readouterr().out
    assert "PDEBench trajectories" in shown
    assert "3 training, 1 validation, 1 test" in shown
    commands.check(tmp_path)
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"viscosity": (-1.0,)}, "viscosities must be positive"),
        ({"training": 0}, "training must be at least 1, got 0"),
        ({"final_time": 0.0}, "final_time must be positive"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"device": "abacus"}, "device must be cpu or cuda, got 'abacus'"),
        ({"device": "meta"}, "device must be cpu or cuda, got 'meta'"),
        ({"device": "cuda:1"}, "CUDA_VISIBLE_DEVICES=1 before the command"),
    ],
)
def test_settings_that_make_no_sense_are_one_clear_error(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        commands.burgers(out=tmp_path, **{**SMALL, **changes})
    assert list(tmp_path.iterdir()) == []


def test_a_resolution_that_does_not_divide_the_fine_grid(tmp_path):
    with pytest.raises(DataError, match="resolution 12 must divide fine 32"):
        commands.darcy(out=tmp_path, resolution=12, fine=32, training=2, test=1, device="cpu")
    assert list(tmp_path.iterdir()) == []


def test_check_refuses_what_it_does_not_know(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("1, 2, 3")
    with pytest.raises(DataError, match="is neither HDF5"):
        commands.check(path)
