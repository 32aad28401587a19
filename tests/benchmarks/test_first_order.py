"""The blend of first order: what it adds to Equation 1, checked against mathematics."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fst.rbf import Blend
from fst.types import Observations
from small import small_config, small_model

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture(scope="module")
def module() -> object:
    sys.path.insert(0, BENCHMARKS)
    yield importlib.import_module("first_order")
    sys.path.remove(BENCHMARKS)


def given() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    points, anchors = (torch.rand(2, n, 2, generator=generator).double() for n in (7, 5))
    scales = 0.1 + torch.rand(2, 5, 2, generator=generator).double()
    return points, anchors, scales, torch.randn(2, 5, 3, generator=generator).double()


def test_without_moments_it_is_equation_1(module: ModuleType) -> None:
    blend = module.FirstOrderBlend(3, 2).double()
    with torch.no_grad():
        blend.join.weight[:, 3:] = 0
    stencil = module.StencilBlend(3, 2).double()
    stencil.join = blend.join
    for neighbors in (None, 2):
        expected = Blend()(*given(), neighbors)
        torch.testing.assert_close(blend(*given(), neighbors), expected)
        torch.testing.assert_close(stencil(*given(), neighbors), expected)


def test_a_stencil_has_the_blends_differences(module: ModuleType) -> None:
    points, anchors, scales, features = given()
    blend = module.StencilBlend(3, 2).double()
    with torch.no_grad():
        blend.join.weight.zero_()
        blend.join.weight[:, 6:] = torch.eye(3)  # the difference along the second axis
    step = torch.stack((torch.zeros(2).double(), scales[..., 1].mean(dim=1)), dim=-1)[:, None]
    after, before = (Blend()(points + s * step, anchors, scales, features) for s in (1, -1))
    torch.testing.assert_close(blend(points, anchors, scales, features), (after - before) / 2)


def test_a_moment_is_the_scaled_derivative_of_the_blend_weights_logarithm(
    module: ModuleType,
) -> None:
    # ∂/∂x_s Σ_j w_j z_j = −Σ_j w_j (ξ_js / ℓ_js) (z_j − z̄): with one scale for all anchors the
    # moments follow from the gradient of the plain blend and from that of a constant.
    points, anchors, _, features = given()
    scales = torch.full_like(anchors, 0.4)
    points.requires_grad_()
    ones = torch.ones_like(features[..., :1])
    blend = module.FirstOrderBlend(3, 2).double()
    with torch.no_grad():
        blend.join.weight.zero_()
        blend.join.weight[:, 3:6] = torch.eye(3)  # the moment along the first axis
    moment = blend(points, anchors, scales, features)
    mean = Blend()(points, anchors, scales, features)
    with torch.no_grad():
        blend.join.weight.zero_()
        blend.join.weight[0, 3] = 1
    of_one = blend(points, anchors, scales, ones.expand(-1, -1, 3))[..., :1]
    for channel in range(3):
        (slope,) = torch.autograd.grad(mean[..., channel].sum(), points, retain_graph=True)
        expected = -(moment[..., channel] - mean[..., channel] * of_one[..., 0]) / 0.4
        torch.testing.assert_close(slope[..., 0], expected)


@pytest.mark.parametrize("kind", ["moments", "stencil"])
def test_a_model_decodes_with_it(module: ModuleType, kind: str) -> None:
    model = small_model(small_config())
    generator = torch.Generator().manual_seed(1)
    points = torch.rand(2, 13, 2, generator=generator).double()
    observations = Observations(points, points[..., :1])
    before = model(observations)(points)
    module.first_order(model.float(), kind)
    model.double()
    field = model(observations)
    assert (field(points) - before).abs().max() > 1e-4
    every = model.anchor_count
    torch.testing.assert_close(field(points, neighbors=every), field(points))
    covered = {id(each) for group in model.param_groups().values() for each in group}
    assert {id(each) for each in model.parameters()} == covered
