"""Parameters as kernels want them: the packed numbers exactly, the gradients against float64.

Without a GPU the kernels run in Triton's interpreter.
"""

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

pytest.importorskip("triton")
from folding_reference import first_layer, joined, pack, pack_first
from fst.kernels import folding
from fst.kernels.feed_forward_packing import EXTRA, first_extra

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter does not round to bfloat16 but cuts off.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
# How many layers, heads of each, rows of a head, what these are widened to, and channels.
SIZES = pytest.mark.parametrize(
    ("count", "heads", "size", "widened", "width"),
    [
        (3, 8, 22, 24, 176),
        (1, 1, 704, 704, 176),
        (2, 3, 6, 8, 24),
        (1, 2, 5, 16, 40),
        (1, 1, 13, 13, 8),
        (3, 1, 70, 70, 200),
        (1, 1, 1032, 1032, 16),
        (2, 1, 8, 8, 248),
    ],
)


def made(count, heads, size, width, dtype=torch.float32):
    """γ, β, weights and biases."""
    rows = heads * size
    shapes = [(width,), (width,), *[(rows, width)] * count, *[(rows,)] * count]
    return [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]


def fold(parameters, count, heads, widened, dtype, second=None):
    gamma, beta, *rest = parameters
    given = gamma, beta, rest[:count], rest[count:], dtype
    return folding.folded_layer(*given, heads=heads, widened=widened, second=second)


def plain(parameters, count, heads, widened):
    gamma, beta, *rest = parameters
    weight, bias = (joined(each, heads, widened) for each in (rest[:count], rest[count:]))
    return first_layer(gamma, beta, weight, bias)


def coarse(tensor):
    """With so few digits that products and sums are exact in float32, in any order."""
    return (4 * tensor).round() / 4


@SIZES
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_packed_to_the_bit(count, heads, size, widened, width, dtype):
    parameters = [coarse(each) for each in made(count, heads, size, width)]
    second = torch.randn(width, heads * size, device=DEVICE) if count == 1 else None
    second = None if widened != size else second
    slot, packed, packed_second = fold(parameters, count, heads, widened, dtype, second)
    layer = plain(parameters, count, heads, widened)
    assert torch.equal(packed, pack_first(layer, dtype))
    assert slot.shape == (len(layer), width + EXTRA)
    if second is None:
        assert packed_second.numel() == 0
    else:
        assert torch.equal(packed_second, pack(second.t(), dtype))


@SIZES
def test_sums_are_in_float32(count, heads, size, widened, width):
    """Weights to the bit; c and u, which are sums, up to their order."""
    parameters = made(count, heads, size, width)
    _, packed, _ = fold(parameters, count, heads, widened, torch.float16)
    wanted = pack_first(plain(parameters, count, heads, widened), torch.float16)
    assert torch.equal(packed[:, :width], wanted[:, :width])
    behind = first_extra(width)
    for part in (0, 3):
        found, expected = (
            each[:, behind + part].double() + each[:, behind + part + 2].double()
            for each in (packed, wanted)
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients(count, heads, size, widened, width, dtype):
    """Two uses of a layer: what they find is added up first."""
    parameters = made(count, heads, size, width, dtype)
    exact = [each.double().requires_grad_() for each in parameters]
    layer = plain(exact, count, heads, widened)
    upstream = torch.randn(2, len(layer), width + EXTRA, device=DEVICE)
    given = upstream[:, :, : width + 1].double().sum(dim=0)
    wanted = torch.autograd.grad(layer, exact, given)
    mine = [each.requires_grad_() for each in parameters]
    slot, packed, _ = fold(mine, count, heads, widened, torch.float16)
    assert not packed.requires_grad
    bound = 2e-6 if dtype == torch.float32 else 2.0**-11
    runs = [
        torch.autograd.grad([slot, slot], mine, list(upstream), retain_graph=True) for _ in range(2)
    ]
    for found, again, expected in zip(*runs, wanted, strict=True):
        assert found.dtype == dtype
        assert torch.equal(found, again)
        assert (found.double() - expected).norm() <= bound * expected.norm()


def test_gradients_only_of_what_is_learned():
    """A frozen norm, or a frozen layer of several."""
    for frozen in ((0, 1), (2, 4), (3, 5), (0, 1, 2, 3, 4)):
        parameters = made(2, 1, 8, 16)
        learned = [each for i, each in enumerate(parameters) if i not in frozen]
        for each in learned:
            each.requires_grad_()
        slot, _, _ = fold(parameters, 2, 1, 8, torch.float16)
        slot.backward(torch.ones(slot.shape, device=DEVICE))
        assert all(each.grad is not None for each in learned)
        assert all(each.grad is None for i, each in enumerate(parameters) if i in frozen)


def test_nothing_is_differentiated_without_need():
    parameters = [each.requires_grad_() for each in made(1, 1, 8, 16)]
    with torch.no_grad():
        assert not any(each.requires_grad for each in fold(parameters, 1, 1, 8, torch.float16))
    constant = [each.detach() for each in parameters]
    assert not any(each.requires_grad for each in fold(constant, 1, 1, 8, torch.float16))


def test_parameters_anywhere_in_memory():
    """Transposed weights and every other number of a bias."""
    gamma, beta, weight, bias = made(1, 1, 24, 16)
    second = torch.randn(16, 24, device=DEVICE)
    apart = [torch.stack((each, each), dim=-1)[..., 0] for each in (gamma, beta, bias)]
    turned, other = weight.t().contiguous().t(), second.t().contiguous().t()
    gamma, beta, bias = apart
    scattered = fold([gamma, beta, turned, bias], 1, 1, 24, torch.float16, other)
    dense = [each.contiguous() for each in (gamma, beta, weight, bias)]
    compact = fold(dense, 1, 1, 24, torch.float16, second)
    for one, another in zip(scattered[1:], compact[1:], strict=True):
        assert torch.equal(one, another)


@pytest.mark.parametrize(("hidden", "width"), [(704, 176), (24, 40), (352, 8)])
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_layers_without_a_norm(hidden, width, dtype):
    """The first is part of a wider one."""
    wide, second = torch.randn(hidden, width + 7), torch.randn(width, hidden)
    weight = wide.to(DEVICE)[:, :width].requires_grad_()
    first, other = folding.packed_layers(weight, second.to(DEVICE), dtype)
    assert torch.equal(first, pack(weight, dtype))
    assert torch.equal(other, pack(second.t().to(DEVICE), dtype))
    assert not first.requires_grad


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_operators_keep_their_promises(count):
    parameters = [each.requires_grad_() for each in made(count, 2, 6, 16)]
    none = [None] * (3 - count)
    weights, biases = parameters[2 : 2 + count] + none, parameters[2 + count :] + none
    pairs = [each for pair in zip(weights, biases, strict=True) for each in pair]
    second = torch.randn(16, 12, device=DEVICE) if count == 1 else None
    size = 6 if count == 1 else 8
    given = *parameters[:2], *pairs, second, 2, size, torch.float16
    # Not that all outputs repeat: the number in the slot is any.
    tested = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(folding.fold.definition, given, test_utils=tested)
    constant = [None if each is None else each.detach() for each in (*parameters[:2], *weights)]
    grad = torch.randn(count * 2 * size, 16 + EXTRA, device=DEVICE)
    torch.library.opcheck(folding.unfold.definition, (grad, *constant, 2, size))
    if second is not None:
        given = constant[2], second, torch.float16
        torch.library.opcheck(folding.pack_both.definition, given)


def test_more_layers_than_there_is_room_for():
    with pytest.raises(ValueError, match="one to 3, got 4"):
        fold(made(4, 1, 8, 16), 4, 1, 8, torch.float16)


def test_compiled_as_one_operator_forward_and_one_backward():
    graphs = []

    def keep(graph, _):
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        graphs.append([name for name in names if "getitem" not in name])
        return make_boxed_func(graph.forward)

    parameters = [each.requires_grad_() for each in made(3, 2, 6, 16)]

    def run(*parameters):
        return fold(parameters, 3, 2, 8, torch.float16)

    compiled = torch.compile(run, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    results = []
    for way in (run, compiled):
        slot, packed, _ = way(*parameters)
        upstream = torch.linspace(-1, 1, slot.numel(), device=DEVICE).view(slot.shape)
        results.append([packed, *torch.autograd.grad(slot, parameters, upstream)])
    assert graphs == [["fst.folded_layer.default"], ["fst.folded_layer_backward.default"]]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
