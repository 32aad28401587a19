"""What tests of kernels share: devices, dtypes, errors, and references in plain PyTorch.

Without a GPU the kernels run in Triton's interpreter, which has no bfloat16 products: float16
stands in for half precision there.
"""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from fst.rbf import rbf_weights

pytest.importorskip("triton")
from fst.kernels.weights import first_extra, padded_hidden, tile_widths

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
# Of one rounding in half precision.
ROUNDING = 2.0 ** (-9 if torch.bfloat16 == HALF else -12)
# On a GPU most kernels are given half precision alone. In the interpreter float32 shows what
# rounding would hide.
FINEST = HALF if DEVICE == "cuda" else torch.float32


class OnGPU(torch.Tensor):
    """Claims to be there."""

    is_cuda = True


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def exact_blend(points, anchors, length_scales, features):
    """Equation 1 in float64."""
    points, anchors, length_scales, features = (
        tensor.double() for tensor in (points, anchors, length_scales, features)
    )
    return rbf_weights(points, anchors, length_scales) @ features


def on_hopper(monkeypatch, given_up=()):
    """Every tensor counts as one on a Hopper GPU, where only these families were given up."""
    from fst.kernels import launch

    monkeypatch.setattr(launch, "_given_up", set(given_up))
    monkeypatch.setattr(launch, "_on_hopper", lambda _: True)


def joined_heads(tensors, heads, widened):
    """Weights or biases one after another, zeros behind the rows of each head."""
    split = torch.stack(list(tensors)).unflatten(1, (heads, -1))
    padding = (0, 0) * (split.ndim - 3) + (0, widened - split.shape[2])
    return F.pad(split, padding).flatten(0, 2)


def normed_layer(gamma, beta, weight, bias):
    """[W γ, b + W β]."""
    constant = bias + (weight * beta).sum(dim=1)
    return torch.cat((weight * gamma, constant.unsqueeze(1)), dim=1)


def padded(columns, width):
    across, down = sum(tile_widths(width)) - columns.shape[1], padded_hidden(len(columns))
    return F.pad(columns, (0, across, 0, down - len(columns))).contiguous()


def two_parts(values, dtype):
    high = values.to(dtype)
    return high, (values - high.float()).to(dtype)


def pack(weight, dtype):
    return padded(weight.detach().to(dtype), weight.shape[1])


def pack_normed(layer, dtype):
    """[W γ, c] with c and -u = -Σ_d w, in two parts each, behind the channels."""
    layer = layer.detach()
    weight = layer[:, :-1].to(dtype)
    width = weight.shape[1]
    c, c_rest = two_parts(layer[:, -1], dtype)
    u, u_rest = two_parts(-weight.float().sum(dim=1), dtype)
    behind = torch.stack((c, c, c_rest, u, u, u_rest), dim=1)
    gap = F.pad(weight, (0, first_extra(width) - width))
    return padded(torch.cat((gap, behind), dim=1), width)


def position_columns(weight, bias, bands, padded_bands, raw):
    """The layer on γ as the kernels divide it: for each axis its waves, then all that is left."""
    axes = weight.shape[1] // (1 + 2 * bands)
    coordinates, waves = weight[:, :axes], weight[:, axes:].unflatten(1, (2, axes, bands))
    waves = F.pad(waves, (0, padded_bands - bands)).transpose(1, 2).flatten(1)
    constant = F.pad(bias.unsqueeze(1), (axes, raw - 2 * axes - 1))
    return torch.cat((waves, coordinates, constant), dim=1)


def pack_position(layer, axes, raw, units, dtype):
    """Coordinates stand there twice, the bias in two parts."""
    behind = layer.shape[1] - raw
    waves, coordinates = layer[:, :behind], layer[:, behind : behind + axes]
    bias = layer[:, behind + 2 * axes, None]
    rest = bias - bias.to(dtype).float()
    columns = torch.cat((waves, coordinates, coordinates, bias, rest), dim=1)
    across, down = layer.shape[1] - columns.shape[1], -len(layer) % units
    return F.pad(columns, (0, across, 0, down)).to(dtype)


def position_table(frequencies, axes, columns):
    """A row of turns; one for each column of the coordinates' tile; a row of ones."""
    turns = F.pad(frequencies / (2 * math.pi), (0, columns - len(frequencies)))
    chosen = torch.eye(2 * axes, columns, device=turns.device)
    ones = F.pad(torch.ones(2, device=turns.device), (2 * axes, columns - 2 * axes - 2))
    return torch.cat((turns[None], chosen, ones[None]))


_BOUND = {torch.float32: 2e-6, HALF: 2.0 ** (-7 if torch.bfloat16 == HALF else -10)}
# For a layer behind a LayerNorm; a common offset of all channels is nothing in the norm.
NORMED_SIZES = pytest.mark.parametrize(
    ("tokens", "width", "outputs", "offset", "dtype", "bound"),
    [
        (70, 40, 80, 0.0, FINEST, _BOUND[FINEST]),
        (130, 176, 352, 0.0, FINEST, _BOUND[FINEST]),
        (1, 8, 16, 0.0, FINEST, _BOUND[FINEST]),
        (50, 16, 24, 5.0, FINEST, 2 * _BOUND[FINEST]),
        (64, 200, 72, 0.0, HALF, _BOUND[HALF]),
        (100, 176, 384, 1.0, HALF, _BOUND[HALF]),
    ],
)


def normed_parameters(width, outputs):
    """Of LayerNorm and of the layer behind it."""
    generator = torch.Generator().manual_seed(0)
    gamma, beta, bias = (torch.randn(n, generator=generator) for n in (width, width, outputs))
    weight = torch.randn(outputs, width, generator=generator) / width**0.5
    return [1 + 0.1 * gamma, 0.1 * beta, weight, 0.1 * bias]


def check_against_float64(fused, plain, given, upstream, bound):
    """Output and gradients of what is given, and their dtypes; `fused` also takes an epsilon."""
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
