"""A test set scored in parts has the rows of `fst evaluate`."""

import shutil
import sys
from pathlib import Path

import pytest

from fst.cli import main
from fst.evaluation.rows import RESULTS, ROWS, read_rows
from tiny import BURGERS, MODEL, TRAINING

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
# Three samples of the first viscosity and two of the second, in batches of two.
DATA = [*BURGERS, "--data.viscosities", "0.01", "0.1", "--data.test", "5", "--data.condition"]
SCORED = ["--evaluation.grids", "11", "32", "--evaluation.batch-size", "2"]


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    sys.modules.pop("score_in_parts", None)
    import score_in_parts

    return score_in_parts


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Trained and scored as users do."""
    folder = tmp_path_factory.mktemp("parts")
    options = ["--device", "cpu", *MODEL, *TRAINING, *DATA, *SCORED]
    words = ["fast/burgers-all/fst", "--out", folder / "run", "--data", folder / "data"]
    assert main(["train", *map(str, words), *options]) == 0
    assert main(["evaluate", str(folder / "run"), "--device", "cpu"]) == 0
    return folder / "run"


def test_the_parts_have_the_rows_of_the_whole(parts, run, tmp_path, capsys):
    again = tmp_path / "run"
    shutil.copytree(run, again, ignore=shutil.ignore_patterns(RESULTS))
    trivial = str(run / RESULTS / ROWS)
    parts.main([str(again), "--part", "0"])
    with pytest.raises(SystemExit, match="1 of 3 batches are not scored yet"):
        parts.main([str(again), "--trivial", trivial])
    parts.main([str(again), "--part", "1"])
    (file,) = (again / "parts").glob("1-of-2-*.jsonl")
    kept = file.read_text()
    file.write_text(kept + kept[:20])  # the next batch was cut off
    parts.main([str(again), "--part", "1"])  # nothing is scored twice
    assert file.read_text() == kept
    parts.main([str(again), "--trivial", trivial])
    assert "on 5 test samples" in capsys.readouterr().out
    found, expected = read_rows(again / RESULTS / ROWS), read_rows(run / RESULTS / ROWS)
    assert [row.model for row in found] == [row.model for row in expected]
    assert [group.name for group in found[0].groups] == ["0.01", "0.1"]
    # As `fst evaluate` has them: solved together there, one by one here.
    assert found[0].errors == pytest.approx(expected[0].errors, rel=1e-5)
    (channel,), (known,) = found[0].channels, expected[0].channels
    assert (channel.rmse, channel.std) == pytest.approx((known.rmse, known.std), rel=1e-5)
    assert found[0].protocol == expected[0].protocol


def test_parts_of_other_settings_are_not_mixed(parts, run, tmp_path):
    again = tmp_path / "run"
    shutil.copytree(run, again, ignore=shutil.ignore_patterns(RESULTS))
    parts.main([str(again), "--part", "0"])
    for file in (again / "recipe.json", again / "best" / "config.json"):
        text = file.read_text()
        assert '"prediction_symmetry": "odd-reflection"' in text
        file.write_text(text.replace("odd-reflection", "even-reflection"))
        if file.name == "recipe.json":
            with pytest.raises(SystemExit, match="recipe.json differ"):
                parts.main([str(again), "--part", "1"])
    parts.main([str(again), "--part", "1"])
    with pytest.raises(SystemExit, match="2 of 3 batches are not scored yet"):
        parts.main([str(again), "--trivial", str(run / RESULTS / ROWS)])


def test_what_is_not_scored_in_parts_is_named(parts, run, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        parts.main([str(run)])
    assert "either --part or --trivial" in capsys.readouterr().err
    other = tmp_path / "run"
    shutil.copytree(run, other)
    recipe = (other / "recipe.json").read_text()
    (other / "recipe.json").write_text(recipe.replace('"neighbors": []', '"neighbors": [2]'))
    with pytest.raises(SystemExit, match="the grid \\(11, 32\\) alone, no neighbors"):
        parts.main([str(other), "--part", "0"])
