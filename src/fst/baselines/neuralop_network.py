"""The network of neuraloperator's FNO. This file alone needs that package.

The package's own defaults, with three things done from outside. The Fourier transforms run in
float32 whatever the surrounding precision, as the paper trains, and so does the first layer, which
reads the coordinates. The transforms are computed for the modes that are kept alone. The grid
coordinates, which the package appends to its input by default, come from the caller: the package
caches them on the device of its first call, and then fails on another.

The maps are the package's, mistakes included: release 2.0 takes an axis with an odd number of
points, such as the 201 times of Burgers, back from the spectrum one frequency off (it shifts the
spectrum forth twice instead of forth and back; mended upstream after that release).
`FNOConfig.odd_axes` says whether that stays so.
"""

from typing import Any

import torch
from jaxtyping import Complex, Float, Int
from neuralop.layers.spectral_convolution import SpectralConv
from neuralop.models import FNO
from torch import Tensor, nn

from fst.baselines.fno import FNOConfig
from fst.types import product_dtype


class FewModesSpectralConv(SpectralConv):  # type: ignore[misc]  # untyped
    """The package's spectral convolution, which keeps few of the grid's frequencies.

    The package transforms the whole grid, keeps some modes, and transforms a grid of zeros and
    those modes back. Here the sums over the grid are taken for the kept modes alone, as products
    with matrices exp(±2πi k n / N): the same map, at a fraction of the memory and time. They are
    float32 outside autocast, as the package's FFTs must be.
    """

    published = True
    """Frequency k of an odd axis before the last is taken back as k - 1."""

    def forward(
        self, x: Float[Tensor, "b i *grid"], output_shape: tuple[int, ...] | None = None
    ) -> Float[Tensor, "b o *grid"]:
        if output_shape is not None:
            raise ValueError(f"output_shape must be None: this keeps the grid, got {output_shape}")
        *earlier, points = x.shape[2:]
        *modes, last = self.n_modes
        with torch.autocast(x.device.type, enabled=False):
            frequencies = torch.arange(last, device=x.device)
            space = torch.view_as_real(waves(points, frequencies))  # n k 2
            # A real transform keeps frequencies k >= 0; all but 0 and N/2 stand for -k as well.
            twice = torch.where((frequencies == 0) | (2 * frequencies == points), 1.0, 2.0)
            conjugate = torch.tensor((1.0, -1.0), device=x.device)
            into = (space * conjugate / x[0, 0].numel()).flatten(1)  # the package's norm: "forward"
            back = (space * conjugate * twice.unsqueeze(-1)).flatten(1).mT
            spectrum = torch.view_as_complex((x.float() @ into).unflatten(-1, (last, 2)))
            kept = []
            for axis, (n, m) in enumerate(zip(earlier, modes, strict=True), 2):
                k = torch.arange(m, device=x.device) - m // 2
                spectrum = along(axis, spectrum, waves(n, k).conj())
                kept.append((axis, waves(n, k - (n % 2 if self.published else 0)).mT))
            # torch's own einsum, because the package's cannot be traced by torch.compile.
            answer = torch.einsum("bi...,io...->bo...", spectrum, self.weight.to_tensor())
            for axis, matrix in kept:
                answer = along(axis, answer, matrix)
            convolved: Tensor = torch.view_as_real(answer).flatten(-2) @ back + self.bias
            return convolved


class MendedSpectralConv(FewModesSpectralConv):
    """The same with every frequency taken back as itself.

    `fftshift` puts frequency 0 of an axis with n points at index n // 2, and `ifftshift` takes it
    from there to index 0. The package shifts forth a second time: for even n that is the same; for
    odd n it takes frequency 0 to index n - 1, which stands for frequency -1.
    """

    published = False


def waves(points: int, frequencies: Int[Tensor, "k"]) -> Complex[Tensor, "n k"]:
    """exp(2πi k n / N)."""
    # The remainder is exact, so that float32 rounds an angle within one turn.
    turns = torch.arange(points, device=frequencies.device)[:, None] * frequencies % points
    angles = turns * (2 * torch.pi / points)
    return torch.polar(torch.ones_like(angles), angles)


def along(axis: int, x: Complex[Tensor, "..."], matrix: Complex[Tensor, "i o"]) -> Tensor:
    """The product of one axis with a matrix."""
    product: Tensor = torch.tensordot(x, matrix, ([axis], [0]))
    return product.movedim(-1, axis)


class InputConv(nn.Conv1d):
    """The package's first layer, a linear map of channels, outside autocast as `InputLinear` is.

    Where a GPU's convolutions may use TensorFloat-32, as they may by default, its eleven bits
    still tell all coordinates of the grid apart.
    """

    def forward(self, channels: Float[Tensor, "b i g"]) -> Float[Tensor, "b o g"]:
        with torch.autocast(channels.device.type, enabled=False):
            outputs = super().forward(channels)
        return outputs.to(product_dtype(outputs))


def build_network(config: FNOConfig) -> nn.Module:
    """(b, inputs, *grid) -> (b, outputs, *grid): values, mask, condition and coordinates enter."""
    mended = config.odd_axes == "mended"
    inputs = config.value_channels + int(config.mask_channel) + config.condition_channels
    network: Any = FNO(
        n_modes=config.modes,
        in_channels=inputs + config.domain.axes,
        out_channels=config.output_channels,
        hidden_channels=config.width,
        n_layers=config.layers,
        positional_embedding=None,
        conv_module=MendedSpectralConv if mended else FewModesSpectralConv,
    )
    network.lifting.fcs[0].__class__ = InputConv  # the package offers no choice of this layer
    module: nn.Module = network
    return module


def grid_embedding(grid: tuple[int, ...]) -> Float[Tensor, "s *grid"]:
    """The coordinates i / N that the package's default embedding appends."""
    axes = [torch.arange(size) / size for size in grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"))
