"""A few test samples seen closely: all that the figures draw, saved beside the result rows.

`Fields` are of operators: points with reference and prediction, whether they lie on a grid or not.
`ImageFields` are of classifiers. Either is one compressed .npz file of NumPy arrays, which is read
without unpickling anything.
"""

import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped, UInt8, jaxtyped

from fst.data.files import DataError, blame, reading
from fst.io import write_file

Array = np.ndarray
# Pictures need no more points than this on either of two axes, or for one sample off any grid.
PICTURE = (101, 256)
POINTS = 10_000
LARGEST = float(np.finfo(np.float32).max)
# In sizes of the domain: figures of anchors farther away take for ever.
FARTHEST = 1e6


@dataclass(frozen=True)
class SavedFields:
    """Samples `rows` of a test split, as one model saw them. Some models have no anchors."""

    model: Shaped[Array, ""]
    rows: Int[Array, " n"]
    anchors: Float[Array, "n m s"]
    length_scales: Float[Array, "n m s"]

    def __len__(self) -> int:
        return len(self.rows)

    def check(self) -> None:
        """Raise ValueError where arrays of the right shapes do not fit together."""
        self.check_anchors(0.0, 1.0)

    def check_anchors(self, low: Array | float, high: Array | float) -> None:
        """Raise ValueError where anchors or their length scales lie far beyond the domain."""
        size = np.subtract(high, low, dtype=float)
        if not (size > 0).all():
            raise ValueError(f"high must be above low on each axis, got {high} and {low}")
        for name, distances in (
            ("anchors", np.subtract(self.anchors, low, dtype=float)),
            ("length_scales", self.length_scales),
        ):
            if (farthest := np.abs(distances / size).max(initial=0)) > FARTHEST:
                raise ValueError(
                    f"{name} must be within {FARTHEST:g} sizes of the domain, got {farthest:g}"
                )


@dataclass(frozen=True)
class Fields(SavedFields):
    """Samples n on s axes with v observed and c target channels, in the user's own units.

    Sample i has the first `observed[i]` of `positions` and `values`, and the first `queried[i]` of
    `queries`, `truth` and `prediction`; what follows is padding. One set of queries serves all
    samples where they share it.

    Over the whole test set: `squared_error` and `squared_target` are sums over the points in each
    of `bins` equal parts of the axes, the last axis fastest, and `counts` says how many points
    those are. `spectra` hold the mean power of reference, prediction and error by wavenumber along
    the second axis, at each of `cuts` of the first.
    """

    axis_labels: Shaped[Array, " s"]
    value_labels: Shaped[Array, " v"]
    target_labels: Shaped[Array, " c"]
    low: Float[Array, " s"]
    high: Float[Array, " s"]
    numbers: Shaped[Array, " n"]
    """By which the user knows the samples: their names, where they have some."""
    roles: Shaped[Array, " n"]
    """best, median or worst of the test set; empty for samples chosen by their position in it."""
    groups: Shaped[Array, " g"]
    errors: Float[Array, " n"]
    observed: Int[Array, " n"]
    positions: Float[Array, "n o s"]
    values: Float[Array, "n o v"]
    queried: Int[Array, " n"]
    queries: Float[Array, "a q s"]
    truth: Float[Array, "n q c"]
    prediction: Float[Array, "n q c"]
    triangles: Int[Array, "t 4"]
    """Sample, and three of its queries."""
    dense: Float[Array, "n d c"]
    """The prediction on an even grid of `dense_shape` over the domain; none where queries are."""
    dense_shape: Int[Array, " e"]
    cuts: Float[Array, " p"]
    bins: Int[Array, " s"]
    counts: Float[Array, " k"]
    squared_error: Float[Array, "k c"]
    squared_target: Float[Array, "k c"]
    spectra: Float[Array, "p w 3"]

    @property
    def axes(self) -> int:
        return len(self.low)

    def observations(self, sample: int) -> tuple[Float[Array, "o s"], Float[Array, "o v"]]:
        """Where a sample was observed, and the values there."""
        real = slice(self.observed[sample])
        return self.positions[sample, real], self.values[sample, real]

    def points(self, sample: int) -> Float[Array, "q s"]:
        """The queries of a sample."""
        asked: Array = self.queries[sample if len(self.queries) > 1 else 0]
        return asked[: self.queried[sample]]

    def answers(self, sample: int) -> tuple[Float[Array, "q c"], Float[Array, "q c"]]:
        """Reference and prediction at the queries of a sample."""
        real = slice(self.queried[sample])
        return self.truth[sample, real], self.prediction[sample, real]

    def cells(self, sample: int) -> Int[Array, "t 3"]:
        """Triangles of a sample's queries, where its mesh is known."""
        own: Array = self.triangles[self.triangles[:, 0] == sample, 1:]
        return own

    def title(self, sample: int) -> str:
        """What identifies a sample in a figure."""
        role = f"{self.roles[sample]}: " if self.roles[sample] else ""
        group = f", ν = {self.groups[sample]}" if len(self.groups) else ""
        return f"{role}sample {self.numbers[sample]}{group}"

    @property
    def axis_names(self) -> list[str]:
        """The first word of each label, in lower case."""
        return [str(label).split()[0].lower() if label else "" for label in self.axis_labels]

    def time_axis(self) -> int | None:
        """The axis that is called time or t."""
        found = (axis for axis, name in enumerate(self.axis_names) if name in ("t", "time"))
        return next(found, None)

    def check(self) -> None:
        self.check_anchors(self.low, self.high)
        if len(self.groups) not in (0, len(self)):
            raise ValueError(f"groups must name each of {len(self)} samples, or none")
        if len(self.queries) not in (1, len(self)):
            raise ValueError(f"queries must be those of each of {len(self)} samples, or of all")
        if len(self.counts) not in (0, int(np.prod(self.bins))):
            raise ValueError(f"counts must hold one number for each of the bins {self.bins}")


@dataclass(frozen=True)
class ImageFields(SavedFields):
    """Images n as the model saw them, with anchors in the unit square.

    The vertical coordinate comes first, and the top left corner is at zero. The length scales are
    those of refinement: a classifier decodes nothing.
    """

    names: Shaped[Array, " n"]
    """Files that the images came from."""
    labels: Shaped[Array, " n"]
    guesses: Shaped[Array, " n"]
    """The most probable class of each, with its probability."""
    probabilities: Float[Array, " n"]
    pictures: UInt8[Array, "n h w 3"]
    anchors: Float[Array, "n m 2"]
    length_scales: Float[Array, "n m 2"]

    def spread(self) -> float:
        """How far anchors adapt: the std of an anchor's horizontal coordinate over images."""
        return float(self.anchors[..., 1].std(axis=0).mean())


def save_fields(path: Path, saved: SavedFields) -> None:
    """Replace the file by the arrays of these fields, whole or not at all."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **vars(saved))
    write_file(path, buffer.getvalue())


def read_fields(path: Path) -> SavedFields:
    """The fields of a file, each array of the kind and shape that its annotation says."""
    with reading(path, "saved fields (.npz)"), np.load(path, allow_pickle=False) as file:
        kind: type[SavedFields] = ImageFields if "pictures" in file else Fields
        arrays = {each.name: file[each.name] for each in fields(kind)}
    with jaxtyped("context"):  # a letter in the annotations stands for one size in all arrays
        for each in fields(kind):
            array = arrays[each.name]
            expected: Any = each.type
            if not isinstance(array, expected):
                kind_name, _, shape = expected.__name__.partition("[")
                raise DataError(
                    f"{path}: {each.name} must have shape {shape[:-1]} of {kind_name} like the "
                    f"other arrays, got {array.dtype} of shape {array.shape}"
                )
            if array.dtype.kind == "f" and not (np.abs(array) <= LARGEST).all():
                raise DataError(f"{path}: {each.name} must be finite and at most {LARGEST:g}")
    found = kind(**arrays)
    with blame(path):
        found.check()
    return found


def empty_parts(samples: int, axes: int, targets: int, values: int = 1) -> dict[str, Array]:
    """All that not every `Fields` has, as arrays without numbers."""
    return {
        "groups": np.zeros(0, np.str_),
        "observed": np.zeros(samples, int),
        "positions": np.zeros((samples, 0, axes), np.float32),
        "values": np.zeros((samples, 0, values), np.float32),
        "triangles": np.zeros((0, 4), int),
        "dense": np.zeros((samples, 0, targets), np.float32),
        "dense_shape": np.zeros(0, int),
        "anchors": np.zeros((samples, 0, axes), np.float32),
        "length_scales": np.zeros((samples, 0, axes), np.float32),
        "cuts": np.zeros(0, np.float32),
        "bins": np.ones(axes, int),
        "counts": np.zeros(0, np.float32),
        "squared_error": np.zeros((0, targets), np.float32),
        "squared_target": np.zeros((0, targets), np.float32),
        "spectra": np.zeros((0, 0, 3), np.float32),
    }


def full_grid(points: Float[Array, "p s"]) -> tuple[list[Array], Int[Array, " p"]] | None:
    """The axes, and the order that sorts the points into them, where the points are all pairs."""
    parts = [np.unique(axis, return_inverse=True) for axis in points.T]
    shape = [len(axis) for axis, _ in parts]
    if len(shape) < 2 or min(shape) < 2 or np.prod(shape) != len(points):
        return None
    flat = np.ravel_multi_index([index for _, index in parts], shape)
    order = np.argsort(flat, kind="stable")
    if not np.array_equal(flat[order], np.arange(len(points))):
        return None
    return [axis for axis, _ in parts], order


def thinned(points: Float[Array, "p s"]) -> Int[Array, " k"]:
    """Which points a picture needs: of a grid every so many on each axis, of others some."""
    grid = full_grid(points)
    if grid is not None:
        axes, order = grid
        most = PICTURE if len(axes) == 2 else (round(POINTS ** (1 / len(axes))),) * len(axes)
        shape = [len(axis) for axis in axes]
        kept = [
            np.linspace(0, size - 1, min(size, few)).round().astype(int)
            for size, few in zip(shape, most, strict=True)
        ]
        return np.asarray(order.reshape(shape)[np.ix_(*kept)].ravel())
    # At random, since every k-th point of a mesh can lie on a few lines.
    return np.sort(np.random.default_rng(0).permutation(len(points))[:POINTS])


def choose_rows(groups: Sequence[str] | None, total: int, count: int) -> list[int]:
    """The first sample of each group in turn, then the second of each: decided without a model."""
    turns, seen = [], Counter[str]()
    for row, group in enumerate([""] * total if groups is None else groups):
        seen[group] += 1
        turns.append((seen[group], row))
    return sorted(row for _, row in sorted(turns)[:count])


def ranked_rows(errors: Sequence[float]) -> dict[int, str]:
    """The samples with the lowest, the middle and the highest error, where there are three."""
    order = np.argsort(np.asarray(errors), kind="stable")
    if len(order) < 3:
        return {}
    chosen = order[[0, len(order) // 2, -1]].tolist()
    return dict(zip(chosen, ("best", "median", "worst"), strict=True))
