"""The network of neuraloperator's FNO. This file alone needs that package.

The package's own defaults, with two things done from outside. The Fourier transforms run in
float32 whatever the surrounding precision, as the paper trains. The grid coordinates, which the
package appends to its input by default, come from the caller: the package caches them on the
device of its first call, and then fails on another.

The rest is the package's, mistakes included: release 2.0 takes an axis with an odd number of
points, such as the 201 times of Burgers, back from the spectrum one frequency off (it shifts the
spectrum forth twice instead of forth and back; mended upstream after that release).
"""

import torch
from jaxtyping import Float
from neuralop.layers.spectral_convolution import SpectralConv
from neuralop.models import FNO
from torch import Tensor, nn


class SinglePrecisionSpectralConv(SpectralConv):
    """The package's spectral convolution, outside autocast: no FFT takes bfloat16."""

    def forward(
        self, x: Float[Tensor, "b d *grid"], output_shape: tuple[int, ...] | None = None
    ) -> Float[Tensor, "b d *grid"]:
        with torch.autocast(x.device.type, enabled=False):
            convolved: Tensor = super().forward(x.float(), output_shape)
            return convolved


def build_network(
    inputs: int, outputs: int, width: int, layers: int, modes: tuple[int, ...]
) -> nn.Module:
    """(b, inputs + axes, *grid) -> (b, outputs, *grid); the last inputs are the coordinates."""
    network: nn.Module = FNO(
        n_modes=modes,
        in_channels=inputs + len(modes),
        out_channels=outputs,
        hidden_channels=width,
        n_layers=layers,
        positional_embedding=None,
        conv_module=SinglePrecisionSpectralConv,
    )
    return network


def grid_embedding(grid: tuple[int, ...]) -> Float[Tensor, "s *grid"]:
    """The coordinates i / N that the package's default embedding appends."""
    axes = [torch.arange(size) / size for size in grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"))
