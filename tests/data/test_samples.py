"""Batches are the stored numbers at the right points; statistics are what they say."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import fst
from data_examples import BURGERS, DOMAIN, POINTS, TIMES, point_samples, trajectories
from fst.data import GridSamples, PointData, read_points, write_points
from fst.data.burgers_data import BurgersData
from fst.data.point_samples import PointSamples, StreamedPoints
from fst.data.samples import (
    BurgersSamples,
    boundary_observation_indices,
    index_coordinates,
    index_product,
    subset_indices,
)
from fst.operators import Standardization


def burgers_samples(rows: int = 5, counts: tuple[int, int] = (TIMES, POINTS)) -> BurgersSamples:
    grid = (TIMES, POINTS)
    u = torch.from_numpy(trajectories(rows))
    held = tuple(map(subset_indices, grid, counts))
    time, cell = boundary_observation_indices(*grid).unbind(dim=1)
    return BurgersSamples(
        grid=grid,
        held=held,
        targets=u[:, held[0]][:, :, held[1]],
        observed_positions=index_coordinates(torch.stack([time, cell], dim=1), grid),
        observed_values=u[:, time, cell],
        condition=torch.arange(1.0, rows + 1)[:, None],
    )


def value_at(row: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What `trajectories` stores at a position."""
    index = positions.double() * torch.tensor([TIMES - 1.0, POINTS - 1.0], dtype=torch.float64)
    return row[:, None] + index[..., 0] / 100 + index[..., 1] / 100_000


@pytest.mark.parametrize("counts", [(TIMES, POINTS), (5, 16)])
@pytest.mark.parametrize("queries", [None, 20])
def test_a_grid_batch_pairs_every_position_with_its_value(counts, queries):
    samples = burgers_samples(counts=counts)
    rows = torch.tensor([3, 0, 3])
    generator = torch.Generator().manual_seed(1)
    batch = samples.batch(rows, samples.choose(3, queries, generator))
    expected = queries or counts[0] * counts[1]
    assert batch.queries.shape == (3, expected, 2)
    assert batch.targets.shape == (3, expected, 1)
    assert batch.mask is None
    torch.testing.assert_close(
        batch.targets[..., 0].double(), value_at(rows, batch.queries), atol=2e-6, rtol=0
    )
    observations = batch.observations
    assert observations.positions.shape == (3, POINTS + 2 * (TIMES - 1), 2)
    torch.testing.assert_close(
        observations.values[..., 0].double(),
        value_at(rows, observations.positions),
        atol=2e-6,
        rtol=0,
    )
    assert observations.condition is not None
    assert observations.condition[:, 0].tolist() == [4, 1, 4]


def test_choices_are_without_replacement_and_reach_every_target():
    samples = burgers_samples(counts=(5, 16))
    chosen = samples.choose(200, 40, torch.Generator().manual_seed(2))
    assert chosen is not None
    assert chosen.shape == (200, 40)
    assert all(len(row.unique()) == 40 for row in chosen)
    counts = chosen.flatten().bincount(minlength=80)
    # Each of 80 targets is chosen by half of the rows: 100 ± 7 (one standard deviation).
    assert counts.min() > 65
    assert counts.max() < 135


def test_asking_for_all_targets_chooses_none():
    samples = burgers_samples(counts=(5, 16))
    generator = torch.Generator()
    assert samples.choose(3, 80, generator) is None
    assert samples.choose(3, None, generator) is None
    assert samples.choose(3, 79, generator) is not None


def test_a_smaller_grid_is_a_subset_of_the_original_grid():
    samples = burgers_samples()
    smaller = samples.on_grid((5, 16))
    assert smaller.grid_shape == (5, 16)
    batch = smaller.batch(torch.tensor([2]))
    expected = trajectories(3)[2][subset_indices(TIMES, 5)][:, subset_indices(POINTS, 16)]
    assert torch.equal(batch.targets.reshape(5, 16), torch.from_numpy(expected))
    assert torch.equal(smaller.observed_values, samples.observed_values)


def test_a_grid_that_is_not_held_is_refused():
    with pytest.raises(ValueError, match="do not contain"):
        burgers_samples(counts=(5, 16)).on_grid((6, 16))


def test_augmentation_of_plain_samples_is_refused():
    samples = burgers_samples()
    assert samples.augmentations(2, torch.Generator()) is None
    with pytest.raises(ValueError, match="augmentation was given"):
        samples.batch(torch.tensor([0]), augmentation=torch.zeros(1, 2, dtype=torch.long))


def test_burgers_shares_one_mean_and_deviation_of_its_targets():
    samples = burgers_samples(counts=(5, 16))
    statistics = samples.statistics()
    targets = samples.targets.double().numpy()
    assert statistics.value_mean == statistics.output_mean
    np.testing.assert_allclose(statistics.output_mean, targets.mean(), rtol=1e-12)
    np.testing.assert_allclose(statistics.value_std, targets.std(), rtol=1e-12)


def test_solutions_are_observed_as_the_recipes_data_are(tmp_path):
    BURGERS.prepare(tmp_path, "cpu", Console(quiet=True))
    stored = BURGERS.load_test(tmp_path).samples
    ours = BurgersSamples.from_solutions(stored.targets).batch(torch.tensor([1]))
    theirs = stored.batch(torch.tensor([1]))
    assert torch.equal(ours.observations.positions, theirs.observations.positions)
    assert torch.equal(ours.observations.values, theirs.observations.values)
    assert torch.equal(ours.queries, theirs.queries)
    assert torch.equal(ours.targets, theirs.targets)


def test_statistics_of_full_grid_supervision_come_from_the_subset():
    samples = burgers_samples()
    # Both axes are shorter than 100, so here the subset is the whole grid.
    whole = samples.targets.double().mean()
    assert samples.statistics().output_mean == pytest.approx(whole.item(), rel=1e-12)
    time = np.arange(300.0)[None, :, None]
    tall = torch.from_numpy(np.broadcast_to(time**2, (2, 300, 4)).astype(np.float32).copy())
    held = (torch.arange(300), torch.arange(4))
    places = torch.zeros(1, 2)
    full = BurgersSamples(
        grid=(300, 4), held=held, targets=tall, observed_positions=places,
        observed_values=torch.zeros(2, 1),
    )  # fmt: skip
    expected = np.mean(np.round(np.linspace(0, 299, 100)) ** 2)
    assert full.statistics().output_mean == pytest.approx(expected, rel=1e-12)


def test_other_fields_have_separate_statistics_for_inputs_and_outputs():
    values, targets = torch.rand(4, 6, 6), 3 + 2 * torch.randn(4, 6, 6)
    statistics = GridSamples.fully_observed(values, targets).statistics()
    assert statistics.value_mean == pytest.approx(values.double().mean().item(), rel=1e-12)
    assert statistics.output_mean == pytest.approx(targets.double().mean().item(), rel=1e-12)
    deviation = targets.double().std(correction=0).item()
    assert statistics.output_std == pytest.approx(deviation, rel=1e-12)
    standardize = Standardization(1)
    standardize.set(statistics.output_mean, statistics.output_std)
    assert standardize(targets).std(correction=0).item() == pytest.approx(1, rel=1e-5)


def test_counts_of_the_paper():
    one = BurgersData()
    assert (one.training, one.validation, one.test_counts) == (2000, 100, (84,))
    viscosities = tuple(0.001 * k for k in range(1, 13))
    twelve = BurgersData(viscosities=viscosities, test=1000)
    assert twelve.test_counts == (84,) * 4 + (83,) * 8
    assert one.grid == (201, 1024)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"viscosities": ()}, "viscosities must be positive"),
        ({"viscosities": (0.1, -1.0)}, "viscosities must be positive"),
        ({"viscosities": (0.1, 0.1)}, "viscosities must differ"),
        ({"points": 1}, "points must be at least 2, got 1"),
        ({"training": 0}, "training must be at least 1, got 0"),
        ({"test": -1}, "test must be at least 0, got -1"),
        ({"final_time": -1.0}, "final_time must be positive"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        BurgersData(**changes)


class TestPointSamples:
    @pytest.fixture
    def stored(self, tmp_path):
        samples = point_samples(12)
        write_points(tmp_path / "mine.h5", samples, DOMAIN)
        return samples, read_points(tmp_path / "mine.h5")

    def test_a_batch_holds_each_samples_points_and_masks_the_rest(self, stored):
        samples, file = stored
        loaded = PointSamples.read(file, np.arange(12))
        rows = torch.tensor([7, 2, 7, 11])
        batch = loaded.batch(rows)
        assert batch.mask is not None
        assert batch.observations.mask is not None
        for place, row in enumerate(rows.tolist()):
            sample = samples[row]
            real, asked = batch.observations.mask[place], batch.mask[place]
            for got, wanted in (
                (batch.observations.positions[place][real], sample.positions),
                (batch.observations.values[place][real], sample.values),
                (batch.queries[place][asked], sample.queries),
                (batch.targets[place][asked], sample.targets),
                (batch.observations.condition[place], sample.condition),
            ):
                assert torch.equal(got, torch.as_tensor(wanted, dtype=torch.float32))

    def test_padding_is_finite_and_inside_the_domain(self, stored):
        _, file = stored
        batch = PointSamples.read(file, np.arange(12)).batch(torch.arange(12))
        low, high = torch.tensor(DOMAIN.low), torch.tensor(DOMAIN.high)
        assert not batch.mask.all()
        for positions in (batch.queries, batch.observations.positions):
            assert ((positions >= low) & (positions <= high)).all()

    @pytest.mark.parametrize("count", [1, 2, 5, 10])
    def test_choices_are_distinct_real_targets_as_many_as_there_are(self, stored, count):
        samples, file = stored
        loaded = PointSamples.read(file, np.arange(12))
        rows = torch.arange(12)
        batch = loaded.batch(rows, loaded.choose(12, count, torch.Generator().manual_seed(0)))
        assert batch.targets.shape == (12, count, 1)
        for row in range(12):
            real = batch.targets[row] if batch.mask is None else batch.targets[row][batch.mask[row]]
            stored_targets = np.asarray(samples[row].targets, np.float32).flatten()
            assert len(real) == min(count, len(stored_targets))
            assert len(real.unique()) == len(real)
            assert set(real.flatten().tolist()) <= set(stored_targets.tolist())

    def test_choices_are_uniform_in_short_and_long_samples(self, stored):
        samples, file = stored
        loaded = PointSamples.read(file, np.arange(12))
        sizes = [len(np.asarray(sample.targets)) for sample in samples]
        row = int(np.argsort(sizes)[6])  # neither the shortest nor the longest
        size, count, draws = sizes[row], 3, 3000
        assert min(sizes) < size < max(sizes)
        rows = torch.full((draws,), row)
        batch = loaded.batch(rows, loaded.choose(draws, count, torch.Generator().manual_seed(0)))
        assert batch.mask is None or batch.mask.all()
        counts = batch.targets.flatten().unique(return_counts=True)[1]
        assert len(counts) == size
        expected = draws * count / size
        assert (counts - expected).abs().max() < 5 * expected**0.5

    def test_samples_of_one_size_need_no_mask(self, tmp_path):
        samples = [s for s in point_samples(60) if np.shape(s.queries)[0] == 6]
        samples = [
            s for s in samples if np.shape(s.positions)[0] == np.shape(samples[0].positions)[0]
        ]
        write_points(tmp_path / "mine.h5", samples, DOMAIN)
        loaded = PointSamples.read(read_points(tmp_path / "mine.h5"), np.arange(len(samples)))
        batch = loaded.batch(torch.arange(len(samples)))
        assert batch.mask is None
        assert batch.observations.mask is None
        chosen = loaded.choose(1, 4, torch.Generator())
        assert chosen.shape == (1, 4)

    def test_statistics_are_per_channel_and_from_training_only(self, tmp_path):
        samples = point_samples(20)
        path = tmp_path / "mine.h5"
        splits = {"training": [0, 1, 2, 3], "validation": [4, 5], "test": [6, 7]}
        write_points(path, samples, DOMAIN, splits=splits)
        training, _ = PointData().load(path)
        statistics = training.samples.statistics()
        values = np.concatenate([np.asarray(s.values, np.float32) for s in samples[:4]])
        values = values.astype(np.float64)
        np.testing.assert_allclose(statistics.value_mean, values.mean(axis=0), rtol=1e-10)
        np.testing.assert_allclose(statistics.value_std, values.std(axis=0), rtol=1e-10)
        assert statistics.output_mean.shape == (1,)

    def test_a_constant_channel_is_divided_by_one(self, tmp_path):
        path = tmp_path / "mine.h5"
        samples = point_samples(4)
        constant = [
            type(s)(s.positions, np.full_like(s.values, 5), s.queries, s.targets) for s in samples
        ]
        write_points(path, constant, DOMAIN)
        resident = PointSamples.read(read_points(path), np.arange(4))
        for samples in (resident, StreamedPoints(read_points(path), np.arange(4), workers=0)):
            assert samples.statistics().value_std.tolist() == [0, 0]
            model = fst.build("own/perceiver-io", value_channels=2, width=16, heads=2)
            model.fit_statistics(samples)
            assert model.standardize_values.deviation.tolist() == [1, 1]


# Which points of a grid are observed, supervised and tested: the paper's counts and definitions.


def test_the_paper_observes_1424_values():
    indices = boundary_observation_indices(201, 1024)
    assert indices.shape == (1424, 2)
    assert len(indices.unique(dim=0)) == 1424
    assert torch.equal(indices[:1024], torch.tensor([[0, cell] for cell in range(1024)]))
    assert indices[1024:1028].tolist() == [[1, 0], [1, 1023], [2, 0], [2, 1023]]
    assert indices[-1].tolist() == [200, 1023]
    time, cell = indices.unbind(dim=1)
    assert bool(((time == 0) | (cell == 0) | (cell == 1023)).all())


@pytest.mark.parametrize("size", [201, 1024, 128])
@pytest.mark.parametrize("count", [32, 64, 100, 128])
def test_subsets_are_rounded_linspace(size, count):
    expected = np.round(np.linspace(0, size - 1, count)).astype(int)
    assert subset_indices(size, count).tolist() == expected.tolist()


@given(st.integers(1, 3000).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size))))
def test_subsets_rise_and_keep_both_ends(sizes):
    size, count = sizes
    indices = subset_indices(size, count)
    assert len(indices) == count
    assert (indices.diff() > 0).all()
    assert indices[0] == 0
    assert count == 1 or indices[-1] == size - 1


@pytest.mark.parametrize("count", [0, 11])
def test_a_subset_larger_than_its_axis_is_refused(count):
    with pytest.raises(ValueError, match="count must lie between 1 and the axis' size 10"):
        subset_indices(10, count)


def test_coordinates_are_index_over_last_index_with_the_last_axis_fastest():
    indices = index_product((torch.tensor([0, 100, 200]), torch.tensor([0, 1023])))
    assert indices[:3].tolist() == [[0, 0], [0, 1023], [100, 0]]
    coordinates = index_coordinates(indices, (201, 1024))
    assert coordinates.dtype == torch.float32
    assert coordinates.tolist() == [[0, 0], [0, 1], [0.5, 0], [0.5, 1], [1, 0], [1, 1]]
