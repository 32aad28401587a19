"""The learning-rate search: the paper's rule, and nothing tried twice."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from comparison_recipes import contents, small
from data_examples import DOMAIN, point_samples
from fst.cli import INTERRUPTED, USER_ERROR, main
from fst.commands import search as search_module
from fst.commands import train as train_command
from fst.commands.search import search
from fst.data import write_points
from fst.evaluation.comparison import Search, Trial
from fst.evaluation.rows import read_curves
from fst.recipes import RECIPES, find
from fst.recipes.comparison import confirmation, trial
from fst.recipes.own import choose
from fst.training.settings import TrainingError

RECIPE = "burgers-single/deeponet"
RATES = (1e-4, 3e-3, 1e-2)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    small(RECIPE).data.prepare(folder)
    return folder


def run(out: Path, data: Path | None, **changes) -> Search:
    options = {"rates": RATES, "steps": 16, "confirm": 24, "data": data, "device": "cpu"}
    return search(small(RECIPE), out, **{**options, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data) -> Path:
    out = tmp_path_factory.mktemp("finished") / "s"
    run(out, data)
    return out


def test_a_trial_is_the_papers():
    """Darcy: warm-up over 1,000 steps, then the rate as it is, 4,000 steps and 8,000 more."""
    recipe = find("darcy/fno")
    tried = trial(recipe, 3e-3)
    assert tried.training.learning_rate == 3e-3
    schedule = tried.training.schedule
    assert [schedule.factor(step, ()) for step in (500, 1_000, 2_500, 4_000)] == [0.5, 1, 1, 1]
    assert schedule.finished(3_999, ()) is None
    assert schedule.finished(4_000, ()) is not None
    assert 4_000 // tried.training.validate_every >= 3  # enough for the mean of three
    longer = confirmation(tried).training.schedule
    assert longer.finished(11_999, ()) is None
    assert longer.finished(12_000, ()) is not None
    assert all(longer.factor(s, ()) == schedule.factor(s, ()) for s in range(1, 4_001, 37))
    untouched = {"learning_rate", "schedule", "validate_every", "checkpoint_every", "tensorboard"}
    for name, value in vars(recipe.training).items():
        assert name in untouched or getattr(tried.training, name) == value


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_be_searched(name):
    recipe = find(name)
    tried = trial(recipe, 1e-4)
    assert 1 <= tried.training.schedule.stages[0].end <= 1_000
    assert confirmation(tried).training.schedule.maximum == 12_000


def test_on_a_users_file_it_searches_the_model_that_is_trained(tmp_path, monkeypatch):
    path, out = tmp_path / "my.h5", tmp_path / "s"
    write_points(path, point_samples(), DOMAIN)
    monkeypatch.setattr(search_module.jobs, "run_here", stop)
    with pytest.raises(KeyboardInterrupt):
        search("own/fst", out, data=path, device="cpu")
    searched = json.loads((out / "settings.json").read_text())["recipe"]
    trained = choose(find("own/fst"), path, torch.device("cpu")).recipe
    assert searched == json.loads(json.dumps(trained.to_json()))
    assert searched["model"]["width"] == 48


def stop(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_predictors_rate_keeps_its_proportion():
    tried = trial(find("burgers-all/fst"), 3e-3)
    assert tried.training.predictor_learning_rate == pytest.approx(3e-5)
    assert trial(find("darcy/fst"), 3e-3).training.predictor_learning_rate is None


def test_the_lowest_mean_of_the_last_three_wins_and_is_carried_on(finished):
    report = json.loads((finished / "search.json").read_text())
    scores = {}
    for tried in report["trials"]:
        curve = read_curves(finished / tried["run"] / "metrics.jsonl").validation
        assert [step for step, _ in curve] == list(range(2, 17, 2))
        scores[tried["rate"]] = sum(error for _, error in curve[-3:]) / 3
        assert tried["score"] == pytest.approx(scores[tried["rate"]], rel=1e-12)
    assert list(scores) == sorted(RATES)
    assert report["selected"] == min(scores, key=scores.__getitem__)
    carried = report["confirmation"]
    assert (carried["rate"], carried["steps"]) == (report["selected"], 40)
    assert report["confirmed"] == (carried["score"] < scores[report["selected"]])
    text = (finished / "search.md").read_text()
    assert f"{carried['score']:.5f}" in text


def test_the_confirmation_is_one_run_with_the_trial(finished, tmp_path, data):
    """Weights, optimiser and errors are those of a run that was never stopped."""
    selected = json.loads((finished / "search.json").read_text())["selected"]
    whole = confirmation(trial(small(RECIPE), selected, 16), 24)
    train_command.train(whole, tmp_path / "whole", data=data, device="cpu")
    carried = finished / f"confirm-{selected:g}"
    curves = [read_curves(each / "metrics.jsonl") for each in (carried, tmp_path / "whole")]
    assert curves[0] == curves[1]
    for file in ("model.safetensors", "state.safetensors"):
        one, two = (
            load_file(each / "checkpoints/step-00000040" / file)
            for each in (carried, tmp_path / "whole")
        )
        assert one.keys() == two.keys()
        assert all(one[name].equal(two[name]) for name in one)
    # And the trial itself is as it was: a finished run of 16 steps.
    assert json.loads((finished / f"rate-{selected:g}/summary.json").read_text())["steps"] == 16


def test_asked_again_nothing_is_tried_again(finished, monkeypatch):
    before = contents(finished)
    monkeypatch.setattr(train_command, "train", lambda *_, **__: pytest.fail("trained again"))
    monkeypatch.setattr(train_command, "resume", lambda *_, **__: pytest.fail("resumed"))
    run(finished, None)
    after = contents(finished)
    written = {"settings.json", "search.md", "search.json"}
    for name in before:
        assert after[name][name in written :] == before[name][name in written :], name


def test_stopped_anywhere_it_goes_on_to_the_same_result(finished, tmp_path, data, monkeypatch):
    """Stopped before each run in turn, and once between a run's folder and its first step."""
    out, trained, carry = tmp_path / "s", [], search_module._carry_on
    train = train_command.train

    def once(recipe, run, **options):
        if run.name in trained:
            return train(recipe, run, **options)
        trained.append(run.name)
        run.mkdir()
        (run / "recipe.json.part").touch()
        raise KeyboardInterrupt

    def cut(*arguments):
        carry(*arguments)
        monkeypatch.setattr(search_module, "_carry_on", carry)
        raise KeyboardInterrupt

    monkeypatch.setattr(train_command, "train", once)
    monkeypatch.setattr(search_module, "_carry_on", cut)
    for _ in range(len(RATES) + 1):
        with pytest.raises(KeyboardInterrupt):
            run(out, data)
    run(out, data)
    whole, pieces = (json.loads((each / "search.json").read_text()) for each in (finished, out))
    assert pieces == whole


def test_a_rate_that_diverges_is_a_result(tmp_path, data):
    found = run(tmp_path / "s", data, rates=(1e-3, 1e30), confirm=0)
    assert found.selected == 1e-3
    assert found.trials[1].score is None
    assert found.trials[1].note.startswith("diverged at step")
    assert "1e+30" in (tmp_path / "s/search.md").read_text()
    before = contents(tmp_path / "s/rate-1e+30")
    again = run(tmp_path / "s", data, rates=(1e-3, 1e30), confirm=0)
    assert again == found
    assert contents(tmp_path / "s/rate-1e+30") == before


def test_the_conclusion_says_where_the_winner_lies():
    def tried(rate: float, score: float | None) -> Trial:
        return Trial(rate, 10, f"rate-{rate:g}", score, ((10, 0.5),))

    trials = (tried(1e-4, 0.3), tried(1e-3, 0.2), tried(1e-2, None))
    assert "a better one may lie beyond" not in Search("r", trials, 1e-3, None, 1e-3).conclusion()
    lowest = Search("r", trials, 1e-4, tried(1e-4, 0.4), 1e-3)
    assert "It is the lowest rate tried" in lowest.conclusion()
    assert "Not confirmed" in lowest.conclusion()
    assert Search("r", trials, 1e-3, tried(1e-3, 0.1), 1e-3).confirmed
    assert "try lower ones" in Search("r", trials[2:], None, None, 1e-3).conclusion()


def test_data_may_be_moved_but_not_be_others(tmp_path, data):
    out = tmp_path / "s"
    found = run(out, data, confirm=0)
    moved = Path(shutil.copytree(data, tmp_path / "moved"))
    assert run(out, moved, confirm=0) == found
    replace(small(RECIPE).data, seed=1).prepare(tmp_path / "other")
    with pytest.raises(TrainingError, match="the training data are not those that"):
        run(out, tmp_path / "other", confirm=0)
    assert json.loads((out / "data.json").read_text())["path"] == str(moved)


def test_one_process_at_a_time(tmp_path, data, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainingError, match="without a launcher"):
        run(tmp_path / "s", data)


def test_other_settings_are_refused(finished, data):
    with pytest.raises(TrainingError, match="steps was 16, is 24"):
        run(finished, data, steps=24)
    with pytest.raises(TrainingError, match="recipe.standardization was not set"):
        search(
            replace(small(RECIPE), standardization=(0.0, 1.0)),
            finished,
            **{"rates": RATES, "steps": 16, "confirm": 24, "data": data, "device": "cpu"},
        )


MISTAKES = {
    "recipe": (["darcy/fts"], "unknown recipe 'darcy/fts'"),
    "rates": (["darcy/fst", "--rates", "1e-3", "1e-3"], "rates must be one or more different"),
    "names": (["darcy/fst", "--rates", "1e-3", "1.0000001e-3"], "rates must be one or more diff"),
    "rate": (["darcy/fst", "--rates", "-1"], "rates must be above 0"),
    "steps": (["darcy/fst", "--steps", "10"], "steps must be a multiple of 8, got 10"),
    "confirm": (["darcy/fst", "--confirm", "-1"], "confirm must be at least 1 step"),
    "taken": (["darcy/fst", "--out", "taken"], "taken already holds files"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_clear_line(capsys, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("taken").mkdir()
    Path("taken/thesis.txt").write_text("precious")
    words, message = MISTAKES[name]
    out = [] if "--out" in words else ["--out", "new"]
    assert main(["search", *words, *out, "--device", "cpu"]) == USER_ERROR
    err = capsys.readouterr().err
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["taken", "thesis.txt"]


@pytest.mark.parametrize("command", ["search", "compare"])
def test_an_interruption_says_how_to_go_on(capsys, monkeypatch, command):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"fst.commands.{command}.{command}", interrupted)
    budget = ["--budget", "1m"] if command == "compare" else []
    name = "darcy" if command == "compare" else "darcy/fst"
    assert main([command, name, *budget, "--out", "x"]) == INTERRUPTED
    assert "the same command goes on where it stopped" in capsys.readouterr().err
