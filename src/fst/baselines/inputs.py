"""What the baselines do alike with observations: padding and first layers."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fst.types import Domain, Observations, product_dtype


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
        return outputs.to(product_dtype(outputs))
