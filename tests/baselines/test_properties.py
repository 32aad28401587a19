"""What the baselines may and may not depend on."""

import dataclasses

import pytest
import torch

from fst import Observations
from fst.base import build_model as build
from fst.baselines import FNOConfig, PerceiverIOConfig, TransolverConfig, transolver
from fst.data.samples import boundary_observation_indices, index_coordinates, subset_indices
from fst.operators import CHUNK_NUMBERS
from small_baselines import (
    GRID,
    SMALL,
    SMALL_ON_GRID,
    grid_queries,
    heat_solutions,
    observe_boundary,
    observe_everywhere,
    stirred_baseline,
)


def prepared(name: str):
    if "fno" in name:
        pytest.importorskip("neuralop")
    config = {**SMALL, **SMALL_ON_GRID}[name]
    model = stirred_baseline(config)
    return model if "fno" in name else model.double()  # neuraloperator's weights are complex64


def dtype_of(model: torch.nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


@pytest.mark.parametrize("name", SMALL)
def test_each_model_sees_the_observed_numbers_and_no_others(name):
    """The derivative by the whole solution is zero exactly where nothing was observed."""
    model = prepared(name)
    dtype = dtype_of(model)
    solutions = heat_solutions(2, GRID).to(dtype).requires_grad_()
    prediction = model(observe_boundary(solutions))(grid_queries(2, GRID).to(dtype))
    (prediction * torch.randn_like(prediction)).sum().backward()
    observed = torch.zeros(GRID, dtype=torch.bool)
    observed[boundary_observation_indices(*GRID).unbind(dim=1)] = True
    assert bool((solutions.grad[:, ~observed] == 0).all())
    # A ReLU network may ignore a number by chance, but not most of them.
    assert (solutions.grad[:, observed] != 0).double().mean() > 0.9


@pytest.mark.parametrize("name", SMALL)
def test_an_unobserved_value_changes_no_output(name):
    model = prepared(name)
    dtype = dtype_of(model)
    solutions = heat_solutions(2, GRID).to(dtype)
    queries = grid_queries(2, GRID).to(dtype)
    before = model(observe_boundary(solutions))(queries)
    solutions[:, 4, 7] += 10.0
    assert torch.equal(model(observe_boundary(solutions))(queries), before)
    solutions[:, 0, 7] += 10.0
    assert not torch.allclose(model(observe_boundary(solutions))(queries), before)


@pytest.mark.parametrize("name", ["fno", "perceiver-io", "transolver", "grid-transolver"])
def test_the_order_of_observations_does_not_matter(name):
    model = prepared(name)
    dtype = dtype_of(model)
    solutions = torch.randn(2, *GRID, dtype=dtype)
    observe = observe_everywhere if name == "grid-transolver" else observe_boundary
    observations, queries = observe(solutions), grid_queries(2, GRID).to(dtype)
    order = torch.randperm(observations.values.shape[1])
    moved = Observations(observations.positions[:, order], observations.values[:, order])
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(
        model(moved)(queries), model(observations)(queries), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("name", ["fno", "perceiver-io", "transolver"])
@pytest.mark.parametrize("padding", [0.0, float("nan")])
def test_padding_changes_nothing(name, padding):
    model = prepared(name)
    dtype = dtype_of(model)
    observations = observe_boundary(heat_solutions(2, GRID).to(dtype))
    queries = grid_queries(2, GRID).to(dtype)
    extra = torch.full((2, 5, 2), padding, dtype=dtype)
    padded = Observations(
        torch.cat((observations.positions, extra), dim=1),
        torch.cat((observations.values, extra[..., :1]), dim=1),
        mask=torch.arange(observations.values.shape[1] + 5).expand(2, -1)
        < observations.values.shape[1],
    )
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(
        model(padded)(queries), model(observations)(queries), rtol=tolerance, atol=tolerance
    )


def blind_to_coordinates(grid: tuple[int, int], odd_axes: str = "published"):
    """An FNO whose first layer ignores the two coordinate channels the package appends."""
    pytest.importorskip("neuralop")
    model = stirred_baseline(
        FNOConfig(grid=grid, width=8, layers=3, modes=(4, 6), mask_channel=False, odd_axes=odd_axes)
    )
    with torch.no_grad():
        model.network.lifting.fcs[0].weight[:, -2:] = 0
    return model


def on_grid(model: torch.nn.Module, fields: torch.Tensor) -> torch.Tensor:
    grid = tuple(fields.shape[1:])
    return model(observe_everywhere(fields))(grid_queries(len(fields), grid)).reshape(fields.shape)


@pytest.mark.parametrize(
    ("grid", "shift", "odd_axes"),
    # Periodic shifts on both axes. The second grid has an odd number of times, like the paper's,
    # and is shifted in space alone: there neuraloperator 2.0 undoes its shift of the spectrum
    # with the same shift, which is its inverse on an even number of points only.
    [
        ((8, 16), (3, 5), "published"),
        ((9, 16), (0, 5), "published"),
        ((9, 16), (3, 5), "mended"),
        ((9, 15), (3, 5), "mended"),
    ],
)
def test_fno_commutes_with_periodic_shifts(grid, shift, odd_axes):
    """A property of the spectral network: the appended coordinates are given no weight."""
    model = blind_to_coordinates(grid, odd_axes)
    fields = torch.randn(2, *grid)
    shifted = on_grid(model, fields.roll(shift, dims=(1, 2)))
    torch.testing.assert_close(
        shifted, on_grid(model, fields).roll(shift, dims=(1, 2)), rtol=1e-4, atol=1e-4
    )


def test_fno_as_published_does_not_commute_with_shifts_of_an_odd_axis():
    model = blind_to_coordinates((9, 16))
    fields = torch.randn(2, 9, 16)
    shifted = on_grid(model, fields.roll(3, dims=1))
    assert (shifted - on_grid(model, fields).roll(3, dims=1)).abs().max() > 1e-2


@pytest.mark.parametrize("times", [20, 21])
@pytest.mark.parametrize("odd_axes", ["published", "mended"])
def test_which_frequencies_a_spectral_layer_keeps_and_where_they_go(times, odd_axes):
    """With the identity as weights the layer is a filter: waves come back, moved, or do not."""
    network = pytest.importorskip("fst.baselines.neuralop_network")
    config = FNOConfig(grid=(times, 32), width=2, layers=1, modes=(10, 6), odd_axes=odd_axes)
    layer = network.build_network(config).fno_blocks.convs[0]
    with torch.no_grad():
        layer.weight.tensor.copy_(torch.eye(2)[:, :, None, None])
        layer.bias.zero_()
    points, wave = 32, 2
    time, space = torch.arange(times)[:, None] / times, torch.arange(points) / points
    found = {}
    for k in range(-times // 2 + 1, (times + 1) // 2):
        with torch.no_grad():
            given = torch.cos(2 * torch.pi * (k * time + wave * space))
            answer = layer(given.expand(1, 2, -1, -1))
        spectrum = torch.fft.rfftn(answer[0, 0], norm="forward")[:, wave].abs()
        places = (spectrum > 1e-3).nonzero().flatten().tolist()
        found[k] = [place if place < (times + 1) // 2 else place - times for place in places]
    off = 1 if odd_axes == "published" and times % 2 else 0
    assert found == {k: [k - off] if -5 <= k < 5 else [] for k in found}


@pytest.mark.parametrize("odd_axes", ["published", "mended"])
@pytest.mark.parametrize(
    ("grid", "modes"),
    # Odd and even axes, every mode of a grid, one axis and three, the paper's grid.
    [
        ((9, 16), (4, 6)),
        ((9, 9), (9, 9)),
        ((4, 6), (4, 6)),
        ((33,), (8,)),
        ((7, 9, 11), (3, 4, 5)),
        ((201, 1024), (10, 30)),
    ],
)
def test_sums_over_few_modes_are_the_transforms_of_the_package(grid, modes, odd_axes):
    """Values and gradients, against FFTs of the whole grid in float64, and the package's own."""
    network = pytest.importorskip("fst.baselines.neuralop_network")
    mended = odd_axes == "mended"
    kind = network.MendedSpectralConv if mended else network.FewModesSpectralConv
    layer, axes = kind(3, 2, modes), tuple(range(2, 2 + len(grid)))
    fields, factors = torch.randn(2, 3, *grid, requires_grad=True), torch.randn(2, 2, *grid)
    *starts, _ = (n // 2 - m // 2 for n, m in zip(grid, modes, strict=True))
    kept = (..., *(slice(a, a + m) for a, m in zip(starts, modes, strict=False)))
    kept += (slice(modes[-1] // 2 + 1),)

    def whole(x, weight, bias):
        spectrum = torch.fft.rfftn(x, norm="forward", dim=axes)
        if shifted := axes[:-1]:
            spectrum = torch.fft.fftshift(spectrum, dim=shifted)
        answer = spectrum.new_zeros(len(x), 2, *spectrum.shape[2:])
        answer[kept] = torch.einsum("bi...,io...->bo...", spectrum[kept], weight)
        shift = torch.fft.ifftshift if mended else torch.fft.fftshift
        if shifted:
            answer = shift(answer, dim=shifted)
        return torch.fft.irfftn(answer, s=grid, norm="forward", dim=axes) + bias

    def with_gradients(answer, leaves):
        return answer, *torch.autograd.grad((answer * factors.to(answer.dtype)).sum(), leaves)

    leaves = (fields, layer.weight.tensor, layer.bias)
    found = with_gradients(layer(fields), leaves)
    doubles = fields.double(), layer.weight.tensor.to(torch.complex128), layer.bias.double()
    doubles = tuple(tensor.detach().requires_grad_() for tensor in doubles)
    expected = with_gradients(whole(*doubles), doubles)
    if not mended:
        package = network.SpectralConv.forward(layer, fields)
        torch.testing.assert_close(found[0], package, rtol=1e-5, atol=1e-5)
    for ours, exact in zip(found, expected, strict=True):
        assert (ours - exact).abs().max() < 2e-6 * exact.abs().max()


@pytest.mark.parametrize("grid", [(8, 16), (8, 15), (4, 6)])
def test_mending_changes_nothing_on_an_even_axis(grid):
    """The last axis is never shifted, so it may have any number of points."""
    published = blind_to_coordinates(grid)
    mended = build(dataclasses.replace(published.config, odd_axes="mended"))
    mended.load_state_dict(published.state_dict())
    fields = torch.randn(2, *grid)
    torch.testing.assert_close(on_grid(mended, fields), on_grid(published, fields))


def test_fno_does_not_commute_with_shifts_once_it_sees_coordinates():
    """As it is trained: the package's default embedding tells it where it is."""
    model = blind_to_coordinates((8, 16))
    with torch.no_grad():
        model.network.lifting.fcs[0].weight[:, -2:] = 1
    fields = torch.randn(2, 8, 16)
    shifted = on_grid(model, fields.roll(5, dims=2))
    assert (shifted - on_grid(model, fields).roll(5, dims=2)).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["perceiver-io", "deeponet"])
def test_queries_do_not_see_each_other(name, monkeypatch):
    """Asked alone, in chunks or all at once, the answers are the same."""
    model = prepared(name)
    observations = observe_boundary(heat_solutions(2, GRID).double())
    queries = torch.rand(2, 13, 2, dtype=torch.float64)
    output = model(observations)
    together = output(queries)
    monkeypatch.setitem(CHUNK_NUMBERS, "cpu", 5 * 2 * output.numbers_per_query)
    asked = []
    decode = type(output).decode
    monkeypatch.setattr(
        type(output), "decode", lambda self, q: asked.append(q.shape[1]) or decode(self, q)
    )
    torch.testing.assert_close(output(queries), together, rtol=1e-12, atol=1e-12)
    assert asked == [5, 5, 3]


@pytest.mark.parametrize("name", ["fno", "grid-fno", "grid-transolver"])
def test_a_coarser_grid_is_read_off_by_index(name):
    model = prepared(name)
    dtype = dtype_of(model)
    fields = torch.randn(2, *GRID, dtype=dtype)
    observe = observe_boundary if name == "fno" else observe_everywhere
    output = model(observe(fields))
    whole = output(grid_queries(2, GRID).to(dtype)).reshape(2, *GRID)
    rows, columns = subset_indices(GRID[0], 4), subset_indices(GRID[1], 7)
    places = torch.cartesian_prod(rows, columns)
    queries = index_coordinates(places, GRID).to(dtype).expand(2, -1, -1)
    expected = whole[:, rows][:, :, columns].reshape(2, -1, 1)
    assert torch.equal(output(queries), expected)


def test_the_papers_grids_take_the_papers_number_of_groups(monkeypatch):
    model = stirred_baseline(TransolverConfig(width=2, layers=1, heads=1, slices=1))
    output = model(observe_boundary(heat_solutions(1, GRID)))
    sizes: list[int] = []
    seen: list[torch.Tensor] = []

    def decode(self, queries):
        sizes.append(queries.shape[1])
        seen.append(queries)
        return queries.sum(dim=-1, keepdim=True)

    monkeypatch.setattr(transolver.PointSetOutput, "decode", decode)
    for grid, groups in {(32, 32): 1, (64, 64): 2, (128, 128): 7, (201, 1024): 83}.items():
        sizes.clear()
        queries = grid_queries(1, grid)
        assert torch.equal(output(queries), queries.sum(dim=-1, keepdim=True))
        assert len(sizes) == groups
        assert max(sizes) <= 2_500
        assert sum(sizes) == grid[0] * grid[1]
    # A group spans the domain: its mean is that of the whole within the spread of 2,500 points.
    assert (seen[-2].mean(dim=(0, 1)) - 0.5).abs().max() < 0.05


def test_a_group_is_one_point_set():
    """The grouped call is the plain one, group by group, in the seeded order."""
    model = prepared("transolver")
    output = model(observe_boundary(heat_solutions(1, GRID).double()))
    queries = torch.rand(1, 2_600, 2, dtype=torch.float64)
    order = torch.randperm(2_600, generator=torch.Generator().manual_seed(2026091601))
    expected = torch.empty(1, 2_600, 1, dtype=torch.float64)
    for group in (order[:2_500], order[2_500:]):
        expected[:, group] = output.decode(queries[:, group])
    assert torch.equal(output(queries), expected)


@pytest.mark.parametrize("kind", [FNOConfig, PerceiverIOConfig])
def test_viscosity_acts_through_its_standardised_logarithm(kind):
    """ν and the statistics of log ν enter as (log ν - mean) / deviation and in no other way."""
    if kind is FNOConfig:
        pytest.importorskip("neuralop")
        config = FNOConfig(
            grid=GRID, width=8, layers=2, modes=(4, 6), condition_channels=1, log_condition=True
        )
    else:
        config = PerceiverIOConfig(
            width=16, heads=2, latents=8, layers=2, condition_channels=1, log_condition=True
        )
    model = stirred_baseline(config)
    solutions, queries = heat_solutions(2, GRID), grid_queries(2, GRID)
    viscosity = torch.tensor([[0.01], [2.0]])
    model.condition.standardize.set(0.0, 1.0)
    plain = model(observe_boundary(solutions, viscosity))(queries)
    model.condition.standardize.set(torch.tensor(100.0).log(), 1.0)
    scaled = model(observe_boundary(solutions, 100 * viscosity))(queries)
    torch.testing.assert_close(scaled, plain, rtol=1e-4, atol=1e-4)
    other = model(observe_boundary(solutions, 10 * viscosity))(queries)
    assert not torch.allclose(other, plain, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", [*SMALL, *SMALL_ON_GRID])
def test_units_and_domain_are_only_names(name):
    """The same problem in other units of space and of the values has the same answer."""
    if "fno" in name:
        pytest.importorskip("neuralop")
    config = {**SMALL, **SMALL_ON_GRID}[name]
    model = stirred_baseline(config)
    other = type(model)(dataclasses.replace(config, low=(-1.0, 10.0), high=(3.0, 12.0)))
    other.load_state_dict(model.state_dict())
    other.standardize_values.set(2 * 0.3 + 5, 2 * 1.7)
    other.standardize_outputs.set(3 * -0.4 + 1, 3 * 2.5)
    fields, queries = torch.randn(2, *GRID), grid_queries(2, GRID)
    observations = (observe_boundary if name in SMALL else observe_everywhere)(fields)
    moved = Observations(
        other.domain.from_unit(observations.positions), 2 * observations.values + 5
    )
    prediction = other(moved)(other.domain.from_unit(queries))
    torch.testing.assert_close(
        prediction, 3 * model(observations)(queries) + 1, rtol=1e-3, atol=1e-3
    )
