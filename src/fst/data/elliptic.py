"""Divergence-form elliptic problems on the unit square: −∇·(a∇u) = f, u = 0 on the boundary.

Enters: the coefficient a on the nodes i/N of [0,1]², boundary included, and the source f at the
interior nodes. Leaves: u at the interior nodes.

Scheme: five points, conservative, second order. The coefficient of the face between two nodes is
the harmonic mean of theirs, so the flux through a jump of a is right.

Solver: conjugate gradients preconditioned by the same scheme with a = 1, which the sine transform
inverts exactly. With m ≤ a ≤ M the preconditioned operator has its spectrum in [m, M] on every
grid, so resolution cannot raise its condition number; `iteration_bound` is what follows from that.
A multigrid cycle would take fewer iterations and more code, and would have to treat grids that do
not halve; this takes any grid.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

Operator = Callable[[Tensor], Tensor]


class Iterate(NamedTuple):
    """What conjugate gradients return, each entry for each sample of the batch."""

    solution: Float[Tensor, "b n n"]
    iterations: Int[Tensor, " b"]
    residual: Float[Tensor, " b"]  # ‖f − Au‖₂ / ‖f‖₂, recomputed from the solution


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
) -> Iterate:
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
    return Iterate(solution, iterations, relative.flatten())


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
