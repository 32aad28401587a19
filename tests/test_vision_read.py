"""The read attention with the distance bias, against the bias added in full."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fst.kernels.modules import (
    PackedWeights,
    attend_normed,
    key_channels,
    patch_keys_values,
    query_channels,
    two_parts,
)
from fst.layer import Context, Read
from fst.nn import Attention
from fst.types import Anchors
from fst.vision import DistanceAttention, DistanceBias, DistanceRead, PatchGrid

GRIDS = [(14, 14), (8, 8), (16, 16), (3, 7)]
SIGMAS = [0.03, 0.20, 0.60]
ANCHORS = 40


def attention_with(
    grid: tuple[int, int], sigma: float, width: int = 200, heads: int = 8
) -> DistanceAttention:
    attention = DistanceAttention(width, heads, PatchGrid(*grid)).double()
    with torch.no_grad():
        attention.bias.log_sigma.fill_(math.log(sigma))
        for projection in (attention.query, attention.key):  # logits of a trained size
            projection.weight.mul_(2)
    return attention


def inputs_of(attention: DistanceAttention) -> tuple[Tensor, Tensor, Tensor]:
    width, patches = attention.query.in_features, attention.bias.grid.count
    positions = torch.rand(2, ANCHORS, 2, dtype=torch.float64)
    positions[:, 0], positions[:, 1] = 0, 1  # corners, where the bias is largest
    tokens = torch.randn(2, ANCHORS, width, dtype=torch.float64)
    return tokens, torch.randn(2, patches, width, dtype=torch.float64), positions


def bias_in_full(attention: DistanceAttention, positions: Tensor) -> Tensor:
    """The paper's equation, (b 1 m n)."""
    grid, sigma = attention.bias.grid, attention.bias.sigma()
    distance = (positions[:, :, None] - grid.centres(positions)).square().sum(dim=-1)
    size = 1 / grid.rows**2 + 1 / grid.columns**2
    return (-(distance + size / 12) / (2 * sigma**2)).unsqueeze(1)


def heads_of(attention: DistanceAttention, tokens: Tensor, patches: Tensor) -> list[Tensor]:
    projected = (attention.query(tokens), attention.key(patches), attention.value(patches))
    return [x.unflatten(-1, (attention.heads, -1)).transpose(1, 2) for x in projected]


def attend_in_full(
    attention: DistanceAttention, tokens: Tensor, patches: Tensor, positions: Tensor
) -> Tensor:
    query, key, value = heads_of(attention, tokens, patches)
    logits = query @ key.mT / math.sqrt(attention.head_size) + bias_in_full(attention, positions)
    return attention.output((logits.softmax(dim=-1) @ value).transpose(1, 2).flatten(-2))


def attend_plainly(
    attention: DistanceAttention, tokens: Tensor, patches: Tensor, positions: Tensor
) -> Tensor:
    return attention(tokens, attention.precompute(patches, positions))


def attend(
    attention: DistanceAttention, tokens: Tensor, patches: Tensor, positions: Tensor
) -> Tensor:
    """With the bias as extra channels, as on a GPU."""
    memory = patch_keys_values(attention, patches, None, positions, PackedWeights())
    return attend_normed(attention, tokens, None, memory, None)


def rms(difference: Tensor) -> float:
    return difference.double().square().mean().sqrt().item()


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("grid", GRIDS)
def test_equals_the_bias_added_in_full(grid, sigma):
    attention = attention_with(grid, sigma)
    inputs = inputs_of(attention)
    expected = attend_in_full(attention, *inputs)
    torch.testing.assert_close(attend(attention, *inputs), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(attend_plainly(attention, *inputs), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("width", "heads"), [(12, 2), (20, 2), (16, 1)])
def test_any_head_size(width, heads):
    attention = attention_with((3, 7), 0.1, width, heads)
    inputs = inputs_of(attention)
    memory = patch_keys_values(attention, inputs[1], None, inputs[2], PackedWeights())
    assert memory.keys_values.shape[-1] % 8 == 0
    expected = attend_in_full(attention, *inputs)
    torch.testing.assert_close(attend(attention, *inputs), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("grid", GRIDS)
def test_float32_stays_near_float64(grid, sigma):
    attention = attention_with(grid, sigma)
    inputs = inputs_of(attention)
    expected = attend_in_full(attention, *inputs)
    found = attend(attention.float(), *(x.float() for x in inputs))
    # Logits reach |a - ½|²/σ², about 300 at the smallest σ: some float32 steps of that.
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-5 if sigma < 0.1 else 2e-6)


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("grid", GRIDS)
def test_bfloat16_is_as_exact_as_a_float32_bias(grid, sigma):
    attention = attention_with(grid, sigma)
    inputs = inputs_of(attention)
    expected = attend_in_full(attention, *inputs)
    attention.float()
    tokens, patches, positions = (x.float() for x in inputs)
    bias = bias_in_full(attention, positions).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attend(attention, tokens, patches, positions)
        query, key, value = heads_of(attention, tokens, patches)
        # The same kernel; autocast would round the bias to bfloat16.
        with torch.autocast("cpu", enabled=False), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        plain = attention.output(mixed.transpose(1, 2).flatten(-2))
    assert found.dtype == torch.bfloat16
    assert rms(found - expected) < 1.03 * rms(plain - expected)


def test_bfloat16_channels_hold_the_bias():
    """The extra channels alone: the bias up to what is the same for every patch."""
    for grid in GRIDS:
        for sigma in SIGMAS:
            attention = attention_with(grid, sigma)
            positions = inputs_of(attention)[2]
            queries = query_channels(attention, positions, torch.bfloat16).double()
            keys = key_channels(attention, torch.bfloat16).double()
            error = queries @ keys.mT / math.sqrt(attention.head_size)
            error = error - bias_in_full(attention, positions)[:, 0]
            error = error - error.mean(dim=-1, keepdim=True)
            assert error.abs().max() < 2**-17 * 2 / sigma**2


def test_two_parts_sum_to_the_whole():
    exact = 300 * torch.randn(1000, dtype=torch.float64)
    for dtype, digits in ((torch.bfloat16, 16), (torch.float32, 24), (torch.float64, 52)):
        first, second = two_parts(exact, dtype)
        assert first.dtype == second.dtype == dtype
        assert ((first.double() + second.double() - exact) / exact).abs().max() <= 2**-digits
        assert torch.equal(first.to(torch.bfloat16).to(dtype), first)


def test_patch_centres_are_exact_in_bfloat16():
    largest = 256
    attention = DistanceAttention(8, 2, PatchGrid(largest, 1))
    expected = torch.arange(1 - largest, largest, 2, dtype=torch.float64)
    assert torch.equal(key_channels(attention, torch.bfloat16)[:, 0].double(), expected)


def gradients(attention: DistanceAttention, inputs: list[Tensor], run) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    wanted = [*leaves, attention.bias.log_sigma, attention.query.weight, attention.key.weight]
    output = run(attention, *leaves)
    probe = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return list(torch.autograd.grad((output * probe).sum(), wanted))


@pytest.mark.parametrize("sigma", [0.0301, 0.20, 0.599])
def test_gradients_equal_those_of_the_bias_added_in_full(sigma):
    """To tokens, patches, anchors, σ, and the projections of queries and keys."""
    attention = attention_with((8, 8), sigma, 50, 2)
    inputs = inputs_of(attention)
    wanted = gradients(attention, inputs, attend_in_full)
    for run in (attend, attend_plainly):
        for one, other in zip(gradients(attention, inputs, run), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
            assert other.abs().max() > 0


class Whole(torch.nn.Module):
    """Both halves of the attention as one call."""

    def __init__(self, attention: DistanceAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, tokens: Tensor, patches: Tensor, positions: Tensor) -> Tensor:
        return attend(self.attention, tokens, patches, positions)


def test_gradients_by_differences():
    whole = Whole(attention_with((2, 3), 0.3, 8, 2))
    tokens, patches, positions = inputs_of(whole.attention)

    def run(tokens: Tensor, patches: Tensor, positions: Tensor, log_sigma: Tensor) -> Tensor:
        given = {"attention.bias.log_sigma": log_sigma}
        return torch.func.functional_call(whole, given, (tokens, patches, positions))

    log_sigma = whole.attention.bias.log_sigma.detach().clone()
    arguments = (tokens[:1, :4], patches[:1], positions[:1, :4], log_sigma)
    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in arguments])


def test_bfloat16_gradients_of_anchors_are_as_exact_as_with_a_float32_bias():
    for sigma in (0.0301, 0.1, 0.599):
        attention = attention_with((14, 14), sigma)
        inputs = inputs_of(attention)
        exact = gradients(attention, inputs, attend_in_full)[2]
        attention.float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = [x.float() for x in inputs]
            found = gradients(attention, rounded, attend)[2]
            plain = gradients(attention, rounded, attend_in_full)[2]
        assert rms(found - exact) < 1.25 * rms(plain - exact)


def test_bfloat16_gradient_of_sigma():
    """One number gathers the rounding of all: its error is measured over several inputs."""
    attention = attention_with((14, 14), 0.20)
    exact, found = [], []
    for _ in range(6):
        inputs = inputs_of(attention)
        exact.append(gradients(attention.double(), inputs, attend_in_full)[3].double())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inputs = [x.float() for x in inputs]
            found.append(gradients(attention.float(), inputs, attend)[3].double())
    assert rms(torch.stack(found) - torch.stack(exact)) < 0.05 * rms(torch.stack(exact))


def test_sigma_is_bounded_and_starts_as_the_paper_says():
    bias = DistanceBias(PatchGrid(2, 2))
    assert bias.log_sigma.shape == ()
    assert bias.sigma().item() == pytest.approx(0.20)
    for given, expected in ((1e-3, 0.03), (0.1, 0.1), (5.0, 0.60)):
        with torch.no_grad():
            bias.log_sigma.fill_(math.log(given))
        assert bias.sigma().item() == pytest.approx(expected)


class Shapes(TorchDispatchMode):
    """The shapes of all tensors that operations return; a fused attention is one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        self.shapes |= {tuple(x.shape) for x in tree_leaves(result) if isinstance(x, Tensor)}
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_anchors_by_patches_tensor_is_made(dtype):
    attention = attention_with((8, 8), 0.2, 34, 2).float()  # no width equals the 64 patches
    inputs = [x.float().requires_grad_() for x in inputs_of(attention)]

    def made_by(run) -> set[tuple[int, ...]]:
        with (
            Shapes() as seen,
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16),
        ):
            run(attention, *inputs).float().square().sum().backward()
        return {shape for shape in seen.shapes if {ANCHORS, 64} <= set(shape[-3:])}

    assert not made_by(attend)
    assert made_by(attend_in_full)  # the watch sees what it should


def test_near_patches_are_read_and_far_ones_are_not():
    attention = attention_with((8, 8), 0.03)
    tokens, patches, positions = inputs_of(attention)
    positions[:, 2] = torch.tensor([0.5 / 8, 0.5 / 8])  # on the first patch
    before = attend(attention, tokens, patches, positions)[:, 2]
    patches[:, 40:] += 1.0
    torch.testing.assert_close(attend(attention, tokens, patches, positions)[:, 2], before)
    patches[:, 0] += 1.0
    assert rms(attend(attention, tokens, patches, positions)[:, 2] - before) > 1e-2


def test_the_read_has_the_parameters_of_a_plain_read_and_sigma():
    count = {name: x.numel() for name, x in DistanceRead(8, 2, PatchGrid(2, 2)).named_parameters()}
    assert count.pop("attention.bias.log_sigma") == 1
    assert count == {name: x.numel() for name, x in Read(8, Attention(8, 2)).named_parameters()}


def test_the_read_is_equation_2_with_the_bias():
    read = DistanceRead(8, 2, PatchGrid(2, 2)).double()
    positions = torch.rand(1, 3, 2, dtype=torch.float64)
    anchors = Anchors(positions, positions, positions)
    patches = torch.randn(1, 4, 8, dtype=torch.float64)
    features = torch.randn(1, 3, 8, dtype=torch.float64)
    context = Context(anchors, None, None, read.precompute(patches, anchors), None)
    mixed = attend_in_full(read.attention, read.norm_a(features), read.norm_h(patches), positions)
    expected = features + mixed
    expected = expected + read.feed_forward(read.norm_2(expected))
    torch.testing.assert_close(read(features, context), expected, rtol=0, atol=1e-12)
