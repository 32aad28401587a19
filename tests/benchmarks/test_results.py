"""The page of results is what the kept rows say, and the committed page is up to date."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fst.data.files import DataError
from fst.evaluation.comparison import Comparison, Result, Score
from fst.evaluation.rows import Row, write_rows
from fst.recipes import find

ROOT = Path(__file__).parents[2]
BENCHMARKS = str(ROOT / "benchmarks")
BEGIN, END = "<!-- written by benchmarks/results.py -->", "<!-- end of results -->"
RECORD = {
    "run": "a", "task": "burgers-single", "model": "FST", "recipe": "fast/burgers-single/fst",
    "settings": "muon 0.001",
    "seed": 7, "seconds": 58.2, "steps": 3000, "error": 0.02, "paper_error": 0.04185,
    "nearest": {"4": 0.3, "16": 0.021}, "hardware": "NVIDIA H200", "torch": "2.11.0", "samples": 84,
    "commit": "abcdef0123456789", "modified": False, "curve": [],
}  # fmt: skip
ROW = Row(
    run="a", recipe="fast/burgers-single/fst", task="burgers-single", model="FST", seed=7,
    git_hash=None, parameters=10, split="test", grid=(201, 1024), neighbors=None, samples=2,
    error=0.02, paper_error=None, errors=(0.01, 0.03), groups=(), protocol="p", fst_version="0",
    torch_version="2", device="cuda", training=None,
)  # fmt: skip
SUMMARY = {
    "steps": 3000, "seconds": 100.0, "update_seconds": 58.25, "selected_step": 3000,
    "validation_error": 0.021,
}  # fmt: skip
ENVIRONMENT = {
    "git": {"commit": "abc", "modified": False},
    "versions": {"torch": "2.11.0"},
    "hardware": {"cpus": 16, "gpus": [{"name": "NVIDIA H200"}]},
}


def result(model: str, error: float, number: int = 1) -> Result:
    return Result(
        model=model, title=model.upper(), number=number, seed=10 + number, status="done",
        run=f"{model}-seed{number}", learning_rate=1e-3, predictor_learning_rate=None,
        parameters=1000, steps=500, training_seconds=120.0, all_seconds=130.0,
        steps_per_second=4.2, scores=(Score("relative_l2", (201, 1024), 84, error, None),),
        curve=((60.0, 2 * error), (120.0, error)),
    )  # fmt: skip


def ablation(names, error: float, number: int = 1, **more) -> dict:
    return {
        "names": names, "number": number, "seed": number, "steps": 6000, "seconds": 100.0,
        "error": error, "nearest": {"16": 2 * error}, "hardware": "NVIDIA H200",
        "torch": "2.11.0", "commit": "ab", **more,
    }  # fmt: skip


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    sys.modules.pop("results", None)
    import results

    return results


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    for name, budget in (("two-minutes", "2 minutes"), ("steps", "500 steps")):
        runs = (result("fst", 0.02), result("fst", 0.04, 2), result("fno", 0.05))
        each = Comparison("fast/burgers-single", budget, runs, {}, {"torch": "2"}, (), ("c" * 40,))
        (folder / "comparisons" / name).mkdir(parents=True)
        text = json.dumps(each.to_json())
        (folder / "comparisons" / name / "comparison.json").write_text(text)
    (folder / "records.json").write_text(json.dumps([RECORD]))
    (folder / "ablations").mkdir()
    rows = [
        ablation(["anchors-adaptive-fixed-32", "refine-4"], 0.03),
        ablation(["anchors-adaptive-fixed-32", "refine-4"], 0.05, 2),
        ablation(["refine-1"], 0.06),
        ablation(["observe-first"], 0.04),
        {"names": ["refine-8"], "number": 1, "steps": 6000, "failure": "RuntimeError: no"},
    ]
    (folder / "ablations" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "README.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    return folder


def test_the_page_says_what_the_rows_say(module, results, tmp_path):
    out, readme = tmp_path / "docs" / "results.md", tmp_path / "README.md"
    words = [str(results), "--out", str(out), "--readme", str(readme)]
    module.main(words)
    text = out.read_text()
    for expected in (
        "| fast/burgers-single/fst | 58.2 | 0.02000 | 0.04185 | 1 | 3,000 | 84 | 7 | NVIDIA H200 |",
        "1. muon 0.001\n",
        "## Equal time: fast/burgers-single",
        "## Equal steps: fast/burgers-single",
        "| FST | 1,000 | 500 |",
        "0.03000",  # the mean of FST's two seeds
        "Seeds: 11, 12. Commits: cccccccccc.",
        "a linear warm-up over a tenth of its steps (at most 1,000)",
        "| a | 0.30000 | 0.02100 | 0.02000 |",
        "NVIDIA H200, torch 2.11.0",
    ):
        assert expected in text
    for name in ("two-minutes", "steps"):
        figure = (out.parent / f"images/error-over-seconds-{name}.svg").read_text()
        assert ">FST<" in figure
        assert ">FNO<" in figure
        assert f"images/error-over-seconds-{name}.svg" in text
    short = readme.read_text()
    assert short.startswith(f"before\n{BEGIN}\n")
    assert short.endswith(f"{END}\nafter\n")
    assert "old" not in short
    assert "2 minutes for each model, mean relative L2 error: FST 0.03000, FNO 0.05000." in short
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    module.main(words)
    assert {path: path.read_bytes() for path in before} == before


def test_images_are_told_by_the_accuracy_of_first_guesses(module, results, tmp_path):
    def scored(model: str, first: float, five: float) -> Result:
        errors = {"top1_error": first, "top5_error": five}
        scores = tuple(Score(name, None, 100, error, None) for name, error in errors.items())
        return replace(result(model, first), scores=scores)

    runs = (scored("images-vit", 0.25, 0.0), scored("images-fst", 0.2, 0.1))
    each = Comparison("own-images", "280 seconds", runs, {}, {"torch": "2"}, (), ("c" * 40,))
    folder = results / "comparisons" / "two-minutes"
    (folder / "comparison.json").write_text(json.dumps(each.to_json()))
    (folder / "recipes").mkdir()
    for model in ("vit", "fst"):  # a user's images have decided some settings of these
        recipe = replace(find(f"own/images-{model}"), task="own-images")
        (folder / f"recipes/images-{model}.json").write_text(json.dumps(recipe.to_json()))
    out, readme = tmp_path / "results.md", tmp_path / "README.md"
    module.write_results(results, out, readme)
    words = "280 seconds for each model, accuracy in percent: IMAGES-FST 80.000, IMAGES-VIT 75.000."
    assert words in readme.read_text()
    figure = (tmp_path / "images/error-over-seconds-two-minutes.svg").read_text()
    assert "validation: share of wrong first guesses" in figure


def test_the_short_form_leaves_out_what_was_beaten_in_about_the_same_time(
    module, results, tmp_path
):
    beaten = RECORD | {"run": "b", "steps": 9000, "seconds": 85.0, "error": 0.0195}
    longer = RECORD | {"run": "c", "steps": 6000, "seconds": 91.0, "error": 0.019}
    fewer = longer | {"run": "e", "settings": "muon 0.001, 512 points", "error": 0.0195}
    other = RECORD | {"run": "d", "steps": 9500, "seconds": 99.0, "task": "darcy", "error": 0.9}
    (results / "records.json").write_text(json.dumps([longer, beaten, RECORD, fewer, other]))
    out, readme = tmp_path / "results.md", tmp_path / "README.md"
    module.write_results(results, out, readme)
    lines = [line for line in readme.read_text().splitlines() if "H200" in line]
    assert ["3,000" in lines[0], "6,000" in lines[1], "9,500" in lines[2]] == [True] * 3
    assert len(lines) == 3
    assert " 9,000 " in out.read_text()


def test_settings_that_a_recipe_no_longer_has_are_told(module, results, tmp_path):
    name, now = RECORD["recipe"], module.find(RECORD["recipe"]).to_json()
    assert not module.has_changed(name, module.settings(now))
    then = now | {"training": now["training"] | {"batch_size": 7}}
    assert module.has_changed(name, module.settings(then))
    fewer = now | {"model": now["model"] | {"points_from_sobol": 0}}
    assert ", evaluated at 256 anchors and 0 Sobol points" in module.settings(fewer)
    assert module.settings(now) == module.settings(fewer).replace(
        ", evaluated at 256 anchors and 0 Sobol points", ""
    )
    readme, page = tmp_path / "README.md", tmp_path / "page.md"
    for recipe, told in ((now, False), (then, True)):
        record = RECORD | {"settings": module.settings(recipe)}
        (results / "records.json").write_text(json.dumps([record]))
        recipes = results / "comparisons" / "two-minutes" / "recipes"
        recipes.mkdir(exist_ok=True)
        (recipes / "fst.json").write_text(json.dumps(recipe))
        module.write_results(results, page, readme)
        assert f"- FST: {module.settings(recipe)}." in page.read_text()
        short = readme.read_text()
        assert (f"| {name}, other settings |" in short) is told
        assert ("mean relative L2 error (other settings): FST" in short) is told
        assert ("the recipe has changed" in short) is told


def test_ablations_stand_beside_the_papers(module, results):
    rows = [json.loads(line) for line in (results / "ablations/rows.jsonl").read_text().split("\n")]
    lines = {line[0]: line[1:] for line in module.ablation_table(rows).lines}
    assert len(lines) == 14
    assert lines["refine-4"] == lines["anchors-adaptive-fixed-32"]
    assert lines["refine-4"][:4] == ("0.04069", "0.04000 ± 0.01414", "0.08000 ± 0.02828", "2")
    assert lines["refine-8"][1:4] == ("–", "–", "0")
    found = {line[0]: line[1:] for line in module.claim_table(rows).lines}
    assert found["Four refinement steps, not one"] == ("-34.5%", "-33.3%", "yes")
    assert found["Observations in every step"][2] == "not decided by these seeds"
    assert found["Four refinement steps, not eight"][1:] == ("–", "not measured")
    assert module.verdict([0.5], [0.4, 0.3]) == "no"


def test_mistakes_are_named_and_nothing_is_lost(module, results, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("no marks")
    with pytest.raises(DataError, match="expected one line"):
        module.write_results(results, tmp_path / "page.md", readme)
    assert readme.read_text() == "no marks"
    with pytest.raises(DataError, match="absent.md: there is no such file"):
        module.write_results(results, tmp_path / "other.md", tmp_path / "absent.md")
    assert not (tmp_path / "other.md").exists()
    (results / "ablations" / "rows.jsonl").write_text("{")
    with pytest.raises(DataError, match=r"rows.jsonl: expected one JSON object a line"):
        module.main([str(results), "--out", str(tmp_path / "page.md")])
    with pytest.raises(DataError, match="there is no such folder of results"):
        module.main([str(tmp_path / "none")])


def test_the_committed_page_is_up_to_date(module, tmp_path):
    """After new rows: python benchmarks/results.py --readme README.md."""
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    module.write_results(ROOT / "results", tmp_path / "docs/results.md", tmp_path / "README.md")
    for name in ("README.md", "docs/results.md"):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text()
    drawn = {path.name for path in (tmp_path / "docs").rglob("*.svg")}
    assert drawn == {path.name for path in (ROOT / "docs/images").glob("error-over-seconds-*.svg")}


def scored(folder, **changes):
    folder.mkdir()
    row = replace(ROW, run=folder.name, **changes)
    coarse = replace(row, grid=(32, 32), error=0.5, errors=(0.5, 0.5))
    local = replace(row, neighbors=16, error=0.6, errors=(0.6, 0.6))
    write_rows(folder / "results" / "rows.json", [coarse, local, row])
    (folder / "recipe.json").write_text(json.dumps(find(ROW.recipe).to_json()))
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
    lines = [{"kind": "validation", "step": step, "error": 30 / step} for step in (1500, 3000)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


def test_the_finest_grid_with_all_anchors_counts(module, tmp_path):
    out = tmp_path / "kept" / "records.json"
    (record,) = module.write_records([scored(tmp_path / "a")], out)
    assert module.read_records(out) == [json.loads(json.dumps(record))]
    assert record["error"] == 0.02
    assert record["seconds"] == 58.2
    expected = {
        "task": "burgers-single", "model": "FST", "recipe": "fast/burgers-single/fst", "seed": 7,
        "steps": 3000, "hardware": "NVIDIA H200", "commit": "abc",
    }  # fmt: skip
    assert {name: record[name] for name in expected} == expected
    assert module.read_records(out)[0]["nearest"] == {"16": 0.6}
    recipe = find(ROW.recipe)
    for expected in (
        f"muon 0.001 × 1.5, momentum {recipe.training.momentum:g}, decay 0.02, batch 48, ",
        "2500 queries of 201×100, local scales, predictions with all anchors",
    ):
        assert expected in record["settings"]
    assert record["curve"] == ((29.12, 0.02), (58.25, 0.01))  # seconds of updates


def test_what_a_run_started_from_is_part_of_its_cost(module, tmp_path):
    before = [
        {"steps": 500, "update_seconds": 20.5, "hardware": "CPU x86_64, 2 threads", "commit": "a"},
        {"steps": 1000, "update_seconds": 41.0, "hardware": "NVIDIA H200", "commit": "b"},
    ]
    run = scored(tmp_path / "a")
    (run / "run.json").write_text(json.dumps({"before": before}))
    record = module.describe(run)
    assert record["steps"] == 4500
    assert record["seconds"] == pytest.approx(58.25 + 61.5, abs=0.1)
    assert record["hardware"] == "CPU x86_64, 2 threads, then NVIDIA H200"


def test_runs_are_added_and_replaced(module, tmp_path):
    out = tmp_path / "records.json"
    module.write_records([scored(tmp_path / "a"), scored(tmp_path / "b", seed=8)], out)
    other = tmp_path / "other"
    other.mkdir()
    module.write_records([scored(other / "a", seed=9)], out)
    assert [(each["run"], each["seed"]) for each in module.read_records(out)] == [
        ("a", 9),
        ("b", 8),
    ]


def test_mistaken_runs_are_named_and_nothing_is_overwritten(module, tmp_path):
    out = tmp_path / "records.json"
    out.write_text("[1]")
    with pytest.raises(DataError, match="does not hold records"):
        module.write_records([scored(tmp_path / "a")], out)
    assert out.read_text() == "[1]"
    (tmp_path / "a" / "summary.json").write_text("{}")
    with pytest.raises(DataError, match="do not say the seconds of all its updates"):
        module.write_records([tmp_path / "a"], tmp_path / "new.json")
    with pytest.raises(DataError, match="no such run folder"):
        module.main([str(tmp_path / "results"), "--add", str(tmp_path / "b")])


def test_single_seeds_that_are_close_decide_nothing(module):
    assert module.verdict([0.0136], [0.0138]) == "not decided by one seed"
    assert module.verdict([0.0138], [0.0136]) == "not decided by one seed"
    assert module.verdict([0.0136], [0.0200]) == "yes"
    assert module.verdict([0.0200], [0.0136]) == "no"
    assert module.verdict([0.0136, 0.0137], [0.0138, 0.0139]) == "yes"
