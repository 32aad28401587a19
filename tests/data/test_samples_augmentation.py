"""Moved samples are solutions of the equation, observed and asked at the same places."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from data_examples import DARCY, POINTS, TIMES
from fst.data import DataError, burgers, darcy, darcy_data
from fst.data.burgers_data import PeriodicSamples
from fst.data.darcy_data import SquareSamples
from fst.data.samples import (
    BurgersSamples,
    boundary_observation_indices,
    index_coordinates,
    subset_indices,
)

GRID = (TIMES, POINTS)
SUPERVISION = (5, 16)
QUIET = Console(quiet=True)


def solved(initial: torch.Tensor) -> torch.Tensor:
    times = torch.linspace(0, 0.5, TIMES, dtype=torch.float64)
    return burgers.solve(initial, 0.1, times).float()


def samples_of(trajectories: torch.Tensor) -> BurgersSamples:
    time, cell = boundary_observation_indices(*GRID).unbind(dim=1)
    return BurgersSamples(
        grid=GRID,
        held=tuple(torch.arange(size) for size in GRID),
        targets=trajectories,
        observed_positions=index_coordinates(torch.stack([time, cell], dim=1), GRID),
        observed_values=trajectories[:, time, cell],
        condition=torch.arange(1.0, len(trajectories) + 1)[:, None],
    )


@pytest.fixture(scope="module")
def initial() -> torch.Tensor:
    return burgers.sample_initial(4, POINTS, 0)


@pytest.fixture(scope="module")
def periodic(initial) -> PeriodicSamples:
    return PeriodicSamples(samples_of(solved(initial)), SUPERVISION)


def assert_same_batch(got, wanted, tolerance):
    assert torch.equal(got.queries, wanted.queries)
    assert torch.equal(got.observations.positions, wanted.observations.positions)
    assert torch.equal(got.observations.condition, wanted.observations.condition)
    for ours, theirs in (
        (got.targets, wanted.targets),
        (got.observations.values, wanted.observations.values),
    ):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)


@pytest.mark.parametrize("chosen", [False, True])
def test_a_moved_burgers_sample_is_the_solution_of_the_moved_initial_condition(
    initial, periodic, chosen
):
    rows = torch.tensor([1, 3, 0, 2])
    shift, reflected = torch.tensor([7, 0, 20, 63]), torch.tensor([0, 1, 1, 0])
    moved = []
    for u, steps, mirror in zip(initial[rows], shift, reflected, strict=True):
        shifted = torch.roll(u, -int(steps), 0)
        moved.append(-shifted.flip(0) if mirror else shifted)
    expected = samples_of(solved(torch.stack(moved))).on_grid(SUPERVISION)
    expected.condition = torch.arange(1.0, 5.0)[rows, None]
    choice = periodic.choose(4, 30, torch.Generator().manual_seed(5)) if chosen else None
    got = periodic.batch(rows, choice, torch.stack([shift, reflected], dim=1))
    assert_same_batch(got, expected.batch(torch.arange(4), choice), tolerance=1e-5)


def test_without_a_move_the_batch_is_the_stored_one(periodic):
    rows = torch.tensor([2, 2, 1])
    plain = periodic.whole.on_grid(SUPERVISION)
    chosen = periodic.choose(3, 11, torch.Generator().manual_seed(5))
    assert_same_batch(periodic.batch(rows, chosen), plain.batch(rows, chosen), tolerance=0)
    assert_same_batch(periodic.batch(rows), plain.batch(rows), tolerance=0)
    assert periodic.statistics() == plain.statistics()


def test_shifts_and_reflections_are_drawn_uniformly(periodic):
    drawn = periodic.augmentations(6400, torch.Generator().manual_seed(0))
    assert drawn.shape == (6400, 2)
    shifts, mirrors = drawn.unbind(dim=1)
    counts = shifts.bincount(minlength=POINTS)
    assert len(counts) == POINTS
    assert counts.min() > 50  # 100 ± 10 expected
    assert counts.max() < 150
    assert 3000 < mirrors.sum() < 3400  # 3200 ± 40 expected
    again = periodic.augmentations(6400, torch.Generator().manual_seed(0))
    assert torch.equal(drawn, again)


def test_periodic_samples_need_the_whole_grid(periodic):
    with pytest.raises(ValueError, match=r"whole must hold the whole \(21, 64\) grid"):
        PeriodicSamples(periodic.whole.on_grid(SUPERVISION))


def test_the_supervised_places_are_the_rounded_subset(periodic):
    wanted = [[t, x] for t in subset_indices(TIMES, 5) for x in subset_indices(POINTS, 16)]
    assert periodic.supervised.tolist() == wanted


def square_moves(field: np.ndarray) -> list[np.ndarray]:
    reflected = [field, field[::-1], field[:, ::-1], field[::-1, ::-1]]
    return [move for f in reflected for move in (f, f.T)]


def test_all_eight_moves_of_darcy_solve_the_moved_problem(tmp_path):
    data = replace(DARCY, symmetries="square")
    data.prepare(tmp_path, "cpu", QUIET)
    training, _ = data.load(tmp_path, augment=True)
    samples = training.samples
    assert isinstance(samples, SquareSamples)
    rows = data.for_training(tmp_path)[0][1].training
    fine = darcy.sample_coefficient(1, data.fine + 1, data.seed, start=int(rows[2]))[0].numpy()
    for number, move in enumerate(square_moves(fine)):
        coefficient = torch.from_numpy(move.copy())[None]
        solution = darcy.subsample(darcy.solve(coefficient), 16)
        augmentation = torch.tensor([[number // 2, number % 2]])
        batch = samples.batch(torch.tensor([2]), None, augmentation)
        wanted = darcy.subsample(coefficient, 16).float()
        assert torch.equal(batch.observations.values.reshape(1, 16, 16), wanted)
        torch.testing.assert_close(
            batch.targets.reshape(1, 16, 16).double(), solution, atol=1e-6, rtol=1e-5
        )


def test_a_choice_of_darcy_targets_follows_the_move(tmp_path):
    fields = torch.randn(3, 1, 6, 6)
    samples = SquareSamples(torch.randn(3, 1, 6, 6), fields)
    chosen = samples.choose(2, 7, torch.Generator().manual_seed(1))
    rows, augmentation = torch.tensor([2, 0]), torch.tensor([[0, 1], [0, 0]])
    batch = samples.batch(rows, chosen, augmentation)
    whole = samples.batch(rows, None, augmentation)
    assert torch.equal(whole.targets[0].reshape(6, 6), fields[2, 0].T)
    assert torch.equal(whole.targets[1].reshape(6, 6), fields[0, 0])
    assert torch.equal(batch.targets[..., 0], whole.targets[..., 0].gather(1, chosen))
    assert torch.equal(batch.queries[0], whole.queries[0][chosen[0]])


def test_one_stored_field_gives_two_moves_and_four_give_eight():
    generator = torch.Generator().manual_seed(0)
    for stored in (1, 4):
        samples = SquareSamples(torch.zeros(1, stored, 4, 4), torch.zeros(1, stored, 4, 4))
        drawn = samples.augmentations(400, generator)
        assert len(drawn.unique(dim=0)) == 2 * stored


def test_reversing_indices_is_not_a_reflection_of_the_strided_grid():
    # Why reflections are stored: nodes 1, 5, 9, ... of 32 are not symmetric about the middle.
    solution = darcy.solve(darcy.sample_coefficient(2, 33, 0))
    exact = darcy.subsample(solution.flip(2), 8)
    reversed_only = darcy.subsample(solution, 8).flip(2)
    error = (exact - reversed_only).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
    assert error.min() > 0.05


def test_reflections_of_other_samples_are_refused(tmp_path):
    data = replace(DARCY, symmetries="square")
    data.prepare(tmp_path, "cpu", QUIET)
    other = replace(data, seed=1)
    path = tmp_path / "darcy_train_16.pt"
    other.make(path, "train", device="cpu", console=QUIET, force=True)
    with pytest.raises(DataError, match="reflections of other samples"):
        other.load(tmp_path, augment=True)


def test_files_of_another_version_of_fst_can_be_reflected(tmp_path, monkeypatch):
    with monkeypatch.context() as before:
        before.setattr(darcy_data, "__version__", "0.0.1")
        DARCY.prepare(tmp_path, "cpu", QUIET)
    data = replace(DARCY, symmetries="square")
    data.prepare(tmp_path, "cpu", QUIET)
    training, _ = data.load(tmp_path, augment=True)
    assert isinstance(training.samples, SquareSamples)


def test_published_darcy_files_cannot_be_reflected_but_can_be_transposed(tmp_path):
    from data_examples import write_fields

    write_fields(tmp_path / "darcy_train_16.pt")
    write_fields(tmp_path / "darcy_test_16.pt")
    with pytest.raises(DataError, match='use symmetries "transpose"'):
        replace(DARCY, symmetries="square").prepare(tmp_path, "cpu", QUIET)
    training, _ = DARCY.load(tmp_path, augment=True)
    assert training.samples.augmentations(1, torch.Generator()).shape == (1, 2)
