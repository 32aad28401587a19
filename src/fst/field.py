"""The field: anchors and their refined features, callable anywhere in the domain (Equation 6)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from fst.blending import field_at
from fst.decoder import Decoder
from fst.local import weighty_blend
from fst.operators import Output, Standardization
from fst.types import Anchors, Domain, check_neighbors, check_queries

# Numbers held at once while a chunk of queries is decoded: weights, logits and hidden layers. A
# GPU wants many at a time; a CPU is several times faster when they stay in its cache.
CHUNK_NUMBERS = {"cpu": 2**22, "cuda": 2**25}
# Queries whose anchors are looked for together; their tiles times all anchors are held at once.
REGION = 2**15


def queries_at_once(like: Tensor, numbers: int) -> int:
    """How many queries to decode at once, where each holds this many numbers."""
    return max(1, CHUNK_NUMBERS.get(like.device.type, CHUNK_NUMBERS["cuda"]) // numbers)


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
        blended = field_at(
            queries, anchors.positions, anchors.length_scales, self.features, neighbors
        )
        return self._finish(blended, queries)

    def __call__(
        self, queries: Float[Tensor, "b q s"], neighbors: int | None = None
    ) -> Float[Tensor, "b q o"]:
        """Values at queries, in chunks that bound the memory; `neighbors` limits the anchors."""
        queries = check_queries(queries, self.domain, self.like)
        check_neighbors(neighbors)
        batch, count, width = self.features.shape
        size = queries_at_once(queries, batch * (4 * count + 12 * width))
        parts: list[Tensor] = []
        # Many queries at once, because neighbours among them share their lists of anchors.
        for region in self.domain.to_unit(queries).split(REGION, dim=1):
            blended = self._blend(region, neighbors, size)
            pairs = zip(blended.split(size, dim=1), region.split(size, dim=1), strict=True)
            parts += [self._finish(*pair) for pair in pairs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _blend(
        self, queries: Float[Tensor, "b q s"], neighbors: int | None, size: int
    ) -> Float[Tensor, "b q d"]:
        positions, scales = self.unit_anchors.positions, self.unit_anchors.length_scales
        whole = neighbors is None or neighbors >= positions.shape[1]
        if whole and queries.device.type == "cpu" and not torch.is_grad_enabled():
            return weighty_blend(queries, positions, scales, self.features)
        at_once = size if whole else REGION
        parts = queries.split(at_once, dim=1)
        return torch.cat(
            [field_at(part, positions, scales, self.features, neighbors) for part in parts], dim=1
        )

    def _finish(
        self, blended: Float[Tensor, "b q d"], queries: Float[Tensor, "b q s"]
    ) -> Float[Tensor, "b q o"]:
        return self.standardization.restore(self.decoder(blended, queries, self.condition))
