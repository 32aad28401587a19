"""Result rows on disk, and the rule that a test set is scored once."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evaluation_fakes import (
    ORIGIN,
    SETTINGS,
    grouped_row,
    made_row,
    parts_left,
    some_model,
    some_rows,
    some_test,
)
from fst.data.files import DataError
from fst.evaluation import rows as runs
from fst.evaluation.fields import read_fields
from fst.evaluation.protocol import sample_fields
from fst.evaluation.rows import (
    FIELDS,
    ROWS,
    EvaluationError,
    GroupError,
    read_rows,
    read_run,
    score_once,
    shortened,
    write_rows,
)


def test_rows_come_back_as_they_were(tmp_path):
    rows = [*some_rows(), made_row(grid=None, neighbors=16, training=None, git_hash=None)]
    write_rows(tmp_path / "deep" / ROWS, rows)
    assert read_rows(tmp_path / "deep" / ROWS) == rows
    assert not parts_left(tmp_path)


def test_the_file_is_a_list_with_one_row_a_line(tmp_path):
    write_rows(tmp_path / ROWS, [made_row(), made_row(neighbors=4)])
    text = (tmp_path / ROWS).read_text()
    assert len(text.splitlines()) == 4
    first = json.loads(text)[0]
    assert first["recipe"] == "burgers-all/fst"
    assert first["errors"] == [0.1, 0.2, 0.6]


@given(st.floats(min_value=0, width=32, allow_nan=False, allow_infinity=False))
def test_shortened_numbers_are_the_same_in_float32(value):
    assert torch.tensor(shortened(value), dtype=torch.float32).item() == value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"error": 0.5}, "error is 0.5, but the mean of errors is 0.3"),
        ({"samples": 4}, "samples is 4, but errors holds 3"),
        ({"errors": []}, "samples is 3, but errors holds 0"),
        ({"errors": [-0.1, 0.4, 0.6]}, "finite and not negative"),
        ({"groups": [{"name": "1", "samples": 2, "error": 0.3, "paper_error": None}]}, "groups"),
        ({"groups": [{"name": "1", "samples": 3, "error": 0.2, "paper_error": None}]}, "groups is"),
        ({"seed": 1.5}, "seed"),
        ({"grid": "full"}, "grid"),
        ({"surprise": 1}, "surprise"),
        ({"metric": "luck"}, "metric must be one of relative_l2"),
    ],
)
def test_rows_that_were_tampered_with_are_refused(tmp_path, change, message):
    write_rows(tmp_path / ROWS, [made_row()])
    (row,) = json.loads((tmp_path / ROWS).read_text())
    (tmp_path / ROWS).write_text(json.dumps([{**row, **change}]))
    with pytest.raises(DataError, match=message) as caught:
        read_rows(tmp_path / ROWS)
    assert ROWS in str(caught.value)


@pytest.mark.parametrize("text", ["", "[", "{}", "[1]", "[]", '[{"run": "a"}]', "\udcff"])
def test_files_that_hold_no_rows_are_refused(tmp_path, text):
    (tmp_path / ROWS).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=ROWS):
        read_rows(tmp_path / ROWS)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="no such file; expected result rows"):
        read_rows(tmp_path / ROWS)


def test_wrong_rows_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="mean of errors"):
        write_rows(tmp_path / ROWS, [replace(made_row(), error=0.1)])
    assert list(tmp_path.iterdir()) == []


def test_groups_must_share_the_mean():
    row = grouped_row({"0.1": 0.1, "1": 0.3})
    assert row.groups == (GroupError("0.1", 1, 0.1), GroupError("1", 1, 0.3))


def test_a_run_is_scored_once(tmp_path):
    calls = []

    def compute():
        calls.append(1)
        return [made_row(protocol="first")], None

    first = score_once(tmp_path, "first", compute)
    assert score_once(tmp_path, "first", compute) == first
    assert calls == [1]
    with pytest.raises(EvaluationError, match="scored before, with other weights"):
        score_once(tmp_path, "second", compute)
    assert calls == [1]
    score_once(tmp_path, "first", compute, again=True)
    assert calls == [1, 1]


def test_scoring_again_replaces_rows_and_fields(tmp_path):
    model, test = some_model(), some_test()
    fields = sample_fields(model, test, SETTINGS, ORIGIN)
    score_once(tmp_path, "p", lambda: ([made_row()], fields))
    assert read_fields(tmp_path / FIELDS).rows.tolist() == [0, 1, 2, 3]
    score_once(tmp_path, "q", lambda: ([made_row(protocol="q")], None), again=True)
    assert read_rows(tmp_path / ROWS)[0].protocol == "q"
    assert not (tmp_path / FIELDS).exists()  # those were another protocol's


def test_a_failure_leaves_no_rows_behind(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(runs, "write_rows", fail)
    fields = sample_fields(some_model(), some_test(), SETTINGS, ORIGIN)
    with pytest.raises(OSError, match="disk full"):
        score_once(tmp_path, "p", lambda: ([made_row()], fields))
    assert not (tmp_path / ROWS).exists()


def test_rows_of_another_protocol_are_not_stored(tmp_path):
    with pytest.raises(ValueError, match="rows of protocol 'p'"):
        score_once(tmp_path, "p", lambda: ([made_row(protocol="q")], None))
    assert not (tmp_path / ROWS).exists()


def test_a_folder_of_several_runs_is_named_as_such(tmp_path):
    for name in ("seed1", "seed2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "recipe.json").write_text("{}")
    with pytest.raises(DataError, match="no recipe.json; it holds the runs seed1, seed2"):
        read_run(tmp_path / "runs")
    with pytest.raises(DataError, match="seed1: has no results yet; score it with: fst evaluate"):
        read_run(tmp_path / "runs" / "seed1")
    with pytest.raises(DataError, match="nowhere: there is no such run folder"):
        read_run(tmp_path / "nowhere")
