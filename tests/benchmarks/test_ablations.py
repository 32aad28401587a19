"""The runs of the paper's ablations: which there are, what a row says, and going on."""

import json
import sys
from pathlib import Path

import pytest

from comparison_recipes import shrink_model, small
from fst.recipes import find

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    sys.modules.pop("ablations", None)
    import ablations

    return ablations


def test_every_row_of_the_papers_tables_is_trained_once(module):
    jobs = module.jobs([1, 2], 6000, [])
    names = [name for job in jobs for name in job.names]
    assert len(set(names)) == 14
    assert len(jobs) == 2 * 13  # two of the fourteen are the same model
    assert ("anchors-adaptive-fixed-32", "refine-4") in [job.names for job in jobs]
    assert len({job.recipe().training.seed for job in jobs}) == 2
    assert [job.names for job in module.jobs([1], 6000, ["refine-8"])] == [("refine-8",)]


def test_only_model_and_length_differ_from_the_fast_recipe(module):
    job, fast = module.jobs([1], 6000, ["refine-8"])[0], find(module.FAST)
    recipe = job.recipe()
    assert recipe.model == find("ablation/refine-8").model
    assert recipe.training.schedule.maximum == 6000
    for name in ("optimizer", "learning_rate", "augment", "clip", "batch_size", "seed", "queries"):
        assert getattr(recipe.training, name) == getattr(fast.training, name)
    assert recipe.evaluation.grids == ((201, 1024),)


def test_runs_add_rows_and_are_not_repeated(module, monkeypatch, tmp_path, capsys):
    model = shrink_model(find(module.FAST).model)
    some = [module.Job(("refine-4",), model, 1, 20), module.Job(("refine-8",), model, 1, 20)]
    monkeypatch.setattr(module, "find", small)
    monkeypatch.setattr(module, "jobs", lambda seeds, steps, only: some)
    out = tmp_path / "kept" / "rows.jsonl"
    words = ["--out", str(out), "--data", str(tmp_path / "data"), "--device", "cpu"]
    execute = module.execute

    def fails(job, *rest):
        if job.names == ("refine-8",):
            raise RuntimeError("no memory\nand more")
        return execute(job, *rest)

    monkeypatch.setattr(module, "execute", fails)
    module.main(words)
    good, failed = [json.loads(line) for line in out.read_text().splitlines()]
    assert good["names"] == ["refine-4"]
    assert 0 < good["error"] < 10
    assert good["validation"] > 0
    assert set(good["nearest"]) == {"1", "2", "4", "8"}
    assert good["steps"] == 20
    assert failed["failure"] == "RuntimeError: no memory"
    assert "1 runs to do" not in capsys.readouterr().out

    monkeypatch.setattr(module, "execute", execute)
    module.main(words)
    assert "1 runs to do, 1 rows there" in capsys.readouterr().out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["names"] for row in rows] == [["refine-4"], ["refine-8"], ["refine-8"]]
    # The same model, data and seed give the same numbers.
    assert rows[2]["error"] == pytest.approx(good["error"], rel=1e-3)

    module.main([*words, "--minutes", "0"])
    assert len(out.read_text().splitlines()) == 3
    assert [path.name for path in out.parent.iterdir()] == ["rows.jsonl"]  # no weights


def test_a_run_that_would_not_end_in_time_is_not_started(module, monkeypatch, tmp_path):
    model = shrink_model(find(module.FAST).model)
    monkeypatch.setattr(module, "find", small)
    monkeypatch.setattr(module, "jobs", lambda *_: [module.Job(("refine-4",), model, 1, 20)])
    out, data = tmp_path / "rows.jsonl", tmp_path / "data"
    module.main(["--out", str(out), "--data", str(data), "--device", "cpu", "--minutes", "1"])
    assert not out.exists()
