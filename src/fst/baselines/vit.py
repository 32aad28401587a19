"""The paper's image baselines: ViT (Dosovitskiy et al., 2021) and ViT on FST's patch encoder.

Images enter, class scores leave:

    x = [class token, patches] + positions;   x = x + attention(LN x),  x = x + FFN(LN x), repeated
    logits = W LN(x at the class token) + bias

Linear weights, the class token and the positions start from the truncated normal that is usual for
ViTs, biases at zero. The patch encoder keeps the initialisation it has in FST.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (the name PyTorch users know)
from jaxtyping import Float
from torch import Tensor, nn

from fst.baselines.shared import INITIAL_STD, initialize
from fst.classifiers import Classifier
from fst.evaluation_points import PointDraws
from fst.nn import Attention
from fst.vision import PatchConfig, PatchEncoder, cut


@dataclass(frozen=True)
class ViTConfig(PatchConfig):
    """A vision transformer on linearly projected patches."""

    width: int = 176
    """Features of a token."""
    layers: int = 10
    """Blocks of the network."""
    heads: int = 4
    """Heads of every attention."""
    hidden: int = 423
    """Width inside each feed-forward."""


@dataclass(frozen=True)
class CNNViTConfig(ViTConfig):
    """The same transformer on patches encoded by FST's residual CNN."""

    channels: int = 64
    """Of the patch encoder's convolutions."""
    encoder_width: int = 200
    """Features of the patch encoder."""


class AlignedMLP(nn.Module):
    """Linear, GELU, linear, with the hidden width padded to a multiple of eight as it runs.

    Matrix units want such widths. The added hidden numbers are GELU(0) = 0: nothing changes.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, tokens: Float[Tensor, "b p d"]) -> Float[Tensor, "b p d"]:
        first, second, extra = self.first, self.second, -self.first.out_features % 8
        weight, bias = F.pad(first.weight, (0, 0, 0, extra)), F.pad(first.bias, (0, extra))
        hidden = F.gelu(F.linear(tokens, weight, bias))
        return F.linear(hidden, F.pad(second.weight, (0, extra)), second.bias)


class Block(nn.Module):
    """Pre-norm self-attention and feed-forward."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed_forward = AlignedMLP(width, hidden)

    def forward(self, tokens: Float[Tensor, "b p d"]) -> Float[Tensor, "b p d"]:
        tokens = tokens + self.attention.attend_to_self(self.norm(tokens))
        tokens = tokens + self.feed_forward(self.feed_norm(tokens))
        return tokens


class PatchTransformer(Classifier):
    """A transformer over embedded patches that answers from its class token."""

    def __init__(self, config: ViTConfig, embed: nn.Module) -> None:
        super().__init__(config.image_size, config.class_names)
        self.config = config
        width = config.width
        self.embed = embed
        self.class_token = nn.Parameter(torch.empty(1, width))
        self.positions = nn.Parameter(torch.empty(1 + config.grid.count, width))
        for parameter in (self.class_token, self.positions):
            nn.init.trunc_normal_(parameter, std=INITIAL_STD)
        self.blocks = nn.Sequential(
            *(Block(width, config.heads, config.hidden) for _ in range(config.layers))
        ).apply(initialize)
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, len(config.class_names)).apply(initialize)

    def logits(
        self, images: Float[Tensor, "b 3 h w"], draws: PointDraws | None = None
    ) -> Float[Tensor, "b k"]:
        patches = self.embed(cut(self.standardize(images), self.config.patch_size))  # b n d
        first = self.class_token.expand(len(images), -1, -1)
        tokens = torch.cat((first, patches), dim=1) + self.positions  # b 1+n d
        logits: Tensor = self.output(self.norm(self.blocks(tokens)[:, 0]))
        return logits


class VisionTransformer(PatchTransformer):
    """ViT: one linear map of all colours of a patch."""

    config_type = ViTConfig

    def __init__(self, config: ViTConfig) -> None:
        project = nn.Linear(3 * config.patch_size**2, config.width).apply(initialize)
        super().__init__(config, nn.Sequential(nn.Flatten(start_dim=2), project))


class CNNVisionTransformer(PatchTransformer):
    """CNN-ViT: FST's patch encoder and a linear map to the transformer's width."""

    config_type = CNNViTConfig

    def __init__(self, config: CNNViTConfig) -> None:
        encode = PatchEncoder(config.channels, config.encoder_width)
        project = nn.Linear(config.encoder_width, config.width).apply(initialize)
        super().__init__(config, nn.Sequential(encode, project))
