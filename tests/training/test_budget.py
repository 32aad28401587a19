"""Budgets: how they are written, what schedule they give, and how a rate is measured."""

from dataclasses import replace

import pytest
import torch

from fst.data.source import TrainingSplit, ValidationSplit
from fst.training import budget
from fst.training.budget import (
    StepBudget,
    TimeBudget,
    calibrate,
    parse_budget,
    spend,
)
from fst.training.schedules import Plateau, WarmupCosine
from fst.training.settings import TrainingError
from training_fakes import TinyConfig, TinyModel, WaveSamples, tiny_settings, tiny_train

WRITTEN = {
    "90s": TimeBudget(90),
    "10m": TimeBudget(600),
    "1.5h": TimeBudget(5_400),
    " 2 M ": TimeBudget(120),
    "20000steps": StepBudget(20_000),
    "20,000 steps": StepBudget(20_000),
    "20_000step": StepBudget(20_000),
    "500h": TimeBudget(1_800_000),
    "1234567.891s": TimeBudget(1_234_567.891),
    "0.00001s": TimeBudget(0.00001),
    "12345678901234567891steps": StepBudget(12_345_678_901_234_567_891),
}


@pytest.mark.parametrize("text", WRITTEN)
def test_budgets_are_read_and_come_back(text):
    found = parse_budget(text)
    assert found == WRITTEN[text]
    assert parse_budget(str(found)) == found


@pytest.mark.parametrize("text", ["", "ten", "10", "10 days", "-5s", "5e3steps", "s", "1.5steps"])
def test_other_words_are_no_budget(text):
    with pytest.raises(ValueError, match=r"budget must be .* got"):
        parse_budget(text)


@pytest.mark.parametrize("text", ["0s", "9steps", "0m"])
def test_a_budget_must_buy_something(text):
    with pytest.raises(ValueError, match="budget must be"):
        parse_budget(text)


def test_a_time_buys_steps_by_the_rate_and_steps_do_not():
    assert TimeBudget(120).steps(2.6) == 312
    assert TimeBudget(120).steps(31.4) == 3_768
    assert StepBudget(500).steps(2.6) == StepBudget(500).steps(300.0) == 500
    with pytest.raises(TrainingError, match="a budget of 3s allows 6 steps"):
        TimeBudget(3).steps(2.0)


def test_every_model_gets_the_same_shape():
    """Warm-up over a tenth, then a cosine to zero, whatever schedule the recipe had."""
    slow = spend(tiny_settings(schedule=Plateau(), learning_rate=0.3), 200)
    fast = spend(tiny_settings(learning_rate=0.001, validate_every=7), 2_000)
    assert slow.schedule == WarmupCosine(warmup=20, maximum=200)
    assert fast.schedule == WarmupCosine(warmup=200, maximum=2_000)
    for share in (0.05, 0.1, 0.3, 0.9, 1.0):
        one, two = (
            each.schedule.factor(round(share * each.schedule.maximum), ()) for each in (slow, fast)
        )
        assert one == pytest.approx(two, abs=1e-12)
    assert fast.schedule.factor(2_000, ()) == 0
    assert (slow.learning_rate, fast.learning_rate) == (0.3, 0.001)  # each keeps its own


def test_a_long_run_warms_up_for_a_thousand_steps_and_saves_often():
    long = spend(tiny_settings(), 500_000)
    assert long.schedule == WarmupCosine(warmup=1_000, maximum=500_000)
    assert (long.validate_every, long.checkpoint_every) == (50_000, 10_000)
    slow = spend(tiny_settings(), 500_000, rate=2.6)  # five minutes are lost at most
    assert (slow.validate_every, slow.checkpoint_every) == (50_000, 780)
    assert spend(tiny_settings(), 500_000, rate=1e-4).checkpoint_every == 1


def test_a_measurement_is_a_small_part_of_a_budget():
    for seconds, measured in ((4, 1.0), (20, 2.0), (120, 3.0), (3_600, 5.0)):
        assert TimeBudget(seconds).calibration_seconds == measured


@pytest.mark.parametrize("steps", [10, 11, 99, 1_234])
def test_there_are_about_ten_validations(steps):
    settings = spend(tiny_settings(), steps)
    assert 5 <= -(-steps // settings.validate_every) <= 10


class Clock:
    """Time that passes only when a model is updated: 100 s at first, then a quarter second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.updates = 0.0, 0
        monkeypatch.setattr("fst.training.logging.time.monotonic", lambda: self.now)
        update = budget.Trainer.update

        def counted(trainer: budget.Trainer) -> None:
            update(trainer)
            self.updates += 1
            self.now += 100.0 if self.updates == 1 else 0.25

        monkeypatch.setattr(budget.Trainer, "update", counted)


def splits() -> tuple[TrainingSplit, ValidationSplit]:
    return TrainingSplit(WaveSamples.draw(13, 1)), ValidationSplit(WaveSamples.draw(7, 2))


def test_the_rate_is_that_of_updates_after_the_first(monkeypatch):
    clock = Clock(monkeypatch)
    found = calibrate(TinyModel(TinyConfig()), *splits(), tiny_settings(log_every=4), seconds=5.0)
    assert (found.updates, found.seconds, found.steps_per_second) == (20, 5.0, 4.0)
    assert found.peak_memory_gib is None
    assert clock.updates == budget.FEWEST_UNTIMED + found.updates


def test_a_calibration_leaves_no_trace(tmp_path):
    """Training after it gives the weights that training without it gives."""
    settings = spend(tiny_settings(), 12)
    tiny_train(tmp_path / "plain", settings)
    torch.manual_seed(11)
    scratch = replace(settings, average=0.9, augment=True)
    calibrate(TinyModel(TinyConfig(dropout=0.1)), *splits(), scratch, seconds=0.01)
    tiny_train(tmp_path / "after", settings)
    weights = [
        (tmp_path / name / "best/model.safetensors").read_bytes() for name in ("plain", "after")
    ]
    assert weights[0] == weights[1]
