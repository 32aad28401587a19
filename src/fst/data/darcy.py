"""Darcy flow with a two-valued coefficient: −∇·(a∇u) = 1 on [0,1]², u = 0 on the boundary.

The problem of the NeuralOperator data. a = 0.36 where the Gaussian field

    g(x, y) = Σ_{(p,q) ≠ 0} ξ_pq (π²(p² + q²) + τ²)^(−α/2) c_p c_q cos(πpx) cos(πqy)

is positive, else 0.02; ξ_pq are independent standard normal, c_0 = 1, c_p = √2, so g has covariance
(−Δ + τ²)^(−α) with Neumann boundary and without its constant mode. The sum stops before p, q =
`MODES`, which leaves out less than 1e-7 of the variance and makes a sample one function, the same
whatever grid it is drawn on.

Enters: a count, a grid, a seed. Leaves: coefficients on nodes i/N (boundary included), their
solutions, or both on the data set's grid of `resolution` × `resolution` nodes.

Scheme: five points, conservative, second order. The coefficient of the face between two nodes is
the harmonic mean of theirs, so the flux through a jump of a is right. Solver: conjugate gradients
preconditioned by the same scheme with a = 1, which the sine transform inverts exactly. With
m ≤ a ≤ M the preconditioned operator has its spectrum in [m, M] on every grid, so resolution cannot
raise its condition number (`iteration_bound`), and any grid will do.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from fst.types import Device, check_argument

HIGH = 0.36
LOW = 0.02
TAU = 10.0
ALPHA = 3.0
MODES = 256
TOLERANCE = 1e-8
MAX_ITERATIONS = 1000

# Samples × nodes that `generate` holds at once: a solve needs some 20 float64 arrays of that size.
_CHUNK_CPU = 2**19
_CHUNK_GPU = 2**25


class Report(NamedTuple):
    """A solve's price and quality, for each sample."""

    iterations: Int[Tensor, " b"]
    residual: Float[Tensor, " b"]  # ‖f − Au‖₂ / ‖f‖₂ at the interior nodes, from the solution


def sample_field(
    count: int, nodes: int, seed: int, *, start: int = 0, device: Device = "cpu"
) -> Float[Tensor, "count nodes nodes"]:
    """Samples `start` to `start + count` of the Gaussian field g on the nodes i/(nodes−1)."""
    # An axis has two ends.
    given = (("count", count, 1), ("nodes", nodes, 2), ("seed", seed, 0), ("start", start, 0))
    for name, value, least in given:
        check_argument(name, value, int, least)
    draws = np.empty((count, MODES, MODES))
    for row in range(count):
        # One stream a sample: it depends on (seed, index) alone, not on how samples are batched.
        np.random.default_rng((seed, start + row)).standard_normal(out=draws[row])
    modes = torch.from_numpy(draws).to(device) * mode_amplitudes().to(device)
    return _cosine_sum(_cosine_sum(modes, nodes).mT, nodes).mT


def sample_coefficient(
    count: int, nodes: int, seed: int, *, start: int = 0, device: Device = "cpu"
) -> Float[Tensor, "count nodes nodes"]:
    """Samples `start` to `start + count` of the coefficient a on the nodes i/(nodes−1), float64."""
    field = sample_field(count, nodes, seed, start=start, device=device)
    return torch.full_like(field, LOW).masked_fill_(field > 0, HIGH)


def mode_amplitudes() -> Float[Tensor, "modes modes"]:
    """The standard deviation of each coefficient of cos(πpx) cos(πqy) in g."""
    wave_numbers = torch.arange(MODES, dtype=torch.float64)
    squares = wave_numbers[:, None].square() + wave_numbers.square()
    normalisation = torch.full((MODES,), math.sqrt(2), dtype=torch.float64)
    normalisation[0] = 1
    amplitudes = (math.pi**2 * squares + TAU**2) ** (-ALPHA / 2)
    amplitudes *= normalisation[:, None] * normalisation
    amplitudes[0, 0] = 0
    return amplitudes


def _cosine_sum(modes: Float[Tensor, "... p"], nodes: int) -> Float[Tensor, "... nodes"]:
    """Σ_p modes_p cos(πp i/(nodes−1)) along the last axis, by a fast cosine transform."""
    period = 2 * (nodes - 1)  # at the nodes p and p + period are the same function: fold them
    folded = pad(modes, (0, -modes.shape[-1] % period)).unflatten(-1, (-1, period)).sum(dim=-2)
    cosines: Tensor = torch.fft.rfft(folded).real
    return cosines


def solve(
    coefficient: Float[Tensor, "b k k"],
    *,
    source: float | Float[Tensor, "b k k"] = 1.0,
    tolerance: float = TOLERANCE,
    max_iterations: int = MAX_ITERATIONS,
) -> Float[Tensor, "b k k"]:
    """Solves −∇·(a∇u) = source on the nodes i/(k−1), u = 0 on the boundary; float64, same device.

    `tolerance` bounds each sample's relative residual. The iterations needed grow at most like the
    square root of the contrast max a / min a, and hardly with k; past `max_iterations` (a contrast
    of many orders of magnitude, or a tolerance finer than rounding allows) a ValueError names the
    residual reached.
    """
    return solve_with_report(
        coefficient, source=source, tolerance=tolerance, max_iterations=max_iterations
    )[0]


def solve_with_report(
    coefficient: Float[Tensor, "b k k"],
    *,
    source: float | Float[Tensor, "b k k"] = 1.0,
    tolerance: float = TOLERANCE,
    max_iterations: int = MAX_ITERATIONS,
) -> tuple[Float[Tensor, "b k k"], Report]:
    """`solve`, and what it took."""
    check_coefficient(coefficient)
    check_argument("tolerance", tolerance, float)
    check_argument("max_iterations", max_iterations, int)
    if not isinstance(source, Tensor):
        check_argument("source", source, float)
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}")
    coefficient = coefficient.double()
    forcing = torch.as_tensor(source, dtype=torch.float64, device=coefficient.device)
    if forcing.ndim and forcing.shape != coefficient.shape:
        expected, got = tuple(coefficient.shape), tuple(forcing.shape)
        raise ValueError(f"source must be a number or have shape {expected}, got shape {got}")
    if not forcing.isfinite().all():
        raise ValueError("source must be finite, got NaN or infinite values")
    forcing = forcing.expand(coefficient.shape)[:, 1:-1, 1:-1].contiguous()
    operator = divergence_form(coefficient)
    inverse = inverse_laplacian(coefficient.shape[-1], coefficient.device)
    solution, report = conjugate_gradients(operator, inverse, forcing, tolerance, max_iterations)
    reached = report.residual.amax().item() if len(coefficient) else 0.0
    if not reached <= tolerance:
        contrast = (coefficient.amax(dim=(1, 2)) / coefficient.amin(dim=(1, 2))).amax().item()
        raise ValueError(
            f"solve reached a relative residual of {reached:.1e} in {max_iterations} iterations, "
            f"not the tolerance {tolerance:.1e}; the coefficient's contrast (max/min) is "
            f"{contrast:.1e}: raise max_iterations or tolerance"
        )
    return pad(solution, (1, 1, 1, 1)), report


def check_coefficient(coefficient: Tensor) -> None:
    """Raises an error that says what is wrong with a coefficient."""
    if not isinstance(coefficient, Tensor):
        raise TypeError(f"coefficient must be a tensor (b k k), got {type(coefficient).__name__}")
    shape = tuple(coefficient.shape)
    if len(shape) != 3 or shape[1] != shape[2] or shape[1] < 3:
        raise ValueError(f"coefficient must have shape (b, k, k) with k at least 3, got {shape}")
    if not coefficient.is_floating_point():
        raise ValueError(f"coefficient must be floating point, got {coefficient.dtype}")
    if not (coefficient.isfinite() & (coefficient > 0)).all():
        raise ValueError(
            "coefficient must be finite and positive, got NaN, infinity or values <= 0"
        )


def subsample(
    field: Shaped[Tensor, "b k k"], resolution: int
) -> Shaped[Tensor, "b {resolution} {resolution}"]:
    """The data set's grid: of the nodes i/N, those with i = 1 + j N/resolution, j < resolution."""
    intervals = field.shape[-1] - 1
    if not 1 <= resolution < intervals or intervals % resolution:
        raise ValueError(
            f"resolution must divide the {intervals} intervals of the fine grid and be smaller, "
            f"got {resolution}"
        )
    stride = intervals // resolution
    return field[..., 1::stride, 1::stride]


def generate(
    count: int,
    resolution: int,
    seed: int,
    *,
    start: int = 0,
    fine: int = 1024,
    device: Device = "cpu",
) -> tuple[Bool[Tensor, "n r r"], Float[Tensor, "n r r"]]:
    """Samples `start` to `start + count` of the data set, on the CPU: inputs and solutions.

    Solved on a grid of `fine` intervals and strided as the original is. An input is True where
    a = 0.36, a solution float32. Sample i depends on (seed, i) and `fine` alone.
    """
    chunk_nodes = _CHUNK_CPU if torch.device(device).type == "cpu" else _CHUNK_GPU
    at_once = max(1, chunk_nodes // fine**2)
    inputs = torch.empty(count, resolution, resolution, dtype=torch.bool)
    solutions = torch.empty(count, resolution, resolution, dtype=torch.float32)
    for done in range(0, count, at_once):
        chunk = slice(done, min(done + at_once, count))
        coefficient = sample_coefficient(
            chunk.stop - done, fine + 1, seed, start=start + done, device=device
        )
        inputs[chunk] = subsample(coefficient == HIGH, resolution)
        solutions[chunk] = subsample(solve(coefficient), resolution).float()
    return inputs, solutions


Operator = Callable[[Tensor], Tensor]


def sine_transform(field: Float[Tensor, "... n"]) -> Float[Tensor, "... n"]:
    """Σ_j field_j sin(π j k / N) for j, k = 1..N−1 along the last axis; twice it is N/2 times 1."""
    size = field.shape[-1]
    spectrum = torch.fft.rfft(pad(field, (1, 0)), n=2 * (size + 1))
    sines: Tensor = -spectrum.imag[..., 1 : size + 1]
    return sines


def inverse_laplacian(nodes: int, device: torch.device) -> Operator:
    """The exact inverse of the five-point −Δ at the interior of `nodes` × `nodes` nodes."""
    intervals = nodes - 1
    wave_numbers = torch.arange(1, intervals, dtype=torch.float64, device=device)
    eigenvalues = (2 * intervals * torch.sin(math.pi * wave_numbers / (2 * intervals))).square()
    scale = (2 / intervals) ** 2 / (eigenvalues[:, None] + eigenvalues)

    def apply(field: Tensor) -> Tensor:
        # Each pair of transforms leaves the axes swapped; scale is symmetric and two swaps cancel.
        spectrum = sine_transform(sine_transform(field).mT)
        return sine_transform(sine_transform(spectrum * scale).mT)

    return apply


def divergence_form(coefficient: Float[Tensor, "b k k"]) -> Operator:
    """u ↦ −∇·(a∇u) at the interior nodes, u taken as zero on the boundary."""
    intervals = coefficient.shape[-1] - 1
    faces = []
    for axis, interior in ((1, coefficient[:, :, 1:-1]), (2, coefficient[:, 1:-1, :])):
        before, after = interior.narrow(axis, 0, intervals), interior.narrow(axis, 1, intervals)
        # Written without the product before * after, which could underflow.
        faces.append((2 * intervals**2) * before / (1 + before / after))

    def apply(solution: Tensor) -> Tensor:
        first = faces[0] * pad(solution, (0, 0, 1, 1)).diff(dim=1)
        second = faces[1] * pad(solution, (1, 1)).diff(dim=2)
        return first.diff(dim=1).add_(second.diff(dim=2)).neg_()

    return apply


def conjugate_gradients(
    operator: Operator,
    preconditioner: Operator,
    source: Float[Tensor, "b n n"],
    tolerance: float,
    max_iterations: int,
) -> tuple[Float[Tensor, "b n n"], Report]:
    """Solves A u = f, batched, until each sample has ‖f − A u‖ ≤ tolerance ‖f‖.

    A sample that has got there stops changing, so a batch does not alter its members. The residual
    is recomputed at the end: where rounding had made the running one optimistic, the iteration
    restarts from the solution reached.
    """
    target = tolerance * _norm(source)
    solution = torch.zeros_like(source)
    residual = source.clone()
    direction = torch.zeros_like(source)
    iterations = torch.zeros(len(source), dtype=torch.int64, device=source.device)
    previous = torch.full_like(target, torch.inf)  # infinity: the first direction has no memory
    active = _norm(residual) > target
    for _ in range(max_iterations):
        if not active.any():
            break
        preconditioned = preconditioner(residual)
        energy = _dot(residual, preconditioned)
        # A finished sample takes steps of length zero; its residual may be 0, the quotients 0/0.
        memory = torch.where(active, energy / previous, 0.0)
        direction = torch.addcmul(preconditioned, memory, direction)
        image = operator(direction)
        step = torch.where(active, energy / _dot(direction, image), 0.0)
        solution.addcmul_(step, direction)
        residual.addcmul_(step, image, value=-1)
        previous = energy
        iterations += active.flatten()
        active = _norm(residual) > target
        if not active.any():
            residual = source - operator(solution)
            active = _norm(residual) > target
            previous = torch.full_like(target, torch.inf)
    residual = source - operator(solution)
    relative = _norm(residual) / _norm(source).clamp_min(torch.finfo(source.dtype).tiny)
    return solution, Report(iterations, relative.flatten())


def iteration_bound(contrast: float, nodes: int, tolerance: float) -> int:
    """Iterations that suffice for a relative residual of `tolerance`, in exact arithmetic.

    With κ = max a / min a and ρ = (√κ − 1)/(√κ + 1), the error after n iterations is at most 2ρⁿ
    of the first in the energy norm, hence the residual at most 2√κ ρⁿ of the first in the norm
    ‖(−Δ)^(−1/2) r‖. That bound knows nothing of the grid. Passing to ‖r‖₂ multiplies it by at most
    √cond(−Δ) = cot(π/2N), which costs a logarithm: about log 2 / log(1/ρ) iterations a doubling.
    """
    if contrast <= 1:
        return 1
    root = math.sqrt(contrast)
    rate = math.log((root + 1) / (root - 1))
    return math.ceil(math.log(2 * root / math.tan(math.pi / (2 * nodes - 2)) / tolerance) / rate)


def _dot(left: Tensor, right: Tensor) -> Float[Tensor, "b 1 1"]:
    return (left * right).sum(dim=(1, 2), keepdim=True)


def _norm(field: Tensor) -> Float[Tensor, "b 1 1"]:
    return _dot(field, field).sqrt()
