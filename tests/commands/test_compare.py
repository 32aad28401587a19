"""Comparisons: equal terms, one table, and nothing done twice, whatever happens in between."""

import errno
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import fst
from comparison_recipes import GRIDS, Launches, contents, small
from data_examples import DOMAIN, point_samples
from fst import io
from fst.baselines import FNOConfig
from fst.commands import compare as compare_module
from fst.commands import jobs
from fst.commands import train as train_command
from fst.commands.compare import ModelJob, compare
from fst.data import DataError, write_points
from fst.evaluation.comparison import PAPER, SPREAD
from fst.evaluation.rows import read_run
from fst.recipes import find
from fst.recipes.comparison import models_of
from fst.training import budget as budget_module
from fst.training.budget import Calibration, StepBudget
from fst.training.run_folder import held
from fst.training.settings import TrainingError

TASK, MODELS = "burgers-single", ("fst", "deeponet")
BUDGET = "20steps"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    small("burgers-single/fst").data.prepare(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def short_measurements():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepBudget, "calibration_seconds", 0.01)
        yield


@pytest.fixture(scope="module", autouse=True)
def shipped_recipes_are_small():
    """Beside another problem than the shipped one the paper's errors would be left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fst.recipes.comparison.find", small)
        yield


def test_a_file_without_a_test_split_is_refused_before_training(tmp_path):
    path, out = tmp_path / "my.h5", tmp_path / "c"
    write_points(path, point_samples(3), DOMAIN)
    with pytest.raises(DataError, match="its test split is empty; the file holds 3 samples"):
        compare("own", out, budget=BUDGET, data=path, device="cpu", launch=pytest.fail)
    assert not out.exists()


def run(out: Path, data: Path, launch=None, **changes):
    options = {"budget": BUDGET, "models": MODELS, "data": data, "device": "cpu", "make": small}
    return compare(TASK, out, launch=launch or Launches(), **{**options, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data) -> Path:
    out = tmp_path_factory.mktemp("finished") / "c"
    run(out, data)
    return out


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "c"))


def test_one_table_with_all_that_was_asked(finished):
    report = json.loads((finished / "comparison.json").read_text())
    assert [row["model"] for row in report["rows"]] == list(MODELS)
    assert report["versions"]["torch"]
    assert report["hardware"]["cpus"]
    text = (finished / "comparison.md").read_text()
    for row in report["rows"]:
        assert (row["status"], row["steps"]) == ("done", 20)
        rows = json.loads((finished / row["run"] / "results/rows.json").read_text())
        rows = [each for each in rows if each["parameters"]]
        assert [tuple(score["grid"]) for score in row["scores"]] == list(GRIDS)
        assert [score["error"] for score in row["scores"]] == [each["error"] for each in rows]
        papers = find(f"{TASK}/{row['model']}").evaluation.paper_errors[-2:]
        assert tuple(score["paper_error"] for score in row["scores"]) == papers
        summary = json.loads((finished / row["run"] / "summary.json").read_text())
        assert row["training_seconds"] * summary["steps_per_second"] == pytest.approx(20)
        assert row["training_seconds"] < row["all_seconds"]
        assert row["parameters"] == rows[0]["parameters"] == count(row["model"])
        for score in row["scores"]:
            assert f"{score['error']:.5f}" in text
            assert f"{score['paper_error']:.5f}" in text
        assert f"{row['parameters']:,}" in text
    assert "FST 0.001, DeepONet 0.0003" in text  # each at its own learning rate


def count(model: str) -> int:
    built = fst.base.build_model(small(f"{TASK}/{model}").model)
    return sum(parameter.numel() for parameter in built.parameters())


def test_the_models_differ_in_nothing_but_themselves(finished):
    recipes = [json.loads((finished / f"{m}-seed1/recipe.json").read_text()) for m in MODELS]
    for recipe in recipes:
        expected = {"kind": "WarmupCosine", "warmup": 2, "maximum": 20}
        assert recipe["training"]["schedule"] == expected
        recipe["evaluation"].pop("paper_errors")
        recipe["training"].pop("learning_rate")
    for part in ("evaluation", "training"):
        assert recipes[0][part] == recipes[1][part]


def test_the_runs_are_ordinary(finished):
    for model in MODELS:
        scored = read_run(finished / f"{model}-seed1")
        assert [row.grid for row in scored.rows if not row.trivial] == list(GRIDS)
        assert len(scored.curves.validation) == 10
        assert fst.from_pretrained(finished / f"{model}-seed1/best").config


def test_asked_again_nothing_is_done_again(copy, data):
    before = contents(copy)
    launches = Launches()
    run(copy, data, launches)
    run(copy, None, launches)  # the data need not be named again
    assert launches.seen == []
    after = contents(copy)
    rewritten = {"settings.json", "comparison.md", "comparison.json"}
    for name in before:
        assert after[name][name in rewritten :] == before[name][name in rewritten :], name


def test_what_is_trained_but_not_scored_is_only_scored(copy, data, monkeypatch):
    rows = copy / "deeponet-seed1/results/rows.json"
    before, stored = contents(copy / "deeponet-seed1"), json.loads(rows.read_text())
    rows.unlink()
    monkeypatch.setattr(train_command, "run_training", untrainable)
    launches = Launches()
    run(copy, data, launches)
    assert launches.seen == ["deeponet-seed1"]
    assert json.loads(rows.read_text()) == stored
    after = contents(copy / "deeponet-seed1")
    assert {n: after[n] for n in after if "results" not in n} == (
        {n: before[n] for n in before if "results" not in n}
    )


def untrainable(*_, **__):
    pytest.fail("trained again")


def test_a_finished_run_keeps_its_weights_and_no_checkpoints(finished):
    for model in MODELS:
        assert (finished / f"{model}-seed1/best/model.safetensors").is_file()
        assert not (finished / f"{model}-seed1/checkpoints").exists()


def leave_behind(folder: Path) -> None:
    for run in folder.glob("*-seed*"):
        shutil.rmtree(run / "best")
        (run / "results/fields.npz").unlink()


def test_what_is_done_needs_no_weights_to_go_on(copy, data, monkeypatch):
    """All that the table needs is small, so a comparison can go on with it elsewhere."""
    leave_behind(copy)
    monkeypatch.setattr(train_command, "run_training", untrainable)
    before = json.loads((copy / "comparison.json").read_text())["rows"]
    run(copy, data)
    assert json.loads((copy / "comparison.json").read_text())["rows"] == before


def test_what_is_trained_but_lost_its_weights_is_trained_again(copy, data):
    rows = copy / "deeponet-seed1/results/rows.json"
    stored = json.loads(rows.read_text())
    leave_behind(copy)
    rows.unlink()
    launches = Launches()
    run(copy, data, launches)
    assert launches.seen == ["deeponet-seed1"]
    again = json.loads(rows.read_text())
    assert [row["errors"] for row in again] == [row["errors"] for row in stored]


def test_data_may_be_moved_or_made_again(copy, tmp_path, data, monkeypatch):
    moved = Path(shutil.copytree(data, tmp_path / "moved"))
    found = run(copy, moved, seeds=2, models=("deeponet",))
    assert {each.status for each in found.results} == {"done"}
    assert json.loads((copy / "data.json").read_text())["path"] == str(moved.resolve())
    # Where the last data are gone, as on another machine, they are those of the recipe.
    shutil.rmtree(moved)
    monkeypatch.chdir(tmp_path)
    launches = Launches()
    run(copy, None, launches, models=("fst",), seeds=2)
    assert launches.seen == ["fst-seed2"]
    assert (tmp_path / "data/burgers").is_dir()


@pytest.mark.parametrize("models", [("deeponet", "fst"), ("fno", "transolver")])
def test_other_data_are_refused_at_once(copy, tmp_path, models):
    """Also by models that are new, and supervised elsewhere."""
    other = replace(small("burgers-single/fst").data, seed=1)
    other.prepare(tmp_path / "other")
    before, launches = contents(copy), Launches()
    with pytest.raises(TrainingError, match="the training data are not those that"):
        run(copy, tmp_path / "other", launches, models=models, seeds=2)
    assert launches.seen == []
    after = contents(copy)
    assert after["data.json"] == before["data.json"]
    assert not list(copy.glob("failures/*"))


def test_models_and_seeds_can_be_added(copy, data):
    launches = Launches()
    found = run(copy, data, launches, models=("deeponet",), seeds=2)
    assert launches.seen == ["deeponet-seed2"]
    assert [each.run for each in found.results] == [
        "fst-seed1",
        "deeponet-seed1",
        "deeponet-seed2",
    ]
    one, two = found.results[1:]
    assert one.seed != two.seed
    assert one.steps == two.steps
    assert one.scores != two.scores
    lines = found.table().lines
    (row,) = [index for index, line in enumerate(lines) if line[0] == "DeepONet"]
    for column in range(2):
        errors = [each.scores[column].error for each in (one, two)]
        assert lines[row][6 + column] == f"{statistics.mean(errors):.5f}"
        assert lines[row + 1][6 + column] == f"{statistics.stdev(errors):.5f}"
        assert lines[row + 2][6 + column] == f"{one.scores[column].paper_error:.5f}"
    assert (lines[row + 1][0], lines[row + 2][0]) == (SPREAD, PAPER)


def test_a_seed_does_not_depend_on_the_others(copy, tmp_path, data):
    """The first seed is the recipe's; seed 2 made first is seed 2 made later."""
    assert json.loads((copy / "fst-seed1/recipe.json").read_text())["training"]["seed"] == (
        find("burgers-single/fst").training.seed
    )
    together = run(tmp_path / "d", data, models=("deeponet",), seeds=2)
    later = run(copy, data, models=("deeponet",), seeds=2)
    assert together.results[1].scores == later.results[2].scores


def killed() -> int:
    return -signal.SIGKILL


def test_one_failure_does_not_end_the_others_and_is_tried_again(tmp_path, data):
    out = tmp_path / "c"
    launches = Launches(fst=killed)
    with pytest.raises(TrainingError, match="fst-seed1 failed .* the same command tries again"):
        run(out, data, launches)
    assert launches.seen == ["fst-seed1", "deeponet-seed1"]
    text = (out / "comparison.md").read_text()
    assert "|   failed |" in text
    assert "ended by SIGKILL (often: out of memory)" in text
    launches = Launches()
    found = run(out, data, launches)
    assert launches.seen == ["fst-seed1"]
    assert {each.status for each in found.results} == {"done"}
    assert "failed" not in (out / "comparison.md").read_text()


def test_a_model_that_diverges_says_so(tmp_path, data, capsys):
    def wild(name: str):
        recipe = small(name)
        if not name.endswith("/fst"):
            return recipe
        return replace(recipe, training=replace(recipe.training, learning_rate=1e30))

    with pytest.raises(TrainingError, match="fst-seed1 failed"):
        run(tmp_path / "c", data, make=wild)
    assert "fst, seed 1, failed: step" in capsys.readouterr().err
    rows = json.loads((tmp_path / "c/comparison.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["failed", "done"]
    assert "failed: step" in rows[0]["note"]
    assert "loss nan" in rows[0]["note"]


def test_a_time_is_measured_once_and_kept(tmp_path, data, monkeypatch):
    out, updates = tmp_path / "c", []

    def measured(model, training, validation, settings, seconds, *, validate):
        updates.append(settings.learning_rate)
        return Calibration(30, 2.0, 1.5)  # 15 a second

    monkeypatch.setattr(budget_module, "calibrate", measured)
    monkeypatch.setattr(train_command, "run_training", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(out, data, budget="2s")
    assert ModelJob(out, data, "cpu", "fst", 1).plan().steps == 30
    monkeypatch.undo()
    monkeypatch.setattr(budget_module, "calibrate", lambda *_, **__: pytest.fail("measured again"))
    found = run(out, data, models=("fst",), budget="2s", seeds=2)
    assert updates == [1e-3]
    assert [(each.steps, each.peak_memory_gib) for each in found.results[:1]] == [(30, 1.5)]


def interrupted(*_, **__):
    raise KeyboardInterrupt


def test_a_real_measurement_gives_the_steps(tmp_path, data):
    found = run(tmp_path / "c", data, models=("deeponet",), budget="1s").results[0]
    assert found.steps == round(found.calibrated_steps_per_second)


def test_what_does_not_compile_is_trained_without(tmp_path, data, monkeypatch):
    measure, tried = budget_module.calibrate, []

    def only_eager(model, training, validation, settings, seconds, *, validate):
        tried.append(settings.compile)
        if settings.compile and "DeepONet" in type(model).__name__:
            raise RuntimeError("complex numbers\nand more")
        return measure(model, training, validation, replace(settings, compile=False), 0.01)

    monkeypatch.setattr(budget_module, "calibrate", only_eager)
    found = run(tmp_path / "c", data, models=("deeponet",), compile_mode="default").results[0]
    assert tried == [True, False]
    assert found.compiled is False
    assert "RuntimeError: complex numbers)" in found.note
    stored = json.loads((tmp_path / "c/deeponet-seed1/recipe.json").read_text())["training"]
    assert stored["compile"] is False


OTHERS = {
    "budget": ({"budget": "30steps"}, "budget was 20steps, is 30steps"),
    "compilation": ({"compile_mode": "default"}, "compile was as the recipes say, is default"),
    "recipe": (
        {"make": lambda name: replace(small(name), standardization=(0.0, 1.0))},
        "standardization was not set, is [0.0, 1.0]",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_settings_are_refused(finished, data, name):
    changes, message = OTHERS[name]
    before, launches = contents(finished), Launches()
    with pytest.raises(TrainingError, match="was made with other settings: ") as caught:
        run(finished, **{"data": data, "launch": launches, **changes})
    assert message in str(caught.value)
    assert launches.seen == []
    assert contents(finished) == before


def without_fno(config):
    if isinstance(config, FNOConfig):
        raise ImportError("FNO needs the package neuraloperator")
    return fst.base.build_model(config)


def test_fno_without_its_package(tmp_path, data, monkeypatch):
    monkeypatch.setattr(compare_module, "build_model", without_fno)
    with pytest.raises(TrainingError, match="FNO needs the package neuraloperator"):
        run(tmp_path / "c", data, models=("fno", "deeponet"))
    assert not (tmp_path / "c").exists()
    launches = Launches(**dict.fromkeys(("fst", "perceiver-io", "transolver"), killed))
    with pytest.raises(TrainingError):  # all others take part
        run(tmp_path / "c", data, launches, models=())
    assert launches.seen == [f"{m}-seed1" for m in models_of(TASK) if m != "fno"]
    assert "FNO is left out. FNO needs" in (tmp_path / "c/comparison.md").read_text()


def test_a_model_that_was_trained_is_not_left_out(copy, data, monkeypatch):
    run(copy, data, models=("fno",))
    monkeypatch.setattr(compare_module, "build_model", without_fno)
    rest = dict.fromkeys(("perceiver-io", "transolver"), killed)
    with pytest.raises(TrainingError):
        run(copy, data, Launches(**rest), models=())
    assert "left out" not in (copy / "comparison.md").read_text()


def test_a_failure_that_cannot_be_written_down_is_one_clear_error(tmp_path, data, monkeypatch):
    write = io.write_atomically

    def full(path, *data):
        if data and path.parent.name != "failures":
            return write(path, *data)
        raise OSError(errno.ENOSPC, "No space left on device")

    launches = Launches(fst=killed)
    monkeypatch.setattr(io, "write_atomically", full)
    with pytest.raises(io.FileError, match="no space left on the disk of"):
        run(tmp_path / "c", data, launches)
    assert launches.seen == ["fst-seed1"]
    monkeypatch.setattr(ModelJob, "work", full)
    assert jobs.attempt(ModelJob(tmp_path / "c", data, "cpu", "fst", 1)) == jobs.FAILED


def test_what_differs_between_runs_is_named(copy, data):
    path = copy / "fst-seed1/environment.json"
    described = json.loads(path.read_text())
    later = {**described, "step": 10, "versions": {**described["versions"], "torch": "9.9"}}
    path.write_text(json.dumps({**described, "resumed": [later]}))
    found = run(copy, data)
    assert "Not the same for all runs: versions.torch." in found.explanations()
    assert [each.starts for each in found.results] == [2, 1]


def test_compilation_is_in_the_time_and_not_in_the_rate(copy, data):
    path = copy / "fst-seed1/metrics.jsonl"
    line = {"kind": "training", "step": 5, "loss": 1.0}
    rates = [0.1, 30.0, 31.0, 32.0, 31.0]
    path.write_text("\n".join(json.dumps({**line, "steps_per_second": r}) for r in rates) + "\n{")
    before = json.loads((copy / "comparison.json").read_text())["rows"][0]
    found = run(copy, data).results[0]
    assert found.steps_per_second == 31.0
    assert found.training_seconds == before["training_seconds"]


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from comparison_recipes import small
from fst.commands.compare import compare
compare("burgers-single", Path(sys.argv[2]), budget="120steps", models=("deeponet", "fst"),
        data=Path(sys.argv[3]), device="cpu", make=small)
"""


LONGER = {"models": ("deeponet", "fst"), "budget": "120steps"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data) -> Path:
    out = tmp_path_factory.mktemp("whole") / "c"
    run(out, data, **LONGER)
    return out


def kill_in_the_middle(whole: Path, out: Path, data: Path, number: signal.Signals) -> int:
    """A comparison in `out`, killed when its second model has saved for the first time; the step of
    what it has saved at last."""
    shutil.copytree(whole, out)
    shutil.rmtree(out / "fst-seed1")
    path = os.pathsep.join(each for each in sys.path if each)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    helpers = Path(__file__).parents[1] / "helpers"
    words = [sys.executable, "-c", SCRIPT, str(helpers), str(out), str(data)]
    process = subprocess.Popen(
        words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    checkpoints = out / "fst-seed1/checkpoints"
    try:
        while not list(checkpoints.glob("step-*")):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        if number == signal.SIGTERM:  # as GNU timeout does
            process.send_signal(number)
    finally:
        process.wait(timeout=60)
    return max(int(path.name[5:]) for path in checkpoints.glob("step-*"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_in_the_middle_it_goes_on_to_the_same_table(tmp_path, data, whole, number):
    """The first model is done and the second half trained when the command is killed."""
    out = tmp_path / "c0"
    step = kill_in_the_middle(whole, out, data, number)
    if number == signal.SIGTERM:  # the child has saved before the command ended
        # Every twelfth step is saved anyway: where the signal met one, it has to be sent again.
        for attempt in range(1, 5):
            if step % 12 == 0:
                out = tmp_path / f"c{attempt}"
                step = kill_in_the_middle(whole, out, data, number)
        assert step % 12 > 0
        with held(out):
            pass
    before = contents(whole / "deeponet-seed1")
    # After SIGKILL the lock is free once the child, which nobody told anything, ends by itself.
    launches = Launches()
    found = run(out, data, launches, **LONGER)
    assert launches.seen == ["fst-seed1"]
    assert contents(out / "deeponet-seed1") == before
    resumed = json.loads((out / "fst-seed1/environment.json").read_text())["resumed"]
    assert [0 < start["step"] < 120 for start in resumed] == [True]
    rows = json.loads((whole / "comparison.json").read_text())["rows"]
    errors = [[score.error for score in each.scores] for each in found.results]
    assert errors == [[score["error"] for score in row["scores"]] for row in rows]
    for model in LONGER["models"]:
        best = f"{model}-seed1/best/model.safetensors"
        assert (out / best).read_bytes() == (whole / best).read_bytes()
