"""Attention's forward for Hopper: that it compiles, which heads it takes, and what replaces it."""

import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from compiling import printed_by, unended_barriers

pytest.importorskip("triton")
attention = pytest.importorskip("fst.kernels.attention")
hopper = pytest.importorskip("fst.kernels.hopper")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
MODULE = "fst.kernels.attention_hopper_forward"

# Runs in a process of its own.
COMPILATION = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from fst.kernels import attention_hopper_forward as forward
from fst.kernels.gluon_parts import BOX

kernel = forward.attention_gluon_kernel
for size, dtype in ((24, "bf16"), (32, "fp16")):
    shape = f"[1, {forward.TILE.value}, 1, {forward.WIDE.value}]"
    types = dict.fromkeys(("H", "M", "N", "items"), "i32") | dict.fromkeys(
        ("c", "below", "least", "most"), "fp32"
    )
    heads = f"tensordesc<{dtype}{shape},{BOX.value!r}>"
    types |= dict.fromkeys(("queries", "keys", "values"), heads)
    types |= {"result": f"*{dtype}", "logarithms": "*fp32"}
    types |= dict.fromkeys(("SIZE", "REAL"), "constexpr")
    names = kernel.arg_names
    signature = {name: types[name] for name in names}
    constants = {(names.index("SIZE"),): size, (names.index("REAL"),): size - 2}
    source = GluonASTSource(kernel, signature, constants, {})
    options = {"num_warps": 4, "maxnreg": forward.REGISTERS}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(compiled.metadata.shared, forward.PROGRAMS)
"""


def heads(batch, count, number, size, dtype):
    """As a projection leaves them: (b h n k), stored (b n h k)."""
    return torch.randn(batch, count, number, size, device=DEVICE).to(dtype).transpose(1, 2)


def remembered(batch, count, number, size, dtype):
    """Keys and values as a joint projection leaves them."""
    return torch.randn(batch, count, 2, number, size, device=DEVICE).to(dtype)


def test_it_compiles(tmp_path):
    pytest.importorskip("triton.experimental.gluon")
    printed = printed_by(["-c", COMPILATION], tmp_path)
    lines = [list(map(int, line.split())) for line in printed.splitlines()]
    assert len(lines) == 2
    for shared, programs in lines:
        # They share a multiprocessor's memory, of which each loses 1 KiB.
        assert programs * (shared + 1024) <= 228 * 1024
    assert unended_barriers(tmp_path) == []


def test_the_heads_that_it_takes():
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


def broken(*given):
    raise RuntimeError("cannot be launched")


@pytest.mark.parametrize(
    ("module", "reason"),
    [(None, "ModuleNotFoundError"), (SimpleNamespace(forward=broken), "cannot be launched")],
)
def test_without_it_another_runs(module, reason, monkeypatch):
    """The same results, a warning, and no second attempt."""
    inputs = remembered(1, 136, 2, 24, HALF), heads(1, 128, 2, 24, HALF)
    monkeypatch.setattr(hopper, "_given_up", {"attention forward"})
    monkeypatch.setattr(hopper, "_on_hopper", lambda _: True)
    monkeypatch.setitem(sys.modules, MODULE, module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = attention.attention_forward(*inputs, 0.2, inputs[0].shape[-1])
    monkeypatch.setattr(hopper, "_given_up", set())
    with pytest.warns(UserWarning, match=f"attention forward kernels for Hopper.*{reason}"):
        first = attention.attention_forward(*inputs, 0.2, inputs[0].shape[-1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = attention.attention_forward(*inputs, 0.2, inputs[0].shape[-1])
    for found in (first, second):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_it_runs_alone(monkeypatch):
    """Where it takes the heads, no other kernel writes the results."""
    memory, asked = remembered(1, 136, 2, 24, HALF), heads(1, 128, 2, 24, HALF)

    def fill(queries, keys, values, scale, out, logarithms, real):
        assert queries is asked
        assert torch.equal(torch.stack((keys, values)), memory.permute(2, 0, 3, 1, 4))
        assert (scale, real) == (0.2, 24)
        out.fill_(1)
        logarithms.fill_(2)

    monkeypatch.setattr(hopper, "_given_up", set())
    monkeypatch.setattr(hopper, "_on_hopper", lambda _: True)
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(forward=fill))
    out, logarithms = attention.attention_forward(memory, asked, 0.2, 24)
    assert torch.equal(out, torch.ones_like(asked))
    assert torch.equal(logarithms, torch.full((1, 2, 128), 2.0, device=DEVICE))


@pytest.mark.parametrize("growth", [0, 4, 8, 60])
@pytest.mark.parametrize(
    ("queries", "keys", "size"), [(200, 150, 24), (384, 256, 32), (128, 129, 32)]
)
def test_it_is_exact(queries, keys, size, growth):
    """Also where later keys have larger logits, beyond the range of exp2 at last.

    Without a Hopper GPU the kernel that replaces it must pass.
    """
    inputs = remembered(2, keys, 3, size, HALF), heads(2, queries, 3, size, HALF).abs() + 2
    inputs[0][:, :, 0] += growth * torch.linspace(0, 1, keys, device=DEVICE)[:, None, None].to(HALF)
    out, logarithms = attention.attention_forward(*inputs, 0.2, inputs[0].shape[-1])
    assert not hopper._given_up
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
    from fst.kernels.attention_hopper_forward import RANGES

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
