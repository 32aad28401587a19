"""Burgers against mathematics: the initial law, closed-form solutions, invariants, symmetries."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fst.data import burgers
from fst.data.cole_hopf import exact_solution, exact_trajectory


def relative_l2(solution: Tensor, exact: Tensor) -> Tensor:
    """One number for each trajectory."""
    difference = (solution - exact).flatten(start_dim=1).norm(dim=1)
    return difference / exact.flatten(start_dim=1).norm(dim=1)


def total_variation(solution: Tensor) -> Tensor:
    return (solution.roll(-1, dims=-1) - solution).abs().sum(dim=-1)


def seconds(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sawtooth(positions: Tensor, time: float, viscosity: float, age: float, drift: float) -> Tensor:
    """The solution that starts from point sources of heat at the whole numbers, `age` before 0.

    With φ = Σ_m exp(-(x-m)² / 4κs), s = t + age: u = -2κ φ_x / φ, a ramp of slope 1/s with a shock
    of height 1/s at each half; `drift` carries it.
    """
    s = time + age
    x = positions - drift * time
    offset = (x - x.round())[:, None] - torch.arange(-20, 21, dtype=torch.float64)
    weights = torch.softmax(-math.pi * offset.square() / (4 * viscosity * s), dim=1)
    return drift + (weights * offset).sum(dim=1) / s


def single_mode(positions: Tensor, time: float, viscosity: float, share: float) -> Tensor:
    """φ = 1 + a cos 2πx with a decaying from `share`: u = -2κ φ_x / φ."""
    kappa = viscosity / math.pi
    a = share * math.exp(-kappa * (2 * math.pi) ** 2 * time)
    angle = 2 * math.pi * positions
    return 4 * math.pi * kappa * a * angle.sin() / (1 + a * angle.cos())


# The law


def test_a_sample_depends_on_the_seed_and_its_number_alone() -> None:
    for points in (64, 37):
        samples = burgers.sample_initial(10, points, seed=3)
        assert torch.equal(samples[:4], burgers.sample_initial(4, points, seed=3))
        assert torch.equal(samples[6:], burgers.sample_initial(4, points, seed=3, start=6))
        others = burgers.sample_initial(10, points, seed=4)
        assert len(torch.cat([samples, others]).unique(dim=0)) == 20


def wave_content(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Power of each wave number 0 to 8 of the law's period, and what they leave unexplained."""
    points = samples.shape[1]
    angle = 2 * math.pi * burgers.cell_centers(points) * points / (points - 1)
    waves = [torch.ones(points, dtype=torch.float64)]
    for k in range(1, 9):
        waves += [torch.sin(k * angle), torch.cos(k * angle)]
    basis = torch.stack(waves, dim=1)
    coefficients = torch.linalg.lstsq(basis, samples.T).solution
    unexplained = (basis @ coefficients - samples.T).abs().amax(dim=0)
    power = torch.cat([coefficients[:1].square(), coefficients[1:].square().view(8, 2, -1).sum(1)])
    return power.T, unexplained


def test_wave_numbers_are_those_drawn_and_doubled_when_drawn_twice() -> None:
    power, unexplained = wave_content(burgers.sample_initial(4000, 128, seed=0))
    present = power[unexplained < 1e-10, 1:] > 1e-14
    # One sample in ten is windowed; of the tenth made absolute, those that change sign show.
    assert 0.81 < len(present) / 4000 < 0.91
    waves = present.sum(dim=1)
    assert set(waves.tolist()) == {1, 2}
    twice = present[waves == 1]
    assert len(twice) / len(present) == pytest.approx(1 / 4, abs=0.03)
    shares = twice.double().mean(dim=0)
    assert shares[[0, 2, 4, 6]].max() == 0
    assert shares[[1, 3, 5, 7]].tolist() == pytest.approx([1 / 4] * 4, abs=0.06)
    assert present[waves == 2][:, 4:].sum() == 0


def test_the_statistics_of_the_law() -> None:
    points = 256
    samples = burgers.sample_initial(10_000, points, seed=0)
    x = burgers.cell_centers(points)
    # Four independent modes of mean square 1/6; the window passes 0.45 of the domain.
    assert samples.std().item() == pytest.approx(math.sqrt(2 / 3 * (0.9 + 0.1 * 0.45)), abs=0.012)
    assert samples.mean().item() == pytest.approx(0, abs=0.03)
    assert 3.0 < samples.max() < 4.0
    assert -4.0 < samples.min() < -3.0
    outside = samples[:, (x < 0.05) | (x > 0.65)].abs().amax(dim=1) < 1e-3
    inside = samples[:, (x > 0.2) & (x < 0.5)].abs().amax(dim=1) > 0.05
    assert (outside & inside).double().mean().item() == pytest.approx(0.1, abs=0.01)
    one_sign = samples[~outside].sign().sum(dim=1).abs() == points
    positive = samples[~outside][one_sign].mean(dim=1) > 0
    assert positive.double().mean().item() == pytest.approx(0.5, abs=0.03)


def test_absolute_samples_have_corners_where_they_touch_zero() -> None:
    samples = burgers.sample_initial(4000, 1024, seed=1)
    bend = samples.diff(n=2).abs().amax(dim=1) * 1024**2
    # The sharpest bend of a smooth sample: wave number 8 with amplitude 1, or all four modes.
    kinked = (bend > 2 * (2 * math.pi * 8) ** 2) & (samples[:, 0].abs() > 1e-3)
    one_sign = samples.sign().sum(dim=1).abs() == 1024
    assert 0.02 < kinked.double().mean() < 0.1
    assert one_sign[kinked].all()


@pytest.mark.parametrize(
    ("count", "points", "seed", "start", "name"),
    [(-1, 8, 0, 0, "count"), (1, 1, 0, 0, "points"), (1, 8, -1, 0, "seed"), (1, 8, 0, -1, "start")],
)
def test_the_law_refuses_what_it_cannot_draw(
    count: int, points: int, seed: int, start: int, name: str
) -> None:
    with pytest.raises(ValueError, match=name):
        burgers.sample_initial(count, points, seed, start=start)


# The exact solution


@pytest.mark.parametrize("drift", [0.0, 0.37, -2.5])
@pytest.mark.parametrize(("viscosity", "age"), [(0.001, 2.0), (0.01, 1.0), (1.0, 0.1)])
def test_exact_solution_of_a_sawtooth(viscosity: float, age: float, drift: float) -> None:
    initial = sawtooth(burgers.cell_centers(2048), 0, viscosity, age, drift)
    positions = torch.rand(100, dtype=torch.float64) * 3 - 1
    times = seconds(0, 1e-3, 0.02, 0.06, 0.12, 0.15, 0.3, 2)
    found = exact_solution(initial[None], viscosity, times, positions)[0]
    expected = [sawtooth(positions, t, viscosity, age, drift) for t in times.tolist()]
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-10)


@pytest.mark.parametrize("points", [64, 65])
@pytest.mark.parametrize("viscosity", [0.001, 0.1, 4.0])
def test_exact_solution_of_a_single_heat_mode(points: int, viscosity: float) -> None:
    initial = single_mode(burgers.cell_centers(points), 0, viscosity, 0.5)
    positions = torch.linspace(0, 1, 33, dtype=torch.float64)
    times = seconds(0, 0.01, 0.3)
    found = exact_solution(initial[None], viscosity, times, positions)[0]
    expected = [single_mode(positions, t, viscosity, 0.5) for t in times.tolist()]
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-12 * (1 + viscosity))


def test_exact_solution_of_a_constant_is_the_constant() -> None:
    found = exact_solution(torch.full((2, 16), 1.25), 0.001, seconds(0, 1e-6, 5), seconds(0, 0.4))
    torch.testing.assert_close(found, torch.full_like(found, 1.25))


def test_exact_solution_refuses_bad_input() -> None:
    initial, times, positions = torch.zeros(1, 8), seconds(1), seconds(0.5)
    for name, arguments in {
        "initial": (initial[0], 0.1, times, positions),
        "viscosity": (initial, 0.0, times, positions),
        "times": (initial, 0.1, -times, positions),
        "positions": (initial, 0.1, times, positions / 0),
    }.items():
        with pytest.raises(ValueError, match=name):
            exact_solution(*arguments)


@pytest.mark.parametrize("drift", [0.0, 0.37, -2.5])
@pytest.mark.parametrize(("viscosity", "age"), [(0.001, 2.0), (0.01, 1.0), (1.0, 0.1)])
def test_exact_trajectory_of_a_sawtooth(viscosity: float, age: float, drift: float) -> None:
    x = burgers.cell_centers(2048)
    times = seconds(0, 0.02, 0.06, 0.12, 0.15, 0.3, 2)
    expected = torch.stack([sawtooth(x, t, viscosity, age, drift) for t in times.tolist()])
    found = exact_trajectory(expected[0], viscosity, times)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("points", [64, 65])
@pytest.mark.parametrize("viscosity", [0.0001, 0.001, 0.1, 4.0])
def test_exact_trajectory_is_the_exact_solution(points: int, viscosity: float) -> None:
    """From few samples, so that there are several nodes to a cell, and fast."""
    x = burgers.cell_centers(points)
    initial = 0.7 + 3 * torch.sin(2 * math.pi * x) + torch.cos(4 * math.pi * x)
    times = seconds(0, 0.02, 0.04, 0.1, 0.11)
    expected = exact_solution(initial[None], viscosity, times, x)[0]
    found = exact_trajectory(initial, viscosity, times)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


def test_exact_trajectory_refuses_times_that_do_not_rise_from_zero() -> None:
    for times in (seconds(0.1, 0.2), seconds(0, 0.2, 0.2)):
        with pytest.raises(ValueError, match="times must rise from 0"):
            exact_trajectory(torch.zeros(8), 0.1, times)


# The solver against exact solutions


@pytest.mark.parametrize(
    ("viscosity", "bound"), [(0.001, 3e-3), (0.01, 1e-3), (0.1, 1e-4), (4.0, 1e-5)]
)
def test_error_of_every_law_sample_at_full_resolution(viscosity: float, bound: float) -> None:
    initial = burgers.sample_initial(4, 1024, seed=0)
    times = burgers.saved_times(11, 1.0)
    exact = exact_solution(initial, viscosity, times, burgers.cell_centers(1024))
    assert relative_l2(burgers.solve(initial, viscosity, times), exact).max() < bound


@pytest.mark.parametrize(
    ("viscosity", "bound"), [(0.001, 3e-3), (0.002, 1e-3), (0.01, 1e-4), (1.0, 1e-5)]
)
def test_error_of_a_drifting_sawtooth(viscosity: float, bound: float) -> None:
    x = burgers.cell_centers(1024)
    times = seconds(0, 0.1, 0.2, 0.4)
    exact = torch.stack([sawtooth(x, t, viscosity, 0.5, -0.3) for t in times.tolist()])[None]
    assert relative_l2(burgers.solve(exact[:, 0], viscosity, times), exact).max() < bound


@pytest.mark.parametrize("viscosity", [0.001, 0.01, 0.1, 1.0])
def test_second_order_on_smooth_data(viscosity: float) -> None:
    times = seconds(0.05, 0.1)
    errors = []
    for points in (256, 512, 1024):
        x = burgers.cell_centers(points)
        initial = 0.2 + torch.sin(2 * math.pi * x) + 0.3 * torch.cos(4 * math.pi * x)
        exact = exact_solution(initial[None], viscosity, times, x)
        errors.append(relative_l2(burgers.solve(initial[None], viscosity, times), exact).item())
    orders = [math.log2(coarse / fine) for coarse, fine in pairwise(errors)]
    assert min(orders) > 1.8, errors


# Invariants


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    points=st.one_of(st.integers(2, 65), st.just(256)),
    viscosity=st.sampled_from([1e-4, 0.001, 0.0029, 0.003, 0.01, 0.1, 4.0]),
    steps=st.booleans(),
    final=st.sampled_from([1e-4, 0.2]),
)
def test_rough_data_keeps_its_mean_range_and_variation(
    seed: int, points: int, viscosity: float, steps: bool, final: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    initial = 3 * torch.randn(3, points, generator=generator, dtype=torch.float64)
    if steps:
        initial = initial.round().clamp(-2, 2)
    solution = burgers.solve(initial, viscosity, burgers.saved_times(9, final))
    mean = initial.mean(dim=1, keepdim=True)
    torch.testing.assert_close(solution.mean(dim=2), mean.expand(3, 9), rtol=0, atol=1e-13)
    variation = total_variation(solution)
    rounding = 1e-12 * (1 + variation[:, :1])
    if viscosity >= burgers.THIN_SHOCKS_BELOW or points < burgers.DIVIDED_FROM_CELLS:
        assert (variation.diff(dim=1) <= rounding).all()
        low, high = initial.aminmax(dim=1)
        assert (solution >= low[:, None, None] - 1e-12).all()
        assert (solution <= high[:, None, None] + 1e-12).all()
    assert (variation <= variation[:, :1] + rounding).all()


@pytest.mark.parametrize("viscosity", [0.001, 0.01])
def test_variation_of_law_samples_falls_from_one_saved_time_to_the_next(viscosity: float) -> None:
    solution = burgers.solve(
        burgers.sample_initial(8, 256, seed=2), viscosity, burgers.saved_times(41, 0.4)
    )
    variation = total_variation(solution)
    assert (variation.diff(dim=1) <= 1e-12 * variation[:, :1]).all()


@pytest.mark.parametrize(("viscosity", "points"), [(0.001, 256), (0.01, 128), (1.0, 128)])
def test_shifts_and_reflection_commute_with_the_solution(viscosity: float, points: int) -> None:
    # Windowed samples are among them: whole numbers of cells travelled, where rounding is tempted.
    initial = burgers.sample_initial(24, points, seed=5)
    times = burgers.saved_times(11, 0.5)
    solution = burgers.solve(initial, viscosity, times)
    shifted = burgers.solve(initial.roll(41, dims=1), viscosity, times)
    torch.testing.assert_close(shifted, solution.roll(41, dims=2), rtol=0, atol=1e-11)
    reflected = burgers.solve(-initial.flip(1), viscosity, times)
    torch.testing.assert_close(reflected, -solution.flip(2), rtol=0, atol=1e-11)


def test_a_moving_frame_changes_nothing() -> None:
    initial = burgers.sample_initial(6, 128, seed=6)
    times = seconds(0, 0.05, 0.1, 0.15)
    drift = 2 / 128 / 0.05  # two cells between saved times
    solution = burgers.solve(initial, 0.01, times)
    drifting = burgers.solve(initial + drift, 0.01, times)
    for step in range(len(times)):
        expected = solution[:, step].roll(2 * step, dims=1) + drift
        torch.testing.assert_close(drifting[:, step], expected, rtol=0, atol=1e-11)


# Batches, steps, types, errors


@pytest.mark.parametrize("viscosity", [0.001, 0.01, 4.0])
def test_a_trajectory_does_not_depend_on_its_batch(viscosity: float) -> None:
    initial = burgers.sample_initial(40, 256, seed=7)
    times = burgers.saved_times(6, 0.1)
    together = burgers.solve(initial, viscosity, times)
    for rows in ([5], [31, 2, 17], list(range(9, 40))):
        assert torch.equal(burgers.solve(initial[rows], viscosity, times), together[rows])


def test_a_trajectory_does_not_depend_on_how_many_advance_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    initial = burgers.sample_initial(150, 64, seed=13)
    times = burgers.saved_times(6, 0.1)
    all_together = burgers.solve(initial, 0.01, times)
    for cells in (1, 64 * 20):
        monkeypatch.setattr(burgers, "_CELLS_CPU", cells)
        assert torch.equal(burgers.solve(initial, 0.01, times), all_together)


def test_each_row_may_have_its_own_viscosity() -> None:
    initial = burgers.sample_initial(4, 256, seed=8)
    times = burgers.saved_times(4, 0.1)
    viscosities = [0.01, 0.001, 4.0, 0.002]
    together = burgers.solve(initial, torch.tensor(viscosities, dtype=torch.float64), times)
    for row, viscosity in enumerate(viscosities):
        alone = burgers.solve(initial[row : row + 1], viscosity, times)
        assert torch.equal(together[row : row + 1], alone)


def test_the_number_of_steps_does_not_grow_with_viscosity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    advected, steps = burgers._advected, {0.01: 0, 1.0: 0, 4.0: 0}
    initial = burgers.sample_initial(8, 128, seed=9)
    for viscosity in steps:

        def counted(values: Tensor, ratio: Tensor, viscosity: float = viscosity) -> Tensor:
            steps[viscosity] += len(values)
            return advected(values, ratio)

        monkeypatch.setattr(burgers, "_advected", counted)
        burgers.solve(initial, viscosity, burgers.saved_times(21, 0.2))
    assert steps[4.0] <= steps[1.0] <= steps[0.01]
    assert steps[4.0] >= 8 * 20


def test_times_may_start_later_and_be_far_apart() -> None:
    initial = burgers.sample_initial(4, 128, seed=10)
    dense = burgers.solve(initial, 0.02, burgers.saved_times(11, 1.0))
    sparse = burgers.solve(initial, 0.02, seconds(0.5, 1.0))
    assert relative_l2(sparse, dense[:, [5, 10]]).max() < 2e-3
    assert torch.equal(dense[:, 0], initial)


def test_float32_is_offered_and_close() -> None:
    initial = burgers.sample_initial(4, 128, seed=11).float()
    times = burgers.saved_times(6, 0.5)
    double = burgers.solve(initial, 0.01, times)
    single = burgers.solve(initial, 0.01, times, dtype=torch.float32)
    assert double.dtype == torch.float64
    assert single.dtype == torch.float32
    assert relative_l2(single.double(), double).max() < 1e-5


def test_progress_reaches_its_total() -> None:
    calls: list[tuple[int, int]] = []
    initial = burgers.sample_initial(3, 256, seed=12)
    viscosities = torch.tensor([0.001, 0.1, 1.0])
    times = burgers.saved_times(5, 0.1)
    burgers.solve(initial, viscosities, times, progress=lambda *call: calls.append(call))
    assert calls[-1] == (15, 15)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


def test_the_number_of_threads_is_left_as_it_was() -> None:
    threads = torch.get_num_threads()

    def stop(done: int, total: int) -> None:
        raise InterruptedError

    torch.set_num_threads(3)
    try:
        burgers.solve(torch.zeros(1, 8), 0.1, seconds(0, 1))
        assert torch.get_num_threads() == 3
        with pytest.raises(InterruptedError):
            burgers.solve(torch.zeros(1, 8), 0.1, seconds(0, 1), progress=stop)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


def test_an_empty_batch_has_an_empty_solution() -> None:
    assert burgers.solve(torch.zeros(0, 8), 0.1, seconds(0, 1)).shape == (0, 2, 8)


def test_the_solver_refuses_bad_input() -> None:
    initial, times = torch.zeros(2, 8), seconds(0, 1)
    nan = torch.full((2, 8), math.nan)
    for error, name, arguments in [
        (ValueError, "initial", (nan, 0.1, times)),
        (ValueError, "initial", (initial[0], 0.1, times)),
        (TypeError, "initial", (initial.long(), 0.1, times)),
        (TypeError, "initial", (initial.tolist(), 0.1, times)),
        (ValueError, "viscosity", (initial, 0.0, times)),
        (ValueError, "viscosity", (initial, -1.0, times)),
        (ValueError, "viscosity", (initial, math.nan, times)),
        (ValueError, "viscosity", (initial, torch.ones(3), times)),
        (ValueError, "viscosity", (initial, torch.ones(2, 1), times)),
        (ValueError, "times", (initial, 0.1, seconds(0, 1, 1))),
        (ValueError, "times", (initial, 0.1, seconds(0, 2, 1))),
        (ValueError, "times", (initial, 0.1, seconds(-1, 1))),
        (ValueError, "times", (initial, 0.1, seconds(0, math.nan))),
        (ValueError, "times", (initial, 0.1, seconds(0, math.inf))),
        (ValueError, "times", (initial, 0.1, seconds())),
        (ValueError, "times", (initial, 0.1, times[None])),
    ]:
        with pytest.raises(error, match=name):
            burgers.solve(*arguments)
    with pytest.raises(TypeError, match="dtype"):
        burgers.solve(initial, 0.1, times, dtype=torch.float16)
