"""The Function-Space Transformer as an image classifier, top to bottom (paper, Appendix D.2).

Images enter, class scores leave. The observations are patches: a feature h from a CNN, plus an
embedding of the patch's bounds, then a residual feed-forward; and the patch's centre. The anchors
read them with a bias towards near ones. The image is the unit box with axes (vertical, horizontal),
whatever its shape in pixels.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 (the name PyTorch users know)
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.quasirandom import SobolEngine

from fst.anchors import AdaptiveCoordinates, AnchorPredictor, GapTokens, LearnedScales
from fst.classifiers import Classifier, check_classes
from fst.config import Config
from fst.evaluation_points import PointDraws
from fst.layer import EvaluateMixWrite, FunctionSpaceLayer, Read
from fst.nn import MLP, Attention, FourierFeatures, ResidualFeedForward, Spacing
from fst.rbf import squared_distances
from fst.types import Anchors

AXES, HORIZONTAL = 2, 1
INITIAL_SIGMA = 0.20
SMALLEST_SIGMA, LARGEST_SIGMA = 0.03, 0.60


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


@dataclass(frozen=True)
class PatchConfig(Config):
    """A classifier of images that are cut into patches."""

    class_names: tuple[str, ...]
    """Names of the classes, in the order of their scores."""
    image_size: tuple[int, int] = (224, 224)
    """Height and width."""
    patch_size: int = 16
    """Pixels on each side of a patch."""

    def __post_init__(self) -> None:
        check_classes(self.class_names)
        super().__post_init__()
        height, width = self.image_size
        if min(height, width) < 1 or height % self.patch_size or width % self.patch_size:
            raise ValueError(
                f"image_size must be a multiple of patch_size ({self.patch_size}) on both axes, "
                f"got {height} by {width}"
            )

    @property
    def grid(self) -> PatchGrid:
        height, width = self.image_size
        return PatchGrid(height // self.patch_size, width // self.patch_size)


@dataclass(frozen=True)
class ImageClassifierConfig(PatchConfig):
    """The Function-Space Transformer as a classifier.

    Anchors stand on `rows` fixed horizontal rows of `anchors_per_row` each and move along them.
    """

    channels: int = 64
    """Of the patch encoder's convolutions."""

    width: int = 200
    """Features of a token."""
    heads: int = 8
    """Heads of every attention."""
    fourier_bands: int = 32
    """Frequencies by which a coordinate is encoded, on each axis."""
    fourier_spacing: Spacing = "linear"
    """How these frequencies grow: by equal steps or by equal factors."""

    rows: int = 32
    """Horizontal rows of anchors."""
    anchors_per_row: int = 32
    """Anchors that each row places along the adaptive axis."""
    predictor_width: int = 104
    """Features within the coordinate predictor."""
    predictor_heads: int = 4
    """Heads of its attention."""
    predictor_blocks: int = 2
    """Its blocks."""

    refinement_steps: int = 4
    """Read, mix and write passes; they share their parameters."""
    points_from_sobol: int = 512
    """Evaluation points, the same in every step and for every image."""
    sobol_seed: int = 2026091323
    """Of the Sobol sequence they come from."""

    least: ClassVar[Mapping[str, int]] = {"anchors_per_row": 2}

    @property
    def anchors(self) -> int:
        return self.rows * self.anchors_per_row


def cut(images: Float[Tensor, "b 3 h w"], patch_size: int) -> Float[Tensor, "b n p p 3"]:
    """Non-overlapping patches, row by row."""
    patches = images.unflatten(3, (-1, patch_size)).unflatten(2, (-1, patch_size))  # b 3 r p c p
    flat: Tensor = patches.permute(0, 2, 4, 3, 5, 1).flatten(1, 2).contiguous()
    return flat


class ResidualBlock(nn.Module):
    """GELU(x + conv(GELU(conv(x))))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, maps: Float[Tensor, "k c p p"]) -> Float[Tensor, "k c p p"]:
        return F.gelu(maps + self.second(F.gelu(self.first(maps))))


class PatchEncoder(nn.Module):
    """The residual CNN that FST and CNN-ViT share:

        x = GELU(conv(patch)),   x = GELU(x + conv(GELU(conv(x)))) twice,   W mean(x) + bias

    The convolutions see one patch at a time, with zeros beyond its border: our reading of "a CNN
    encodes each patch". No colour leaks into a neighbour's feature.

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
        pooled = maps.mean(dim=(1, 2)).unflatten(0, patches.shape[:2])
        tokens: Tensor = self.project(pooled)  # b n d
        return tokens


class DistanceBias(nn.Module):
    """B = -|a - c|² / (2 σ²), which every head adds to the logit of anchor a and patch centre c.

    The paper's numerator also has (w² + h²)/12: it is the same for all patches, and softmax does
    not see it. σ is one learned number, the same in every head, kept as its logarithm.
    """

    def __init__(self, grid: PatchGrid) -> None:
        super().__init__()
        self.grid = grid
        self.log_sigma = nn.Parameter(torch.tensor(math.log(INITIAL_SIGMA)))

    def sigma(self) -> Float[Tensor, ""]:
        return self.log_sigma.exp().clamp(SMALLEST_SIGMA, LARGEST_SIGMA)

    def forward(self, positions: Float[Tensor, "b m 2"]) -> Float[Tensor, "b m n"]:
        centres = self.grid.centres(self.log_sigma).unsqueeze(0)  # 1 n 2
        scales = self.sigma().expand_as(centres)
        return -0.5 * squared_distances(positions, centres, scales)


class DistanceAttention(Attention):
    """Multi-head attention with the bias."""

    def __init__(self, width: int, heads: int, grid: PatchGrid) -> None:
        super().__init__(width, heads)
        self.bias = DistanceBias(grid)

    def precompute(self, tokens: Float[Tensor, "b n d"], positions: Float[Tensor, "b m 2"]) -> Any:
        """Keys, values and bias: patches and anchors stay where they are."""
        return (*self.keys_values(tokens), self.bias(positions).unsqueeze(1))

    def forward(
        self,
        tokens: Float[Tensor, "b m d"],
        keys_values: Any,
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b m d"]:
        del mask  # every patch is real
        keys, values, bias = keys_values
        queries = self.split(self.query(tokens))
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=bias.to(queries.dtype)
        )
        attended: Tensor = self.output(mixed.transpose(1, 2).flatten(-2))
        return attended


class DistanceRead(Read):
    """Equation 2 with the bias: the anchors attend to the patches, and to near ones more."""

    attention: DistanceAttention

    def __init__(self, width: int, heads: int, grid: PatchGrid) -> None:
        super().__init__(width, DistanceAttention(width, heads, grid))

    def precompute(self, tokens: Float[Tensor, "b n d"], anchors: Anchors) -> Any:
        return self.attention.precompute(self.norm_h(tokens), anchors.positions)


class PooledHead(nn.Module):
    """Normalise each anchor's feature, average over the anchors, and classify."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, outputs)

    def forward(self, features: Float[Tensor, "b m d"]) -> Float[Tensor, "b o"]:
        logits: Tensor = self.output(self.norm(features).mean(dim=1))
        return logits


@dataclass(frozen=True)
class ImageField:
    """Anchors in the unit box, (vertical, horizontal), and their refined features."""

    anchors: Anchors
    features: Float[Tensor, "b m d"]
    steps: tuple[Float[Tensor, "b m d"], ...] = ()
    """The features after each refinement step, when they were asked for."""


class PatchTokens(nn.Module):
    """Patches to tokens: CNN feature + MLP[γ(first corner), γ(opposite corner)], then x + FFN."""

    def __init__(
        self, channels: int, width: int, fourier: FourierFeatures, grid: PatchGrid
    ) -> None:
        super().__init__()
        self.fourier, self.grid = fourier, grid
        self.encode = PatchEncoder(channels, width)
        # Of the position; this is its name in stored weights.
        self.place = MLP(2 * fourier.size, 2 * width, width)
        self.feed_forward = ResidualFeedForward(width)

    def forward(self, patches: Float[Tensor, "b n p p 3"]) -> Float[Tensor, "b n d"]:
        bounds = torch.cat([self.fourier(corner) for corner in self.grid.bounds(patches)], dim=-1)
        tokens: Tensor = self.feed_forward(self.encode(patches) + self.place(bounds))
        return tokens


class ImageClassifier(Classifier):
    """Adaptive anchors on horizontal rows, refined by reading patches, pooled into scores."""

    config_type = ImageClassifierConfig
    points: Tensor

    def __init__(self, config: ImageClassifierConfig) -> None:
        super().__init__(config.image_size, config.class_names)
        self.config = config
        width, heads = config.width, config.heads
        fourier = FourierFeatures(AXES, config.fourier_bands, config.fourier_spacing)
        self.fourier = fourier
        self.encode_patches = PatchTokens(config.channels, width, fourier, config.grid)
        sizes = config.predictor_width, config.predictor_heads, config.predictor_blocks
        tokens = GapTokens(width + fourier.size, *sizes, config.anchors_per_row - 1)
        coordinates = AdaptiveCoordinates(config.predictor_width, config.rows)
        scales = LearnedScales(AXES, config.anchors)
        rows = (config.rows,)
        self.predict_anchors = AnchorPredictor(tokens, coordinates, scales, rows, HORIZONTAL)
        self.initial_position = nn.Linear(fourier.size, width, bias=False)  # C_a
        read = DistanceRead(width, heads, config.grid)
        update = EvaluateMixWrite(width, heads, fourier, condition=0)
        self.layer = FunctionSpaceLayer(read, update)
        self.head = PooledHead(width, len(config.class_names))
        # Fixed for the life of the model, so they are kept with its weights.
        sobol = SobolEngine(AXES, scramble=True, seed=config.sobol_seed)
        points = sobol.draw(config.points_from_sobol, dtype=torch.float64)
        self.register_buffer("points", points.to(torch.get_default_dtype()))

    def encode(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b n d"]:
        tokens: Tensor = self.encode_patches(cut(self.standardize(images), self.config.patch_size))
        return tokens

    def represent(
        self,
        images: Float[Tensor, "b 3 h w"],
        draws: PointDraws | None = None,
        record: bool = False,
    ) -> ImageField:
        """Anchors and refined features; `record` also keeps the features of every step."""
        self.check(images)
        return self._refine(images, draws, record)

    def _refine(
        self, images: Float[Tensor, "b 3 h w"], draws: PointDraws | None, record: bool = False
    ) -> ImageField:
        """The walk: encode, place anchors, refine."""
        tokens = self.encode(images)  # b n d
        centres = self.fourier(self.config.grid.centres(images)).expand(len(images), -1, -1)
        anchors = self.predict_anchors(torch.cat((tokens, centres), dim=-1), None)
        embedded = self.fourier(anchors.positions).to(tokens.dtype)
        features = self.initial_position(embedded)  # b m d
        context = self.layer.precompute(tokens, None, anchors, None)
        steps = tuple(self.layer.refine(features, context, self._points(draws)))
        return ImageField(anchors, steps[-1], steps if record else ())

    def _points(self, draws: PointDraws | None) -> PointDraws:
        """The evaluation points of each step: the model's own unless others are given."""
        if draws is not None:
            return draws.to(self.points.device, self.points.dtype)
        steps = self.config.refinement_steps
        none = torch.zeros(steps, 0, dtype=torch.long, device=self.points.device)
        return PointDraws(none, self.points.expand(steps, -1, -1))

    def logits(
        self, images: Float[Tensor, "b 3 h w"], draws: PointDraws | None = None
    ) -> Float[Tensor, "b k"]:
        logits: Tensor = self.head(self._refine(images, draws).features)
        return logits

    def predicting(self) -> list[nn.Parameter]:
        return self.predict_anchors.predicting()

    def no_weight_decay(self) -> list[nn.Parameter]:
        sigma = [each for name, each in self.named_parameters() if name.endswith("log_sigma")]
        return [*self.predict_anchors.scales.logarithms(), *sigma]
