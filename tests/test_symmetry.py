"""Predictions that have a symmetry of the problem exactly, whatever the model has learned."""

from dataclasses import replace

import pytest
import torch

from fst.base import build_model
from fst.baselines import DeepONetConfig, FNOConfig, GridTransolverConfig
from fst.config import FunctionSpaceConfig
from fst.field import Field
from fst.symmetry import SYMMETRIES
from fst.types import Domain, Observations
from small import small_config, small_model

GRID = (5, 8)


def on_grid(batch: int, grid: tuple[int, int] = GRID) -> Observations:
    """Random values at every point of a regular grid."""
    generator = torch.Generator().manual_seed(0)
    axes = [torch.linspace(0, 1, size, dtype=torch.float64) for size in grid]
    points = torch.cartesian_prod(*axes).expand(batch, -1, -1)
    return Observations(
        points, torch.randn(batch, points.shape[1], 1, generator=generator).double()
    )


def anywhere(batch: int) -> Observations:
    generator = torch.Generator().manual_seed(1)
    points = torch.rand(batch, 13, 2, generator=generator, dtype=torch.float64)
    return Observations(points, torch.randn(batch, 13, 1, generator=generator).double())


def asked(batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.rand(batch, 7, 2, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", SYMMETRIES)
@pytest.mark.parametrize("observations", [anywhere(2), on_grid(2, (6, 6))], ids=["points", "grid"])
@pytest.mark.parametrize("neighbors", [None, 3])
def test_the_prediction_for_the_image_is_the_image_of_the_prediction(name, observations, neighbors):
    model, symmetry = small_model(small_config(prediction_symmetry=name)), SYMMETRIES[name]
    queries, domain = asked(2), model.domain
    own = model(observations)(queries, neighbors)
    image = model(symmetry.observations(observations, domain))
    mapped = symmetry.sign * image(symmetry.positions(queries, domain), neighbors)
    torch.testing.assert_close(own, mapped, rtol=1e-12, atol=1e-12)
    plain = small_model(small_config())
    plain.load_state_dict(model.state_dict())
    alone = plain(observations)(queries, neighbors)
    assert (own - alone).abs().max() > 1e-4  # the model alone does not have it


@pytest.mark.parametrize("name", SYMMETRIES)
def test_the_prediction_is_the_mean_of_two_plain_ones(name):
    model, plain = small_model(small_config(prediction_symmetry=name)), small_model(small_config())
    plain.load_state_dict(model.state_dict())
    symmetry, observations, queries = SYMMETRIES[name], anywhere(2), asked(2)
    image = plain(symmetry.observations(observations, plain.domain))
    mapped = symmetry.sign * image(symmetry.positions(queries, plain.domain))
    field = model(observations)
    expected = (plain(observations)(queries) + mapped) / 2
    torch.testing.assert_close(field(queries), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(field.decode(queries), expected, rtol=1e-12, atol=1e-12)
    assert isinstance(field, Field)
    own = plain(observations)
    torch.testing.assert_close(field.anchors.positions, own.anchors.positions)
    torch.testing.assert_close(field.features, own.features)


def test_training_knows_nothing_of_it():
    observations, queries = anywhere(2), asked(2)
    model = small_model(small_config(prediction_symmetry="odd-reflection"))
    plain = small_model(small_config())
    plain.load_state_dict(model.state_dict())
    expected = plain.train()(observations).decode(queries)
    assert torch.equal(model.train()(observations).decode(queries), expected)
    assert not torch.equal(model.eval()(observations).decode(queries), expected)


@pytest.mark.parametrize("name", SYMMETRIES)
def test_each_is_its_own_inverse(name):
    symmetry, domain = SYMMETRIES[name], Domain((0.0, 0.0), (1.0, 1.0))
    for observations in (anywhere(2), on_grid(2, (6, 6))):
        twice = symmetry.observations(symmetry.observations(observations, domain), domain)
        torch.testing.assert_close(twice.positions, observations.positions)
        torch.testing.assert_close(twice.values, observations.values)


def test_on_a_grid_the_values_change_places_and_the_positions_keep_theirs():
    observations, domain = on_grid(2), Domain.unit(2)
    image = SYMMETRIES["odd-reflection"].observations(observations, domain)
    assert torch.equal(image.positions, observations.positions)
    values = observations.values.view(2, *GRID)
    assert torch.equal(image.values.view(2, *GRID), -values.flip(-1))
    order = torch.randperm(observations.positions.shape[1])
    shuffled = Observations(observations.positions[:, order], observations.values[:, order])
    image = SYMMETRIES["odd-reflection"].observations(shuffled, domain)
    assert torch.equal(image.positions, shuffled.positions)
    assert torch.equal(image.values, (-values.flip(-1)).flatten(1)[:, order, None])


def test_padding_stays_padding():
    given = anywhere(2)
    mask = torch.ones(given.values.shape[:2], dtype=torch.bool)
    mask[1, 9:] = False
    filler = replace(given, values=given.values.masked_fill(~mask[..., None], 7.0), mask=mask)
    model = small_model(small_config(prediction_symmetry="odd-reflection"))
    own = model(filler)(asked(2))
    torch.testing.assert_close(own, model(replace(given, mask=mask))(asked(2)))


@pytest.mark.parametrize(
    "config",
    [
        FNOConfig(grid=GRID, width=8, layers=1, modes=(2, 4)),
        GridTransolverConfig(grid=GRID, width=16, heads=2, layers=1, slices=4),
        DeepONetConfig(observations=40, branch=(16, 16), trunk=(16, 16)),
    ],
    ids=lambda config: type(config).__name__,
)
def test_models_with_fixed_sensors_or_a_grid_have_it_too(config):
    torch.manual_seed(0)
    model = build_model(replace(config, prediction_symmetry="odd-reflection")).eval()
    given = on_grid(2)
    symmetry = SYMMETRIES["odd-reflection"]
    observations = Observations(given.positions.float(), given.values.float())
    queries = observations.positions
    own = model(observations)(queries)
    image = model(symmetry.observations(observations, model.domain))
    mapped = -image(symmetry.positions(queries, model.domain))
    torch.testing.assert_close(own, mapped, rtol=1e-4, atol=1e-5)


def test_exchanged_axes_need_the_same_ends():
    with pytest.raises(ValueError, match="'transpose' needs two axes with the same ends"):
        FunctionSpaceConfig(high=(1.0, 2.0), prediction_symmetry="transpose")
    with pytest.raises(ValueError, match="needs two axes"):
        FunctionSpaceConfig(
            low=(0.0,), high=(1.0,), rows=(), adaptive_axis=0, prediction_symmetry="transpose"
        )
    with pytest.raises(TypeError, match="prediction_symmetry must be one of"):
        FunctionSpaceConfig(prediction_symmetry="rotation")


def test_the_last_axis_is_reversed_within_its_own_ends():
    domain = Domain((0.0, -1.0), (2.0, 3.0))
    points = torch.tensor([[[0.5, -1.0], [2.0, 0.0], [1.0, 3.0]]])
    expected = torch.tensor([[[0.5, 3.0], [2.0, 2.0], [1.0, -1.0]]])
    torch.testing.assert_close(SYMMETRIES["even-reflection"].positions(points, domain), expected)


def test_a_mask_of_real_points_and_rounded_positions_change_nothing():
    symmetry, domain = SYMMETRIES["even-reflection"], Domain.unit(2)
    given = on_grid(2, (6, 6))
    expected = symmetry.observations(given, domain)
    assert not torch.equal(expected.values, given.values)
    real = torch.ones(given.values.shape[:2], dtype=torch.bool)
    masked = symmetry.observations(replace(given, mask=real), domain)
    assert torch.equal(masked.positions, given.positions)
    assert torch.equal(masked.values, expected.values)
    noise = 1e-8 * torch.rand(given.positions.shape, generator=torch.Generator().manual_seed(3))
    noisy = symmetry.observations(replace(given, positions=given.positions + noise), domain)
    assert torch.equal(noisy.values, expected.values)


def test_sensors_that_are_not_mapped_to_one_another_are_refused_by_deeponet():
    config = DeepONetConfig(observations=13, branch=(16, 16), trunk=(16, 16))
    model = build_model(replace(config, prediction_symmetry="even-reflection")).eval()
    given = anywhere(1)
    observations = Observations(given.positions.float(), given.values.float())
    with pytest.raises(ValueError, match="must map the observed points to one another"):
        model(observations)
    model.train()(observations)  # training knows no symmetry


def test_exchanged_axes_need_a_square_grid():
    with pytest.raises(ValueError, match=r"as many points on both axes, got the grid \(5, 8\)"):
        FNOConfig(grid=GRID, modes=(2, 4), prediction_symmetry="transpose")
    FNOConfig(grid=(8, 8), modes=(2, 4), prediction_symmetry="transpose")


def test_a_model_with_a_symmetry_can_be_compiled():
    fixed = {"coordinates": "uniform", "length_scales": "fixed", "refinement_steps": 1}
    model = small_model(small_config(prediction_symmetry="odd-reflection", **fixed))
    observations, queries = anywhere(2), asked(2)
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(compiled(observations)(queries), model(observations)(queries))
