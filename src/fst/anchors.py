"""Observations to anchors (paper, Appendix A.1, Equations 8, 9 and 10).

Anchors stand on fixed rows: the product of evenly spaced positions on every axis but one. Along
that one, the adaptive axis, each row's anchors keep their order while their gaps follow the input.
A transformer decoder with one learned token per gap reads the observations; zero-initialised heads
turn the tokens into gaps and length scales. Everything here lives in the unit box.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from fst.nn import MLP, Attention, FeedForward, zero_linear
from fst.types import Anchors

GAP_OFFSET = 0.10  # ε_g keeps every gap open
SHORTEST, LONGEST, INITIAL_SCALE = 0.015, 0.30, 0.03
LARGEST_ADJUSTMENT = math.log(4)


class DecoderBlock(nn.Module):
    """Pre-norm transformer decoder block: self-attention, cross-attention, feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.self_norm, self.cross_norm, self.feed_norm = (nn.LayerNorm(width) for _ in range(3))
        self.self_attention = Attention(width, heads)
        self.cross_attention = Attention(width, heads)
        self.feed_forward = FeedForward(width)

    def forward(
        self,
        tokens: Float[Tensor, "b j w"],
        observed: Float[Tensor, "b n w"],
        mask: Bool[Tensor, "b n"] | None,
    ) -> Float[Tensor, "b j w"]:
        tokens = tokens + self.self_attention.attend_to_self(self.self_norm(tokens))
        keys_values = self.cross_attention.keys_values(observed)
        tokens = tokens + self.cross_attention(self.cross_norm(tokens), keys_values, mask)
        tokens = tokens + self.feed_forward(self.feed_norm(tokens))
        return tokens


class GapTokens(nn.Module):
    """One learned token per gap reads the observations."""

    def __init__(self, inputs: int, width: int, heads: int, blocks: int, gaps: int) -> None:
        super().__init__()
        self.observe = MLP(inputs, width, width)
        self.tokens = nn.Parameter(torch.randn(gaps, width))
        self.blocks = nn.ModuleList(DecoderBlock(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(
        self, inputs: Float[Tensor, "b n i"], mask: Bool[Tensor, "b n"] | None
    ) -> Float[Tensor, "b j w"]:
        observed = self.observe(inputs)
        tokens = self.tokens.expand(len(inputs), -1, -1)  # b j w
        for block in self.blocks:
            tokens = block(tokens, observed, mask)
        normed: Tensor = self.norm(tokens)
        return normed


def ordered_positions(scores: Float[Tensor, "b p j"]) -> Float[Tensor, "b p j+1"]:
    """Equations 8 and 9: scores to positive gaps that fill [0, 1], summed from the left."""
    gaps = 0.5 * (scores + torch.sqrt(scores.square() + 4)) + GAP_OFFSET
    positions = gaps.cumsum(dim=-1) / gaps.sum(dim=-1, keepdim=True)
    # The last anchor sits on the boundary by construction, not merely to rounding.
    ends = torch.zeros_like(positions[..., :1]), torch.ones_like(positions[..., :1])
    return torch.cat((ends[0], positions[..., :-1], ends[1]), dim=-1)


class AdaptiveCoordinates(nn.Module):
    """Positions along each row from the gap tokens."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.head = zero_linear(width, rows)

    def forward(self, tokens: Float[Tensor, "b j w"]) -> Float[Tensor, "b p j+1"]:
        scores = self.head(tokens).transpose(1, 2)  # b p j
        # A running sum of many gaps needs more digits than autocast leaves.
        return ordered_positions(scores.to(torch.promote_types(torch.float32, scores.dtype)))


class LengthScales(nn.Module, ABC):
    """Gap tokens and positions along rows in; scales for refinement and decoding out (b m s)."""

    @abstractmethod
    def forward(
        self, tokens: Float[Tensor, "b j w"], along: Float[Tensor, "b p j+1"]
    ) -> tuple[Tensor, Tensor]: ...

    def logarithms(self) -> list[nn.Parameter]:
        """Learned logarithms of lengths: their zero is a length of the whole domain."""
        return []


class AdaptiveScales(LengthScales):
    """Equation 10: learned base scales, adjusted per axis by the input.

    Refinement and decoding have bases of their own and share the adjustment. An anchor between two
    gaps averages their outputs; the first and last take that of their only gap.
    """

    def __init__(self, width: int, rows: int, axes: int, anchors: int) -> None:
        super().__init__()
        self.rows = rows
        self.head = zero_linear(width, rows * axes)
        self.refinement_base = nn.Parameter(torch.full((anchors,), math.log(INITIAL_SCALE)))
        self.decoding_base = nn.Parameter(torch.full((anchors,), math.log(INITIAL_SCALE)))

    def forward(
        self, tokens: Float[Tensor, "b j w"], along: Float[Tensor, "b p j+1"]
    ) -> tuple[Tensor, Tensor]:
        outputs = self.head(tokens).unflatten(-1, (self.rows, -1)).transpose(1, 2)  # b p j s
        outputs = at_anchors(outputs.to(torch.promote_types(torch.float32, outputs.dtype)))
        adjustment = LARGEST_ADJUSTMENT * torch.tanh(outputs.flatten(1, 2))
        refinement, decoding = (
            torch.exp(base[:, None] + adjustment).clamp(SHORTEST, LONGEST)
            for base in (self.refinement_base, self.decoding_base)
        )
        return refinement, decoding

    def logarithms(self) -> list[nn.Parameter]:
        return [self.refinement_base, self.decoding_base]


def at_anchors(gaps: Float[Tensor, "b p j s"]) -> Float[Tensor, "b p j+1 s"]:
    """Values of gaps at anchors: the mean of the two beside an anchor, at an end that of one."""
    between = 0.5 * (gaps[:, :, 1:] + gaps[:, :, :-1])
    return torch.cat((gaps[:, :, :1], between, gaps[:, :, -1:]), dim=2)


class LearnedScales(LengthScales):
    """One scalar per anchor, learned and the same for every input (images)."""

    def __init__(self, axes: int, anchors: int) -> None:
        super().__init__()
        self.axes = axes
        self.base = nn.Parameter(torch.full((anchors,), math.log(INITIAL_SCALE)))

    def forward(
        self, tokens: Float[Tensor, "b j w"], along: Float[Tensor, "b p j+1"]
    ) -> tuple[Tensor, Tensor]:
        scales = self.base.exp().clamp(SHORTEST, LONGEST)
        scales = scales[:, None].expand(len(tokens), -1, self.axes)
        return scales, scales

    def logarithms(self) -> list[nn.Parameter]:
        return [self.base]


def row_positions(rows: Sequence[int], like: Tensor) -> Float[Tensor, "p r"]:
    """The fixed positions of the rows: the product of evenly spaced positions per axis."""
    if not rows:
        return like.new_zeros(1, 0)
    axes = [
        torch.linspace(0, 1, n, dtype=like.dtype, device=like.device)
        if n > 1
        else like.new_full((1,), 0.5)
        for n in rows
    ]
    return torch.stack([axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij")], dim=-1)


class AnchorPredictor(nn.Module):
    """Observations in; anchor coordinates and both sets of length scales out."""

    def __init__(
        self,
        tokens: nn.Module,
        coordinates: nn.Module,
        scales: LengthScales,
        rows: Sequence[int],
        adaptive_axis: int,
    ) -> None:
        super().__init__()
        self.tokens, self.coordinates, self.scales = tokens, coordinates, scales
        self.rows, self.adaptive_axis = rows, adaptive_axis

    def forward(self, inputs: Float[Tensor, "b n i"], mask: Bool[Tensor, "b n"] | None) -> Anchors:
        tokens = self.tokens(inputs, mask)  # b j w
        along = self.coordinates(tokens)  # b p j+1
        batch, _, count = along.shape
        fixed = row_positions(self.rows, along).repeat_interleave(count, dim=0)  # m r
        fixed = fixed.expand(batch, -1, -1)
        moving = along.flatten(1).unsqueeze(-1)  # b m 1
        axis = self.adaptive_axis
        positions = torch.cat((fixed[..., :axis], moving, fixed[..., axis:]), dim=-1)
        refinement, decoding = self.scales(tokens, along)
        return Anchors(positions, decoding, refinement)

    def predicting(self) -> list[nn.Parameter]:
        """The parameters that read the input: those the paper trains at a rate of their own."""
        others = {id(parameter) for parameter in self.scales.logarithms()}
        return [parameter for parameter in self.parameters() if id(parameter) not in others]
