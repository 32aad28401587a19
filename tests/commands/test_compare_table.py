"""The table of a comparison, its tasks, and mistakes on its command line."""

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from evaluation_fakes import made_row
from fst import Domain
from fst.cli import USER_ERROR, main
from fst.commands.compare import _fit
from fst.data import DataError, PointSample, write_points
from fst.evaluation.comparison import Comparison, Result, Score
from fst.evaluation.rows import RESULTS, score_once
from fst.pretrained import PretrainedError
from fst.recipes import find
from fst.recipes.burgers import GRIDS
from fst.recipes.comparison import models_of, tasks

TASK = "burgers-single"
DONE = Result(
    model="perceiver-io",
    title="Perceiver IO",
    number=1,
    seed=7,
    status="done",
    run="perceiver-io-seed1",
    learning_rate=3e-4,
    predictor_learning_rate=None,
    parameters=2_936_881,
    paper_parameters=2_936_881,
    steps=24_000,
    training_seconds=120.4,
    steps_per_second=200.0,
    peak_memory_gib=51.7,
)


def test_the_table_fits_a_terminal_and_no_number_is_cut():
    """Four grids at the sizes of the paper take 80 columns; a narrower terminal wraps lines."""
    scores = [Score("relative_l2", grid, 84, 0.123456, 0.25) for grid in GRIDS]
    result = replace(DONE, scores=tuple(scores))
    comparison = Comparison(TASK, "2 minutes", (result,), {}, {})
    for width in (80, 40):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(comparison.table().terminal(compact=True), crop=False)
        text = console.export_text()
        assert "2,936,881 24,000 120.4 200.0 51.7 0.12346 0.12346 0.12346  0.12346" in text
        assert max(map(len, text.splitlines())) <= 80


def test_classifiers_have_a_column_for_images():
    score = Score("top1_error", None, 9, 0.25, None)
    result = replace(DONE, scores=(score,), images_per_second=1234.5)
    header, line = (
        Comparison("imagenet", "2 minutes", (result,), {}, {}).table().header,
        Comparison("imagenet", "2 minutes", (result,), {}, {}).table().lines[0],
    )
    assert dict(zip(header, line, strict=True))["Images\n/s"] == "1,234"
    assert dict(zip(header, line, strict=True))["Top-1"] == "75.000"
    plain = replace(result, images_per_second=None)
    assert "Images\n/s" not in Comparison("t", "1 minutes", (plain,), {}, {}).table().header


def test_what_needs_no_training_is_told_in_the_units_of_the_table(tmp_path):
    rows = {"metric": "top1_error", "grid": None, "errors": (0.0, 1.0, 1.0)}
    row = made_row(model="most frequent class", parameters=0, training=None, **rows)
    score_once(tmp_path / DONE.run / RESULTS, "p", lambda: ([row], None))
    comparison = Comparison.read(tmp_path, "own-images", "2 minutes", (DONE,))
    assert "most frequent class 33.333." in comparison.notes[-1]


def test_tasks_are_those_of_the_recipes():
    known = tasks()
    assert list(known[TASK]) == ["fst", "fno", "perceiver-io", "transolver", "deeponet"]
    assert models_of("darcy", ("fno", "fst", "fno")) == {"fno": "darcy/fno", "fst": "darcy/fst"}
    for models in known.values():
        assert len({type(find(name).data) for name in models.values()}) == 1
        assert len({find(name).evaluation.__class__ for name in models.values()}) == 1


MISTAKES = {
    "task": (["darci", "--budget", "1m"], "unknown task 'darci': did you mean darcy?"),
    "model": (
        ["darcy", "--budget", "1m", "--models", "fts"],
        "darcy has no model 'fts'; it has fst",
    ),
    "budget": (["darcy", "--budget", "soon"], "budget must be a time such as 90s"),
    "seeds": (["darcy", "--budget", "1m", "--seeds", "0"], "seeds must be at least 1"),
    "file": (["darcy", "--budget", "1m", "--out", "file"], "file is a file, expected a folder"),
    "taken": (["darcy", "--budget", "1m", "--out", "taken"], "taken already holds files"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_clear_line(capsys, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("taken").mkdir()
    Path("taken/thesis.txt").write_text("precious")
    words, message = MISTAKES[name]
    out = [] if "--out" in words else ["--out", "new"]
    assert main(["compare", *words, *out, "--device", "cpu"]) == USER_ERROR
    err = capsys.readouterr().err
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not Path("new").exists()
    assert [path.name for path in Path("taken").iterdir()] == ["thesis.txt"]


def waves(path: Path, *, scattered: bool) -> Path:
    axis = np.linspace(0, 1, 6)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 2)

    def samples() -> Iterator[PointSample]:
        for row in range(20):
            points = np.random.default_rng(row).random((36, 2)) if scattered else grid
            values = np.sin(points @ [1 + row, 2.0])[:, None] + 1
            yield PointSample(points, values, points, values)

    write_points(path, samples(), Domain.unit(2))
    return path


def fitted(path: Path, *changes: str, named: bool = False) -> tuple[Any, ...]:
    recipes = {model: find(name) for model, name in models_of("own").items()}
    return _fit(recipes, path, torch.device("cpu"), None, changes, named=named)


def test_models_that_cannot_take_own_points_are_left_out_with_the_reason(tmp_path: Path) -> None:
    path = waves(tmp_path / "scattered.h5", scattered=True)
    recipes, _, left_out = fitted(path)
    assert set(recipes) == {"fst", "perceiver-io", "transolver"}
    assert "regular grid" in left_out["fno"]
    assert "same points" in left_out["deeponet"]
    assert recipes["fst"].model_name == "FST, small"  # as `fst train own/fst` on a CPU
    with pytest.raises(DataError, match="regular grid"):
        fitted(path, named=True)


def test_own_points_on_a_grid_are_for_all_models(tmp_path: Path) -> None:
    pytest.importorskip("neuralop")
    path = waves(tmp_path / "grid.h5", scattered=False)
    recipes, counts, left_out = fitted(path)
    assert (len(recipes), len(counts), left_out) == (5, 5, {})


def test_fields_of_single_models_are_changed(tmp_path: Path) -> None:
    path = waves(tmp_path / "scattered.h5", scattered=True)
    recipes, _, _ = fitted(
        path, "fst.model.width=32", "fst.training.optimizer=adam", "transolver.model.slices=8"
    )
    assert recipes["fst"].model.width == 32
    assert recipes["fst"].training.optimizer == "adam"
    assert (recipes["transolver"].model.slices, recipes["transolver"].model.width) == (8, 48)
    for change, words in {
        "fts.model.width=3": "--set takes MODEL.FIELD=VALUE",
        "fst.model.width": "--set takes MODEL.FIELD=VALUE",
        "fst.model.with=3": "no field 'model.with'",
        "fst.model=3": "no field 'model'",
        "fst.model.width=wide": "width",
    }.items():
        with pytest.raises((ValueError, PretrainedError), match=words):
            fitted(path, change)
