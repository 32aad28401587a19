"""The field: anchors and their refined features, callable anywhere in the domain (Equation 6)."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from fst import kernels
from fst.blending import field_at, learned
from fst.decoder import Decoder
from fst.local import weighty_blend
from fst.operators import Output, Standardization
from fst.prepared import Prepared
from fst.types import Anchors, Domain, check_neighbors, check_queries, product_dtype

if kernels.fused_blend is not None:
    from fst.kernels.local_blend import compact_order, scattered

# Numbers held at once while a chunk of queries is decoded: weights, logits and hidden layers. A
# GPU wants many at a time; a CPU is several times faster when they stay in its cache.
CHUNK_NUMBERS = {"cpu": 2**22, "cuda": 2**25}
# Queries whose anchors are looked for together; their tiles times all anchors are held at once. A
# GPU is faster with more of them.
REGION, GPU_REGION = 2**15, 2**18
# Bytes held at once where the blend needs no memory of its own, and how many times the width that
# is for each query, by the size of a number: in half precision most hidden layers are on the chip.
FUSED_BYTES, FUSED_WIDTHS = 2**30, {2: 8, 4: 12}


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
        return self._decode_unit(self.domain.to_unit(queries), neighbors)

    def _decode_unit(
        self,
        queries: Float[Tensor, "b q s"],
        neighbors: int | None = None,
        prepared: Prepared | None = None,
    ) -> Float[Tensor, "b q o"]:
        anchors = self.unit_anchors
        blended = field_at(
            queries, anchors.positions, anchors.length_scales, self.features, neighbors
        )
        return self._finish(blended, queries, prepared)

    def __call__(
        self, queries: Float[Tensor, "b q s"], neighbors: int | None = None
    ) -> Float[Tensor, "b q o"]:
        """Values at queries, in chunks that bound the memory; `neighbors` limits the anchors."""
        queries = check_queries(queries, self.domain, self.like)
        check_neighbors(neighbors)
        if queries.shape[1] == 0:
            return self.decode(queries)
        unit = self.domain.to_unit(queries)
        whole = neighbors is None or neighbors >= self.features.shape[1]
        fused = whole and self._is_fused()
        parts = self._fused(unit) if fused else self._in_regions(unit, neighbors)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def in_one_piece(self, queries: Float[Tensor, "b q s"]) -> bool:
        """Whether all queries are answered at once, by kernels without memory of their own."""
        return self._is_fused() and self._pieces(queries) == 1

    def _is_fused(self) -> bool:
        return kernels.fused_blend is not None and kernels.usable(self.like, self.features.shape[2])

    def _pieces(self, queries: Float[Tensor, "b q s"]) -> int:
        batch, _, width = self.features.shape
        size = product_dtype(self.features).itemsize
        held = queries.shape[1] * batch * width * size * FUSED_WIDTHS[size]
        return math.ceil(held / FUSED_BYTES)

    def _fused(self, queries: Float[Tensor, "b q s"]) -> list[Float[Tensor, "b p o"]]:
        """Values in equal parts, where a kernel blends without any memory of its own."""
        parts = queries.tensor_split(max(1, self._pieces(queries)), dim=1)
        inside, prepared = (queries, self.features, *self.decoder.parameters()), Prepared()
        if learned(*inside) or not scattered(queries):
            return [self._decode_unit(part, prepared=prepared) for part in parts]
        return [self._decode_sorted(part, prepared) for part in parts]

    def _decode_sorted(
        self, queries: Float[Tensor, "b q s"], prepared: Prepared
    ) -> Float[Tensor, "b q o"]:
        """Values at queries in any order: neighbours share the anchors that matter to them."""
        order = compact_order(queries)[..., None]
        sorted_queries = queries.gather(1, order.expand_as(queries))
        values = self._decode_unit(sorted_queries, prepared=prepared)
        return torch.empty_like(values).scatter_(1, order.expand_as(values), values)

    def _in_regions(
        self, queries: Float[Tensor, "b q s"], neighbors: int | None
    ) -> list[Float[Tensor, "b p o"]]:
        """Values in parts, where the blend holds weights or looks for anchors."""
        batch, count, width = self.features.shape
        size = queries_at_once(queries, batch * (4 * count + 12 * width))
        if self._is_fused():  # the nearest anchors are gone when the decoder's kernels begin
            size = math.ceil(queries.shape[1] / self._pieces(queries))
        parts: list[Tensor] = []
        prepared = Prepared()
        # Many queries at once, because neighbours among them share their lists of anchors.
        together = REGION
        if queries.is_cuda and neighbors is not None:
            together = max(REGION, GPU_REGION // batch)
        for region in queries.split(together, dim=1):
            blended = self._blend(region, neighbors, size)
            pairs = zip(blended.split(size, dim=1), region.split(size, dim=1), strict=True)
            parts += [self._finish(*pair, prepared) for pair in pairs]
        return parts

    def _blend(
        self, queries: Float[Tensor, "b q s"], neighbors: int | None, size: int
    ) -> Float[Tensor, "b q d"]:
        positions, scales = self.unit_anchors.positions, self.unit_anchors.length_scales
        whole = neighbors is None or neighbors >= positions.shape[1]
        if whole and queries.device.type == "cpu" and not torch.is_grad_enabled():
            return weighty_blend(queries, positions, scales, self.features)
        given = positions, scales, self.features
        if not whole:
            return field_at(queries, *given, neighbors)
        return torch.cat([field_at(part, *given) for part in queries.split(size, dim=1)], dim=1)

    def _finish(
        self,
        blended: Float[Tensor, "b q d"],
        queries: Float[Tensor, "b q s"],
        prepared: Prepared | None = None,
    ) -> Float[Tensor, "b q o"]:
        values = self.decoder(blended, queries, self.condition, prepared)
        return self.standardization.restore(values)
