"""fst records: what scored runs reached, from their folders alone."""

import json
from dataclasses import replace

import pytest

from fst import cli
from fst.commands.results import read_records, write_records
from fst.data.files import DataError
from fst.evaluation.rows import Row, write_rows

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


def scored(folder, **changes):
    folder.mkdir()
    row = replace(ROW, run=folder.name, **changes)
    coarse = replace(row, grid=(32, 32), error=0.5, errors=(0.5, 0.5))
    local = replace(row, neighbors=16, error=0.6, errors=(0.6, 0.6))
    write_rows(folder / "results" / "rows.json", [coarse, local, row])
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
    lines = [{"kind": "validation", "step": step, "error": 30 / step} for step in (1500, 3000)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


def test_the_finest_grid_with_all_anchors_counts(tmp_path):
    out = tmp_path / "kept" / "records.json"
    (record,) = write_records([scored(tmp_path / "a")], out)
    assert read_records(out) == [json.loads(json.dumps(record))]
    assert record["error"] == 0.02
    assert record["seconds"] == 58.2
    expected = {
        "task": "burgers-single", "model": "FST", "recipe": "fast/burgers-single/fst", "seed": 7,
        "steps": 3000, "hardware": "NVIDIA H200", "commit": "abc",
    }  # fmt: skip
    assert {name: record[name] for name in expected} == expected
    assert read_records(out)[0]["nearest"] == {"16": 0.6}
    assert record["curve"] == ((29.12, 0.02), (58.25, 0.01))  # seconds of updates


def test_runs_are_added_and_replaced(tmp_path):
    out = tmp_path / "records.json"
    write_records([scored(tmp_path / "a"), scored(tmp_path / "b", seed=8)], out)
    other = tmp_path / "other"
    other.mkdir()
    write_records([scored(other / "a", seed=9)], out)
    assert [(each["run"], each["seed"]) for each in read_records(out)] == [("a", 9), ("b", 8)]


def test_mistakes_are_named_and_nothing_is_overwritten(tmp_path, capsys):
    out = tmp_path / "records.json"
    out.write_text("[1]")
    with pytest.raises(DataError, match="does not hold records"):
        write_records([scored(tmp_path / "a")], out)
    assert out.read_text() == "[1]"
    (tmp_path / "a" / "summary.json").write_text("{}")
    with pytest.raises(DataError, match="does not say the seconds of its updates"):
        write_records([tmp_path / "a"], tmp_path / "new.json")
    assert cli.main(["records", "--out", str(tmp_path / "new.json")]) != 0
    assert cli.main(["records", str(tmp_path / "b"), "--out", str(tmp_path / "new.json")]) != 0
    assert "no such run folder" in capsys.readouterr().err
