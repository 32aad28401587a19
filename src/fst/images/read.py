"""The read attention of images: anchors attend to patches, and to near ones more.

To the logit of anchor a and patch centre c every head adds (paper, Appendix D.2)

    B = -(|a - c|² + (w² + h²)/12) / (2 σ²).

The size term is the same for all patches, and softmax forgets it. The square is a dot product,

    -|a - c|²/(2 σ²) = [a/σ², 1, -|a|²/(2 σ²)] · [c, -|c|²/(2 σ²), 1],

so plain attention with a few more channels in each head computes it: no anchors-by-patches tensor
is made. Coordinates count from the middle of the image. So that bfloat16 loses nothing, patch
centres become odd whole numbers, which it holds exactly, and the rest the sum of two parts (see
`two_parts`). The last channel changes no weight either and needs one part; it is there for the
backward: rounded gradients of an anchor's logits do not quite sum to zero, and with it the error
counts from the anchor and not from the middle of the image.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (the name PyTorch users know)
from jaxtyping import Bool, Float
from torch import Tensor, nn

from fst.attention import (
    FusedProjection,
    Memory,
    OutputWeights,
    Projection,
    attend,
    joined,
    joint_projection,
)
from fst.images.patches import PatchGrid
from fst.layer import Read
from fst.prepared import Prepared
from fst.types import Anchors

INITIAL_SIGMA = 0.20
SMALLEST_SIGMA, LARGEST_SIGMA = 0.03, 0.60
EXTRA_CHANNELS = 7  # two parts of both axes and of the patch's own term, and the anchor's own
MOST_PATCHES = 256  # on an axis: beyond, odd numbers are no longer exact in bfloat16


class BiasedMemory(NamedTuple):
    """Keys and values of the patches, and the queries' extra channels, which belong to anchors."""

    patches: Memory
    query_channels: Float[Tensor, "b m e"]


def two_parts(exact: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`exact` as a number with bfloat16's eight digits and the rest, both in `dtype`.

    In bfloat16 the sum keeps sixteen binary digits, in wider dtypes all. The gradient flows
    through the first alone: attention multiplies both by the same factor, so once is enough.
    """
    fixed = exact.detach()
    rest = fixed - fixed.to(torch.bfloat16).to(fixed.dtype)
    return (exact - rest).to(dtype), rest.to(dtype)


class DistanceBias(nn.Module):
    """The bias as extra channels of queries and keys, times `factor`, which attention divides by.

    σ is one learned number, the same in every head, kept as its logarithm.
    """

    counts: Tensor

    def __init__(self, grid: PatchGrid, factor: float) -> None:
        super().__init__()
        if max(grid.rows, grid.columns) > MOST_PATCHES:
            raise ValueError(
                f"an axis may have at most {MOST_PATCHES} patches, "
                f"got {grid.rows} by {grid.columns}: take a larger patch_size"
            )
        self.grid, self.factor = grid, factor
        self.log_sigma = nn.Parameter(torch.tensor(math.log(INITIAL_SIGMA)))
        counts = torch.tensor((float(grid.rows), float(grid.columns)))
        self.register_buffer("counts", counts, persistent=False)

    def sigma(self) -> Float[Tensor, ""]:
        return self.log_sigma.exp().clamp(SMALLEST_SIGMA, LARGEST_SIGMA)

    def of_queries(
        self, positions: Float[Tensor, "b m 2"], dtype: torch.dtype
    ) -> Float[Tensor, "b m e"]:
        """[both parts of a/σ² per half patch, 1, 1, -|a|²/(2 σ²)]."""
        half_patch = 0.5 / self.counts
        centred, sharpness = positions - 0.5, self.factor / self.sigma().square()
        places = centred * (sharpness * half_patch)
        ones = torch.ones_like(places, dtype=dtype)
        own = (-0.5 * sharpness * centred.square().sum(dim=-1, keepdim=True)).to(dtype)
        return torch.cat((*two_parts(places, dtype), ones, own), dim=-1)

    def of_keys(self, dtype: torch.dtype) -> Float[Tensor, "n e"]:
        """[c in half patches, twice, then both parts of -|c|²/(2 σ²), 1]."""
        centres = self.grid.centres(self.log_sigma) - 0.5  # n 2
        half_patches = (2 * self.counts * centres).round().to(dtype)
        squares = centres.square().sum(dim=-1, keepdim=True)
        own = -0.5 * self.factor * squares / self.sigma().square()
        ones = torch.ones_like(own, dtype=dtype)
        return torch.cat((half_patches, half_patches, *two_parts(own, dtype), ones), dim=-1)


class DistanceAttention(nn.Module):
    """Multi-head attention with the bias; heads are padded to a size that fast kernels take."""

    def __init__(self, width: int, heads: int, grid: PatchGrid) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, got {width} and {heads}")
        self.heads, self.head_size = heads, width // heads
        self.padding = -(self.head_size + EXTRA_CHANNELS) % 8
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.bias = DistanceBias(grid, math.sqrt(self.head_size))

    def _widen(
        self, tokens: Float[Tensor, "b p d"], channels: Float[Tensor, "#b p e"]
    ) -> Float[Tensor, "b h p k"]:
        """Split into heads, each with the same extra channels and zeros up to the full size."""
        heads = tokens.unflatten(-1, (self.heads, -1))  # b p h k
        extra = F.pad(channels, (0, self.padding)).unsqueeze(2)
        extra = extra.expand(len(tokens), -1, self.heads, -1)
        return torch.cat((heads, extra), dim=-1).transpose(1, 2)

    def remember(
        self, tokens: Float[Tensor, "b n d"], positions: Float[Tensor, "b m 2"]
    ) -> BiasedMemory:
        """What all refinement steps share: patches and anchors stay where they are."""
        keys, values = self.key(tokens), self.value(tokens)
        channels = self.bias.of_keys(keys.dtype).unsqueeze(0)
        wide = self._widen(keys, channels), self._widen(values, torch.zeros_like(channels))
        return BiasedMemory(Memory(*wide).together(), self.bias.of_queries(positions, keys.dtype))

    def _widened(
        self, tokens: Float[Tensor, "b m d"], norm: nn.LayerNorm | None
    ) -> tuple[Projection | FusedProjection, OutputWeights]:
        """The anchors' queries with room for their channels, and the output's weights.

        The extra channels of the values are zero: the output has zeros for them, not a slice.
        """
        size = self.head_size + EXTRA_CHANNELS + self.padding
        queries = joint_projection(tokens, norm, (self.query,), self.heads, size)
        return queries, OutputWeights.of(self.output, self.heads, size)

    def forward(
        self,
        tokens: Float[Tensor, "b m d"],
        memory: BiasedMemory,
        norm: nn.LayerNorm | None = None,
        prepared: Prepared | None = None,
        residual: Float[Tensor, "b m d"] | None = None,
    ) -> Float[Tensor, "b m d"]:
        project, output = (prepared or Prepared()).once(
            (norm, self), lambda: self._widened(tokens, norm)
        )
        room = F.pad(memory.query_channels, (self.head_size, self.padding)).unsqueeze(2)  # b m 1 k
        queries = (project(tokens).unflatten(-1, (self.heads, -1)) + room).transpose(1, 2)
        mixed, one = attend(queries, memory.patches, 1 / self.bias.factor, self.head_size)
        return joined(mixed, one, output, self.output.bias, residual)  # b m d


class DistanceRead(Read):
    """Equation 2 with the bias: the anchors attend to the patches."""

    attention: DistanceAttention

    def __init__(self, width: int, heads: int, grid: PatchGrid) -> None:
        super().__init__(width, DistanceAttention(width, heads, grid))

    def remember(
        self,
        tokens: Float[Tensor, "b n d"],
        mask: Bool[Tensor, "b n"] | None,
        anchors: Anchors,
    ) -> BiasedMemory:
        del mask  # every patch is real
        return self.attention.remember(self.norm_h(tokens), anchors.positions)
