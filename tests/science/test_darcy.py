"""The Darcy law and solver against mathematics: exact solutions, orders, symmetries, bounds."""

import math
from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg
import torch
from torch import Tensor

from fst.data import darcy
from fst.data.darcy import divergence_form, inverse_laplacian, iteration_bound


def mesh(nodes: int) -> tuple[Tensor, Tensor]:
    axis = torch.linspace(0, 1, nodes, dtype=torch.float64)
    return torch.meshgrid(axis, axis, indexing="ij")


def rough_coefficient(count: int, nodes: int, seed: int = 0) -> Tensor:
    """0.36 or 0.02 by a coin at every node: as rough as a two-valued coefficient can be."""
    generator = torch.Generator().manual_seed(seed)
    coin = torch.rand(count, nodes, nodes, generator=generator, dtype=torch.float64) < 0.5
    return 0.02 + 0.34 * coin.double()


def relative_error(result: Tensor, expected: Tensor) -> float:
    return ((result - expected).norm() / expected.norm()).item()


# --- the solver against exact solutions ------------------------------------------------------


def manufactured_error(nodes: int) -> float:
    """u = sin(πx) sin(2πy) with a = exp(xy), so that ∇a = a (y, x)."""
    x, y = mesh(nodes)
    a = torch.exp(x * y)
    u = torch.sin(math.pi * x) * torch.sin(2 * math.pi * y)
    u_x = math.pi * torch.cos(math.pi * x) * torch.sin(2 * math.pi * y)
    u_y = 2 * math.pi * torch.sin(math.pi * x) * torch.cos(2 * math.pi * y)
    source = -a * (y * u_x + x * u_y - 5 * math.pi**2 * u)
    return (darcy.solve(a[None], source=source[None])[0] - u).abs().max().item()


def test_smooth_solution_converges_at_second_order():
    errors = [manufactured_error(intervals + 1) for intervals in (24, 48, 96)]
    orders = [math.log2(coarse / fine) for coarse, fine in pairwise(errors)]
    assert orders == pytest.approx([2, 2], abs=0.05)
    assert errors[-1] < 1e-3


def layered_solution(nodes: int, left: float, right: float) -> Tensor:
    """The exact u for source 1 and a = `left` at x < 1/2, `right` beyond.

    u = y(1−y)/2a + Σ_n f_n h_n(x) sin(μ_n y), μ_n = nπ, n odd, f_n = 4/μ_n: on either side h_n is
    a sum of exponentials that makes u zero at the ends, and u and a ∂u/∂x continuous between.
    """
    mu = np.pi * np.arange(1, 1600, 2)
    far = np.exp(-mu / 2)
    zero, one = np.zeros_like(mu), np.ones_like(mu)
    # Unknowns: e^(−μx), e^(−μ(½−x)) on the left, e^(−μ(x−½)), e^(−μ(1−x)) on the right.
    system = np.stack(
        [
            np.stack([one, far, zero, zero], -1),
            np.stack([zero, zero, far, one], -1),
            np.stack([far, one, -one, -far], -1),
            np.stack([-left * far, left * one, right * one, -right * far], -1),
        ],
        axis=1,
    )
    particular = 4 / mu**3
    jump = particular * (1 / right - 1 / left)
    right_side = np.stack([-particular / left, -particular / right, jump, zero], -1)
    weights = np.linalg.solve(system, right_side[..., None])[..., 0]
    axis = np.linspace(0, 1, nodes)
    on_left = axis[:, None] < 0.5
    start = np.where(on_left, axis[:, None], axis[:, None] - 0.5)
    near, distant = np.exp(-mu * start), np.exp(-mu * (0.5 - start))
    profile = np.where(
        on_left,
        weights[:, 0] * near + weights[:, 1] * distant,
        weights[:, 2] * near + weights[:, 3] * distant,
    )
    series = profile @ np.sin(mu[:, None] * axis)
    parabola = axis * (1 - axis) / (2 * np.where(on_left, left, right))
    return torch.from_numpy(parabola + series)


def test_layered_medium_converges_at_second_order():
    errors = []
    for nodes in (32, 64, 128):  # even: the jump at 1/2 falls between two nodes
        x, _ = mesh(nodes)
        a = 0.02 + 0.34 * (x < 0.5).double()
        exact = layered_solution(nodes, 0.36, 0.02)
        assert exact[1:-1, [0, -1]].abs().max() < 1e-9  # the oracle meets its boundary condition
        errors.append(relative_error(darcy.solve(a[None])[0], exact))
    assert errors[-1] < 2e-4
    assert errors[0] / errors[1] == pytest.approx(4, abs=0.4)
    assert errors[1] / errors[2] == pytest.approx(4, abs=0.4)


def sparse_matrix(coefficient: np.ndarray) -> scipy.sparse.csc_array:
    """The five-point scheme assembled from node pairs, apart from the package's own operator."""
    nodes = len(coefficient)
    number = np.arange(nodes**2).reshape(nodes, nodes)
    first = np.concatenate([number[:-1].ravel(), number[:, :-1].ravel()])
    second = np.concatenate([number[1:].ravel(), number[:, 1:].ravel()])
    flat = coefficient.ravel()
    conductance = 2 / (1 / flat[first] + 1 / flat[second]) * (nodes - 1) ** 2
    rows = np.concatenate([first, second, first, second])
    columns = np.concatenate([second, first, first, second])
    values = np.concatenate([-conductance, -conductance, conductance, conductance])
    matrix = scipy.sparse.csc_array((values, (rows, columns)), shape=(nodes**2, nodes**2))
    interior = number[1:-1, 1:-1].ravel()
    return matrix[interior][:, interior]


@pytest.mark.parametrize("nodes", [3, 4, 20, 65, 100])
def test_agrees_with_a_sparse_direct_solve(nodes):
    coefficient = torch.cat([darcy.sample_coefficient(1, nodes, 3), rough_coefficient(1, nodes)])
    result, report = darcy.solve_with_report(coefficient)
    assert report.residual.max() <= 1e-8
    for a, u in zip(coefficient.numpy(), result, strict=True):
        matrix = sparse_matrix(a)
        ones = np.ones(matrix.shape[0])
        direct = scipy.sparse.linalg.spsolve(matrix, ones)
        assert relative_error(u[1:-1, 1:-1].flatten(), torch.from_numpy(direct)) < 1e-7
        own = matrix @ u[1:-1, 1:-1].flatten().numpy()
        assert np.linalg.norm(own - ones) <= 1.01e-8 * np.linalg.norm(ones)


# --- what every solution obeys ---------------------------------------------------------------


def test_the_eight_symmetries_of_the_square():
    a = darcy.sample_coefficient(2, 50, 1)
    u = darcy.solve(a)
    for turns in range(4):
        for flip in (False, True):
            turned_a, turned_u = a.rot90(turns, (1, 2)), u.rot90(turns, (1, 2))
            if flip:
                turned_a, turned_u = turned_a.mT, turned_u.mT
            assert relative_error(darcy.solve(turned_a), turned_u) < 1e-11


def test_solution_is_zero_on_the_boundary_and_positive_inside():
    u = darcy.solve(torch.cat([darcy.sample_coefficient(3, 48, 2), rough_coefficient(3, 48)]))
    inside = u[:, 1:-1, 1:-1]
    assert inside.min() > 0
    assert torch.equal(u, torch.nn.functional.pad(inside, (1, 1, 1, 1)))


def test_a_source_in_one_place_peaks_there():
    """Maximum principle: where the source is zero the solution has no interior maximum."""
    source = torch.zeros(1, 41, 41, dtype=torch.float64)
    source[0, 7, 30] = 1
    u = darcy.solve(darcy.sample_coefficient(1, 41, 5), source=source)
    assert u.argmax() == source.argmax()
    assert u[:, 1:-1, 1:-1].min() > 0


def test_what_is_produced_leaves_through_the_boundary():
    a = darcy.sample_coefficient(3, 40, 6)
    u = darcy.solve(a)
    flow = torch.zeros(3, dtype=torch.float64)
    for turns in range(4):
        side_a, side_u = a.rot90(turns, (1, 2)), u.rot90(turns, (1, 2))
        face = 2 / (1 / side_a[:, 0, 1:-1] + 1 / side_a[:, 1, 1:-1])
        flow += (face * side_u[:, 1, 1:-1]).sum(dim=1)
    assert flow == pytest.approx(torch.full((3,), 38**2 / 39**2, dtype=torch.float64), rel=1e-7)


def test_a_larger_coefficient_anywhere_lowers_the_mean():
    """∫u is the minimum of an energy that falls as a rises (the mean is a compliance)."""
    a = darcy.sample_coefficient(1, 33, 7)
    raised = a.clone()
    raised[:, 8:20, 8:20] = 0.36
    assert (raised - a).sum() > 0
    assert darcy.solve(raised).mean() < darcy.solve(a).mean()


def test_linear_in_the_source_and_inverse_in_the_coefficient():
    a = darcy.sample_coefficient(2, 30, 8)
    u = darcy.solve(a)
    assert relative_error(darcy.solve(a, source=-3.0), -3 * u) < 1e-12
    assert relative_error(darcy.solve(5 * a), u / 5) < 1e-12
    assert darcy.solve(a, source=0.0).abs().max() == 0


# --- conjugate gradients ---------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [3, 4, 30, 65])
def test_preconditioner_inverts_the_laplacian(nodes):
    ones = torch.ones(1, nodes, nodes, dtype=torch.float64)
    field = torch.randn(2, nodes - 2, nodes - 2, dtype=torch.float64)
    laplacian, inverse = divergence_form(ones), inverse_laplacian(nodes, field.device)
    assert relative_error(inverse(laplacian(field)), field) < 1e-12
    _, report = darcy.solve_with_report(0.02 * ones)
    assert report.iterations.tolist() == [1]


def test_iterations_do_not_grow_with_resolution():
    means = []
    for nodes in (64, 128, 256):
        _, report = darcy.solve_with_report(darcy.sample_coefficient(4, nodes, 0))
        assert report.residual.max() <= 1e-8
        assert report.iterations.max() <= iteration_bound(0.36 / 0.02, nodes, 1e-8)
        means.append(report.iterations.double().mean().item())
    assert max(means) - min(means) <= 2


@pytest.mark.parametrize("contrast", [2.0, 18.0, 1000.0])
def test_iterations_stay_within_the_theoretical_bound(contrast):
    nodes = 40
    high = rough_coefficient(4, nodes, seed=1) > 0.1
    coefficient = torch.where(high, contrast, 1.0).double()
    source = torch.randn(4, nodes, nodes, dtype=torch.float64)
    _, report = darcy.solve_with_report(coefficient, source=source)
    assert report.iterations.max() <= iteration_bound(contrast, nodes, 1e-8)


def test_a_batch_does_not_alter_its_members():
    """One member takes a single iteration, one is zero: both must stay put while others go on."""
    a = torch.cat([darcy.sample_coefficient(3, 45, 9), torch.ones(2, 45, 45, dtype=torch.float64)])
    source = torch.ones_like(a)
    source[4] = 0
    together, report = darcy.solve_with_report(a, source=source)
    assert report.iterations[3:].tolist() == [1, 0]
    for index in range(len(a)):
        chosen = slice(index, index + 1)
        alone, own_report = darcy.solve_with_report(a[chosen], source=source[chosen])
        assert own_report.iterations[0] == report.iterations[index]
        torch.testing.assert_close(together[chosen], alone, rtol=1e-12, atol=1e-14)


def test_out_of_reach_is_an_error_that_names_the_residual():
    a = torch.where(rough_coefficient(1, 33) > 0.1, 1e6, 1e-6).double()
    expected = r"relative residual of .* contrast \(max/min\) is 1.0e\+12"
    with pytest.raises(ValueError, match=expected):
        darcy.solve(a, max_iterations=50)
    with pytest.raises(ValueError, match=r"relative residual of .*e-1"):
        darcy.solve(darcy.sample_coefficient(1, 33, 0), tolerance=1e-18, max_iterations=100)


def test_float32_input_is_solved_in_float64():
    a = darcy.sample_coefficient(1, 33, 0).float()
    u, report = darcy.solve_with_report(a)
    assert u.dtype == torch.float64
    assert report.residual.max() <= 1e-8


@pytest.mark.parametrize(
    ("coefficient", "message"),
    [
        (torch.ones(4, 4), r"shape \(b, k, k\) .* got \(4, 4\)"),
        (torch.ones(1, 4, 5), r"got \(1, 4, 5\)"),
        (torch.ones(1, 2, 2), "k at least 3"),
        (torch.ones(1, 4, 4, dtype=torch.bool), "floating point, got torch.bool"),
        (torch.full((1, 4, 4), torch.nan), "finite and positive"),
        (torch.full((1, 4, 4), torch.inf), "finite and positive"),
        (torch.zeros(1, 4, 4), "finite and positive"),
    ],
)
def test_bad_coefficients_are_refused(coefficient, message):
    with pytest.raises(ValueError, match=message):
        darcy.check_coefficient(coefficient)


def test_bad_arguments_of_solve_are_refused():
    a = torch.ones(1, 4, 4)
    for argument, values in (
        ("coefficient", {"coefficient": -a}),
        ("tolerance", {"tolerance": 0.0}),
        ("source", {"source": torch.ones(1, 5, 5)}),
        ("source", {"source": math.nan}),
    ):
        with pytest.raises(ValueError, match=argument):
            darcy.solve(**{"coefficient": a, **values})


# --- the law of the coefficient --------------------------------------------------------------


def test_field_is_the_stated_cosine_sum():
    nodes, index = 20, 2
    draws = np.random.default_rng((11, index)).standard_normal((darcy.MODES, darcy.MODES))
    wave_numbers = np.arange(darcy.MODES)
    squares = wave_numbers[:, None] ** 2 + wave_numbers**2
    normalised = np.where(wave_numbers == 0, 1, np.sqrt(2)) * np.cos(
        np.pi * wave_numbers * np.linspace(0, 1, nodes)[:, None]
    )
    draws[0, 0] = 0
    expected = normalised @ (draws * (np.pi**2 * squares + 100.0) ** -1.5) @ normalised.T
    field = darcy.sample_field(3, nodes, 11)[index]
    assert relative_error(field, torch.from_numpy(expected)) < 1e-12


def test_modes_left_out_carry_no_variance():
    wave_numbers = np.arange(2048.0)
    weight = np.where(wave_numbers == 0, 1.0, 2.0)
    squares = wave_numbers[:, None] ** 2 + wave_numbers**2
    variance = weight[:, None] * weight * (np.pi**2 * squares + 100) ** -3
    variance[0, 0] = 0
    kept = darcy.mode_amplitudes().square().sum().item()
    kept_square = variance[: darcy.MODES, : darcy.MODES].sum()
    assert kept == pytest.approx(kept_square, rel=1e-12)
    # Beyond the table: four times the integral of (πr)^(−6) over the quarter plane r > 2047.
    beyond = 4 * (np.pi / 2) / (4 * np.pi**6 * 2047.0**4)
    assert (variance.sum() - kept_square + beyond) / kept_square < 1e-7


def test_field_has_the_stated_covariance():
    count, nodes = 500, 9
    field = darcy.sample_field(count, nodes, 12).flatten(1)
    empirical = field.T @ field / count
    wave_numbers = torch.arange(darcy.MODES, dtype=torch.float64)
    axis = torch.linspace(0, 1, nodes, dtype=torch.float64)
    cosines = torch.cos(math.pi * axis[:, None] * wave_numbers)
    basis = torch.einsum("ip,jq->ijpq", cosines, cosines) * darcy.mode_amplitudes()
    exact = torch.einsum("ijpq,klpq->ijkl", basis, basis).flatten(2).flatten(0, 1)
    variance = exact.diagonal()
    spread = ((variance[:, None] * variance + exact.square()) / count).sqrt()
    standardized = (empirical - exact) / spread
    assert standardized.abs().max() < 5
    assert standardized.square().mean() == pytest.approx(1, abs=0.3)


def test_neighbours_on_the_16_grid_differ_as_in_the_published_data():
    """For a centred Gaussian field P(signs differ) = arccos(correlation)/π: no sampling needed."""
    wave_numbers = torch.arange(darcy.MODES, dtype=torch.float64)
    axis = (1 + 64 * torch.arange(16, dtype=torch.float64)) / 1024
    cosines = torch.cos(math.pi * axis[:, None] * wave_numbers)
    squares = darcy.mode_amplitudes().square()
    variance = cosines.square() @ squares @ cosines.square().T
    covariance = (cosines[1:] * cosines[:-1]) @ squares @ cosines.square().T
    correlation = covariance / (variance[1:] * variance[:-1]).sqrt()
    assert (correlation.arccos() / math.pi).mean().item() == pytest.approx(0.133, abs=0.004)


def test_a_sample_is_one_function_on_every_grid():
    fine = darcy.sample_coefficient(2, 257, 13)
    assert set(fine.unique().tolist()) == {0.02, 0.36}
    for nodes in (129, 65, 5, 3):
        stride = 256 // (nodes - 1)
        coarse = darcy.sample_coefficient(2, nodes, 13)
        assert torch.equal(coarse, fine[:, ::stride, ::stride])


def test_a_sample_depends_on_seed_and_index_alone():
    whole = darcy.sample_coefficient(5, 33, 14)
    parts = [darcy.sample_coefficient(2, 33, 14), darcy.sample_coefficient(3, 33, 14, start=2)]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole, darcy.sample_coefficient(5, 33, 15))


def test_bad_arguments_of_sampling_are_refused():
    for argument, values in (
        ("count", {"count": 0}),
        ("nodes", {"nodes": 1}),
        ("seed", {"seed": -1}),
        ("start", {"start": -1}),
    ):
        with pytest.raises(ValueError, match=f"{argument} must be"):
            darcy.sample_coefficient(**{"count": 1, "nodes": 9, "seed": 0, **values})


# --- the data set ----------------------------------------------------------------------------


def test_subsample_keeps_the_nodes_of_the_original():
    index = torch.arange(1025).expand(1, 1025, 1025)
    kept = darcy.subsample(index, 128)
    assert kept.shape == (1, 128, 128)
    assert kept[0, 0].tolist() == [1 + 8 * j for j in range(128)]
    assert darcy.subsample(index.mT, 16)[0, :, 3].tolist() == [1 + 64 * j for j in range(16)]
    half = index[:, :513, :513]
    assert darcy.subsample(half, 128)[0, 5].tolist() == [1 + 4 * j for j in range(128)]
    for resolution in (100, 0, 1024, 2048):
        with pytest.raises(ValueError, match="resolution must divide the 1024 intervals"):
            darcy.subsample(index, resolution)


def test_generate_is_sample_solve_subsample_in_any_chunks(monkeypatch):
    inputs, solutions = darcy.generate(5, 16, 21, fine=64)
    assert (inputs.dtype, solutions.dtype) == (torch.bool, torch.float32)
    coefficient = darcy.sample_coefficient(5, 65, 21)
    assert torch.equal(inputs, darcy.subsample(darcy.sample_field(5, 65, 21) > 0, 16))
    assert torch.equal(inputs, darcy.subsample(coefficient, 16) > 0.1)
    expected = darcy.subsample(darcy.solve(coefficient), 16).float()
    torch.testing.assert_close(solutions, expected, rtol=1e-6, atol=0)
    monkeypatch.setattr(darcy, "_CHUNK_CPU", 2 * 64**2)
    pieces = [darcy.generate(2, 16, 21, fine=64), darcy.generate(3, 16, 21, start=2, fine=64)]
    chunked_inputs, chunked_solutions = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    assert torch.equal(inputs, chunked_inputs)
    torch.testing.assert_close(solutions, chunked_solutions, rtol=1e-6, atol=0)
