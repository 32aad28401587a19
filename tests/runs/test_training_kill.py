"""A run killed with SIGKILL anywhere, and resumed, equals the run that was never killed."""

import json
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fst.training import checkpoint
from fst.training.schedules import WarmupCosine
from fst.training.settings import TrainingSettings
from training_children import child_server, run_child
from training_fakes import TinyModel, tiny_settings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="open files are found in /proc")

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "averaged": {"average": 0.8, "log_every": 5},
    "augmented": {"augment": True, "optimizer": "adamw", "weight_decay": 0.1, "log_every": 4},
}
DROPOUT = {"plain": 0.0, "averaged": 0.2, "augmented": 0.0}
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with child_server():
        yield


def curve(path: Path) -> list[tuple[Any, ...]]:
    """Every recorded number that is not a time."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "gradient_norm", "learning_rate", "error", "best")
    return [(line["kind"], line["step"], *(line.get(name) for name in names)) for line in lines]


def assert_same_run(one: Path, other: Path) -> None:
    assert curve(one) == curve(other)
    newest = [
        checkpoint.load(checkpoint.available(run / "checkpoints")[-1]) for run in (one, other)
    ]
    for first, second in (
        (newest[0].weights, newest[1].weights),
        (newest[0].tensors, newest[1].tensors),
        *((TinyModel.from_pretrained(run / "best").state_dict() for run in (one, other)),),
    ):
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
    summaries = [json.loads((run / "summary.json").read_text()) for run in (one, other)]
    for name in ("steps", "selected_step", "validation_error", "reason"):
        assert summaries[0][name] == summaries[1][name]
    assert not [path for path in (other / "checkpoints").iterdir() if path.name.startswith(".")]


@pytest.fixture(scope="module", params=VARIANTS)
def variant(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, TrainingSettings, float]:
    settings = tiny_settings(**VARIANTS[request.param])
    path = tmp_path_factory.mktemp("whole") / "run"
    assert run_child(path, settings, dropout=DROPOUT[request.param]) == 0
    return path, settings, DROPOUT[request.param]


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_at_random_points(
    variant: tuple[Path, TrainingSettings, float], seed: int, tmp_path: Path
) -> None:
    whole, settings, dropout = variant
    path, choose = tmp_path / "run", random.Random(seed)
    kills: list[dict[str, int]] = [
        {"update": choose.randint(1, 12)},
        {"event": choose.randint(9, 40)},
    ]
    choose.shuffle(kills)
    kills += [{"update": choose.randint(1, 6)}, {"event": choose.randint(1, 20)}]
    for number, kill in enumerate(kills):
        assert run_child(path, settings, resume=number > 0, dropout=dropout, **kill) == KILLED
    assert run_child(path, settings, resume=True, dropout=dropout) == 0
    assert_same_run(whole, path)


def test_killed_at_every_file_operation(tmp_path: Path) -> None:
    """A checkpoint, new best weights, the removal of an old one: each sync and rename can fail."""
    settings = tiny_settings(
        schedule=WarmupCosine(1, 6), checkpoint_every=3, validate_every=3, keep=1, log_every=2
    )
    whole, counter = tmp_path / "whole", tmp_path / "events"
    assert run_child(whole, settings, counter=counter) == 0
    events = int(counter.read_text())
    assert events > 35
    for event in range(events // 2, events + 1):  # the second of two rounds
        path = tmp_path / f"run-{event}"
        assert run_child(path, settings, event=event) == KILLED
        assert run_child(path, settings, resume=True) == 0
        assert_same_run(whole, path)
