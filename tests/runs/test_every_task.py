"""A tiny run of every task through the command line: train, resume, evaluate, predict, report."""

import json

import h5py
import numpy as np
import pytest
import torch

import fst
from fst.cli import USER_ERROR, main
from fst.data import write_points
from fst.data.point_files import PointSample
from tiny import BURGERS, DARCY, MODEL, STAGED, TRAINING

CPU = ["--device", "cpu"]
TASKS = {
    "burgers-single/fst": [*MODEL, *TRAINING, *BURGERS],
    "burgers-all/fst": [
        *MODEL, *STAGED, *BURGERS, "--data.viscosities", "0.1", "0.5",
        "--evaluation.paper-groups",
    ],
    "darcy/fst": [*MODEL, *TRAINING, *DARCY],
    "demo/burgers": [*MODEL, *TRAINING, *BURGERS],
    "fast/burgers-single/fst": [*MODEL, *TRAINING, *BURGERS],
    "fast/darcy/fst": [*MODEL, *TRAINING, *DARCY],
    "ablation/observe-first": [*MODEL, *TRAINING, *BURGERS],
    "ablation/update-anchor-attention": [*MODEL, *TRAINING, *BURGERS],
    "burgers-single/deeponet": [
        *TRAINING, *BURGERS, "--model.observations", "52", "--model.branch", "8", "8",
        "--model.trunk", "8", "8",
    ],
    "burgers-single/transolver": [
        *TRAINING, *BURGERS, "--model.width", "8", "--model.heads", "2", "--model.slices", "4",
        "--model.layers", "1",
    ],
    "burgers-single/perceiver-io": [
        *TRAINING, *BURGERS, "--model.width", "8", "--model.heads", "2", "--model.latents", "4",
        "--model.layers", "1", "--model.fourier-bands", "2",
    ],
}  # fmt: skip


def fst_command(*words) -> int:
    return main([str(word) for word in words])


@pytest.mark.parametrize("recipe", TASKS)
def test_a_task_from_start_to_page(recipe, tmp_path):
    run, data = tmp_path / "run", tmp_path / "data"
    assert fst_command("train", recipe, "--out", run, "--data", data, *CPU, *TASKS[recipe]) == 0
    stored = json.loads((run / "recipe.json").read_text())
    assert stored["name"] == recipe
    assert stored["training"]["schedule"]["maximum"] == 6
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 6
    assert {"environment.json", "metrics.jsonl", "best", "checkpoints"} <= {
        path.name for path in run.iterdir()
    }

    assert fst_command("evaluate", run, *CPU) == 0
    rows = json.loads((run / "results" / "rows.json").read_text())
    assert all(np.isfinite(row["error"]) and row["samples"] == len(row["errors"]) for row in rows)
    before = (run / "results" / "rows.json").read_bytes()
    assert fst_command("evaluate", run, *CPU) == 0  # reads the stored rows
    assert (run / "results" / "rows.json").read_bytes() == before

    assert fst_command("report", run, "--out", tmp_path / "page") == 0
    assert list((tmp_path / "page").glob("*.html"))
    # A finished run does not start again.
    assert fst_command("train", "--resume", run, *CPU) == USER_ERROR


def test_the_papers_error_is_not_set_beside_another_grid(tmp_path, capsys):
    run, data = tmp_path / "run", tmp_path / "data"
    words = [*MODEL, *TRAINING, *DARCY[: DARCY.index("--evaluation.paper-errors")]]
    assert fst_command("train", "darcy/fst", "--out", run, "--data", data, *CPU, *words) == 0
    assert json.loads((run / "recipe.json").read_text())["evaluation"]["paper_errors"] == [0.03173]
    capsys.readouterr()
    assert fst_command("evaluate", run, *CPU) == 0
    assert "Paper" not in capsys.readouterr().out
    rows = json.loads((run / "results" / "rows.json").read_text())
    assert all(row["paper_error"] is None for row in rows)


def test_own_points_from_file_to_answers(tmp_path):
    """Three axes, two values, three targets, a condition, sizes that vary: all from the file."""
    generator = np.random.default_rng(0)

    def sample() -> PointSample:
        count = int(generator.integers(5, 9))
        positions, queries = generator.uniform(2, 4, (count, 3)), generator.uniform(2, 4, (7, 3))
        scale = generator.uniform(1, 2, 1)
        values = np.stack([positions.sum(1), positions[:, 0]], axis=1)
        targets = scale * np.stack([queries.sum(1), queries[:, 0], queries[:, 1]], axis=1)
        return PointSample(positions, values, queries, targets, scale)

    file = tmp_path / "mine.h5"
    write_points(file, [sample() for _ in range(12)], fst.Domain((2.0,) * 3, (4.0,) * 3))
    run = tmp_path / "run"
    small = [
        "--model.width", "16", "--model.heads", "2", "--model.fourier-bands", "2",
        "--model.predictor-width", "8", "--model.predictor-heads", "2",
        "--model.predictor-blocks", "1", "--model.refinement-steps", "1",
        "--model.rows", "2", "3", "--model.anchors-per-row", "4",
        "--model.points-from-anchors", "5",
    ]  # fmt: skip
    words = ["--out", run, "--data", file, *CPU, *small, *TRAINING]
    assert fst_command("train", "own/fst", *words) == 0
    model = fst.from_pretrained(run / "best")
    assert (model.value_channels, model.output_channels, model.condition_channels) == (2, 3, 1)
    assert model.domain == fst.Domain((2.0,) * 3, (4.0,) * 3)
    assert (model.config.rows, model.config.anchors, model.config.adaptive_axis) == ((2, 3), 24, 2)
    assert fst_command("evaluate", run, *CPU) == 0

    given = {
        "positions": generator.uniform(2, 4, (1, 6, 3)).astype(np.float32),
        "values": generator.normal(size=(1, 6, 2)).astype(np.float32),
        "condition": np.ones((1, 1), np.float32),
    }
    np.savez(tmp_path / "given.npz", **given)
    answer = tmp_path / "answer.npz"
    predict = ["predict", run, "--observations", tmp_path / "given.npz", "--queries", "3x4x5"]
    assert fst_command(*predict, "--out", answer) == 0
    with np.load(answer, allow_pickle=False) as saved:
        names = set(saved.files)
        queries, predictions = saved["queries"], saved["predictions"]
    assert {"queries", "predictions"} <= names
    expected = model(fst.Observations(*(torch.from_numpy(given[n]) for n in given)))(
        torch.from_numpy(queries).expand(1, -1, -1)
    )
    np.testing.assert_allclose(predictions, expected.detach().numpy(), rtol=1e-4, atol=1e-5)
    assert fst_command(*predict, "--out", answer) == USER_ERROR  # nothing is overwritten


def test_a_stopped_run_resumes_through_the_command_line(tmp_path):
    run, data = tmp_path / "run", tmp_path / "data"
    words = [*MODEL, *TRAINING, *BURGERS]
    assert fst_command("train", "demo/burgers", "--out", run, "--data", data, *CPU, *words) == 0
    whole = (run / "metrics.jsonl").read_text()
    # As if it had been killed after the first checkpoint.
    (run / "summary.json").unlink()
    for path in (run / "checkpoints").iterdir():
        if path.name.endswith("6"):
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    assert fst_command("evaluate", run, *CPU) == USER_ERROR  # a test set is scored once: not yet
    # Other data in the place of its own are noticed.
    file = next(data.iterdir())
    kept = file.read_bytes()
    with h5py.File(file, "r+") as opened:
        opened["tensor"][...] = 2 * opened["tensor"][...]
    assert fst_command("train", "--resume", run, *CPU) == USER_ERROR
    file.write_bytes(kept)
    assert fst_command("train", "--resume", run, *CPU) == 0

    def losses(text: str) -> list[tuple[int, float]]:
        lines = [json.loads(line) for line in text.splitlines()]
        return [(line["step"], line["loss"]) for line in lines if line["kind"] == "training"]

    assert losses((run / "metrics.jsonl").read_text()) == losses(whole)
    assert len(losses(whole)) == 6
