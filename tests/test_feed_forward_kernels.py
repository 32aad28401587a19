"""The fused MLPs against float64, forward and every gradient; they take what they can and no more.

Without a GPU the kernels run in Triton's interpreter, where float16 stands in for half precision.
The kernels for Hopper have no interpreter: there they are only compiled.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from scipy.special import ndtr
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import aot_module, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from folding_reference import pack, pack_first
from fst import kernels
from fst.kernels import feed_forward_packing as packing
from fst.nn import (
    FeedForward,
    FourierFeatures,
    PointMLP,
    ResidualFeedForward,
    fusible,
    residual_feed,
)
from fst.prepared import Prepared

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
mlp = pytest.importorskip("fst.kernels.mlp")
gelus = pytest.importorskip("fst.kernels.feed_forward_kernels")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
# Of one rounding; sums of rounded products stay below four.
ROUNDING = 2.0 ** (-9 if torch.bfloat16 == HALF else -12)
BOUND = {torch.float32: 3e-6, HALF: 4 * ROUNDING}
# On a GPU the kernels are given half precision alone (`kernels.takes_tokens`). In the interpreter
# float32 shows what rounding would hide.
FINEST = HALF if DEVICE == "cuda" else torch.float32
in_float32 = pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU these kernels get no float32")


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def errors(fused, plain, inputs):
    """Relative errors of the output and of the gradient of every input, and the output."""
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    expected = plain(*exact)
    upstream = torch.randn(expected.shape, dtype=torch.float64).to(DEVICE, inputs[0].dtype)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    mine = [tensor.clone().requires_grad_() for tensor in inputs]
    found = fused(*mine)
    gradients = torch.autograd.grad(found, mine, upstream)
    assert [g.dtype for g in gradients] == [tensor.dtype for tensor in inputs]
    pairs = [(found, expected), *zip(gradients, wanted, strict=True)]
    return [relative(a.detach(), b.detach()) for a, b in pairs], found


def made(*shapes, dtype=torch.float32):
    return [torch.randn(*shape).to(DEVICE, dtype) for shape in shapes]  # the same on a GPU


def norm_and_layers(width, hidden):
    """Weight and bias of the norm, of the first and of the second layer."""
    gamma, beta, first, b1, second, b2 = made(
        (width,), (width,), (hidden, width), (hidden,), (width, hidden), (width,)
    )
    layers = first / width**0.5, 0.1 * b1, second / hidden**0.5, 0.1 * b2
    return 1 + 0.1 * gamma, 0.1 * beta, *layers


def plain_feed(tokens, gamma, beta, first, b1, second, b2):
    normed = F.layer_norm(tokens, tokens.shape[-1:], gamma, beta)
    return tokens + F.linear(F.gelu(F.linear(normed, first, b1)), second, b2)


def fused_feed(tokens, *parameters):
    return mlp.feed_forward(tokens, mlp.normed_layers(*parameters, tokens), 1e-5)


def fused_point(blend, place, *parameters):
    return mlp.point_mlp(blend, place, mlp.point_layers(*parameters, blend))


@pytest.mark.parametrize(
    ("batch", "points", "width", "hidden", "dtype", "offset"),
    [
        (1, 1, 8, 8, FINEST, 0),
        (3, 23, 8, 72, FINEST, 0),
        (2, 65, 40, 160, FINEST, 3),
        (1, 131, 176, 704, FINEST, 0),
        pytest.param(1, 40, 176, 128, torch.float32, 100, marks=in_float32),
        (1, 33, 200, 104, FINEST, 0),
        (2, 20, 248, 64, FINEST, 0),
        (3, 23, 8, 72, HALF, 0),
        (1, 131, 176, 704, HALF, 5),
        (1, 70, 200, 800, HALF, 0),
    ],
)
def test_the_residual_feed_forward(batch, points, width, hidden, dtype, offset):
    """A common offset of all channels is large in the product and nothing in the norm."""
    tokens = (made((batch, points, width))[0] + offset).to(dtype)
    found, output = errors(fused_feed, plain_feed, [tokens, *norm_and_layers(width, hidden)])
    assert output.dtype == dtype
    # The offset's own digits are lost before the norm can take it away.
    assert max(found) < BOUND[dtype] * (1 + offset)


def plain_point(blend, place, weight, second, b2):
    return F.linear(F.gelu(F.linear(blend, weight) + place), second, b2)


@pytest.mark.parametrize(
    ("batch", "points", "width", "hidden", "dtype"),
    [
        (2, 35, 40, 80, FINEST),
        (3, 47, 176, 352, FINEST),
        (1, 130, 200, 400, FINEST),
        (2, 20, 8, 16, FINEST),
        (2, 65, 176, 352, HALF),
        (2, 20, 200, 72, HALF),
    ],
)
@pytest.mark.parametrize("shared", [False, True])
def test_the_point_mlp(batch, points, width, hidden, dtype, shared):
    blend, place = made((batch, points, width), (1 if shared else batch, points, hidden))
    _, _, first, _, second, b2 = norm_and_layers(width, hidden)
    inputs = [blend.to(dtype), place.to(dtype), first, second, b2]
    found, output = errors(fused_point, plain_point, inputs)
    assert output.dtype == dtype
    assert max(found) < BOUND[dtype]


def test_tokens_that_lie_scattered_in_memory():
    layers = norm_and_layers(16, 24)
    tokens = made((5, 7, 32), dtype=FINEST)[0][::2, 1:, 4:20]
    torch.testing.assert_close(fused_feed(tokens, *layers), fused_feed(tokens.clone(), *layers))


def test_gradients_repeat_to_the_last_bit():
    inputs = [*made((2, 150, 24), dtype=FINEST), *norm_and_layers(24, 40)]
    runs = []
    for _ in range(2):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        runs.append(torch.autograd.grad(fused_feed(*leaves).square().sum(), leaves))
    for first, second in zip(*runs):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


@triton.jit
def gelu_kernel(
    x, values, again, slopes, exact: tl.constexpr, asm: tl.constexpr, size: tl.constexpr
):
    index = tl.program_id(0) * size + tl.arange(0, size)
    given = tl.load(x + index)
    tl.store(values + index, gelus.gelu(given, exact, asm))
    value, slope = gelus.gelu_and_slope(given, exact, asm)
    tl.store(again + index, value)
    tl.store(slopes + index, slope)


@pytest.mark.parametrize(
    ("exact", "bound"), [pytest.param(True, 4e-7, marks=in_float32), (False, 2e-6)]
)
def test_gelu_and_its_slope(exact, bound):
    """Far below the rounding of half precision, from the smallest numbers to the largest."""
    size = np.geomspace(1e-30, 1e4, 6000)
    grid = np.concatenate((np.linspace(-12, 12, 20768), size, -size)).astype(np.float32)
    x = torch.from_numpy(grid).to(DEVICE)
    values, again, slopes = (torch.empty_like(x) for _ in range(3))
    gelu_kernel[(len(x) // 2048,)](x, values, again, slopes, exact=exact, asm=x.is_cuda, size=2048)
    d = grid.astype(np.float64)
    gelu = d * ndtr(d)
    slope = ndtr(d) + d * np.exp(-0.5 * d * d) / np.sqrt(2 * np.pi)
    assert torch.equal(values, again)
    error = np.abs(values.double().cpu().numpy() - gelu)
    assert (error / np.maximum(1, np.abs(d))).max() < bound
    # Relative to the number itself where GELU is nearly linear: a half, not a rounded nothing.
    near = np.abs(d) < 0.01
    assert (error[near] / np.abs(gelu[near]).clip(1e-38)).max() < 4 * bound
    assert np.abs(slopes.double().cpu().numpy() - slope).max() < bound


@pytest.mark.parametrize("width", range(8, 256, 8))
def test_tiles_have_room_for_the_columns_behind_the_channels(width):
    first, second = packing.tile_widths(width)
    behind = packing.first_extra(width)
    assert first <= behind
    assert width <= behind <= first + second - 6
    assert {first, second} <= {16, 32, 64, 128}


def test_sizes_that_are_refused():
    for width, hidden in ((8, 8), (176, 704), (248, 16)):
        assert packing.takes_sizes(width, hidden)
    for width, hidden in ((256, 64), (12, 64), (0, 64), (64, 20), (64, 0)):
        assert not packing.takes_sizes(width, hidden)
    with pytest.raises(ValueError, match="width must be a multiple of 8 up to 248.*got 20 and 40"):
        fused_feed(made((1, 4, 20))[0], *norm_and_layers(20, 40))
    with pytest.raises(ValueError, match="hidden a multiple of 8, got 16 and 12"):
        fused_point(*made((1, 4, 16), (1, 4, 12), (12, 16), (16, 12), (16,)))
    with pytest.raises(ValueError, match=r"second_weight must be \(16, 24\), got \(8, 24\)"):
        fused_point(*made((1, 4, 16), (1, 4, 24), (24, 16), (8, 24), (8,)))


class OnGPU(torch.Tensor):
    """Claims to be there."""

    is_cuda = True


def test_tokens_that_are_taken():
    def taken(dtype, shape=(2, 3, 16), hidden=64, kind=OnGPU):
        return kernels.takes_tokens(torch.zeros(shape, dtype=dtype).as_subclass(kind), hidden)

    assert taken(torch.bfloat16)
    assert taken(torch.float16)
    assert not taken(torch.bfloat16, kind=torch.Tensor)
    assert not taken(torch.float32)
    assert not taken(torch.bfloat16, shape=(2, 3, 20))
    assert not taken(torch.bfloat16, shape=(2, 0, 16))
    assert not taken(torch.bfloat16, hidden=12)
    assert not taken(torch.bfloat16, hidden=2**29)
    with torch.autocast("cpu", torch.bfloat16):
        assert taken(torch.float32)
        assert not taken(torch.float64)
    with kernels.reference():
        assert not taken(torch.bfloat16)


@pytest.fixture
def always(monkeypatch):
    """The kernels run wherever their sizes allow."""
    monkeypatch.setattr(
        kernels, "takes_tokens", lambda tokens, hidden: kernels._enabled and tokens.shape[-1] < 256
    )


def calls(monkeypatch, name):
    """How often a kernel's function was called."""
    seen, real = [], getattr(mlp, name)
    monkeypatch.setattr(mlp, name, lambda *given: seen.append(name) or real(*given))
    return seen


def test_the_modules_use_the_kernels(always, monkeypatch):
    feed = calls(monkeypatch, "feed_forward")
    module = ResidualFeedForward(16).to(DEVICE, HALF)
    tokens = made((2, 9, 16), dtype=HALF)[0]
    fused = module(tokens)
    assert feed == ["feed_forward"]
    with kernels.reference():
        plain = module(tokens)
    assert len(feed) == 1
    assert fused.dtype == plain.dtype
    assert relative(fused, plain.double()) < 4 * ROUNDING
    # A float32 sum is not rounded.
    residual_feed(tokens.float(), module.float().norm, module.feed_forward)
    assert len(feed) == 1

    point = calls(monkeypatch, "point_mlp")
    network = PointMLP(16, 6, 3, 32, 16).to(DEVICE, FINEST)
    fourier = FourierFeatures(2, 1, "linear")
    blend, positions, condition = made((2, 9, 16), (1, 9, 2), (2, 3), dtype=FINEST)
    place = network.place(fourier, positions, condition)
    fused = network(blend, place)
    assert point == ["point_mlp"]
    bound = 2e-6 if torch.float32 == FINEST else BOUND[HALF]
    with kernels.reference():
        torch.testing.assert_close(fused, network(blend, place), rtol=bound, atol=bound)
    assert len(point) == 1


def test_under_autocast_outputs_have_the_dtype_of_the_plain_path(always):
    network = PointMLP(16, 6, 0, 32, 16).to(DEVICE)
    module = ResidualFeedForward(16).to(DEVICE)
    blend, positions = made((2, 9, 16), (1, 9, 2))
    with torch.autocast(DEVICE, HALF):
        place = network.place(FourierFeatures(2, 1, "linear"), positions, None)
        for tokens in (blend, blend.to(HALF)):
            evaluated = network(tokens, place)
            fed = module(tokens)
            with kernels.reference():
                assert network(tokens, place).dtype == evaluated.dtype == HALF
                assert module(tokens).dtype == fed.dtype == tokens.dtype


@pytest.mark.parametrize("rows", [None, 3, 6])
def test_the_operators_keep_their_promises(rows):
    """Shapes and strides told to the compiler are those that come; nothing is written or kept."""
    (x,), (second, b2) = made((6, 16), dtype=FINEST), made((16, 24), (16,))
    first = made((24, 16 + (packing.EXTRA if rows is None else 0)))[0]
    place = None if rows is None else made((rows, 24), dtype=FINEST)[0].requires_grad_()
    w1 = pack(first, x.dtype) if rows else pack_first(first[:, :17], x.dtype)
    packed = w1, pack(second.t(), x.dtype)
    learned = [tensor.requires_grad_() for tensor in (first, second, b2)]
    torch.library.opcheck(
        mlp.mlp_forward.definition, (x.requires_grad_(), place, *learned, *packed, 1e-5)
    )
    given = x.detach(), x.detach(), None if place is None else place.detach()
    torch.library.opcheck(mlp.mlp_backward.definition, (*given, *packed, 24, 1e-5))


class Steps(torch.nn.Module):
    """Two layers, applied over and over."""

    def __init__(self, number, shared):
        super().__init__()
        self.number, self.shared = number, shared
        self.feed, self.point = ResidualFeedForward(16), PointMLP(16, 6, 0, 32, 16)

    def forward(self, tokens, place):
        prepared = Prepared() if self.shared else None
        for _ in range(self.number):
            tokens = residual_feed(tokens, self.feed.norm, self.feed.feed_forward, prepared)
            tokens = self.point(tokens, place, prepared)
        return tokens.float().sum()


def test_layers_are_prepared_once_for_all_steps(always):
    """Applied four times, layers go through their preparation as if once, forward and backward."""
    given = made((2, 5, 16), (1, 5, 32), dtype=HALF)

    def prepared(number, shared):
        graphs = []

        def keep(graph, _):
            graphs.append([str(node.target) for node in graph.graph.nodes])
            return make_boxed_func(graph.forward)

        partition = min_cut_rematerialization_partition
        steps = aot_module(Steps(number, shared).to(DEVICE), keep, keep, partition_fn=partition)
        steps(*given).backward()
        for graph in graphs:
            assert sum("fst.feed_forward" in name for name in graph) == 2 * number
        parts = ("fst.folded_layer", "fst.packed_layers", "aten.cat", "aten.mul", "aten.expand")
        return [sum(name.startswith(parts) for name in graph) for graph in graphs]

    assert min(prepared(1, shared=True)) > 0
    assert prepared(4, shared=True) == prepared(1, shared=True)
    assert prepared(4, shared=False)[1] > prepared(1, shared=False)[1]


def test_the_compiler_sees_through_the_preparation():
    layer = torch.nn.Linear(3, 3)

    @torch.compile(fullgraph=True, backend="eager")
    def run(x):
        prepared = Prepared()
        for _ in range(3):
            x = x @ prepared.once((layer,), lambda: layer.weight.exp())
        return x

    x = torch.randn(2, 3)
    torch.testing.assert_close(run(x), x @ torch.linalg.matrix_power(layer.weight.exp(), 3))


def test_shared_preparations_change_no_gradient(always):
    module = ResidualFeedForward(16).to(DEVICE)
    tokens = made((2, 5, 16), dtype=HALF)[0]
    found = []
    for prepared in (Prepared(), None):
        out = tokens
        for _ in range(3):
            out = residual_feed(out, module.norm, module.feed_forward, prepared)
        found.append(torch.autograd.grad(out.float().square().sum(), list(module.parameters())))
    for shared, apart in zip(*found, strict=True):
        torch.testing.assert_close(shared, apart, rtol=1e-5, atol=1e-5)


def test_other_numbers_of_tokens_compile_nothing_anew():
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    width, hidden = 16, 24
    layers = [layer.requires_grad_() for layer in norm_and_layers(width, hidden)]
    backend = aot_autograd(fw_compiler=count, bw_compiler=count)
    compiled = torch.compile(fused_feed, backend=backend, dynamic=True)
    for tokens in (5, 70, 131, 260):
        given = made((2, tokens, width), dtype=FINEST)[0].requires_grad_()
        compiled(given, *layers).sum().backward()
    assert len(graphs) == 2  # one forward, one backward


def test_replaced_layers_go_the_plain_way(monkeypatch):
    monkeypatch.setattr(kernels, "takes_tokens", lambda tokens, hidden: True)
    tokens, norm, feed = torch.zeros(1, 2, 8).half(), torch.nn.LayerNorm(8), FeedForward(8)
    assert fusible(tokens, norm, feed) is not None
    assert fusible(tokens.float(), norm, feed) is None
    assert fusible(tokens, torch.nn.LayerNorm(8, bias=False), feed) is None
    feed[0] = torch.nn.Sequential(feed[0])
    assert fusible(tokens, norm, feed) is None
