"""Observations to anchors (paper, Appendix A.1, Equations 8, 9 and 10).

Anchors stand on fixed rows: the rows are the product of evenly spaced positions on every axis but
one, and along that one, the adaptive axis, each row's anchors keep their order while their gaps
follow the input. A transformer decoder with one learned token per gap reads the observations;
small heads turn the tokens into gaps and length scales. Everything here lives in the unit box.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from fst.attention import Attention
from fst.config import FunctionSpaceConfig
from fst.length_scales import AdaptiveScales, FixedScales, LearnedScales
from fst.nn import MLP, FeedForward, zero_linear
from fst.types import Anchors

GAP_OFFSET = 0.10  # ε_g keeps every gap open


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
        tokens = self.self_attention.attend_to_self(tokens, self.self_norm, residual=tokens)
        memory = self.cross_attention.remember(observed, mask)
        tokens = self.cross_attention(tokens, memory, self.cross_norm, residual=tokens)
        return tokens + self.feed_forward(self.feed_norm(tokens))


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
        return self.norm(tokens)


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


class UniformCoordinates(nn.Module):
    """Evenly spaced positions, whatever the input (ablation)."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, tokens: Float[Tensor, "b j w"]) -> Float[Tensor, "b p j+1"]:
        batch, gaps, _ = tokens.shape
        dtype = torch.promote_types(torch.float32, tokens.dtype)
        even = torch.linspace(0, 1, gaps + 1, dtype=dtype, device=tokens.device)
        return even.expand(batch, self.rows, -1)


class NoTokens(nn.Module):
    """In place of `GapTokens` where neither coordinates nor scales read them (ablation)."""

    def __init__(self, gaps: int) -> None:
        super().__init__()
        self.gaps = gaps

    def forward(
        self, inputs: Float[Tensor, "b n i"], mask: Bool[Tensor, "b n"] | None
    ) -> Float[Tensor, "b j w"]:
        return inputs.new_zeros(len(inputs), self.gaps, 1)


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
        tokens: GapTokens | NoTokens,
        coordinates: AdaptiveCoordinates | UniformCoordinates,
        scales: AdaptiveScales | LearnedScales | FixedScales,
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
        refinement, decoding = self.scales(tokens)
        return Anchors(positions, decoding, refinement)

    def predicting(self) -> list[nn.Parameter]:
        """The parameters that read the input: those the paper trains at a rate of their own."""
        heads = [self.scales.head] if isinstance(self.scales, AdaptiveScales) else []
        modules = [self.tokens, self.coordinates, *heads]
        return [parameter for module in modules for parameter in module.parameters()]

    def logarithms(self) -> list[nn.Parameter]:
        """The learned length scales: logarithms, whose zero is a length of the whole domain."""
        if isinstance(self.scales, AdaptiveScales):
            return [self.scales.refinement_base, self.scales.decoding_base]
        return list(self.scales.parameters())


def build_predictor(config: FunctionSpaceConfig, inputs: int) -> AnchorPredictor:
    """The predictor a configuration asks for; `inputs` features describe each observation."""
    width, rows, axes = config.predictor_width, config.row_count, config.domain.axes
    gaps = config.anchors_per_row - 1
    coordinates = (
        AdaptiveCoordinates(width, rows)
        if config.coordinates == "adaptive"
        else UniformCoordinates(rows)
    )
    scales: AdaptiveScales | LearnedScales | FixedScales
    if config.length_scales == "adaptive":
        scales = AdaptiveScales(width, rows, axes, config.anchors)
    elif config.length_scales == "learned":
        scales = LearnedScales(axes, config.anchors)
    else:
        scales = FixedScales(axes, config.anchors)
    reads_input = "adaptive" in (config.coordinates, config.length_scales)
    tokens = (
        GapTokens(inputs, width, config.predictor_heads, config.predictor_blocks, gaps)
        if reads_input
        else NoTokens(gaps)
    )
    return AnchorPredictor(tokens, coordinates, scales, config.rows, config.adaptive_axis)
