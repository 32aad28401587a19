"""Classifiers are scored by top-1 and top-5 on test images, once, in float32."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from evaluation_fakes import COST, burgers_test, made_row, waves
from fst.base import build_model as build
from fst.classifiers import Classifier
from fst.data import ImageData
from fst.data.image_decoding import View
from fst.data.image_samples import ResidentImages, StreamedImages
from fst.data.images import find_split
from fst.data.source import TestSplit, ValidationSplit
from fst.evaluation import report as notes
from fst.evaluation.classification import (
    ClassificationSettings,
    choose_images,
    evaluate,
    measure,
    sample_image_fields,
)
from fst.evaluation.report import report
from fst.evaluation.rows import (
    RESULTS,
    EvaluationError,
    Origin,
    Row,
    read_origin,
    read_rows,
    score_once,
)
from fst.evaluation.tables import cost_table, error_table, grid_table, group_table
from fst.evaluation.trivial import TrainingFacts
from fst.evaluation_points import PointDraws
from fst.vision import ImageClassifierConfig
from image_fakes import image_files, write_folder

CLASSES = tuple("abcdefgh")
SIZE = (8, 8)
ORIGIN = Origin("run-one", "imagenet/fst", "imagenet", "FST", 7, "abc", COST)
SCORED = replace(ORIGIN, protocol="p")
SETTINGS = ClassificationSettings(batch_size=4, pictures=3)


class StoredScores(Classifier):
    """A classifier that knows the scores of each image by its first pixel."""

    config_type = Origin  # it is never saved

    def __init__(self, scores: Tensor, class_names: tuple[str, ...] = CLASSES) -> None:
        super().__init__(SIZE, class_names)
        self.scores = nn.Parameter(scores)
        self.calls: list[dict[str, Any]] = []

    def logits(self, images: Tensor, draws: PointDraws | None = None) -> Tensor:
        which = (images[:, 0, 0, 0] * 255).round().long()
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        self.calls.append(
            {
                "images": len(images),
                "inference": torch.is_inference_mode_enabled(),
                "training": self.training,
                "product": product.dtype,
            }
        )
        return self.scores[which]


def some_images(count: int = 11) -> ResidentImages:
    pixels = torch.randint(0, 255, (count, 3, *SIZE), dtype=torch.uint8)
    pixels[:, 0, 0, 0] = torch.arange(count)
    labels = torch.arange(count) % len(CLASSES)
    names = tuple(f"{CLASSES[label]}/{row}.png" for row, label in enumerate(labels.tolist()))
    return ResidentImages(pixels, labels, CLASSES, names)


def test_rows_are_those_of_the_definition():
    images, scores = some_images(), torch.randn(11, len(CLASSES))
    model = StoredScores(scores)
    with torch.autocast("cpu", torch.bfloat16):
        rows = evaluate(model, TestSplit(images), SETTINGS, SCORED)
    order = np.argsort(-scores.numpy(), axis=1)
    for row, count in zip(rows, (1, 5), strict=True):
        wrong = [float(label not in order[i, :count]) for i, label in enumerate(images.labels)]
        assert list(row.errors) == wrong
        assert row.error == pytest.approx(np.mean(wrong))
        assert (row.samples, row.grid, row.neighbors) == (11, None, None)
        assert sum(group.samples for group in row.groups) == 11
        by_class = {group.name: group.error for group in row.groups}
        assert by_class["a"] == pytest.approx((wrong[0] + wrong[8]) / 2)
    assert [row.metric for row in rows] == ["top1_error", "top5_error"]
    assert [call["images"] for call in model.calls] == [4, 4, 3]  # in order, the last one short
    assert {call["inference"] for call in model.calls} == {True}
    assert {call["training"] for call in model.calls} == {False}
    assert {call["product"] for call in model.calls} == {torch.float32}
    assert model.training


def test_few_classes_make_the_second_error_zero():
    images = some_images(4)
    images = ResidentImages(images.pixels, images.labels % 2, CLASSES[:2], images.names)
    rows = evaluate(
        StoredScores(torch.randn(4, 2), CLASSES[:2]), TestSplit(images), SETTINGS, ORIGIN
    )
    assert rows[1].error == 0


def test_only_a_test_split_of_these_classes_is_scored():
    model = StoredScores(torch.randn(11, len(CLASSES)))
    with pytest.raises(TypeError, match="test must be a TestSplit, got ValidationSplit"):
        evaluate(model, ValidationSplit(some_images()), SETTINGS, ORIGIN)
    with pytest.raises(EvaluationError, match="tested on images"):
        evaluate(model, burgers_test(waves(2)), SETTINGS, ORIGIN)
    other = some_images()
    other.class_names = ("x", *CLASSES[1:])
    with pytest.raises(EvaluationError, match=r"8 classes \(a, b, c, ...\).*8 \(x, b, c, ...\)"):
        evaluate(model, TestSplit(other), SETTINGS, ORIGIN)


def test_scores_that_are_not_numbers_name_the_image():
    scores = torch.randn(11, len(CLASSES))
    scores[6, 2] = torch.nan
    with pytest.raises(EvaluationError, match=r"1 test images are NaN or infinite.*g/6.png"):
        evaluate(StoredScores(scores), TestSplit(some_images()), SETTINGS, ORIGIN)


def test_streamed_images_are_the_resident_ones(tmp_path):
    write_folder(tmp_path / "val", image_files(3))
    images, view = find_split(tmp_path, "val"), View.evaluation(SIZE, 9)
    streamed = StreamedImages(images, view, workers=0)
    batches = list(streamed.in_order(torch.arange(len(streamed)).split(4)))
    assert [len(batch.labels) for batch in batches] == [4, 4, 3]
    whole = streamed.batch(torch.arange(len(streamed)))
    torch.testing.assert_close(torch.cat([batch.images for batch in batches]), whole.images)
    config = ImageClassifierConfig(
        *(images.class_names, SIZE, 4, 4, 8, 2, 2, "linear", 2, 3, 8, 2, 1, 1, 4)
    )
    model = build(config)
    once, again = (measure(model, streamed, replace(SETTINGS, batch_size=b)) for b in (4, 100))
    torch.testing.assert_close(once, again)
    # The image that is cut short is known by now; it is not scored, nor is its replacement.
    rows = evaluate(model, TestSplit(streamed), SETTINGS, ORIGIN)
    resident = [row for row, name in enumerate(streamed.names) if "cut" not in name]
    assert len(resident) == len(streamed) - 1
    assert list(rows[0].errors) == once[resident, 0].tolist()


def test_settings_are_checked():
    for change, message in (
        ({"batch_size": 0}, "batch_size"),
        ({"pictures": -1}, "pictures"),
        ({"paper_errors": (0.3,)}, "top-1 and the top-5"),
    ):
        with pytest.raises(ValueError, match=message):
            ClassificationSettings(**change)


def test_the_fingerprint_is_of_weights_and_protocol():
    data, model = ImageData(image_size=(8, 8), resize=9), ImageClassifierConfig(("cat", "dog"))
    same = SETTINGS.fingerprint(b"weights", data, model)
    shown = replace(SETTINGS, pictures=9, paper_errors=(0.1, 0.2))
    assert shown.fingerprint(b"weights", data, model) == same
    others = [
        SETTINGS.fingerprint(b"other", data, model),
        SETTINGS.fingerprint(b"weights", replace(data, resize=10), model),
        replace(SETTINGS, batch_size=5).fingerprint(b"weights", data, model),
    ]
    assert len({same, *others}) == 4


def test_rows_survive_the_disk_and_are_computed_once(tmp_path):
    scores, calls = torch.randn(11, len(CLASSES)), []

    def compute():
        calls.append(1)
        rows = evaluate(StoredScores(scores), TestSplit(some_images()), SETTINGS, SCORED)
        return rows, None

    first = score_once(tmp_path, "p", compute)
    assert score_once(tmp_path, "p", compute) == first == read_rows(tmp_path / "rows.json")
    assert len(calls) == 1
    with pytest.raises(EvaluationError, match="scored once"):
        score_once(tmp_path, "q", compute)


def image_row(error: float, metric: str = "top1_error", **changes: Any) -> Row:
    errors = tuple(float(i < round(error * 1000)) for i in range(1000))
    return replace(made_row(errors=errors, grid=None), metric=metric, **changes)


def test_accuracies_stand_beside_the_papers():
    rows = [
        image_row(0.3, paper_error=0.3047, recipe="imagenet/fst"),
        image_row(0.1, "top5_error", paper_error=0.10958, recipe="imagenet/fst"),
    ]
    table = error_table(rows)
    assert table.lines[0] == ("FST", "Top-1", "1,000", "70.000", "69.530", "+0.470")
    assert table.lines[1][-3:] == ("90.000", "89.042", "+0.958")
    plain = error_table([replace(row, paper_error=None) for row in rows])
    assert plain.header == ("Model", "Accuracy", "Images", "Ours (%)")
    (line,) = grid_table(rows).lines
    assert line[-2:] == ("70.000 (69.530)", "90.000 (89.042)")


def test_a_table_by_class():
    images, scores = some_images(), torch.zeros(11, len(CLASSES))
    scores[:, 1] = 1  # everything is a "b"
    rows = evaluate(StoredScores(scores), TestSplit(images), SETTINGS, ORIGIN)
    lines = {line[0]: line[1:] for line in group_table(rows).lines}
    assert lines["b"] == ("2", "100.000")
    assert lines["a"] == ("2", "0.000")
    assert group_table([made_row()]) is None


def test_the_most_frequent_class_stands_beside_a_model():
    images, model = some_images(), StoredScores(torch.randn(11, len(CLASSES)))
    facts = TrainingFacts(frequent_class="b")
    rows, _ = SETTINGS.score(model, TestSplit(images), SCORED, facts, None)
    trivial = rows[-1]
    assert (trivial.model, trivial.trivial, trivial.metric) == (
        *("most frequent class", True), "top1_error"
    )  # fmt: skip
    assert trivial.error == pytest.approx(9 / 11)
    assert {group.name: group.error for group in trivial.groups}["b"] == 0


def test_cost_in_images(tmp_path):
    summary = {"steps": 10, "seconds": 5.0, "steps_per_second": 4.0}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    bare = Origin("run-one", "imagenet/fst", "imagenet", "FST")
    origin = read_origin(tmp_path, bare, images=256)
    assert origin.training.images_per_second == 1024
    assert read_origin(tmp_path, bare).training.images_per_second is None
    table = cost_table([image_row(0.3, training=origin.training)])
    assert dict(zip(table.header, table.lines[0], strict=True))["Images/s"] == "1,024"
    assert "Images/s" not in cost_table([made_row()]).header


def test_pictures_are_of_spread_classes_and_chosen_without_a_model():
    labels = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    assert choose_images(labels, 3) == [0, 4, 8]
    assert choose_images(labels, 5) == [0, 2, 4, 6, 8]
    assert choose_images(labels, 7) == [0, 1, 2, 3, 4, 6, 8]
    assert choose_images(labels, 99) == list(range(10))
    assert choose_images(labels, 0) == []


def test_fields_are_what_the_model_saw_and_said(tmp_path):
    images = some_images()
    config = ImageClassifierConfig(CLASSES, SIZE, 4, 4, 8, 2, 2, "linear", 2, 3, 8, 2, 1, 1, 4)
    model = build(config)
    fields = sample_image_fields(model, TestSplit(images), SETTINGS, ORIGIN)
    rows = torch.from_numpy(fields.rows)
    np.testing.assert_array_equal(fields.pictures, images.pixels[rows].permute(0, 2, 3, 1))
    assert fields.names.tolist() == [images.names[row] for row in rows]
    with torch.no_grad():
        batch = images.pixels[rows].float() / 255
        probabilities, guesses = model(batch).softmax(-1).max(-1)
        field = model.represent(batch)
    assert fields.guesses.tolist() == [CLASSES[guess] for guess in guesses]
    np.testing.assert_allclose(fields.probabilities, probabilities, rtol=1e-5)
    np.testing.assert_allclose(fields.anchors, field.anchors.positions, rtol=1e-5, atol=1e-6)
    assert fields.length_scales.shape == (3, 6, 2)
    np.testing.assert_allclose(fields.length_scales, 0.03, rtol=1e-4)  # as they begin
    plain = sample_image_fields(
        StoredScores(torch.randn(11, 8)), TestSplit(images), SETTINGS, ORIGIN
    )
    assert plain.anchors.shape == (3, 0, 2)
    none = replace(SETTINGS, pictures=0)
    assert sample_image_fields(model, TestSplit(images), none, ORIGIN) is None


def test_a_page_of_classifiers(tmp_path):
    images, model = some_images(), StoredScores(torch.randn(11, len(CLASSES)))
    run = tmp_path / "first"

    def compute():
        rows = evaluate(model, TestSplit(images), SETTINGS, SCORED)
        return rows, sample_image_fields(model, TestSplit(images), SETTINGS, ORIGIN)

    rows = score_once(run / RESULTS, "p", compute)
    lines = [
        {"kind": "training", "step": 1, "loss": 2.0},
        {"kind": "validation", "step": 1, "error": 0.5, "best": 0.5, "top5_error": 0.1},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = report([run], tmp_path / "page")
    text = (tmp_path / "page" / "report.md").read_text()
    assert f"{100 * (1 - rows[0].error):.3f}" in text
    assert "relative L2" not in text
    assert notes.ACCURACY in text
    assert notes.IMAGES in text
    assert notes.ERRORS not in text
    assert notes.GENERATED not in text
    made = {path.name for path in (tmp_path / "page" / "figures").iterdir()}
    assert made == {"first-guesses.png", "training-images.png"}
    assert page.read_text().count("data:image/png") == 2
