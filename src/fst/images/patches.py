"""Images to patch features (paper, Appendix D.2, stages 1 to 4 of the patch encoder).

Images (b 3 h w) enter; non-overlapping patches (b n p p 3) in reading order leave `cut`, and one
feature per patch (b n d) leaves `PatchEncoder`:

    x = GELU(conv(patch)),   x = GELU(x + conv(GELU(conv(x)))) twice,   feature = W mean(x) + bias

The convolutions see one patch at a time, with zeros beyond its border: our reading of "a CNN
encodes each patch". No colour leaks into a neighbour's feature.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (the name PyTorch users know)
from jaxtyping import Float
from torch import Tensor, nn


@dataclass(frozen=True)
class PatchGrid:
    """Equal patches that tile the image, which is the unit box; axes are (vertical, horizontal)."""

    rows: int
    columns: int

    @property
    def count(self) -> int:
        return self.rows * self.columns

    def _corners(self, offset: float, like: Tensor) -> Float[Tensor, "n 2"]:
        axes = [
            (torch.arange(count, dtype=like.dtype, device=like.device) + offset) / count
            for count in (self.rows, self.columns)
        ]
        return torch.cartesian_prod(*axes)

    def centres(self, like: Tensor) -> Float[Tensor, "n 2"]:
        return self._corners(0.5, like)

    def bounds(self, like: Tensor) -> tuple[Float[Tensor, "n 2"], Float[Tensor, "n 2"]]:
        """The corner nearest the origin and the one opposite."""
        return self._corners(0.0, like), self._corners(1.0, like)


def cut(images: Float[Tensor, "b 3 h w"], patch_size: int) -> Float[Tensor, "b n p p 3"]:
    """Non-overlapping patches, row by row."""
    patches = images.unflatten(3, (-1, patch_size)).unflatten(2, (-1, patch_size))  # b 3 r p c p
    return patches.permute(0, 2, 4, 3, 5, 1).flatten(1, 2).contiguous()


class ResidualBlock(nn.Module):
    """GELU(x + conv(GELU(conv(x))))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, maps: Float[Tensor, "k c p p"]) -> Float[Tensor, "k c p p"]:
        return F.gelu(maps + self.second(F.gelu(self.first(maps))))


class PatchEncoder(nn.Module):
    """The residual CNN that FST and CNN-ViT share.

    The pointwise projection comes before the mean in the paper and after it here: both are linear,
    so they commute, and the wide maps are never made. The colour maps of all patches are still the
    largest tensors of a training step: nine of b·h·w·channels numbers are kept for the backward.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(ResidualBlock(channels) for _ in range(2)))
        self.project = nn.Linear(channels, width)
        for module in self.modules():  # no norm repairs a signal that shrinks: He's initialisation
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, patches: Float[Tensor, "b n p p 3"]) -> Float[Tensor, "b n d"]:
        # Channels stay last in memory: the patches are cut that way, and convolutions like it. The
        # mean is taken with channels last, or its gradient would come in another order.
        maps = patches.flatten(0, 1).permute(0, 3, 1, 2)  # b*n 3 p p
        maps = self.blocks(F.gelu(self.stem(maps))).permute(0, 2, 3, 1)  # b*n p p c
        return self.project(maps.mean(dim=(1, 2)).unflatten(0, patches.shape[:2]))  # b n d
