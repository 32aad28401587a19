"""Viscous Burgers on the circle: u_t + (u²/2)_x = (ν/π) u_xx on (0,1), as in PDEBench.

Enters: a count and a seed, or initial values at the cell centres with a viscosity ν and times.
Leaves: initial values (`sample_initial`), or the solution at the cell centres (`solve`).

The solver splits each step as D(Δt/2) A(Δt) D(Δt/2) (Strang). D is diffusion: the discrete
Laplacian exponentiated exactly in Fourier space, so ν does not limit Δt. A is advection in finite
volumes: Koren's third-order limited edge values, Godunov's flux, the three-stage third-order
strong-stability-preserving Runge-Kutta rule. Both factors conserve the mean, and neither lets total
variation grow: D convolves with a positive kernel; A does by Harten's theorem, as an edge value
leaves the cell's own by at most either neighbouring difference and the Courant number stays below
`COURANT`.
"""

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fst.types import check_argument, check_finite, check_tensor

VISCOSITIES = (0.001, 0.002, 0.004, 0.01, 0.02, 0.04, 0.1, 0.2, 0.4, 1.0, 2.0, 4.0)
# Just below Harten's bound of ½, and no round number: were speeds that are round numbers to ask for
# a whole number of substeps, rounding would decide which. `_advance` rounds with the same care.
COURANT = 0.4951
_OFF_TIES = 0.9999

# Below this ν shocks are thinner than a cell of the 1,024-cell grid; the solver then
# divides each cell in three and saves the middle one, whose centre is the cell's. Not so on grids
# too coarse for the shocks even then, where sampling a third of a cell could let the saved
# variation grow. Either way a finer grid never means a coarser computation.
THIN_SHOCKS_BELOW = 0.003
DIVIDED_FROM_CELLS = 256

_DRAWS = 16  # numbers reserved for each sample, of which the initial conditions use 14
# The time between two choices of the frame and the number of substeps, at most.
_LONGEST_WINDOW = 0.05
# Cells advanced together: on a CPU few enough for its cache, on a GPU enough to keep it busy.
_CELLS_CPU = 2**16
_CELLS_GPU = 2**23


def cell_centers(points: int) -> Float[Tensor, " points"]:
    """x_i = (i + ½) / points, float64."""
    return (torch.arange(points, dtype=torch.float64) + 0.5) / points


def saved_times(count: int = 201, final: float = 2.0) -> Float[Tensor, " count"]:
    """`count` equally spaced times from 0 to `final`, float64."""
    return torch.linspace(0, final, count, dtype=torch.float64)


def sample_initial(
    count: int, points: int, seed: int, *, start: int = 0
) -> Float[Tensor, "count points"]:
    """Samples `start` to `start + count` of the initial conditions at the cell centres, float64.

    Four sine modes with random amplitudes and phases. Two draws from {1, 2, 3, 4} choose the wave
    numbers; a mode drawn twice has twice its number, a mode not drawn adds a constant. One sample
    in ten is replaced by its absolute value with a random sign, one in ten is windowed.
    """
    given = (("count", count, 0), ("points", points, 2), ("seed", seed, 0), ("start", start, 0))
    for name, value, least in given:
        check_argument(name, value, int, least)
    draws = _uniform_numbers(count, seed, start)
    amplitude, phase = draws[:, 0:4], 2 * math.pi * draws[:, 4:8]
    modes = torch.arange(1, 5, dtype=torch.float64)
    drawn = (4 * draws[:, 8:10]).floor() + 1  # count 2
    times_drawn = (drawn[:, :, None] == modes).sum(dim=1)
    x = cell_centers(points)
    # Their own period is the distance of the outermost centres: one cell short of the domain.
    wave_number = 2 * math.pi * modes * times_drawn / (x[-1] - x[0])
    sign = torch.where(draws[:, 11:12] < 0.5, 1.0, -1.0)
    left = 0.100 + 0.035 * draws[:, 13:14]

    values = torch.zeros(count, points, dtype=torch.float64)
    for mode in range(4):
        columns = slice(mode, mode + 1)
        angle = wave_number[:, columns] * x + phase[:, columns]
        values += amplitude[:, columns] * angle.sin_()
    absolute = (draws[:, 10] < 0.1).nonzero()[:, 0]
    values[absolute] = values[absolute].abs() * sign[absolute]
    windowed = (draws[:, 12] < 0.1).nonzero()[:, 0]
    rise = torch.tanh((x - left[windowed]) / 0.01)
    fall = torch.tanh((x - left[windowed] - 0.45) / 0.01)
    values[windowed] *= 0.5 * (rise - fall)
    return values


def _uniform_numbers(count: int, seed: int, start: int) -> Float[Tensor, "count draws"]:
    """Uniform in [0, 1): row i of the seed's stream is the same whatever was asked for with it."""
    stream = np.random.Philox(key=seed)
    stream.advance(start * _DRAWS // 4)  # one step of Philox's counter yields four numbers
    raw = stream.random_raw(count * _DRAWS).reshape(count, _DRAWS)
    return torch.from_numpy((raw >> np.uint64(11)) * 2.0**-53)


def solve(
    initial: Float[Tensor, "b n"],
    viscosity: float | Float[Tensor, " b"],
    times: Float[Tensor, " t"],
    *,
    dtype: torch.dtype = torch.float64,
    progress: Callable[[int, int], None] | None = None,
) -> Float[Tensor, "b t n"]:
    """The solution at `times`, from `initial` at time 0; on `initial`'s device, in `dtype`.

    The diffusion coefficient is ν/π with ν the `viscosity`. Each trajectory has its own steps: what
    it is does not depend on the rest of the batch (beyond the rounding of a Fourier transform,
    where the device's library treats rows differently). `progress(done, total)` is called with
    numbers of saved states.
    """
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    viscosities, moments = checked_problem(initial, viscosity, times)
    batch, points = initial.shape
    values = initial.detach().to(dtype)
    solution = torch.empty(batch, len(moments), points, dtype=dtype, device=initial.device)
    total, done = batch * len(moments), 0
    cells = _CELLS_GPU if initial.is_cuda else _CELLS_CPU
    divided = (viscosities < THIN_SHOCKS_BELOW) & (points >= DIVIDED_FROM_CELLS)
    parts = [
        (subcells, part)
        for subcells, chosen in ((1, ~divided), (3, divided))
        for part in chosen.nonzero()[:, 0].split(max(1, cells // (points * subcells)))
        if len(part) > 0
    ]
    # On a CPU the operations are so short that sharing one costs more than it brings.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for subcells, part in parts:
            trajectory = _trajectory(values[part], viscosities[part], moments, subcells)
            for number, state in enumerate(trajectory):
                solution[part, number] = state
                done += len(part)
                if progress is not None:
                    progress(done, total)
    finally:
        torch.set_num_threads(threads)
    return solution


def checked_problem(
    initial: Tensor, viscosity: float | Tensor, times: Tensor
) -> tuple[Float[Tensor, " b"], list[float]]:
    """The viscosities, one a row, and the times, in float64; raises on what cannot be solved."""
    for name, value, shape in (("initial", initial, "b n"), ("times", times, "t")):
        check_tensor(name, value, shape)
        check_finite(name, value)
    if initial.shape[1] < 2:
        raise ValueError(f"initial must be (b n) with n at least 2, got {tuple(initial.shape)}")
    moments = times.tolist()
    if not moments or moments[0] < 0 or any(a >= b for a, b in pairwise(moments)):
        raise ValueError(f"times must be some that increase from at least 0, got {moments!s:.80}")
    if not isinstance(viscosity, Tensor):
        check_argument("viscosity", viscosity, float)
    viscosities = torch.as_tensor(viscosity, dtype=torch.float64, device=initial.device)
    if viscosities.ndim > 1 or viscosities.shape not in ((), initial.shape[:1]):
        raise ValueError(
            f"viscosity must be a number or (b,) with b = {len(initial)}, "
            f"got {tuple(viscosities.shape)}"
        )
    if not (viscosities.isfinite() & (viscosities > 0)).all():
        raise ValueError(f"viscosity must be positive and finite, got {viscosity}")
    return viscosities.expand(len(initial)), moments


def _trajectory(
    initial: Float[Tensor, "b n"],
    viscosities: Float[Tensor, " b"],
    moments: list[float],
    subcells: int,
) -> Iterator[Float[Tensor, "b n"]]:
    """The states at `moments`, one after the other."""
    mean = initial.mean(dim=1, keepdim=True)
    values = _subdivided(initial, subcells)
    diffusivity = (viscosities / math.pi)[:, None]
    now = 0.0
    for moment in moments:
        if moment == 0:
            yield initial
            continue
        windows = math.ceil((moment - now) / _LONGEST_WINDOW * (1 - 1e-9))
        for _ in range(windows):
            values = _advance(values, diffusivity, (moment - now) / windows, subcells)
        now = moment
        if subcells == 1:
            yield values
            continue
        # The mean of the finer cells is conserved, the mean of the middle ones only nearly: a cell
        # that holds a shock moves it by about 1e-5. The constant that is missing is added.
        middle = values[:, subcells // 2 :: subcells]
        yield middle + (mean - middle.mean(dim=1, keepdim=True))


def _subdivided(values: Float[Tensor, "b n"], subcells: int) -> Float[Tensor, "b m"]:
    """Means over each cell's `subcells` parts of a monotone parabola with the cell's mean.

    Colella and Woodward's: total variation does not grow, and extrema are left flat.
    """
    if subcells == 1:
        return values
    following = values.roll(-1, dims=1)
    edge = (7 * (values + following) - values.roll(1, dims=1) - values.roll(-2, dims=1)) / 12
    edge = edge.clamp(torch.minimum(values, following), torch.maximum(values, following))
    right, left = edge - values, values - edge.roll(1, dims=1)
    limit = 2 * torch.minimum(right.abs(), left.abs()) * (right * left > 0)
    right, left = right.clamp(-limit, limit), left.clamp(-limit, limit)
    # With s from -½ to ½ across the cell: u + (right+left) s + 3 (right-left) (s² - 1/12).
    s = torch.linspace(-0.5, 0.5, subcells + 1, dtype=values.dtype, device=values.device)
    linear = (s[1:] + s[:-1]) / 2
    square = (s[1:].square() + s[1:] * s[:-1] + s[:-1].square()) / 3 - 1 / 12
    tilt, bend = (right + left)[..., None], 3 * (right - left)[..., None]
    return (values[..., None] + tilt * linear + bend * square).flatten(start_dim=1)


def _advance(
    values: Float[Tensor, "b m"], diffusivity: Float[Tensor, "b 1"], length: float, subcells: int
) -> Float[Tensor, "b m"]:
    """The state after a window of time.

    Each trajectory is followed in a frame that moves by whole cells near the middle of u's range:
    the slower values are in the frame, the fewer substeps the Courant number asks for. Rows are
    ordered by falling substeps.
    """
    cells = values.shape[1]
    low, high = values.double().aminmax(dim=1)
    cell = subcells / cells  # of the caller's grid
    shift = torch.round((low + high) / 2 * length / cell * _OFF_TIES)
    velocity = shift * cell / length  # of the frame
    fastest = torch.maximum(high - velocity, velocity - low)
    substeps = (fastest * length * cells / COURANT).ceil().clamp_min(1).long()
    substeps, order = substeps.sort(descending=True, stable=True)
    velocity = velocity[order, None].to(values.dtype)
    duration = length / substeps[:, None]  # of one substep
    counts = np.asarray(substeps.tolist())  # the window's only wait for the device
    # How many rows take part in each substep, and a last 0.
    active = np.searchsorted(-counts, -np.arange(counts[0] + 1), side="left").tolist()

    ratio = (duration * cells / 2).to(values.dtype)
    half_step = _damping(diffusivity[order] * duration / 2, cells).to(values.dtype)
    step = half_step.square()
    moving = _filtered(values[order] - velocity, half_step)
    # A GPU's transforms are planned for each number of rows: few numbers, at the price of some rows
    # that are advanced in vain.
    grain = max(1, len(values) // 32)
    for now, after in pairwise(active):
        rows = min(len(values), -(-now // grain) * grain)
        advected = _advected(moving[:rows], ratio[:rows])
        # Two half steps of diffusion that meet are one whole step, save in rows that end here.
        factors = torch.cat([step[:after], half_step[after:rows]])
        moving[:now] = _filtered(advected, factors)[:now]
    moving += velocity

    travelled = (shift * subcells).long()  # whole fine cells
    column = torch.arange(cells, device=values.device) - travelled[:, None]
    return moving[order.argsort()[:, None], column.remainder_(cells)]


def _damping(duration: Float[Tensor, "b 1"], cells: int) -> Float[Tensor, "b k"]:
    """exp(-λ_k τ), λ_k the eigenvalues of minus the second difference quotient.

    Their kernel is positive, which the truncated symbol (2πk)² would not give.
    """
    k = torch.arange(cells // 2 + 1, dtype=duration.dtype, device=duration.device)
    eigenvalues = (2 * cells * torch.sin(k * (math.pi / cells))).square()
    return torch.exp(-eigenvalues * duration)


def _filtered(values: Float[Tensor, "b m"], factors: Float[Tensor, "b k"]) -> Float[Tensor, "b m"]:
    spectrum = torch.fft.rfft(values)
    torch.view_as_real(spectrum).mul_(factors[..., None])
    refined: Tensor = torch.fft.irfft(spectrum, n=values.shape[1])
    return refined


def _advected(values: Float[Tensor, "b m"], ratio: Float[Tensor, "b 1"]) -> Float[Tensor, "b m"]:
    """One step of u_t + (u²/2)_x = 0; `ratio` is Δt / 2Δx."""
    stage = _euler(values, ratio)
    stage = torch.lerp(values, _euler(stage, ratio), 1 / 4)
    return torch.lerp(values, _euler(stage, ratio), 2 / 3)


def _euler(values: Float[Tensor, "b m"], ratio: Float[Tensor, "b 1"]) -> Float[Tensor, "b m"]:
    padded = torch.cat([values[:, -2:], values, values[:, :2]], dim=1)
    difference = padded[:, 1:] - padded[:, :-1]
    before, after = difference[:, :-1], difference[:, 1:]  # of cells -1 to m
    # The edge may leave the cell's value by at most either difference, and by 0 at an extremum.
    upper = torch.minimum(before, after).clamp_min_(0)
    lower = torch.maximum(before, after).clamp_max_(0)
    rise = torch.add(after, before, alpha=0.5)[:, :-1].mul_(1 / 3)
    left_state = rise.clamp_(lower[:, :-1], upper[:, :-1]).add_(padded[:, 1:-2])
    fall = torch.add(before, after, alpha=0.5)[:, 1:].mul_(1 / 3)
    minus_right_state = fall.clamp_(lower[:, 1:], upper[:, 1:]).sub_(padded[:, 2:-1])
    # Godunov's flux of u²/2 is max(left, -right, 0)²/2.
    flux = torch.maximum(left_state, minus_right_state).clamp_min_(0)
    flux.mul_(flux)
    return torch.addcmul(values, ratio, flux[:, :-1] - flux[:, 1:])
