"""The position term of a pointwise MLP against float64, and its layer packed to the bit."""

import math

import pytest
import torch

from fst.nn import MLP, FourierFeatures
from kernel_examples import (
    DEVICE,
    FINEST,
    HALF,
    ROUNDING,
    pack_position,
    position_columns,
    position_table,
    relative,
)

kernel = pytest.importorskip("fst.kernels.position_term")
BOUND = {torch.float32: 1e-5, HALF: 4 * ROUNDING}


def problem(entries, batch, points, axes, bands, hidden, condition):
    """Positions, weight on γ, bias, and with a condition its share."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    size = axes * (1 + 2 * bands)
    weight = torch.randn(hidden, size, generator=generator) / size**0.5
    given = [torch.rand(entries, points, axes, generator=generator), weight]
    given.append(torch.randn(hidden, generator=generator))
    if condition:
        given.append(torch.randn(batch, hidden, generator=generator))
    return [tensor.to(DEVICE) for tensor in given]


def plain(fourier, positions, weight, bias, share=None):
    hidden = fourier(positions) @ weight.t() + bias
    return hidden if share is None else hidden + share.unsqueeze(1)


def fused(fourier, dtype, positions, weight, bias, share=None):
    layer = kernel.position_layer(weight, bias, fourier.frequencies(positions), dtype)
    return kernel.position_term(positions, layer, share)


CASES = pytest.mark.parametrize(
    ("sizes", "spacing", "dtype"),
    [
        ((2, 2, 70, 2, 32, 352, False), "linear", FINEST),
        ((2, 2, 70, 2, 32, 352, True), "linear", HALF),
        ((3, 3, 150, 2, 16, 24, True), "geometric", FINEST),
        ((3, 3, 1, 1, 5, 8, False), "geometric", FINEST),
        ((1, 1, 65, 3, 8, 72, False), "linear", FINEST),
        ((1, 3, 33, 3, 5, 136, True), "geometric", HALF),  # positions common to the batch
        ((1, 2, 200, 1, 40, 16, True), "linear", HALF),
        ((1, 1, 130, 2, 1, 64, False), "geometric", HALF),
    ],
)


@CASES
def test_output_and_gradients(sizes, spacing, dtype):
    fourier = FourierFeatures(sizes[3], sizes[4], spacing)
    given = problem(*sizes)
    exact = [tensor.double().requires_grad_() for tensor in given]
    expected = plain(fourier, *exact)
    upstream = torch.randn(expected.shape, dtype=torch.float64).to(DEVICE, dtype)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    mine = [tensor.clone().requires_grad_() for tensor in given]
    found = fused(fourier, dtype, *mine)
    gradients = torch.autograd.grad(found, mine, upstream)
    assert found.dtype == dtype
    assert found.shape == expected.shape
    assert relative(found.detach(), expected.detach()) < BOUND[dtype]
    for gradient, reference, tensor in zip(gradients, wanted, given, strict=True):
        assert gradient.dtype == tensor.dtype
        assert relative(gradient, reference) < BOUND[dtype]


@pytest.mark.parametrize("spacing", ["linear", "geometric"])
@pytest.mark.parametrize("dtype", list(dict.fromkeys((FINEST, HALF))))
def test_waves_are_exact_far_below_rounding(spacing, dtype):
    """Each number of γ by itself, beyond the unit box too, up to the highest frequency."""
    axes, bands, hidden = 2, 32, 136
    fourier = FourierFeatures(axes, bands, spacing)
    positions = (torch.rand(1, 300, axes, device=DEVICE) - 0.5) * 4
    positions[0, :3] = torch.tensor([[0.0, 1.0], [0.5, 0.25], [1.0, 0.0]])
    picks = torch.eye(hidden, fourier.size, device=DEVICE)
    found = fused(fourier, dtype, positions, picks, torch.zeros(hidden, device=DEVICE))
    exact = fourier(positions.double())
    error = (found[..., : fourier.size] - exact).abs()
    # In half precision a wave shows how exact it is where it crosses zero.
    rounded = 0.0 if dtype == torch.float32 else 0.5 * torch.finfo(dtype).eps
    assert (error - rounded * exact.abs()).max() < 2**-14
    assert found[..., fourier.size :].abs().max() == 0


def test_half_precision_loses_what_rounding_the_embedding_loses():
    """No more than the plain path does, whose product has rounded operands as well."""
    fourier = FourierFeatures(2, 32, "linear")
    positions, weight, bias = problem(1, 1, 200, 2, 32, 352, False)
    exact = plain(fourier, positions.double(), weight.double(), bias.double())
    found = fused(fourier, HALF, positions, weight, bias)
    rounded = (each.to(HALF).double() for each in (fourier(positions), weight))
    today = (next(rounded) @ next(rounded).t() + bias.double()).to(HALF)
    assert relative(found, exact) < 1.1 * relative(today, exact)


def test_gradients_where_positions_are_given():
    """Positions that are not learned have none; the others are the same to the last bit."""
    fourier = FourierFeatures(2, 8, "linear")
    given = problem(2, 2, 40, 2, 8, 24, True)
    upstream = torch.randn(2, 40, 24, device=DEVICE).to(HALF)
    results = []
    for learned in (True, False):
        positions, *parameters = (tensor.clone().requires_grad_() for tensor in given)
        positions.requires_grad_(learned)
        out = fused(fourier, HALF, positions, *parameters)
        results.append(torch.autograd.grad(out, parameters, upstream))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("condition", [False, True])
def test_no_positions(condition):
    fourier = FourierFeatures(2, 8, "linear")
    given = [t.requires_grad_() for t in problem(2, 2, 0, 2, 8, 24, condition)]
    out = fused(fourier, HALF, *given)
    assert out.shape == (2, 0, 24)
    gradients = torch.autograd.grad(out, given, torch.zeros_like(out))
    assert all(gradient.abs().sum() == 0 for gradient in gradients)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("learned", [False, True])
def test_operators(shared, learned):
    fourier = FourierFeatures(2, 8, "linear")
    positions, weight, bias, *share = problem(1 if shared else 2, 2, 20, 2, 8, 16, shared)
    positions.requires_grad_(learned)
    layer = kernel.position_layer(weight, bias, fourier.frequencies(positions), FINEST)
    given = positions, layer.layer.requires_grad_(), layer.packed, layer.table
    share = share[0].requires_grad_() if share else None
    torch.library.opcheck(kernel.position_term_forward.definition, (*given, share))
    grad = torch.randn(20, 16, device=DEVICE).to(FINEST)
    flat = positions.detach()[0]
    torch.library.opcheck(
        kernel.position_term_backward.definition, (grad, flat, layer.packed, layer.table, learned)
    )


def test_compiled_it_is_the_same():
    frequencies = FourierFeatures(2, 8, "linear").frequencies(torch.zeros(1, device=DEVICE))

    def call(positions, weight, bias, share):
        layer = kernel.position_layer(weight, bias, frequencies, FINEST)
        return kernel.position_term(positions, layer, share)

    given = [tensor.requires_grad_() for tensor in problem(2, 2, 20, 2, 8, 16, True)]
    upstream = torch.randn(2, 20, 16, device=DEVICE).to(FINEST)
    results = []
    for function in (torch.compile(call, backend="aot_eager", fullgraph=True), call):
        out = function(*given)
        results.append((out.detach(), *torch.autograd.grad(out, given, upstream)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_sizes_it_is_not_made_for():
    frequencies = math.pi * torch.arange(1, 9, device=DEVICE)

    def zeros(*shape):
        return torch.zeros(shape, device=DEVICE)

    with pytest.raises(ValueError, match="weight must have a multiple of 8 rows and 17 columns"):
        kernel.position_layer(zeros(16, 33), zeros(16), frequencies, HALF)
    with pytest.raises(ValueError, match=r"got \(12, 17\)"):
        kernel.position_layer(zeros(12, 17), zeros(12), frequencies, HALF)
    layer = kernel.position_layer(zeros(16, 34), zeros(16), frequencies, HALF)
    with pytest.raises(ValueError, match=r"share must be \(b, 16\)"):
        kernel.position_term(zeros(2, 3, 2), layer, zeros(1, 16))
    assert not kernel.takes(4, 8, 16)
    assert not kernel.takes(2, 65, 16)
    assert kernel.takes(3, 64, 352)


def test_it_is_the_positions_part_of_an_mlps_first_layer():
    """Whose inputs are features, γ(x) and a condition, one after the other."""
    fourier, width, conditions = FourierFeatures(2, 5, "geometric"), 16, 3
    layer = MLP(width + fourier.size + conditions, 32, 16).to(DEVICE)[0]
    positions, condition = torch.rand(2, 9, 2, device=DEVICE), torch.randn(2, 3, device=DEVICE)
    _, weight, given = layer.weight.split((width, fourier.size, conditions), dim=1)
    found = fused(fourier, FINEST, positions, weight, layer.bias, condition @ given.t())
    features = torch.zeros(2, 9, width, device=DEVICE)
    conditioned = condition[:, None].expand(-1, 9, -1)
    plain = layer(torch.cat((features, fourier(positions), conditioned), dim=-1))
    if torch.float32 == FINEST:
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)
    assert relative(found, plain.double()) < BOUND[FINEST]


SIZES = pytest.mark.parametrize(
    ("axes", "bands", "hidden"), [(1, 5, 8), (2, 32, 352), (3, 16, 136), (3, 64, 24), (2, 1, 128)]
)


def made_layer(axes, bands, hidden, dtype=torch.float32):
    """Weight, part of a wider one, bias, and frequencies."""
    columns = axes * (1 + 2 * bands)
    wide = torch.randn(hidden, columns + 5, device=DEVICE).to(dtype)
    bias = torch.randn(hidden, device=DEVICE).to(dtype)
    return wide[:, 3 : 3 + columns], bias, math.pi * torch.rand(bands, device=DEVICE)


def wanted_columns(weight, bias, bands):
    padded = max(kernel.RAW, 1 << (bands - 1).bit_length())
    return position_columns(weight, bias, bands, padded, kernel.RAW)


@SIZES
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_layers_are_packed_to_the_bit(axes, bands, hidden, dtype):
    weight, bias, frequencies = made_layer(axes, bands, hidden)
    layer = wanted_columns(weight, bias, bands)
    slot, packed, table = kernel.position_layer(weight, bias, frequencies, dtype)
    assert slot.shape == layer.shape
    assert torch.equal(packed, pack_position(layer, axes, kernel.RAW, kernel.UNITS, dtype))
    wanted = position_table(frequencies, axes, table.shape[1])
    torch.testing.assert_close(table, wanted, rtol=2.0**-23, atol=0)


@SIZES
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_gradients_of_packed_layers(axes, bands, hidden, dtype):
    """Each number goes to one column, so nothing is lost but by the parameters' rounding."""
    weight, bias, frequencies = made_layer(axes, bands, hidden, dtype)
    exact = [each.float().requires_grad_() for each in (weight, bias)]
    layer = wanted_columns(*exact, bands)
    upstream = torch.randn(2, *layer.shape, device=DEVICE)
    wanted = torch.autograd.grad(layer, exact, upstream.sum(dim=0))
    mine = [each.requires_grad_() for each in (weight.detach(), bias)]
    slot, packed, table = kernel.position_layer(*mine, frequencies, HALF)
    assert not packed.requires_grad
    assert not table.requires_grad
    found = torch.autograd.grad([slot, slot], mine, list(upstream))
    assert all(torch.equal(a, b.to(dtype)) for a, b in zip(found, wanted, strict=True))


def test_gradients_of_packed_layers_only_of_what_is_learned():
    weight, bias, frequencies = made_layer(2, 3, 8)
    for learned in (weight.clone(), bias.clone()):
        given = [learned if learned.shape == each.shape else each for each in (weight, bias)]
        learned.requires_grad_()
        slot, _, _ = kernel.position_layer(*given, frequencies, HALF)
        slot.backward(torch.ones(slot.shape, device=DEVICE))
        assert learned.grad.abs().sum() > 0


def test_the_operators_that_pack():
    weight, bias, frequencies = made_layer(2, 3, 16)
    given = weight.detach().requires_grad_(), bias.requires_grad_(), frequencies, torch.float16
    # Not that all outputs repeat: the number in the slot is any.
    tested = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(kernel.pack_position_forward.definition, given, test_utils=tested)
    grad = torch.randn(16, 2 * 2 * 16 + kernel.RAW, device=DEVICE)
    torch.library.opcheck(kernel.pack_position_backward.definition, (grad, 3, 14))
