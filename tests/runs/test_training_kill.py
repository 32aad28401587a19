"""A run killed with SIGKILL anywhere, and resumed, equals the run that was never killed."""

import json
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fst.base import Model
from fst.training import Summary, checkpoint
from fst.training.schedules import WarmupCosine
from fst.training.settings import TrainingSettings
from training_children import child_server, run_child
from training_fakes import tiny_settings, tiny_train
from training_images import image_settings, image_train, streamed_train


class Variant(NamedTuple):
    settings: TrainingSettings
    dropout: float = 0.0
    train: Callable[..., Summary] = tiny_train

    def child(self, path: Path, *, resume: bool = False, **kill: int) -> int:
        return run_child(
            path, self.settings, resume=resume, dropout=self.dropout, train=self.train, **kill
        )


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="open files are found in /proc")

ADAMW = {"optimizer": "adamw", "weight_decay": 0.1, "log_every": 4}
VARIANTS: dict[str, Variant] = {
    "plain": Variant(tiny_settings()),
    "averaged": Variant(tiny_settings(average=0.8, log_every=5), dropout=0.2),
    "muon": Variant(tiny_settings(optimizer="muon", weight_decay=0.1, log_every=4), dropout=0.2),
    "augmented": Variant(tiny_settings(augment=True, **ADAMW)),
    "classifier": Variant(
        image_settings(batch_size=7, accumulate=2, average=0.8, **ADAMW), 0.2, image_train
    ),
    "streamed": Variant(image_settings(accumulate=2, **ADAMW), 0.2, streamed_train),
}
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with child_server():
        yield


def curve(path: Path) -> list[tuple[Any, ...]]:
    """Every recorded number that is not a time."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    times = {"seconds", "steps_per_second"}
    return [tuple(sorted((k, v) for k, v in line.items() if k not in times)) for line in lines]


def assert_same_run(one: Path, other: Path) -> None:
    assert curve(one) == curve(other)
    newest = [
        checkpoint.load(checkpoint.available(run / "checkpoints")[-1]) for run in (one, other)
    ]
    for first, second in (
        (newest[0].weights, newest[1].weights),
        (newest[0].tensors, newest[1].tensors),
        *((Model.from_pretrained(run / "best").state_dict() for run in (one, other)),),
    ):
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
    summaries = [json.loads((run / "summary.json").read_text()) for run in (one, other)]
    for name in ("steps", "selected_step", "validation_error", "validation_errors", "reason"):
        assert summaries[0][name] == summaries[1][name]
    assert not [path for path in (other / "checkpoints").iterdir() if path.name.startswith(".")]


@pytest.fixture(scope="module", params=VARIANTS)
def variant(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Variant]:
    chosen = VARIANTS[request.param]
    path = tmp_path_factory.mktemp("whole") / "run"
    assert chosen.child(path) == 0
    return path, chosen


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_at_random_points(variant: tuple[Path, Variant], seed: int, tmp_path: Path) -> None:
    whole, chosen = variant
    path, choose = tmp_path / "run", random.Random(seed)
    kills: list[dict[str, int]] = [
        {"update": choose.randint(1, 12)},
        {"event": choose.randint(9, 40)},
    ]
    choose.shuffle(kills)
    kills += [{"update": choose.randint(1, 6)}, {"event": choose.randint(1, 20)}]
    for number, kill in enumerate(kills):
        assert chosen.child(path, resume=number > 0, **kill) == KILLED
    assert chosen.child(path, resume=True) == 0
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
