"""Batches are functions of the seed and the step, whatever the number of processes."""

from itertools import pairwise

import pytest
import torch

from fst.training import TrainingError
from fst.training.trainer import Batches
from training_fakes import WaveSamples, tiny_settings


@pytest.fixture
def samples() -> WaveSamples:
    return WaveSamples.draw(13, seed=0)


@pytest.mark.parametrize("size", [1, 5, 13, 30])
def test_every_epoch_holds_every_sample_once(samples: WaveSamples, size: int) -> None:
    batches = Batches(samples, tiny_settings(batch_size=size))
    rows = [batches.rows(step) for step in range(1, 13 * 3 + 1)]
    assert all(len(part) == size for part in rows)
    epochs = torch.cat(rows)[: 13 * (13 * 3 * size // 13)].view(-1, 13)
    assert torch.equal(epochs.sort(dim=1).values, torch.arange(13).expand_as(epochs))
    assert not any(torch.equal(one, other) for one, other in pairwise(epochs))


def test_a_step_is_reached_without_its_predecessors(samples: WaveSamples) -> None:
    settings = tiny_settings(augment=True)
    walked, jumped = Batches(samples, settings), Batches(samples, settings)
    for step in range(1, 30):
        (batch,) = walked.at(step)
    (alone,) = jumped.at(29)
    assert torch.equal(batch.queries, alone.queries)
    assert torch.equal(batch.targets, alone.targets)
    assert torch.equal(walked.rows(2), jumped.rows(2))


def test_seeds_and_steps_give_different_batches(samples: WaveSamples) -> None:
    first = Batches(samples, tiny_settings(seed=1))
    other = Batches(samples, tiny_settings(seed=2))
    (one,), (two,), (another,) = first.at(1), first.at(2), other.at(1)
    assert not torch.equal(one.queries, two.queries)
    assert not torch.equal(one.queries, another.queries)
    assert not torch.equal(first.rows(1), other.rows(1))


@pytest.mark.parametrize(("processes", "accumulate"), [(2, 1), (3, 1), (5, 1), (1, 3), (2, 2)])
def test_shares_make_up_the_global_batch(
    samples: WaveSamples, processes: int, accumulate: int
) -> None:
    settings = tiny_settings(batch_size=5, augment=True)
    (whole,) = Batches(samples, settings).at(7)
    split = tiny_settings(batch_size=5, augment=True, accumulate=accumulate)
    shares = []
    for process in range(processes):
        parts = list(Batches(samples, split, process, processes).at(7))
        assert len(parts) == accumulate
        shares += parts
    sizes = {len(share.targets) for share in shares}
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([share.targets for share in shares]), whole.targets)
    assert torch.equal(torch.cat([share.queries for share in shares]), whole.queries)
    values = torch.cat([share.observations.values for share in shares])
    assert torch.equal(values, whole.observations.values)


def test_augmentation_is_asked_for_only_when_set(samples: WaveSamples) -> None:
    plain, augmented = (
        next(Batches(samples, tiny_settings(augment=flag)).at(1)) for flag in (False, True)
    )
    ratio = (augmented.targets / plain.targets).mean(dim=1).squeeze(-1)
    assert torch.allclose(ratio.abs(), torch.ones(5))
    assert (ratio < 0).any()
    rows = Batches(samples, tiny_settings()).rows(1)
    assert torch.equal(plain.observations.values, samples.batch(rows).observations.values)


def test_all_targets_are_taken_when_no_count_is_given(samples: WaveSamples) -> None:
    for queries, count in ((None, 24), (11, 11)):
        (batch,) = Batches(samples, tiny_settings(queries=queries)).at(1)
        assert batch.targets.shape == (5, count, 1)


def test_impossible_shares_are_refused(samples: WaveSamples) -> None:
    with pytest.raises(TrainingError, match="at least the 6 processes, got 5"):
        Batches(samples, tiny_settings(batch_size=5), 0, 6)
    with pytest.raises(TrainingError, match="2 processes times accumulate 3, got 5"):
        Batches(samples, tiny_settings(batch_size=5, accumulate=3), 0, 2)
    with pytest.raises(TrainingError, match="no samples"):
        Batches(WaveSamples.draw(0, seed=0), tiny_settings())


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_size", 0), ("learning_rate", 0.0), ("seed", -1), ("average", 1.0), ("clip", -1.0),
     ("weight_decay", -0.1), ("keep", 0), ("queries", 0), ("learning_rate", float("nan")),
     ("accumulate", 0)],
)  # fmt: skip
def test_impossible_settings_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name} must"):
        tiny_settings(**{name: value})
