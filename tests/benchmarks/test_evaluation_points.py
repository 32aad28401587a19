"""Rows of trained weights with other numbers of evaluation points."""

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fst
from fst.metrics import relative_l2
from small import small_config, small_model

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


def test_rows_are_the_errors_of_the_model_with_so_many_points(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    sys.modules.pop("evaluation_points", None)
    import evaluation_points

    small_model(small_config()).float().save_pretrained(tmp_path / "model")
    out = tmp_path / "rows.jsonl"
    asked = ["--points", "4", "40", "--viscosities", "1", "--solutions", "2", "--out", str(out)]
    evaluation_points.main([str(tmp_path / "model"), *asked])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["points"], row["solutions"], row["weights"]) for row in rows] == [
        (4, 2, "model"),
        (40, 2, "model"),
    ]
    model = fst.from_pretrained(tmp_path / "model")
    model.config = replace(model.config, points_from_anchors=20, points_from_sobol=20)
    samples = evaluation_points.burgers_samples([1.0], 2, condition=False)
    batch = samples.batch(torch.arange(2))
    errors = relative_l2(model(batch.observations)(batch.queries), batch.targets).tolist()
    assert rows[1]["error"] == pytest.approx(statistics.fmean(errors), rel=1e-4)
    assert rows[1]["median"] == pytest.approx(statistics.median(errors), rel=1e-4)
    assert rows[0]["error"] != rows[1]["error"]
    assert {row["symmetry"] for row in rows} == {"none"}
    asked = ["--symmetries", "odd-reflection", "--points", "40", *asked[3:]]
    evaluation_points.main([str(tmp_path / "model"), *asked])
    row = json.loads(out.read_text().splitlines()[-1])
    model.config = replace(model.config, prediction_symmetry="odd-reflection")
    errors = relative_l2(model(batch.observations)(batch.queries), batch.targets).tolist()
    assert (row["symmetry"], row["points"]) == ("odd-reflection", 40)
    assert row["error"] == pytest.approx(statistics.fmean(errors), rel=1e-4)
    assert row["error"] != rows[1]["error"]
