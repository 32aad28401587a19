"""A few test samples seen closely: all that the figures draw, saved beside the result rows.

Enters: a model and a test split. Leaves: `Fields`, NumPy arrays of reference and prediction
(thinned for pictures, and in full along a few profiles) with the anchors, as one compressed .npz
file that is read without unpickling anything. The samples are chosen before the model is asked.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from fst.data.errors import DataError
from fst.data.point_samples import PointSamples
from fst.data.samples import GridSamples, Samples
from fst.data.splits import TestSplit
from fst.data.views import subset_indices
from fst.evaluation.arrays import Array, read_arrays
from fst.evaluation.point_fields import PointFields, sample_point_fields
from fst.evaluation.protocol import EvaluationSettings, chosen_outputs, measuring, views_of
from fst.evaluation.rows import Origin
from fst.field import Field
from fst.metrics import relative_l2
from fst.operators import Operator, Output

# Pictures need no more points than this on either axis.
PICTURE = (101, 256)


@dataclass(frozen=True)
class Fields:
    """Samples n on two axes, in the units of the axes; `groups` is empty where there are none.

    `truth` and `prediction` lie on `first` × `second`; the profiles run along `along` at the
    places `cuts` of the first axis. Models without anchors have zero of them.
    """

    model: Shaped[Array, ""]
    axis_names: Shaped[Array, " 2"]
    axis_ends: Float[Array, " 2"]
    rows: Int[Array, " n"]
    groups: Shaped[Array, " g"]
    errors: Float[Array, " n"]
    first: Float[Array, " i"]
    second: Float[Array, " j"]
    truth: Float[Array, "n i j"]
    prediction: Float[Array, "n i j"]
    cuts: Float[Array, " p"]
    along: Float[Array, " k"]
    profile_truth: Float[Array, "n p k"]
    profile_prediction: Float[Array, "n p k"]
    anchors: Float[Array, "n m 2"]
    length_scales: Float[Array, "n m 2"]

    def __len__(self) -> int:
        return len(self.rows)

    def title(self, sample: int) -> str:
        """What identifies a sample in a figure."""
        group = f", ν = {self.groups[sample]}" if len(self.groups) else ""
        return f"test sample {self.rows[sample]}{group}"


def choose_rows(test: TestSplit[Samples], count: int) -> list[int]:
    """The first sample of each group in turn, then the second of each: decided without a model."""
    if test.groups is None:
        return list(range(min(count, len(test.samples))))
    seen: dict[str, int] = {}
    turns = []
    for row, group in enumerate(test.groups):
        seen[group] = seen.get(group, 0) + 1
        turns.append((seen[group], row))
    return sorted(row for _, row in sorted(turns)[:count])


def sample_fields(
    model: Operator, test: TestSplit[Samples], settings: EvaluationSettings, origin: Origin
) -> Fields | PointFields | None:
    """The chosen samples on the last test grid, or at their points, predicted as they are scored.

    None where there is nothing to draw: more than two axes, or no sample asked for.
    """
    samples = views_of(test, settings)[-1]
    wanted = choose_rows(test, settings.view.samples)
    if isinstance(samples, PointSamples) and wanted:
        return sample_point_fields(model, samples, settings, origin, wanted)
    if not isinstance(samples, GridSamples) or len(samples.grid) != 2 or not wanted:
        return None
    with measuring(model):
        parts = list(_predictions(model, samples, settings, wanted))
    truth, prediction, errors, anchors, length_scales = (
        torch.cat(tensors).cpu().numpy() for tensors in zip(*parts, strict=True)
    )
    ends = np.array(settings.view.axis_ends, np.float32)
    first, second = (
        held.cpu().numpy() / max(size - 1, 1) * end
        for held, size, end in zip(samples.held, samples.grid, ends, strict=True)
    )
    rows, columns = (
        subset_indices(len(axis), min(len(axis), most)).numpy()
        for axis, most in zip((first, second), PICTURE, strict=True)
    )
    cut = sorted({int(np.abs(first - place).argmin()) for place in settings.view.profiles})
    return Fields(
        model=np.array(origin.model),
        axis_names=np.array(settings.view.axis_names),
        axis_ends=ends,
        rows=np.array(wanted),
        groups=np.array([test.groups[row] for row in wanted] if test.groups else [], np.str_),
        errors=errors,
        first=first[rows],
        second=second[columns],
        truth=truth[:, rows][:, :, columns],
        prediction=prediction[:, rows][:, :, columns],
        cuts=first[cut],
        along=second,
        profile_truth=truth[:, cut],
        profile_prediction=prediction[:, cut],
        anchors=anchors * ends,
        length_scales=length_scales * ends,
    )


def _predictions(
    model: Operator, samples: GridSamples, settings: EvaluationSettings, wanted: list[int]
) -> Iterator[tuple[Tensor, ...]]:
    """Reference, prediction, errors, anchors and length scales, batch by batch of the test."""
    for batch, output in chosen_outputs(model, samples, settings, wanted):
        prediction = output(batch.queries)
        errors = relative_l2(prediction, batch.targets)
        shape = (len(errors), *samples.grid_shape)
        pictures = (field[..., 0].reshape(shape) for field in (batch.targets, prediction))
        yield (*pictures, errors, *_anchors(output, len(errors)))


def _anchors(output: Output, count: int) -> tuple[Float[Tensor, "n m 2"], Float[Tensor, "n m 2"]]:
    """Anchor positions and decoding length scales; none for models without anchors."""
    if isinstance(output, Field):
        return output.anchors.positions, output.anchors.length_scales
    return torch.zeros(count, 0, 2), torch.zeros(count, 0, 2)


def load_fields(path: Path) -> Fields:
    """The fields of a file, their shapes checked against each other."""
    saved = read_arrays(path, Fields)
    if len(saved.groups) not in (0, len(saved)):
        raise DataError(f"{path}: groups must name each of {len(saved)} samples, or none")
    return saved
