"""Two processes under torchrun train as one does, and only one of them writes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import training_ranks
from training_fakes import RANKS_SETTINGS, TinyModel, tiny_train


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with the same run by one process, by two, and by two with an interruption."""
    folder = tmp_path_factory.mktemp("ranks")
    tiny_train(folder / "one", RANKS_SETTINGS)
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
         "--master-addr=127.0.0.1", f"--master-port={free_port()}",
         training_ranks.__file__, str(folder)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["two", "interrupted"])
def test_two_processes_give_the_losses_of_one(runs: tuple[Path, str], name: str) -> None:
    folder, _ = runs
    one, two = lines(folder / "one"), lines(folder / name)
    # Each line once: a second writer would double them.
    assert [(line["kind"], line["step"]) for line in one] == [
        (line["kind"], line["step"]) for line in two
    ]
    for alone, together in zip(one, two, strict=True):
        for quantity in alone.keys() & {"loss", "gradient_norm", "learning_rate", "error", "best"}:
            assert together[quantity] == pytest.approx(alone[quantity], rel=1e-6)


@pytest.mark.parametrize("name", ["two", "interrupted"])
def test_two_processes_select_the_weights_of_one(runs: tuple[Path, str], name: str) -> None:
    folder, _ = runs
    one, two = (
        TinyModel.from_pretrained(folder / run / "best").state_dict() for run in ("one", name)
    )
    assert all(torch.allclose(one[key], two[key], rtol=1e-4, atol=1e-6) for key in one)
    environment = json.loads((folder / name / "environment.json").read_text())
    assert environment["hardware"]["processes"] == 2


def test_one_process_speaks_and_a_signal_to_one_stops_both(runs: tuple[Path, str]) -> None:
    _, output = runs
    assert output.count("finished after step 24") == 2  # the whole run, and the resumed one
    # The signal came in step 10; the processes next meet at the log line of step 12.
    assert "rank 0 stopped after step 12" in output
    assert "rank 1 stopped after step 12" in output
