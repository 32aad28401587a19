"""aᵀ b over many tokens: against float64, and how tokens and channels are divided."""

import math
from types import SimpleNamespace

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

pytest.importorskip("triton")
from compiling import SHARED, shared_memory, unended_barriers
from fst.kernels import hopper
from fst.kernels import weight_gradients as gradients
from fst.kernels.weight_gradients import (
    GROUP,
    GROUPS,
    PROGRAMS,
    TOKENS,
    Product,
    add_shares,
    divide,
    transposed_product,
    weight_gradients,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16
NARROW = GROUPS * GROUP
channels = st.integers(1, 100).map(lambda n: 8 * n)
tokens = st.integers(1, 200_000)


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def pair(count, m, n, dtype=HALF):
    # Sums that do not cancel: a share that is lost, or added twice, shows.
    a, b = torch.randn(count, m, device=DEVICE) + 0.5, torch.randn(count, n, device=DEVICE) + 0.5
    return a.to(dtype), b.to(dtype)


def exact(a, b):
    return a.double().t() @ b.double()


def library_bound(a):
    """What the library's error stays below.

    Tensor cores add 16 tokens at once to a sum in float32, and cut off instead of rounding: each
    time, a sum that does not cancel loses up to 2^-23 of itself.
    """
    cuts = a.is_cuda and a.element_size() == 2
    return 2e-6 + (math.ceil(len(a) / 16) * 2.0**-23 if cuts else 0.0)


def test_the_kernel_for_hopper_compiles(tmp_path):
    pytest.importorskip("triton.experimental.gluon")
    needed = shared_memory("weight_gradients_compilation.py", tmp_path)
    assert len(needed) == 3
    assert max(needed) <= SHARED
    assert unended_barriers(tmp_path) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 100, 5000])
def test_products_are_exact_to_float32(count, dtype):
    pairs = [pair(count, 48, 24, dtype), pair(count, 9, 7, dtype)]
    for found, given in zip(weight_gradients(*pairs), pairs, strict=True):
        assert found.dtype == torch.float32
        assert relative(found, exact(*given)) < library_bound(given[0])
    assert torch.equal(transposed_product(*pairs[0]), weight_gradients(*pairs)[0])


@hypothesis.given(st.lists(st.tuples(tokens, channels, channels), min_size=2, max_size=2))
def test_every_program_has_tokens_and_all_run_at_once(given):
    products = [Product(t, max(m, n), min(m, n)) for t, m, n in given]
    division = divide(products)
    tiles = [product.tiles(division.wide) for product in products]
    for product, shares in zip(products, division.shares, strict=True):
        assert 1 <= shares <= product.blocks()
    programs = sum(n * shares for n, shares in zip(tiles, division.shares, strict=True))
    assert programs <= max(PROGRAMS, sum(tiles))


def test_an_mlps_products_fill_the_gpu():
    division = divide([Product(49_152, 704, 184), Product(49_152, 704, 176)])
    assert division == (256, (22, 22))


@pytest.mark.parametrize(
    ("m", "n", "numbers"), [(24, 40, (1, 1)), (8, 8, (3, 20)), (56, 64, (9, 1))]
)
def test_shares_are_added(m, n, numbers):
    shares = [torch.randn(number, m, n, device=DEVICE) for number in numbers]
    for found, summands in zip(add_shares(shares), shares, strict=True):
        torch.testing.assert_close(found.double(), summands.double().sum(0), rtol=0, atol=4e-6)
    again = add_shares(shares)
    assert all(map(torch.equal, again, add_shares(shares)))


class Emulated:
    """Says in PyTorch what the kernel for Hopper says in Gluon."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *given, **constants: self.run(grid[0], *given, **constants)

    def run(
        self, programs, wide0, narrow0, wide1, narrow1, out0, out1,
        blocks0, shares0, w0, n0, blocks1, shares1, w1, n1, start,
        *, num_warps, **constants,
    ):  # fmt: skip
        step = constants["WIDE"]
        self.launches.append(programs)
        first = (wide0, narrow0, out0, blocks0, shares0, w0 * 8, n0 * 8, constants["TURNED0"])
        second = (wide1, narrow1, out1, blocks1, shares1, w1 * 8, n1 * 8, constants["TURNED1"])
        for program in range(programs):
            later = program >= start
            wide, narrow, out, blocks, shares, w, n, turned = second if later else first
            across = -(-w // step)
            share, tile = divmod(program - later * start, across * -(-n // NARROW))
            rows = slice(share * blocks // shares * TOKENS, (share + 1) * blocks // shares * TOKENS)
            columns = slice(tile % across * step, (tile % across + 1) * step)
            others = slice(tile // across * NARROW, (tile // across + 1) * NARROW)
            sums = exact(narrow.base[rows, others], wide.base[rows, columns]).float()
            place = out[share].t() if turned else out[share]
            assert place.shape == (n, w)
            place[others, columns] = sums


@pytest.fixture
def emulated(monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    from fst.kernels import weight_gradients_hopper as module

    kernel = Emulated()
    monkeypatch.setattr(module, "weight_gradients_gluon_kernel", kernel)
    monkeypatch.setattr(hopper, "_given_up", set())
    monkeypatch.setattr(hopper, "_on_hopper", lambda _: True)
    monkeypatch.setattr(gradients, "ADDED", 4096)  # fewer programs for the interpreter
    return kernel


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("sizes", [[(712, 184), (176, 704)], [(200, 352), (72, 8)]])
def test_what_the_kernel_for_hopper_is_asked_for(emulated, sizes):
    pairs = [pair(4096 + 100 * i, m, n) for i, (m, n) in enumerate(sizes)]
    for found, given in zip(weight_gradients(*pairs), pairs, strict=True):
        assert relative(found, exact(*given)) < 1e-6
    assert len(emulated.launches) == 1
    assert PROGRAMS // 2 < emulated.launches[0] <= PROGRAMS


@pytest.mark.filterwarnings("error")
def test_rows_may_be_parts_of_longer_ones(emulated):
    a, b = pair(5000, 96, 48)
    given = a[:, 8:72], b[:, :40]
    for found in weight_gradients(given, given):
        assert relative(found, exact(*given)) < 1e-6
    assert len(emulated.launches) == 1


@pytest.mark.filterwarnings("error")
def test_what_the_kernel_for_hopper_does_not_take(emulated):
    a, b = pair(4200, 96, 48)
    unsuited = [
        (a[:, 1:65], b), (a, b[:, :44]), (a[:4000], b[:4000]), (a.half(), b),
        (a.float(), b.float()),
        (a.t().contiguous().t(), b), (torch.ones(5000, 400, device=DEVICE, dtype=HALF),) * 2,
    ]  # fmt: skip
    for given in unsuited:
        assert not gradients._suits(given)
        if given[0].dtype == given[1].dtype:
            both = weight_gradients(given, (a, b))
            assert relative(both[0], exact(*given)) < library_bound(given[0])
            assert relative(both[1], exact(a, b)) < library_bound(a)
    assert not emulated.launches


def test_without_the_kernel_for_hopper_the_library_runs(emulated, monkeypatch):
    from fst.kernels import weight_gradients_hopper as module

    def fails(*_):
        raise AttributeError("no such name")

    monkeypatch.setattr(module, "weight_gradients_gluon_kernel", SimpleNamespace(__getitem__=fails))
    given = pair(4200, 96, 48)
    with pytest.warns(UserWarning, match="the weight gradients kernels for Hopper do not work"):
        found = weight_gradients(given, given)[0]
    assert relative(found, exact(*given)) < library_bound(given[0])
    assert torch.equal(weight_gradients(given, given)[0], found)
