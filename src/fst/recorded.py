"""Predictions without the host's part: recorded once as CUDA graphs, then replayed.

Enters: an FST on a GPU. Leaves: something to call like it, with the same answers, for observations
and queries that come in the same shapes again and again:

    predict = fst.Recorded(model)
    values = predict(observations)(queries)

One solution is a few milliseconds of work for a GPU, and several times that for Python to launch.
The first call of a shape launches everything and records it; later ones copy their tensors to where
the recorded kernels look for them. Weights that change in place count from the next call on; a
model whose parameters or layers are replaced by others has to be recorded anew. There are no
gradients, and one call at a time may be under way.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fst import kernels
from fst.field import Field
from fst.model import FunctionSpaceTransformer
from fst.types import Anchors, Observations, check_queries

# Recordings that are kept, the least recently used going first: each holds the memory it works in.
MOST_RECORDINGS = 8

Given = tuple[Tensor | None, ...]
Work = Callable[..., Given]


def capture(work: Work, given: Given) -> tuple[Callable[[], None], Given]:
    """Record `work` as a CUDA graph: what replays it, and the tensors it leaves its results in."""
    here, beside = torch.cuda.current_stream(), torch.cuda.Stream()
    beside.wait_stream(here)
    with torch.cuda.stream(beside):
        for _ in range(2):  # kernels are compiled, libraries make their plans
            work(*given)
    here.wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    # Other threads may go on with the GPU meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = work(*given)
    return graph.replay, found


class Recording:
    """Some work on tensors of fixed shapes; what it returns belongs to the caller."""

    def __init__(self, work: Work, given: Given) -> None:
        self._given = tuple(each if each is None else each.clone() for each in given)
        self._work = work  # whatever it holds on to is looked for by every replay
        self._replay, self._found = capture(work, self._given)

    def __call__(self, given: Given) -> Given:
        for mine, theirs in zip(self._given, given, strict=True):
            if mine is not None and theirs is not None:
                mine.copy_(theirs)
        self._replay()
        return tuple(each if each is None else each.clone() for each in self._found)


@dataclass(frozen=True)
class RecordedField(Field):
    """A field whose values at queries, where they come in one piece, are recorded as well."""

    recorded: "Recorded | None" = None

    def __call__(
        self, queries: Float[Tensor, "b q s"], neighbors: int | None = None
    ) -> Float[Tensor, "b q o"]:
        if self.recorded is not None and neighbors is None:
            queries = check_queries(queries, self.domain, self.like)
            if self.in_one_piece(queries):
                return self.recorded.decode(self, queries)
        return super().__call__(queries, neighbors)


class Recorded:
    """A model that is called as always, its work recorded for every shape that it meets."""

    def __init__(self, model: FunctionSpaceTransformer) -> None:
        _require_gpu(model)
        self.model = model
        self._tensors = [*model.parameters(), *model.buffers()]
        self._recordings: OrderedDict[Any, Recording] = OrderedDict()

    @torch.no_grad()
    def __call__(self, observations: Observations) -> RecordedField:
        """As the model itself, with the same evaluation points."""
        model = self.model
        model.check(observations)
        given = tuple(getattr(observations, each.name) for each in fields(Observations))

        def prepare() -> Work:
            draws = model.draws_for(observations)  # once: the same call gives the same answer

            def work(*given: Any) -> Given:
                field = model.represent(Observations(*given), draws)
                anchors = field.unit_anchors
                return field.features, field.condition, *_parts(anchors)

            return work

        features, condition, *anchors = self._replayed("refine", prepare, given)
        return RecordedField(
            model.domain,
            Anchors(*anchors),  # type: ignore[arg-type]  # none of them is optional
            features,  # type: ignore[arg-type]
            condition,
            model.decoder,
            model.standardize_outputs,
            recorded=self,
        )

    @torch.no_grad()
    def decode(self, field: Field, queries: Float[Tensor, "b q s"]) -> Float[Tensor, "b q o"]:
        """Values of a field of this model at queries, unchecked and in one piece."""
        given = field.features, field.condition, *_parts(field.unit_anchors), queries

        def work(*given: Any) -> Given:
            features, condition, *anchors, queries = given
            copy = Field(
                field.domain,
                Anchors(*anchors),
                features,
                condition,
                field.decoder,
                field.standardization,
            )
            return (copy.decode(queries),)

        (values,) = self._replayed("decode", lambda: work, given)
        assert values is not None
        return values

    def _replayed(self, name: str, prepare: Callable[[], Work], given: Given) -> Given:
        kind = self._tensors[0].device.type
        on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        shapes = tuple(each if each is None else (each.shape, each.dtype) for each in given)
        # Where a weight has moved, its old place means nothing.
        weights = tuple(each.data_ptr() for each in self._tensors)
        key = name, shapes, on and dtype, kernels.enabled(), self.model.training, weights
        if key not in self._recordings:
            # Weights that autocast has rounded before would be taken for those of every replay.
            with torch.autocast(kind, dtype, enabled=on, cache_enabled=False):
                self._recordings[key] = Recording(prepare(), given)
            while len(self._recordings) > MOST_RECORDINGS:
                self._recordings.popitem(last=False)
        self._recordings.move_to_end(key)
        return self._recordings[key](given)


def _parts(anchors: Anchors) -> tuple[Tensor, Tensor, Tensor]:
    return anchors.positions, anchors.length_scales, anchors.refinement_length_scales


def _require_gpu(model: FunctionSpaceTransformer) -> None:
    if not isinstance(model, FunctionSpaceTransformer):
        raise TypeError(f"model must be a FunctionSpaceTransformer, got {type(model).__name__}")
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise ValueError(f"model must be on a GPU to be recorded, got one on {device}")
