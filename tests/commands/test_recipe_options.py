"""Short options of `fst train`, budgets in minutes, starts from weights, the choices of `own/`."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from fst.base import Model
from fst.cli import main
from fst.commands import train as train_command
from fst.data import DataError, PointData, PointSample, point_data, point_files, write_points
from fst.data.point_files import PointFile
from fst.recipes import RECIPES, find, own
from fst.training import budget
from fst.training.budget import Calibration
from fst.types import Domain

CPU = ("--device", "cpu")
TINY = (
    "--model.width 16 --model.heads 2 --model.fourier-bands 2 --model.predictor-width 16 "
    "--model.predictor-heads 2 --model.rows 3 --model.anchors-per-row 3 "
    "--model.points-from-anchors 4 --model.points-from-sobol 4 --training.no-tensorboard"
).split()


def write(
    path: Path,
    *,
    grid: bool = False,
    condition: Callable[[float], list[float]] | None = None,
    samples: int = 20,
    offset: float = 2,
) -> Path:
    generator = np.random.default_rng(0)
    axis = np.linspace(0, 1, 8)
    regular = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 2)
    made = []
    for _ in range(samples):
        phase = generator.uniform(0, 6)
        points = regular if grid else generator.uniform(size=(64, 2))
        values = np.sin(6 * points.sum(axis=1, keepdims=True) + phase) + offset
        given = np.array(condition(phase)) if condition else None
        made.append(PointSample(points[::4], values[::4], points, values, condition=given))
    write_points(path, made, Domain((0.0, 0.0), (1.0, 1.0)))
    return path


@pytest.fixture(scope="module")
def points(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("points") / "points.h5")


@pytest.fixture(scope="module")
def run(points, tmp_path_factory) -> Path:
    """A run of twelve steps."""
    out = tmp_path_factory.mktemp("run") / "run"
    assert train("own/fst", "--data", points, "--out", out, "--steps", 12, "--lr", 0.002) == 0
    return out


def train(*words: object, tiny: bool = True) -> int:
    return main(["train", *map(str, words), *CPU, *(TINY if tiny else ())])


def recipe(run: Path) -> dict:
    return json.loads((run / "recipe.json").read_text())


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def test_short_names_stand_for_fields_of_the_recipe(run):
    training = recipe(run)["training"]
    assert training["learning_rate"] == 0.002
    assert training["schedule"] == {"kind": "WarmupCosine", "warmup": 1, "maximum": 12}
    assert training["validate_every"] == 2
    assert summary(run)["steps"] == 12


def test_long_names_go_before_short_ones(points, tmp_path):
    words = ("--steps", 10, "--batch-size", 4, "--training.validate-every", 10)
    assert train("own/fst", "--data", points, "--out", tmp_path / "a", *words) == 0
    training = recipe(tmp_path / "a")["training"]
    assert (training["batch_size"], training["validate_every"]) == (4, 10)


def test_minutes_become_steps_by_a_measurement(points, tmp_path, capsys, monkeypatch):
    measured = Calibration(updates=10, seconds=1.0, peak_memory_gib=None, validation_seconds=0.06)
    monkeypatch.setattr(budget, "calibrate", lambda *_, **__: measured)
    out = tmp_path / "a"
    assert train("own/fst", "--data", points, "--out", out, "--minutes", 0.05) == 0
    steps = recipe(out)["training"]["schedule"]["maximum"]
    assert summary(out)["steps"] == steps
    # Three seconds, less what building a model takes, are 30 steps; ten validations cost six.
    assert 12 <= steps <= 24
    assert train("own/fst", "--data", points, "--out", tmp_path / "b", "--minutes", 0.01) == 2
    assert "a budget of 0.6s allows 6 steps" in capsys.readouterr().err
    monkeypatch.undo()
    assert train("own/fst", "--data", points, "--out", tmp_path / "b", "--minutes", 0.3) == 0
    shown = capsys.readouterr().out
    assert re.search(r"own/fst, small\n  model +[\d,]+ parameters +\[as asked\]", shown)
    steps = recipe(tmp_path / "b")["training"]["schedule"]["maximum"]
    assert f"steps          {steps:,}, which is" in shown
    assert re.search(r"time +0:00:\d\d at .* steps a second \(measured\)", shown)


def test_seeds_are_runs_of_their_own(points, tmp_path):
    words = ("--data", points, "--out", tmp_path / "a", "--steps", 10, "--seeds", 2)
    assert train("own/fst", *words) == 0
    first, second = (recipe(tmp_path / "a" / f"seed{number}")["training"] for number in (1, 2))
    assert first["seed"] != second["seed"]
    assert first | {"seed": 0} == second | {"seed": 0}
    assert train("own/fst", *words) == 2  # nothing is overwritten


def test_a_recipe_is_taken_from_a_file(run, points, tmp_path):
    words = ("--config", run / "recipe.json", "--data", points, "--out", tmp_path / "a")
    assert train(*words, tiny=False) == 0
    assert recipe(tmp_path / "a") == recipe(run)
    left, right = (Model.from_pretrained(each / "best") for each in (run, tmp_path / "a"))
    for name, tensor in left.state_dict().items():
        assert torch.equal(tensor, right.state_dict()[name]), name


def test_a_finished_run_is_trained_longer(run, tmp_path, capsys):
    assert main(["train", "--resume", str(run)]) == 2
    assert f"fst train --from {run} --out NEW" in capsys.readouterr().err
    assert train("--from", run, "--out", tmp_path / "a", "--steps", 10, tiny=False) == 0
    lines = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    first = next(line["error"] for line in lines if line["kind"] == "validation")
    assert first < 1.05 * summary(run)["validation_error"]  # not that of untrained weights
    described = json.loads((tmp_path / "a/run.json").read_text())
    assert described["from"] == str(run.resolve())
    (before,) = described["before"]
    assert {name: before[name] for name in ("steps", "update_seconds")} == {
        name: summary(run)[name] for name in ("steps", "update_seconds")
    }
    assert before["hardware"].startswith("CPU")
    again = train_command.trained_before(tmp_path / "a")
    assert [each["steps"] for each in again] == [before["steps"], 10]


def test_a_constant_target_is_not_said_to_vary(tmp_path):
    samples = [PointSample([[0.0]], [[1.0]], [[0.5]], [[3.0]])] * 9
    write_points(tmp_path / "constant.h5", samples, Domain.unit(1))
    choice = own.choose(own.fst(), tmp_path / "constant.h5", torch.device("cpu"))
    assert choice.reasons["loss"].startswith("a constant target has no standard deviation")
    assert choice.recipe.training.objective.channels == "original"


def test_weights_serve_other_data_in_another_box_and_unit(run, tmp_path, capsys):
    random = np.random.default_rng(0)
    samples = [
        PointSample(places, places[:, :1] + 293, places, places[:, :1] + 293)
        for places in random.uniform((0, 0), (5, 2), (20, 30, 2))
    ]
    write_points(tmp_path / "other.h5", samples, Domain((0.0, 0.0), (5.0, 2.0)))
    words = ("--data", tmp_path / "other.h5", "--out", tmp_path / "a", "--steps", 10)
    assert train("own/fst", "--from", run, *words, tiny=False) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"model .*\[as the weights of {run} have it; --from\]", shown)
    assert re.search(r"loss +standardized relative L2  \[means far larger", shown)
    model = Model.from_pretrained(tmp_path / "a" / "best")
    assert model.config.high == (5.0, 2.0)
    assert model.config.width == Model.from_pretrained(run / "best").config.width
    assert float(model.standardize_outputs.mean) == pytest.approx(295.5, abs=0.3)
    write_points(tmp_path / "line.h5", [PointSample([[0.0]], [[1.0]], [[0.5]], [[2.0]])] * 9,
                 Domain((0.0,), (1.0,)))  # fmt: skip
    words = ("--data", tmp_path / "line.h5", "--out", tmp_path / "b", "--steps", 10)
    assert train("own/fst", "--from", run, *words, tiny=False) == 2
    assert "has 1 axes, the weights 2" in capsys.readouterr().err


def test_weights_that_do_not_fit_are_named(run, points, tmp_path, capsys):
    words = ("--data", points, "--out", tmp_path / "a", "--steps", 10)
    assert train("own/fst", "--from", run, *words, "--model.width", 32, tiny=False) == 2
    assert re.search(r"weights do not fit: \S+ must be \(.*32.*\), got", capsys.readouterr().err)
    assert train("own/perceiver-io", "--from", run, *words, tiny=False) == 2
    assert "holds a FunctionSpaceConfig, own/perceiver-io trains a" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "nosuch.json"], "nosuch.json: there is no such file"),
        (["own/fst", "--config", "x.json"], "not both"),
        (["--from", "nosuch"], "nosuch"),
        (["--from", "burgers-single"], "name a recipe (fst train RECIPE --from burgers-single"),
        (["own/fst", "--seeds", "0"], "seeds must be at least 1"),
        (["own/fst", "--steps", "3"], "steps must be at least 10"),
        (["own/fst", "--minutes", "-1"], "budget must be above 0"),
        (["own/fst", "--minutes", "inf"], "budget must be above 0 and finite, got inf"),
        (["own/fst", "--minutes", "1", "--steps", "20"], "give --steps or --minutes, not both"),
    ],
)
def test_mistakes_are_one_line(words, message, points, tmp_path, capsys):
    assert train(*words, "--data", points, "--out", tmp_path / "a", tiny=False) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("name", ["fno", "perceiver-io", "transolver", "deeponet"])
def test_other_models_train_on_points_of_a_grid(name, tmp_path):
    if name == "fno":
        pytest.importorskip("neuralop")
    file = write(tmp_path / "grid.h5", grid=True)
    words = ("--data", file, "--out", tmp_path / "a", "--steps", 10)
    assert train(f"own/{name}", *words, tiny=False) == 0
    assert main(["evaluate", str(tmp_path / "a"), *CPU]) == 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fno", {}, "FNO needs all points on one regular grid"),
        ("deeponet", {}, "DeepONet needs every sample to be observed at the same points"),
        (
            "transolver",
            {"condition": lambda phase: [phase]},
            "Transolver takes no condition channel, .* have 1; own/fst takes any number",
        ),
    ],
)
def test_a_model_says_why_it_cannot_take_the_data(name, options, message, tmp_path):
    file = write(tmp_path / "mine.h5", **options)
    with pytest.raises(DataError, match=message):
        own.choose(find(f"own/{name}"), file, torch.device("cpu"))


def test_the_choice_follows_device_and_samples(tmp_path):
    few, many = (write(tmp_path / f"{n}.h5", samples=n) for n in (30, 1_300))
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    small = own.choose(find("own/fst"), few, cpu)
    assert small.recipe.name == "own/fst, small"
    assert small.minutes == own.CPU_MINUTES
    assert small.explain(small.recipe) == small.reasons
    assert small.reasons["model"].startswith("small size, for a CPU")
    assert small.recipe.training.weight_decay > 0
    assert small.recipe.training.average is not None
    large = own.choose(find("own/fst"), many, gpu)
    assert (large.recipe.name, large.minutes) == ("own/fst", None)
    assert large.recipe.model.width == find("own/fst").model.width
    assert (large.recipe.training.weight_decay, large.recipe.training.average) == (0.0, None)
    assert large.recipe.training.batch_size > small.recipe.training.batch_size
    assert own.choose(find("own/fst"), few, gpu, "small").recipe.model == small.recipe.model


@pytest.mark.parametrize("name", ["fst", "fno", "deeponet"])
def test_a_choice_reads_a_bounded_number_of_samples_at_once(name, tmp_path, monkeypatch):
    """A file may be larger than the memory."""
    file = write(tmp_path / "many.h5", grid=True, samples=20)
    for module in (point_data, point_files):
        monkeypatch.setattr(module, "BLOCK", 6)
    read = []
    for kind in ("queries", "observations"):
        plain = getattr(PointFile, kind)

        def counted(self, rows, opened=None, plain=plain):
            read.append(len(rows))
            return plain(self, rows, opened)

        monkeypatch.setattr(PointFile, kind, counted)
    own.choose(find(f"own/{name}"), file, torch.device("cpu"))
    assert 0 < max(read) <= 6


def test_one_sample_off_the_grid_is_found(tmp_path):
    file = write(tmp_path / "grid.h5", grid=True)
    with h5py.File(file, "r+") as stored:
        stored["queries/positions"][-1] -= 0.05
    with pytest.raises(DataError, match="FNO needs all points on one regular grid"):
        own.choose(find("own/fno"), file, torch.device("cpu"))


def test_targets_far_from_zero_are_warned_of_and_standardised(tmp_path):
    file = write(tmp_path / "kelvin.h5", offset=293.0)
    with pytest.warns(UserWarning, match=r"293.* ± 0\.7.* relative error of about 0\.002"):
        PointData().load(file)
    choice = own.choose(find("own/fst"), file, torch.device("cpu"))
    assert choice.recipe.training.objective.channels == "standardized"
    near = own.choose(find("own/fst"), write(tmp_path / "near.h5"), torch.device("cpu"))
    assert near.recipe.training.objective.channels == "original"


def test_target_channels_of_different_sizes_are_standardised(tmp_path):
    wave = np.sin(np.linspace(0, 6, 64))[:, None]
    points = np.linspace(0, 1, 64)[:, None]
    samples = [PointSample(points, wave, points, wave * [1.0, 1e4])] * 10
    write_points(tmp_path / "two.h5", samples, Domain((0.0,), (1.0,)))
    choice = own.choose(find("own/fst"), tmp_path / "two.h5", torch.device("cpu"))
    assert choice.recipe.training.objective.channels == "standardized"
    assert "channels differ by a factor of 1e+04" in choice.reasons["loss"]


@pytest.fixture
def five_steps_a_second(monkeypatch):
    """As if measured, so that a busy machine does not find a time too short."""
    measured = Calibration(updates=5, seconds=1.0, peak_memory_gib=None, validation_seconds=0.01)
    monkeypatch.setattr(budget, "calibrate", lambda *_, **__: measured)


@pytest.mark.usefixtures("five_steps_a_second")
def test_the_block_before_training_says_what_was_asked_and_what_was_chosen(
    points, tmp_path, capsys
):
    words = ("--data", points, "--out", tmp_path / "a", "--batch-size", 3, "--minutes", 0.1)
    assert train("own/fst", *words, "--training.objective.scale", "absolute") == 0
    block = capsys.readouterr().out
    assert re.search(r"model .*\[as asked\]", block)  # the test's own sizes
    assert re.search(r"loss +l2  \[as asked\]", block, re.IGNORECASE)
    assert re.search(r"batch +3 samples.*\[as asked\]", block)
    assert re.search(r"steps .*\[as many as fit into 0\.1 minutes", block)
    assert re.search(r"regularisation .*\[16 training samples, fewer than 1,000\]", block)


def test_a_run_keeps_the_names_of_its_data(run):
    labels = json.loads((run / "run.json").read_text())["labels"]
    assert labels["axes"] == [["x", ""], ["y", ""]]
    assert [len(labels[kind]) for kind in ("values", "targets", "condition")] == [1, 1, 0]


def test_a_run_that_starts_from_weights_says_how_long_it_will_take(run, tmp_path, capsys):
    assert (
        main(["train", "--from", str(run), "--out", str(tmp_path / "a"), "--steps", "12", *CPU])
        == 0
    )
    assert re.search(r"time +0:00:0\d at \d+ steps a second", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("condition", "logarithm"),
    [
        (lambda phase: [10**phase], True),
        (lambda phase: [10**phase, phase + 50], True),
        (lambda phase: [phase + 50], False),
        (lambda phase: [10**phase, -phase], False),
        (lambda phase: [10**phase - 1e9], False),
        (None, False),
    ],
)
def test_conditions_that_span_decades_enter_by_their_logarithm(condition, logarithm, tmp_path):
    file = write(tmp_path / "mine.h5", condition=condition)
    choice = own.choose(find("own/fst"), file, torch.device("cpu"))
    assert choice.recipe.model.log_condition == logarithm


@pytest.mark.usefixtures("five_steps_a_second")
def test_the_block_before_training_says_how_the_condition_enters(tmp_path, capsys):
    file = write(tmp_path / "mine.h5", condition=lambda phase: [10**phase])
    assert train("own/fst", "--data", file, "--out", tmp_path / "run", "--minutes", 0.1) == 0
    assert re.search(
        r"condition +its logarithm .*--model\.no-log-condition", capsys.readouterr().out
    )


ONE_OF_EACH_MODEL = {find(name).model.__class__: name for name in RECIPES}


@pytest.mark.parametrize("name", ONE_OF_EACH_MODEL.values())
def test_every_option_of_a_model_has_a_help_text(name, capsys):
    with pytest.raises(SystemExit):
        main(["train", name, "--help"])
    words = [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]
    options = [n for n, word in enumerate(words) if word.startswith("--model.")]
    assert options
    for number in options:
        following = " ".join(words[number + 1 : number + 3])
        assert not following.startswith(("(default", "--")), words[number]
    for hidden in ("--name", "--task", "--model-name", "--paper-error", "--data-folder"):
        assert not any(word.startswith(f"{hidden} ") for word in words)
