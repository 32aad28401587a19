"""Overrides that the data do not allow: one line before training, and no folder is left behind."""

from types import SimpleNamespace

import pytest

from command_line import run
from fst.cli import USER_ERROR
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
    staged = [*TRAINING, *BURGERS, "--data.viscosities", "0.02", "--data.final-time", "1.0"]
    words = [*sizes, *staged, "--device", "cpu", "--data", data]
    code, _, err = run(
        capsys, "train", "burgers-single/deeponet", "--out", tmp_path / "run", *words
    )
    assert code == USER_ERROR
    assert "must hold the 1424 observations" in err
    assert not (tmp_path / "run").exists()


LARGE = {
    "width": ["--model.width", "1600000"],
    "bands": ["--model.fourier-bands", str(10**10)],
    "rows": ["--model.rows", str(10**10)],
    "batch": ["--training.batch-size", str(10**12)],
    "batch beyond any size": ["--training.batch-size", str(10**18)],
}


@pytest.mark.parametrize("name", LARGE)
def test_what_cannot_be_allocated_is_one_line(capsys, tmp_path, data, name):
    words = [*MODEL, *TRAINING, *BURGERS, *LARGE[name], "--device", "cpu", "--data", data]
    code, _, err = run(capsys, "train", "demo/burgers", "--out", tmp_path / "run", *words)
    assert code == USER_ERROR
    assert "not enough memory" in err
    assert len(err.strip().splitlines()) == 1


NUMBERS = {
    "rate": (["--training.learning-rate", "inf"], "learning_rate must be finite, got inf"),
    "large rate": (["--training.learning-rate", "1e38"], "learning_rate must be above 0 and at"),
    "decay": (["--training.weight-decay", "nan"], "weight_decay must be finite, got nan"),
    "time": (["--data.final-time", "inf"], "final_time must be finite, got inf"),
    "batch": (["--training.batch-size", str(10**20)], "batch_size must be below 2**63"),
    "points": (["--model.points-from-sobol", str(10**13)], "points_from_sobol times"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_nothing_can_use_is_named(capsys, tmp_path, name):
    words, message = NUMBERS[name]
    code, _, err = run(capsys, "train", "demo/burgers", "--out", tmp_path / "run", *words)
    assert code == USER_ERROR
    assert message in " ".join(" ".join(line.strip(" │") for line in err.splitlines()).split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("task", ["burgers", "darcy"])
@pytest.mark.parametrize("device", ["meta", "mps", "teapot"])
def test_data_are_made_on_a_cpu_or_a_gpu(capsys, tmp_path, task, device):
    code, _, err = run(capsys, "data", task, "--out", tmp_path / "data", "--device", device)
    assert code == USER_ERROR
    assert f"device must be cpu or cuda, got '{device}'" in err
    assert not (tmp_path / "data").exists()


def test_sizes_of_files_are_said_in_units_that_differ(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=20_000))
    code, _, err = run(capsys, "data", "burgers", "--out", tmp_path / "d", "--training", "1")
    assert code == USER_ERROR
    assert "needs 152.3" in err
    assert "MB, but its disk has 20 kB free" in err
