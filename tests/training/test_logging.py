"""What a user sees while training, and what a run writes down about its surroundings."""

import io
import json
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from fst.training import logging, run_folder
from fst.training.logging import Progress

READING = {"loss": 0.0123, "learning_rate": 1e-3, "steps_per_second": 10.0}


def console(*, terminal: bool, width: int = 140) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width)


def text(of: Console) -> str:
    assert isinstance(of.file, io.StringIO)
    return of.file.getvalue()


def test_a_terminal_shows_a_live_line() -> None:
    screen = console(terminal=True)
    with Progress(screen, 0, 1_240) as shown:
        shown.show(40, READING, {"relative_l2": 0.04185})
    for part in ("40/1240", "loss 1.230e-02", "validation 0.04185", "rate 1.0e-03", "10.0 steps/s"):
        assert part in text(screen)
    assert "at most 0:02:00 left" in text(screen)


def test_a_narrow_terminal_shows_the_same_numbers() -> None:
    screen = console(terminal=True, width=80)
    with Progress(screen, 0, 1_240) as shown:
        shown.show(40, READING, {"relative_l2": 0.04185})
    for part in ("40/1240", "loss 1.230e-02", "validation 0.04185", "10.0 steps/s", "0:02:00"):
        assert part in text(screen)


def test_a_log_file_gets_sparse_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    log, clock = console(terminal=False), iter([0.0, 10.0, 31.0, 31.0, 40.0, 41.0])
    monkeypatch.setattr(logging.time, "monotonic", lambda: next(clock))
    with Progress(log, 0, 1_240) as shown:
        shown.show(40, READING, {})  # too soon
        shown.show(40, READING, {})  # half a minute has passed
        shown.show(40, READING, {})  # too soon again
        errors = {"standardized_relative_l2": 0.5, "relative_l2": 0.25}
        shown.show(40, READING, errors, now=True)  # a validation is always worth a line
    lines = text(log).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step 40 of 1,240: loss 1.230e-02, rate")
    assert "validation 0.50000, relative L2 0.25000" in lines[1]
    assert "\x1b" not in text(log)


def test_the_environment_is_plain_json_and_needs_no_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_folder.git_state(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))  # no git at all
    description = json.loads(json.dumps(run_folder.describe_environment()))
    assert description["git"] is None
    assert description["versions"]["torch"]
    assert description["hardware"]["cpus"] >= 1


def test_the_environment_names_commit_and_changes(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True)

    git("init", "-q")
    (tmp_path / "code.py").write_text("1\n")
    git("add", "code.py")
    git("commit", "-qm", "first")
    state = run_folder.git_state(tmp_path)
    assert state is not None
    assert len(state["commit"]) == 40
    assert state["modified"] is False
    (tmp_path / "code.py").write_text("2\n")
    assert run_folder.git_state(tmp_path) == state | {"modified": True}
    (tmp_path / "installed").mkdir()  # a copy inside someone else's repository
    assert run_folder.git_state(tmp_path / "installed") is None
