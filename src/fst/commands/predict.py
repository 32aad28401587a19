"""`fst predict`: a trained model answers queries about observations from files.

Observations come as an fst point file (.h5), an .npz file with `positions` and `values` (and
`condition`, `mask`) or a .csv file of one sample; queries in the same kinds of file, or as a grid
over the model's domain, such as 201x1024. Nothing is unpickled, and nothing is overwritten unasked.
"""

from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

import fst.baselines
import fst.vision  # noqa: F401  (both, so that `from_pretrained` knows their names)
from fst.base import Model
from fst.classifiers import Classifier
from fst.commands.device import parse_device
from fst.commands.prediction_files import (
    Prediction,
    Queries,
    check_output,
    read_observations,
    read_queries,
    write_prediction,
)
from fst.commands.prediction_formats import find_labels
from fst.data.files import DataError
from fst.evaluation.protocol import measuring
from fst.field import Field
from fst.operators import Operator, Output
from fst.pretrained import PretrainedError
from fst.types import Observations, check_neighbors

BATCH_SIZE = 8


def predict(
    run: Path | str,
    observations: Path,
    queries: Path | str,
    out: Path,
    *,
    neighbors: int | None = None,
    condition: tuple[float, ...] = (),
    device: str | None = None,
    force: bool = False,
    console: Console | None = None,
) -> Prediction:
    """Ask a trained model and write its answer to `out` (.npz, .h5, .csv, .vtu or .nc).

    `run` is a run folder, a folder of `save_pretrained`, or hf://owner/name for the hub.
    `neighbors` decodes from that many nearest anchors only. `condition` serves every sample of a
    file that holds none. `device` is the GPU where there is one, unless it is given.
    """
    check_output(out, force)
    check_neighbors(neighbors)
    model = load_model(run)
    given = read_observations(observations, model, condition)
    asked = read_queries(queries, model.domain)
    if len(asked.positions) not in (1, len(given)):
        raise DataError(
            f"{queries}: holds queries for {len(asked.positions)} samples, but {observations} "
            f"holds {len(given)} samples; give one set of queries for all, or one for each"
        )
    answer = ask(model.to(parse_device(device)), given, asked, neighbors)
    labels = find_labels(observations, queries, model.domain.axes, model.output_channels)
    write_prediction(out, answer, labels)
    if console is not None:
        samples, count = answer.predictions.shape[:2]
        text = f"{samples:,} samples at {count:,} queries each: {out}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    return answer


def load_any(run: Path | str) -> Model:
    """The best weights of a run folder, or any other model that `from_pretrained` finds."""
    best = Path(run) / "best"
    if not best.is_dir() and (Path(run) / "metrics.jsonl").is_file():
        raise PretrainedError(f"{run} has no trained weights yet: it was never validated")
    return Model.from_pretrained(best if best.is_dir() else run)


def load_model(run: Path | str) -> Operator:
    """As `load_any`, and it must be an operator."""
    model = load_any(run)
    if isinstance(model, Classifier):
        raise ValueError(f"{run} holds a classifier: ask it with --images, not --observations")
    assert isinstance(model, Operator)
    return model


def ask(
    model: Operator, observations: Observations, queries: Queries, neighbors: int | None = None
) -> Prediction:
    """Predictions in float32, a few samples at a time."""
    device = next(model.parameters()).device
    every = queries.positions.expand(len(observations), -1, -1)
    parts: list[tuple[Tensor, ...]] = []
    with measuring(model):
        for rows in torch.arange(len(observations)).split(BATCH_SIZE):
            output = model(_take(observations, rows).to(device))
            answer = _answer(output, every[rows].to(device), neighbors)
            parts.append(tuple(each.cpu() for each in answer))
    predictions, *anchors = (torch.cat(each).numpy() for each in zip(*parts, strict=True))
    if not np.isfinite(predictions).all():
        raise ValueError("the model's prediction is NaN or infinite")
    return Prediction(queries, predictions, *anchors)


def _answer(output: Output, queries: Tensor, neighbors: int | None) -> tuple[Tensor, ...]:
    if isinstance(output, Field):
        found = output.anchors
        return output(queries, neighbors), found.positions, found.length_scales
    if neighbors is not None:
        raise ValueError("neighbors was given, but this model has no anchors to choose from")
    return (output(queries),)


def _take(observations: Observations, rows: Tensor) -> Observations:
    condition, mask = observations.condition, observations.mask
    return Observations(
        observations.positions[rows],
        observations.values[rows],
        None if condition is None else condition[rows],
        None if mask is None else mask[rows],
    )
