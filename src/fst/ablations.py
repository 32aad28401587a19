"""The paper's ablations, each a small class in place of one of the method's own (Tables 4 to 6).

`build_predictor` and `build_layer` choose what a configuration asks for.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from fst.anchors import (
    INITIAL_SCALE,
    AdaptiveCoordinates,
    AdaptiveScales,
    AnchorPredictor,
    GapTokens,
    LearnedScales,
    LengthScales,
)
from fst.config import FunctionSpaceConfig
from fst.evaluation_points import PointDraws
from fst.layer import Context, EvaluateMixWrite, FunctionSpaceLayer, Points, Read
from fst.nn import Attention, FourierFeatures, ResidualFeedForward
from fst.types import Anchors


class UniformCoordinates(nn.Module):
    """Evenly spaced positions, whatever the input."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, tokens: Float[Tensor, "b j w"]) -> Float[Tensor, "b p j+1"]:
        batch, gaps, _ = tokens.shape
        dtype = torch.promote_types(torch.float32, tokens.dtype)
        even = torch.linspace(0, 1, gaps + 1, dtype=dtype, device=tokens.device)
        return even.expand(batch, self.rows, -1)


class FixedScales(LengthScales):
    """The same constant everywhere."""

    def __init__(self, axes: int, anchors: int) -> None:
        super().__init__()
        self.axes, self.anchors = axes, anchors

    def forward(self, tokens: Float[Tensor, "b j w"]) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(torch.float32, tokens.dtype)
        shape = (len(tokens), self.anchors, self.axes)
        scales = torch.full(shape, INITIAL_SCALE, dtype=dtype, device=tokens.device)
        return scales, scales


class NoTokens(nn.Module):
    """In place of `GapTokens` where neither coordinates nor scales read them."""

    def __init__(self, gaps: int) -> None:
        super().__init__()
        self.gaps = gaps

    def forward(
        self, inputs: Float[Tensor, "b n i"], mask: Bool[Tensor, "b n"] | None
    ) -> Float[Tensor, "b j 1"]:
        return inputs.new_zeros(len(inputs), self.gaps, 1)


class SelfAttentionBlock(nn.Module):
    """Pre-norm self-attention and feed-forward on the anchor features."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed_forward = ResidualFeedForward(width)

    def forward(self, features: Float[Tensor, "b m d"]) -> Float[Tensor, "b m d"]:
        features = features + self.attention.attend_to_self(self.norm(features))
        updated: Tensor = self.feed_forward(features)
        return updated


class AnchorSelfAttention(nn.Module):
    """Two self-attention blocks on the anchor features replace Equations 3-5."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(SelfAttentionBlock(width, heads) for _ in range(2)))

    def precompute(self, anchors: Anchors, condition: Float[Tensor, "b c"] | None) -> None:
        """Nothing: the field is not evaluated."""

    def forward(
        self, z: Float[Tensor, "b m d"], context: Context, points: Points
    ) -> Float[Tensor, "b m d"]:
        updated: Tensor = self.blocks(z)
        return updated


class ObserveFirstLayer(FunctionSpaceLayer):
    """Only the first refinement step reads the observations."""

    def refine(
        self, z: Float[Tensor, "b m d"], context: Context, draws: PointDraws
    ) -> Iterator[Float[Tensor, "b m d"]]:
        step: nn.Module = self
        for points in zip(*draws, strict=True):
            z = step(z, context, Points(*points))
            step = self.update
            yield z


def build_predictor(config: FunctionSpaceConfig, inputs: int) -> AnchorPredictor:
    """The predictor a configuration asks for; `inputs` features describe each observation."""
    width, rows, axes = config.predictor_width, config.row_count, config.domain.axes
    gaps = config.anchors_per_row - 1
    coordinates = (
        AdaptiveCoordinates(width, rows)
        if config.coordinates == "adaptive"
        else UniformCoordinates(rows)
    )
    scales: LengthScales
    match config.length_scales:
        case "adaptive":
            scales = AdaptiveScales(width, rows, axes, config.anchors)
        case "learned":
            scales = LearnedScales(axes, config.anchors)
        case "fixed":
            scales = FixedScales(axes, config.anchors)
    reads_input = "adaptive" in (config.coordinates, config.length_scales)
    tokens = (
        GapTokens(inputs, width, config.predictor_heads, config.predictor_blocks, gaps)
        if reads_input
        else NoTokens(gaps)
    )
    return AnchorPredictor(tokens, coordinates, scales, config.rows, config.adaptive_axis)


def build_layer(
    config: FunctionSpaceConfig, fourier: FourierFeatures, condition: int
) -> FunctionSpaceLayer:
    """The layer a configuration asks for; `condition` features describe the global input."""
    width, heads = config.width, config.heads
    update = (
        EvaluateMixWrite(width, heads, fourier, condition)
        if config.update == "function-space"
        else AnchorSelfAttention(width, heads)
    )
    kind = ObserveFirstLayer if config.observe == "first-step" else FunctionSpaceLayer
    return kind(Read(width, Attention(width, heads)), update)
