"""Overrides that the data do not allow: one line before training, and no folder is left behind."""

import pytest

from fst.cli import USER_ERROR
from test_cli import run
from tiny import BURGERS, MODEL, TRAINING

UNFIT = {
    "outputs": (["--model.output-channels", "2"], "output_channels must be that of the data, 1"),
    "values": (["--model.value-channels", "2"], "value_channels must be that of the data, 1"),
    "no condition": (["--model.condition-channels", "3"], "condition_channels must be"),
    "a condition": (["--data.condition"], "condition_channels must be that of the data, 1, got 0"),
    "domain": (["--model.high", "2", "1"], "domain must be that of the data"),
    "axes": (
        "--model.low 0 0 0 --model.high 1 1 1 --model.rows 2 2".split(),
        "domain must be that of the data",
    ),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Made by the first test, and read by the others."""
    return tmp_path_factory.mktemp("data") / "burgers"


@pytest.mark.parametrize("name", UNFIT)
def test_what_the_data_decide_is_no_option(capsys, tmp_path, data, name):
    words, message = UNFIT[name]
    words = [*MODEL, *TRAINING, *BURGERS, *words, "--device", "cpu", "--data", data]
    code, _, err = run(capsys, "train", "demo/burgers", "--out", tmp_path / "run", *words)
    assert code == USER_ERROR
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_baseline_must_fit_the_grid_and_the_observations(capsys, tmp_path, data):
    sizes = "--model.branch 8 8 --model.trunk 8 8".split()
    staged = [*TRAINING, *BURGERS, "--data.viscosities", "0.1", "--data.final-time", "0.5"]
    words = [*sizes, *staged, "--device", "cpu", "--data", data]
    code, _, err = run(
        capsys, "train", "burgers-single/deeponet", "--out", tmp_path / "run", *words
    )
    assert code == USER_ERROR
    assert "must hold the 1424 observations" in err
    assert not (tmp_path / "run").exists()
