"""A few test samples of a user's own points on one or two axes, saved beside the result rows.

Enters: a model and test samples that lie on no grid. Leaves: `PointFields`, NumPy arrays of what
was observed and of reference and prediction at the queries (thinned where there are very many).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from fst.data.point_samples import PointSamples
from fst.evaluation.arrays import Array, check_shapes, read_arrays
from fst.evaluation.protocol import EvaluationSettings, chosen_outputs, measuring
from fst.evaluation.rows import Origin
from fst.metrics import relative_l2
from fst.operators import Operator

# Pictures need no more points than this, of either kind, for one sample.
POINTS = 10_000


@dataclass(frozen=True)
class PointFields:
    """Samples n on s axes, in the units of the domain, whose corners are `low` and `high`.

    Sample i has the first `observed[i]` of `positions` and `values` (the first value channel), and
    the first `queried[i]` of `queries`, `truth` and `prediction` (the first of `channels` target
    channels); what follows is padding. `errors` are relative L2 over all channels and queries.
    """

    model: Shaped[Array, ""]
    channels: Int[Array, ""]
    low: Float[Array, " s"]
    high: Float[Array, " s"]
    rows: Int[Array, " n"]
    errors: Float[Array, " n"]
    observed: Int[Array, " n"]
    positions: Float[Array, "n o s"]
    values: Float[Array, "n o"]
    queried: Int[Array, " n"]
    queries: Float[Array, "n q s"]
    truth: Float[Array, "n q"]
    prediction: Float[Array, "n q"]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def axes(self) -> int:
        return len(self.low)

    def observations(self, sample: int) -> tuple[Float[Array, "o s"], Float[Array, " o"]]:
        """Where a sample was observed, and the first value there."""
        real = slice(self.observed[sample])
        return self.positions[sample, real], self.values[sample, real]

    def answers(
        self, sample: int
    ) -> tuple[Float[Array, "q s"], Float[Array, " q"], Float[Array, " q"]]:
        """The queries of a sample, with reference and prediction there."""
        real = slice(self.queried[sample])
        return self.queries[sample, real], self.truth[sample, real], self.prediction[sample, real]

    def title(self, sample: int) -> str:
        """What identifies a sample in a figure."""
        return f"test sample {self.rows[sample]}"


def sample_point_fields(
    model: Operator,
    samples: PointSamples,
    settings: EvaluationSettings,
    origin: Origin,
    wanted: Sequence[int],
) -> PointFields | None:
    """The rows `wanted`, predicted as they are scored; None on more axes than can be drawn."""
    if samples.domain.axes > 2:
        return None
    errors: list[float] = []
    seen: list[tuple[Array, ...]] = []
    asked: list[tuple[Array, ...]] = []
    with measuring(model):
        for batch, output in chosen_outputs(model, samples, settings, wanted):
            given, answer = batch.observations, output(batch.queries)
            errors += relative_l2(answer, batch.targets, batch.mask).tolist()
            seen += _real(given.mask, given.positions, given.values[..., 0])
            asked += _real(batch.mask, batch.queries, batch.targets[..., 0], answer[..., 0])
    positions, values = map(_padded, zip(*seen, strict=True))
    queries, truth, prediction = map(_padded, zip(*asked, strict=True))
    return PointFields(
        model=np.array(origin.model),
        channels=np.array(samples.output_channels),
        low=np.array(samples.domain.low, np.float32),
        high=np.array(samples.domain.high, np.float32),
        rows=np.array(wanted),
        errors=np.array(errors, np.float32),
        observed=np.array([len(arrays[0]) for arrays in seen]),
        positions=positions,
        values=values,
        queried=np.array([len(arrays[0]) for arrays in asked]),
        queries=queries,
        truth=truth,
        prediction=prediction,
    )


def _real(mask: Bool[Tensor, "b p"] | None, *tensors: Tensor) -> Iterator[tuple[Array, ...]]:
    """Sample by sample the points that exist, at most `POINTS` of them, in their order."""
    arrays = [tensor.float().cpu().numpy() for tensor in tensors]
    for index in range(len(arrays[0])):
        count = arrays[0].shape[1]
        real = np.arange(count) if mask is None else mask[index].cpu().numpy().nonzero()[0]
        # At random, since every k-th point of a grid can lie on a few lines.
        kept = np.random.default_rng(0).permutation(len(real))[:POINTS]
        yield tuple(array[index, real[np.sort(kept)]] for array in arrays)


def _padded(rows: Sequence[Array]) -> Array:
    """Arrays of unequal length as one, zeros behind the shorter ones."""
    longest = max(map(len, rows))
    widths = [[(0, longest - len(row)), *[(0, 0)] * (row.ndim - 1)] for row in rows]
    return np.stack([np.pad(row, width) for row, width in zip(rows, widths, strict=True)])


def load_point_fields(path: Path) -> PointFields:
    """The fields of a file, their shapes checked against each other."""
    arrays = read_arrays(path, PointFields)
    samples, axes = len(arrays["rows"]), len(arrays["low"])
    observed, queried = ((samples, *arrays[name].shape[1:2]) for name in ("values", "truth"))
    expected = {
        "high": (axes,),
        "errors": (samples,),
        "observed": (samples,),
        "positions": (*observed, axes),
        "values": observed,
        "queried": (samples,),
        "queries": (*queried, axes),
        "truth": queried,
        "prediction": queried,
    }
    check_shapes(path, arrays, expected)
    return PointFields(**arrays)
