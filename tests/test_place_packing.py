"""The layer on γ as the kernels want it: the packed numbers exactly, the gradients exactly.

Without a GPU the kernels run in Triton's interpreter.
"""

import math

import pytest
import torch

pytest.importorskip("triton")
from folding_reference import pack_place, place_columns, place_table
from fst.kernels import place_packing as packing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter does not round to bfloat16 but cuts off.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
SIZES = pytest.mark.parametrize(
    ("axes", "bands", "hidden"), [(1, 5, 8), (2, 32, 352), (3, 16, 136), (3, 64, 24), (2, 1, 128)]
)


def made(axes, bands, hidden, dtype=torch.float32):
    """Weight, part of a wider one, bias, and frequencies."""
    columns = axes * (1 + 2 * bands)
    wide = torch.randn(hidden, columns + 5, device=DEVICE).to(dtype)
    bias = torch.randn(hidden, device=DEVICE).to(dtype)
    return wide[:, 3 : 3 + columns], bias, math.pi * torch.rand(bands, device=DEVICE)


def wanted_columns(weight, bias, bands):
    padded = max(packing.RAW, 1 << (bands - 1).bit_length())
    return place_columns(weight, bias, bands, padded, packing.RAW)


@SIZES
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_packed_to_the_bit(axes, bands, hidden, dtype):
    weight, bias, frequencies = made(axes, bands, hidden)
    layer = wanted_columns(weight, bias, bands)
    slot, packed, table = packing.place_layer(weight, bias, frequencies, dtype)
    assert slot.shape == layer.shape
    assert torch.equal(packed, pack_place(layer, axes, packing.RAW, packing.UNITS, dtype))
    wanted = place_table(frequencies, axes, table.shape[1])
    torch.testing.assert_close(table, wanted, rtol=2.0**-23, atol=0)


@SIZES
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_gradients(axes, bands, hidden, dtype):
    """Each number goes to one place, so nothing is lost but by the parameters' rounding."""
    weight, bias, frequencies = made(axes, bands, hidden, dtype)
    exact = [each.float().requires_grad_() for each in (weight, bias)]
    layer = wanted_columns(*exact, bands)
    upstream = torch.randn(2, *layer.shape, device=DEVICE)
    wanted = torch.autograd.grad(layer, exact, upstream.sum(dim=0))
    mine = [each.requires_grad_() for each in (weight.detach(), bias)]
    slot, packed, table = packing.place_layer(*mine, frequencies, HALF)
    assert not packed.requires_grad
    assert not table.requires_grad
    found = torch.autograd.grad([slot, slot], mine, list(upstream))
    assert all(torch.equal(a, b.to(dtype)) for a, b in zip(found, wanted, strict=True))


def test_gradients_only_of_what_is_learned():
    weight, bias, frequencies = made(2, 3, 8)
    for learned in (weight.clone(), bias.clone()):
        given = [learned if learned.shape == each.shape else each for each in (weight, bias)]
        learned.requires_grad_()
        slot, _, _ = packing.place_layer(*given, frequencies, HALF)
        slot.backward(torch.ones(slot.shape, device=DEVICE))
        assert learned.grad.abs().sum() > 0


def test_the_operators_keep_their_promises():
    weight, bias, frequencies = made(2, 3, 16)
    given = weight.detach().requires_grad_(), bias.requires_grad_(), frequencies, torch.float16
    # Not that all outputs repeat: the number in the slot is any.
    tested = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(packing.pack_place.definition, given, test_utils=tested)
    grad = torch.randn(16, 2 * 2 * 16 + packing.RAW, device=DEVICE)
    torch.library.opcheck(packing.unpack_place.definition, (grad, 3, 14))
