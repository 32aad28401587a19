"""A run whose file or recipe has changed since it was begun is neither resumed nor scored."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest

import fst
from data_examples import DARCY, write_fields, write_published
from fst.cli import USER_ERROR, main
from fst.commands import train as train_command
from fst.data import ImageData, Partition, PointData, read_points, write_points
from fst.data.point_files import PointSample
from fst.evaluation.rows import read_rows
from fst.training.settings import TrainingError
from image_examples import members, write_folder
from tiny import TRAINING

SMALL = (
    "--model.width 16 --model.heads 2 --model.fourier-bands 2 --model.predictor-width 8 "
    "--model.predictor-heads 2 --model.predictor-blocks 1 --model.refinement-steps 1 "
    "--model.anchors-per-row 4 --model.points-from-anchors 4 --model.points-from-sobol 4"
).split()
CPU = ["--device", "cpu"]
NEW = ("value_mean", "value_deviation", "condition_mean", "condition_deviation")
EXACT = ("validation_samples", "training_digest", "validation_digest")


def samples(count: int, axes: int = 1) -> list[PointSample]:
    """The first of them are the same however many are asked for."""
    generator = np.random.default_rng(0)

    def sample() -> PointSample:
        positions, queries = generator.random((6, axes)), generator.random((5, axes))
        scale = generator.uniform(1, 2, 1)
        values, targets = scale * np.sin(positions[:, :1]), scale * np.cos(queries[:, :1])
        return PointSample(positions, values, queries, targets, scale)

    return [sample() for _ in range(count)]


def write(path: Path, given: list[PointSample], axes: int = 1) -> None:
    path.unlink(missing_ok=True)
    write_points(path, given, fst.Domain.unit(axes))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    write(folder / "mine.h5", samples(40))
    words = ["--out", folder / "run", "--data", folder / "mine.h5", *CPU, *SMALL, *TRAINING]
    assert main(["train", "own/fst", *map(str, words)]) == 0
    return folder


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """The finished run, with a file of its own that may be changed."""
    shutil.copytree(trained / "run", tmp_path / "run")
    shutil.copy(trained / "mine.h5", tmp_path / "mine.h5")
    note(tmp_path / "run", data=str(tmp_path / "mine.h5"))
    return tmp_path / "run"


@pytest.fixture
def stopped(run) -> Path:
    """The run as if it had been killed after its first checkpoint."""
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    return run


def note(run: Path, *forget: str, **changes: str) -> None:
    """Change what a run has recorded of its data."""
    recorded = json.loads((run / "run.json").read_text()) | changes
    kept = {name: value for name, value in recorded.items() if name not in forget}
    (run / "run.json").write_text(json.dumps(kept))


def refused(capsys, *words) -> str:
    """The one line that a command ends with."""
    capsys.readouterr()
    assert main([*map(str, words), *CPU]) == USER_ERROR
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


@pytest.mark.parametrize("forget", [(), (*NEW, *EXACT)], ids=["new", "older"])
def test_samples_of_the_training_are_never_scored(run, capsys, forget):
    """More samples draw other splits: some of the new test samples were trained on."""
    note(run, *forget)
    file = run.parent / "mine.h5"
    write(file, samples(60))
    line = refused(capsys, "evaluate", run)
    assert str(file) in line
    assert "training_samples was 32, is 48" in line
    assert not (run / "results").exists()
    write(file, samples(40))
    assert main(["evaluate", str(run), *CPU]) == 0


def test_scores_of_another_test_split_get_another_name(run):
    known = []
    for factor in (1, 1, 2):
        changed = samples(40)
        for row in PointData().partition(read_points(run.parent / "mine.h5")).test:
            changed[row] = replace(changed[row], targets=factor * np.asarray(changed[row].targets))
        write(run.parent / "mine.h5", changed)
        assert main(["evaluate", str(run), "--again", *CPU]) == 0
        known.append(read_rows(run / "results" / "rows.json")[0].data)
    assert known[0].startswith("mine.h5 ")
    assert known[0] == known[1] != known[2]


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A finished run on a Burgers file that names no splits, and the file beside it."""
    folder = tmp_path_factory.mktemp("published")
    (folder / "data").mkdir()
    write_published(folder / "data", rows=11)
    small = "--data.training 6 --data.validation 3 --data.test 2 --data.times 21 --data.points 64"
    small += " --data.viscosities 0.1 --data.final-time 0.5"
    grids = "--data.supervision-grid 5 16 --data.validation-grid 5 16 --evaluation.grids 5 16"
    words = [*SMALL, "--model.rows", 2, *TRAINING, *small.split(), *grids.split()]
    words += ["--out", folder / "run", "--data", folder / "data", *CPU]
    assert main(["train", "demo/burgers", "--training.no-augment", *map(str, words)]) == 0
    return folder


@pytest.mark.parametrize("change", ["longer", "reversed"])
def test_trajectories_of_the_training_are_never_scored(published, tmp_path, capsys, change):
    """A longer file draws other splits, and one in another order has other rows in them."""
    folder = Path(shutil.copytree(published, tmp_path / "copy"))
    (file,) = (folder / "data").iterdir()
    if change == "longer":
        write_published(folder / "data", rows=30)
    else:
        with h5py.File(file, "r+") as stored:
            stored["tensor"][:] = stored["tensor"][:][::-1]
    line = refused(capsys, "evaluate", folder / "run", "--data", folder / "data")
    assert "are not those that" in line
    assert ("splits was" if change == "longer" else "sizes was") in line
    assert not (folder / "run" / "results").exists()
    words = [folder / "run", "--data", published / "data"]
    assert main(["evaluate", *map(str, words), *CPU]) == 0


def test_a_run_that_recorded_one_for_a_constant_channel_is_known_again(tmp_path):
    recorded = {"value_deviation": [1.0, 2.0]}
    train_command.require_same_data(tmp_path, recorded, {"value_deviation": [0.0, 2.0]})
    with pytest.raises(TrainingError, match="value_deviation was"):
        train_command.require_same_data(tmp_path, recorded, {"value_deviation": [0.0, 3.0]})


@pytest.mark.parametrize("kind", ["darcy", "images"])
def test_every_source_has_a_fingerprint_that_tells_other_data(tmp_path, kind):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    if kind == "darcy":
        source: Any = DARCY
        write_fields(tmp_path / "one" / "darcy_train_16.pt", rows=12)
        write_fields(tmp_path / "other" / "darcy_train_16.pt", rows=13)
    else:
        source = ImageData(image_size=(16, 16), resize=16, held_out=4)
        write_folder(tmp_path / "one" / "train", members(9))
        write_folder(tmp_path / "other" / "train", members(10))
    one = source.fingerprint(tmp_path / "one")
    assert one == source.fingerprint(tmp_path / "one")
    assert one["splits"] != source.fingerprint(tmp_path / "other")["splits"]


def test_another_order_of_the_same_samples_is_noticed(run, capsys):
    write(run.parent / "mine.h5", samples(40)[::-1])
    assert "are not those that" in refused(capsys, "evaluate", run)


@pytest.mark.parametrize(
    ("change", "name"),
    [("values", "value_mean"), ("targets", "output_mean"), ("condition", "condition_mean")],
)
def test_changed_inputs_are_not_trained_on(stopped, capsys, change, name):
    changed = [replace(each, **{change: getattr(each, change) + 0.5}) for each in samples(40)]
    write(stopped.parent / "mine.h5", changed)
    assert f"{name} was [" in refused(capsys, "train", "--resume", stopped)


def test_values_at_other_points_are_noticed(stopped, capsys):
    """Their moments are the same, and so are all targets."""
    swapped = [replace(each, values=each.values[::-1]) for each in samples(40)]
    write(stopped.parent / "mine.h5", swapped)
    assert "training_digest was " in refused(capsys, "train", "--resume", stopped)


def test_other_validation_samples_are_noticed(stopped, capsys):
    """Errors found on them do not compare with those found before."""
    counts = {"training": 32, "validation": 4, "test": 4}
    rows = Partition.drawn(40, **counts, seed=PointData().split_seed).validation
    given = samples(40)
    for row in rows:
        given[row] = replace(given[row], targets=2 * given[row].targets)
    write(stopped.parent / "mine.h5", given)
    assert "validation_digest was " in refused(capsys, "train", "--resume", stopped)


def test_a_changed_recipe_is_not_resumed(stopped, capsys):
    path = stopped / "recipe.json"
    kept = path.read_text()
    recipe = json.loads(kept)
    recipe["training"] |= {"learning_rate": 0.5, "compile": False, "keep": 7}
    path.write_text(json.dumps(recipe))
    line = refused(capsys, "train", "--resume", stopped)
    assert "training.learning_rate was 0.002, is 0.5" in line
    # What does not change the course of a training may be changed, as an error's advice says.
    recipe["training"]["learning_rate"] = json.loads(kept)["training"]["learning_rate"]
    path.write_text(json.dumps(recipe))
    assert main(["train", "--resume", str(stopped), *CPU]) == 0


def test_stored_rows_are_not_shown_for_other_data(run, capsys):
    write(run.parent / "other.h5", samples(60))
    data = shutil.copy(run.parent / "mine.h5", run.parent / "there.h5")
    for _ in range(2):  # where they lie now is noted
        assert main(["evaluate", str(run), "--data", str(data), *CPU]) == 0
    before = (run / "results" / "rows.json").read_bytes()
    line = refused(capsys, "evaluate", run, "--data", run.parent / "other.h5")
    assert "other.h5 was not read" in line
    assert "--again" in line
    line = refused(capsys, "evaluate", run, "--data", run.parent / "other.h5", "--again")
    assert "training_samples was 32, is 48" in line
    assert (run / "results" / "rows.json").read_bytes() == before
    assert main(["evaluate", str(run), *CPU]) == 0


@pytest.mark.parametrize("words", [["evaluate"], ["train", "--resume"]], ids=["evaluate", "resume"])
def test_a_file_of_another_kind_is_named(run, capsys, words):
    if words != ["evaluate"]:
        (run / "summary.json").unlink()
    (run / "run.json").unlink()  # even where nothing was recorded of the data
    flat = run.parent / "flat.h5"
    write(flat, samples(40, axes=2), axes=2)
    line = refused(capsys, *words, run, "--data", flat)
    assert str(flat) in line
    assert "low was (0.0,), is (0.0, 0.0)" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.high", "5"], "model.high cannot be (5.0,)"),
        (["--model.output-channels", "3"], "model.output_channels cannot be 3"),
        (["--model.condition-channels", "0"], "model.condition_channels cannot be 0"),
        (["--evaluation.grids", "3", "3"], "evaluation.grids must be empty for own/fst"),
    ],
)
def test_what_the_file_decides_is_no_option(trained, tmp_path, capsys, words, message):
    data = ["--out", tmp_path / "run", "--data", trained / "mine.h5"]
    line = refused(capsys, "train", "own/fst", *data, *SMALL, *TRAINING, *words)
    assert message in line
    if "model" in message:
        assert "mine.h5" in line
    assert not (tmp_path / "run").exists()


def test_a_demo_goes_on_with_no_other_recipe(run, capsys):
    before = sorted(run.iterdir())
    told = refused(capsys, "demo", "--out", run)
    assert "holds a run of own/fst, small, not of demo/burgers" in told
    (run / "summary.json").unlink()
    assert "holds a run of own/fst" in refused(capsys, "demo", "--out", run)
    assert sorted(run.iterdir()) == [path for path in before if path.name != "summary.json"]


def test_a_run_that_cannot_be_sent_leaves_no_folder(trained, tmp_path, capsys, monkeypatch):
    def login(**_):
        raise LookupError("No API key configured")

    fake = SimpleNamespace(Error=LookupError, login=login)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    data = ["--out", tmp_path / "run", "--data", trained / "mine.h5"]
    line = refused(capsys, "train", "own/fst", *data, *SMALL, *TRAINING, "--training.wandb")
    assert "Weights & Biases says: No API key configured" in line
    assert not (tmp_path / "run").exists()
