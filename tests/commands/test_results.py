"""fst results: the page is what the kept rows say, and the committed page is up to date."""

import json
from pathlib import Path

import pytest

from fst.cli import USER_ERROR, main
from fst.commands.results import BEGIN, END, ablation_table, claim_table, verdict, write_results
from fst.data.files import DataError
from fst.evaluation.comparison import Comparison, Result, Score

ROOT = Path(__file__).parents[2]
RECORD = {
    "run": "a", "task": "burgers-single", "model": "FST", "recipe": "fast/burgers-single/fst",
    "seed": 7, "seconds": 58.2, "steps": 3000, "error": 0.02, "paper_error": 0.04185,
    "nearest": {"4": 0.3, "16": 0.021}, "hardware": "NVIDIA H200", "torch": "2.11.0",
    "commit": "abcdef0123456789", "modified": False, "curve": [],
}  # fmt: skip


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


def test_the_page_says_what_the_rows_say(results, tmp_path):
    out, readme = tmp_path / "docs" / "results.md", tmp_path / "README.md"
    words = ["results", str(results), "--out", str(out), "--readme", str(readme)]
    assert main(words) == 0
    text = out.read_text()
    for expected in (
        "| fast/burgers-single/fst | FST | 7 | 3,000 | 58.2 | 0.02000 | 0.04185 | abcdef0123 |",
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
    assert "2 minutes for each model: FST 0.03000, FNO 0.05000." in short
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    assert main(words) == 0
    assert {path: path.read_bytes() for path in before} == before


def test_ablations_stand_beside_the_papers(results):
    rows = [json.loads(line) for line in (results / "ablations/rows.jsonl").read_text().split("\n")]
    lines = {line[0]: line[1:] for line in ablation_table(rows).lines}
    assert len(lines) == 14
    assert lines["refine-4"] == lines["anchors-adaptive-fixed-32"]
    assert lines["refine-4"][:4] == ("0.04069", "0.04000 ± 0.01414", "0.08000 ± 0.02828", "2")
    assert lines["refine-8"][1:4] == ("–", "–", "0")
    found = {line[0]: line[1:] for line in claim_table(rows).lines}
    assert found["Four refinement steps, not one"] == ("-34.5%", "-33.3%", "yes")
    assert found["Observations in every step"][2] == "not decided by these seeds"
    assert found["Four refinement steps, not eight"][1:] == ("–", "not measured")
    assert verdict([0.5], [0.4, 0.3]) == "no"


def test_mistakes_are_named_and_nothing_is_lost(results, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text("no marks")
    with pytest.raises(DataError, match="expected one line"):
        write_results(results, tmp_path / "page.md", readme)
    assert readme.read_text() == "no marks"
    with pytest.raises(DataError, match="absent.md: there is no such file"):
        write_results(results, tmp_path / "other.md", tmp_path / "absent.md")
    assert not (tmp_path / "other.md").exists()
    (results / "ablations" / "rows.jsonl").write_text("{")
    assert main(["results", str(results), "--out", str(tmp_path / "page.md")]) == USER_ERROR
    assert "rows.jsonl: expected one JSON object a line" in capsys.readouterr().err
    assert main(["results", str(tmp_path / "none")]) == USER_ERROR
    assert "there is no such folder of results" in capsys.readouterr().err


def test_the_committed_page_is_up_to_date(tmp_path):
    """After new rows: fst results --readme README.md."""
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    write_results(ROOT / "results", tmp_path / "docs/results.md", tmp_path / "README.md")
    for name in ("README.md", "docs/results.md"):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text()
    drawn = {path.name for path in (tmp_path / "docs").rglob("*.svg")}
    assert drawn == {path.name for path in (ROOT / "docs/images").glob("error-over-seconds-*.svg")}
