"""Rows beside all tokens: values and gradients, compiled or not, and what the compiler sees."""

import pytest
import torch

from fst.kernels.modules import rows_and_tokens


def chained(tokens, indices, weight):
    rows, tokens = rows_and_tokens(tokens * 2, indices)
    return rows.sin().sum(dim=1, keepdim=True) + (tokens @ weight).tanh()


def plain(tokens, indices, weight):
    tokens = tokens * 2
    return tokens[:, indices].sin().sum(dim=1, keepdim=True) + (tokens @ weight).tanh()


def problem():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, 7, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    return tokens, weight


INDICES = pytest.mark.parametrize("chosen", [[3, 1, 6], [4, 4, 0], []])


@INDICES
def test_values_and_gradients_also_of_repeated_rows(chosen):
    tokens, weight = problem()
    indices = torch.tensor(chosen, dtype=torch.int64)
    found, wanted = (f(tokens, indices, weight) for f in (chained, plain))
    torch.testing.assert_close(found, wanted)
    upstream = torch.randn_like(found)
    gradients = [torch.autograd.grad(out, (tokens, weight), upstream) for out in (found, wanted)]
    torch.testing.assert_close(*gradients)


def test_either_result_may_go_unused():
    tokens, _ = problem()
    indices = torch.tensor([2, 5])
    for used in (0, 1):
        out = rows_and_tokens(tokens, indices)[used]
        expected = tokens[:, indices] if used == 0 else tokens
        found, wanted = (torch.autograd.grad(x.square().sum(), tokens) for x in (out, expected))
        torch.testing.assert_close(found, wanted)


def test_compiled_nothing_is_added_to_zeros():
    """The rows' gradients go into the other's, and it comes to the same."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def keep(module, _):
        graphs.append(module)
        return make_boxed_func(module.forward)

    tokens, weight = problem()
    indices = torch.tensor([3, 1, 3])
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    found = torch.compile(chained, backend=backend, fullgraph=True)(tokens, indices, weight)
    wanted = plain(tokens, indices, weight)
    gradients = [
        torch.autograd.grad(out.square().sum(), (tokens, weight)) for out in (found, wanted)
    ]
    torch.testing.assert_close(*gradients)
    called = [n.target.name() for n in graphs[1].graph.nodes if n.op == "call_function"]
    assert "aten::index_put" in called
    assert not {"aten::add.Tensor", "aten::new_zeros", "aten::zeros"} & set(called)


def test_transformations_of_functions():
    tokens, weight = problem()
    tokens, weight, indices = tokens.detach(), weight.detach(), torch.tensor([3, 1])
    found, wanted = (
        torch.func.grad(lambda x, f=f: f(x, indices, weight).square().sum())(tokens)
        for f in (chained, plain)
    )
    torch.testing.assert_close(found, wanted)
    many = torch.stack((tokens, tokens + 1))
    found, wanted = (
        torch.vmap(lambda x, f=f: f(x, indices, weight))(many) for f in (chained, plain)
    )
    torch.testing.assert_close(found, wanted)
