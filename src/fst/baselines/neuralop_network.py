"""The network of neuraloperator's FNO. This file alone needs that package.

The package's own defaults, with two things done from outside. The Fourier transforms run in
float32 whatever the surrounding precision, as the paper trains, and so does the first layer, which
reads the coordinates. The grid coordinates, which the package appends to its input by default, come
from the caller: the package caches them on the device of its first call, and then fails on another.

The rest is the package's, mistakes included: release 2.0 takes an axis with an odd number of
points, such as the 201 times of Burgers, back from the spectrum one frequency off (it shifts the
spectrum forth twice instead of forth and back; mended upstream after that release).
`FNOConfig.odd_axes` says whether that stays so.
"""

from typing import Any

import torch
from jaxtyping import Float
from neuralop.layers.spectral_convolution import SpectralConv
from neuralop.models import FNO
from torch import Tensor, nn

from fst.baselines.fno import FNOConfig
from fst.types import product_dtype


class SinglePrecisionSpectralConv(SpectralConv):  # type: ignore[misc]  # untyped
    """The package's spectral convolution, outside autocast: no FFT takes bfloat16."""

    def forward(
        self, x: Float[Tensor, "b d *grid"], output_shape: tuple[int, ...] | None = None
    ) -> Float[Tensor, "b d *grid"]:
        with torch.autocast(x.device.type, enabled=False):
            convolved: Tensor = super().forward(x.float(), output_shape)
            return convolved


class MendedSpectralConv(SpectralConv):  # type: ignore[misc]  # untyped
    """The same map, with the spectrum shifted back where the package shifts it forth again.

    `fftshift` puts frequency 0 of an axis with n points at index n // 2, and `ifftshift` takes it
    from there to index 0. A second `fftshift` does so for even n; for odd n it takes it to index
    n - 1, which stands for frequency -1.
    """

    def forward(
        self, x: Float[Tensor, "b d *grid"], output_shape: tuple[int, ...] | None = None
    ) -> Float[Tensor, "b d *grid"]:
        if output_shape is not None:
            raise ValueError(f"output_shape must be None: this keeps the grid, got {output_shape}")
        grid, axes = x.shape[2:], tuple(range(2, x.ndim))
        *modes, last = self.n_modes
        starts = [n // 2 - m // 2 for n, m in zip(grid[:-1], modes, strict=True)]
        middle = [slice(start, start + m) for start, m in zip(starts, modes, strict=True)]
        kept = (slice(None), slice(None), *middle, slice(last))
        with torch.autocast(x.device.type, enabled=False):
            spectrum = torch.fft.rfftn(x.float(), norm=self.fft_norm, dim=axes)
            spectrum = torch.fft.fftshift(spectrum, dim=axes[:-1])
            answer = spectrum.new_zeros(len(x), self.out_channels, *spectrum.shape[2:])
            answer[kept] = self._contract(spectrum[kept], self.weight, separable=False)
            answer = torch.fft.ifftshift(answer, dim=axes[:-1])
            answer = torch.fft.irfftn(answer, s=grid, norm=self.fft_norm, dim=axes)
            shifted: Tensor = answer + self.bias
            return shifted


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
        conv_module=MendedSpectralConv if mended else SinglePrecisionSpectralConv,
    )
    network.lifting.fcs[0].__class__ = InputConv  # the package offers no choice of this layer
    module: nn.Module = network
    return module


def grid_embedding(grid: tuple[int, ...]) -> Float[Tensor, "s *grid"]:
    """The coordinates i / N that the package's default embedding appends."""
    axes = [torch.arange(size) / size for size in grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"))
