"""The loop: what it minimises, validates, keeps and writes, and how it ends early."""

import json
import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn

from fst.base import build_model as build
from fst.io import FileError
from fst.operators import Operator
from fst.training import CheckpointError, Interrupted, NonFiniteError, TrainingError
from fst.training.logging import check_wandb
from fst.training.loop import Interruption, build_accelerator
from fst.training.optimizer import Average, build_optimizer, matrices
from fst.training.schedules import Plateau, Stage, Stages, WarmupCosine
from fst.training.settings import TrainingSettings
from fst.training.trainer import Trainer, add_up
from precision_examples import lower_precision
from small import small_config
from training_fakes import TinyConfig, TinyModel, WaveSamples, tiny_settings, tiny_train


def metrics(path: Path, kind: str) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def numbers(lines: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(line["step"], line[name]) for line in lines]


def make_trainer(settings: TrainingSettings, model: TinyModel | None = None) -> Trainer:
    return Trainer(
        TinyModel(TinyConfig()) if model is None else model,
        WaveSamples.draw(13, seed=1),
        WaveSamples.draw(7, seed=2),
        settings,
        build_accelerator(settings, torch.device("cpu")),
    )


def mean_error(model: Operator, settings: TrainingSettings) -> float:
    """Validation from first principles: one batch of points after the other, in order."""
    samples = WaveSamples.draw(7, seed=2)
    stream = model.point_stream(settings.validation_anchor_seed, settings.validation_sobol_seed)
    errors = []
    with torch.no_grad():
        for rows in torch.arange(7).split(settings.validation_batch):
            batch = samples.batch(rows)
            draws = stream.draw().to(torch.device("cpu"), torch.float32)
            difference = model(batch.observations, draws)(batch.queries) - batch.targets
            errors += [
                (d.double().norm() / t.double().norm()).item()
                for d, t in zip(difference, batch.targets, strict=True)
            ]
    return sum(errors) / 7


def test_training_learns(tmp_path: Path) -> None:
    settings = tiny_settings(
        schedule=WarmupCosine(10, 200), learning_rate=0.03, batch_size=13, validate_every=200,
        checkpoint_every=200, log_every=50,
    )  # fmt: skip
    summary = tiny_train(tmp_path / "run", settings)
    assert summary.validation_error is not None
    assert summary.validation_error < 0.6 * mean_error(TinyModel(TinyConfig()), settings)


def test_the_loss_is_the_mean_squared_relative_error(tmp_path: Path) -> None:
    settings = tiny_settings()
    trainer = make_trainer(settings)
    (batch,) = trainer.batches.at(1)
    draws = trainer.model.point_stream(settings.seed + 1, settings.seed + 2).draw()
    draws = draws.to(torch.device("cpu"), torch.float32)
    prediction = trainer.model(batch.observations, draws)(batch.queries)
    ratios = [
        (p - t).double().square().sum() / t.double().square().sum()
        for p, t in zip(prediction, batch.targets, strict=True)
    ]
    trainer.update()
    trainer.read()
    assert trainer.state.pending[0][0] == pytest.approx((sum(ratios) / 5).item(), rel=1e-6)


@pytest.mark.parametrize("reset", ["grid", "batch"])
def test_validation_is_the_mean_relative_error_of_fixed_points(reset: str) -> None:
    settings = tiny_settings(validation_reset=reset, validation_batch=7)
    trainer = make_trainer(settings)
    trainer.update()
    trainer.validate()
    error = trainer.state.history[-1][1]
    assert error == pytest.approx(mean_error(trainer.model, settings), rel=1e-6)
    trainer.validate()
    assert trainer.state.history[-1][1] == error  # the same points every time
    parts = make_trainer(tiny_settings(validation_reset=reset, validation_batch=1), trainer.model)
    parts.validate()
    # Seven batches share their points if each starts anew, and do not otherwise.
    assert (parts.state.history[-1][1] == pytest.approx(error, rel=1e-6)) is (reset == "batch")


def test_validation_leaves_training_as_it_was(tmp_path: Path) -> None:
    for name, every in (("often", 1), ("seldom", 24)):
        tiny_train(tmp_path / name, tiny_settings(validate_every=every), dropout=0.3)
    often, seldom = (metrics(tmp_path / name, "training") for name in ("often", "seldom"))
    assert [line["loss"] for line in often] == [line["loss"] for line in seldom]


@pytest.mark.parametrize("average", [None, 0.8])
def test_the_best_weights_are_kept(tmp_path: Path, average: float | None) -> None:
    # A rate that grows far too high makes a run whose best step is not its last.
    growing = Stages((Stage(24, 0.0, 1.0),), maximum=24)
    settings = tiny_settings(schedule=growing, learning_rate=1.0, validate_every=3, average=average)
    summary = tiny_train(tmp_path / "run", settings)
    lines = metrics(tmp_path / "run", "validation")
    best = min(lines, key=lambda line: line["error"])
    assert (summary.selected_step, summary.validation_error) == (best["step"], best["error"])
    assert summary.selected_step < 24
    model = TinyModel.from_pretrained(tmp_path / "run" / "best")
    assert mean_error(model.eval(), settings) == pytest.approx(best["error"], rel=1e-6)


def test_the_average_starts_short_and_follows_its_decay() -> None:
    model = TinyModel(TinyConfig())
    average = Average(model, 0.9)
    expected = model.read.weight.detach().clone()
    for step in range(1, 100):
        with torch.no_grad():
            model.read.weight.add_(torch.randn_like(model.read.weight))
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.read.weight.detach()
        average.update(step)
    assert torch.allclose(average.model.read.weight, expected, atol=1e-5)
    assert not torch.equal(model.read.weight, expected)


def test_the_predictor_has_its_own_rate_under_one_schedule() -> None:
    settings = tiny_settings(learning_rate=1e-2, predictor_learning_rate=1e-4)
    trainer = make_trainer(settings)
    for step, factor in ((1, 0.2), (2, 0.4)):
        trainer.update()
        trainer.read()
        rates = {group["name"]: group["lr"] for group in trainer.optimizer.param_groups}
        assert rates == pytest.approx({"main": 1e-2 * factor, "predictor": 1e-4 * factor}), step
    same = build_optimizer(TinyModel(TinyConfig()), tiny_settings(learning_rate=1e-2))
    assert {group["lr"] for group in same.param_groups} == {1e-2}


def test_forgotten_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TinyModel(TinyConfig())
    monkeypatch.setattr(model, "param_groups", lambda: {"main": [model.read.weight]})
    with pytest.raises(TrainingError, match="must cover every parameter"):
        build_optimizer(model, tiny_settings())


@pytest.mark.parametrize("kind", ["adam", "adamw", "muon"])
def test_updates_are_those_of_torch(kind: str) -> None:
    if kind == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this version of PyTorch has no Muon")
    settings = tiny_settings(
        optimizer=kind, weight_decay=0.1, epsilon=1e-3, clip=0.2, schedule=Stages(maximum=9)
    )
    trainer = make_trainer(settings)
    twin = TinyModel(TinyConfig())
    twin.load_state_dict(trainer.model.state_dict())
    moved = matrices(twin) if kind == "muon" else []
    rest = [p for p in twin.parameters() if all(p is not matrix for matrix in moved)]
    adam = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
    optimizers = [adam(rest, lr=settings.learning_rate, eps=1e-3, weight_decay=0.1)]
    if moved:
        rate = {"lr": settings.learning_rate, "adjust_lr_fn": "match_rms_adamw"}
        optimizers.append(torch.optim.Muon(moved, weight_decay=0.1, momentum=0.95, **rate))
    stream = twin.point_stream(settings.seed + 1, settings.seed + 2)
    for step in range(1, 10):
        (batch,), draws = trainer.batches.at(step), stream.draw()
        prediction = twin.represent(
            batch.observations, draws.to(torch.device("cpu"), torch.float32)
        )
        difference = prediction.decode(batch.queries) - batch.targets
        squares = difference.square().sum(dim=(1, 2)) / batch.targets.square().sum(dim=(1, 2))
        twin.zero_grad()
        squares.mean().backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.2)
        for optimizer in optimizers:
            optimizer.step()
        trainer.update()
        trainer.read()
        # Muon rounds to bfloat16, not always in the same places.
        assert trainer.state.pending[-1][1] == pytest.approx(
            norm.item(), rel=1e-2 if moved else 1e-5
        )
    for one, other in zip(trainer.model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-3 if moved else 1e-6)


def test_bfloat16_trains_with_float32_weights_loss_and_validation(tmp_path: Path) -> None:
    exact, coarse = (make_trainer(tiny_settings(precision=p)) for p in ("fp32", "bf16"))
    coarse.model.load_state_dict(exact.model.state_dict())
    for trainer in (exact, coarse):
        trainer.validate()
        trainer.update()
        trainer.read()
    assert coarse.state.history == exact.state.history
    (exact_loss, _), (coarse_loss, _) = exact.state.pending[0], coarse.state.pending[0]
    assert 0 < abs(coarse_loss - exact_loss) < 0.02 * exact_loss
    assert all(p.dtype == torch.float32 for p in coarse.model.parameters())


def test_validation_runs_in_full_precision_and_puts_back_what_was() -> None:
    seen = []

    class Watched(TinyModel):
        def represent(self, observations, draws=None):
            product = torch.ones(2, 2) @ torch.ones(2, 2)
            flags = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
            seen.append((self.training, product.dtype, *flags))
            return super().represent(observations, draws)

    trainer = make_trainer(tiny_settings(precision="bf16"), Watched(TinyConfig()))
    with lower_precision():
        trainer.update()
        trainer.read()
        trainer.validate()
        trainer.update()
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert seen[0] == seen[-1] == (True, torch.bfloat16, "high", True)
    assert len(seen) > 3
    assert set(seen[1:-1]) == {(False, torch.float32, "highest", False)}


def test_logged_losses_are_means_over_the_interval(tmp_path: Path) -> None:
    for name, every in (("each", 1), ("four", 4)):
        tiny_train(tmp_path / name, tiny_settings(log_every=every))
    each, four = (metrics(tmp_path / name, "training") for name in ("each", "four"))
    assert [line["step"] for line in four] == [4, 8, 12, 16, 20, 24]
    for index, line in enumerate(four):
        part = [entry["loss"] for entry in each[4 * index : 4 * index + 4]]
        assert line["loss"] == pytest.approx(sum(part) / 4, rel=1e-12)


def test_the_last_step_is_validated_and_summarised(tmp_path: Path) -> None:
    settings = tiny_settings(schedule=WarmupCosine(2, 10), validate_every=4)
    summary = tiny_train(tmp_path / "run", settings)
    assert [line["step"] for line in metrics(tmp_path / "run", "validation")] == [4, 8, 10]
    written = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert written["steps"] == summary.steps == 10
    assert written["reason"] == "reached the maximum of 10 steps"
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__
    # Resuming a finished run changes nothing.
    assert tiny_train(tmp_path / "run", settings, resume=True).reason == summary.reason
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == written


def test_the_schedule_sees_the_validation_errors(tmp_path: Path) -> None:
    schedule = Plateau(
        warmup=0, floor=0.1, improvement=0.99, window=4, stop_improvement=0.99, stop_window=4,
        minimum=0, maximum=50,
    )  # fmt: skip
    summary = tiny_train(tmp_path / "run", tiny_settings(schedule=schedule, validate_every=2))
    rates = [line["learning_rate"] for line in metrics(tmp_path / "run", "training")]
    assert rates == pytest.approx([3e-3] * 6 + [3e-4] * 4)
    assert summary.reason.startswith("best validation error improved by less than 99.0%")


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("log_every", [1, 10])
def test_a_non_finite_step_is_named(
    tmp_path: Path, where: str, log_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = WaveSamples.draw(13, seed=1)
    settings = tiny_settings(log_every=log_every, checkpoint_every=2, queries=None)
    update = Trainer.update

    def poisoned(trainer: Trainer) -> None:
        if trainer.state.step + 1 == 7:
            if where == "loss":
                trainer.batches.samples.coefficients[trainer.batches.rows(7)[2]] = math.nan
            else:
                trainer.model.predict_anchors.bias.register_hook(lambda g: g * math.inf)
        update(trainer)

    monkeypatch.setattr(Trainer, "update", poisoned)
    with pytest.raises(NonFiniteError) as caught:
        tiny_train(tmp_path / "run", settings, training=samples)
    rows = make_trainer(settings).batches.rows(7).tolist()
    assert (caught.value.step, caught.value.rows) == (7, rows)
    assert f"step 7 has loss {'nan' if where == 'loss' else ''}" in str(caught.value)
    assert f"training samples {rows}" in str(caught.value)
    assert f"last good checkpoint is {tmp_path / 'run' / 'checkpoints' / 'step-00000006'}" in str(
        caught.value
    )
    # The steps after the poisoned one were made, but never saved.
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["step-00000004", "step-00000006"]


def test_a_process_that_has_ended_leaves_a_message_and_a_way_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(gradient: torch.Tensor) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:3021\nstack")

    update = Trainer.update

    def alone_after_two_steps(trainer: Trainer) -> None:
        if trainer.state.step == 2:
            trainer.exchange = add_up
        update(trainer)

    monkeypatch.setattr(distributed, "all_reduce", broken)
    monkeypatch.setattr(Trainer, "update", alone_after_two_steps)
    settings = tiny_settings(checkpoint_every=2, log_every=1)
    with pytest.raises(TrainingError, match="another process has ended.*--resume.*step-00000002"):
        tiny_train(tmp_path / "run", settings)


def test_a_non_finite_validation_is_named(tmp_path: Path) -> None:
    trainer = make_trainer(tiny_settings())
    trainer.validation.coefficients[4] = math.inf
    trainer.update()
    with pytest.raises(NonFiniteError, match=r"validation error of step 1 .*: \[4\]"):
        trainer.validate()
    assert trainer.state.history == ()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_and_goes_on(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny_settings(log_every=4)
    tiny_train(tmp_path / "whole", settings)
    update, handler = Trainer.update, signal.getsignal(number)

    def interrupted(trainer: Trainer) -> None:
        if trainer.state.step + 1 == 11:
            os.kill(os.getpid(), number)
        update(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", interrupted)
        with pytest.raises(Interrupted, match=r"after step 11; .* fst train --resume") as caught:
            tiny_train(tmp_path / "run", settings)
    assert caught.value.folder == tmp_path / "run"
    assert signal.getsignal(number) is handler
    assert not (tmp_path / "run" / "summary.json").exists()
    tiny_train(tmp_path / "run", settings, resume=True)
    for kind, name in (("training", "loss"), ("validation", "error")):
        whole, run = (metrics(tmp_path / folder, kind) for folder in ("whole", "run"))
        assert numbers(whole, name) == numbers(run, name)
    resumed = json.loads((tmp_path / "run" / "environment.json").read_text())["resumed"]
    assert [start["step"] for start in resumed] == [11]


def test_an_earlier_checkpoint_can_be_chosen(tmp_path: Path) -> None:
    settings = tiny_settings(keep=9)
    tiny_train(tmp_path / "run", settings)
    before = metrics(tmp_path / "run", "training")
    newest = tmp_path / "run" / "checkpoints" / "step-00000024" / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="--checkpoint step-00000018"):
        tiny_train(tmp_path / "run", settings, resume=True)
    tiny_train(tmp_path / "run", settings, resume=True, checkpoint="step-00000006")
    after = metrics(tmp_path / "run", "training")
    assert numbers(before, "loss") == numbers(after, "loss")


def test_the_best_weights_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """What a killed run selected after its checkpoint may never come again."""
    growing = Stages((Stage(24, 0.0, 1.0),), maximum=24)
    settings = tiny_settings(schedule=growing, learning_rate=1.0, validate_every=3)
    summary = tiny_train(tmp_path / "run", settings)
    best = tmp_path / "run" / "best" / "model.safetensors"
    selected = best.read_bytes()
    best.write_bytes(b"of another future")
    assert summary.selected_step is not None
    assert summary.selected_step <= 18
    tiny_train(tmp_path / "run", settings, resume=True, checkpoint="step-00000018")
    assert best.read_bytes() == selected


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    tiny_train(tmp_path / "run", tiny_settings())
    with pytest.raises(CheckpointError, match="does not fit this run"):
        tiny_train(tmp_path / "run", tiny_settings(average=0.9), resume=True)


def test_a_full_disk_names_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fst.training import checkpoint

    write = checkpoint.write_synced

    def full(path: Path, data: bytes) -> None:
        if "step-00000012" in str(path):
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(checkpoint, "write_synced", full)
    with pytest.raises(FileError, match=r"no space left.*last good checkpoint is .*step-00000006"):
        tiny_train(tmp_path / "run", tiny_settings())


def test_tensorboard_has_the_metrics_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = tiny_settings(tensorboard=True)
    tiny_train(tmp_path / "run", settings)
    tiny_train(tmp_path / "run", settings, resume=True, checkpoint="step-00000018")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    written = [(event.step, event.value) for event in events.Scalars("training/loss")]
    lines = metrics(tmp_path / "run", "training")
    assert [step for step, _ in written] == [line["step"] for line in lines]
    assert [value for _, value in written] == pytest.approx([line["loss"] for line in lines])


def test_missing_weights_and_biases_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(TrainingError, match=r"pip install 'function-space-transformer\[wandb\]'"):
        tiny_train(tmp_path / "run", tiny_settings(wandb=True))
    with pytest.raises(TrainingError, match=r"pip install 'function-space-transformer\[wandb\]'"):
        check_wandb(tiny_settings(wandb=True))


def test_weights_and_biases_without_a_login_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command asks for the login before it makes a folder; the loop, for what comes later."""

    def fails(*_: object, **__: object) -> None:
        raise LookupError("no key")

    fake = SimpleNamespace(Error=LookupError, login=fails, init=fails)
    monkeypatch.setitem(__import__("sys").modules, "wandb", fake)
    check_wandb(tiny_settings())  # which does not ask for it
    with pytest.raises(TrainingError, match="Weights & Biases says: no key"):
        check_wandb(tiny_settings(wandb=True))
    with pytest.raises(TrainingError, match="Weights & Biases says: no key"):
        tiny_train(tmp_path / "run", tiny_settings(wandb=True))


def test_weight_decay_spares_logarithms():
    """A length scale is kept as its logarithm: decay would pull it to the whole domain."""
    model = build(small_config())
    settings = tiny_settings(optimizer="adamw", weight_decay=0.1)
    groups = build_optimizer(model, settings).param_groups
    spared = [p for group in groups if group["weight_decay"] == 0 for p in group["params"]]
    assert {id(p) for p in spared} == {id(p) for p in model.predict_anchors.scales.logarithms()}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_signals_at_once_are_one_and_a_later_one_insists(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("fst.training.loop.time.monotonic", lambda: now[0])
    # A shell that starts the tests in the background has them ignore this signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Interruption() as interruption:
            signal.raise_signal(signal.SIGINT)
            now[0] += 0.2
            signal.raise_signal(signal.SIGINT)  # the same again, as `timeout` sends it
            assert interruption.requested
            now[0] += 2.0
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
