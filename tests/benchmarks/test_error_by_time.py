"""Errors by saved time: their squares add up to the error of the whole."""

import json
import math
import sys
from pathlib import Path

import pytest

from small import small_config, small_model

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


def test_errors_by_time_add_up_to_the_whole(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    sys.modules.pop("error_by_time", None)
    import error_by_time

    small_model(small_config(condition_channels=1)).float().save_pretrained(tmp_path / "model")
    out = tmp_path / "rows.jsonl"
    words = [str(tmp_path / "model"), "--viscosities", "1", "--solutions", "1", "--out", str(out)]
    error_by_time.main(words)
    (row,) = map(json.loads, out.read_text().splitlines())
    assert len(row["by_time"]) == 201
    assert math.hypot(*row["by_time"]) == pytest.approx(row["error"], rel=1e-3)
    assert row["nearest"] > 0
    assert row["crowding"] >= 0  # the initial condition has fronts at any viscosity
    assert row["weights"] == "model"
