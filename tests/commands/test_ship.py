"""fst ship: a scored run becomes weights with a name and a card, which every command accepts."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

import fst
from fst import pretrained
from fst.cli import USER_ERROR, main
from fst.commands import ship as ship_command
from fst.commands.explore import make_explorer, warm_up
from fst.commands.prediction_files import run_labels
from fst.commands.ship import Rounding, card_lines, halved
from fst.data import Label, Labels
from fst.evaluation.rows import read_run
from fst.recipes import find
from tiny import BURGERS, MODEL, TRAINING

NAME = "small-burgers"


def fst_command(*words) -> int:
    return main([str(word) for word in words])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Trained and scored, its data in the folder beside it."""
    folder = tmp_path_factory.mktemp("shipping")
    options = ["--device", "cpu", *MODEL, *TRAINING, *BURGERS]
    words = ["train", "fast/burgers-single/fst", "--out", folder / "run", "--data", folder / "data"]
    assert fst_command(*words, *options) == 0
    return folder / "run"


@pytest.fixture
def shipped(run, tmp_path, monkeypatch):
    """The folder where fst looks for its weights, with one set in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pretrained, "SHIPPED", tmp_path / "weights")
    assert fst_command("evaluate", run, "--device", "cpu") == 0
    assert fst_command("ship", run, "--name", NAME, "--device", "cpu") == 0
    return tmp_path / "weights" / NAME


def test_a_run_that_is_not_scored_is_refused(run, tmp_path, capsys):
    unscored = tmp_path / "unscored"
    unscored.mkdir()
    for name in ("recipe.json", "summary.json", "environment.json"):
        (unscored / name).write_bytes((run / name).read_bytes())
    assert fst_command("ship", unscored, "--name", NAME, "--out", tmp_path / "w") == USER_ERROR
    assert "has no results yet; score it with: fst evaluate" in capsys.readouterr().err
    assert not (tmp_path / "w").exists()


def test_shipped_weights_are_the_runs_to_half_precision(run, shipped, tmp_path):
    ours, theirs = fst.from_pretrained(NAME), fst.from_pretrained(run / "best")
    assert ours.config == theirs.config
    stored = pretrained.read(shipped)[2]
    assert {str(value.dtype) for value in stored.values()} == {"torch.float16", "torch.float32"}
    for name, value in theirs.state_dict().items():
        assert ours.state_dict()[name].dtype == torch.float32
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-3, atol=1e-7)
    assert (shipped / "model.safetensors").stat().st_size < 0.8 * (
        run / "best" / "model.safetensors"
    ).stat().st_size


def test_full_precision_is_kept_where_half_costs_too_much(run, shipped, monkeypatch, tmp_path):
    monkeypatch.setattr(
        ship_command, "halved", lambda weights: {k: 2 * v for k, v in halved(weights).items()}
    )
    words = ["ship", run, "--name", "exact", "--out", tmp_path / "others", "--device", "cpu"]
    assert fst_command(*words) == 0
    stored, best = pretrained.read(tmp_path / "others/exact")[2], pretrained.read(run / "best")[2]
    assert all(torch.equal(stored[name], best[name]) for name in best)
    assert not Rounding(0.1, float("nan")).chosen
    assert not Rounding(0.1, 0.1011).chosen
    assert Rounding(0.1, 0.0995).chosen


def test_weights_that_were_scored_in_half_precision_ship_as_they_are(run, shipped, tmp_path):
    """Without the data, which are needed only to measure what rounding costs."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    for name in ("model.safetensors", "config.json"):
        shutil.copy(shipped / name, copy / "best" / name)
    words = ["--device", "cpu", "--data", run.parent / "data", "--again"]
    assert fst_command("evaluate", copy, *words) == 0
    words = ["--name", "again", "--out", tmp_path / "w", "--data", tmp_path / "missing"]
    assert fst_command("ship", copy, *words) == 0
    again = tmp_path / "w/again"
    kept, stored = pretrained.read(shipped)[2], pretrained.read(again)[2]
    assert all(torch.equal(stored[name], kept[name]) for name in kept)
    card, numbers = (again / "README.md").read_text(), sum(map(torch.numel, kept.values()))
    assert f"MB, in float32 {4 * numbers / 1e6:.1f} MB" in card
    assert "scored once with these settings, with the weights as they are stored here." in card


def test_the_card_says_where_the_weights_are_from(run, shipped):
    text = (shipped / "README.md").read_text()
    record = json.loads((run / "environment.json").read_text())
    rows = json.loads((run / "results" / "rows.json").read_text())
    for expected in (
        f'fst.from_pretrained("{NAME}")',
        "`fast/burgers-single/fst`, seed",
        "viscosities [0.01], training 6",
        f"{rows[-1]['error']:.5f}",
        record["git"]["commit"],
        "Matrices are stored in float16",
        "were not tested",
        "--queries 11x32 ",
    ):
        assert expected in text
    assert str(run.parent) not in text
    words = ["/usr/bin/cli.py", "train", "demo/burgers", "--out", "/home/me/runs/a", "--data", "d"]
    assert ship_command.command_line(words) == "fst train demo/burgers --out a --data d"


def test_the_card_says_what_each_viscosity_and_each_start_was(run, shipped, tmp_path, capsys):
    """Errors by group, and the weights that a run started from."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    rows = json.loads((copy / "results/rows.json").read_text())
    for row in rows:
        names = zip(("0.01", "4"), row["errors"], strict=True)
        row["groups"] = [
            {"name": name, "samples": 1, "error": error, "paper_error": None}
            for name, error in names
        ]
    (copy / "results/rows.json").write_text(json.dumps(rows))
    described = json.loads((copy / "run.json").read_text())
    described["before"] = [{"steps": 1234, "update_seconds": 56.7, "hardware": "NVIDIA H200"}]
    (copy / "run.json").write_text(json.dumps(described))
    words = ["--name", "grouped", "--out", tmp_path / "w", "--device", "cpu"]
    assert fst_command("ship", copy, *words) == 0
    card = (tmp_path / "w/grouped/README.md").read_text()
    assert "| Training | 1,234 steps, 57 s on NVIDIA H200; then 6 steps," in card
    second = next(row for row in rows if row["grid"] == [11, 32])["errors"][1]
    assert f"| 4 | 1 | {second:.5f} |" in card
    capsys.readouterr()
    assert fst_command("evaluate", copy) == 0
    assert re.search(rf"4 +1 +{second:.5f}", capsys.readouterr().out)


def test_names_of_the_data_are_kept(run, shipped, tmp_path, monkeypatch):
    assert run_labels(NAME) is None  # as in weights that were shipped without names
    copy, names = tmp_path / "copy", {"axes": [["t", "s"], ["x", ""]], "values": [["u", "m/s"]]}
    shutil.copytree(run, copy)
    described = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps(described | {"labels": names}))
    assert fst_command("ship", copy, "--name", "named", "--device", "cpu") == 0
    expected = Labels([Label("t", "s"), Label("x")], [Label("u", "m/s")])
    assert run_labels("named") == run_labels(shipped.parent / "named") == expected
    assert run_labels(copy) == run_labels(copy / "best") == expected
    monkeypatch.chdir(copy / "best")
    assert run_labels(".") == expected


def test_nothing_is_overwritten_unasked(run, shipped, capsys):
    before = (shipped / "README.md").read_bytes()
    assert fst_command("ship", run, "--name", NAME) == USER_ERROR
    assert "nothing is overwritten" in capsys.readouterr().err
    assert fst_command("ship", run, "--name", "../else") == USER_ERROR
    assert "name must be lower-case words" in capsys.readouterr().err
    assert (shipped / "README.md").read_bytes() == before
    assert fst_command("ship", run, "--name", NAME, "--force", "--device", "cpu") == 0


def test_no_folder_of_something_else_is_replaced(run, shipped, tmp_path, capsys):
    precious = tmp_path / "own" / "thesis"
    precious.mkdir(parents=True)
    (precious / "chapter.tex").write_text("text")
    words = ["ship", run, "--name", "thesis", "--out", tmp_path / "own", "--force"]
    assert fst_command(*words) == USER_ERROR
    assert "thesis does not hold shipped weights alone (" in capsys.readouterr().err
    assert (precious / "chapter.tex").read_text() == "text"
    (precious / "chapter.tex").rename(precious / "README.md")
    assert fst_command(*words) == USER_ERROR
    assert (precious / "README.md").read_text() == "text"
    other = tmp_path / "other"
    shutil.copytree(run / "best", other / "best")
    words = ["ship", run, "--name", "best", "--out", other, "--force"]
    assert fst_command(*words) == USER_ERROR
    assert "best does not hold shipped weights alone (" in capsys.readouterr().err
    assert (other / "best" / "model.safetensors").is_file()
    before = sorted(path for path in run.rglob("*"))
    assert fst_command("ship", run, "--name", "run", "--out", run.parent, "--force") == USER_ERROR
    assert fst_command("ship", run, "--name", "best", "--out", run, "--force") == USER_ERROR
    assert capsys.readouterr().err.count("must lie apart") == 2
    assert sorted(path for path in run.rglob("*")) == before


def test_old_weights_stay_where_new_ones_cannot_be_written(run, shipped, monkeypatch, capsys):
    before = {path: path.read_bytes() for path in shipped.rglob("*") if path.is_file()}

    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ship_command, "write_text", full)
    words = ["ship", run, "--name", NAME, "--force", "--device", "cpu"]
    assert fst_command(*words) == USER_ERROR
    assert "no space left" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in shipped.rglob("*") if path.is_file()} == before
    assert [path.name for path in shipped.parent.iterdir()] == [NAME]


def test_the_card_of_ones_own_points_names_their_file(run, shipped):
    recipe = find("own/fst")
    row = read_run(run).rows[0]
    lines = card_lines(run, recipe, replace(row, data="waves.h5 70447c"))
    assert "File: waves.h5 70447c;" in lines["Data"]
    assert "Generated by fst" not in lines["Data"]
    assert ship_command.command_line(["train.py"]) == "fst.fit"


def test_other_weights_than_those_scored_are_refused(run, shipped, capsys, tmp_path):
    weights = run / "best" / "model.safetensors"
    kept = weights.read_bytes()
    model = fst.from_pretrained(run / "best")
    with torch.no_grad():
        next(model.parameters()).add_(1)
    try:
        model.save_pretrained(run / "best")
        assert fst_command("ship", run, "--name", "other", "--device", "cpu") == USER_ERROR
    finally:
        weights.write_bytes(kept)
    assert "not the weights that were scored" in capsys.readouterr().err
    assert list(pretrained.shipped()) == [NAME]


def test_the_name_is_accepted_by_every_command(run, shipped, capsys, tmp_path):
    observed = json.loads((shipped / "config.json").read_text())["config"]
    assert observed["rows"] == [4]
    positions, values = np.random.default_rng(0).random((1, 20, 2)), np.ones((1, 20, 1))
    np.savez(tmp_path / "seen.npz", positions=positions, values=values)
    words = ["--observations", tmp_path / "seen.npz", "--queries", "5x8", "--device", "cpu"]
    assert fst_command("predict", NAME, "--out", tmp_path / "answer.npz", *words) == 0
    assert np.load(tmp_path / "answer.npz")["predictions"].shape == (1, 40, 1)

    explorer = make_explorer(NAME, device="cpu")
    warm_up(explorer)
    assert explorer.describe()["kind"] == "burgers"
    assert explorer.describe()["name"] == NAME

    capsys.readouterr()
    assert fst_command("evaluate", NAME) == 0
    rows = json.loads((run / "results" / "rows.json").read_text())
    assert f"{rows[-1]['error']:.5f}" in capsys.readouterr().out
    assert fst_command("evaluate", NAME, "--again") == USER_ERROR
    assert "only its stored rows are shown" in capsys.readouterr().err
    assert fst_command("evaluate", shipped) == 0
    assert f"{rows[-1]['error']:.5f}" in capsys.readouterr().out
    assert fst_command("evaluate", run / "best") == USER_ERROR
    assert "best holds weights and is no run folder" in capsys.readouterr().err


def test_an_unknown_name_lists_those_there_are(shipped):
    with pytest.raises(pretrained.PretrainedError, match=f"that ship with fst are {NAME} "):
        fst.from_pretrained("burgers-double")


def test_a_local_folder_comes_first(shipped, tmp_path):
    model = fst.from_pretrained(NAME)
    with torch.no_grad():
        next(model.parameters()).zero_()
    model.save_pretrained(tmp_path / NAME)
    assert not next(fst.from_pretrained(NAME).parameters()).any()
