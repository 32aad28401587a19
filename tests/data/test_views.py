"""The observed, supervised and tested places, against the paper's counts and definitions."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fst.data.samples import (
    boundary_observation_indices,
    index_coordinates,
    index_product,
    subset_indices,
)


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
