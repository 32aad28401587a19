"""A plain PyTorch loop: the dataset, its batches, and the loop printed in docs/python.md."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import fst
from data_examples import DOMAIN, point_samples
from fst.data import DataError, PointData, PointSample, from_grid, read_points, write_points
from fst.data.point_samples import PointSamples
from fst.training.settings import TrainingError

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
SMALL = {
    "width": 16,
    "condition_width": 8,
    "rows": (2,),
    "anchors_per_row": 3,
    "points_from_anchors": 4,
    "points_from_sobol": 4,
}


@pytest.fixture
def path(tmp_path) -> Path:
    fst.write_points(tmp_path / "my.h5", point_samples(), DOMAIN)
    return tmp_path / "my.h5"


def assert_same_real_points(ours, theirs):
    """Two batches may be padded to different lengths."""
    for row in range(len(ours.targets)):
        for one, other in ((ours, theirs), (theirs, ours)):
            real = slice(None) if one.mask is None else one.mask[row]
            count = one.targets[row][real].shape[0]
            assert torch.equal(one.targets[row][real], other.targets[row][:count])
            assert torch.equal(one.queries[row][real], other.queries[row][:count])


@pytest.mark.parametrize("stored", [True, False])
def test_collated_batches_are_those_of_the_trainer(path, stored):
    samples = point_samples()
    data = fst.PointDataset(path) if stored else fst.PointDataset(samples, DOMAIN)
    batch = next(iter(DataLoader(data, batch_size=20, collate_fn=fst.collate)))
    resident = PointSamples.read(read_points(path), torch.arange(20).numpy())
    assert_same_real_points(batch, resident.batch(torch.arange(20)))
    longest = max(len(sample.positions) for sample in samples)
    assert batch.observations.positions.shape == (20, longest, 2)
    lengths = torch.tensor([len(sample.positions) for sample in samples])
    assert torch.equal(batch.observations.mask.sum(dim=1), lengths)
    found, wanted = data.statistics(), resident.statistics()
    for name in vars(found):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name))
    torch.testing.assert_close(data.conditions(), resident.conditions())


def test_splits_are_those_of_the_trainer_and_samples_of_one_length_need_no_mask(path):
    partition = PointData().partition(read_points(path))
    for split in ("training", "validation", "test"):
        assert fst.PointDataset(path, split=split).rows == getattr(partition, split).tolist()
    assert fst.collate([fst.PointDataset(path)[3]] * 2).mask is None


def test_queries_are_drawn_anew_at_every_access(path):
    data = fst.PointDataset(path, queries=3)
    torch.manual_seed(0)
    whole = fst.PointDataset(path)[0]
    assert len(whole.queries) > 3
    seen = {tuple(data[0].targets[:, 0].tolist()) for _ in range(20)}
    assert len(seen) > 1
    assert {number for row in seen for number in row} <= set(whole.targets[:, 0].tolist())
    assert all(len(set(row)) == 3 for row in seen)


def test_evaluation_points_are_fresh_in_training_and_fixed_otherwise(path, tmp_path):
    data = fst.PointDataset(path)
    batch = fst.collate([data[0], data[1]])
    model = fst.build("own/fst", data, **SMALL)
    with torch.no_grad():
        first, second = (model(batch.observations)(batch.queries) for _ in range(2))
        assert not torch.equal(first, second)
        model.eval()
        first, second = (model(batch.observations)(batch.queries) for _ in range(2))
        assert torch.equal(first, second)
        model.train().save_pretrained(tmp_path / "saved")
        loaded = fst.from_pretrained(tmp_path / "saved")
        assert not loaded.training
        assert torch.equal(loaded(batch.observations)(batch.queries), first)


def test_build_takes_overrides_and_names_what_it_does_not_know(path):
    assert fst.build("own/fst", width=24).config.width == 24
    config = fst.build("own/fst", fst.PointDataset(path), **SMALL).config
    with pytest.raises(TypeError, match="own/images-fst takes images, and data are points"):
        fst.build("own/images-fst", fst.PointDataset(path))
    assert (config.low, config.high) == (DOMAIN.low, DOMAIN.high)
    assert (config.value_channels, config.output_channels, config.condition_channels) == (2, 1, 1)
    with pytest.raises(TypeError, match="own/fst has no setting 'widht': did you mean width"):
        fst.build("own/fst", widht=3)


@pytest.mark.parametrize("kind", ["value", "output", "condition"])
def test_statistics_are_of_data_with_the_channels_of_the_model(path, kind):
    data = fst.PointDataset(path)
    model = fst.build("own/fst", data, **SMALL, **{f"{kind}_channels": 3})
    got = getattr(data, f"{kind}_channels")
    with pytest.raises(ValueError, match=f"must have 3 {kind} channels .*, got {got}"):
        model.fit_statistics(data)


def test_a_path_is_no_data_set(path):
    with pytest.raises(TypeError, match="data must be PointDataset or None, got '"):
        fst.build("own/fst", str(path))
    with pytest.raises(TypeError, match="training must be data such as fst.PointDataset, got '"):
        fst.build("own/fst", **SMALL).fit_statistics(str(path))


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("name", ["fno", "perceiver-io", "transolver", "deeponet"])
def test_every_model_is_built_for_data_that_it_can_take(name, stored, tmp_path):
    if name == "fno":
        pytest.importorskip("neuralop")
    line, fields = np.linspace(0, 1, 6), np.random.default_rng(0).normal(size=(3, 6, 6))
    grid = from_grid({"a": fields}, {"u": fields}, {"x": line, "y": line})
    if stored:
        write_points(tmp_path / "grid.h5", grid)
    data = fst.PointDataset(tmp_path / "grid.h5" if stored else grid)
    model = fst.build(f"own/{name}", data)
    model.fit_statistics(data)
    batch = fst.collate([data[0], data[1]])
    assert model(batch.observations)(batch.queries).shape == (2, 36, 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("transolver", "Transolver takes no condition channel, these data have 1"),
        ("deeponet", "DeepONet takes 1 value channel, these data have 2"),
        ("fno", "FNO needs all points on one regular grid"),
    ],
)
def test_a_model_that_cannot_take_the_data_says_so(name, message, path):
    for data in (fst.PointDataset(path), fst.PointDataset(point_samples(), DOMAIN)):
        with pytest.raises(DataError, match=message):
            fst.build(f"own/{name}", data)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"samples": []}, "samples need a domain"),
        ({"samples": [], "domain": DOMAIN}, "at least one sample"),
        (
            {"samples": "my.h5", "split": "train"},
            "split must be None, training, val",
        ),
        ({"samples": [], "domain": DOMAIN, "queries": 0}, "queries must be at least 1, got 0"),
    ],
)
def test_what_makes_no_sense_is_said(given, message):
    with pytest.raises(ValueError, match=message):
        fst.PointDataset(**given)


def test_the_printed_loop_runs_and_saves_a_model_in_the_units_of_the_data(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    torch.manual_seed(0)
    loop = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    small = ", ".join(f"{name}={value}" for name, value in SMALL.items())
    assert "width=64" in loop
    names: dict = {"epochs": 4}
    exec(loop.replace("width=64", small), names)
    batch = fst.collate([*fst.PointDataset(path, split="training")])
    trained = fst.from_pretrained("trained")
    fresh = fst.build("own/fst", names["data"], **SMALL).eval()
    with torch.no_grad():
        errors = [
            fst.relative_l2(m(batch.observations)(batch.queries), batch.targets, batch.mask).mean()
            for m in (trained, fresh)
        ]
    assert errors[0] < 0.9 * errors[1]


def test_fit_finds_the_box_of_samples_and_can_be_quiet(capsys):
    random = np.random.default_rng(0)
    samples = [PointSample(p, p**2, p, p**2) for p in random.uniform(-1, 4, (10, 20, 1))]
    model = fst.fit(samples, minutes=0.05, device="cpu", quiet=True)
    every = np.concatenate([each.queries for each in samples])
    assert model.domain.low[0] == pytest.approx(every.min())
    assert model.domain.high[0] == pytest.approx(every.max())
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="recipe must be one of own/"):
        fst.fit(samples, recipe="burgers-single/fst")
    with pytest.raises(ValueError, match="samples must hold at least one PointSample, got none"):
        fst.fit([])
    with pytest.raises(TypeError, match="samples must be Iterable or PointFunctions, got 3"):
        fst.fit(3)


@pytest.mark.parametrize("given", [{"domain": DOMAIN}, {"splits": {"training": [0]}}])
def test_fit_refuses_what_a_file_says_itself(path, given):
    with pytest.raises(ValueError, match="a file has its own domain and splits, got domain="):
        fst.fit(path, **given)


def test_fit_that_fails_can_be_tried_again(tmp_path):
    out, data = tmp_path / "run", tmp_path / "run-data" / "points.h5"
    for samples, device in ((point_samples(), "abacus"), ([point_samples()[0], 3], "cpu")):
        with pytest.raises((ValueError, TypeError)):
            fst.fit(samples, DOMAIN, out=out, device=device)
        assert not data.parent.exists()
    data.parent.mkdir()
    data.write_text("precious")
    with pytest.raises(DataError, match=r"points\.h5: exists; remove it, or choose another out"):
        fst.fit(point_samples(), DOMAIN, out=out)
    assert data.read_text() == "precious"
    data.unlink()
    out.mkdir()
    (out / "mine.txt").touch()
    with pytest.raises(TrainingError, match="already holds files"):
        fst.fit(point_samples(), DOMAIN, out=out)
    assert not data.exists()


def test_fit_trains_and_keeps_the_run(tmp_path):
    model = fst.fit(
        point_samples(), DOMAIN, minutes=0.3, out=tmp_path / "run", device="cpu", quiet=True
    )
    assert not model.training
    batch = fst.collate([fst.PointDataset(tmp_path / "run-data" / "points.h5")[0]])
    saved = fst.from_pretrained(tmp_path / "run" / "best")
    with torch.no_grad():
        found = model(batch.observations)(batch.queries)
        assert torch.equal(saved(batch.observations)(batch.queries), found)


def sample_with_masks(**changes) -> PointSample:
    numbers = {
        "positions": np.zeros((3, 2), "f4"),
        "values": np.array([[1], [1], [99]], "f4"),
        "queries": np.zeros((2, 2), "f4"),
        "targets": np.ma.masked_equal(np.array([[2], [77]], "f4"), 77),
        "mask": np.array([True, True, False]),
    }
    return PointSample(**numbers | changes)


def test_a_batch_leaves_out_what_masks_hide():
    batch = fst.collate([sample_with_masks(condition=[1.0])] * 2)
    assert batch.observations.values.flatten().tolist() == [1, 1, 1, 1]
    assert batch.targets.flatten().tolist() == [2, 2]
    assert batch.observations.condition.dtype == batch.targets.dtype == torch.float32
    moved = batch.to(torch.float64)
    assert moved.targets.dtype == moved.observations.positions.dtype == torch.float64
    with pytest.raises(ValueError, match="condition must be given for all samples of a batch"):
        fst.collate([sample_with_masks(), sample_with_masks(condition=[1.0])])
    hidden = sample_with_masks(query_mask=np.array([False, True]))
    with pytest.raises(ValueError, match="queries of sample 1 must hold at least one point"):
        fst.collate([sample_with_masks(), hidden])


def test_samples_are_asked_one_at_a_time(path):
    for data in (fst.PointDataset(path), read_points(path)):
        with pytest.raises(TypeError, match="row must be a whole number, got slice"):
            data[:3]


def test_fit_takes_what_conversions_return():
    x, y = np.linspace(0, 1, 6), np.linspace(0, 2, 5)
    a = np.random.default_rng(0).random((30, 6, 5))
    grid = from_grid({"a": a}, {"u": a**2}, axes={"x": x, "y": y})
    model = fst.fit(grid, minutes=0.05, device="cpu", quiet=True)
    assert model.config.high == (1.0, 2.0)
