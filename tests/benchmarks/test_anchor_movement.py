"""The measure of anchors on objects, on discs whose pixels are known, and the script on a run."""

import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fst.recipes import find
from fst.recipes import images as recipes
from fst.vision import ImageClassifier
from image_examples import write_data_set

SIZE, RADIUS, PER_ROW = 64, 0.2, 16


@pytest.fixture(scope="module")
def script() -> object:
    benchmarks = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, benchmarks)
    yield importlib.import_module("anchor_movement")
    sys.path.remove(benchmarks)


@pytest.fixture(scope="module")
def centres() -> Tensor:
    return 0.3 + 0.4 * torch.rand(12, 2, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def discs(centres: Tensor) -> Tensor:
    at = (torch.arange(SIZE) + 0.5) / SIZE
    away = torch.stack(torch.meshgrid(at, at, indexing="ij"), dim=-1) - centres[:, None, None]
    return away.norm(dim=-1) < RADIUS


@pytest.fixture(scope="module")
def images(discs: Tensor) -> Tensor:
    """Orange discs on blue, with noise that the border's model has to know."""
    colours = torch.tensor([[0.2, 0.3, 0.7], [0.8, 0.5, 0.2]])
    plain = colours[discs.long()].permute(0, 3, 1, 2)
    noise = torch.randn(plain.shape, generator=torch.Generator().manual_seed(1))
    return (plain + 0.05 * noise).clamp(0, 1)


def test_the_foreground_is_the_disc(script: ModuleType, images: Tensor, discs: Tensor) -> None:
    wrong = (script.foreground(images) != discs).sum(dim=(1, 2))
    assert (wrong < 0.04 * discs.sum(dim=(1, 2))).all()


def test_a_plain_border_is_no_division_by_zero(script: ModuleType, discs: Tensor) -> None:
    plain = discs[:, None].float().expand(-1, 3, -1, -1)
    wrong = (script.foreground(plain) != discs).sum(dim=(1, 2))
    assert (wrong < 0.04 * discs.sum(dim=(1, 2))).all()


def test_the_threshold_parts_two_heaps(script: ModuleType) -> None:
    values = torch.tensor([[0.0, 0.1, 5.0, 0.2, 5.1], [1.0, 9.0, 9.0, 9.0, 9.0]])
    torch.testing.assert_close(script.otsu(values), torch.tensor([[0.2], [1.0]]))


def test_even_anchors_have_the_share_of_the_area(script: ModuleType, images: Tensor) -> None:
    start = script.even_like(torch.rand(len(images), PER_ROW * PER_ROW, 2), PER_ROW)
    start[..., 0] = torch.linspace(0, 1, PER_ROW).repeat_interleave(PER_ROW)
    row = script.objects(start, PER_ROW, images)
    assert row["area"] == pytest.approx(math.pi * RADIUS**2, rel=0.04)
    assert row["control_ratio"] == pytest.approx(1, abs=0.05)
    # Anchors on the edges leave fewer for the inside: 15² where cells have 16².
    assert row["ratio"] == row["start_ratio"] == pytest.approx((15 / 16) ** 2, abs=0.05)
    assert row["gain"] == row["gain_standard_error"] == row["following"] == 0
    assert row["displaced_ratio"] > 1.5  # such a gathering could not go unseen


def test_anchors_on_the_object_have_the_largest_ratio(
    script: ModuleType, images: Tensor, centres: Tensor
) -> None:
    angle, radius = torch.rand(2, len(images), 256, generator=torch.Generator().manual_seed(2))
    inside = 0.9 * RADIUS * radius.sqrt()
    around = torch.stack((torch.sin(math.tau * angle), torch.cos(math.tau * angle)), dim=-1)
    row = script.objects(centres[:, None] + inside[..., None] * around, PER_ROW, images)
    assert row["ratio"] == pytest.approx(1 / row["area"])
    assert row["gain"] == pytest.approx(row["ratio"] - row["start_ratio"])
    assert row["following"] > 1  # the discs lie elsewhere in other images


def test_a_drift_alike_in_all_images_is_not_following(script: ModuleType, images: Tensor) -> None:
    middle = 0.3 + 0.4 * torch.rand(256, 2, generator=torch.Generator().manual_seed(3))
    row = script.objects(middle.expand(len(images), -1, -1), PER_ROW, images)
    assert row["gain"] > 1
    assert row["following"] == 0


def test_the_error_is_that_of_pairs(script: ModuleType) -> None:
    areas = torch.tensor([0.1, 0.2, 0.3])
    assert script.over_area(2 * areas, areas) == pytest.approx((2, 0), abs=1e-6)
    ratio, error = script.over_area(torch.tensor([0.1, 0.3, 0.2]), areas)
    assert ratio == pytest.approx(1)
    assert error == pytest.approx(0.1 / math.sqrt(3) / 0.2)


def test_the_script_measures_a_run(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, run, out = write_data_set(tmp_path / "data"), tmp_path / "run", tmp_path / "rows.json"
    recipe = recipes.choose(find("own/images-fst"), data, torch.device("cpu")).recipe
    ImageClassifier(recipe.model).save_pretrained(run / "best")
    (run / "recipe.json").write_text(json.dumps(recipe.to_json()))
    (run / "summary.json").write_text(json.dumps({"validation_error": 0.5}))
    arguments = ["anchor_movement.py", str(run), "--data", str(data), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--hardware", "none"])
    script.main()
    (row,) = json.loads(out.read_text())
    assert (row["validation_error"], row["hardware"]) == (0.5, "none")
    assert row["images"] == 3  # one of each class is held out
    # An untrained predictor's anchors are even.
    assert row["mean_distance_from_even"] < 1e-6
    assert row["ratio"] == row["start_ratio"]
