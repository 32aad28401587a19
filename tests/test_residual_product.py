"""A product and the residual it is added to: against float64, and which kernel runs where."""

import pytest
import torch

pytest.importorskip("triton")

from fst.kernels import hopper, residual
from fst.kernels.operators import FUNCTIONS
from fst.kernels.residual import residual_product

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# What the kernel is run in, and how exact it is then. The interpreter has no bfloat16, and shows in
# float32 what rounding would hide; a GPU has no room for such a weight, and the kernel gets none.
PRECISIONS = (
    [(torch.bfloat16, 2.0**-7)]
    if DEVICE == "cuda"
    else [(torch.float32, 1e-6), (torch.float16, 2.0**-10)]
)


def problem(batch, count, channels, width, dtype):
    """Residual, tokens and a weight in float32, then the gradient that comes back."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE)

    tokens, weight = draw(batch, count, channels), draw(width, channels) / channels**0.5
    added, upstream = draw(batch, count, width), draw(batch, count, width)
    return added.to(dtype), tokens.to(dtype), weight, upstream.to(dtype)


def relative(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


def check(product, batch, count, channels, width, dtype, bound):
    """The sum, and the gradients of all three."""
    *given, upstream = problem(batch, count, channels, width, dtype)
    exact = [each.double().requires_grad_() for each in given]
    expected = exact[0] + exact[1] @ exact[2].t()
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    mine = [each.clone().requires_grad_() for each in given]
    found = product(*mine)
    gradients = torch.autograd.grad(found, mine, upstream)
    assert found.dtype == dtype
    assert relative(found.detach(), expected.detach()) < bound
    for gradient, reference, tensor in zip(gradients, wanted, given, strict=True):
        assert gradient.dtype == tensor.dtype
        assert relative(gradient, reference) < bound


SIZES = pytest.mark.parametrize(
    ("batch", "count", "channels", "width", "dtype", "bound"),
    [
        (2, 35, 24, 20, torch.float32, 1e-6),
        (1, 1, 192, 176, torch.float32, 1e-6),
        (2, 70, 192, 176, torch.bfloat16, 2.0**-7),
        (1, 65, 40, 136, torch.bfloat16, 2.0**-7),
        (1, 130, 256, 176, torch.bfloat16, 2.0**-7),
        (1, 64, 192, 176, torch.float16, 2.0**-10),
    ],
)


@SIZES
def test_the_sum_and_its_gradients(batch, count, channels, width, dtype, bound):
    check(residual_product, batch, count, channels, width, dtype, bound)


def test_compiled_its_backward_is_two_products_and_nothing_is_copied():
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def keep(module, _):
        graphs.append(module)
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(residual_product, backend=backend, fullgraph=True)
    check(compiled, 2, 35, 24, 20, torch.float32, 1e-6)
    called = [node.target for node in graphs[1].graph.nodes if node.op == "call_function"]
    names = [target.name().split(":")[-1] for target in called]
    assert [name for name in names if name not in ("view", "t", "permute")] == ["mm", "mm"]


@pytest.mark.parametrize(
    ("count", "channels", "width"),
    [(1, 192, 176), (70, 192, 176), (333, 192, 192), (200, 128, 136), (64, 24, 16), (65, 8, 40)],
)
@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
def test_the_kernel_at_any_size(count, channels, width, dtype, bound):
    added, tokens, weight, _ = (
        each[0] if each.ndim == 3 else each for each in problem(1, count, channels, width, dtype)
    )
    out = torch.full_like(added, torch.nan)
    residual.fill(out, added, tokens, weight.to(dtype), programs=3)
    exact = added.double() + tokens.double() @ weight.to(dtype).double().t()
    assert relative(out, exact) < bound
    row = (out.double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert row.max() < 2 * bound


class OnGPU(torch.Tensor):
    """Claims to be there."""

    is_cuda = True


@pytest.fixture
def launched(monkeypatch):
    """What the kernel was given, on a machine that seems to have a Hopper GPU."""
    given = []
    monkeypatch.setattr(hopper, "_given_up", set())
    monkeypatch.setattr(hopper, "_on_hopper", lambda tensor: tensor.is_cuda)
    monkeypatch.setattr(residual, "processors", lambda device: 132)
    monkeypatch.setattr(residual, "fill", lambda *tensors: given.append(tensors))
    return given


def run(*given):
    """What the operator runs, on tensors that claim to be on a GPU."""
    return FUNCTIONS["fst::residual_product"](*(each.as_subclass(OnGPU) for each in given))


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


def test_what_the_kernel_takes(launched):
    r, x, w = zeros(5, 176), zeros(5, 192), zeros(176, 192)
    out = run(r, x, w)
    assert out.shape == (5, 176)
    ((*given, programs),) = launched
    assert [each.data_ptr() for each in given] == [each.data_ptr() for each in (out, r, x, w)]
    assert programs == 132
    run(r.float(), x.float(), w.float())
    run(r[:0], x[:0], w)  # nothing there
    run(zeros(5, 172), x, zeros(172, 192))  # rows of 344 bytes
    run(r, zeros(5, 384)[:, ::2], w)  # not dense
    run(zeros(888)[1:881].view(5, 176), x, w)  # it begins at two bytes
    run(zeros(5, 200), zeros(5, 256), zeros(200, 256))  # no room beside the weight
    assert len(launched) == 1


def test_where_the_kernel_fails_the_library_runs(launched, monkeypatch):
    def fail(*given):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(residual, "fill", fail)
    r, x, w = (torch.randn(shape).bfloat16() for shape in ((5, 176), (5, 192), (176, 192)))
    with pytest.warns(UserWarning, match="residual product"):
        found = run(r, x, w)
    torch.testing.assert_close(found.as_subclass(torch.Tensor), torch.addmm(r, x, w.t()))
