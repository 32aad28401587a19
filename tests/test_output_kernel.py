"""The kernels of the decoder's last MLP against float64, forward and every gradient."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

pytest.importorskip("triton")
from fst.kernels.output_mlp import output_mlp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def plain(tokens, gamma, beta, first, bias, second, last):
    normed = F.layer_norm(tokens, tokens.shape[-1:], gamma, beta)
    return F.linear(F.gelu(F.linear(normed, first, bias)), second, last)


@pytest.mark.parametrize(
    ("tokens", "width", "hidden", "offset", "dtype", "bound"),
    [
        (70, 40, 80, 0.0, torch.float32, 2e-6),
        (130, 176, 352, 0.0, torch.float32, 2e-6),
        (1, 8, 16, 0.0, torch.float32, 2e-6),
        (50, 16, 24, 5.0, torch.float32, 4e-6),
        (64, 200, 72, 0.0, HALF, 2.0 ** (-7 if torch.bfloat16 == HALF else -10)),
        (100, 176, 352, 1.0, HALF, 2.0 ** (-7 if torch.bfloat16 == HALF else -10)),
    ],
)
def test_output_mlp(tokens, width, hidden, offset, dtype, bound):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    x = (normal(2, tokens, width) + offset).to(dtype)
    parameters = [
        1 + 0.1 * normal(width), 0.1 * normal(width), normal(hidden, width) / width**0.5,
        0.1 * normal(hidden), normal(1, hidden) / hidden**0.5, normal(1),
    ]  # fmt: skip
    given = [tensor.to(DEVICE) for tensor in (x, *parameters)]
    upstream = normal(2, tokens, 1).to(DEVICE)
    exact = [tensor.double().requires_grad_() for tensor in given]
    expected = plain(*exact)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    mine = [tensor.clone().requires_grad_() for tensor in given]
    found = output_mlp(*mine, eps=1e-5)
    gradients = torch.autograd.grad(found, mine, upstream)
    assert found.dtype == torch.float32
    assert relative(found.detach(), expected.detach()) < bound
    for gradient, reference, tensor in zip(gradients, wanted, given, strict=True):
        assert gradient.dtype == tensor.dtype
        assert relative(gradient, reference) < bound
