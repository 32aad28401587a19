"""Packed parameters to the bit, their gradients against float64, and aᵀ b over many tokens."""

import math
from types import SimpleNamespace

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

pytest.importorskip("triton")
from fst.kernels import weights
from fst.kernels.weights import (
    GROUP,
    GROUPS,
    PROGRAMS,
    TOKENS,
    Product,
    add_shares,
    divide,
    transposed_product,
    weight_gradients,
)
from kernel_examples import (
    DEVICE,
    HALF,
    joined_heads,
    normed_layer,
    on_hopper,
    pack,
    pack_normed,
    relative,
)

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


def packed_layer(parameters, count, heads, widened, dtype, second=None):
    gamma, beta, *rest = parameters
    given = gamma, beta, rest[:count], rest[count:], dtype
    return weights.pack_normed_layers(*given, heads=heads, widened=widened, second=second)


def plain(parameters, count, heads, widened):
    gamma, beta, *rest = parameters
    weight, bias = (joined_heads(each, heads, widened) for each in (rest[:count], rest[count:]))
    return normed_layer(gamma, beta, weight, bias)


def coarse(tensor):
    """With so few digits that products and sums are exact in float32, in any order."""
    return (4 * tensor).round() / 4


@SIZES
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_packed_to_the_bit(count, heads, size, widened, width, dtype):
    parameters = [coarse(each) for each in made(count, heads, size, width)]
    second = torch.randn(width, heads * size, device=DEVICE) if count == 1 else None
    second = None if widened != size else second
    slot, packed, packed_second = packed_layer(parameters, count, heads, widened, dtype, second)
    layer = plain(parameters, count, heads, widened)
    assert torch.equal(packed, pack_normed(layer, dtype))
    assert slot.shape == (len(layer), width + weights.EXTRA)
    if second is None:
        assert packed_second.numel() == 0
    else:
        assert torch.equal(packed_second, pack(second.t(), dtype))


@SIZES
def test_sums_are_in_float32(count, heads, size, widened, width):
    """Weights to the bit; c and u, which are sums, up to their order."""
    parameters = made(count, heads, size, width)
    _, packed, _ = packed_layer(parameters, count, heads, widened, torch.float16)
    wanted = pack_normed(plain(parameters, count, heads, widened), torch.float16)
    assert torch.equal(packed[:, :width], wanted[:, :width])
    behind = weights.first_extra(width)
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
    upstream = torch.randn(2, len(layer), width + weights.EXTRA, device=DEVICE)
    given = upstream[:, :, : width + 1].double().sum(dim=0)
    wanted = torch.autograd.grad(layer, exact, given)
    mine = [each.requires_grad_() for each in parameters]
    slot, packed, _ = packed_layer(mine, count, heads, widened, torch.float16)
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
        slot, _, _ = packed_layer(parameters, 2, 1, 8, torch.float16)
        slot.backward(torch.ones(slot.shape, device=DEVICE))
        assert all(each.grad is not None for each in learned)
        assert all(each.grad is None for i, each in enumerate(parameters) if i in frozen)


def test_nothing_is_differentiated_without_need():
    parameters = [each.requires_grad_() for each in made(1, 1, 8, 16)]
    with torch.no_grad():
        assert not any(
            each.requires_grad for each in packed_layer(parameters, 1, 1, 8, torch.float16)
        )
    constant = [each.detach() for each in parameters]
    assert not any(each.requires_grad for each in packed_layer(constant, 1, 1, 8, torch.float16))


def test_parameters_anywhere_in_memory():
    """Transposed weights and every other number of a bias."""
    gamma, beta, weight, bias = made(1, 1, 24, 16)
    second = torch.randn(16, 24, device=DEVICE)
    apart = [torch.stack((each, each), dim=-1)[..., 0] for each in (gamma, beta, bias)]
    turned, other = weight.t().contiguous().t(), second.t().contiguous().t()
    gamma, beta, bias = apart
    scattered = packed_layer([gamma, beta, turned, bias], 1, 1, 24, torch.float16, other)
    dense = [each.contiguous() for each in (gamma, beta, weight, bias)]
    compact = packed_layer(dense, 1, 1, 24, torch.float16, second)
    for one, another in zip(scattered[1:], compact[1:], strict=True):
        assert torch.equal(one, another)


@pytest.mark.parametrize(("hidden", "width"), [(704, 176), (24, 40), (352, 8)])
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_layers_without_a_norm(hidden, width, dtype):
    """The first is part of a wider one."""
    wide, second = torch.randn(hidden, width + 7), torch.randn(width, hidden)
    weight = wide.to(DEVICE)[:, :width].requires_grad_()
    first, other = weights.pack_layers(weight, second.to(DEVICE), dtype)
    assert torch.equal(first, pack(weight, dtype))
    assert torch.equal(other, pack(second.t().to(DEVICE), dtype))
    assert not first.requires_grad


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_operators_keep_their_promises(count):
    parameters = [each.requires_grad_() for each in made(count, 2, 6, 16)]
    none = [None] * (3 - count)
    matrices, biases = parameters[2 : 2 + count] + none, parameters[2 + count :] + none
    pairs = [each for pair in zip(matrices, biases, strict=True) for each in pair]
    second = torch.randn(16, 12, device=DEVICE) if count == 1 else None
    size = 6 if count == 1 else 8
    given = *parameters[:2], *pairs, second, 2, size, torch.float16
    # Not that all outputs repeat: the number in the slot is any.
    tested = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(weights.pack_normed_forward.definition, given, test_utils=tested)
    constant = [None if each is None else each.detach() for each in (*parameters[:2], *matrices)]
    grad = torch.randn(count * 2 * size, 16 + weights.EXTRA, device=DEVICE)
    torch.library.opcheck(weights.pack_normed_backward.definition, (grad, *constant, 2, size))
    if second is not None:
        given = None, None, constant[2], *[None] * 5, second, 1, 12, torch.float16
        torch.library.opcheck(weights.pack_normed_forward.definition, given, test_utils=tested)


def test_more_layers_than_there_is_room_for():
    with pytest.raises(ValueError, match="one to 3, got 4"):
        packed_layer(made(4, 1, 8, 16), 4, 1, 8, torch.float16)


def test_compiled_as_one_operator_forward_and_one_backward():
    graphs = []

    def keep(graph, _):
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        graphs.append([name for name in names if "getitem" not in name])
        return make_boxed_func(graph.forward)

    parameters = [each.requires_grad_() for each in made(3, 2, 6, 16)]

    def run(*parameters):
        return packed_layer(parameters, 3, 2, 8, torch.float16)

    compiled = torch.compile(run, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    results = []
    for way in (run, compiled):
        slot, packed, _ = way(*parameters)
        upstream = torch.linspace(-1, 1, slot.numel(), device=DEVICE).view(slot.shape)
        results.append([packed, *torch.autograd.grad(slot, parameters, upstream)])
    assert graphs == [
        ["fst.pack_normed_layers.default"],
        ["fst.pack_normed_layers_backward.default"],
    ]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("width", range(8, 256, 8))
def test_tiles_have_room_for_the_columns_behind_the_channels(width):
    first, second = weights.tile_widths(width)
    behind = weights.first_extra(width)
    assert first <= behind
    assert width <= behind <= first + second - 6
    assert {first, second} <= {16, 32, 64, 128}


NARROW = GROUPS * GROUP
channels = st.integers(1, 100).map(lambda n: 8 * n)
tokens = st.integers(1, 200_000)


def pair(count, m, n, dtype=torch.bfloat16):
    # Sums that do not cancel: a share that is lost, or added twice, shows.
    a, b = torch.randn(count, m, device=DEVICE) + 0.5, torch.randn(count, n, device=DEVICE) + 0.5
    return a.to(dtype), b.to(dtype)


def exact(a, b):
    return a.double().t() @ b.double()


def library_bound(a):
    """What the library's error stays below.

    Tensor cores add 16 tokens at once to a sum in float32, and cut off instead of rounding: each
    time, a sum that does not cancel loses up to 2^-23 of itself.
    """
    cuts = a.is_cuda and a.element_size() == 2
    return 2e-6 + (math.ceil(len(a) / 16) * 2.0**-23 if cuts else 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 100, 5000])
def test_products_are_exact_to_float32(count, dtype):
    pairs = [pair(count, 48, 24, dtype), pair(count, 9, 7, dtype)]
    for found, given in zip(weight_gradients(*pairs), pairs, strict=True):
        assert found.dtype == torch.float32
        assert relative(found, exact(*given)) < library_bound(given[0])
    assert torch.equal(transposed_product(*pairs[0]), weight_gradients(*pairs)[0])


@hypothesis.given(st.lists(st.tuples(tokens, channels, channels), min_size=2, max_size=2))
def test_every_program_has_tokens_and_all_run_at_once(given):
    products = [Product(t, max(m, n), min(m, n)) for t, m, n in given]
    division = divide(*products)
    tiles = [product.tiles(division.wide) for product in products]
    for product, shares in zip(products, division.shares, strict=True):
        assert 1 <= shares <= product.blocks()
    programs = sum(n * shares for n, shares in zip(tiles, division.shares, strict=True))
    assert programs <= max(PROGRAMS, sum(tiles))


def test_an_mlps_products_fill_the_gpu():
    division = divide(Product(49_152, 704, 184), Product(49_152, 704, 176))
    assert division == (256, (22, 22))


@pytest.mark.parametrize(
    ("m", "n", "numbers"), [(24, 40, (1, 1)), (8, 8, (3, 20)), (56, 64, (9, 1))]
)
def test_shares_are_added(m, n, numbers):
    shares = [torch.randn(number, m, n, device=DEVICE) for number in numbers]
    for found, summands in zip(add_shares(shares), shares, strict=True):
        torch.testing.assert_close(found.double(), summands.double().sum(0), rtol=0, atol=4e-6)
    again = add_shares(shares)
    assert all(map(torch.equal, again, add_shares(shares)))


class Emulated:
    """Says in PyTorch what the kernel for Hopper says in Gluon."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *given, **constants: self.run(grid[0], *given, **constants)

    def run(
        self, programs, wide0, narrow0, wide1, narrow1, out0, out1,
        blocks0, shares0, w0, n0, blocks1, shares1, w1, n1, start,
        *, num_warps, **constants,
    ):  # fmt: skip
        step = constants["WIDE"]
        self.launches.append(programs)
        first = (wide0, narrow0, out0, blocks0, shares0, w0 * 8, n0 * 8, constants["TURNED0"])
        second = (wide1, narrow1, out1, blocks1, shares1, w1 * 8, n1 * 8, constants["TURNED1"])
        for program in range(programs):
            later = program >= start
            wide, narrow, out, blocks, shares, w, n, turned = second if later else first
            across = -(-w // step)
            share, tile = divmod(program - later * start, across * -(-n // NARROW))
            rows = slice(share * blocks // shares * TOKENS, (share + 1) * blocks // shares * TOKENS)
            columns = slice(tile % across * step, (tile % across + 1) * step)
            others = slice(tile // across * NARROW, (tile // across + 1) * NARROW)
            sums = exact(narrow.base[rows, others], wide.base[rows, columns]).float()
            target = out[share].t() if turned else out[share]
            assert target.shape == (n, w)
            target[others, columns] = sums


@pytest.fixture
def emulated(monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    from fst.kernels import weights_hopper as module

    kernel = Emulated()
    monkeypatch.setattr(module, "weight_gradients_gluon_kernel", kernel)
    on_hopper(monkeypatch)
    monkeypatch.setattr(weights, "ADDED", 4096)  # fewer programs for the interpreter
    return kernel


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("sizes", [[(712, 184), (176, 704)], [(200, 352), (72, 8)]])
def test_what_the_kernel_for_hopper_is_asked_for(emulated, sizes):
    pairs = [pair(4096 + 100 * i, m, n) for i, (m, n) in enumerate(sizes)]
    for found, given in zip(weight_gradients(*pairs), pairs, strict=True):
        assert relative(found, exact(*given)) < 1e-6
    assert len(emulated.launches) == 1
    assert PROGRAMS // 2 < emulated.launches[0] <= PROGRAMS


@pytest.mark.filterwarnings("error")
def test_rows_may_be_parts_of_longer_ones(emulated):
    a, b = pair(5000, 96, 48)
    given = a[:, 8:72], b[:, :40]
    for found in weight_gradients(given, given):
        assert relative(found, exact(*given)) < 1e-6
    assert len(emulated.launches) == 1


@pytest.mark.filterwarnings("error")
def test_what_the_kernel_for_hopper_does_not_take(emulated):
    a, b = pair(4200, 96, 48)
    unsuited = [
        (a[:, 1:65], b), (a, b[:, :44]), (a[:4000], b[:4000]), (a.half(), b),
        (a.float(), b.float()),
        (a.t().contiguous().t(), b),
        (torch.ones(5000, 400, device=DEVICE, dtype=torch.bfloat16),) * 2,
    ]  # fmt: skip
    for given in unsuited:
        assert not weights._suits_hopper(given)
        if given[0].dtype == given[1].dtype:
            both = weight_gradients(given, (a, b))
            assert relative(both[0], exact(*given)) < library_bound(given[0])
            assert relative(both[1], exact(a, b)) < library_bound(a)
    assert not emulated.launches


def test_without_the_kernel_for_hopper_the_library_runs(emulated, monkeypatch):
    from fst.kernels import weights_hopper as module

    def fails(*_):
        raise AttributeError("no such name")

    monkeypatch.setattr(module, "weight_gradients_gluon_kernel", SimpleNamespace(__getitem__=fails))
    given = pair(4200, 96, 48)
    with pytest.warns(UserWarning, match="the weight gradients kernels for Hopper do not work"):
        found = weight_gradients(given, given)[0]
    assert relative(found, exact(*given)) < library_bound(given[0])
    assert torch.equal(weight_gradients(given, given)[0], found)


def test_the_kernel_for_hopper_compiles(compiled_for_hopper):
    assert len(compiled_for_hopper("weights")) == 3
