"""The fused MLPs against float64, forward and every gradient, and the sizes they refuse."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from scipy.special import ndtr
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from kernel_examples import (
    DEVICE,
    FINEST,
    HALF,
    NORMED_SIZES,
    ROUNDING,
    check_against_float64,
    normed_parameters,
    pack,
    pack_normed,
    relative,
)

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
feed_forward = pytest.importorskip("fst.kernels.feed_forward")
weights = pytest.importorskip("fst.kernels.weights")

# Sums of rounded products stay below four roundings.
BOUND = {torch.float32: 3e-6, HALF: 4 * ROUNDING}
in_float32 = pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU these kernels get no float32")


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
    return feed_forward.feed_forward(tokens, feed_forward.normed_layers(*parameters, tokens), 1e-5)


def fused_point(blend, term, *parameters):
    return feed_forward.point_mlp(blend, term, feed_forward.point_layers(*parameters, blend))


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


def plain_point(blend, term, weight, second, b2):
    return F.linear(F.gelu(F.linear(blend, weight) + term), second, b2)


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
    blend, term = made((batch, points, width), (1 if shared else batch, points, hidden))
    _, _, first, _, second, b2 = norm_and_layers(width, hidden)
    inputs = [blend.to(dtype), term.to(dtype), first, second, b2]
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
    tl.store(values + index, feed_forward.gelu(given, exact, asm))
    value, slope = feed_forward.gelu_and_slope(given, exact, asm)
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


def test_sizes_that_are_refused():
    for width, hidden in ((8, 8), (176, 704), (248, 16)):
        assert weights.takes_sizes(width, hidden)
    for width, hidden in ((256, 64), (12, 64), (0, 64), (64, 20), (64, 0)):
        assert not weights.takes_sizes(width, hidden)
    with pytest.raises(ValueError, match="width must be a multiple of 8 up to 248.*got 20 and 40"):
        fused_feed(made((1, 4, 20))[0], *norm_and_layers(20, 40))
    with pytest.raises(ValueError, match="hidden a multiple of 8, got 16 and 12"):
        fused_point(*made((1, 4, 16), (1, 4, 12), (12, 16), (16, 12), (16,)))
    with pytest.raises(ValueError, match=r"second_weight must be \(16, 24\), got \(8, 24\)"):
        fused_point(*made((1, 4, 16), (1, 4, 24), (24, 16), (8, 24), (8,)))


@pytest.mark.parametrize("rows", [None, 3, 6])
def test_the_operators_keep_their_promises(rows):
    """Shapes and strides told to the compiler are those that come; nothing is written or kept."""
    (x,), (second, b2) = made((6, 16), dtype=FINEST), made((16, 24), (16,))
    first = made((24, 16 + (weights.EXTRA if rows is None else 0)))[0]
    term = None if rows is None else made((rows, 24), dtype=FINEST)[0].requires_grad_()
    w1 = pack(first, x.dtype) if rows else pack_normed(first[:, :17], x.dtype)
    packed = w1, pack(second.t(), x.dtype)
    learned = [tensor.requires_grad_() for tensor in (first, second, b2)]
    torch.library.opcheck(
        feed_forward.mlp_forward.definition, (x.requires_grad_(), term, *learned, *packed, 1e-5)
    )
    given = x.detach(), x.detach(), None if term is None else term.detach()
    torch.library.opcheck(feed_forward.mlp_backward.definition, (*given, *packed, 24, 1e-5))


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


@pytest.mark.parametrize(
    ("tokens", "width", "groups"),
    [(49152, 176, 3), (24576, 176, 3), (12288, 176, 2), (49152, 200, 3), (49152, 248, 2)],
)
def test_plans_leave_few_processors_idle_and_fit(tokens, width, groups):
    hopper = pytest.importorskip("fst.kernels.feed_forward_hopper")
    for term in (0, 1, 2):
        plan = hopper.plan(tokens, width, term, 132)
        assert plan.groups == groups
        assert plan.stages >= 2  # a step is fetched while another is multiplied


@pytest.mark.parametrize("width", range(128, 249, 8))
def test_tiles_hold_the_channels_and_what_the_products_want_behind_them(width):
    hopper = pytest.importorskip("fst.kernels.feed_forward_hopper")
    widths = hopper.tiles_of(width)
    assert width + weights.EXTRA <= sum(widths) <= sum(weights.tile_widths(width))


def test_position_terms_are_copied_where_tiles_do_not_wrap():
    hopper = pytest.importorskip("fst.kernels.feed_forward_hopper")
    term = torch.zeros(200, 64, dtype=torch.bfloat16)
    assert hopper.term_way(None, 400) == 0
    assert hopper.term_way(term, 400) == 1
    assert hopper.term_way(term, 200) == 2
    assert hopper.term_way(term[:128], 256) == 2
    assert hopper.term_way(term.flatten()[4:-60].view(-1, 64), 199) == 1  # begins at 8 bytes


def fused_output(tokens, *given):
    *parameters, eps = given
    return feed_forward.output_mlp(tokens, *parameters, eps)


def plain_output(tokens, gamma, beta, first, bias, second, last):
    return F.linear(
        F.gelu(F.linear(F.layer_norm(tokens, tokens.shape[-1:], gamma, beta), first, bias)),
        second,
        last,
    )


@NORMED_SIZES
def test_output_mlp(tokens, width, outputs, offset, dtype, bound):
    x = (torch.randn(2, tokens, width) + offset).to(dtype)
    last = torch.randn(1, outputs) / outputs**0.5, torch.randn(1)
    given = (x, *normed_parameters(width, outputs), *last)
    check_against_float64(fused_output, plain_output, given, torch.randn(2, tokens, 1), bound)


def test_the_kernels_for_hopper_compile(compiled_for_hopper):
    assert len(compiled_for_hopper("feed_forward")) == 5


def steps(number, shared, tokens, term, feed, point):
    """Two MLPs over and over; their layers packed once, or in each step."""

    def packed():
        return feed_forward.normed_layers(*feed, tokens), feed_forward.point_layers(*point, tokens)

    layers = packed()
    for step in range(number):
        first, second = layers if shared or step == 0 else packed()
        tokens = feed_forward.feed_forward(tokens, first, 1e-5)
        tokens = feed_forward.point_mlp(tokens, term, second)
    return tokens.float().square().sum()


def steps_inputs():
    tokens, term = made((2, 5, 16), (1, 5, 32), dtype=HALF)
    _, _, weight, _, second, bias = norm_and_layers(16, 32)
    learned = [*norm_and_layers(16, 64), weight, second, bias]
    learned = [tensor.requires_grad_() for tensor in learned]
    return tokens, term, learned


def test_layers_are_packed_once_for_all_steps():
    """Applied four times, layers are packed as if once, forward and backward."""

    def packings(number, shared):
        graphs = []

        def keep(graph, _):
            graphs.append([str(node.target) for node in graph.graph.nodes])
            return make_boxed_func(graph.forward)

        def run(tokens, term, *learned):
            return steps(number, shared, tokens, term, learned[:6], learned[6:])

        tokens, term, learned = steps_inputs()
        partition = min_cut_rematerialization_partition
        compiled = aot_function(run, keep, keep, partition_fn=partition)
        compiled(tokens, term, *learned).backward()
        for graph in graphs:
            assert sum("fst.feed_forward" in name for name in graph) == 2 * number
        parts = ("fst.pack_", "aten.cat", "aten.mul", "aten.expand")
        return [sum(name.startswith(parts) for name in graph) for graph in graphs]

    assert min(packings(1, shared=True)) > 0
    assert packings(4, shared=True) == packings(1, shared=True)
    assert packings(4, shared=False)[1] > packings(1, shared=False)[1]


def test_layers_packed_once_change_no_gradient():
    tokens, term, learned = steps_inputs()
    found = [
        torch.autograd.grad(steps(3, shared, tokens, term, learned[:6], learned[6:]), learned)
        for shared in (True, False)
    ]
    for shared, apart in zip(*found, strict=True):
        torch.testing.assert_close(shared, apart, rtol=1e-5, atol=1e-5)
