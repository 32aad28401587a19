"""Image recipes: the paper's settings, classes from the data, one budget for all three models."""

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import fst
from fst.base import build_model, parameter_count
from fst.cli import USER_ERROR, main
from fst.commands import train as train_command
from fst.commands.recipes import summary
from fst.commands.train import check_same_data, data_path
from fst.data import ImageData
from fst.evaluation.classification import ClassificationSettings
from fst.evaluation.protocol import EvaluationSettings
from fst.recipes import find, images
from fst.recipes.recipe import recipe_from_json
from fst.training.settings import TrainingError
from image_fakes import image_files, write_folder

MODELS = ("fst", "vit", "cnn-vit")
# Table 8 of the paper: parameters, top-1, top-5.
PAPER = {
    "imagenet/fst": (2_959_929, 69.530, 89.042),
    "imagenet/vit": (3_095_614, 67.804, 88.126),
    "imagenet/cnn-vit": (3_158_150, 61.052, 83.478),
}


def fitted_to(recipe, folder):
    return recipe.data.fit(recipe, folder)


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_numbers(name):
    recipe = find(name)
    parameters, *accuracies = PAPER[name]
    row = summary(recipe)
    assert row["parameters"] == row["paper_parameters"] == parameters
    assert (row["error"], row["paper_error"]) == (
        "top1_error",
        pytest.approx(1 - accuracies[0] / 100),
    )
    shown = [100 * (1 - error) for error in recipe.evaluation.paper_errors]
    assert shown == pytest.approx(accuracies, abs=1e-9)
    text = " ".join(fst.recipes.describe(name).split())
    assert f"{accuracies[0]:.3f} % top-1 and {accuracies[1]:.3f} % top-5" in text


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_settings(name):
    """Tables of Appendix D: optimisation and data, the same for the three models."""
    recipe = find(name)
    training, data = recipe.training, recipe.data
    assert (training.optimizer, training.weight_decay, training.clip) == ("adamw", 0.05, 1.0)
    assert (training.batch_size, training.precision, training.seed) == (256, "bf16", 20260820)
    assert training.objective.label_smoothing == 0.1
    assert (training.augment, training.average) == (True, None)
    assert training.batch_size % training.accumulate == 0
    assert (data.image_size, data.resize, data.jitter, data.erasing) == ((224, 224), 256, 0.3, 0.25)
    assert (data.three_augment, data.flip, data.held_out) == (True, 0.5, 0)
    assert (recipe.model.image_size, recipe.model.patch_size) == ((224, 224), 16)

    # Learning rates at the ends of the stages, in units of the rate itself.
    def rate(step: int) -> float:
        return training.learning_rate * training.schedule.factor(step, ())

    assert rate(25_023) == pytest.approx(1e-3)
    assert rate(12_000) == pytest.approx(1e-3 * 12_000 / 25_023)
    if name == "imagenet/cnn-vit":
        assert rate(25_024) == pytest.approx(5e-5, rel=1e-6)
        assert rate(500_000) == pytest.approx(2.5e-6)
    else:
        assert rate(500_456) == pytest.approx(5e-5)
        assert rate(550_456) == pytest.approx(0, abs=1e-12)
        assert rate(600_000) == pytest.approx(2.5e-6)
        assert training.schedule.maximum == 600_456
    # The stop rule: less than 1 % in 50,000 steps.
    errors = ((50_000, 0.5), (100_000, 0.4951))
    assert training.schedule.finished(100_000, errors) is not None
    assert training.schedule.finished(100_000, ((50_000, 0.5), (100_000, 0.4949))) is None


def test_the_predictor_takes_a_hundredth_of_the_rate():
    training = find("imagenet/fst").training
    assert training.predictor_learning_rate == pytest.approx(training.learning_rate / 100)
    groups = fst.build("imagenet/fst").param_groups()
    assert set(groups) == {"main", "predictor"}
    assert set(fst.build("imagenet/vit").param_groups()) == {"main"}


def test_own_images_train_alike():
    recipes = [find(f"own/images-{name}") for name in MODELS]
    shared = [
        replace(recipe.training, predictor_learning_rate=None, accumulate=1) for recipe in recipes
    ]
    assert shared[0] == shared[1] == shared[2]
    assert len({recipe.data for recipe in recipes}) == 1
    assert {recipe.model.image_size for recipe in recipes} == {recipes[0].data.image_size}
    assert recipes[0].data.held_out is None  # a twentieth: the test images select nothing


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("images")
    write_folder(path / "train", image_files(9))
    write_folder(path / "val", image_files(2, 50))
    return path


def test_classes_come_from_the_data(monkeypatch, folder):
    for name in ("imagenet/vit", "own/images-fst"):
        recipe = fitted_to(find(name), folder)
        assert recipe.model.class_names == ("blue", "green", "red")
        # The paper's numbers are about a thousand classes.
        assert (recipe.paper_error, recipe.evaluation.paper_errors) == (None, ())
    whole = tuple(f"n{number:08d}" for number in range(1000))
    monkeypatch.setattr(ImageData, "describe", lambda data, folder: whole)
    recipe = fitted_to(find("imagenet/vit"), folder)
    assert recipe.model.class_names == whole
    assert recipe.paper_error == find("imagenet/vit").paper_error


def test_a_twentieth_is_held_out(folder):
    # 3 classes of 9, and two more: a twentieth of 29 is less than one for each class.
    recipe = find("own/images-vit")
    fitted = fitted_to(recipe, folder)
    assert fitted.data.held_out == 3
    assert fitted_to(fitted, folder) == fitted
    # A number that was asked for stays, zero included.
    for count in (0, 7):
        asked = replace(recipe, data=replace(recipe.data, held_out=count))
        assert fitted_to(asked, folder).data.held_out == count


@pytest.mark.parametrize("model", MODELS)
def test_sizes_follow_from_images_and_device(folder, model):
    recipe = find(f"own/images-{model}")
    small = images.choose(recipe, folder, torch.device("cpu"))
    assert small.minutes is not None
    assert small.recipe.name == f"{recipe.name}, small"
    assert small.recipe.model.image_size == small.recipe.data.image_size == (64, 64)
    assert small.recipe.model.class_names == ("blue", "green", "red")
    count = small.recipe.data.count_training(folder)
    assert small.recipe.training.batch_size == count == 29 - 3
    assert small.recipe.training.schedule.maximum == images.FEWEST_STEPS
    large = images.choose(recipe, folder, torch.device("cuda"))
    assert (large.minutes, large.recipe.name) == (None, recipe.name)
    assert large.recipe.model == replace(recipe.model, class_names=("blue", "green", "red"))
    assert images.choose(recipe, folder, torch.device("cuda"), "small").recipe.model == (
        small.recipe.model
    )
    assert parameter_count(build_model(small.recipe.model)) < 300_000


def test_other_images_are_noticed(folder, tmp_path):
    data = ImageData(image_size=(16, 16), resize=16)
    training, _ = data.load(folder)
    samples = training.samples
    described = samples.describe()
    assert (described["training_samples"], described["class_names"]) == (
        28,
        ["blue", "green", "red"],
    )
    (tmp_path / "run.json").write_text(json.dumps(described))
    check_same_data(tmp_path, data, folder, samples)
    write_folder(tmp_path / "other" / "train", image_files(9, start=1))
    write_folder(tmp_path / "other" / "val", image_files(2))
    training, _ = data.load(tmp_path / "other")
    with pytest.raises(TrainingError, match="are not those that .*fingerprint was"):
        check_same_data(tmp_path, data, tmp_path / "other", training.samples)


def test_own_images_must_be_named(tmp_path):
    with pytest.raises(TrainingError, match="needs images of yours: add --data FOLDER"):
        data_path(find("own/images-fst"), None)


MISTAKES = {
    "set classes": (["--model.class-names", "a", "b"], "the classes are those of the data"),
    "two sizes": (["--model.image-size", "32", "32"], "model.image_size and data.image_size must"),
    "a patch that does not divide": (["--model.patch-size", "48"], "patch_size"),
    "more parts than images": (
        ["--training.batch-size", "4", "--training.accumulate", "8"],
        "batch_size must be at least the 1 processes times accumulate 8, got 4",
    ),
    "no images": (["--data", "nowhere"], "nowhere: there is no such folder"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clear_line(capsys, tmp_path, monkeypatch, folder, mistake):
    monkeypatch.chdir(tmp_path)
    words, message = MISTAKES[mistake]
    try:
        code = main(["train", "own/images-fst", "--out", "x", "--data", str(folder), *words])
    except SystemExit as stop:  # the parser's own
        code = stop.code
    out, err = capsys.readouterr()
    assert code == USER_ERROR
    assert message in out + err
    assert list(tmp_path.iterdir()) == []


def test_help_does_not_list_a_thousand_classes(capsys):
    with pytest.raises(SystemExit):
        main(["train", "imagenet/fst", "--help"])
    assert len(capsys.readouterr().out) < 30_000
    assert main(["recipes", "imagenet/fst"]) == 0
    assert len(capsys.readouterr().out.splitlines()) < 200


def test_recipes_stored_before_there_were_images_are_read():
    stored = find("darcy/fst").to_json()
    assert stored["evaluation"].pop("kind") == "EvaluationSettings"
    del stored["training"]["objective"]
    again = recipe_from_json(stored, "test")
    assert isinstance(again.evaluation, EvaluationSettings)
    assert again == find("darcy/fst")
    assert isinstance(find("imagenet/fst").evaluation, ClassificationSettings)


@pytest.mark.parametrize("main_process", [True, False])
def test_of_several_processes_one_speaks(folder, capsys, monkeypatch, main_process):
    class State:
        is_main_process = main_process
        main_process_first = staticmethod(nullcontext)

    monkeypatch.setattr(train_command, "PartialState", State)
    recipe = fitted_to(find("own/images-vit"), folder)
    train_command.load(recipe, folder, torch.device("cpu"), Console())
    assert ("for training" in capsys.readouterr().out) is main_process
