"""The field by itself: Equation 6, units, chunks and mistakes."""

import pytest
import torch

from fst import Domain, Field
from fst.field import Decoder
from fst.nn import FourierFeatures
from fst.operators import CHUNK_NUMBERS, Standardization
from fst.rbf import rbf_weights
from fst.types import Anchors
from small import stirred

BOX = Domain((-1.0, 10.0), (3.0, 10.5))


def some_field(condition=0, outputs=2, domain=BOX):
    decoder = stirred(Decoder(8, FourierFeatures(2, 3, "linear"), condition, outputs).double())
    positions = torch.rand(2, 6, 2, dtype=torch.float64)
    scales = 0.05 + torch.rand(2, 2, 6, 2, dtype=torch.float64)
    standardization = Standardization(outputs).double()
    standardization.set(0.5, 2.0)
    given = torch.randn(2, condition, dtype=torch.float64) if condition else None
    features = torch.randn(2, 6, 8, dtype=torch.float64)
    return Field(domain, Anchors(positions, *scales), features, given, decoder, standardization)


def some_queries(count=7, domain=BOX):
    return domain.from_unit(torch.rand(2, count, 2, dtype=torch.float64))


@pytest.mark.parametrize("condition", [0, 3])
@pytest.mark.parametrize("neighbors", [None, 2])
def test_values_are_equation_6_in_the_units_of_the_data(condition, neighbors):
    field, queries = some_field(condition), some_queries()
    unit, anchors, decoder = BOX.to_unit(queries), field.unit_anchors, field.decoder
    weights = rbf_weights(unit, anchors.positions, anchors.length_scales, neighbors)
    tokens = decoder.evaluate(weights @ field.features, decoder.fourier(unit), field.condition)
    tokens = tokens + decoder.feed_forward.feed_forward(decoder.feed_forward.norm(tokens))
    expected = decoder.output(decoder.norm(tokens)) * 2.0 + 0.5
    for found in (field(queries, neighbors), field.decode(queries, neighbors)):
        torch.testing.assert_close(found, expected)


def test_refinement_scales_do_not_matter_here():
    field, queries = some_field(), some_queries()
    anchors = field.unit_anchors
    other = Anchors(anchors.positions, anchors.length_scales, 2 * anchors.refinement_length_scales)
    changed = Field(BOX, other, field.features, None, field.decoder, field.standardization)
    torch.testing.assert_close(changed(queries), field(queries))


def test_anchors_come_in_the_units_of_the_domain():
    field = some_field()
    unit, found = field.unit_anchors, field.anchors
    lengths = torch.tensor([4.0, 0.5], dtype=torch.float64)
    low = torch.tensor([-1.0, 10.0], dtype=torch.float64)
    torch.testing.assert_close(found.positions, low + lengths * unit.positions)
    torch.testing.assert_close(found.length_scales, lengths * unit.length_scales)


@pytest.mark.parametrize("count", [0, 1, 50])
def test_the_number_of_queries_is_free(monkeypatch, count):
    monkeypatch.setitem(CHUNK_NUMBERS, "cpu", 2_000)
    field, queries = some_field(), some_queries(count)
    assert field(queries).shape == (2, count, 2)
    torch.testing.assert_close(field(queries), field.decode(queries))


def test_a_field_is_smooth_in_the_queries():
    """Its gradient along the queries is that of differences."""
    field = some_field(outputs=1, domain=Domain.unit(2))
    queries = 0.1 + 0.8 * torch.rand(2, 3, 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(field.decode, queries.requires_grad_())


def test_mistakes_are_named():
    field, queries = some_field(), some_queries()
    with pytest.raises(ValueError, match="queries must lie in the domain"):
        field(queries + 100)
    with pytest.raises(ValueError, match="queries must have batch size 2"):
        field(queries[:1])
    with pytest.raises(TypeError, match="neighbors must be a whole number"):
        field(queries, neighbors=1.5)
