"""Length scales of the anchors (paper, Equation 10): how far each one reaches along each axis.

Gap tokens enter; scales for refinement and for decoding leave, both (b m s), in the unit box.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fst.nn import zero_linear

SHORTEST, LONGEST = 0.015, 0.30
INITIAL_SCALE = 0.03
LARGEST_ADJUSTMENT = math.log(4)


class AdaptiveScales(nn.Module):
    """Equation 10: learned base scales, adjusted per axis by the input.

    Refinement and decoding have bases of their own and share the adjustment. An anchor between
    two gaps averages their outputs; the first and last take that of their only gap.
    """

    def __init__(self, width: int, rows: int, axes: int, anchors: int) -> None:
        super().__init__()
        self.rows = rows
        self.head = zero_linear(width, rows * axes)
        self.refinement_base = nn.Parameter(torch.full((anchors,), math.log(INITIAL_SCALE)))
        self.decoding_base = nn.Parameter(torch.full((anchors,), math.log(INITIAL_SCALE)))

    def forward(self, tokens: Float[Tensor, "b j w"]) -> tuple[Tensor, Tensor]:
        outputs = self.head(tokens).unflatten(-1, (self.rows, -1)).transpose(1, 2)  # b p j s
        outputs = outputs.to(torch.promote_types(torch.float32, outputs.dtype))
        between = 0.5 * (outputs[:, :, 1:] + outputs[:, :, :-1])
        outputs = torch.cat((outputs[:, :, :1], between, outputs[:, :, -1:]), dim=2)
        adjustment = LARGEST_ADJUSTMENT * torch.tanh(outputs.flatten(1, 2))
        refinement, decoding = (
            torch.exp(base[:, None] + adjustment).clamp(SHORTEST, LONGEST)
            for base in (self.refinement_base, self.decoding_base)
        )
        return refinement, decoding


class LearnedScales(nn.Module):
    """One scalar per anchor, learned and the same for every input (images)."""

    def __init__(self, axes: int, anchors: int) -> None:
        super().__init__()
        self.axes = axes
        self.base = nn.Parameter(torch.full((anchors,), math.log(INITIAL_SCALE)))

    def forward(self, tokens: Float[Tensor, "b j w"]) -> tuple[Tensor, Tensor]:
        scales = self.base.exp().clamp(SHORTEST, LONGEST)
        scales = scales[:, None].expand(len(tokens), -1, self.axes)
        return scales, scales


class FixedScales(nn.Module):
    """The same constant everywhere (ablation)."""

    def __init__(self, axes: int, anchors: int) -> None:
        super().__init__()
        self.axes, self.anchors = axes, anchors

    def forward(self, tokens: Float[Tensor, "b j w"]) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(torch.float32, tokens.dtype)
        shape = (len(tokens), self.anchors, self.axes)
        scales = torch.full(shape, INITIAL_SCALE, dtype=dtype, device=tokens.device)
        return scales, scales
