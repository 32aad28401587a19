"""One process at a time works in a run folder, and one killed at its start is started again."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fst.cli import USER_ERROR, main
from fst.training import run_folder
from tiny import BURGERS, MODEL, TRAINING

# In a process of its own, which says when it has the lock and keeps it until it is ended.
HOLD = """
import sys, time
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""
CPU = ["--device", "cpu"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    assert train(folder, "run") == 0
    return folder


def train(folder: Path, name: str) -> int:
    words = [*MODEL, *TRAINING, *BURGERS, "--out", folder / name, "--data", folder / "data", *CPU]
    return main(["train", "demo/burgers", *map(str, words)])


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A run that was stopped at its first checkpoint."""
    copy = Path(shutil.copytree(finished, tmp_path / "copy")) / "run"
    (copy / "summary.json").unlink()
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    return copy


@pytest.fixture
def busy(run, monkeypatch):
    """Another process is at work in the run."""
    monkeypatch.setattr(run_folder, "PATIENCE", 0.1)
    words = [sys.executable, "-c", HOLD, str(run / run_folder.LOCK)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.parametrize("words", [["train", "--resume"], ["evaluate", "--unfinished"]])
def test_a_second_process_ends_by_itself(run, busy, capsys, words):
    before = (run / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert main([*words, str(run), *CPU]) == USER_ERROR
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line == f"fst: error: another process is at work in {run}; try again when it has ended"
    assert (run / "metrics.jsonl").read_bytes() == before
    # However the other one ends, the run goes on.
    busy.kill()
    busy.wait()
    assert main([*words, str(run), *CPU]) == 0


def test_two_starts_do_not_share_a_folder(finished, monkeypatch, tmp_path, capsys):
    """The second finds the folder free, and is late when its data are loaded."""
    folder = Path(shutil.copytree(finished, tmp_path / "copy"))
    create = run_folder.RunFolder.create.__func__

    def late(cls, path, *described):
        (Path(path) / "recipe.json").write_text("{}")  # by the first, which has ended
        return create(cls, path, *described)

    monkeypatch.setattr(run_folder.RunFolder, "create", classmethod(late))
    assert train(folder, "second") == USER_ERROR
    assert "already holds files" in capsys.readouterr().err


LEFT = [
    ["recipe.json.part"],
    [".lock", "run.json.part"],
    [".lock", "run.json", "environment.json", "recipe.json.part"],
]


@pytest.mark.parametrize("names", LEFT)
def test_a_start_that_was_killed_is_made_again(finished, tmp_path, names):
    folder = Path(shutil.copytree(finished, tmp_path / "copy"))
    (folder / "killed").mkdir()
    for name in names:
        (folder / "killed" / name).write_text('{"half')
    assert train(folder, "killed") == 0
    assert not list((folder / "killed").glob("*.part"))
    assert json.loads((folder / "killed" / "run.json").read_text())["training_samples"] == 6


def test_data_that_were_killed_at_their_very_start_are_made_again(finished, tmp_path):
    (file,) = (finished / "data").glob("*.hdf5")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / f"{file.name}.part.new").write_bytes(b"half")
    assert train(tmp_path, "run") == 0
    assert [path.name for path in (tmp_path / "data").iterdir()] == [file.name]


def test_a_page_that_was_killed_at_its_very_start_is_written_again(finished, tmp_path):
    run, page = Path(shutil.copytree(finished / "run", tmp_path / "run")), tmp_path / "page"
    assert main(["evaluate", str(run), "--data", str(finished / "data"), *CPU]) == 0
    page.mkdir()
    (page / "report.json.part").write_bytes(b"half")
    assert main(["report", str(run), "--out", str(page)]) == 0
    assert (page / "index.html").is_file()
    assert not (page / "report.json.part").exists()
