"""LayerNorm fused with what follows it, against float64: output and every gradient."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

pytest.importorskip("triton")
from triton import OutOfResources

from fst.kernels import normed_linear, output_mlp
from fst.kernels.tiles import first_that_fits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def plain_output(tokens, gamma, beta, first, bias, second, last):
    return F.linear(F.gelu(plain_linear(tokens, gamma, beta, first, bias)), second, last)


def plain_linear(tokens, gamma, beta, weight, bias):
    return F.linear(F.layer_norm(tokens, tokens.shape[-1:], gamma, beta), weight, bias)


SIZES = pytest.mark.parametrize(
    ("tokens", "width", "outputs", "offset", "dtype", "bound"),
    [
        (70, 40, 80, 0.0, torch.float32, 2e-6),
        (130, 176, 352, 0.0, torch.float32, 2e-6),
        (1, 8, 16, 0.0, torch.float32, 2e-6),
        (50, 16, 24, 5.0, torch.float32, 4e-6),
        (64, 200, 72, 0.0, HALF, 2.0 ** (-7 if torch.bfloat16 == HALF else -10)),
        (100, 176, 384, 1.0, HALF, 2.0 ** (-7 if torch.bfloat16 == HALF else -10)),
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


@SIZES
def test_normed_linear(tokens, width, outputs, offset, dtype, bound):
    x = (torch.randn(2, tokens, width) + offset).to(dtype)
    upstream = torch.randn(2, tokens, outputs).to(dtype)
    check(normed_linear, plain_linear, (x, *parameters(width, outputs)), upstream, bound)


@SIZES
def test_output_mlp(tokens, width, outputs, offset, dtype, bound):
    x = (torch.randn(2, tokens, width) + offset).to(dtype)
    last = torch.randn(1, outputs) / outputs**0.5, torch.randn(1)
    given = (x, *parameters(width, outputs), *last)
    check(output_mlp, plain_output, given, torch.randn(2, tokens, 1), bound)


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
