"""One refinement step by itself: Equations 2 to 5 term by term."""

import pytest
import torch

from fst.ablations import AnchorSelfAttention, ObserveFirstLayer
from fst.evaluation_points import PointDraws
from fst.layer import EvaluateMixWrite, FunctionSpaceLayer, Points, Read
from fst.nn import Attention, FourierFeatures
from fst.rbf import rbf_weights
from fst.types import Anchors
from small import stirred

WIDTH, HEADS, ANCHORS, SEEN = 8, 2, 6, 5


def some_anchors(batch=2):
    positions = torch.rand(batch, ANCHORS, 2, dtype=torch.float64)
    scales = 0.1 + torch.rand(2, batch, ANCHORS, 2, dtype=torch.float64)
    return Anchors(positions, *scales)


def build(condition=0, kind=FunctionSpaceLayer):
    read = Read(WIDTH, Attention(WIDTH, HEADS))
    update = EvaluateMixWrite(WIDTH, HEADS, FourierFeatures(2, 3, "linear"), condition)
    return stirred(kind(read, update).double())


def some_inputs(condition=0):
    tokens, z = torch.randn(2, SEEN, WIDTH).double(), torch.randn(2, ANCHORS, WIDTH).double()
    given = torch.randn(2, condition, dtype=torch.float64) if condition else None
    return tokens, z, some_anchors(), given


def attend(attention, tokens, context):
    return attention(tokens, attention.keys_values(context))


def test_the_read_is_equation_2():
    layer = build()
    tokens, z, anchors, _ = some_inputs()
    read, context = layer.read, layer.precompute(tokens, None, anchors, None)
    u = z + attend(read.attention, read.norm_a(z), read.norm_h(tokens))
    expected = u + read.feed_forward(read.norm_2(u))
    torch.testing.assert_close(read(z, context), expected)


@pytest.mark.parametrize(("condition", "uniform"), [(0, 7), (3, 7), (3, 0)])
def test_the_update_is_equations_3_to_5(condition, uniform):
    layer = build(condition)
    tokens, z, anchors, given = some_inputs(condition)
    context, update = layer.precompute(tokens, None, anchors, given), layer.update
    points = Points(torch.tensor([4, 1, 1]), torch.rand(uniform, 2, dtype=torch.float64))

    # All evaluation points in one: the sampled anchors' positions, then the others.
    sampled = anchors.positions[:, points.anchor_indices]
    where = torch.cat((sampled, points.uniform.expand(2, -1, -1)), dim=1)
    weights = rbf_weights(where, anchors.positions, anchors.refinement_length_scales)
    e = update.evaluate(weights @ z, update.fourier(where), given)
    g = e + attend(update.mix, update.norm_e(e), update.norm_e(e))
    g = g + update.mix_feed(update.norm_g(g))
    own = rbf_weights(anchors.positions, anchors.positions, anchors.refinement_length_scales)
    q = update.evaluate(own @ z, update.fourier(anchors.positions), given)
    v = z + attend(update.write, update.norm_q(q), update.norm_e(g))
    expected = v + update.write_feed(update.norm_v(v))
    torch.testing.assert_close(update(z, context, points), expected)


def test_a_step_reads_then_updates_and_steps_share_what_is_precomputed():
    layer = build()
    tokens, z, anchors, _ = some_inputs()
    context = layer.precompute(tokens, None, anchors, None)
    draws = PointDraws(torch.randint(0, ANCHORS, (3, 2)), torch.rand(3, 4, 2).double())
    found = list(layer.refine(z, context, draws))
    assert len(found) == 3
    for step in range(3):
        points = Points(draws.anchor_indices[step], draws.uniform[step])
        z = layer.update(layer.read(z, context), context, points)
        torch.testing.assert_close(found[step], z)


def test_the_mask_reaches_the_read():
    layer = build()
    tokens, z, anchors, _ = some_inputs()
    mask = torch.tensor([[True] * 3 + [False] * 2] * 2)
    before = layer.read(z, layer.precompute(tokens, mask, anchors, None))
    short = layer.read(z, layer.precompute(tokens[:, :3], None, anchors, None))
    torch.testing.assert_close(before, short)


def test_decoding_scales_do_not_matter_here():
    layer = build()
    tokens, z, anchors, _ = some_inputs()
    points = Points(torch.tensor([0]), torch.rand(2, 2, dtype=torch.float64))
    other = Anchors(anchors.positions, 3 * anchors.length_scales, anchors.refinement_length_scales)
    found = [
        layer(z, layer.precompute(tokens, None, each, None), points) for each in (anchors, other)
    ]
    torch.testing.assert_close(*found)


def test_observing_first_reads_in_the_first_step_alone():
    layer = build(kind=ObserveFirstLayer)
    tokens, z, anchors, _ = some_inputs()
    context = layer.precompute(tokens, None, anchors, None)
    draws = PointDraws(torch.randint(0, ANCHORS, (2, 2)), torch.rand(2, 4, 2).double())
    first, second = layer.refine(z, context, draws)
    points = [Points(*each) for each in zip(*draws, strict=True)]
    torch.testing.assert_close(first, layer(z, context, points[0]))
    torch.testing.assert_close(second, layer.update(first, context, points[1]))


def test_anchor_attention_evaluates_no_field():
    update = stirred(AnchorSelfAttention(WIDTH, HEADS).double())
    layer = FunctionSpaceLayer(build().read, update)
    tokens, z, anchors, _ = some_inputs()
    context = layer.precompute(tokens, None, anchors, None)
    assert context.at_anchors is None
    points = Points(torch.tensor([0]), torch.rand(2, 2, dtype=torch.float64))
    expected = z
    for block in update.blocks:
        expected = expected + block.attention.attend_to_self(block.norm(expected))
        expected = block.feed_forward(expected)
    torch.testing.assert_close(update(z, context, points), expected)
