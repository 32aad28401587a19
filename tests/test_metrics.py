"""Errors of predictions refuse what they would otherwise broadcast."""

import pytest
import torch

from fst.metrics import label_ranks, relative_l2, squared_relative_l2, top_errors


@pytest.mark.parametrize("error", [relative_l2, squared_relative_l2])
@pytest.mark.parametrize("shape", [(1, 5, 2), (1, 1, 1), (2, 5, 1), (1, 5)])
def test_a_prediction_of_another_shape_is_refused(error, shape):
    with pytest.raises(ValueError, match=r"prediction must have the shape of target, \(1, 5, 1\)"):
        error(torch.zeros(shape), torch.ones(1, 5, 1))


def test_a_mask_of_another_shape_is_refused():
    target = torch.ones(2, 5, 1)
    with pytest.raises(ValueError, match=r"mask must have the shape \(2, 5\), got \(1, 5\)"):
        relative_l2(target, target, torch.ones(1, 5, dtype=torch.bool))


def test_masked_targets_count_neither_above_nor_below_the_line():
    prediction, target = torch.tensor([[[1.0], [9.0]]]), torch.tensor([[[2.0], [4.0]]])
    mask = torch.tensor([[True, False]])
    assert relative_l2(prediction, target, mask).item() == 0.5


@pytest.mark.parametrize("error", [label_ranks, top_errors])
def test_labels_of_another_number_are_refused(error):
    with pytest.raises(ValueError, match=r"labels must have the shape \(3,\)"):
        error(torch.rand(3, 4), torch.tensor([1]))


@pytest.mark.parametrize("error", [relative_l2, squared_relative_l2])
@pytest.mark.parametrize("shape", [(3, 5), (3, 2, 8, 8)])
def test_other_ranks_are_refused(error, shape):
    with pytest.raises(ValueError, match=r"target must have shape \(b q c\), got \(3, "):
        error(torch.ones(shape), torch.ones(shape))


def test_an_exact_prediction_has_a_gradient_of_zero():
    target = torch.ones(3, 4, 1)
    prediction = target + torch.tensor([0.0, 1.0, torch.nan]).view(3, 1, 1)
    prediction.requires_grad_()
    errors = relative_l2(prediction, target)
    assert errors[:2].tolist() == [0.0, 1.0]
    assert errors[2].isnan()
    errors[:2].sum().backward()
    assert (prediction.grad[0] == 0).all()
    torch.testing.assert_close(prediction.grad[1].norm(), torch.tensor(0.5))
