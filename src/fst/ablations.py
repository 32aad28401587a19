"""The paper's ablations (Tables 4 to 6) and variants of ours, each in place of a class of the
method.

`build_predictor` and `build_layer` choose what a configuration asks for.
"""

import math
from collections.abc import Iterator, Sequence

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
    at_anchors,
    ordered_positions,
)
from fst.config import FunctionSpaceConfig
from fst.evaluation_points import PointDraws
from fst.layer import Context, EvaluateMixWrite, FunctionSpaceLayer, Points, Read
from fst.nn import Attention, FourierFeatures, ResidualFeedForward, zero_linear
from fst.types import Anchors

SHORTEST = 0.005  # of `SpacingScales`


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


class StaggeredCoordinates(UniformCoordinates):
    """Ours, not the paper's: even spacing, neighbouring rows apart by half a gap.

    All anchors of a row but those at its ends move by a quarter of a gap, in every other row to the
    other side. So rows see between each other's anchors.
    """

    moves: Tensor

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(math.prod(rows))
        number = torch.zeros(1)  # the sum of a row's numbers on its axes
        for count in rows:
            number = (number[:, None] + torch.arange(count)).flatten()
        self.register_buffer("moves", 0.5 * (number % 2) - 0.25, persistent=False)

    def forward(self, tokens: Float[Tensor, "b j w"]) -> Float[Tensor, "b p j+1"]:
        even = super().forward(tokens)
        inner = even[..., 1:-1] + self.moves[:, None].to(even.dtype) / tokens.shape[1]
        return torch.cat((even[..., :1], inner, even[..., -1:]), dim=-1)


class LearnedCoordinates(nn.Module):
    """Ours, not the paper's: gaps that are learned, and the same for every input.

    A gain over even spacing that remains here does not come from following the input.
    """

    def __init__(self, rows: int, gaps: int) -> None:
        super().__init__()
        self.rows = rows
        self.scores = nn.Parameter(torch.zeros(rows * gaps))

    def forward(self, tokens: Float[Tensor, "b j w"]) -> Float[Tensor, "b p j+1"]:
        scores = self.scores.unflatten(0, (1, self.rows, -1))
        return ordered_positions(scores).expand(len(tokens), -1, -1)


class FixedScales(LengthScales):
    """The same constant everywhere."""

    def __init__(self, axes: int, anchors: int) -> None:
        super().__init__()
        self.axes, self.anchors = axes, anchors

    def forward(
        self, tokens: Float[Tensor, "b j w"], along: Float[Tensor, "b p j+1"]
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(torch.float32, tokens.dtype)
        shape = (len(tokens), self.anchors, self.axes)
        scales = torch.full(shape, INITIAL_SCALE, dtype=dtype, device=tokens.device)
        return scales, scales


class SpacingScales(LengthScales):
    """Ours, not the paper's: multiples of the spacing, so that scales shrink where anchors crowd.

        ℓ = c · spacing,    c = narrowest (widest / narrowest)^sigmoid(base + output of the head),

    where the spacing along a row is the geometric mean of the gaps beside an anchor, and that on
    the other axes is the distance between rows.
    """

    narrowest, widest = 0.3, 1.2

    def __init__(self, width: int, rows: Sequence[int], adaptive_axis: int, anchors: int) -> None:
        super().__init__()
        self.rows, self.adaptive_axis = tuple(rows), adaptive_axis
        self.head = zero_linear(width, math.prod(rows) * (len(rows) + 1))
        self.refinement_base = nn.Parameter(torch.zeros(anchors))
        self.decoding_base = nn.Parameter(torch.zeros(anchors))

    def forward(
        self, tokens: Float[Tensor, "b j w"], along: Float[Tensor, "b p j+1"]
    ) -> tuple[Tensor, Tensor]:
        outputs = self.head(tokens).unflatten(-1, (along.shape[1], -1)).transpose(1, 2)  # b p j s
        outputs = at_anchors(outputs.to(along.dtype)).flatten(1, 2)  # b m s
        shortest, ratio = self.narrowest * self.spacing(along), self.widest / self.narrowest
        refinement, decoding = (
            (shortest * ratio ** torch.sigmoid(base[:, None] + outputs)).clamp_min(SHORTEST)
            for base in (self.refinement_base, self.decoding_base)
        )
        return refinement, decoding

    def spacing(self, along: Float[Tensor, "b p c"]) -> Float[Tensor, "b m s"]:
        """The distance between neighbouring anchors on each axis."""
        gaps = at_anchors(along.diff(dim=-1).log().unsqueeze(-1)).exp().flatten(1, 2)  # b m 1
        between = [1 / (count - 1) if count > 1 else 1.0 for count in self.rows]
        others = along.new_tensor(between).expand(*gaps.shape[:2], -1)
        axis = self.adaptive_axis
        return torch.cat((others[..., :axis], gaps, others[..., axis:]), dim=-1)

    def logarithms(self) -> list[nn.Parameter]:
        return [self.refinement_base, self.decoding_base]


class LocalScales(SpacingScales):
    """So narrow that a query depends on few anchors: the 16 nearest decode as well as all do."""

    widest = 0.7


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
    coordinates: nn.Module
    match config.coordinates:
        case "adaptive":
            coordinates = AdaptiveCoordinates(width, rows)
        case "learned":
            coordinates = LearnedCoordinates(rows, gaps)
        case "staggered":
            coordinates = StaggeredCoordinates(config.rows)
        case "uniform":
            coordinates = UniformCoordinates(rows)
    scales: LengthScales
    match config.length_scales:
        case "adaptive":
            scales = AdaptiveScales(width, rows, axes, config.anchors)
        case "spacing" | "local":
            kind = LocalScales if config.length_scales == "local" else SpacingScales
            scales = kind(width, config.rows, config.adaptive_axis, config.anchors)
        case "learned":
            scales = LearnedScales(axes, config.anchors)
        case "fixed":
            scales = FixedScales(axes, config.anchors)
    tokens: nn.Module = NoTokens(gaps)
    if config.coordinates == "adaptive" or config.scales_read_input:
        tokens = GapTokens(inputs, width, config.predictor_heads, config.predictor_blocks, gaps)
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
