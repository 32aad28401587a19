"""Points that are read when they are needed: the same batches, statistics and errors."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from data_examples import DOMAIN, point_samples
from fst.commands.explore import problem_of
from fst.data import DataError, PointData, PointSample, read_points, write_points
from fst.data.point_files import PointFile
from fst.data.point_samples import PointSamples, StreamedPoints
from fst.data.samples import Asked
from fst.recipes import find
from fst.training.settings import TrainingSettings
from fst.training.trainer import Batches
from fst.types import Domain


@pytest.fixture
def path(tmp_path):
    write_points(tmp_path / "my.h5", point_samples(), DOMAIN)
    return tmp_path / "my.h5"


def both(path, workers=0, rows=None):
    file = read_points(path)
    rows = np.arange(len(file))[::2] if rows is None else rows
    return PointSamples.read(file, rows), StreamedPoints(file, rows, workers=workers)


def assert_same(ours, theirs):
    for name in ("positions", "values", "condition", "mask"):
        mine, other = getattr(ours.observations, name), getattr(theirs.observations, name)
        assert (mine is other is None) or torch.equal(mine, other)
    for name in ("queries", "targets", "mask"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert (mine is other is None) or torch.equal(mine, other)


def test_whole_batches_are_the_resident_ones(path):
    resident, streamed = both(path)
    rows = torch.tensor([7, 0, 3, 3])
    assert_same(streamed.batch(rows), resident.batch(rows))
    assert len(streamed) == len(resident)
    for name, found in vars(streamed.statistics()).items():
        torch.testing.assert_close(found, getattr(resident.statistics(), name))
    assert torch.equal(streamed.conditions(), resident.conditions())
    described = streamed.describe()
    assert described.keys() == resident.describe().keys()


@pytest.mark.parametrize("storage", ["resident", "streamed"])
def test_a_mean_that_dwarfs_the_standard_deviation_is_said(tmp_path, storage):
    near = ((s.positions, s.values, s.queries, s.targets / 10 + 293) for s in point_samples())
    write_points(tmp_path / "kelvin.h5", (PointSample(*each) for each in near), DOMAIN)
    with pytest.warns(UserWarning, match="mean of the targets is far larger"):
        PointData(storage=storage).load(tmp_path / "kelvin.h5")


def test_drawn_targets_are_those_of_the_row_without_repetition(path):
    resident, streamed = both(path)
    rows = torch.arange(len(resident))
    drawn, whole = streamed[Asked(rows, seed=5, queries=4)], resident.batch(rows)
    for row in range(len(rows)):
        size = int(whole.mask[row].sum())
        real = drawn.mask[row]
        assert int(real.sum()) == min(4, size)
        pairs = torch.cat([drawn.queries[row], drawn.targets[row]], dim=1)[real].tolist()
        known = torch.cat([whole.queries[row], whole.targets[row]], dim=1)[whole.mask[row]].tolist()
        assert all(pair in known for pair in pairs)
        assert len({tuple(pair) for pair in pairs}) == len(pairs)
    other = streamed[Asked(rows, seed=6, queries=4)]
    assert not torch.equal(drawn.targets, other.targets)
    alone = streamed[Asked(rows[3:4], seed=5, queries=4)]
    assert torch.equal(alone.targets[0], drawn.targets[3])


def steps(samples, first, last, process=0, processes=1):
    settings = TrainingSettings(batch_size=4, queries=3, seed=1)
    batches = Batches(samples, settings, process, processes)
    try:
        return [batch for step in range(first, last) for batch in batches.at(step)]
    finally:
        batches.close()


def test_resumed_and_shared_streams_hold_the_same(path):
    whole = steps(both(path)[1], 1, 7)
    for ours, theirs in zip(steps(both(path, workers=2)[1], 3, 7), whole[2:], strict=True):
        assert_same(ours, theirs)
    halves = [steps(both(path)[1], 1, 7, process, 2) for process in range(2)]
    for first, second, theirs in zip(*halves, whole, strict=True):
        assert torch.equal(torch.cat([first.targets, second.targets]), theirs.targets)


def test_validation_is_streamed_in_order(path):
    resident, streamed = both(path, workers=1)
    parts = [torch.tensor([0, 1]), torch.tensor([5])]
    for ours, theirs in zip(streamed.in_order(parts), resident.in_order(parts), strict=True):
        assert_same(ours, theirs)


def test_storage_is_chosen_by_size_or_by_name(path, monkeypatch):
    def kinds(data):
        return {type(split.samples).__name__ for split in data.load(path)}

    assert kinds(PointData()) == {"PointSamples"}
    assert kinds(PointData(storage="streamed", workers=1)) == {"StreamedPoints"}
    found = PointData().fingerprint(path)
    monkeypatch.setattr("fst.data.samples._CPU_BYTES", 10)
    assert kinds(PointData()) == {"StreamedPoints"}
    assert kinds(PointData(storage="resident")) == {"PointSamples"}
    monkeypatch.setattr("fst.data.point_data._DIGESTED_BYTES", 10)
    sampled = PointData().fingerprint(path)
    assert sampled["training_samples"] == found["training_samples"]
    assert "splits" in sampled


def test_targets_without_a_relative_error_are_refused_as_when_resident(tmp_path):
    samples = point_samples()
    samples[4] = PointSample(
        samples[4].positions, samples[4].values, samples[4].queries,
        np.zeros_like(samples[4].targets), samples[4].condition,
    )  # fmt: skip
    write_points(tmp_path / "my.h5", samples, DOMAIN)
    with pytest.raises(DataError, match="undefined for .* in sample 4;"):
        PointData(storage="streamed", workers=1).load(tmp_path / "my.h5")


def test_the_explorer_shows_points_of_a_run_that_streamed_them(path, tmp_path):
    recipe = find("own/fst")
    recipe = replace(recipe, data=PointData(storage="streamed", workers=1))
    recipe = recipe.data.fit(recipe, path)
    assert problem_of(recipe, tmp_path, path).describe()


def test_a_file_is_looked_through_in_blocks_of_few_points(tmp_path, monkeypatch):
    """Of samples that are large, few are read at once: the file may be larger than the memory."""
    sizes, random = (3, 50, 7, 200, 4, 4, 60), np.random.default_rng(0)
    samples = [
        PointSample(random.random((2, 1)), np.ones((2, 1)), random.random((n, 1)), np.ones((n, 1)))
        for n in sizes
    ]
    write_points(tmp_path / "mine.h5", samples, Domain((0.0,), (1.0,)))
    file = read_points(tmp_path / "mine.h5")
    monkeypatch.setattr("fst.data.point_files.BLOCK_POINTS", 70)
    monkeypatch.setattr("fst.data.point_data.BLOCK_POINTS", 70)
    assert [block.tolist() for block in file.blocks()] == [[0, 1, 2], [3], [4, 5], [6]]
    assert [block.tolist() for block in file.blocks(np.array([1, 4, 5, 2]))] == [[1, 4, 5], [2]]
    read = []
    queries = PointFile.queries
    monkeypatch.setattr(
        PointFile, "queries", lambda *given: read.append(queries(*given)) or read[-1]
    )
    PointData(storage="streamed", workers=1).load(tmp_path / "mine.h5")
    PointData().training_targets(tmp_path / "mine.h5")
    assert max(len(points.values) for points in read) <= 200  # the largest sample, alone
