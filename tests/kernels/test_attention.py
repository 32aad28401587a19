"""Attention with short heads against float64; which heads the kernels for Hopper take, and what
replaces them."""

import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from kernel_examples import DEVICE, FINEST, HALF, on_hopper, relative

attention = pytest.importorskip("fst.kernels.attention")
launch = pytest.importorskip("fst.kernels.launch")
MODULE = "fst.kernels.attention_hopper"
BOUND = {torch.float32: 2e-6, HALF: 2.0 ** (-6 if torch.bfloat16 == HALF else -9)}


def heads(batch, count, number, size, dtype):
    """Heads as a projection leaves them: strided, the last axis dense."""
    return torch.randn(batch, count, number, size, device=DEVICE).to(dtype).transpose(1, 2)


def joint(batch, count, parts, number, size, dtype):
    """Keys and values, or queries and these, as a joint projection leaves them."""
    return torch.randn(batch, count, parts, number, size, device=DEVICE).to(dtype)


def plain_attention(memory, queries=None, scale=1.0):
    *own, keys, values = memory.permute(2, 0, 3, 1, 4)
    asked = own[0] if queries is None else queries
    return F.scaled_dot_product_attention(asked, keys, values, scale=scale)


@pytest.mark.parametrize(
    ("queries", "keys", "size", "dtype"),
    [
        (10, 7, 22, FINEST),
        (64, 64, 32, FINEST),
        (70, 150, 24, FINEST),
        (130, 65, 25, FINEST),
        (70, 150, 24, HALF),
        (132, 260, 32, HALF),
        (1, 1, 16, FINEST),
    ],
)
@pytest.mark.parametrize("apart", [True, False])
def test_attention(queries, keys, size, dtype, apart):
    """Queries apart, or in one tensor with keys and values."""
    scale, bound = 22**-0.5, BOUND[dtype]
    inputs = [joint(2, keys, 2 if apart else 3, 3, size, dtype)]
    if apart:
        inputs.append(heads(2, queries, 3, size, dtype))
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    expected = plain_attention(*exact, scale=scale)
    upstream = heads(2, expected.shape[2], 3, size, dtype)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    mine = [tensor.detach().requires_grad_() for tensor in inputs]
    found = attention.short_attention(mine[0], mine[1] if apart else None, scale)
    gradients = torch.autograd.grad(found, mine, upstream)
    assert relative(found.detach(), expected.detach()) < bound
    # One key takes all the weight: queries and keys have no gradient.
    chosen = slice(0 if keys > 1 else -1, None)
    assert relative(gradients[0][:, :, chosen], wanted[0][:, :, chosen]) < bound
    assert gradients[0].is_contiguous()
    if apart:
        assert keys == 1 or relative(gradients[1], wanted[1]) < bound
        assert gradients[1].transpose(1, 2).is_contiguous()
    assert found.transpose(1, 2).is_contiguous()


def test_attention_with_a_channel_of_ones():
    """It leaves as one and, whatever gradient it meets, moves nothing but itself."""
    memory, queries = joint(2, 70, 2, 3, 16, FINEST), heads(2, 40, 3, 16, FINEST)
    memory[:, :, 1, :, 13:] = 0
    upstream = heads(2, 40, 3, 16, FINEST)
    inputs = [tensor.requires_grad_() for tensor in (memory, queries)]
    found = attention.short_attention(*inputs, 0.3, 13)
    plain = attention.short_attention(*inputs, 0.3)
    assert torch.equal(found[..., 13], torch.ones_like(found[..., 13]))
    assert torch.equal(found[..., :13], plain[..., :13])
    assert not found[..., 14:].any()
    gradients = torch.autograd.grad(found, inputs, upstream)
    wanted = torch.autograd.grad(plain[..., :13], inputs, upstream[..., :13])
    last_bit = torch.finfo(FINEST).eps
    rtol, atol = (1e-5, 1e-6) if torch.float32 == FINEST else (last_bit, last_bit / 8)
    for gradient, reference in zip(gradients, wanted, strict=True):
        if reference is wanted[0]:  # of values, what lies behind the real channels may be anything
            gradient[:, :, 1, :, 13:] = reference[:, :, 1, :, 13:] = 0
        torch.testing.assert_close(gradient, reference, rtol=rtol, atol=atol)


def test_attention_at_large_logits():
    """No overflow where a logit is far beyond the range of exp."""
    memory = joint(1, 20, 3, 1, 16, FINEST)
    memory[:, :, :2] *= 300
    found = attention.short_attention(memory, None, 1.0)
    assert relative(found, plain_attention(memory.double())) < max(1e-4, BOUND[FINEST])


def test_the_heads_that_the_backward_kernel_for_hopper_takes():
    def taken(queries=72, keys=136, size=24, dtype=torch.bfloat16, of=heads):
        counts = (queries, queries, keys, keys)
        return attention._suits_hopper_backward(*(of(2, count, 3, size, dtype) for count in counts))

    def dense(batch, count, number, size, dtype):
        return heads(batch, count, number, size, dtype).contiguous()

    def cut(batch, count, number, size, dtype):
        return heads(batch, count, number, size + 8, dtype)[..., :size]

    def shifted(batch, count, number, size, dtype):
        return heads(batch, count, number, size + 8, dtype)[..., 1 : size + 1]

    def odd(batch, count, number, size, dtype):
        return heads(batch, count, number, size + 4, dtype)[..., :size]

    def repeated(batch, count, number, size, dtype):
        return heads(1, count, number, size, dtype).expand(batch, -1, -1, -1)

    def scattered_numbers(batch, count, number, size, dtype):
        return heads(batch, count, number, 2 * size, dtype)[..., ::2]

    assert taken()
    assert taken(size=32, dtype=torch.float16)
    assert taken(of=dense)
    assert taken(of=cut)
    assert taken(queries=1024)
    assert not taken(dtype=torch.float32)
    assert not taken(size=16)
    assert not taken(queries=1028)  # more than shared memory holds
    assert not taken(queries=74)
    assert not taken(queries=64)
    assert not taken(keys=128)
    for of in (shifted, odd, repeated, scattered_numbers):
        assert not taken(of=of)


def broken(*given):
    raise RuntimeError("cannot be launched")


@pytest.mark.parametrize(
    ("module", "reason"),
    [(None, "ModuleNotFoundError"), (SimpleNamespace(backward=broken), "cannot be launched")],
)
def test_without_the_backward_kernel_for_hopper_others_run(module, reason, monkeypatch):
    """The same gradients, a warning, and no second attempt."""
    inputs = joint(1, 136, 2, 2, 24, HALF), heads(1, 72, 2, 24, HALF)
    for tensor in inputs:
        tensor.requires_grad_()

    def gradients():
        return torch.autograd.grad(attention.short_attention(*inputs, 0.2).square().sum(), inputs)

    on_hopper(monkeypatch, given_up={"attention backward"})
    monkeypatch.setitem(sys.modules, MODULE, module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = gradients()
    on_hopper(monkeypatch)
    with pytest.warns(
        UserWarning, match=f"attention backward kernels for Hopper do not work.*{reason}"
    ):
        first = gradients()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = gradients()
    for found in (first, second):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_the_backward_kernel_for_hopper_runs_alone(monkeypatch):
    """Where it takes the heads, no other kernel writes the gradients."""

    def fill(*given):
        for number, tensor in enumerate(given[-3:]):
            tensor.fill_(number)

    on_hopper(monkeypatch)
    module = SimpleNamespace(backward=fill)
    monkeypatch.setitem(sys.modules, MODULE, module)
    queries, lines = heads(1, 72, 2, 24, HALF), torch.zeros(1, 2, 72, device=DEVICE)
    memory = joint(1, 136, 2, 2, 24, HALF)
    found = attention.attention_backward(queries, memory, queries, lines, lines, 0.2)
    assert torch.equal(found[0][:, :, 0], torch.full_like(memory[:, :, 0], 1))
    assert torch.equal(found[0][:, :, 1], torch.full_like(memory[:, :, 1], 2))
    assert torch.equal(found[1], torch.full_like(queries, 0))
    memory = joint(1, 136, 3, 2, 24, HALF)
    grad, lines = heads(1, 136, 2, 24, HALF), torch.zeros(1, 2, 136, device=DEVICE)
    (found,) = attention.attention_backward(grad, memory, None, lines, lines, 0.2)
    for number in range(3):
        assert torch.equal(found[:, :, number], torch.full_like(memory[:, :, number], number))


def test_the_kernels_for_hopper_compile(compiled_for_hopper):
    from fst.kernels.attention_hopper import PROGRAMS

    found = compiled_for_hopper("attention")
    assert len(found) == 4
    forward = [each for each in found if each["kernel"] == "attention_gluon_kernel"]
    assert len(forward) == 2
    for each in forward:
        # They share a multiprocessor's memory, of which each loses 1 KiB.
        assert PROGRAMS * (each["shared"] + 1024) <= 228 * 1024


def test_the_heads_that_the_forward_kernel_for_hopper_takes():
    def taken(queries=128, keys=129, size=24, dtype=torch.bfloat16, of=heads):
        counts = (queries, keys, keys)
        return attention._suits_hopper_forward(*(of(2, n, 3, size, dtype) for n in counts))

    def shifted(batch, count, number, size, dtype):
        return heads(batch, count, number, size + 8, dtype)[..., 1 : size + 1]

    def repeated(batch, count, number, size, dtype):
        return heads(1, count, number, size, dtype).expand(batch, -1, -1, -1)

    def none(batch, count, number, size, dtype):
        return heads(0, count, number, size, dtype)

    assert taken()
    assert taken(queries=4099, keys=1001, size=32, dtype=torch.float16)
    assert not taken(dtype=torch.float32)
    assert not taken(size=16)
    assert not taken(size=40)
    assert not taken(queries=127)
    assert not taken(keys=128)
    for of in (shifted, repeated, none):
        assert not taken(of=of)


@pytest.mark.parametrize(
    ("module", "reason"),
    [(None, "ModuleNotFoundError"), (SimpleNamespace(forward=broken), "cannot be launched")],
)
def test_without_the_forward_kernel_for_hopper_another_runs(module, reason, monkeypatch):
    """The same results, a warning, and no second attempt."""
    inputs = joint(1, 136, 2, 2, 24, HALF), heads(1, 128, 2, 24, HALF)
    on_hopper(monkeypatch, given_up={"attention forward"})
    monkeypatch.setitem(sys.modules, MODULE, module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = attention.attention_forward(*inputs, 0.2, inputs[0].shape[-1])
    on_hopper(monkeypatch)
    with pytest.warns(UserWarning, match=f"attention forward kernels for Hopper.*{reason}"):
        first = attention.attention_forward(*inputs, 0.2, inputs[0].shape[-1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = attention.attention_forward(*inputs, 0.2, inputs[0].shape[-1])
    for found in (first, second):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_the_forward_kernel_for_hopper_runs_alone(monkeypatch):
    """Where it takes the heads, no other kernel writes the results."""
    memory, asked = joint(1, 136, 2, 2, 24, HALF), heads(1, 128, 2, 24, HALF)

    def fill(queries, keys, values, scale, out, logarithms, real):
        assert queries is asked
        assert torch.equal(torch.stack((keys, values)), memory.permute(2, 0, 3, 1, 4))
        assert (scale, real) == (0.2, 24)
        out.fill_(1)
        logarithms.fill_(2)

    on_hopper(monkeypatch)
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(forward=fill))
    out, logarithms = attention.attention_forward(memory, asked, 0.2, 24)
    assert torch.equal(out, torch.ones_like(asked))
    assert torch.equal(logarithms, torch.full((1, 2, 128), 2.0, device=DEVICE))


@pytest.mark.parametrize("growth", [0, 4, 8, 60])
@pytest.mark.parametrize(
    ("queries", "keys", "size"), [(200, 150, 24), (384, 256, 32), (128, 129, 32)]
)
def test_the_forward_kernel_is_exact(queries, keys, size, growth):
    """Also where later keys have larger logits, beyond the range of exp2 at last.

    Without a Hopper GPU the kernel that replaces it must pass.
    """
    inputs = joint(2, keys, 2, 3, size, HALF), heads(2, queries, 3, size, HALF).abs() + 2
    inputs[0][:, :, 0] += growth * torch.linspace(0, 1, keys, device=DEVICE)[:, None, None].to(HALF)
    out, logarithms = attention.attention_forward(*inputs, 0.2, inputs[0].shape[-1])
    assert not launch._given_up
    exact_keys, exact_values = inputs[0].double().permute(2, 0, 3, 1, 4)
    logits = inputs[1].double() @ exact_keys.mT * 0.2
    wanted = logits.softmax(dim=-1) @ exact_values
    assert (out.double() - wanted).norm() < 2.0**-7 * wanted.norm()
    sums = logits.logsumexp(dim=-1) / torch.log(torch.tensor(2.0)).item()
    torch.testing.assert_close(logarithms.double(), sums, rtol=1e-5, atol=1e-2)
    again = attention.attention_forward(*inputs, 0.2, inputs[0].shape[-1])
    assert torch.equal(again[0], out)
    assert torch.equal(again[1], logarithms)


@pytest.mark.parametrize(("dtype", "room"), [(torch.bfloat16, 155), (torch.float16, 14)])
def test_how_far_later_logits_may_lie_above_the_first(dtype, room):
    """Sums within the range hold weights without loss; beyond it they leave the range."""
    pytest.importorskip("triton.experimental.gluon")
    from fst.kernels.attention_hopper import RANGES

    below, most = RANGES[dtype]
    values = torch.randn(200, 8, dtype=torch.float64)
    for above in (-20.0, 0.0, room / 2, room - 1.0, room + 3.0, room + 40.0, 500.0):
        logits = -5 * torch.rand(200, dtype=torch.float64)
        logits[100] = above
        reference = logits[:64].max() + below
        weights = torch.exp2((logits - reference).float())  # as on the chip
        weights[weights < 2.0**-126] = 0
        rounded = weights.to(dtype).float()
        total = rounded.sum()
        safe = bool((total > 2.0 ** (-below - 1)) & (total < most))
        assert safe == (above < room)
        if safe:
            found = (rounded.double() @ values) / total.double()
            wanted = torch.softmax(logits * torch.log(torch.tensor(2.0)).item(), 0) @ values
            assert (found - wanted).norm() < torch.finfo(dtype).eps * wanted.norm()
