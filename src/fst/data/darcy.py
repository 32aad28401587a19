"""Darcy flow with a two-valued coefficient: −∇·(a∇u) = 1 on [0,1]², u = 0 on the boundary.

The law of the NeuralOperator data. a = 0.36 where the Gaussian field

    g(x, y) = Σ_{(p,q) ≠ 0} ξ_pq (π²(p² + q²) + τ²)^(−α/2) c_p c_q cos(πpx) cos(πqy)

is positive, else 0.02; ξ_pq are independent standard normal, c_0 = 1, c_p = √2, so g has covariance
(−Δ + τ²)^(−α) with Neumann boundary and without its constant mode. The sum stops before p, q =
`MODES`, which leaves out less than 1e-7 of the variance and makes a sample one function, the same
whatever grid it is drawn on.

Enters: a count, a grid, a seed. Leaves: coefficients on nodes i/N (boundary included), their
solutions, or both on the data set's grid of `resolution` × `resolution` nodes.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from fst.data.elliptic import conjugate_gradients, divergence_form, inverse_laplacian
from fst.types import check_argument

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
    residual: Float[Tensor, " b"]  # ‖f − Au‖₂ / ‖f‖₂ at the interior nodes


def sample_field(
    count: int, nodes: int, seed: int, *, start: int = 0, device: torch.device | str = "cpu"
) -> Float[Tensor, "count nodes nodes"]:
    """Samples `start` to `start + count` of the Gaussian field g on the nodes i/(nodes−1)."""
    for name, value, least in (("count", count, 1), ("seed", seed, 0), ("start", start, 0)):
        check_argument(name, value, int)
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    check_argument("nodes", nodes, int)
    if nodes < 2:
        raise ValueError(f"nodes must be at least 2 (both ends of an axis), got {nodes}")
    draws = np.empty((count, MODES, MODES))
    for row in range(count):
        # One stream a sample: it depends on (seed, index) alone, not on how samples are batched.
        np.random.default_rng((seed, start + row)).standard_normal(out=draws[row])
    modes = torch.from_numpy(draws).to(device) * mode_amplitudes().to(device)
    return _cosine_sum(_cosine_sum(modes, nodes).mT, nodes).mT


def sample_coefficient(
    count: int, nodes: int, seed: int, *, start: int = 0, device: torch.device | str = "cpu"
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
    solution, _ = solve_with_report(
        coefficient, source=source, tolerance=tolerance, max_iterations=max_iterations
    )
    return solution


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
    iterate = conjugate_gradients(
        divergence_form(coefficient),
        inverse_laplacian(coefficient.shape[-1], coefficient.device),
        forcing,
        tolerance,
        max_iterations,
    )
    reached = iterate.residual.amax().item() if len(coefficient) else 0.0
    if not reached <= tolerance:
        contrast = (coefficient.amax(dim=(1, 2)) / coefficient.amin(dim=(1, 2))).amax().item()
        raise ValueError(
            f"solve reached a relative residual of {reached:.1e} in {max_iterations} iterations, "
            f"not the tolerance {tolerance:.1e}; the coefficient's contrast (max/min) is "
            f"{contrast:.1e}: raise max_iterations or tolerance"
        )
    return pad(iterate.solution, (1, 1, 1, 1)), Report(iterate.iterations, iterate.residual)


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
    device: torch.device | str = "cpu",
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
