"""What the baselines do alike with observations: padding, and sizes of a model."""

from jaxtyping import Float
from torch import Tensor

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
