"""`fst predict --images`: a line of classes and probabilities for every image that can be read."""

import csv
import json
import tarfile

import numpy as np
import pytest
import torch

from fst.base import build_model as build
from fst.baselines import ViTConfig
from fst.cli import USER_ERROR, main
from fst.commands.predict import predict_images
from fst.data.files import DataError
from fst.data.image_decoding import View, decoding
from image_fakes import encoded, image_files, picture, write_folder, write_tar
from small import small_config, small_model

CLASSES = tuple(f"kind, {number}" for number in range(7))  # with a comma, as csv must quote


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    model = build(ViTConfig(CLASSES, (16, 16), 8, 8, 1, 2, 8))
    model.save_pretrained(folder / "seven")
    build(ViTConfig(CLASSES[:2], (16, 16), 8, 8, 1, 2, 8)).save_pretrained(folder / "two")
    small_model(small_config()).float().save_pretrained(folder / "operator")
    # A run folder: its recipe says how images are cut.
    model.save_pretrained(folder / "run" / "best")
    (folder / "run" / "recipe.json").write_text(json.dumps({"data": {"resize": 16}}))
    return folder


def lines(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def expected(folder, data, resize):
    """Probabilities by the model's own call on the image as a test would cut it."""
    from fst.classifiers import Classifier

    model = Classifier.from_pretrained(folder)
    with decoding(data) as image:
        pixels = View.evaluation((16, 16), resize)(image)
    with torch.no_grad():
        return model(torch.from_numpy(pixels)[None].float() / 255).softmax(-1)[0].numpy()


def test_a_folder_becomes_a_table(saved, tmp_path, capsys):
    files = image_files(2)
    write_folder(tmp_path / "images", files)
    out = tmp_path / "new" / "answer.csv"
    words = ["predict", saved / "seven", "--images", tmp_path / "images", "--out", out]
    assert main([*map(str, words), "--device", "cpu"]) == 0
    shown, err = capsys.readouterr()
    assert "skipped images/red/cut.jpg" in err
    assert "7 images (1 skipped)" in shown
    found = lines(out)
    numbers = range(1, 6)
    columns = [f"class_{n}" for n in numbers] + [f"probability_{n}" for n in numbers]
    assert list(found[0]) == ["file", *columns]
    assert [line["file"] for line in found] == sorted(name for name in files if "cut" not in name)
    for line in found:
        truth = expected(saved / "seven", files[line["file"]], resize=18)  # 16 · 256 / 224
        order = np.argsort(-truth)[:5]
        assert [line[f"class_{n}"] for n in numbers] == [CLASSES[k] for k in order]
        given = [float(line[f"probability_{n}"]) for n in numbers]
        np.testing.assert_allclose(given, truth[order], atol=2e-6)


def test_a_run_cuts_images_as_it_was_tested(saved, tmp_path):
    data = encoded(picture("red", 3, (40, 24)))
    write_folder(tmp_path, {"one.png": data})
    guesses = predict_images(saved / "run", tmp_path / "one.png", tmp_path / "a.csv", device="cpu")
    assert guesses.files == ("one.png",)
    truth = expected(saved / "run" / "best", data, resize=16)
    np.testing.assert_allclose(guesses.probabilities[0], np.sort(truth)[::-1][:5], rtol=1e-4)
    assert not np.allclose(truth, expected(saved / "run" / "best", data, resize=18), rtol=1e-4)


def test_a_tar_and_few_classes(saved, tmp_path):
    files = image_files(1)
    write_tar(tmp_path / "images.tar", files)
    predict_images(saved / "two", tmp_path / "images.tar", tmp_path / "a.csv", device="cpu")
    found = lines(tmp_path / "a.csv")
    assert list(found[0]) == ["file", "class_1", "class_2", "probability_1", "probability_2"]
    assert len(found) == len(files) - 1
    for line in found:
        assert float(line["probability_1"]) + float(line["probability_2"]) == pytest.approx(
            1, abs=1e-5
        )


def test_nothing_is_overwritten_unasked(saved, tmp_path):
    write_folder(tmp_path, {"one.png": encoded(picture("red", 1))})
    out = tmp_path / "a.csv"
    out.write_text("precious")
    with pytest.raises(DataError, match="exists; use --force"):
        predict_images(saved / "two", tmp_path / "one.png", out)
    assert out.read_text() == "precious"
    predict_images(saved / "two", tmp_path / "one.png", out, force=True)
    assert len(lines(out)) == 1


MISTAKES = {
    "an operator": (["operator", "--images", "images", "--out", "a.csv"], "is for classifiers"),
    "a classifier asked as an operator": (
        ["two", "--observations", "o.npz", "--queries", "3x3", "--out", "a.npz"],
        "fst predict --images asks it",
    ),
    "both": (
        ["two", "--images", "images", "--observations", "o.npz", "--out", "a.csv"],
        "--images goes alone",
    ),
    "neither": (["two", "--out", "a.csv"], "--observations and --queries or, for a classifier"),
    "another ending": (["two", "--images", "images", "--out", "a.npz"], "written as .csv"),
    "no images": (["two", "--images", "empty", "--out", "a.csv"], "empty: holds no image"),
    "bad images alone": (["two", "--images", "bad", "--out", "a.csv"], "bad: holds no image that"),
    "nothing": (["two", "--images", "nowhere", "--out", "a.csv"], "nowhere"),
    "a file of another kind": (["two", "--images", "o.txt", "--out", "a.csv"], "neither a tar nor"),
    "a compressed tar": (["two", "--images", "o.tar.gz", "--out", "a.csv"], "is compressed"),
    "a folder as output": (["two", "--images", "images", "--out", "d.csv", "--force"], "a folder"),
    "an untrained run": (["begun", "--images", "images", "--out", "a.csv"], "no trained weights"),
    "one bad image": (["two", "--images", "bad.png", "--out", "a.csv"], "skipped bad.png: is not"),
    "no such run": (["nowhere", "--images", "images", "--out", "a.csv"], "nowhere"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clear_line(saved, tmp_path, monkeypatch, capsys, mistake):
    write_folder(tmp_path / "images", {"one.png": encoded(picture("red", 1))})
    (tmp_path / "empty").mkdir()
    write_folder(tmp_path / "bad", {"one.png": b"no image"})
    write_folder(tmp_path, {"bad.png": b"no image", "o.txt": b"words", "begun/metrics.jsonl": b""})
    with tarfile.open(tmp_path / "o.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "images", "images")
    (tmp_path / "d.csv").mkdir()
    for name in ("two", "operator"):
        (tmp_path / name).symlink_to(saved / name)
    before = sorted(path.name for path in tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    words, message = MISTAKES[mistake]
    assert main(["predict", *words]) == USER_ERROR
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == before
