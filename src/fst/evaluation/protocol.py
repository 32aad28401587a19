"""The paper's test protocol: a model and a test split enter, result rows leave.

    error = 1/n Σ_i ‖û_i − u_i‖₂ / ‖u_i‖₂    over the points of each test grid

in float32, in a fixed order and in batches of a fixed size. The seeds of the evaluation points are
reset before each grid (Burgers) or at each batch (Darcy). Either way a batch gets the same points
on every grid, so it is refined once and the one output answers the queries of all grids.
"""

import hashlib
import json
import math
import platform
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from rich.console import Console
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fst.base import Model, parameter_count
from fst.data.samples import Batch, Samples
from fst.data.source import DataSource, TestSplit
from fst.evaluation import trivial
from fst.evaluation.fields import (
    PICTURE,
    Array,
    Fields,
    choose_rows,
    empty_parts,
    full_grid,
    ranked_rows,
    thinned,
)
from fst.evaluation.rows import (
    METRICS,
    RELATIVE_L2,
    ChannelError,
    EvaluationError,
    GroupError,
    Origin,
    Row,
    Scores,
    group_errors,
    shortened,
)
from fst.evaluation.trivial import Answers, Predictor, Queries, TrainingFacts, Values
from fst.evaluation_points import PointDraws
from fst.field import Field
from fst.kernels import fuse, fused, unfuse
from fst.metrics import relative_l2
from fst.operators import Operator, Output
from fst.precision import full_precision
from fst.pretrained import to_json
from fst.terminal import printable, progress_bar
from fst.types import Domain, check_fields
from fst.version import __version__

Split = TestSplit[Any]
# Parts of each axis, by the number of axes, that errors off any grid are summed in.
BINS = {1: 48, 2: 20, 3: 8}
# The even grid on which a field is drawn where its queries lie on none.
DENSE = {1: (400,), 2: (96, 96), 3: (48, 48)}


class TestProtocol(ABC):
    """How one kind of model is scored: the settings of a recipe's evaluation."""

    __test__ = False  # no class of tests for pytest to collect

    batch_size: int
    paper_errors: tuple[float, ...]
    kind: ClassVar[type[Model]]
    """Of the models that are scored."""
    shown: ClassVar[tuple[str, ...]]
    """Settings of what is shown beside the errors, which they do not change."""
    of_images: ClassVar[bool] = False

    @abstractmethod
    def score(
        self, model: Any, test: Split, origin: Origin, facts: TrainingFacts, console: Console | None
    ) -> Scores:
        """Rows of the model, then of the trivial predictors; and what the figures draw."""

    def without_paper(self) -> Self:
        """The same settings where the paper's numbers are about another problem."""
        changed: Any = self
        kept: Self = replace(changed, paper_errors=())
        return kept

    def without_extras(self) -> Self:
        """The same settings without what only costs time in a comparison."""
        return self

    def describe_validation(
        self, error: float, splits: tuple[Any, Any], source: DataSource, folder: Path
    ) -> str:
        """A validation error in words, beside the trivial predictors on the same samples."""
        return f"Validation error: {error:.5f}."

    def fingerprint(self, weights: bytes, data: DataSource, model: Any) -> str:
        """Identifies the weights scored and what was asked of them, in a few characters.

        Of the model's configuration what changes predictions and no weights counts, where it is
        not as always.
        """
        asked = to_json(self) | self.about_data(data)
        for each in fields(model):
            if each.name.startswith("prediction_") and getattr(model, each.name) != each.default:
                asked[each.name] = getattr(model, each.name)
        for name in self.shown:
            del asked[name]
        text = json.dumps(asked, sort_keys=True).encode()
        return hashlib.sha256(hashlib.sha256(weights).digest() + text).hexdigest()[:16]

    def about_data(self, data: DataSource) -> dict[str, Any]:
        """Settings of the data that decide a score as much as the weights do."""
        return {}


@dataclass(frozen=True)
class View:
    """What is kept of a few test samples for the figures, and how its two axes are labelled.

    Positions lie in the unit square; `axis_ends` says what 1 means on each axis.
    """

    samples: int = 4
    axis_names: tuple[str, str] = ("time t", "space x")
    axis_ends: tuple[float, float] = (2.0, 1.0)
    profiles: tuple[float, ...] = (0.0, 0.1, 0.3, 0.6, 1.0, 2.0)
    """Where the first axis is cut for profiles along the second."""


@dataclass(frozen=True)
class EvaluationSettings(TestProtocol):
    """How a model is scored. The defaults are those of single-viscosity Burgers in the paper."""

    grids: tuple[tuple[int, int], ...] = ((32, 32), (64, 64), (128, 128), (201, 1024))
    """Test grids, coarse to fine; none scores the test points as they are stored."""
    batch_size: int = 8
    anchor_seed: int = 2026091322
    sobol_seed: int = 2026091323
    reset: Literal["grid", "batch"] = "grid"
    """When the two seeds are set anew: before each grid, or at each batch of it."""
    neighbors: tuple[int, ...] = ()
    """Numbers of nearest anchors to decode from, on the last grid; for models with anchors."""
    paper_errors: tuple[float, ...] = ()
    """The paper's error on each grid, in the order of `grids`; empty where it has none."""
    paper_groups: tuple[tuple[str, float], ...] = ()
    """The paper's error on the last grid for each group, by the group's name."""
    view: View = field(default_factory=View)

    kind = Operator
    shown = ("view", "paper_errors", "paper_groups")

    def __post_init__(self) -> None:
        check_fields(self, batch_size=1, neighbors=1)
        if self.paper_errors and len(self.paper_errors) != max(1, len(self.grids)):
            raise ValueError(
                f"paper_errors must give one error for each of the {len(self.grids)} grids, "
                f"got {len(self.paper_errors)}"
            )
        for name in ("grids", "neighbors"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise ValueError(f"{name} must not repeat, got {getattr(self, name)}")

    def score(
        self, model: Any, test: Split, origin: Origin, facts: TrainingFacts, console: Console | None
    ) -> Scores:
        over = OverDomain(views_of(test.samples, self)[-1], self)
        rows = evaluate(model, test, self, origin, std=facts.std, over=over, console=console)
        errors = rows[max(1, len(self.grids)) - 1].errors
        rows += trivial_rows(test, self, origin, facts, console=console)
        return rows, sample_fields(model, test, self, origin, errors, over)

    def describe_validation(
        self, error: float, splits: tuple[Any, Any], source: DataSource, folder: Path
    ) -> str:
        """The training targets give their mean; the validation grid is the samples' own."""
        training, validation = (split.samples for split in splits)
        mean = training.statistics().output_mean.reshape(-1).expand(training.output_channels)
        facts = TrainingFacts(tuple(mean.tolist()), diffusion=source.diffusion)
        values, targets = source.channel_names(folder)
        split = TestSplit(validation, values=values, targets=targets)
        grids = (validation.grid_shape,) if self.grids else ()
        whole = replace(self.without_paper(), grids=grids, neighbors=())
        rows = trivial_rows(split, whole, Origin("", "", "", ""), facts)
        others = {row.model: row.error for row in rows}
        words = trivial.compared(error, others, METRICS[RELATIVE_L2])
        return f"Validation error: {error:.5f}{', ' * bool(words)}{words}."

    def without_paper(self) -> Self:
        return replace(super().without_paper(), paper_groups=())

    def without_extras(self) -> Self:
        return replace(self, neighbors=())


class Measurement:
    """Errors on one grid, in the order of the test split; `over` learns where they lie."""

    def __init__(
        self, view: Samples, neighbors: int | None = None, over: "OverDomain | None" = None
    ) -> None:
        self.view, self.neighbors, self.over = view, neighbors, over
        self.found: list[Tensor] = []
        self.squares: list[Tensor] = []
        self.points = 0

    def add(self, output: Answers, rows: Int[Tensor, " b"]) -> None:
        """Measure the output of these rows; only a field has neighbours to choose from."""
        if self.neighbors is not None and not isinstance(output, Field):
            return
        batch = self.view.batch(rows)
        prediction = answer(output, batch.queries, self.neighbors)
        error = relative_l2(prediction, batch.targets, batch.mask)
        if not bool((finite := error.isfinite()).all()):
            grid = self.view.grid_shape
            where = "" if grid is None else f" on the {'×'.join(map(str, grid))} grid"
            raise EvaluationError(
                f"the relative error of test sample {int(rows[~finite][0])}{where} is not finite: "
                "the prediction is NaN or infinite, or the solution is zero everywhere"
            )
        self.found.append(error.cpu())
        every = torch.ones_like(batch.targets[..., 0], dtype=torch.bool)
        real = every if batch.mask is None else batch.mask
        both = torch.stack([prediction - batch.targets, batch.targets])
        self.squares.append((both * real[..., None]).double().square().sum(dim=2).cpu())  # 2 b c
        self.points += int(real.count_nonzero())
        if self.over is not None:
            self.over.add(batch, prediction, real)

    @property
    def errors(self) -> tuple[float, ...]:
        return tuple(map(shortened, torch.cat(self.found).tolist()))

    def channels(
        self, names: Sequence[tuple[str, str]], std: Sequence[float]
    ) -> tuple[ChannelError, ...]:
        """Each channel by itself; samples in which a channel is zero have no relative error."""
        squares, targets = torch.cat(self.squares, dim=1)
        relative, rmse = (squares / targets).sqrt(), (squares.sum(dim=0) / self.points).sqrt()
        found = []
        for index, (name, unit) in enumerate(names):
            finite = relative[relative[:, index].isfinite(), index]
            error = finite.mean().item() if len(finite) else None
            known = std[index] if len(std) == len(names) else None
            found.append(ChannelError(name, unit, error, rmse[index].item(), known))
        return tuple(found)


class OverDomain:
    """Where in the domain, and at which wavenumbers, all test predictions on one grid are wrong."""

    def __init__(self, samples: Samples, settings: "EvaluationSettings") -> None:
        self.domain, self.grid = samples.domain, samples.grid_shape
        axes, most = samples.domain.axes, BINS.get(samples.domain.axes, 1)
        self.bins = (most,) * axes
        if self.grid is not None:
            limits = PICTURE if axes == 2 else self.bins
            self.bins = tuple(map(min, self.grid, limits))
        shape = (math.prod(self.bins), samples.output_channels)
        self.squared_error, self.squared_target, self.counts = (
            torch.zeros(size, dtype=torch.float64) for size in (shape, shape, shape[:1])
        )
        self.cuts: list[int] = []
        if self.grid is not None and axes == 2:
            last = self.grid[0] - 1
            ends = settings.view.axis_ends[0]
            self.cuts = sorted({round(each / ends * last) for each in settings.view.profiles})
            self.cuts = [cut for cut in self.cuts if 0 <= cut <= last]
        waves = 0 if self.grid is None or not self.cuts else self.grid[1] // 2 + 1
        self.power = torch.zeros(len(self.cuts), waves, 3, dtype=torch.float64)
        self.samples = 0

    def add(
        self, batch: Batch, prediction: Float[Tensor, "b q c"], real: Bool[Tensor, "b q"]
    ) -> None:
        unit = self.domain.to_unit(batch.queries)[real]
        index = (unit * torch.tensor(self.bins, device=unit.device)).long().cpu().numpy()
        where = torch.from_numpy(np.ravel_multi_index(tuple(index.T), self.bins, mode="clip"))
        error = (prediction - batch.targets)[real].double().cpu()
        self.squared_error.index_add_(0, where, error.square())
        self.squared_target.index_add_(0, where, batch.targets[real].double().cpu().square())
        self.counts.index_add_(0, where, torch.ones(len(where), dtype=torch.float64))
        if self.cuts and self.grid is not None:
            shape = (-1, *self.grid)
            pair = (batch.targets[..., 0].reshape(shape), prediction[..., 0].reshape(shape))
            curves = torch.stack([*pair, pair[1] - pair[0]], dim=-1)[:, self.cuts]  # b p x 3
            waves = torch.fft.rfft(curves.double(), dim=2, norm="forward")
            self.power += waves.abs().square().sum(dim=0).cpu()
            self.samples += len(curves)

    def arrays(self, scale: Array) -> dict[str, Array]:
        """As `Fields` hold them; `scale` is the length of the unit on each axis."""
        last = 1 if self.grid is None else max(self.grid[0] - 1, 1)
        return {
            "bins": np.array(self.bins),
            "counts": _array(self.counts),
            "squared_error": _array(self.squared_error),
            "squared_target": _array(self.squared_target),
            "cuts": np.array([cut / last * scale[0] for cut in self.cuts], np.float32),
            "spectra": _array(self.power / max(self.samples, 1)),
        }


def evaluate(
    model: Operator,
    test: TestSplit[Samples],
    settings: EvaluationSettings,
    origin: Origin,
    *,
    std: Sequence[float] = (),
    over: OverDomain | None = None,
    console: Console | None = None,
) -> list[Row]:
    """Score a model on a test split: a row for each grid, then one for each of `neighbors`.

    The samples must be on the model's device. `std` are the standard deviations of the training
    targets, and `over` learns where the errors lie.
    """
    check_test(test)
    with measuring(model):
        predict, label = represented(model, settings), origin.model
        found = measure(predict, test.samples, settings, over=over, label=label, console=console)
    return make_rows(found, test, settings, origin, parameter_count(model), std)


def trivial_rows(
    test: TestSplit[Samples],
    settings: EvaluationSettings,
    origin: Origin,
    facts: TrainingFacts,
    *,
    console: Console | None = None,
) -> list[Row]:
    """Rows of the trivial predictors on the test grids of a run, to stand beside the run's own."""
    rows, settings = [], settings.without_paper()
    source = replace(origin, seed=None, training=None)
    timed = settings.view.axis_names[0].split()[0] in ("t", "time")
    initial = bool(settings.grids) and timed
    for name, predictor in trivial.predictors(test, facts, initial=initial).items():
        with full_precision(), torch.inference_mode():
            found = measure(predictor, test.samples, settings, label=name, console=console)
        rows += make_rows(found, test, settings, replace(source, model=name), 0, facts.std)
    return rows


def batch_draws(model: Operator, settings: EvaluationSettings) -> Iterator[PointDraws | None]:
    """The evaluation points of each test batch in turn, as the protocol resets their seeds."""
    stream = model.point_stream(settings.anchor_seed, settings.sobol_seed)
    while True:
        yield None if stream is None else stream.draw()
        if settings.reset == "batch":
            stream = model.point_stream(settings.anchor_seed, settings.sobol_seed)


def represented(model: Operator, settings: EvaluationSettings) -> Predictor:
    """The model, with the evaluation points that the protocol gives each batch in turn."""
    draws = batch_draws(model, settings)
    return lambda observations: model(observations, next(draws))


def measure(
    represent: Predictor,
    samples: Samples,
    settings: EvaluationSettings,
    *,
    over: OverDomain | None = None,
    label: str = "",
    console: Console | None = None,
) -> list[Measurement]:
    """Errors of any predictor, each batch represented once for all grids and neighbour counts."""
    *coarse, last = views_of(samples, settings)
    found = [*map(Measurement, coarse), Measurement(last, over=over)]
    found += [Measurement(last, near) for near in settings.neighbors]
    with progress_bar(console) as progress:
        batches = row_batches(samples, settings)
        for rows in progress.track(batches, description=printable(f"testing {label}".strip())):
            output = represent(samples.batch(rows).observations)
            for each in found:
                each.add(output, rows)
    return [each for each in found if each.found]


def make_rows(
    measurements: Sequence[Measurement],
    test: TestSplit[Samples],
    settings: EvaluationSettings,
    origin: Origin,
    parameters: int,
    std: Sequence[float] = (),
) -> list[Row]:
    """Measurements with all that a reader needs to know of them."""
    rows, targets = [], test.targets or default_names("target", test.samples.output_channels)
    for index, found in enumerate(measurements):
        whole, errors = found.neighbors is None, found.errors
        paper = settings.paper_errors[index] if whole and settings.paper_errors else None
        last = whole and index == max(1, len(settings.grids)) - 1
        groups = group_errors(errors, test.groups, dict(settings.paper_groups) if last else {})
        row = make_row(errors, groups, paper, origin, parameters, test.samples.device)
        channels = found.channels(targets, std)
        grid, near = found.view.grid_shape, found.neighbors
        rows.append(replace(row, grid=grid, neighbors=near, channels=channels))
    return rows


def make_row(
    errors: tuple[float, ...],
    groups: tuple[GroupError, ...],
    paper_error: float | None,
    origin: Origin,
    parameters: int,
    device: torch.device,
) -> Row:
    """The row of one list of test errors, on no grid."""
    return Row(
        **vars(origin),
        parameters=parameters,
        samples=len(errors),
        error=fmean(errors),
        paper_error=paper_error,
        errors=errors,
        groups=groups,
        fst_version=__version__,
        torch_version=torch.__version__,
        device=device_name(device),
    )


def check_test(test: object) -> None:
    if not isinstance(test, TestSplit):
        raise TypeError(f"test must be a TestSplit, got {type(test).__name__}")


def views_of(samples: Samples, settings: EvaluationSettings) -> list[Samples]:
    """The samples on each grid of the settings, or as they are stored where it names none."""
    if settings.grids and samples.grid_shape is None:
        raise EvaluationError("grids were given, but these test samples lie on no grid")
    own, grids = samples.grid_shape, settings.grids
    return [samples if grid == own else samples.on_grid(grid) for grid in grids] or [samples]


def row_batches(samples: Samples, settings: EvaluationSettings) -> Sequence[Int[Tensor, " b"]]:
    """The row numbers of each batch, in the order of the test split."""
    return list(torch.arange(len(samples), device=samples.device).split(settings.batch_size))


def sample_fields(
    model: Operator,
    test: TestSplit[Samples],
    settings: EvaluationSettings,
    origin: Origin,
    errors: Sequence[float] = (),
    over: OverDomain | None = None,
) -> Fields | None:
    """A few samples on the last test grid, or at their points, predicted as they are scored.

    Of the test's `errors` the best, the median and the worst; then some by their position in the
    test set, chosen before any prediction. None where none is asked for, or beyond three axes.
    """
    check_test(test)
    samples, axes = views_of(test.samples, settings)[-1], test.samples.domain.axes
    if axes > 3 or not settings.view.samples:
        return None
    roles = ranked_rows(errors)
    chosen = choose_rows(test.groups, len(samples), settings.view.samples)
    wanted = list(dict.fromkeys([*roles, *chosen]))
    scale = np.array(settings.view.axis_ends if settings.grids else (1.0,) * axes, np.float32)
    looks = {}
    with measuring(model):
        # Each with the evaluation points that it is scored with.
        batches = row_batches(samples, settings)
        for rows, draws in zip(batches, batch_draws(model, settings), strict=False):
            for row in set(rows.tolist()).intersection(wanted):
                batch = samples.batch(torch.tensor([row], device=samples.device))
                output = model(batch.observations, draws)
                looks[row] = _look(batch, output, samples.domain, scale)
    kept = [looks[row] for row in wanted]
    channels = samples.output_channels, samples.value_channels
    parts = empty_parts(len(wanted), axes, *channels)
    parts |= {} if over is None else over.arrays(scale)
    for name in ("positions", "values", "queries", "truth", "prediction"):
        parts[name] = pad_sequence([torch.from_numpy(look[name]) for look in kept], True).numpy()
    stacked = ["anchors", "length_scales"] + ["dense"] * all(len(look["dense"]) for look in kept)
    parts |= {name: np.stack([look[name] for look in kept]) for name in stacked}
    if (parts["queries"] == parts["queries"][:1]).all():
        parts["queries"] = parts["queries"][:1]
    numbers = [test.numbers[row] for row in wanted] if test.numbers else wanted
    triangles = [parts["triangles"]]
    for index, (number, look) in enumerate(zip(numbers, kept, strict=True)):
        cells = None if test.cells is None else test.cells(number)
        if cells is not None and look["whole"]:  # some points may be left out of the picture
            triangles.append(np.insert(cells, 0, index, axis=1))
    # Channels without names of their own that are the targets' are drawn as what they are.
    shared = {name for name, _ in test.targets} & {name for name, _ in test.values}
    values = test.values if shared or trivial.observed_targets(test) is None else test.targets
    axis_names = [(name, "") for name in settings.view.axis_names] if settings.grids else ()
    return Fields(
        **parts
        | {
            "model": np.array(origin.model),
            "axis_labels": labels_with_units(test.axes or axis_names, "axis", axes),
            "value_labels": labels_with_units(values, "value", samples.value_channels),
            "target_labels": labels_with_units(test.targets, "target", samples.output_channels),
            "low": np.array(samples.domain.low, np.float32) * scale,
            "high": np.array(samples.domain.high, np.float32) * scale,
            "rows": np.array(wanted),
            "numbers": np.array([test.names[r] for r in wanted] if test.names else numbers),
            "roles": np.array([roles.get(row, "") for row in wanted]),
            "groups": np.array([test.groups[r] for r in wanted] if test.groups else [], np.str_),
            "errors": np.array([look["error"] for look in kept], np.float32),
            "observed": np.array([len(look["values"]) for look in kept]),
            "queried": np.array([len(look["truth"]) for look in kept]),
            "triangles": np.concatenate(triangles),
            "dense_shape": np.array(DENSE[axes] if parts["dense"].shape[1] else (), int),
        }
    )


def _look(batch: Batch, output: Output, domain: Domain, scale: Array) -> dict[str, Any]:
    """What is kept of a sample, the only one of its batch."""

    def real(values: Float[Tensor, "1 p c"], mask: Bool[Tensor, "1 p"] | None) -> Array:
        return _array(values[0] if mask is None else values[0, mask[0]])

    given, prediction = batch.observations, output(batch.queries)
    queries, positions = real(batch.queries, batch.mask), real(given.positions, given.mask)
    points, sensors = thinned(queries), thinned(positions)
    dense = batch.targets[:, :0]
    if full_grid(queries[points]) is None:
        dense = output(dense_queries(domain, batch.queries))
    anchors = length_scales = batch.queries[:, :0]  # of models without anchors
    if isinstance(output, Field):
        anchors, length_scales = output.anchors.positions, output.anchors.length_scales
    return {
        "error": relative_l2(prediction, batch.targets, batch.mask).item(),
        "whole": len(points) == len(queries),
        "positions": positions[sensors] * scale,
        "values": real(given.values, given.mask)[sensors],
        "queries": queries[points] * scale,
        "truth": real(batch.targets, batch.mask)[points],
        "prediction": real(prediction, batch.mask)[points],
        "dense": _array(dense[0]),
        "anchors": _array(anchors[0]) * scale,
        "length_scales": _array(length_scales[0]) * scale,
    }


def dense_queries(domain: Domain, like: Tensor) -> Float[Tensor, "1 d s"]:
    """An even grid over the domain; of three axes, over the middle of the first one."""
    shape = DENSE[domain.axes]
    axes = [torch.linspace(0, 1, count) for count in shape]
    axes = [torch.tensor([0.5])] * (domain.axes - len(shape)) + axes
    unit = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)
    return domain.from_unit(unit[None].to(like))


def default_names(kind: str, count: int) -> tuple[tuple[str, str], ...]:
    return tuple((f"{kind} {number}", "") for number in range(1, count + 1))


def labels_with_units(names: Sequence[tuple[str, str]], kind: str, count: int) -> Array:
    """Names with units, as axes and colour bars show them."""
    named = names or default_names(kind, count)
    return np.array([name + f" ({unit})" * bool(unit) for name, unit in named])


def _array(tensor: Tensor) -> Array:
    return tensor.float().cpu().numpy()


@contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Fused, evaluation mode, no gradients, float32 throughout; all is put back afterwards."""
    training, fast = model.training, fused(model)
    fuse(model).eval()
    try:
        with full_precision(), torch.inference_mode():
            yield
    finally:
        model.train(training)
        if not fast:
            unfuse(model)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type.upper()} {platform.machine()}"


def answer(output: Answers, queries: Queries, neighbors: int | None) -> Values:
    """Values at queries; only a field has neighbours to choose from."""
    return output(queries, neighbors) if isinstance(output, Field) else output(queries)
