"""The gate experiment on anchors: the oracle's positions, and a tiny run from start to table."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fst.data import burgers

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
TINY = "--device cpu --training 6 --validation 3 --cells 64 --times 21 --steps 2 --batch 2"
TINY += " --queries 32 --width 32 --sizes 4x4 --viscosities 0.01 --seeds 0"


@pytest.fixture(scope="module", autouse=True)
def _modules() -> object:
    sys.path.insert(0, BENCHMARKS)
    yield
    sys.path.remove(BENCHMARKS)


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def solution() -> torch.Tensor:
    return burgers.solve(burgers.sample_initial(3, 256, 0), 0.01, burgers.saved_times(41)).float()


def test_a_constant_density_gives_even_positions() -> None:
    oracle = module("anchor_oracle")
    found = oracle.equidistributed(torch.full((2, 3, 100), 4.0), 9)
    torch.testing.assert_close(found, oracle.even(2, 3, 9, torch.device("cpu")))


def test_every_gap_holds_the_same_integral() -> None:
    oracle = module("anchor_oracle")
    x = torch.linspace(0, 1, 2001, dtype=torch.float64)
    found = oracle.equidistributed((1 + 2 * x)[None, None], 6)[0, 0].double()
    torch.testing.assert_close((found + found**2).diff(), torch.full((5,), 0.4).double())


def test_moving_the_density_is_moving_the_solution(solution: torch.Tensor) -> None:
    oracle = module("anchor_oracle")
    augmentation = torch.tensor([[0, 1], [77, 0], [13, 1]])
    moved = [
        solution[0].flip(-1) * -1,
        solution[1].roll(-77, -1),
        solution[2].roll(-13, -1).flip(-1) * -1,
    ]
    rule = oracle.Rule()
    found = oracle.moved(oracle.monitor(solution, 5, rule), augmentation)
    expected = oracle.monitor(torch.stack(moved), 5, rule)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_positions_are_ordered_and_crowd_at_fronts(solution: torch.Tensor) -> None:
    oracle, gate = module("anchor_oracle"), module("anchor_gate")
    rule = oracle.Rule(window=0.0)
    along = oracle.equidistributed(oracle.monitor(solution, 16, rule), 16)
    assert (along.diff(dim=-1) > 0).all()
    assert along[..., 0].eq(0).all()
    assert along[..., -1].eq(1).all()
    fronts = gate.near_fronts(solution)
    even = oracle.even(3, 16, 16, along.device)
    assert gate.crowding(along, fronts)[0] > 1.2 * gate.crowding(even, fronts)[0]


def test_a_tiny_run_writes_its_rows_once(tmp_path: Path) -> None:
    gate = module("anchor_gate")
    kinds = [
        "oracle",
        "uniform",
        "told",
        "silent",
        "fixed",
        "learned",
        "oracle,beta=3,gap=geometric",
    ]
    given = [*TINY.split(), "--out", str(tmp_path), "--data", str(tmp_path), "--kinds", *kinds]
    for _ in range(2):  # the second time there is nothing left to do
        gate.main(given)
        rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
        assert sorted(row["job"]["kind"] for row in rows) == sorted(kinds)
        assert all(0 < row["error"] < 10 for row in rows)
    assert not (tmp_path / "failures.jsonl").exists()


def test_the_study_writes_its_rows(tmp_path: Path) -> None:
    given = [*TINY.split(), "--study", "--solutions", "1", "--out", str(tmp_path)]
    module("anchor_gate").main(given)
    rows = json.loads((tmp_path / "study.json").read_text())
    assert {row["kind"] for row in rows} == {"oracle", "uniform", "fixed"}


def test_a_linear_decoder_never_leaves_the_values_of_its_anchors(solution: torch.Tensor) -> None:
    gate = module("anchor_gate")
    options = gate.parse_arguments([*TINY.split(), "--decoder", "linear", "--out", "."])
    training = gate.Training(
        gate.Job(0.01, 4, 4, "uniform", 0, options.budget),
        burgers.solve(burgers.sample_initial(9, 64, 0), 0.01, burgers.saved_times(21)).float(),
        torch.device("cpu"),
    )
    training.rate.fill_(1e-2)
    for _ in range(3):
        training.step()
    batch = training.samples.whole.batch(torch.tensor([0, 1]))
    training.place_anchors(None, 2)
    with torch.no_grad():
        field = training.model.represent(batch.observations)
        found = field.decode(batch.queries)[..., 0]
        values = field.standardization.restore(field.decoder.output(field.features))[..., 0]
    lowest, highest = values.aminmax(dim=1, keepdim=True)
    assert (found >= lowest - 1e-5).all()
    assert (found <= highest + 1e-5).all()
    assert found.std() > 1e-3  # it has learned something to bound
