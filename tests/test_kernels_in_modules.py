"""Modules that hand their work to kernels compute what they compute without, gradients included.

Without a GPU the kernels run in Triton's interpreter, in float32.
"""

import inspect

import pytest
import torch
from torch import nn

from fst import kernels
from fst.attention import Attention, Memory, Projection, joint_projection
from fst.images.patches import PatchGrid
from fst.images.read import DistanceAttention
from fst.nn import FourierFeatures, PointMLP, ResidualFeedForward, fusible
from fst.prepared import Prepared

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """The kernels take whatever they are given."""
    for name in ("takes_heads", "takes_positions", "takes_tokens"):
        monkeypatch.setattr(kernels, name, lambda *given: kernels._enabled)


def agree(run, learned):
    """With kernels and without: the result, and the gradients of what is learned."""
    found, wanted = [], []
    for results in (found, wanted):
        if results is wanted:
            with kernels.reference():
                out = run()
        else:
            out = run()
        upstream = torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape)
        results += [out, *torch.autograd.grad(out, learned, upstream)]
    for mine, plain in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("head", [6, 8])
@pytest.mark.parametrize("added", [False, True])
def test_attention_with_widened_heads(head, added):
    """A head of 6 numbers has room for a channel of ones, one of 8 has none."""
    attention = Attention(2 * head, 2).to(DEVICE)
    tokens = torch.randn(2, 5, 2 * head, device=DEVICE, requires_grad=True)
    other = torch.randn(2, 5, 2 * head, device=DEVICE, requires_grad=True)
    projections = attention.query, attention.key, attention.value

    def run():
        prepared, out = Prepared(), tokens
        for _ in range(2):
            heads = attention._project_together(out, None, prepared, *projections)
            memory = Memory(*heads.parts[1:], joint=heads.joint)
            residual = other if added else None
            out = attention._attend(heads.parts[0], memory, prepared, residual)
        return out

    agree(run, [tokens, *([other] if added else []), *attention.parameters()])


@pytest.mark.parametrize("head", [6, 8])
def test_projections_behind_a_norm(head):
    """In half precision, several as one, in every step; parameters may be in float32."""
    attention, norm = Attention(4 * head, 4).to(DEVICE), nn.LayerNorm(4 * head).to(DEVICE)
    with torch.no_grad():
        norm.weight.add_(0.2 * torch.randn_like(norm.weight))
        norm.bias.add_(0.2 * torch.randn_like(norm.bias))
    tokens = torch.randn(2, 5, 4 * head, device=DEVICE, dtype=HALF, requires_grad=True)
    projections = attention.query, attention.key, attention.value
    learned = [tokens, *norm.parameters(), *(p for each in projections for p in each.parameters())]

    def run():
        prepared, joint = Prepared(), []
        with torch.autocast(DEVICE, HALF):
            for number in (3, 3, 1):
                given = tokens, norm, prepared, *projections[:number]
                joint.append(attention._project_together(*given).joint.flatten())
        return torch.cat(joint).float()

    upstream = torch.linspace(-1, 1, run().numel(), device=DEVICE)
    found = torch.autograd.grad(run(), learned, upstream)
    with kernels.reference():
        wanted = torch.autograd.grad(run(), learned, upstream)
    for mine, plain in zip(found, wanted, strict=True):
        assert mine.dtype == plain.dtype
        assert (mine - plain).norm() < 2.0**-6 * plain.norm()


@pytest.mark.parametrize("separate", [False, True])
def test_attention_to_a_memory_that_serves_every_step(separate):
    """Its gradients of all steps are added up; keys and values may come as they are."""
    attention = Attention(12, 2).to(DEVICE)
    tokens = torch.randn(2, 5, 12, device=DEVICE, requires_grad=True)
    observed = torch.randn(2, 7, 12, device=DEVICE, requires_grad=True)

    def run():
        heads = attention._project_together(observed, None, None, attention.key, attention.value)
        memory = Memory(*heads.parts, joint=None if separate else heads.joint)
        prepared, out = Prepared(), tokens
        for _ in range(3):
            queries = attention._project_together(out, None, prepared, attention.query).parts[0]
            out = attention._attend(queries, memory, prepared, out)
        return out

    agree(run, [tokens, observed, *attention.parameters()])


@pytest.mark.parametrize("added", [False, True])
def test_the_read_attention_of_images(added):
    attention = DistanceAttention(20, 2, PatchGrid(2, 3)).to(DEVICE)
    norm = nn.LayerNorm(20).to(DEVICE)
    patches = torch.randn(2, 6, 20, device=DEVICE, requires_grad=True)
    anchors = torch.randn(2, 4, 20, device=DEVICE, requires_grad=True)
    positions = torch.rand(2, 4, 2, device=DEVICE)

    def run():
        memory, prepared, out = attention.remember(patches, positions), Prepared(), anchors
        for _ in range(2):
            residual = out if added else None
            out = attention(out, memory, norm, prepared, residual)
        return out

    agree(run, [patches, anchors, *attention.parameters(), *norm.parameters()])


@pytest.mark.parametrize("condition", [False, True])
@pytest.mark.parametrize("entries", [1, 3])
def test_the_share_of_positions(condition, entries):
    """Positions are learned; a batch may have them in common."""
    fourier = FourierFeatures(2, 3, "geometric")
    network = PointMLP(8, fourier.size, 2 if condition else 0, 16, 8).to(DEVICE)
    positions = torch.rand(entries, 7, 2, device=DEVICE, requires_grad=True)
    given = torch.randn(3, 2, device=DEVICE, requires_grad=True) if condition else None
    learned = [positions, network.first.weight, network.first.bias]

    def run():
        prepared = Prepared()
        both = [network.place(fourier, positions, given, prepared) for _ in range(2)]
        return both[0] + both[1].square()

    agree(run, learned + ([given] if condition else []))


def test_an_embedding_of_ones_own_goes_the_plain_way():
    class Squares(nn.Module):
        size = 2

        def forward(self, positions):
            return positions.square()

    class Shifted(FourierFeatures):
        def forward(self, positions):
            return super().forward(positions + 1)

    positions = torch.rand(1, 5, 2)
    for fourier in (Squares(), Shifted(2, 3, "linear")):
        network = PointMLP(8, fourier.size, 0, 16, 8)
        found = inspect.unwrap(PointMLP.place)(network, fourier, positions, None)
        with kernels.reference():
            wanted = nn.functional.linear(
                fourier(positions), network.first.weight[:, 8:], network.first.bias
            )
        torch.testing.assert_close(found, wanted)


def test_other_norms_and_activations_go_the_plain_way():
    tokens, layer, norm = torch.randn(1, 3, 8), nn.Linear(8, 16), nn.RMSNorm(8)
    for dtype in (torch.float32, torch.bfloat16):
        given = tokens.to(dtype), norm.to(dtype), [layer.to(dtype)]
        projection = joint_projection(*given, 2, 8)
        assert type(projection) is Projection
        assert projection(given[0]).shape == (1, 3, 16)
    half = ResidualFeedForward(8).half()
    assert fusible(tokens.half(), half.norm, half.feed_forward) is not None
    half.feed_forward[1] = nn.GELU(approximate="tanh")
    assert fusible(tokens.half(), half.norm, half.feed_forward) is None


def test_what_was_prepared_without_gradients_is_prepared_again():
    attention = DistanceAttention(20, 2, PatchGrid(2, 3)).to(DEVICE)
    patches, positions = torch.randn(2, 6, 20, device=DEVICE), torch.rand(2, 4, 2, device=DEVICE)
    memory = attention.remember(patches, positions)
    prepared, anchors = Prepared(), torch.randn(2, 4, 20, device=DEVICE)
    with torch.no_grad():
        anchors = attention(anchors, memory, None, prepared)
    attention(anchors, memory, None, prepared).square().sum().backward()
    assert attention.query.weight.grad is not None
    assert attention.output.weight.grad.norm() > 0
