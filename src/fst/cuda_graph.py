"""Predictions without the host's part: captured once as CUDA graphs, then replayed.

Enters: an FST on a GPU. Leaves: something to call like it, with the same answers, for observations
and queries that come in the same shapes again and again:

    predict = fst.CUDAGraphModel(model)
    values = predict(observations)(queries)

One solution is a few milliseconds of work for a GPU, and several times that for Python to launch.
The first call of a shape is as ever, the second one captures; later ones copy their tensors to
where the captured kernels look for them. The model is fused (`fst.kernels.fuse`). Weights that
change count from the next call on; a model whose layers are replaced by others needs a new
`CUDAGraphModel`. There are no gradients, and one call at a time may be under way, on one stream.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fst.field import Field
from fst.kernels import fuse
from fst.model import FunctionSpaceTransformer
from fst.types import Anchors, Observations, check_queries

# Shapes that are cached, the least recently used going first: the captured of each holds the
# memory it works in. With more shapes than these in turn, nothing is captured.
MOST_SHAPES = 8

Given = tuple[Tensor | None, ...]
Work = Callable[..., Given]


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def capture(work: Work, given: Given, device: torch.device) -> tuple[Callable[[], None], Given]:
    """Capture `work` as a CUDA graph: what replays it, and the tensors it leaves its results in.

    A replay reads its tensors (inputs, weights) at their original addresses, so whoever holds the
    replay also holds them. The exception is copies of weights made by a surrounding autocast: leave
    that context only after the last replay.
    """
    here, stream = torch.cuda.current_stream(device), _capture_stream(device)
    stream.wait_stream(here)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        work(*given)  # kernels are compiled, libraries make their plans
        # Other threads may go on with the GPU meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            found = work(*given)
    here.wait_stream(stream)
    return partial(_replay, graph, (work, given)), found


def _replay(graph: torch.cuda.CUDAGraph, held: object) -> None:
    del held  # the name alone; whoever may call this keeps the tensors
    graph.replay()


def _copies(tensors: Given) -> Given:
    return tuple(each if each is None else each.clone() for each in tensors)


@dataclass(frozen=True, eq=False)
class CUDAGraphField(Field):
    """A field whose values at queries, where they come in one piece, are captured as well."""

    graphs: "CUDAGraphModel | None" = None

    @torch.no_grad()
    def __call__(
        self, queries: Float[Tensor, "b q s"], neighbors: int | None = None
    ) -> Float[Tensor, "b q o"]:
        right = isinstance(queries, Tensor) and queries.ndim == 3  # or the plain call says why not
        if self.graphs is None or neighbors is not None or not right:
            return super().__call__(queries, neighbors)
        if self.decoder.queries_at_once(queries, self.features, None) < queries.shape[1]:
            return super().__call__(queries, neighbors)
        return self.graphs.decode(self, check_queries(queries, self.domain, self.like))


class CUDAGraphModel:
    """Called like the model. The second call with the same shapes is captured as a CUDA graph;
    later calls replay it."""

    def __init__(self, model: FunctionSpaceTransformer) -> None:
        _require_gpu(model)
        self.model = fuse(model)
        # Where the model keeps its tensors: others may take their place.
        self._tensors = [
            (tensors, name)
            for module in model.modules()
            for tensors in (module._parameters, module._buffers)
            for name, tensor in tensors.items()
            if tensor is not None
        ]
        self._addresses: tuple[int, ...] = ()
        self._captures: OrderedDict[Any, Callable[[Given], Given] | None] = OrderedDict()

    @torch.no_grad()
    def __call__(self, observations: Observations) -> Field:
        """As the model itself, with the same evaluation points."""
        model = self.model
        _require_gpu(model)
        model.check(observations)
        field, symmetry = self._field(observations), model.symmetry
        if symmetry is None:
            return field
        image = self._field(symmetry.observations(observations, model.domain))
        return field.mean_with(image, symmetry)

    def _field(self, observations: Observations) -> CUDAGraphField:
        model = self.model

        def prepare() -> Work:
            draws = model.draws_for(observations)  # once: the same call gives the same answer

            def work(*given: Any) -> Given:
                field = model.represent(Observations(*given), draws)
                return field.features, field.condition, *vars(field.unit_anchors).values()

            return work

        given = tuple(vars(observations).values())
        found: Any = self._done("refine", prepare, given)
        features, condition, *anchors = found
        parts = model.domain, Anchors(*anchors), features, condition
        return CUDAGraphField(*parts, model.decoder, model.standardize_outputs, graphs=self)

    @torch.no_grad()
    def decode(self, field: Field, queries: Float[Tensor, "b q s"]) -> Float[Tensor, "b q o"]:
        """Values of a field at queries, unchecked and in one piece."""
        model = self.model
        domain, decoder, standardization = model.domain, model.decoder, model.standardize_outputs
        if field.decoder is not decoder or field.standardization is not standardization:
            return field.decode(queries)  # it is none of this model's

        def work(*given: Any) -> Given:
            features, condition, *anchors, queries = given
            copy = Field(domain, Anchors(*anchors), features, condition, decoder, standardization)
            return (copy.decode(queries),)

        given = field.features, field.condition, *vars(field.unit_anchors).values(), queries
        (values,) = self._done("decode", lambda: work, given)
        assert values is not None
        return values

    def _done(self, name: str, prepare: Callable[[], Work], given: Given) -> Given:
        """The result of the work: computed at first, then captured, then replayed."""
        key = name, *self._circumstances(given)
        if key not in self._captures:
            while len(self._captures) >= MOST_SHAPES:
                self._captures.popitem(last=False)
            self._captures[key] = None
            return prepare()(*given)
        self._captures.move_to_end(key)
        captured = self._captures[key]
        if captured is None:
            captured = self._captures[key] = self._capture(prepare, given)
        return captured(given)

    def _circumstances(self, given: Given) -> tuple[Any, ...]:
        """All that decides what the work would do."""
        held = (tensors[name] for tensors, name in self._tensors)
        addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in held)
        if addresses != self._addresses:  # the old ones mean nothing now
            self._addresses = addresses
            self._captures.clear()
        shapes = tuple(each if each is None else (each.shape, each.dtype) for each in given)
        precision = _autocast(given), torch.get_float32_matmul_precision()
        return shapes, precision, self.model.training

    def _capture(self, prepare: Callable[[], Work], given: Given) -> Callable[[Given], Given]:
        """The work on tensors of these shapes; what it returns belongs to the caller."""
        kind, on, dtype = _autocast(given)
        # Weights that autocast has rounded before would be taken for those of every replay; and
        # tensors made in inference mode could not be written to outside it.
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast(kind, dtype, enabled=on, cache_enabled=False),
        ):
            mine = _copies(given)
            replay, found = capture(prepare(), mine, _device(given))

        def captured(given: Given) -> Given:
            for own, theirs in zip(mine, given, strict=True):
                if own is not None and theirs is not None:
                    own.copy_(theirs)
            replay()
            return _copies(found)

        return captured


def _autocast(given: Given) -> tuple[str, bool, torch.dtype]:
    kind = _device(given).type
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _device(given: Given) -> torch.device:
    return next(each.device for each in given if each is not None)


def _require_gpu(model: FunctionSpaceTransformer) -> None:
    if not isinstance(model, FunctionSpaceTransformer):
        raise TypeError(f"model must be a FunctionSpaceTransformer, got {type(model).__name__}")
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise ValueError(f"model must be on a GPU to be captured, got one on {device}")
