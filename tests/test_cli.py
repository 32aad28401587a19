"""The command line as a new user meets it, mistakes included: one clear line, no traceback."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import run
from fst import __version__
from fst.cli import COMMANDS, INTERRUPTED, USER_ERROR, main, search
from fst.recipes.comparison import MORE_STEPS, RATES, STEPS
from fst.training.loop import Interrupted
from fst.training.settings import TrainingError
from tiny import BURGERS, MODEL, TRAINING


def test_help_lists_every_command(capsys):
    for words in ([], ["--help"]):
        code, out, _ = run(capsys, *words)
        assert code == 0
        usage = " ".join(out.split())
        assert f"usage: fst [-h] {{{','.join(COMMANDS)}}}" in usage
        for command in COMMANDS:
            assert f"• {command} " in out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert f"usage: fst {command}" in out


def test_the_version(capsys):
    assert run(capsys, "--version") == (0, f"function-space-transformer {__version__}\n", "")


def test_a_reader_that_has_enough_is_no_error():
    command = f"{sys.executable} -m fst.cli train own/fst --help | head -c 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("u", "")


def test_the_search_offers_the_papers_numbers():
    options = inspect.signature(search).parameters
    assert options["rates"].default == RATES
    assert (options["steps"].default, options["confirm"].default) == (STEPS, MORE_STEPS)


def test_help_and_mistyped_commands_do_not_load_torch():
    """One process answers them all; loading torch takes longer than all of them."""
    mistakes = [["trian"], ["--quiet"], ["evaluate"]]
    helps = [[name, "--help"] for name in COMMANDS]
    asked = [[], ["--help"], ["--version"], *helps, *mistakes]
    script = f"""
import sys
from fst.cli import main
for words in {asked}:
    try:
        code = main(words)
    except SystemExit as stop:
        code = stop.code
    loaded = [name for name in ("torch", "numpy", "h5py") if name in sys.modules]
    print("answer:", words, code, loaded)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    answers = [line for line in ran.stdout.splitlines() if line.startswith("answer:")]
    codes = [0] * (len(asked) - len(mistakes)) + [USER_ERROR] * len(mistakes)
    assert answers == [f"answer: {words} {code} []" for words, code in zip(asked, codes)]


@pytest.mark.parametrize(
    ("word", "near"),
    [("trian", "did you mean train?"), ("recipe", "did you mean recipes?"), ("xyz", "there are")],
)
def test_a_mistyped_command_is_answered_with_the_nearest(capsys, word, near):
    code, out, err = run(capsys, word, "--out", "x")
    assert (code, out) == (USER_ERROR, "")
    assert err.startswith(f"fst: error: unknown command '{word}': {near}")
    assert err.count("\n") == 1


def test_public_names_are_loaded_when_asked_for():
    script = """
import sys, fst
assert "torch" not in sys.modules
assert set(fst.__all__) <= set(dir(fst))
for name in fst.__all__:
    assert getattr(fst, name) is not None, name
assert fst.base.Model is fst.Model and fst.Field is fst.field.Field
try:
    fst.nothing
except AttributeError as error:
    print(error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stdout == "module 'fst' has no attribute 'nothing'\n"


def test_recipes_as_json(capsys):
    code, out, _ = run(capsys, "recipes", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    row = rows["burgers-single/fst"]
    assert (row["task"], row["parameters"]) == ("burgers-single", 2_830_721)
    assert (row["paper_parameters"], row["paper_error"]) == (2_830_721, 0.04185)


def test_recipes_as_a_table_and_one_alone(capsys):
    code, out, _ = run(capsys, "recipes")
    assert code == 0
    assert "darcy/fst" in out
    code, out, _ = run(capsys, "recipes", "darcy/fst", "--json")
    assert code == 0
    assert json.loads(out)["data"]["kind"] == "DarcyData"


def test_a_recipes_fields_are_options(capsys):
    code, out, _ = run(capsys, "train", "burgers-single/fst", "--help")
    assert code == 0
    for option in ("--out", "--model.width", "--training.schedule.window", "--data.viscosities"):
        assert option in out


def test_the_length_of_a_line_is_kept(capsys):
    code, out, _ = run(capsys, "recipes")
    assert code == 0
    assert max(len(line) for line in out.splitlines()) <= 80


def test_what_a_recipe_is_can_be_read_in_a_narrow_terminal(capsys):
    _, out, _ = run(capsys, "recipes")
    _, listed, _ = run(capsys, "recipes", "--json")
    # The words of the first column in their order, whichever lines they stand on.
    read = " ".join(" ".join(line[:55] for line in out.splitlines()).split())
    for row in json.loads(listed):
        assert f"{row['name']} " in read
        assert row["description"] in read
    assert "…" not in out


MISTAKES = {
    "unknown recipe": (["train", "burgers/fst", "--out", "x"], "did you mean"),
    "no recipe": (["train"], "fst train RECIPE --out DIR"),
    "resume nothing": (["train", "--resume", "nowhere"], "no run folder"),
    "resume with steps": (["train", "--resume", "a", "--steps", "9"], "--resume takes no --steps"),
    "evaluate nothing": (["evaluate", "nowhere"], "nowhere: there is no such run folder"),
    "report nothing": (["report", "nowhere", "--out", "page"], "no such run folder"),
    "show nothing": (["recipes", "dracy/fst"], "darcy/fst"),
    "a list in two parts": (
        ["compare", "demo", "--set", "fno.model.width=8", "--set", "fno.model.layers=2"],
        "--set is given twice; give it once, with all its values",
    ),
    "own without data": (["train", "own/fst", "--out", "x"], "add --data FILE"),
    "own without a file": (["train", "own/fst", "--out", "x", "--data", "no.h5"], "no.h5"),
    "a grid that the data do not have": (
        ["train", "demo/burgers", "--out", "x", "--evaluation.grids", "500", "500"],
        "evaluation.grids must fit",
    ),
    "a seed below zero": (["data", "burgers", "--out", "x", "--seed", "-1"], "seed"),
    "predict with nothing": (
        [
            "predict",
            "x",
            "--observations",
            "y",
            "--queries",
            "3x3",
            "--out",
            "z.npz",
            "--neighbors",
            "0",
        ],
        "neighbors must be at least 1",
    ),
    "predict with a run that is not there": (
        "predict runs/nosuch --observations o.csv --queries 3x3 --out z.npz".split(),
        "runs/nosuch: there is no such folder, and the weights that ship with fst are ",
    ),
    "check nothing": (["data", "check", "no.hdf5"], "no.hdf5"),
    "device that is not there": (
        ["train", "demo/burgers", "--out", "x", "--device", "teapot"],
        "device must be cpu or cuda",
    ),
    "device that is not used": (
        ["train", "demo/burgers", "--out", "x", "--device", "mps"],
        "device must be cpu or cuda, got 'mps'",
    ),
    "device with a number": (
        ["train", "demo/burgers", "--out", "x", "--device", "cuda:1"],
        "CUDA_VISIBLE_DEVICES",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_clear_line(capsys, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    words, message = MISTAKES[name]
    code, _, err = run(capsys, *words)
    assert code == USER_ERROR
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []  # nothing was left behind


def test_data_are_not_made_among_other_files(capsys, tmp_path):
    data = tmp_path / "mine"
    data.mkdir()
    (data / "darcy_train_16.pt").write_bytes(b"somebody's")
    code, _, err = run(capsys, "train", "darcy/fst", "--out", tmp_path / "run", "--data", data)
    assert code == USER_ERROR
    assert "holds none of the files that darcy/fst needs, such as darcy_train_128.pt" in err
    assert [path.name for path in data.iterdir()] == ["darcy_train_16.pt"]
    assert not (tmp_path / "run").exists()
    file = data / "darcy_train_16.pt"
    code, _, err = run(capsys, "train", "demo/burgers", "--out", tmp_path / "run", "--data", file)
    assert code == USER_ERROR
    assert "--data must be a folder" in err


@pytest.mark.parametrize(
    ("words", "hint"),
    [(["data", "burgers", "--out", "x"], "goes on where it stopped"), (["recipes"], "interrupted")],
)
def test_an_interruption_is_one_line(capsys, monkeypatch, words, hint):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fst.data.BurgersData.make", interrupted)
    monkeypatch.setattr("fst.commands.recipes.list_recipes", interrupted)
    code, _, err = run(capsys, *words)
    assert code == INTERRUPTED
    assert hint in err
    assert len(err.strip().splitlines()) == 1


PARSING = {
    "wrong name": (["--training.learning-rat", "1"], "--training.learning-rate"),
    "no heads": (["--model.heads", "0"], "heads must be at least 1"),
    "wrong type": (["--model.width", "wide"], "--model.width"),
    "value that makes no sense": (["--model.heads", "7"], "must be a multiple of"),
    "wrong choice": (["--training.optimizer", "sgd"], "adamw"),
}


@pytest.mark.parametrize("name", PARSING)
def test_a_wrong_override_is_explained(capsys, name):
    words, message = PARSING[name]
    code, out, err = run(capsys, "train", "demo/burgers", "--out", "x", *words)
    assert code == USER_ERROR
    assert message in out + err


def test_a_folder_in_use_is_left_alone(capsys, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("precious")
    words = ["--out", tmp_path / "run", "--data", tmp_path / "data", "--device", "cpu"]
    code, _, err = run(capsys, "train", "demo/burgers", *words, *MODEL, *TRAINING, *BURGERS)
    assert code == USER_ERROR
    assert "already holds files" in err
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["thesis.txt"]
    for out in (tmp_path / "run" / "thesis.txt", tmp_path / "run" / "thesis.txt" / "new"):
        code, _, err = run(capsys, "train", "demo/burgers", *words, "--out", out)
        assert code == USER_ERROR
        assert "thesis.txt is a file, expected a folder" in err
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("error", "code", "ended"),
    [
        (None, 0, [0]),
        (Interrupted(Path("run"), 9, 2), INTERRUPTED, [INTERRUPTED]),
        # The others may still wait for this process.
        (TrainingError("no such thing"), USER_ERROR, []),
        (KeyboardInterrupt(), INTERRUPTED, []),
    ],
)
def test_processes_end_at_once_where_all_of_them_end(monkeypatch, error, code, ended):
    calls = []

    def command(**_):
        if error is not None:
            raise error

    monkeypatch.setattr("fst.training.loop.end_processes", calls.append)
    monkeypatch.setattr("fst.commands.recipes.list_recipes", command)
    assert main(["recipes"]) == code
    assert calls == ended
