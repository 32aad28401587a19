"""The exact solution of periodic viscous Burgers, by the Cole-Hopf transformation.

Enters: samples of the initial condition at cell centres of (0,1), ν, times, positions. Leaves: the
solution of u_t + (u²/2)_x = κ u_xx, κ = ν/π, there.

With m the mean of u, v = u − m solves the same equation in the frame that moves with m, and

    v(x, t) = ∫ v₀(y) w(x, y) dy / ∫ w(x, y) dy,   w(x, y) = G_κt(x − y) exp(−V(y) / 2κ),

where V' = v₀ and G is the heat kernel of the circle. V is periodic since v₀ has no mean. The
weights are formed from their logarithms, less the largest of each x, so none overflows however
small κ is. The initial condition is the trigonometric interpolant of the samples, and the equally
spaced quadrature nodes resolve the integrand: for smooth data the result is exact to rounding.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from fst.data.burgers import checked_problem
from fst.types import check_finite, check_tensor

# Quadrature nodes to a standard deviation of the narrowest weight: the equally spaced rule is then
# wrong by about exp(-2π² · this²).
_NODES_PER_STD = 1.5
_LARGEST_EXPONENT = 40.0  # terms smaller than its negative exponential are below rounding
_WEIGHTS_AT_ONCE = 2**22
# Where logarithms of weights differ by less than this, a Fourier transform keeps 11 digits.
_SMALL_RANGE = 10.0


def exact_solution(
    initial: Float[Tensor, "b n"],
    viscosity: float,
    times: Float[Tensor, " t"],
    positions: Float[Tensor, " q"],
) -> Float[Tensor, "b t q"]:
    """u at `times`, which increase, and `positions`, in float64 on `initial`'s device.

    `initial` holds point values at (i + ½)/n. A function that n samples do not resolve is best
    given with more of them; the cost grows with n · t · q.
    """
    checked_problem(initial, viscosity, times)
    check_tensor("positions", positions, "q")
    check_finite("positions", positions)
    diffusivity = viscosity / math.pi
    values = initial.detach().double()
    mean = values.mean(dim=1)
    samples = values - mean[:, None]
    where = positions.to(values)
    solution = values.new_empty(len(values), len(times), len(where))
    for number, time in enumerate(times.tolist()):
        if time == 0:
            angles = _frequencies(values.shape[1], values)[:, None] * where
            solution[:, number] = (_spectrum(values) @ torch.exp(1j * angles)).real
            continue
        nodes = _node_count(samples, diffusivity, time)
        density = _resampled(samples, nodes)
        potential = _resampled(samples, nodes, integrated=True) / (2 * diffusivity)
        for row in range(len(values)):
            fluctuation = []
            for part in (where - mean[row] * time).split(max(1, _WEIGHTS_AT_ONCE // nodes)):
                weights = _weights(part, potential[row], diffusivity * time)
                fluctuation.append((weights @ density[row]) / weights.sum(dim=1))
            solution[row, number] = mean[row] + torch.cat(fluctuation)
    return solution


def exact_trajectory(
    initial: Float[Tensor, " n"], viscosity: float, times: Float[Tensor, " t"]
) -> Float[Tensor, "t n"]:
    """u at `times`, which rise from 0, at the centres of the n cells, in float64.

    The same integrals as above, from each time to the next. In a short time little comes from far
    away, so each x needs only the nodes near it: much less work where there are many times.
    """
    steps = times.diff()
    if len(times) == 0 or times[0] != 0 or (steps <= 0).any():
        raise ValueError("times must rise from 0")
    checked_problem(initial[None], viscosity, times)
    diffusivity = viscosity / math.pi
    values = initial.detach().double()
    mean = values.mean()
    samples = (values - mean)[None]
    shortest = steps.min().item() if len(steps) else 1.0
    each = _node_count(samples, diffusivity, shortest) // len(values)
    nodes = each * len(values)
    start = 0.5 / len(values)  # the first node is the first cell's centre
    density = _resampled(samples, nodes, start=start)[0]
    potential = _resampled(samples, nodes, start=start, integrated=True)[0] / (2 * diffusivity)
    fastest = density.abs().max().item()  # nothing gets faster
    solution = [values]
    for step in steps.tolist():
        drift, spread = mean.item() * step, diffusivity * step
        if potential.max() - potential.min() < _SMALL_RANGE:
            density, potential = _step_by_fourier(density, potential, drift, spread)
        else:
            reach = fastest * step + math.sqrt(4 * _LARGEST_EXPONENT * spread)
            density, potential = _step_from_near(density, potential, drift, spread, reach)
        solution.append(mean + density[::each])
    return torch.stack(solution)


def _step_by_fourier(
    density: Float[Tensor, " k"], potential: Float[Tensor, " k"], drift: float, spread: float
) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"]]:
    """Both integrals as convolutions; they lose as many digits as the weights span."""
    least = potential.min()
    weights = torch.exp(least - potential)
    frequencies = _frequencies(len(potential), potential)
    kernel = torch.exp(-spread * frequencies.square() - 1j * drift * frequencies)
    spectra = torch.fft.rfft(torch.stack([weights * density, weights])) * kernel
    above, total = torch.fft.irfft(spectra, n=len(potential))
    return above / total, least - total.log()


def _step_from_near(
    density: Float[Tensor, " k"],
    potential: Float[Tensor, " k"],
    drift: float,
    spread: float,
    reach: float,
) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"]]:
    """Both integrals over the nodes within `reach` of where x came from, by logarithms."""
    nodes = len(potential)
    half = min(nodes // 2, math.ceil(reach * nodes))
    count = min(nodes, 2 * half + 1)
    # The window moves by whole nodes, and the kernel has the rest of the drift.
    whole = round(drift * nodes)
    offsets = half - torch.arange(count, dtype=potential.dtype)  # (x − y) · nodes, less `whole`
    images = math.ceil(math.sqrt(4 * _LARGEST_EXPONENT * spread)) + 1
    distances = ((offsets + whole) / nodes - drift)[:, None] + torch.arange(-images, images + 1)
    kernel = distances.square().mul_(-0.25 / spread).logsumexp(dim=1)
    around = torch.stack([potential, density]).roll((whole + half), dims=1)
    near = torch.cat([around, around[:, : count - 1]], dim=1).unfold(1, count, 1)  # 2 nodes count
    weights = kernel - near[0]
    largest = weights.amax(dim=1)
    weights.sub_(largest[:, None]).exp_()
    total = weights.sum(dim=1)
    above = weights.mul_(near[1]).sum(dim=1)
    return above / total, -(total.log() + largest)


def _node_count(samples: Float[Tensor, "b n"], diffusivity: float, time: float) -> int:
    """A multiple of n that resolves the narrowest weight: precision (1/t + max v₀') / 2κ."""
    points = samples.shape[1]
    slope = (samples.roll(-1, dims=1) - samples).max().item() * points
    std = math.sqrt(2 * diffusivity / (1 / time + max(slope, 0.0)))
    return points * max(1, math.ceil(_NODES_PER_STD / (std * points)))


def _frequencies(points: int, like: Tensor) -> Float[Tensor, " k"]:
    return 2 * math.pi * torch.arange(points // 2 + 1, dtype=torch.float64, device=like.device)


def _spectrum(samples: Float[Tensor, "b n"], start: float = 0.0) -> Tensor:
    """Coefficients c_k of Re Σ c_k exp(2πik(x − start)), k ≥ 0, that passes through the samples."""
    points = samples.shape[1]
    spectrum = torch.fft.rfft(samples) * (2 / points)
    spectrum[:, 0] /= 2
    if points % 2 == 0:
        spectrum[:, -1] /= 2
    # The samples begin at the first cell's centre.
    angles = (start - 0.5 / points) * _frequencies(points, samples)
    shifted: Tensor = spectrum * torch.exp(1j * angles)
    return shifted


def _resampled(
    samples: Float[Tensor, "b n"], nodes: int, *, start: float = 0.0, integrated: bool = False
) -> Float[Tensor, "b nodes"]:
    """The interpolant, or its mean-free antiderivative, at the nodes `start` + j / `nodes`."""
    spectrum = _spectrum(samples, start)
    if integrated:
        spectrum[:, 1:] /= 1j * _frequencies(samples.shape[1], samples)[1:]
        spectrum[:, 0] = 0
    # The inverse transform counts each frequency below the highest twice; the highest is real.
    padded = spectrum.new_zeros(len(samples), nodes // 2 + 1)
    padded[:, : spectrum.shape[1]] = spectrum / 2
    padded[:, 0] *= 2
    if nodes % 2 == 0 and spectrum.shape[1] == padded.shape[1]:
        padded[:, -1] *= 2
    values: Tensor = torch.fft.irfft(padded * nodes, n=nodes)
    return values


def _weights(
    positions: Float[Tensor, " q"], potential: Float[Tensor, " k"], spread: float
) -> Float[Tensor, "q k"]:
    """G(x − y) exp(−potential(y)) over the nodes, up to a factor for each x; `spread` is κt."""
    number = torch.arange(len(potential), dtype=potential.dtype, device=potential.device)
    distance = positions[:, None] - number / len(potential)
    distance = (distance - distance.round()).abs()
    if 8 * math.pi * spread > 1:  # the kernel is wide: a few terms of its Fourier series
        kernel = torch.ones_like(distance)
        for k in range(1, 1 + math.ceil(math.sqrt(_LARGEST_EXPONENT / spread) / (2 * math.pi))):
            damping = math.exp(-spread * (2 * math.pi * k) ** 2)
            kernel += 2 * damping * torch.cos(2 * math.pi * k * distance)
        return kernel * torch.exp(potential.min() - potential)
    nearest = distance.square().mul_(-0.25 / spread).sub_(potential)
    largest = nearest.amax(dim=1, keepdim=True)
    weights = nearest.sub_(largest).exp_()
    # Images of y in other periods. Image 1 ties with the nearest at half a period's distance.
    for image in (1, -1, 2, -2):
        least = (abs(image) - 0.5) ** 2 - 0.25 if image > 0 else image**2
        if least / (4 * spread) < _LARGEST_EXPONENT:
            exponent = (distance - image).square().mul_(-0.25 / spread).sub_(potential)
            weights += exponent.sub_(largest).exp_()
    return weights
