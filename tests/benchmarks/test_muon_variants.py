"""Variants of Muon, against their definitions in float64."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fst.training.optimizer import Orthogonalizer, stacked

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
SHAPES = [(24, 16), (16, 24), (16, 16), (40, 24)]


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    sys.modules.pop("muon_variants", None)
    import muon_variants

    return muon_variants


def build(kind: type[Orthogonalizer]) -> Orthogonalizer:
    return kind(SHAPES, stacked(SHAPES, 10**9, 16), torch.device("cpu"))


def vector(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(rows * columns for rows, columns in SHAPES), generator=generator)


def matrices(flat: torch.Tensor) -> list[torch.Tensor]:
    parts = flat.split([rows * columns for rows, columns in SHAPES])
    return [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def test_without_a_variant_it_is_muon(variants):
    plain, same = build(Orthogonalizer), build(variants.variant(None, False))
    assert torch.equal(plain(vector(0)), same(vector(0)))


def test_polar_express_brings_singular_values_nearer_to_one(variants):
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.linalg.qr(torch.randn(16, 16, generator=generator))[0] for _ in range(2))
    badly_conditioned = left @ torch.logspace(-2.5, 0, 16).diag() @ right
    found = torch.linalg.svdvals(variants.polar_express(badly_conditioned[None])[0].float())
    assert found.min() > 0.8
    assert found.max() < 1.2


def test_rows_are_divided_by_their_running_size_and_the_whole_keeps_its_own(variants):
    beta = 0.9
    plain, scaled = build(Orthogonalizer), build(variants.variant(beta, False))
    means = [torch.zeros(rows, 1, dtype=torch.float64) for rows, _ in SHAPES]
    for step in range(1, 4):
        given = vector(step)
        given[: 24 * 16 // 2] *= 0  # half of a matrix without a gradient stays where it is
        updates = zip(matrices(plain(given)), matrices(scaled(given)), means, strict=True)
        for update, found, mean in updates:
            update = update.double()
            mean.lerp_(update.square().mean(dim=1, keepdim=True), 1 - beta)
            expected = update / (mean / (1 - beta**step) + 1e-10).sqrt()
            expected *= update.norm() / expected.norm()
            torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)
