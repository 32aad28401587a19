"""Several comparisons whose runs share a device."""

import argparse
import json
from pathlib import Path
from types import ModuleType

import pytest

from comparison_recipes import small
from fst.training.budget import TimeBudget

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def equal_terms(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import equal_terms

    return equal_terms


def test_steps_are_those_of_a_device_of_ones_own_and_nothing_is_done_twice(equal_terms, tmp_path):
    data, out = tmp_path / "data", tmp_path / "out"
    small("burgers-single/fst").data.prepare(data)
    options = argparse.Namespace(
        **{"out": out, "tasks": ["burgers-single:fst,deeponet*2"], "budget": "1s"},
        **{"workers": 2, "compilers": 2, "data": data, "device": "cpu", "report_every": 0.2},
        turns=tmp_path / "turns",
        set=["deeponet.training.learning_rate=0.002"],
    )
    (found,) = equal_terms.run(options, make=small)
    folder = out / "burgers-single"
    assert json.loads((folder / "comparison.json").read_text())["task"] == "burgers-single"
    assert {each.model: each.learning_rate for each in found.results}["deeponet"] == 0.002
    for result in found.results:
        assert result.status == "done"
        plan = json.loads((folder / f"plans/{result.model}.json").read_text())
        measured = plan["calibration"]
        rate = measured["updates"] / measured["seconds"]
        assert result.steps == plan["steps"] == TimeBudget(1.0).steps(rate)
        assert result.training_seconds == pytest.approx(1.0, rel=0.1)
        assert result.steps_per_second == pytest.approx(rate)
        assert result.curve[-1][0] == pytest.approx(result.training_seconds, abs=0.01)
        summary = json.loads((folder / result.run / "summary.json").read_text())
        assert summary["steps"] == result.steps
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/summary.json")}
    (again,) = equal_terms.run(options, make=small)
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/summary.json")} == before
    assert again.results == found.results


@pytest.mark.parametrize(
    ("task", "change", "message"),
    [
        ("burgers-single:fst*x", "", r"MODEL\*SEEDS such as fst\*3, got 'fst\*x'"),
        ("burgers-single:fts", "", "burgers-single has no model 'fts'"),
        ("burgers-single:fst", "fno.model.width=8", "with a model of fst: 'fno.model.width=8'"),
    ],
)
def test_mistakes_are_named_before_anything_is_made(equal_terms, tmp_path, task, change, message):
    options = argparse.Namespace(out=tmp_path / "out", tasks=[task], set=[change] if change else [])
    with pytest.raises(ValueError, match=message):
        equal_terms.run(options, make=small)
    assert not (tmp_path / "out").exists()


def test_a_model_that_cannot_be_measured_is_left_out(equal_terms, tmp_path, capfd):
    data, out = tmp_path / "data", tmp_path / "out"
    small("burgers-single/fst").data.prepare(data)
    options = argparse.Namespace(
        **{"out": out, "tasks": ["burgers-single:deeponet"], "budget": "0.0001s"},
        **{"workers": 1, "compilers": 1, "data": data, "device": "cpu", "report_every": 0.2},
        turns=None,
        set=[],
    )
    (found,) = equal_terms.run(options, make=small)
    assert [result.status for result in found.results] == ["waiting"]
    assert "could not be measured" in capfd.readouterr().err
