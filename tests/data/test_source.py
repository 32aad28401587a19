"""Splits cannot overlap, whichever way they are made."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_examples import BURGERS, DARCY, DOMAIN, point_samples, write_fields, write_published
from fst.data import GridSamples, Partition, PointData, TestSplit, write_points

COUNTS = st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60), st.integers(0, 9))


def rows_of(partition: Partition) -> list[int]:
    return [*partition.training, *partition.validation, *partition.test]


@given(COUNTS, st.integers(0, 2**40))
def test_drawn_splits_are_disjoint_rows_of_the_file(counts, seed):
    training, validation, test, spare = counts
    total = training + validation + test + spare
    partition = Partition.drawn(
        total, training=training, validation=validation, test=test, seed=seed
    )
    rows = rows_of(partition)
    assert len(rows) == len(set(rows)) == training + validation + test
    assert all(0 <= row < total for row in rows)
    assert len(partition.training) == training
    assert len(partition.test) == test


def test_a_shorter_test_draws_the_same_rows_for_training_and_validation():
    # Twelve files share their initial conditions; four of them have one test row more.
    long = Partition.drawn(100, training=50, validation=10, test=9, seed=3)
    short = Partition.drawn(100, training=50, validation=10, test=8, seed=3)
    assert np.array_equal(long.training, short.training)
    assert np.array_equal(long.validation, short.validation)
    assert set(short.test) < set(long.test)


def test_the_seed_decides_the_draw():
    def draw(seed):
        return Partition.drawn(1000, training=500, validation=10, test=0, seed=seed).training

    assert np.array_equal(draw(1), draw(1))
    assert not np.array_equal(draw(1), draw(2))


def test_more_rows_than_the_file_has_are_refused():
    with pytest.raises(ValueError, match="cannot draw 8 training, 2 validation and 1 test rows"):
        Partition.drawn(10, training=8, validation=2, test=1, seed=0)


@given(
    st.lists(st.integers(0, 20), unique=True),
    st.lists(st.integers(0, 20), unique=True),
    st.lists(st.integers(0, 20), unique=True),
)
def test_named_splits_are_accepted_exactly_when_disjoint(training, validation, test):
    named = {"training": training, "validation": validation, "test": test}
    disjoint = not (set(training) & set(validation)) and not (
        (set(training) | set(validation)) & set(test)
    )
    if disjoint:
        assert rows_of(Partition.named(named, 21)) == [
            *sorted(training),
            *sorted(validation),
            *sorted(test),
        ]
    else:
        with pytest.raises(ValueError, match="must not overlap"):
            Partition.named(named, 21)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"training": [0, 10]}, "rows 0 to 9"),
        ({"training": [-1]}, "rows 0 to 9"),
        ({"train": [0]}, "must be named training, validation, test, got train"),
        ({"training": [0.5]}, "list of row numbers"),
        ({"training": [1, 1]}, "repeat a row"),
    ],
)
def test_wrong_names_and_rows_are_refused(splits, message):
    with pytest.raises(ValueError, match=message):
        Partition.named(splits, 10)


def test_no_loaded_row_is_in_two_splits_of_a_published_burgers_file(tmp_path):
    write_published(tmp_path)
    training, validation = BURGERS.load(tmp_path)
    test = BURGERS.load_test(tmp_path)
    # The stored numbers begin with their row.
    rows = [s.samples.targets[:, 0, 0].int().tolist() for s in (training, validation, test)]
    assert [len(part) for part in rows] == [6, 3, 2]
    assert len({row for part in rows for row in part}) == 11


def test_no_loaded_row_is_in_two_splits_of_a_published_darcy_file(tmp_path):
    content = write_fields(tmp_path / "darcy_train_16.pt")
    training, validation = DARCY.load(tmp_path)
    assert isinstance(training.samples, GridSamples)
    stored = {content["y"][row].sum().item(): row for row in range(12)}
    first = [stored[field.sum().item()] for field in training.samples.targets]
    corner = {content["y"][row, 0, 0].item(): row for row in range(12)}
    second = [corner[field[0, 0].item()] for field in validation.samples.targets]
    assert len(first) == 6
    assert len(second) == 3
    assert not set(first) & set(second)


def test_no_loaded_row_is_in_two_splits_of_a_point_file(tmp_path):
    path = tmp_path / "mine.h5"
    write_points(path, point_samples(20), DOMAIN)
    data = PointData(validation_fraction=0.2, test_fraction=0.3)
    training, validation = data.load(path)
    test = data.load_test(path)
    rows = [s.samples.conditions()[:, 0].tolist() for s in (training, validation, test)]
    assert [len(part) for part in rows] == [10, 4, 6]
    assert len({value for part in rows for value in part}) == 20


def test_groups_name_every_test_sample():
    samples = GridSamples.fully_observed(torch.zeros(3, 4, 4), torch.zeros(3, 4, 4))
    with pytest.raises(ValueError, match="groups must name each of the 3 samples, got 2"):
        TestSplit(samples, ("a", "b"))
