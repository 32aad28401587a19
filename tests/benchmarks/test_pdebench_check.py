"""Trained weights against a file of trajectories: what is observed, and what a row says."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fst.data import burgers
from small import small_config, small_model

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def check(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    sys.modules.pop("pdebench_check", None)
    import pdebench_check

    return pdebench_check


@pytest.fixture
def file(tmp_path):
    times = burgers.saved_times()
    u = burgers.solve(burgers.sample_initial(2, 32, 0), 0.1, times)[:, ::20]
    np.savez(tmp_path / "nu0.1.npz", u=u.float().numpy(), t=times[::20].float().numpy())
    return tmp_path / "nu0.1.npz"


def test_end_cells_come_from_the_solver_or_from_the_file(check, file):
    u, times = check.read(file)
    assert times.tolist() == list(range(0, 201, 20))
    places, values = check.observe(u, times, 0.1, "solver")
    fewer, stored = check.observe(u, times, 0.1, "file")
    assert (len(places), len(fewer)) == (32 + 2 * 200, 32 + 2 * 10)
    assert torch.equal(stored[:, :32], u[:, 0])
    # The file was made by the same solver, so both say the same where both say something.
    both = (places[:, None] == fewer).all(dim=-1).any(dim=1)
    torch.testing.assert_close(values[:, both], stored, atol=1e-5, rtol=0)


def test_a_row_for_each_way_of_decoding(check, file, tmp_path):
    model = small_model(small_config(rows=(8,), condition_channels=1)).float()
    model.save_pretrained(tmp_path / "model")
    out = tmp_path / "results" / "rows.jsonl"
    words = [str(file), "--weights", str(tmp_path / "model"), "--viscosity", "0.1"]
    check.main([*words, "--device", "cpu", "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["observed"], row["neighbors"]) for row in rows] == [
        ("solver", None), ("solver", 16), ("file", None), ("file", 16)
    ]  # fmt: skip
    assert all(row["error"] == pytest.approx(sum(row["errors"]) / 2) for row in rows)
    assert rows[0]["error"] != rows[1]["error"]
    assert rows[0]["weights"] == "model"
    assert str(tmp_path) not in out.read_text()  # a row names no paths


def test_times_that_are_not_saved_ones_are_refused(check, tmp_path):
    np.savez(tmp_path / "odd.npz", u=np.zeros((1, 2, 8), np.float32), t=np.array([0.0, 0.0333]))
    with pytest.raises(SystemExit, match="t must be among the 201 saved times"):
        check.read(tmp_path / "odd.npz")
