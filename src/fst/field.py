"""The field: anchors and their refined features, callable anywhere in the domain (Equation 6)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from fst.decoder import Decoder
from fst.operators import Output, Standardization
from fst.rbf import blend, field_at, rbf_weights
from fst.types import Anchors, Domain, check_neighbors, check_queries

# Numbers held at once while a chunk of queries is decoded: weights, logits and hidden layers.
CHUNK_NUMBERS = 2**25


@dataclass(frozen=True)
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
        queries = self.domain.to_unit(queries)
        anchors = self.unit_anchors
        if neighbors is None:
            blended = field_at(queries, anchors.positions, anchors.length_scales, self.features)
        else:
            weights = rbf_weights(queries, anchors.positions, anchors.length_scales, neighbors)
            blended = blend(weights, self.features)
        values = self.decoder(blended, queries, self.condition)
        return self.standardization.restore(values)

    def __call__(
        self, queries: Float[Tensor, "b q s"], neighbors: int | None = None
    ) -> Float[Tensor, "b q o"]:
        """Values at queries, in chunks that bound the memory; `neighbors` limits the anchors."""
        queries = check_queries(queries, self.domain, self.like)
        check_neighbors(neighbors)
        batch, count, width = self.features.shape
        size = max(1, CHUNK_NUMBERS // (batch * (4 * count + 12 * width)))
        parts = [self.decode(part, neighbors) for part in queries.split(size, dim=1)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
