"""The field: anchors and their refined features, callable anywhere in the domain (Equation 6)."""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fst.nn import MLP, FourierFeatures, PointMLP, ResidualFeedForward
from fst.operators import Output, Standardization, queries_at_once
from fst.rbf import Blend
from fst.symmetry import Symmetry
from fst.types import Anchors, Domain, check_neighbors, check_queries


class Decoder(nn.Module):
    """Equation 6: an MLP on [blend, γ(q), condition], with the decoding length scales.

    The MLP is F_θ of the layer's kind, a residual feed-forward, a norm, and an output MLP.
    """

    def __init__(self, width: int, fourier: FourierFeatures, condition: int, outputs: int) -> None:
        super().__init__()
        self.fourier, self.blend = fourier, Blend()
        self.evaluate = PointMLP(width, fourier.size, condition, 2 * width, width)
        self.feed_forward = ResidualFeedForward(width)
        self.norm = nn.LayerNorm(width)
        self.output = MLP(width, 2 * width, outputs)

    def forward(
        self,
        queries: Float[Tensor, "b q s"],
        anchors: Anchors,
        features: Float[Tensor, "b m d"],
        condition: Float[Tensor, "b c"] | None,
        neighbors: int | None = None,
    ) -> Float[Tensor, "b q o"]:
        positions, scales = anchors.positions, anchors.length_scales
        blended = self.blend(queries, positions, scales, features, neighbors)  # b q d
        return self.pointwise(blended, queries, condition)

    def pointwise(
        self,
        blended: Float[Tensor, "b q d"],
        queries: Float[Tensor, "b q s"],
        condition: Float[Tensor, "b c"] | None,
    ) -> Float[Tensor, "b q o"]:
        """The MLP: each query by itself."""
        evaluated = self.evaluate(blended, self.fourier(queries), condition)
        decoded: Tensor = self.output(self.norm(self.feed_forward(evaluated)))
        return decoded

    def queries_at_once(
        self,
        queries: Float[Tensor, "b q s"],
        features: Float[Tensor, "b m d"],
        neighbors: int | None,
    ) -> int:
        """How many queries to decode at once, so that weights and hidden layers fit the memory."""
        batch, anchors, width = features.shape
        return queries_at_once(queries, batch * (4 * anchors + 12 * width))


# Each is equal to itself alone: PyTorch's compiler asks for the hash of one that is half made.
@dataclass(frozen=True, eq=False)
class Field(Output):
    """Anchors and their refined features: refine once, ask any number of times."""

    domain: Domain
    unit_anchors: Anchors
    features: Float[Tensor, "b m d"]
    condition: Float[Tensor, "b c"] | None
    decoder: Decoder
    standardization: Standardization
    steps: tuple[Float[Tensor, "b m d"], ...] = ()
    """The features after each refinement step, when they were asked for."""

    @property
    def like(self) -> Tensor:
        return self.unit_anchors.positions

    @property
    def anchors(self) -> Anchors:
        """Coordinates and length scales in the units of the domain."""
        inside = self.unit_anchors
        return Anchors(
            self.domain.from_unit(inside.positions),
            self.domain.stretch(inside.length_scales),
            self.domain.stretch(inside.refinement_length_scales),
        )

    def decode(
        self, queries: Float[Tensor, "b q s"], neighbors: int | None = None
    ) -> Float[Tensor, "b q o"]:
        """Values at queries, unchecked and in one piece: the training path."""
        unit = self.domain.to_unit(queries)
        values = self.decoder(unit, self.unit_anchors, self.features, self.condition, neighbors)
        return self.standardization.restore(values)

    def __call__(
        self, queries: Float[Tensor, "b q s"], neighbors: int | None = None
    ) -> Float[Tensor, "b q o"]:
        """Values at queries, in chunks that bound the memory; `neighbors` limits the anchors."""
        queries = check_queries(queries, self.domain, self.like)
        check_neighbors(neighbors)
        size = self.decoder.queries_at_once(queries, self.features, neighbors)
        parts = [self.decode(part, neighbors) for part in queries.split(size, dim=1)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def mean_with(self, image: "Field", symmetry: Symmetry) -> "SymmetricField":
        own = {each.name: getattr(self, each.name) for each in fields(Field)}
        return SymmetricField(**own, own=self, image=image, symmetry=symmetry)


@dataclass(frozen=True, kw_only=True, eq=False)
class SymmetricField(Field):
    """The mean of a field and of the field of the observations' image, mapped back.

    Its anchors and features are those of the first.
    """

    own: Field
    image: Field
    symmetry: Symmetry

    def decode(
        self, queries: Float[Tensor, "b q s"], neighbors: int | None = None
    ) -> Float[Tensor, "b q o"]:
        image = self.image.decode(self.symmetry.positions(queries, self.domain), neighbors)
        return 0.5 * (self.own.decode(queries, neighbors) + self.symmetry.sign * image)

    def __call__(
        self, queries: Float[Tensor, "b q s"], neighbors: int | None = None
    ) -> Float[Tensor, "b q o"]:
        own = self.own(queries, neighbors)  # which checks them
        image = self.image(self.symmetry.positions(queries, self.domain), neighbors)
        return 0.5 * (own + self.symmetry.sign * image)
