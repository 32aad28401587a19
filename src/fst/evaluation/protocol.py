"""The paper's test protocol: a model and a test split enter, result rows leave.

    error = 1/n Σ_i ‖û_i − u_i‖₂ / ‖u_i‖₂    over the points of each test grid

in float32, in a fixed order and in batches of a fixed size. The seeds of the evaluation points are
reset before each grid (Burgers) or at each batch (Darcy). Either way a batch gets the same points
on every grid, so it is refined once and the one output answers the queries of all grids.
"""

import hashlib
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from fst.base import parameter_count
from fst.data.row_writer import package_version
from fst.data.samples import Batch, GridSamples, Samples
from fst.data.splits import TestSplit
from fst.evaluation.rows import GroupError, Origin, Row, group_errors, mean, shortened
from fst.evaluation_points import PointDraws
from fst.field import Field
from fst.kernels import fuse, fused, unfuse
from fst.metrics import relative_l2
from fst.operators import Operator, Output
from fst.precision import full_precision
from fst.pretrained import to_json
from fst.terminal import printable
from fst.types import Observations, check_fields

Represent = Callable[[Observations], Output]


class EvaluationError(ValueError):
    """A model cannot be scored; the message is one clear line for the user."""


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
class EvaluationSettings:
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

    def __post_init__(self) -> None:
        check_fields(self)
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.paper_errors and len(self.paper_errors) != max(1, len(self.grids)):
            raise ValueError(
                f"paper_errors must give one error for each of the {len(self.grids)} grids, "
                f"got {len(self.paper_errors)}"
            )
        if any(count < 1 for count in self.neighbors):
            raise ValueError(f"neighbors must be at least 1, got {self.neighbors}")
        for name in ("grids", "neighbors"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise ValueError(f"{name} must not repeat, got {getattr(self, name)}")


class Measurement(NamedTuple):
    """Per-sample errors on one grid, in the order of the test split."""

    grid: tuple[int, ...] | None
    neighbors: int | None
    errors: tuple[float, ...]


def evaluate(
    model: Operator,
    test: TestSplit[Samples],
    settings: EvaluationSettings,
    origin: Origin,
    *,
    protocol: str = "",
    console: Console | None = None,
) -> list[Row]:
    """Score a model on a test split: a row for each grid, then one for each of `neighbors`.

    The samples must be on the model's device. `protocol` is what `fingerprint` gives.
    """
    device = next(model.parameters()).device
    draws = batch_draws(model, settings)

    def represent(observations: Observations) -> Output:
        output: Output = model(observations, next(draws))
        return output

    with measuring(model):
        found = measure(represent, test, settings, label=origin.model, console=console)
    return make_rows(found, test, settings, origin, parameter_count(model), protocol, device)


def batch_draws(model: Operator, settings: EvaluationSettings) -> Iterator[PointDraws | None]:
    """The evaluation points of each test batch in turn, as the protocol resets their seeds."""
    stream = model.point_stream(settings.anchor_seed, settings.sobol_seed)
    while True:
        yield None if stream is None else stream.draw()
        if settings.reset == "batch":
            stream = model.point_stream(settings.anchor_seed, settings.sobol_seed)


def measure(
    represent: Represent,
    test: TestSplit[Samples],
    settings: EvaluationSettings,
    *,
    label: str = "",
    console: Console | None = None,
) -> list[Measurement]:
    """Errors of any predictor, each batch represented once for all grids and neighbour counts."""
    views = views_of(test, settings)
    errors: dict[tuple[int, int | None], list[Tensor]] = {}
    with show_progress(console) as progress:
        batches = list(row_batches(test.samples, settings))
        for rows in progress.track(batches, description=printable(f"testing {label}".strip())):
            output = represent(test.samples.batch(rows).observations)
            for index, samples in enumerate(views):
                batch = samples.batch(rows)
                ways: tuple[int | None, ...] = (None,)
                if isinstance(output, Field) and index == len(views) - 1:
                    ways = (None, *settings.neighbors)
                for neighbors in ways:
                    prediction = _answer(output, batch.queries, neighbors)
                    error = relative_l2(prediction, batch.targets, batch.mask)
                    _check_finite(error, rows, grid_of(samples))
                    errors.setdefault((index, neighbors), []).append(error.cpu())
    return [
        Measurement(
            grid_of(views[index]), neighbors, tuple(map(shortened, torch.cat(parts).tolist()))
        )
        for (index, neighbors), parts in sorted(errors.items(), key=_grids_before_neighbors)
    ]


def make_rows(
    measurements: list[Measurement],
    test: TestSplit[Samples],
    settings: EvaluationSettings,
    origin: Origin,
    parameters: int,
    protocol: str,
    device: torch.device,
) -> list[Row]:
    """Measurements with all that a reader needs to know of them."""
    rows = []
    for index, (grid, neighbors, errors) in enumerate(measurements):
        paper = None
        if neighbors is None and settings.paper_errors:
            paper = settings.paper_errors[index]
        last = neighbors is None and index == max(1, len(settings.grids)) - 1
        groups = group_errors(errors, test.groups, dict(settings.paper_groups) if last else {})
        row = make_row(errors, groups, paper, origin, parameters, protocol, device)
        rows.append(replace(row, grid=grid, neighbors=neighbors))
    return rows


def make_row(
    errors: tuple[float, ...],
    groups: tuple[GroupError, ...],
    paper_error: float | None,
    origin: Origin,
    parameters: int,
    protocol: str,
    device: torch.device,
) -> Row:
    """The row of one list of test errors, on no grid."""
    return Row(
        run=origin.run,
        recipe=origin.recipe,
        task=origin.task,
        model=origin.model,
        seed=origin.seed,
        git_hash=origin.git_hash,
        parameters=parameters,
        split="test",
        grid=None,
        neighbors=None,
        samples=len(errors),
        error=mean(errors),
        paper_error=paper_error,
        errors=errors,
        groups=groups,
        protocol=protocol,
        fst_version=package_version(),
        torch_version=torch.__version__,
        device=device_name(device),
        training=origin.training,
    )


def views_of(test: TestSplit[Samples], settings: EvaluationSettings) -> list[Samples]:
    """The test samples on each grid of the settings, or as they are stored where it names none."""
    if not isinstance(test, TestSplit):
        raise TypeError(f"test must be a TestSplit, got {type(test).__name__}")
    samples = test.samples
    if not settings.grids:
        return [samples]
    if not isinstance(samples, GridSamples):
        raise EvaluationError("grids were given, but these test samples lie on no grid")
    return [
        samples if grid == samples.grid_shape else samples.on_grid(grid) for grid in settings.grids
    ]


def row_batches(samples: Samples, settings: EvaluationSettings) -> Iterator[Int[Tensor, " b"]]:
    """The row numbers of each batch, in the order of the test split."""
    return iter(torch.arange(len(samples), device=samples.device).split(settings.batch_size))


def chosen_outputs(
    model: Operator, samples: Samples, settings: EvaluationSettings, wanted: Sequence[int]
) -> Iterator[tuple[Batch, Output]]:
    """The rows `wanted` of the test, each represented with the evaluation points it is scored with.

    Batch by batch of the test, in its order.
    """
    chosen = torch.tensor(wanted, device=samples.device)
    batches = row_batches(samples, settings)
    for rows, draws in zip(batches, batch_draws(model, settings), strict=False):
        rows = rows[torch.isin(rows, chosen)]
        if len(rows):
            batch = samples.batch(rows)
            yield batch, model(batch.observations, draws)


def grid_of(samples: Samples) -> tuple[int, ...] | None:
    return samples.grid_shape if isinstance(samples, GridSamples) else None


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


def fingerprint(settings: EvaluationSettings, weights: bytes) -> str:
    """Identifies the weights scored and what was asked of them, in a few characters."""
    asked = to_json(settings)
    for name in ("view", "paper_errors", "paper_groups"):  # what is shown beside the errors
        del asked[name]
    return fingerprint_of(asked, weights)


def fingerprint_of(asked: dict[str, Any], weights: bytes) -> str:
    text = json.dumps(asked, sort_keys=True).encode()
    return hashlib.sha256(hashlib.sha256(weights).digest() + text).hexdigest()[:16]


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type.upper()} {platform.machine()}"


def _answer(
    output: Output, queries: Float[Tensor, "b q s"], neighbors: int | None
) -> Float[Tensor, "b q c"]:
    return output(queries, neighbors) if isinstance(output, Field) else output(queries)


def _check_finite(error: Tensor, rows: Tensor, grid: tuple[int, ...] | None) -> None:
    finite = torch.isfinite(error)
    if not bool(finite.all()):
        row = int(rows[~finite][0])
        where = "" if grid is None else f" on the {'×'.join(map(str, grid))} grid"
        raise EvaluationError(
            f"the relative error of test sample {row}{where} is not finite: the prediction is "
            "NaN or infinite, or the solution is zero everywhere"
        )


def _grids_before_neighbors(
    item: tuple[tuple[int, int | None], list[Tensor]],
) -> tuple[bool, int, int]:
    (index, neighbors), _ = item
    return neighbors is not None, index, neighbors or 0


@contextmanager
def show_progress(console: Console | None) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        disable=console is None or not console.is_terminal,
    ) as progress:
        yield progress
