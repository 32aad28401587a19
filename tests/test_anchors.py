"""Anchors by themselves: Equations 8 to 10, rows, and which parameters read the input."""

import itertools
import math

import pytest
import torch

from fst.ablations import (
    FixedScales,
    LocalScales,
    SpacingScales,
    StaggeredCoordinates,
    UniformCoordinates,
)
from fst.anchors import (
    AdaptiveCoordinates,
    AdaptiveScales,
    AnchorPredictor,
    GapTokens,
    LearnedScales,
    ordered_positions,
    row_positions,
)
from fst.rbf import rbf_weights
from small import stirred


def test_gaps_are_equation_8_and_positions_their_sums():
    scores = torch.randn(2, 3, 7, dtype=torch.float64)
    positions = ordered_positions(scores)
    for b in range(2):
        for row in range(3):
            gaps = [0.5 * (a + math.sqrt(a * a + 4)) + 0.10 for a in scores[b, row].tolist()]
            total, expected = 0.0, [0.0]
            for gap in gaps:
                total += gap / sum(gaps)
                expected.append(total)
            torch.testing.assert_close(positions[b, row], torch.tensor(expected).double())


def test_positions_are_ordered_and_end_on_the_boundary_exactly():
    positions = ordered_positions(30 * torch.randn(4, 5, 31))
    assert (positions.diff(dim=-1) > 0).all()
    assert (positions[..., 0] == 0).all()
    assert (positions[..., -1] == 1).all()


def test_equal_scores_give_even_positions():
    even = torch.linspace(0, 1, 6, dtype=torch.float64).expand(1, 2, -1)
    for score in (-3.0, 0.0, 5.0):
        scores = torch.full((1, 2, 5), score, dtype=torch.float64)
        torch.testing.assert_close(ordered_positions(scores), even)
    tokens = torch.randn(1, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(UniformCoordinates(2)(tokens), even)
    # The head starts at zero, so anchors start evenly spaced.
    torch.testing.assert_close(AdaptiveCoordinates(8, 2).double()(tokens), even)


def test_a_larger_score_opens_its_gap_and_its_gradient_is_right():
    scores = torch.zeros(1, 1, 4, dtype=torch.float64)
    before = ordered_positions(scores).diff(dim=-1)
    scores[..., 2] = 2.0
    after = ordered_positions(scores).diff(dim=-1)
    assert after[0, 0, 2] > before[0, 0, 2]
    assert (after[0, 0, [0, 1, 3]] < before[0, 0, [0, 1, 3]]).all()
    assert torch.autograd.gradcheck(
        ordered_positions, torch.randn(1, 2, 3).double().requires_grad_()
    )


def test_adaptive_scales_are_equation_10():
    rows, axes, gaps = 3, 2, 4
    scales = stirred(AdaptiveScales(6, rows, axes, rows * (gaps + 1)).double())
    tokens = torch.randn(2, gaps, 6, dtype=torch.float64)
    found = scales(tokens, torch.rand(2, rows, gaps + 1).double())
    outputs = scales.head(tokens)  # b j (rows axes)
    for b in range(2):
        for row in range(rows):
            for column in range(gaps + 1):
                beside = [max(column - 1, 0), min(column, gaps - 1)]
                for axis in range(axes):
                    h = outputs[b, beside, row * axes + axis].mean()
                    anchor = row * (gaps + 1) + column
                    for base, lengths in zip(
                        (scales.refinement_base, scales.decoding_base), found, strict=True
                    ):
                        length = torch.exp(base[anchor] + math.log(4) * torch.tanh(h))
                        expected = length.clamp(0.015, 0.30)
                        torch.testing.assert_close(lengths[b, anchor, axis], expected)


def test_scales_start_as_the_paper_says_and_stay_in_bounds():
    tokens, along = torch.randn(2, 4, 6), torch.rand(2, 3, 5)
    for scales in (AdaptiveScales(6, 3, 2, 15), LearnedScales(2, 15), FixedScales(2, 15)):
        for lengths in scales(tokens, along):
            assert lengths.shape == (2, 15, 2)
            torch.testing.assert_close(lengths, torch.full_like(lengths, 0.03))
    learned = LearnedScales(2, 3)
    with torch.no_grad():
        learned.base.copy_(torch.tensor([-100.0, math.log(0.1), 100.0]))
    torch.testing.assert_close(learned(tokens, along)[0][0, :, 0], torch.tensor([0.015, 0.1, 0.30]))


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize(("kind", "widest"), [(SpacingScales, 1.2), (LocalScales, 0.7)])
def test_spacing_scales_are_bounded_multiples_of_the_distance_between_neighbours(
    axis, kind, widest
):
    scales = stirred(kind(6, (2, 3), axis, 6 * 5).double())
    tokens = torch.randn(2, 4, 6, dtype=torch.float64)
    along = ordered_positions(torch.randn(2, 6, 4, dtype=torch.float64))
    found = scales(tokens, along)
    outputs = scales.head(tokens)  # b j (rows axes)
    spacing = [1 / (2 - 1), 1 / (3 - 1)]
    for b, row, column in itertools.product(range(2), range(6), range(5)):
        beside = [max(column - 1, 0), min(column, 3)]
        gap = along[b, row].diff()[beside].prod().sqrt()
        lengths = [*spacing[:axis], gap, *spacing[axis:]]
        anchor = row * 5 + column
        for each, length in enumerate(lengths):
            h = outputs[b, beside, row * 3 + each].mean()
            for base, got in zip((scales.refinement_base, scales.decoding_base), found):
                share = torch.sigmoid(base[anchor] + h)
                expected = (length * 0.3 ** (1 - share) * widest**share).clamp_min(0.005)
                torch.testing.assert_close(got[b, anchor, each], expected)


@pytest.mark.parametrize("coordinates", [UniformCoordinates(8), StaggeredCoordinates((8,))])
def test_local_scales_leave_little_weight_beyond_the_16_nearest(coordinates):
    along = coordinates(torch.zeros(1, 7, 6))
    rows = row_positions((8,), along).repeat_interleave(8, dim=0)  # m 1
    anchors = torch.cat((rows[None], along.flatten(1)[..., None]), dim=-1)  # 1 m 2
    points = torch.rand(1, 500, 2)
    nearest = torch.cdist(points, anchors).topk(16, largest=False).indices
    beyond = {}
    for kind in (SpacingScales, LocalScales):
        scales = kind(6, (8,), 1, 64)
        torch.nn.init.constant_(scales.decoding_base, 100.0)  # the widest there are
        weights = rbf_weights(points, anchors, scales(torch.randn(1, 7, 6), along)[1])
        beyond[kind] = 1 - weights.gather(2, nearest).sum(dim=2)
    assert beyond[LocalScales].mean() < 0.005 < 0.05 < beyond[SpacingScales].mean()


def test_spacing_scales_shrink_with_the_gap_and_start_at_six_tenths_of_it():
    scales = SpacingScales(6, (4,), 1, 4 * 9)
    even = torch.linspace(0, 1, 9).expand(1, 4, -1)
    start = torch.tensor([0.6 / 3, 0.6 / 8]).expand(1, 36, 2)
    for lengths in scales(torch.randn(1, 8, 6), even):
        torch.testing.assert_close(lengths, start)
    crowded = scales(torch.randn(1, 8, 6), even**2)[0].view(4, 9, 2)[..., 1]
    assert (crowded.diff(dim=-1) >= 0).all()
    assert crowded[0, -1] > 5 * crowded[0, 0]


def test_rows_are_the_product_of_even_positions():
    like = torch.empty(0, dtype=torch.float64)
    assert row_positions((), like).shape == (1, 0)
    torch.testing.assert_close(row_positions((1,), like), torch.tensor([[0.5]]).double())
    expected = [[x, y] for x in (0.0, 1.0) for y in (0.0, 0.5, 1.0)]
    torch.testing.assert_close(row_positions((2, 3), like), torch.tensor(expected).double())


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_anchors_stand_on_their_rows_and_move_along_the_adaptive_axis(axis):
    tokens = stirred(GapTokens(5, 8, 2, 1, gaps=3).double())
    coordinates = stirred(AdaptiveCoordinates(8, 6).double())
    scales = AdaptiveScales(8, 6, 3, 24).double()
    predictor = AnchorPredictor(tokens, coordinates, scales, (2, 3), axis)
    inputs = torch.randn(2, 9, 5, dtype=torch.float64)
    anchors = predictor(inputs, None)
    positions = anchors.positions.view(2, 6, 4, 3)  # b p j+1 s
    torch.testing.assert_close(positions[..., axis], coordinates(tokens(inputs, None)))
    others = [each for each in range(3) if each != axis]
    fixed = row_positions((2, 3), positions)[None, :, None].expand(2, -1, 4, -1)
    torch.testing.assert_close(positions[..., others], fixed)


def test_gap_tokens_read_what_is_not_masked():
    tokens = stirred(GapTokens(5, 8, 2, 2, gaps=3).double())
    inputs = torch.randn(1, 6, 5, dtype=torch.float64)
    mask = torch.tensor([[True] * 4 + [False] * 2])
    before = tokens(inputs, mask)
    torch.testing.assert_close(tokens(inputs[:, :4], None), before)
    order = torch.tensor([3, 1, 0, 2])
    torch.testing.assert_close(tokens(inputs[:, order], None), before)  # a set, not a sequence
    inputs[:, 0] += 1
    assert (tokens(inputs, mask) - before).abs().max() > 1e-3


def test_what_reads_the_input_is_all_but_learned_logarithms():
    scales = AdaptiveScales(8, 2, 2, 8)
    tokens, coordinates = GapTokens(5, 8, 2, 1, gaps=3), AdaptiveCoordinates(8, 2)
    predictor = AnchorPredictor(tokens, coordinates, scales, (2,), 1)
    reading = {id(each) for each in predictor.predicting()}
    bases = {id(scales.refinement_base), id(scales.decoding_base)}
    assert reading.isdisjoint(bases)
    assert reading | bases == {id(each) for each in predictor.parameters()}
