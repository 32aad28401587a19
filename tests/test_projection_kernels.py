"""LayerNorm fused with what follows it, against float64: output and every gradient."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

pytest.importorskip("triton")
from triton import OutOfResources

from compiling import SHARED, shared_memory, unended_barriers
from fst import kernels
from fst.attention import joint_projection
from fst.kernels import hopper, output
from fst.kernels.tiles import first_that_fits

projection = pytest.importorskip("fst.kernels.projection")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
BOUND = {torch.float32: 2e-6, HALF: 2.0 ** (-7 if torch.bfloat16 == HALF else -10)}
# On a GPU the kernels are given half precision alone (`kernels.takes_tokens`). In the interpreter
# float32 shows what rounding would hide.
FINEST = HALF if DEVICE == "cuda" else torch.float32


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def fused_output(tokens, *given):
    *parameters, eps = given
    return output.output_mlp(tokens, output.output_layers(*parameters, tokens.dtype), eps)


def plain_output(tokens, gamma, beta, first, bias, second, last):
    return F.linear(F.gelu(plain_linear(tokens, gamma, beta, first, bias)), second, last)


def plain_linear(tokens, gamma, beta, weight, bias):
    return F.linear(F.layer_norm(tokens, tokens.shape[-1:], gamma, beta), weight, bias)


SIZES = pytest.mark.parametrize(
    ("tokens", "width", "outputs", "offset", "dtype", "bound"),
    [
        (70, 40, 80, 0.0, FINEST, BOUND[FINEST]),
        (130, 176, 352, 0.0, FINEST, BOUND[FINEST]),
        (1, 8, 16, 0.0, FINEST, BOUND[FINEST]),
        (50, 16, 24, 5.0, FINEST, 2 * BOUND[FINEST]),
        (64, 200, 72, 0.0, HALF, BOUND[HALF]),
        (100, 176, 384, 1.0, HALF, BOUND[HALF]),
    ],
)


def parameters(width, outputs):
    """Of LayerNorm and of the layer behind it."""
    generator = torch.Generator().manual_seed(0)
    gamma, beta, bias = (torch.randn(n, generator=generator) for n in (width, width, outputs))
    weight = torch.randn(outputs, width, generator=generator) / width**0.5
    return [1 + 0.1 * gamma, 0.1 * beta, weight, 0.1 * bias]


def check(fused, plain, given, upstream, bound):
    """Output and gradients of what is given, and their dtypes."""
    given = [tensor.to(DEVICE) for tensor in given]
    upstream = upstream.to(DEVICE)
    exact = [tensor.double().requires_grad_() for tensor in given]
    expected = plain(*exact)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    mine = [tensor.clone().requires_grad_() for tensor in given]
    found = fused(*mine, 1e-5)
    gradients = torch.autograd.grad(found, mine, upstream)
    assert found.dtype == upstream.dtype
    assert relative(found.detach(), expected.detach()) < bound
    for gradient, reference, tensor in zip(gradients, wanted, given, strict=True):
        assert gradient.dtype == tensor.dtype
        assert relative(gradient, reference) < bound


def normed_linear(tokens, *parameters_and_eps):
    gamma, beta, weight, bias, eps = parameters_and_eps
    layers = gamma, beta, [weight], [bias], tokens.dtype, 1, len(weight)
    return projection.normed_linear(tokens, *projection.normed_layer(*layers), eps)


@SIZES
def test_normed_linear(tokens, width, outputs, offset, dtype, bound):
    x = (torch.randn(2, tokens, width) + offset).to(dtype)
    upstream = torch.randn(2, tokens, outputs).to(dtype)
    check(normed_linear, plain_linear, (x, *parameters(width, outputs)), upstream, bound)


class OnGPU(torch.Tensor):
    """Claims to be there."""

    is_cuda = True


def test_what_the_kernels_for_hopper_take(monkeypatch):
    monkeypatch.setattr(hopper, "_given_up", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    x = torch.zeros(4, 176, dtype=torch.bfloat16).as_subclass(OnGPU)
    took, ran = projection._hopper_took, []
    assert took(lambda: ran.append(1), x)
    assert not took(ran.clear, x, torch.zeros(4, 12, dtype=torch.bfloat16))  # rows of 24 bytes
    assert not took(ran.clear, x[:, :64])  # too narrow
    assert not took(ran.clear, x[:0])  # nothing there
    assert not took(ran.clear, x.half())
    shifted = torch.zeros(712, dtype=torch.bfloat16)[1:705].view(4, 176)
    assert not took(ran.clear, x, shifted)  # it begins at two bytes
    assert ran == [1]


def test_the_kernels_for_hopper_compile(tmp_path):
    pytest.importorskip("triton.experimental.gluon")
    needed = shared_memory("projection_compilation.py", tmp_path)
    assert len(needed) == 4
    assert max(needed) <= SHARED
    assert unended_barriers(tmp_path) == []


@SIZES
def test_output_mlp(tokens, width, outputs, offset, dtype, bound):
    x = (torch.randn(2, tokens, width) + offset).to(dtype)
    last = torch.randn(1, outputs) / outputs**0.5, torch.randn(1)
    given = (x, *parameters(width, outputs), *last)
    check(fused_output, plain_output, given, torch.randn(2, tokens, 1), bound)


def test_smaller_tiles_where_the_best_do_not_fit():
    tried = []

    def launch(tiles):
        tried.append(tiles["BLOCK_N"])
        if tiles["BLOCK_N"] > 16:
            raise OutOfResources(300_000, 200_000, "shared memory")
        return "done"

    sizes = [{"BLOCK_N": size} for size in (64, 32, 16)]
    assert first_that_fits(sizes, launch) == "done"
    assert tried == [64, 32, 16]
    with pytest.raises(OutOfResources):
        first_that_fits(sizes[:2], launch)


def test_projections_use_the_kernel(monkeypatch):
    """Where tokens are taken and there is a norm with a bias; and they give the same."""
    monkeypatch.setattr(kernels, "takes_tokens", lambda tokens, hidden: kernels._enabled)
    seen, real = [], projection.normed_linear
    monkeypatch.setattr(projection, "normed_linear", lambda *x: seen.append(1) or real(*x))
    norm = torch.nn.LayerNorm(16).to(DEVICE, HALF)
    tokens = torch.randn(2, 5, 16, device=DEVICE, dtype=HALF)
    layers = [torch.nn.Linear(16, 12).to(DEVICE, HALF) for _ in range(2)]
    found = joint_projection(tokens, norm, layers, 2, 8)(tokens)
    assert len(seen) == 1
    with kernels.reference():
        plain = joint_projection(tokens, norm, layers, 2, 8)(tokens)
    assert found.shape == plain.shape == (2, 5, 32)
    assert relative(found, plain.double()) < 2.0**-7
    joint_projection(tokens, None, layers, 2, 8)(tokens)
    without = torch.nn.LayerNorm(16, bias=False).to(DEVICE, HALF)
    joint_projection(tokens, without, layers, 2, 8)(tokens)
    assert len(seen) == 1
