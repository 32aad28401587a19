"""Batches that are made ahead of time are still functions of the seed and the step alone."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fst.data.image_decoding import View
from fst.data.image_samples import StreamedImages
from fst.data.images import LabelledImages, find_images
from fst.data.images import label as label_images
from fst.data.source import TrainingSplit, ValidationSplit
from fst.training import RunFolder, TrainingError, train
from fst.training.schedules import WarmupCosine
from fst.training.trainer import Batches, Trainer
from training_images import (
    CLASSES,
    SIZE,
    StreamedStripes,
    StripeSamples,
    TinyClassifier,
    TinyClassifierConfig,
    image_settings,
    image_train,
)


def test_a_stream_is_planned_by_step() -> None:
    """Streamed batches of any process, step and part hold what the plan says, read ahead or not."""
    settings = image_settings(batch_size=7, accumulate=2)
    streamed = StreamedStripes.draw(29, seed=1)
    walked, jumped = Batches(streamed, settings), Batches(streamed, settings)
    for step in range(1, 10):
        parts = list(walked.at(step))
    assert [len(part.labels) for part in parts] == [3, 4]
    for one, other in zip(parts, jumped.at(9), strict=True):
        assert torch.equal(one.images, other.images)
    labels = streamed.labels[walked.rows(9)]
    assert torch.equal(torch.cat([part.labels for part in parts]), labels)
    again = list(walked.at(9))  # going back starts a new stream
    assert torch.equal(again[0].images, parts[0].images)


def test_a_streamed_run_resumes_where_it_was(tmp_path: Path) -> None:
    settings = image_settings(accumulate=2, checkpoint_every=6, keep=9)
    image_train(tmp_path / "whole", settings, kind=StreamedStripes)
    whole = _losses(tmp_path / "whole")
    assert len(whole) == 24 + 3
    for folder in sorted((tmp_path / "whole" / "checkpoints").iterdir())[2:]:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    image_train(tmp_path / "whole", settings, resume=True, kind=StreamedStripes)
    assert _losses(tmp_path / "whole") == whole


def _losses(path: Path) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line.get("loss"), line.get("top5_error")) for line in lines]


class Brighter:
    """A stand-in for timm's transforms: it draws from PyTorch's own generator."""

    def __call__(self, image: Image.Image) -> Tensor:
        pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1) / 255
        return pixels[:, : SIZE[0], : SIZE[1]] * (0.5 + torch.rand(()) / 2)


def picture_files(folder: Path, count: int) -> LabelledImages:
    """One small PNG file after the other, in the folders of their classes."""
    samples = StripeSamples.draw(count, seed=4)
    for number, (pixels, label) in enumerate(zip(samples.images, samples.labels.tolist())):
        (folder / CLASSES[label]).mkdir(parents=True, exist_ok=True)
        colours = (255 * pixels).byte().permute(1, 2, 0).contiguous().numpy()
        Image.fromarray(colours).save(folder / CLASSES[label] / f"{number}.png")
    return label_images(find_images(folder))


@pytest.mark.parametrize("workers", [0, 2])
def test_files_streamed_from_disk_are_planned_by_step(
    tmp_path: Path, workers: int, request: pytest.FixtureRequest
) -> None:
    """Whoever decodes: every process, part and resumed run gets the images of one process."""
    found = picture_files(tmp_path, 40)
    assert found.class_names == CLASSES
    streamed = StreamedImages(found, View.evaluation(SIZE, 4), Brighter(), workers=workers)
    settings = image_settings(batch_size=7)
    split = image_settings(batch_size=7, accumulate=2)
    whole = Batches(streamed, settings)
    shares = [Batches(streamed, split, process, 2) for process in (0, 1)]
    unchanged = Batches(streamed, image_settings(batch_size=7, augment=False))
    for each in (whole, *shares, unchanged):
        request.addfinalizer(each.close)
    for step in (5, 6):  # as resumed after step 4, and then the next
        (expected,) = whole.at(step)
        parts = [part for share in shares for part in share.at(step)]
        assert [len(part.labels) for part in parts] == [1, 2, 2, 2]
        assert torch.equal(torch.cat([part.images for part in parts]), expected.images)
        assert torch.equal(expected.labels, streamed.labels[whole.rows(step)])
    (plain,) = unchanged.at(6)
    assert torch.equal(plain.labels, expected.labels)
    assert not torch.equal(plain.images, expected.images)
    rows = torch.arange(40).split(16)
    for part, batch in zip(rows, streamed.in_order(rows), strict=True):
        assert torch.equal(batch.images, streamed.batch(part).images)


def test_a_run_on_streamed_files_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, which shows when a stream draws from the generator of the model."""
    found, view = picture_files(tmp_path / "files", 40), View.evaluation(SIZE, 4)
    settings = image_settings(schedule=WarmupCosine(2, 9), checkpoint_every=4, validate_every=3)

    def run(folder: RunFolder) -> None:
        training = StreamedImages(found, view, Brighter(), workers=1)
        validation = StreamedImages(found, view, workers=1)
        torch.manual_seed(3)
        model = TinyClassifier(TinyClassifierConfig(dropout=0.3))
        train(model, TrainingSplit(training), ValidationSplit(validation), settings, folder)

    before = set(multiprocessing.active_children())
    run(RunFolder.create(tmp_path / "whole", {"name": "tiny"}))
    assert set(multiprocessing.active_children()) <= before  # workers end with the run
    read = Trainer.read

    def failing(trainer: Trainer) -> None:
        read(trainer)
        if trainer.state.step == 5:
            raise TrainingError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "read", failing)
        with pytest.raises(TrainingError, match="stopped"):
            run(RunFolder.create(tmp_path / "stopped", {"name": "tiny"}))
    assert set(multiprocessing.active_children()) <= before
    run(RunFolder.resume(tmp_path / "stopped"))
    assert len(_losses(tmp_path / "whole")) == 9 + 3
    assert _losses(tmp_path / "stopped") == _losses(tmp_path / "whole")
