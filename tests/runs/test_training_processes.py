"""Two processes under torchrun train as one does, and only one of them writes."""

import dataclasses
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
from fst.base import Model
from fst.training.run_folder import held
from training_fakes import MUON_RANKS_SETTINGS, RANKS_SETTINGS, tiny_train
from training_images import IMAGE_RANKS_SETTINGS, image_train, streamed_train

# A process that aborts says where its threads were.
RANKS_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "ACCELERATE_USE_CPU": "1",
    "PYTHONFAULTHANDLER": "1",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment() -> dict[str, str]:
    paths = os.pathsep.join(path for path in sys.path if path)
    return os.environ | RANKS_ENVIRONMENT | {"PYTHONPATH": paths}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with the same run by one process, by two, and by two with an interruption.

    And a classifier, resident and streamed, by one process and by two.
    """
    folder = tmp_path_factory.mktemp("ranks")
    tiny_train(folder / "one", RANKS_SETTINGS)
    tiny_train(folder / "one-muon", MUON_RANKS_SETTINGS)
    # One process takes the batch in one part, each of two its share in two.
    whole = dataclasses.replace(IMAGE_RANKS_SETTINGS, accumulate=1)
    image_train(folder / "one-images", whole)
    streamed_train(folder / "one-streamed", whole)
    with held(folder / "busy"):
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
             "--master-addr=127.0.0.1", f"--master-port={free_port()}",
             training_ranks.__file__, str(folder)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=240,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


PAIRS = [
    ("one", "two"),
    ("one", "interrupted"),
    ("one-muon", "two-muon"),
    ("one-images", "two-images"),
    ("one-streamed", "two-streamed"),
]
# Gradients differ in their last bit; Muon rounds them to bfloat16, where a bit is more.
LOSSES, WEIGHTS = {"one-muon": 1e-3}, {"one-muon": (1e-2, 1e-3)}
QUANTITIES = {"loss", "gradient_norm", "learning_rate", "error", "best", "top1_error", "top5_error"}


@pytest.mark.parametrize(("alone", "together"), PAIRS)
def test_two_processes_give_the_losses_of_one(
    runs: tuple[Path, str], alone: str, together: str
) -> None:
    folder, _ = runs
    one, two = lines(folder / alone), lines(folder / together)
    # Each line once: a second writer would double them.
    assert [(line["kind"], line["step"]) for line in one] == [
        (line["kind"], line["step"]) for line in two
    ]
    for single, double in zip(one, two, strict=True):
        assert single.keys() == double.keys()
        for quantity in single.keys() & QUANTITIES:
            assert double[quantity] == pytest.approx(
                single[quantity], rel=LOSSES.get(alone, 2e-6)
            ), quantity


@pytest.mark.parametrize(("alone", "together"), PAIRS)
def test_two_processes_select_the_weights_of_one(
    runs: tuple[Path, str], alone: str, together: str
) -> None:
    folder, _ = runs
    one, two = (
        Model.from_pretrained(folder / run / "best").state_dict() for run in (alone, together)
    )
    rtol, atol = WEIGHTS.get(alone, (1e-4, 1e-6))
    assert all(torch.allclose(one[key], two[key], rtol=rtol, atol=atol) for key in one)
    environment = json.loads((folder / together / "environment.json").read_text())
    assert environment["hardware"]["processes"] == 2


def test_processes_move_to_the_same_bits(runs: tuple[Path, str]) -> None:
    _, output = runs
    assert output.count("has the same weights: True") == 2


def test_one_process_speaks_and_a_signal_to_one_stops_both(runs: tuple[Path, str]) -> None:
    _, output = runs
    # The whole run, the resumed one, that with Muon, and two classifiers.
    assert output.count("finished after step 24") == 5
    # The signal came in step 10; the processes next meet at the log line of step 12.
    assert "rank 0 stopped after step 12" in output
    assert "rank 1 stopped after step 12" in output
    # What one types alone would resume with a single process.
    assert "interrupted (under the launcher that started these 2 processes)" in output


def test_a_folder_in_use_is_refused_by_all_processes(runs: tuple[Path, str]) -> None:
    _, output = runs
    for rank in (0, 1):
        assert f"rank {rank} refused: another process is at work in " in output


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_killed_or_frozen_process_ends_the_run_with_a_way_on(name: str, tmp_path: Path) -> None:
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, training_ranks.__file__, str(tmp_path / "run"), name],
            env=environment() | group | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        said, _ = ranks[0].communicate(timeout=120)
    finally:
        for each in ranks:
            each.kill()
            each.communicate()
    assert ranks[0].returncode == 1
    assert "another process has ended or does not answer" in said
    assert "--resume" in said
    assert "step-00000006" in said
