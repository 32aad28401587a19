"""Tiny image runs through the command line: folder and tar in; train, resume, evaluate, predict.

The images are made here, three classes told apart by their colour. One of each set is grey, one is
cut short, and one tar ends early.
"""

import csv
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

import fst
from fst.classifiers import Classifier
from fst.cli import USER_ERROR, main
from fst.recipes import CHOOSE, find
from image_fakes import (
    CNN_VIT,
    COLOURS,
    DATA,
    FST,
    SIZES,
    TRAINING,
    VIT,
    encoded,
    image_files,
    picture,
    write_folder,
    write_tar,
)

CPU = ["--device", "cpu"]
COSINE = ["--training.schedule.warmup", "2"]
MODELS = {
    "imagenet/fst": [*FST, "--training.accumulate", "2"],
    "imagenet/vit": VIT,
    "imagenet/cnn-vit": CNN_VIT,
    "own/images-fst": [*FST, *COSINE],
}


def fst_command(*words) -> int:
    return main([str(word) for word in words])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("folder")
    write_folder(path / "train", image_files(8))
    write_folder(path / "val", image_files(3, start=50))
    return path


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    path = tmp_path_factory.mktemp("tars")
    write_tar(path / "train-0.tar", image_files(5))
    write_tar(path / "train-1.tar", {f"red/more{n}.png": d for n, d in enumerate(_reds())})
    write_tar(path / "val.tar", image_files(3, start=50))
    # As if its copy had been interrupted inside the last image.
    second = path / "train-1.tar"
    second.write_bytes(second.read_bytes()[: 512 + 300])
    return path


def _reds():
    return [data for name, data in image_files(2, start=90).items() if name.startswith("red/9")]


def read_metrics(run, kind):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        *((recipe, "folder") for recipe in MODELS),
        ("imagenet/fst", "tars"),
        ("own/images-fst", "tars"),
    ],
)
def test_an_image_task_from_start_to_page(recipe, layout, tmp_path, request, capsys):
    data, run = request.getfixturevalue(layout), tmp_path / "run"
    options = [*MODELS[recipe], *SIZES, *DATA, *TRAINING]
    assert fst_command("train", recipe, "--out", run, "--data", data, *CPU, *options) == 0
    stored = json.loads((run / "recipe.json").read_text())
    assert stored["model"]["class_names"] == ["blue", "green", "red"]
    assert (stored["paper_error"], stored["evaluation"]["paper_errors"]) == (None, [])
    described = json.loads((run / "run.json").read_text())
    assert any("cut.jpg" in name for name in described["skipped"])
    assert any("train-1.tar" in name for name in described["skipped"]) is (layout == "tars")
    assert "cut.jpg" in capsys.readouterr().out  # named where a user sees it
    assert len(read_metrics(run, "training")) == 6
    assert all(np.isfinite(line["loss"]) for line in read_metrics(run, "training"))
    for line in read_metrics(run, "validation"):
        assert line["error"] == line["top1_error"] >= line["top5_error"] == 0

    assert fst_command("evaluate", run, *CPU) == 0
    assert "Top-1" in capsys.readouterr().out
    rows = json.loads((run / "results" / "rows.json").read_text())
    assert [row["metric"] for row in rows] == ["top1_error", "top5_error", "top1_error"]
    assert rows[2]["model"] == "most frequent class"
    assert all(row["samples"] == len(row["errors"]) == 10 for row in rows)  # 9, and the grey one
    assert rows[0]["training"]["images_per_second"] > 0
    before = (run / "results" / "rows.json").read_bytes()
    assert fst_command("evaluate", run, *CPU) == 0  # reads the stored rows
    assert (run / "results" / "rows.json").read_bytes() == before

    answer, images = tmp_path / "answer.csv", data / ("val" if layout == "folder" else "val.tar")
    assert fst_command("predict", run, "--images", images, "--out", answer, *CPU) == 0
    assert "cut.jpg" in capsys.readouterr().err
    with answer.open(newline="") as file:
        found = list(csv.DictReader(file))
    # The guesses are those that were scored.
    wrong = [float(line["class_1"] != line["file"].split("/")[0]) for line in found]
    assert wrong == rows[0]["errors"]

    assert fst_command("report", run, "--out", tmp_path / "page") == 0
    name = "run-anchors.png" if recipe.endswith("fst") else "run-guesses.png"
    assert (tmp_path / "page" / "figures" / name).is_file()
    model = Classifier.from_pretrained(run / "best")
    assert model.class_names == ("blue", "green", "red")
    # A finished run does not start again.
    assert fst_command("train", "--resume", run, *CPU) == USER_ERROR


def test_a_stopped_run_resumes_bit_for_bit(folder, tmp_path):
    run = tmp_path / "run"
    options = [*FST, *SIZES, *DATA, *TRAINING]
    assert fst_command("train", "imagenet/fst", "--out", run, "--data", folder, *CPU, *options) == 0
    whole = [line["loss"] for line in read_metrics(run, "training")]
    weights = fst.base.Model.from_pretrained(run / "best").state_dict()
    # As if it had been killed after the first checkpoint.
    (run / "summary.json").unlink()
    last = sorted((run / "checkpoints").iterdir())[-1]
    for file in last.iterdir():
        file.unlink()
    last.rmdir()
    assert fst_command("evaluate", run, *CPU) == USER_ERROR  # scored once: not yet
    # Other images in the place of its own are noticed.
    stranger = folder / "train" / "red" / "stranger.png"
    stranger.write_bytes((folder / "train" / "red" / "00.png").read_bytes())
    assert fst_command("train", "--resume", run, *CPU) == USER_ERROR
    stranger.unlink()
    assert fst_command("train", "--resume", run, *CPU) == 0
    assert [line["loss"] for line in read_metrics(run, "training")] == whole
    again = fst.base.Model.from_pretrained(run / "best").state_dict()
    assert all(bool((again[name] == tensor).all()) for name, tensor in weights.items())


def test_images_that_do_not_fit_are_streamed(tars, tmp_path, caplog):
    run = tmp_path / "run"
    options = [*VIT, *SIZES, *DATA[:-1], "streamed", "--data.workers", "1", *TRAINING]
    options += ["--training.no-augment"]  # which needs a library that may be absent
    assert fst_command("train", "imagenet/vit", "--out", run, "--data", tars, *CPU, *options) == 0
    assert "cut.jpg" in caplog.text  # met when its turn comes, and replaced
    assert len(read_metrics(run, "training")) == 6
    assert fst_command("evaluate", run, *CPU) == 0
    rows = json.loads((run / "results" / "rows.json").read_text())
    assert rows[0]["samples"] == 10  # the cut one is not scored


def test_colours_are_learned(folder, tmp_path):
    """The whole chain learns: three colours in a few steps, on images held out and on the test."""
    run = tmp_path / "run"
    schedule = "--training.schedule.maximum 40 --training.schedule.warmup 4".split()
    options = [
        *VIT, *SIZES, *DATA, *TRAINING, *schedule, "--training.validate-every", "20",
        "--training.batch-size", "12", "--training.learning-rate", "0.01",
        "--training.checkpoint-every", "40", "--data.no-three-augment", "--data.erasing", "0",
        "--data.held-out", "6",
    ]  # fmt: skip
    assert (
        fst_command("train", "own/images-vit", "--out", run, "--data", folder, *CPU, *options) == 0
    )
    assert fst_command("evaluate", run, *CPU) == 0
    rows = json.loads((run / "results" / "rows.json").read_text())
    # Nine colourful images and a grey one, which nobody can tell.
    assert rows[0]["error"] <= 0.2
    losses = [line["loss"] for line in read_metrics(run, "training")]
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])


def test_only_what_was_asked_for_is_said_to_be(folder):
    choice = CHOOSE["own-images"](find("own/images-vit"), folder, torch.device("cpu"))
    shown = choice.recipe.data.shown(choice.recipe)
    assert choice.explain(shown) == choice.reasons
    plain = replace(shown.training, augment=False)
    other = replace(shown, model=replace(shown.model, width=32), training=plain)
    asked = {"model": "as asked", "regularisation": "as asked"}
    assert choice.explain(other) == choice.reasons | asked


def test_one_image_of_each_class_can_be_learned(tmp_path, capsys):
    for split in ("train", "val"):
        files = {f"{name}/1.png": encoded(picture(name, 1)) for name in COLOURS}
        write_folder(tmp_path / "data" / split, files)
    words = ["own/images-vit", "--data", tmp_path / "data", "--out", tmp_path / "run", *CPU]
    assert fst_command("train", *words, "--minutes", "nan") == USER_ERROR
    assert "images" not in capsys.readouterr().out  # which take long to read
    assert fst_command("train", *words) == USER_ERROR
    assert "--data.held-out 0 selects the weights by the val images" in capsys.readouterr().err
    words += [*VIT, *SIZES, *DATA, *TRAINING, *COSINE]
    assert fst_command("train", *words, "--data.held-out", "0") == 0


def test_weights_for_other_classes_are_refused_before_images_are_read(folder, tmp_path, capsys):
    run, two = tmp_path / "run", tmp_path / "two"
    words = [*CPU, *VIT, *SIZES, *DATA, *TRAINING, *COSINE]
    assert fst_command("train", "own/images-vit", "--data", folder, "--out", run, *words) == 0
    shutil.copytree(folder, two)
    for split in ("train", "val"):
        shutil.rmtree(two / split / min(COLOURS))
    capsys.readouterr()
    words = ["--data", two, "--out", tmp_path / "b", "--from", run, *words]
    assert fst_command("train", "own/images-vit", *words) == USER_ERROR
    said = capsys.readouterr()
    assert f"{run}: its classifier has {len(COLOURS)} classes, the data have" in said.err
    assert "images of" not in said.out


def test_training_goes_on_with_its_images_after_a_test_on_others(folder, tmp_path, capsys):
    run, alone = tmp_path / "run", tmp_path / "alone"
    shutil.copytree(folder / "val", alone / "val")
    words = ["--out", run, "--data", folder, *CPU, *VIT, *SIZES, *DATA, *TRAINING]
    assert fst_command("train", "imagenet/vit", *words, "--data.held-out", "3") == 0
    (run / "summary.json").unlink()
    assert fst_command("evaluate", run, "--data", alone, "--unfinished", *CPU) == 0
    assert fst_command("train", "--resume", run, *CPU) == 0


def test_data_that_moved_are_named_once(folder, tmp_path, capsys):
    data, run = tmp_path / "here", tmp_path / "run"
    shutil.copytree(folder, data)
    options = [*VIT, *SIZES, *DATA, *TRAINING]
    assert fst_command("train", "imagenet/vit", "--out", run, "--data", data, *CPU, *options) == 0
    (run / "summary.json").unlink()
    moved = data.rename(tmp_path / "there")
    capsys.readouterr()
    assert fst_command("train", "--resume", run, *CPU) == USER_ERROR
    assert "are no longer there; say with --data where they are now" in capsys.readouterr().err
    assert fst_command("train", "--resume", run, "--data", moved, *CPU) == 0
    assert fst_command("evaluate", run, *CPU) == 0  # which was told by resuming
    moved.rename(data)
    assert fst_command("evaluate", run, "--again", *CPU) == USER_ERROR
    assert "say with --data where they are now" in capsys.readouterr().err
