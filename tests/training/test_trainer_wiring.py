"""What a recipe, its data and its model say to each other before and during training."""

from dataclasses import replace

import pytest
import torch

from data_examples import DOMAIN, point_samples
from fst.commands.train import prepare_model
from fst.data import PointData, write_points
from fst.data.samples import Batch, BurgersSamples, moments
from fst.metrics import relative_l2
from fst.operators import ConditionChannels, Operator
from fst.recipes import find
from fst.training.loop import build_accelerator
from fst.training.trainer import Trainer
from small import SMALL
from training_fakes import TinyConfig, TinyModel, WaveSamples, tiny_settings


def burgers(viscosities: tuple[float, ...]) -> BurgersSamples:
    """Two samples of each viscosity, whose mean and standard deviation are not the paper's."""
    count = 2 * len(viscosities)
    return BurgersSamples(
        grid=(3, 4),
        held=(torch.arange(3), torch.arange(4)),
        targets=5 + 2 * torch.randn(count, 3, 4),
        observed_positions=torch.rand(6, 2),
        observed_values=5 + 2 * torch.randn(count, 6),
        condition=torch.tensor(viscosities).repeat_interleave(2)[:, None],
    )


@pytest.mark.parametrize("name", ["fst", "perceiver-io"])
def test_the_papers_mean_and_standard_deviation_are_used(name):
    recipe = find(f"burgers-all/{name}")
    samples = burgers((0.001, 0.1, 4.0))
    model = prepare_model(recipe, samples)
    assert isinstance(model, Operator)
    for standardization in (model.standardize_values, model.standardize_outputs):
        assert standardization.mean.tolist() == pytest.approx([-0.012048])
        assert standardization.deviation.tolist() == pytest.approx([0.621534])
    # Without them they are those of the training targets.
    model = prepare_model(replace(recipe, standardization=None), samples)
    mean, std = moments(samples.targets.reshape(-1, 1))
    for standardization in (model.standardize_values, model.standardize_outputs):
        assert standardization.mean.tolist() == pytest.approx(mean.tolist())
        assert standardization.deviation.tolist() == pytest.approx(std.tolist())


@pytest.mark.parametrize("name", ["fst", "perceiver-io"])
def test_the_logarithm_of_the_viscosity_is_standardised(name):
    samples = burgers((0.001, 0.1, 4.0))
    model = prepare_model(find(f"burgers-all/{name}"), samples)
    (channels,) = [each for each in model.modules() if isinstance(each, ConditionChannels)]
    logarithms = samples.conditions().double().log()
    assert channels.standardize.mean.item() == pytest.approx(logarithms.mean().item())
    expected = logarithms.std(correction=0).item()
    assert channels.standardize.deviation.item() == pytest.approx(expected)
    standard = channels.standardize(channels.prepare(samples.conditions()))
    assert standard.mean().item() == pytest.approx(0, abs=1e-6)


def test_conditions_of_own_points_are_standardised(tmp_path):
    write_points(tmp_path / "mine.h5", point_samples(20), DOMAIN)
    recipe = PointData().fit(find("own/fst"), tmp_path / "mine.h5")
    training, _ = PointData().load(tmp_path / "mine.h5")
    model = prepare_model(replace(recipe, model=replace(recipe.model, **SMALL)), training.samples)
    (channels,) = [each for each in model.modules() if isinstance(each, ConditionChannels)]
    mean, std = moments(training.samples.conditions())
    assert channels.standardize.mean.tolist() == pytest.approx(mean.tolist())
    assert channels.standardize.deviation.tolist() == pytest.approx(std.tolist())


class Spoiled(WaveSamples):
    """Waves with one padded target, which is far off in the batches of a spoiled copy."""

    padding = 0.0

    def gather(self, rows, chosen, augmentation) -> Batch:
        batch = super().gather(rows, chosen, augmentation)
        targets = batch.targets.clone()
        targets[:, 2] = self.padding
        mask = torch.ones(targets.shape[:2], dtype=torch.bool)
        mask[:, 2] = False
        return replace(batch, targets=targets, mask=mask)


def trainer_with(padding: float) -> Trainer:
    torch.manual_seed(3)
    training, validation = Spoiled.draw(13, seed=1), Spoiled.draw(7, seed=2)
    training.padding = validation.padding = padding
    settings = tiny_settings()
    accelerator = build_accelerator(settings, torch.device("cpu"))
    found = Trainer(TinyModel(TinyConfig()), training, validation, settings, accelerator)
    # They were copied to the device, as new objects.
    found.batches.samples.padding = found.validation.padding = padding
    return found


def test_padded_targets_count_neither_in_the_loss_nor_in_the_validation():
    one, other = trainer_with(0.0), trainer_with(1e3)
    for trainer in (one, other):
        trainer.update()
        trainer.read()
        trainer.validate()
    assert one.state.pending == other.state.pending
    assert one.state.history == other.state.history
    # And what does count is there.
    batch = one.validation.batch(torch.arange(7))
    draws = one._draw(one.model.point_stream(1, 2))
    prediction = one.model.represent(batch.observations, draws)(batch.queries)
    assert not torch.equal(
        relative_l2(prediction, batch.targets, batch.mask), relative_l2(prediction, batch.targets)
    )


def test_of_equal_validation_errors_the_earlier_weights_are_kept():
    trainer = trainer_with(0.0)
    for step, error, better in ((4, 0.5, True), (8, 0.5, False), (12, 0.4, True), (16, 0.4, False)):
        trainer.state.step = step
        with torch.no_grad():
            trainer.model.read.weight.fill_(step)
        assert trainer._judge([error], []) is better
    assert trainer.state.best == (12, 0.4)
    assert set(trainer.best_weights["read.weight"].flatten().tolist()) == {12.0}
