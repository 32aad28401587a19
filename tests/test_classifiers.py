"""What every classifier shares: its check of images, its standardisation, saving and loading."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import fst
from fst.classifiers import Classifier
from fst.pretrained import PretrainedError
from training_images import CLASSES, SIZE, TinyClassifier, TinyClassifierConfig, tiny_draws


@pytest.fixture
def model() -> TinyClassifier:
    return TinyClassifier(TinyClassifierConfig())


def images(count: int = 2) -> Tensor:
    return torch.rand(count, 3, *SIZE)


def test_a_good_batch_gives_one_score_for_each_class(model: TinyClassifier) -> None:
    draws = tiny_draws(model)
    scores = model(images(5), draws)
    assert scores.shape == (5, len(CLASSES))
    assert model(images(0), draws).shape == (0, len(CLASSES))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x: x[0], ValueError, r"shape \(batch, 3, 4, 6\), got \(3, 4, 6\)"),
        (lambda x: x[:, :1], ValueError, r"got \(2, 1, 4, 6\)"),
        (lambda x: x.permute(0, 2, 3, 1), ValueError, r"got \(2, 4, 6, 3\)"),
        (
            lambda x: (255 * x).to(torch.uint8),
            TypeError,
            "like the model, got torch.uint8",
        ),
        (lambda x: x.double(), TypeError, "torch.float32 like the model, got torch.float64"),
        (lambda x: x.to("meta"), ValueError, "images must be on cpu like the model, got meta"),
        (lambda x: x.index_fill(3, torch.tensor(2), torch.nan), ValueError, "must be finite"),
        (lambda x: x.index_fill(3, torch.tensor(2), torch.inf), ValueError, "must be finite"),
        (lambda x: 255 * x, ValueError, "between 0 and 1, got"),
    ],
)
def test_what_does_not_fit_is_named(model, change, error, message) -> None:
    with pytest.raises(error, match=message):
        model(change(images()), tiny_draws(model))


def test_images_are_standardised_by_the_model(model: TinyClassifier) -> None:
    grey = torch.full((1, 3, *SIZE), 0.5)
    expected = [(0.5 - 0.485) / 0.229, (0.5 - 0.456) / 0.224, (0.5 - 0.406) / 0.225]
    found = model.standardize(grey)
    assert torch.allclose(found, torch.tensor(expected).view(1, 3, 1, 1).expand_as(found))


def test_the_statistics_and_classes_travel_with_the_weights(
    model: TinyClassifier, tmp_path: Path
) -> None:
    model.standardize.mean.fill_(0.25)
    model.save_pretrained(tmp_path)
    loaded = Classifier.from_pretrained(tmp_path)
    assert isinstance(loaded, TinyClassifier)
    assert loaded.class_names == CLASSES
    assert torch.equal(loaded.standardize.mean, torch.full((3, 1, 1), 0.25))
    draws, batch = tiny_draws(model), images()
    assert torch.equal(loaded(batch, draws), model(batch, draws))
    with pytest.raises(PretrainedError, match="holds a 'TinyClassifier', expected one of"):
        fst.FunctionSpaceTransformer.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("names", "message"), [(("one",), "two names or more"), (("a", "b", "a"), "got 'a' 2 times")]
)
def test_impossible_classes_are_refused(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TinyClassifier(TinyClassifierConfig(class_names=names))
