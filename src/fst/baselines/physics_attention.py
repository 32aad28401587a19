"""Transolver's network (Wu et al., 2024), irregular-mesh form: point features in, values out.

Physics attention lets points talk through a few slices. Each head spreads every point x over the
slices g, w_g(x) = softmax_g(W x / temperature), averages the points of a slice into a token,

    token_g = Σ_x w_g(x) V x / (Σ_x w_g(x) + 1e-5),

lets the tokens attend to each other, and hands them back to the points with the same weights.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from fst.baselines.inputs import InputLinear
from fst.nn import MLP


class PhysicsAttention(nn.Module):
    """Attention among the slices of a point set; `mask` is True where a point is real."""

    def __init__(self, width: int, heads: int, slices: int) -> None:
        super().__init__()
        self.heads, head = heads, width // heads
        self.temperature = nn.Parameter(torch.full((heads, 1, 1), 0.5))
        self.assign = nn.Linear(width, width)
        self.assign_slice = nn.Linear(head, slices)
        self.value = nn.Linear(width, width)
        self.slice_query = nn.Linear(head, head, bias=False)
        self.slice_key = nn.Linear(head, head, bias=False)
        self.slice_value = nn.Linear(head, head, bias=False)
        self.output = nn.Linear(width, width)

    def _split(self, points: Float[Tensor, "b p w"]) -> Float[Tensor, "b h p k"]:
        per_head: Tensor = points.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return per_head

    def forward(
        self, points: Float[Tensor, "b p d"], mask: Bool[Tensor, "b p"] | None
    ) -> Float[Tensor, "b p d"]:
        states = self._split(self.assign(points))
        weights = (self.assign_slice(states) / self.temperature).softmax(dim=-1)  # b h p g
        shares = weights if mask is None else weights * mask[:, None, :, None]
        values = self._split(self.value(points))
        total = shares.sum(dim=2).unsqueeze(-1)  # b h g 1
        tokens = torch.einsum("bhpg,bhpk->bhgk", shares, values) / (total + 1e-5)
        mixed = nn.functional.scaled_dot_product_attention(
            self.slice_query(tokens), self.slice_key(tokens), self.slice_value(tokens)
        )
        spread = torch.einsum("bhpg,bhgk->bhpk", weights, mixed)
        attended: Tensor = self.output(spread.transpose(1, 2).flatten(-2))
        return attended


class Block(nn.Module):
    """x + attention(LN x), then x + MLP(LN x), without widening."""

    def __init__(self, width: int, heads: int, slices: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = PhysicsAttention(width, heads, slices)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_forward = MLP(width, width, width)

    def forward(
        self, points: Float[Tensor, "b p d"], mask: Bool[Tensor, "b p"] | None
    ) -> Float[Tensor, "b p d"]:
        points = points + self.attention(self.norm(points), mask)
        points = points + self.feed_forward(self.feed_norm(points))
        return points


class PointNetwork(nn.Module):
    """Transolver proper: point features in, values out."""

    def __init__(
        self, inputs: int, outputs: int, width: int, layers: int, heads: int, slices: int
    ) -> None:
        super().__init__()
        self.embed = nn.Sequential(
            InputLinear(inputs, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.placeholder = nn.Parameter(torch.rand(width) / width)
        self.blocks = nn.ModuleList(Block(width, heads, slices) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, outputs)
        self.apply(_initialize)

    def forward(
        self, points: Float[Tensor, "b p i"], mask: Bool[Tensor, "b p"] | None
    ) -> Float[Tensor, "b p c"]:
        points = self.embed(points) + self.placeholder
        for block in self.blocks:
            points = block(points, mask)
        predicted: Tensor = self.output(self.norm(points))
        return predicted


def _initialize(module: nn.Module) -> None:
    # The authors' code first makes the slice assignment orthogonal, then overwrites it like this.
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
