"""Perceiver IO (Jaegle et al., 2022), in the sizes of the paper's Appendix B.

Enters: observations anywhere. Leaves: latents that answer queries anywhere. Learned latents read
the observations by cross-attention, mix by self-attention, and are read by output queries:

    z = Cross(latents (+ condition), P(γ(x)) + V v)
    z = Self(z), once for each layer
    u(q) = W LN(Cross(P(γ(q)), z))

P is one position MLP, shared by observations and queries. Every block is pre-norm with a residual
connection around its attention and around its feed-forward.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from fst.baselines.shared import INITIAL_STD, ModelOutput, without_padding
from fst.config import OperatorConfig
from fst.evaluation_points import PointDraws
from fst.model import ConditionEncoder
from fst.nn import MLP, Attention, FourierFeatures, Spacing
from fst.operators import Operator
from fst.types import Observations


@dataclass(frozen=True)
class PerceiverIOConfig(OperatorConfig):
    """Everything that shapes the model. The defaults are the paper's, for Burgers and Darcy."""

    width: int = 240
    """Features of a token."""
    heads: int = 8
    """Heads of every attention."""
    latents: int = 256
    """Latent vectors that read the observations."""
    layers: int = 6
    """Self-attention blocks between the two cross-attention blocks."""
    fourier_bands: int = 32
    """Frequencies by which a coordinate is encoded, on each axis."""
    fourier_spacing: Spacing = "linear"
    """How these frequencies grow: by equal steps or by equal factors."""


class Block(nn.Module):
    """x + attention(LN x), then x + MLP(LN x), without widening.

    The attention reads LN x itself or, where it `crosses`, something else, after a norm of its own.
    """

    def __init__(self, width: int, heads: int, *, crosses: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        if crosses:
            self.memory_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_forward = MLP(width, width, width)

    def forward(
        self,
        tokens: Float[Tensor, "b p d"],
        read: Float[Tensor, "b n d"] | None = None,
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b p d"]:
        normed = self.norm(tokens)
        if read is None:
            tokens = tokens + self.attention.attend_to_self(normed)
        else:
            keys_values = self.attention.keys_values(self.memory_norm(read))
            tokens = tokens + self.attention(normed, keys_values, mask)
        tokens = tokens + self.feed_forward(self.feed_norm(tokens))
        return tokens


class PerceiverIO(Operator):
    """Latents between observations and queries."""

    config_type = PerceiverIOConfig

    def __init__(self, config: PerceiverIOConfig) -> None:
        super().__init__(
            config.domain, config.value_channels, config.output_channels, config.condition_channels
        )
        self.config = config
        width, heads = config.width, config.heads
        self.fourier = FourierFeatures(
            config.domain.axes, config.fourier_bands, config.fourier_spacing
        )
        self.embed_position = MLP(self.fourier.size, width, width)
        self.embed_value = nn.Linear(config.value_channels, width)
        self.latents = nn.Parameter(torch.empty(config.latents, width))
        nn.init.trunc_normal_(self.latents, std=INITIAL_STD)
        if config.condition_channels:
            self.condition = ConditionEncoder(
                config.condition_channels, width, config.log_condition
            )
        self.read = Block(width, heads, crosses=True)
        self.mix = nn.ModuleList(Block(width, heads) for _ in range(config.layers))
        self.answer = Block(width, heads, crosses=True)
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, config.output_channels)

    def represent(self, observations: Observations, draws: PointDraws | None = None) -> ModelOutput:
        positions, values = without_padding(observations, self.domain)
        located = self.embed_position(self.fourier(positions))
        tokens = located + self.embed_value(self.standardize_values(values))  # b n d
        latents = self.latents.expand(len(observations), -1, -1)  # b l d
        if observations.condition is not None:
            latents = latents + self.condition(observations.condition).unsqueeze(1)
        latents = self.read(latents, tokens, observations.mask)
        for block in self.mix:
            latents = block(latents)
        numbers = 12 * self.config.width + self.config.heads * self.config.latents
        return ModelOutput(self.domain, self, latents, observations.positions, numbers)

    def decode(
        self, latents: Float[Tensor, "b l d"], queries: Float[Tensor, "b q s"]
    ) -> Float[Tensor, "b q c"]:
        tokens = self.embed_position(self.fourier(self.domain.to_unit(queries)))
        predicted = self.output(self.norm(self.answer(tokens, latents)))
        return self.standardize_outputs.restore(predicted)
