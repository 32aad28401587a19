"""What fast modules take, and in which parts they work. What they compute: `test_modules`."""

import pytest
import torch
from torch import nn
from torch._functorch.aot_autograd import aot_module, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from fst.kernels import fuse, modules, unfuse
from fst.kernels.modules import PackedWeights, normed_parameters, residual_feed, takes_tokens
from fst.nn import FeedForward, PointMLP, ResidualFeedForward
from fst.rbf import Blend
from kernel_examples import DEVICE, HALF, OnGPU
from small import config_on, small_model, some_observations

blend = pytest.importorskip("fst.kernels.blend")


def test_tokens_that_are_taken():
    def taken(dtype, shape=(2, 3, 16), hidden=64, kind=OnGPU):
        return takes_tokens(torch.zeros(shape, dtype=dtype).as_subclass(kind), hidden)

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


class Calls:
    """Counts the calls of a function."""

    def __init__(self, function):
        self.function, self.number = function, 0

    def __call__(self, *given):
        self.number += 1
        return self.function(*given)


@pytest.fixture
def pruned(monkeypatch):
    """Kernels for a CPU's tensors and for few points; counts pruned blends."""
    monkeypatch.setattr(modules, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(modules, "MANY_POINTS", 50)
    monkeypatch.setattr(modules, "MANY_ANCHORS", 8)
    counted = Calls(blend.pruned_blend)
    monkeypatch.setattr(blend, "pruned_blend", counted)
    return counted


def some_field(batch):
    model = small_model(config_on(2)).float().to(DEVICE)
    return fuse(model)(some_observations(model, batch=batch).to(torch.float32).to(DEVICE))


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("parts", [1, 3])
def test_queries_without_gradients_come_in_bounded_parts(pruned, monkeypatch, ordered, parts):
    field = some_field(batch=2)
    queries = torch.rand(2, 300, 2, device=DEVICE)
    if ordered:
        queries = queries.sort(dim=1).values
    each = modules.FUSED_WIDTHS[4] * 2 * field.features.shape[2] * 4
    monkeypatch.setattr(modules, "FUSED_BYTES", 300 * each / parts)
    # On a GPU; on a CPU its own regions count.
    monkeypatch.setattr(modules, "REGION", -(-300 // parts))
    with torch.no_grad():
        found = field(queries)
        assert pruned.number == parts
        unfuse(field.decoder)
        wanted = field.decode(queries)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_queries_with_gradients_come_in_bounded_parts(pruned, monkeypatch):
    field = some_field(batch=1)
    queries = torch.rand(1, 150, 2, device=DEVICE)
    each = modules.FUSED_WIDTHS[4] * field.features.shape[2] * 4
    monkeypatch.setattr(modules, "FUSED_BYTES", 70 * each)
    assert field.decoder.queries_at_once(queries, field.features, None) == 50
    found = torch.autograd.grad(field(queries).sum(), field.features, retain_graph=True)[0]
    assert pruned.number == 0
    unfuse(field.decoder)
    wanted = torch.autograd.grad(field.decode(queries).sum(), field.features)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_gradients_go_through_the_full_blend(pruned):
    anchors = torch.cartesian_prod(*[torch.linspace(0, 1, 6)] * 2)[None]
    scales, features = 0.05 + 0.1 * torch.rand(1, 36, 2), torch.randn(1, 36, 5)
    inputs = [torch.rand(1, 144, 2), anchors, scales, features]
    inputs = [each.to(DEVICE).requires_grad_() for each in inputs]
    found = fuse(Blend())(*inputs)
    assert pruned.number == 0
    found.sum().backward()
    assert all(each.grad is not None for each in inputs)
    with torch.no_grad():
        torch.testing.assert_close(fuse(Blend())(*inputs), found, rtol=1e-5, atol=1e-5)
    assert pruned.number == 1


class Steps(nn.Module):
    """Two layers, applied over and over."""

    def __init__(self, number, shared):
        super().__init__()
        self.number, self.shared = number, shared
        self.feed, self.point = ResidualFeedForward(16), PointMLP(16, 6, 0, 32, 16)

    def forward(self, tokens, term):
        packed = PackedWeights()
        for _ in range(self.number):
            packed = packed if self.shared else PackedWeights()
            tokens = residual_feed(tokens, self.feed.norm, self.feed.feed_forward, packed)
            tokens = modules.point_mlp(self.point, tokens, term, packed)
        return tokens.float().sum()


def test_weights_are_packed_once_for_all_steps(monkeypatch):
    """Applied four times, layers are packed as if once, forward and backward."""
    monkeypatch.setattr(modules, "on_gpu", lambda tensor: True)
    given = [torch.randn(2, 5, 16).to(DEVICE, HALF), torch.randn(1, 5, 32).to(DEVICE, HALF)]

    def packing(number, shared):
        graphs = []

        def keep(graph, _):
            graphs.append([str(node.target) for node in graph.graph.nodes])
            return make_boxed_func(graph.forward)

        partition = min_cut_rematerialization_partition
        steps = aot_module(Steps(number, shared).to(DEVICE), keep, keep, partition_fn=partition)
        steps(*given).backward()
        for graph in graphs:
            assert sum("fst.feed_forward" in name for name in graph) == 2 * number
        parts = ("fst.pack_", "aten.cat", "aten.mul", "aten.expand")
        return [sum(name.startswith(parts) for name in graph) for graph in graphs]

    assert min(packing(1, shared=True)) > 0
    assert packing(4, shared=True) == packing(1, shared=True)
    assert packing(4, shared=False)[1] > packing(1, shared=False)[1]


def test_the_compiler_sees_through_the_packing():
    layer = nn.Linear(3, 3)

    @torch.compile(fullgraph=True, backend="eager")
    def run(x):
        packed = PackedWeights()
        for _ in range(3):
            x = x @ packed.of((layer,), lambda: layer.weight.exp())
        return x

    x = torch.randn(2, 3)
    torch.testing.assert_close(run(x), x @ torch.linalg.matrix_power(layer.weight.exp(), 3))


def test_replaced_layers_go_the_plain_way(monkeypatch):
    monkeypatch.setattr(modules, "on_gpu", lambda tensor: True)
    tokens, norm, feed = torch.zeros(1, 2, 8).half(), nn.LayerNorm(8), FeedForward(8)
    assert normed_parameters(tokens, norm, feed) is not None
    assert normed_parameters(tokens.float(), norm, feed) is None
    assert normed_parameters(tokens, nn.LayerNorm(8, bias=False), feed) is None
    feed[1] = nn.GELU(approximate="tanh")
    assert normed_parameters(tokens, norm, feed) is None
    feed[1], feed[0] = nn.GELU(), nn.Sequential(feed[0])
    assert normed_parameters(tokens, norm, feed) is None
