"""Classifiers in the one loop: loss and errors against independent formulas, and accumulation."""

import importlib
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fst import FunctionSpaceConfig, FunctionSpaceTransformer
from fst.base import Model
from fst.data.image_samples import ImageBatch
from fst.data.samples import Batch, Rows
from fst.metrics import label_ranks, top_errors
from fst.pretrained import from_json, to_json
from fst.training import NonFiniteError, TrainingError, TrainingSettings, loop
from fst.training.schedules import WarmupCosine
from fst.training.settings import CrossEntropy, RelativeL2
from fst.training.trainer import Trainer
from fst.types import Observations
from training_fakes import TinyConfig, TinyModel, WaveSamples, tiny_settings
from training_images import (
    CLASSES,
    StripeSamples,
    TinyClassifier,
    TinyClassifierConfig,
    image_settings,
    image_train,
)


def make_trainer(
    settings: TrainingSettings,
    model: Model | None = None,
    training: Rows | None = None,
    validation: Rows | None = None,
) -> Trainer:
    torch.manual_seed(5)
    return Trainer(
        TinyClassifier(TinyClassifierConfig()) if model is None else model,
        StripeSamples.draw(29, seed=1) if training is None else training,
        StripeSamples.draw(17, seed=2) if validation is None else validation,
        settings,
        loop.build_accelerator(settings, torch.device("cpu")),
    )


def wave_trainer(settings: TrainingSettings) -> Trainer:
    samples = WaveSamples.draw(13, seed=1), WaveSamples.draw(7, seed=2)
    torch.manual_seed(5)
    return make_trainer(settings, TinyModel(TinyConfig()), *samples)


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    """The gradient that the optimiser steps with in the next update, clipped."""
    trainer.update()
    trainer.read()
    update = trainer.optimizer._update
    assert update is not None
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    pairs = zip(update._parameters, update._gradients, strict=True)
    found = {names[id(parameter)]: gradient.clone() for parameter, gradient in pairs}
    assert len(found) == len(names)
    return found


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_equals_its_formula(smoothing: float, dtype: torch.dtype) -> None:
    logits = (5 * torch.randn(6, 7)).to(dtype)
    labels = torch.tensor([0, 6, 3, 3, 1, 5])
    batch = ImageBatch(torch.empty(6, 3, 1, 1), labels)
    model = TinyClassifier(TinyClassifierConfig())
    found = CrossEntropy(smoothing).losses(model, logits, batch)
    assert found.dtype == torch.float32
    for row, label, loss in zip(logits.double().tolist(), labels.tolist(), found.tolist()):
        normaliser = math.log(sum(map(math.exp, row)))
        target = [smoothing / 7 + (1 - smoothing) * (k == label) for k in range(7)]
        expected = -sum(q * (score - normaliser) for q, score in zip(target, row))
        assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("weights", [(), (1.0, 3.0)])
@pytest.mark.parametrize("scale", ["relative", "absolute"])
@pytest.mark.parametrize("channels", ["original", "standardized"])
def test_l2_equals_its_formula(
    channels: str, scale: str, weights: tuple[float, ...], masked: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    target, prediction = (torch.randn(3, 5, 2, generator=generator) for _ in range(2))
    mean, std = torch.tensor([2.0, -1.0]), torch.tensor([0.5, 4.0])
    model = FunctionSpaceTransformer(FunctionSpaceConfig(output_channels=2))
    model.standardize_outputs.set(mean, std)
    mask = torch.arange(5).expand(3, 5) < 4 if masked else None
    positions = torch.zeros(3, 5, 2)
    batch = Batch(Observations(positions, target[..., :1]), positions, target, mask)
    objective = RelativeL2(channels, scale, weights)

    real = slice(0, 4) if masked else slice(0, 5)
    ours, theirs = prediction[:, real].double(), target[:, real].double()
    if channels == "standardized":
        ours, theirs = (ours - mean) / std, (theirs - mean) / std
    weight = torch.tensor(weights or (1.0, 1.0))
    expected = (weight * (ours - theirs) ** 2).mean(dim=(1, 2))
    if scale == "relative":
        expected = expected / (weight * theirs**2).mean(dim=(1, 2))
    found = objective.losses(model, prediction, batch)
    torch.testing.assert_close(found, expected.float(), atol=0, rtol=1e-5)


def test_other_measures_have_other_names_and_old_recipes_the_old_one() -> None:
    assert from_json({}, RelativeL2, "test").names == ("relative_l2",)
    assert RelativeL2("standardized").names == ("standardized_relative_l2", "relative_l2")
    assert RelativeL2("standardized", "absolute").names == ("standardized_l2", "relative_l2")
    assert RelativeL2(weights=(2.0,)).names == ("weighted_relative_l2", "relative_l2")
    with pytest.raises(ValueError, match="weights must be at least 0 and not all 0"):
        RelativeL2(weights=(0.0, 0.0))


def test_validation_also_reports_the_measure_of_the_test() -> None:
    plain = wave_trainer(tiny_settings())
    other = wave_trainer(tiny_settings(objective=RelativeL2(scale="absolute")))
    plain.validate(), other.validate()
    assert list(other.state.errors) == ["l2", "relative_l2"]
    assert other.state.errors["relative_l2"] == plain.state.errors["relative_l2"]
    assert other.state.errors["l2"] != pytest.approx(plain.state.errors["relative_l2"], rel=1e-3)


def test_one_weight_for_each_channel_is_asked_for() -> None:
    settings = tiny_settings(objective=RelativeL2(weights=(1.0, 2.0)))
    with pytest.raises(TrainingError, match="each of the 1 target channels, got 2"):
        wave_trainer(settings)


def test_the_top_classes_are_counted_by_hand() -> None:
    scores = torch.tensor([[0.1, 0.9, 0.3, 0.2, 0.8, 0.7, 0.0]]).expand(7, -1)
    # In the order of their scores: 1, 4, 5, 2, 3, 0, 6.
    assert label_ranks(scores, torch.arange(7)).tolist() == [5, 0, 3, 4, 1, 2, 6]
    wrong = top_errors(scores, torch.arange(7))
    assert wrong.tolist() == [[1, 1], [0, 0], [1, 0], [1, 0], [1, 0], [1, 0], [1, 1]]


def test_with_fewer_than_five_classes_the_top_five_hold_the_right_one() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0]]).expand(3, -1)
    assert top_errors(scores, torch.arange(3)).tolist() == [[0, 0], [1, 0], [1, 0]]


def test_equal_scores_are_ordered_by_class() -> None:
    """A model that says nothing is right for one class of seven at first, for five at fifth."""
    wrong = top_errors(torch.zeros(7, 7), torch.arange(7))
    assert wrong[:, 0].tolist() == [0, 1, 1, 1, 1, 1, 1]
    assert wrong[:, 1].tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert label_ranks(torch.tensor([[1.0, 2.0, 2.0]]), torch.tensor([2])).tolist() == [1]


def test_a_score_that_is_not_finite_is_not_a_right_answer() -> None:
    scores = torch.tensor([[math.nan, 0.0], [0.0, math.inf], [1.0, 0.0]])
    wrong = top_errors(scores, torch.tensor([0, 1, 0]))
    assert wrong.isnan().tolist() == [[True, True], [True, True], [False, False]]


@pytest.mark.parametrize("value", [-0.1, 1.0, math.nan])
def test_impossible_smoothing_is_named(value: float) -> None:
    with pytest.raises(ValueError, match="^label_smoothing must"):
        CrossEntropy(label_smoothing=value)


@pytest.mark.parametrize("label", [-1, 7])
def test_a_label_out_of_range_is_an_error_before_training(label: int) -> None:
    bad = StripeSamples.draw(5, seed=0)
    bad.labels[3] = label
    good = StripeSamples.draw(5, seed=0)
    for training, validation in ((bad, good), (good, bad)):
        with pytest.raises(TrainingError, match=f"between 0 and 6, sample 3 has {label}"):
            make_trainer(image_settings(), None, training, validation)


def test_objective_model_and_data_must_be_of_one_kind() -> None:
    waves = WaveSamples.draw(5, seed=0)
    with pytest.raises(TrainingError, match="RelativeL2 needs model of kind Operator, got TinyCl"):
        make_trainer(image_settings(objective=RelativeL2()))
    with pytest.raises(TrainingError, match="RelativeL2 needs data of kind Samples, got Stripe"):
        make_trainer(tiny_settings(), TinyModel(TinyConfig()))
    with pytest.raises(TrainingError, match="needs data of kind LabelledRows, got Wave"):
        make_trainer(image_settings(), None, waves, waves)
    with pytest.raises(TrainingError, match="model's 2 classes are not the 7 of the data"):
        make_trainer(image_settings(), TinyClassifier(TinyClassifierConfig(("a", "b"))))
    swapped = TinyClassifier(TinyClassifierConfig(CLASSES[::-1]))
    with pytest.raises(TrainingError, match="the same, in order"):
        make_trainer(image_settings(), swapped)


@pytest.mark.parametrize("objective", [RelativeL2(), CrossEntropy(), CrossEntropy(0.25)])
def test_the_objective_survives_json(objective: RelativeL2 | CrossEntropy) -> None:
    importlib.import_module("fst.recipes.recipe")  # where unions learn their JSON
    settings = tiny_settings(objective=objective)
    stored = json.loads(json.dumps(to_json(settings)))
    assert stored["objective"]["kind"] == type(objective).__name__
    assert from_json(stored, TrainingSettings, "test") == settings
    del stored["objective"], stored["accumulate"]  # a recipe from before there were any
    assert from_json(stored, TrainingSettings, "test") == tiny_settings()


def test_the_loss_of_a_step_is_the_mean_over_the_batch() -> None:
    trainer = make_trainer(image_settings(objective=CrossEntropy(0.2)))
    twin = TinyClassifier(TinyClassifierConfig())
    twin.load_state_dict(trainer.model.state_dict())
    (batch,) = trainer.batches.at(1)
    settings = trainer.settings
    draws = twin.point_stream(settings.seed + 1, settings.seed + 2).draw()
    scores = twin.logits(batch.images, draws.to(torch.device("cpu"), torch.float32))
    expected = nn.CrossEntropyLoss(label_smoothing=0.2)(scores, batch.labels)
    trainer.update()
    trainer.read()
    assert trainer.state.pending[0][0] == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("make", [make_trainer, wave_trainer])
@pytest.mark.parametrize("accumulate", [2, 3])  # of seven: 3 + 4, and 2 + 2 + 3
def test_accumulated_gradients_are_those_of_one_batch(make: Any, accumulate: int) -> None:
    settings = image_settings if make is make_trainer else tiny_settings
    whole = make(settings(batch_size=7, clip=None, augment=True))
    parts = make(settings(batch_size=7, clip=None, augment=True, accumulate=accumulate))
    for _ in range(3):  # the second and third find the gradients of the one before
        expected, found = gradients(whole), gradients(parts)
        assert expected.keys() == found.keys()
        for name, gradient in expected.items():
            assert torch.allclose(found[name], gradient, rtol=2e-5, atol=1e-7), name
        parts.model.load_state_dict(whole.model.state_dict())
    for one, other in zip(whole.state.pending, parts.state.pending, strict=True):
        assert other == pytest.approx(one, rel=1e-5)


def test_the_gradient_is_clipped_once_all_parts_are_in() -> None:
    limit = 0.05
    whole, parts = (
        make_trainer(image_settings(batch_size=7, clip=limit, accumulate=number))
        for number in (1, 3)
    )
    expected, found = gradients(whole), gradients(parts)
    norm = torch.stack([gradient.norm() for gradient in found.values()]).norm()
    assert norm.item() == pytest.approx(limit, rel=1e-4)
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-7), name
    assert parts.state.pending[0][1] > limit  # the norm that was measured
    assert parts.state.pending[0] == pytest.approx(whole.state.pending[0], rel=1e-5)


def test_a_classifier_learns_and_reports_both_errors(tmp_path: Path) -> None:
    settings = image_settings(
        schedule=WarmupCosine(10, 150), learning_rate=0.03, batch_size=29, validate_every=50,
        checkpoint_every=150, log_every=50, accumulate=4, tensorboard=True,
    )  # fmt: skip
    summary = image_train(tmp_path / "run", settings)
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    checks = [line for line in lines if line["kind"] == "validation"]
    assert [line["step"] for line in checks] == [50, 100, 150]
    assert all(line["error"] == line["top1_error"] >= line["top5_error"] for line in checks)
    assert summary.validation_error is not None
    assert summary.validation_error < 0.3  # chance is 6/7
    selected = next(line for line in checks if line["step"] == summary.selected_step)
    assert summary.validation_error == selected["top1_error"] == selected["best"]
    assert summary.validation_errors == {
        name: selected[name] for name in ("top1_error", "top5_error")
    }
    written = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert written["validation_errors"] == summary.validation_errors
    assert _tensorboard_names(tmp_path / "run" / "tensorboard") >= {
        "validation/error", "validation/top1_error", "validation/top5_error",
    }  # fmt: skip
    # The best weights give the reported errors when images are counted one by one.
    model = TinyClassifier.from_pretrained(tmp_path / "run" / "best").eval()
    assert _wrong_answers(model, settings) / 17 == pytest.approx(summary.validation_error)


def _tensorboard_names(folder: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return set(events.Tags()["scalars"])


def _wrong_answers(model: TinyClassifier, settings: TrainingSettings) -> int:
    samples, wrong = StripeSamples.draw(17, seed=2), 0
    stream = model.point_stream(settings.validation_anchor_seed, settings.validation_sobol_seed)
    with torch.no_grad():
        for rows in torch.arange(17).split(settings.validation_batch):
            draws = stream.draw().to(torch.device("cpu"), torch.float32)
            batch = samples.batch(rows)
            wrong += int((model(batch.images, draws).argmax(dim=1) != batch.labels).sum())
    return wrong


def test_bfloat16_trains_a_classifier_with_float32_weights_loss_and_validation() -> None:
    exact, coarse = (make_trainer(image_settings(precision=p)) for p in ("fp32", "bf16"))
    coarse.model.load_state_dict(exact.model.state_dict())
    for trainer in (exact, coarse):
        trainer.validate()
        trainer.update()
        trainer.read()
    assert coarse.state.errors == exact.state.errors
    (exact_loss, _), (coarse_loss, _) = exact.state.pending[0], coarse.state.pending[0]
    assert 0 < abs(coarse_loss - exact_loss) < 0.02 * exact_loss
    assert all(p.dtype == torch.float32 for p in coarse.model.parameters())


def test_the_moving_average_of_a_classifier_is_what_is_validated() -> None:
    trainer = make_trainer(image_settings(average=0.5))
    mean = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    for step in range(1, 5):
        trainer.update()
        trainer.read()
        decay = min(0.5, (1 + step) / (10 + step))
        for name, parameter in trainer.model.named_parameters():
            mean[name] = decay * mean[name] + (1 - decay) * parameter.detach()
    for name, parameter in trainer.selected.named_parameters():
        assert torch.allclose(parameter, mean[name], atol=1e-6)
    with torch.no_grad():  # an average that always says the last class
        trainer.selected.head.weight.zero_()
        trainer.selected.head.bias.copy_(torch.arange(7.0))
    assert trainer.validate()
    labels = StripeSamples.draw(17, seed=2).labels
    assert trainer.state.errors == pytest.approx(
        {
            "top1_error": (labels != 6).double().mean().item(),
            "top5_error": (labels < 2).double().mean().item(),
        }
    )
    assert torch.equal(trainer.best_weights["head.bias"], torch.arange(7.0))


def test_a_validation_image_without_finite_scores_is_named() -> None:
    trainer = make_trainer(image_settings())
    trainer.validation.images[6] = math.nan
    trainer.update()
    with pytest.raises(NonFiniteError, match=r"validation error of step 1 .*: \[6\]"):
        trainer.validate()


def test_a_compiled_step_keeps_static_shapes_when_parts_are_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo.utils import counters

    # Graphs are traced as always, forward and backward, but run as they are: no C++ compiler.
    monkeypatch.setattr(
        loop, "TorchDynamoPlugin", partial(_with_backend, loop.TorchDynamoPlugin, "aot_eager")
    )
    torch._dynamo.reset()
    counters.clear()
    plain = make_trainer(image_settings(batch_size=6, accumulate=3))
    compiled = make_trainer(image_settings(batch_size=6, accumulate=3, compile=True))
    for _ in range(3):
        expected, found = gradients(plain), gradients(compiled)
        assert all(torch.allclose(found[n], g, rtol=1e-4, atol=1e-6) for n, g in expected.items())
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def _with_backend(plugin: Any, wanted: str, *, backend: str, mode: str, dynamic: bool) -> Any:
    assert (backend, dynamic) == ("inductor", False)
    return plugin(backend=wanted, mode=mode, dynamic=dynamic)
