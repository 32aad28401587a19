"""What the baselines do alike with observations: padding, first layers, and sizes of a model."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fst.types import Domain, Observations


def check_sizes(**sizes: int) -> None:
    """Raise unless every named size is at least one."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def check_heads(width: int, heads: int) -> None:
    """Raise unless the heads share the width evenly."""
    check_sizes(width=width, heads=heads)
    if width % heads:
        raise ValueError(f"width must be a multiple of heads, got {width} and {heads}")


def without_padding(
    observations: Observations, domain: Domain
) -> tuple[Float[Tensor, "b n s"], Float[Tensor, "b n v"]]:
    """Positions in the unit box, and values, with zeros where the mask says padding.

    Padding may hold anything, NaN included, and zero times NaN is NaN.
    """
    positions, values = domain.to_unit(observations.positions), observations.values
    if observations.mask is None:
        return positions, values
    padding = ~observations.mask.unsqueeze(-1)
    return positions.masked_fill(padding, 0.0), values.masked_fill(padding, 0.0)


class InputLinear(nn.Linear):
    """A first layer, which reads coordinates and values as they are.

    bfloat16 would leave 513 of 1,024 evenly spaced coordinates distinct. So under autocast the
    products run in the dtype of the weights, and only the result is rounded.
    """

    def forward(self, inputs: Float[Tensor, "... i"]) -> Float[Tensor, "... o"]:
        with torch.autocast(inputs.device.type, enabled=False):
            outputs = super().forward(inputs)
        return rounded_like_autocast(outputs)


def rounded_like_autocast(outputs: Tensor) -> Tensor:
    """In the dtype that a product would have here: nothing after it should need more memory."""
    device = outputs.device.type
    if not torch.is_autocast_enabled(device):
        return outputs
    return outputs.to(torch.get_autocast_dtype(device))
