"""The Function-Space Transformer as an image classifier, top to bottom (paper, Appendix D.2).

Images enter, class scores leave. The observations are patches: a feature h from the CNN, plus an
embedding of the patch's bounds, then a residual feed-forward; and the patch's centre. The image
is the unit box with axes (vertical, horizontal), whatever its shape in pixels.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fst.anchors import AdaptiveCoordinates, AnchorPredictor, GapTokens
from fst.base import PointDraws
from fst.classifiers import Classifier
from fst.decoder import PooledHead
from fst.evaluation_points import FixedPoints
from fst.images.config import ImageClassifierConfig
from fst.images.patches import PatchEncoder, PatchGrid, cut
from fst.images.read import DistanceRead
from fst.layer import EvaluateMixWrite, FunctionSpaceLayer, Points
from fst.length_scales import LearnedScales
from fst.nn import MLP, FourierFeatures, Linear, ResidualFeedForward
from fst.types import Anchors

AXES, HORIZONTAL = 2, 1


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
        self.place = MLP(2 * fourier.size, 2 * width, width)
        self.feed_forward = ResidualFeedForward(width)

    def forward(self, patches: Float[Tensor, "b n p p 3"]) -> Float[Tensor, "b n d"]:
        bounds = torch.cat([self.fourier(corner) for corner in self.grid.bounds(patches)], dim=-1)
        return self.feed_forward(self.encode(patches) + self.place(bounds))


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
        self.predict_anchors = AnchorPredictor(
            GapTokens(
                width + fourier.size,
                config.predictor_width,
                config.predictor_heads,
                config.predictor_blocks,
                config.anchors_per_row - 1,
            ),
            AdaptiveCoordinates(config.predictor_width, config.rows),
            LearnedScales(AXES, config.anchors),
            (config.rows,),
            HORIZONTAL,
        )
        self.initial_position = Linear(fourier.size, width, bias=False)  # C_a
        self.layer = FunctionSpaceLayer(
            DistanceRead(width, heads, config.grid),
            EvaluateMixWrite(width, heads, fourier, condition=0),
        )
        self.head = PooledHead(width, len(config.class_names))
        # Fixed for the life of the model, so they are kept with its weights.
        self.register_buffer("points", self._sobol_points())

    def _sobol_points(self) -> Float[Tensor, "u 2"]:
        config = self.config
        stream = FixedPoints(
            steps=1,
            anchors=config.anchors,
            from_anchors=0,
            from_sobol=config.points_from_sobol,
            axes=AXES,
            anchor_seed=config.sobol_seed,
            sobol_seed=config.sobol_seed,
        )
        return stream.draw().uniform[0].to(torch.get_default_dtype())

    def encode(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b n d"]:
        """One token per patch."""
        return self.encode_patches(cut(self.standardize(images), self.config.patch_size))

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
        features = self.initial_position(self.fourier(anchors.positions))  # b m d
        scene = self.layer.remember(tokens, None, anchors, None)
        steps: list[Tensor] = []
        for points in self._points(draws):
            features = self.layer(features, scene, points)
            if record:
                steps.append(features)
        return ImageField(anchors, features, tuple(steps))

    def _points(self, draws: PointDraws | None) -> Iterator[Points]:
        """The evaluation points of each step: the model's own unless others are given."""
        if draws is None:
            none = torch.zeros(0, dtype=torch.long, device=self.points.device)
            return iter([Points(none, self.points)] * self.config.refinement_steps)
        given = draws.to(self.points.device, self.points.dtype)
        return (Points(*points) for points in zip(*given, strict=True))

    def logits(
        self, images: Float[Tensor, "b 3 h w"], draws: PointDraws | None = None
    ) -> Float[Tensor, "b k"]:
        return self.head(self._refine(images, draws).features)

    def learning_rate_groups(self) -> dict[str, list[nn.Parameter]]:
        predictor = self.predict_anchors.predicting()
        known = {id(parameter) for parameter in predictor}
        main = [parameter for parameter in self.parameters() if id(parameter) not in known]
        return {"main": main, "predictor": predictor}

    def undecayed(self) -> list[nn.Parameter]:
        sigma = self.layer.read.attention.bias.log_sigma
        return [*self.predict_anchors.logarithms(), sigma]
