"""`fst predict`: a trained model answers queries about observations, or names what images show.

What files of observations and queries hold says `prediction_files`. Images come as one file, a
folder or a tar; they are cut as in the test of the run, and those that cannot be decoded are named
and left out. Nothing is unpickled, and nothing is overwritten unasked.
"""

import sys
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from fst import from_pretrained
from fst.base import Model
from fst.classifiers import Classifier
from fst.commands.prediction_files import (
    FORMATS,
    Given,
    Prediction,
    check_format,
    check_output,
    csv_table,
    find_labels,
    read_observations,
    read_queries,
    run_labels,
    write_prediction,
)
from fst.data.files import DataError
from fst.data.image_decoding import View, decoded
from fst.data.images import SUFFIXES, FolderFiles, ImageFiles, Skipped, find_images, is_tar
from fst.evaluation.protocol import measuring
from fst.field import Field
from fst.io import parse_json, write_file
from fst.operators import Operator, Output
from fst.pretrained import PretrainedError
from fst.terminal import printable
from fst.types import Observations, check_neighbors, parse_device

BATCH_SIZE, IMAGE_BATCH_SIZE = 8, 64
MOST_CLASSES = 5


def answer(
    run: str,
    *,
    out: Path,
    observations: Path | None,
    queries: str | None,
    images: Path | None,
    neighbors: int | None,
    condition: tuple[float, ...],
    **options: Any,
) -> None:
    """What the options of the command ask for."""
    if images is not None:
        if observations is not None or queries is not None or condition or neighbors is not None:
            raise ValueError("--images goes alone: a classifier takes no other questions")
        predict_images(run, images, out, **options)
    elif observations is None or queries is None:
        raise ValueError("give --observations and --queries or, for a classifier, --images")
    else:
        options |= {"neighbors": neighbors, "condition": condition}
        predict(run, observations, queries, out, **options)


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
    check_output(out, FORMATS, force)
    check_neighbors(neighbors)
    model, known = load_model(run), run_labels(run)
    given = read_observations(observations, model, condition, known)
    asked = read_queries(queries, model.domain, known)
    sets, samples = len(asked.positions), len(given.positions)
    if sets not in (1, samples):
        raise DataError(
            f"{queries}: holds queries for {sets} samples, but {observations} holds {samples} "
            "samples; give one set of queries for all, or one for each"
        )
    labels = find_labels(given, asked, model.output_channels, known)
    check_format(out, asked, labels)
    found = ask(model.to(parse_device(device)), given.observations, asked, neighbors)
    write_prediction(out, found, labels)
    _say(console, f"{samples:,} samples at {asked.positions.shape[1]:,} queries each: {out}")
    return found


def load_any(run: Path | str) -> Model:
    """The best weights of a run folder, or any other model that `from_pretrained` finds."""
    best = Path(run) / "best"
    if not best.is_dir() and (Path(run) / "metrics.jsonl").is_file():
        raise PretrainedError(f"{run} has no trained weights yet: it was never validated")
    return from_pretrained(best if best.is_dir() else run)


def load_model(run: Path | str) -> Operator:
    """As `load_any`, and it must be an operator."""
    model = load_any(run)
    if isinstance(model, Classifier):
        raise ValueError(f"{run} holds a classifier: fst predict --images asks it")
    assert isinstance(model, Operator)
    return model


def ask(
    model: Operator, observations: Observations, queries: Given, neighbors: int | None = None
) -> Prediction:
    """Predictions in float32, a few samples at a time."""
    device = next(model.parameters()).device
    every = queries.positions.expand(len(observations), -1, -1)
    parts: list[tuple[Tensor, ...]] = []
    with measuring(model):
        for rows in torch.arange(len(observations)).split(BATCH_SIZE):
            output = model(observations.each(itemgetter(rows)).to(device))
            found = _answer(output, every[rows].to(device), neighbors)
            parts.append(tuple(each.cpu() for each in found))
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


@dataclass(frozen=True)
class Guesses:
    """The classes of each image in the order of their probability; and the images left out."""

    files: tuple[str, ...]
    classes: tuple[tuple[str, ...], ...]
    probabilities: tuple[tuple[float, ...], ...]
    skipped: tuple[Skipped, ...] = ()


def predict_images(
    run: Path | str,
    images: Path,
    out: Path,
    *,
    device: str | None = None,
    force: bool = False,
    console: Console | None = None,
) -> Guesses:
    """Ask a trained classifier about images and write its answers to `out` (.csv).

    One line an image: the file, the most probable classes (five, or all where there are fewer),
    and their probabilities. `run` is as for `predict`.
    """
    check_output(out, (".csv",), force)
    files = open_images(images)
    model = load_any(run)
    if not isinstance(model, Classifier):
        raise ValueError(
            f"{run} holds a {type(model).__name__}, which takes --observations and --queries; "
            "--images is for classifiers"
        )
    view = View.evaluation(model.image_size, find_resize(run, model))
    guesses = guess(model.to(parse_device(device)), files, view)
    for item in guesses.skipped:
        print(printable(f"fst: skipped {item.name}: {item.reason}"), file=sys.stderr)
    if not guesses.files:
        raise DataError(f"{images}: holds no image that can be decoded")
    write_guesses(out, guesses)
    left_out = f" ({len(guesses.skipped):,} skipped)" if guesses.skipped else ""
    word = "image" if len(guesses.files) == 1 else "images"
    _say(console, f"{len(guesses.files):,} {word}{left_out}: {out}")
    return guesses


def find_resize(run: Path | str, model: Classifier) -> int:
    """The short side before the crop: the run's own, or the paper's 256 for every 224."""
    for path in (Path(run) / "recipe.json", Path(run) / "best" / "recipe.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            return int(parse_json(path.read_text())["data"]["resize"])
    return round(min(model.image_size) * 256 / 224)


def open_images(path: Path) -> ImageFiles:
    """A folder, a tar, or one image."""
    if path.is_file() and path.suffix.lower() in SUFFIXES:
        return FolderFiles(source=path.parent, names=(path.name,), problems=())
    if path.is_file() and path.suffix.lower() != ".tar" and not is_tar(path):
        raise DataError(f"{path}: is neither a tar nor an image ({', '.join(sorted(SUFFIXES))})")
    return find_images(path)


def guess(model: Classifier, files: ImageFiles, view: View) -> Guesses:
    """Guesses in float32, a few images at a time."""
    device, most = next(model.parameters()).device, min(MOST_CLASSES, len(model.class_names))
    names: list[str] = []
    classes: list[tuple[str, ...]] = []
    probabilities: list[tuple[float, ...]] = []
    skipped = list(files.problems)
    with measuring(model):
        for which, pixels, missing in decoded(files, np.arange(len(files)), view):
            names += [files.names[row] for row in which]
            skipped += missing
            for part in pixels.split(IMAGE_BATCH_SIZE):
                found = model(part.to(device).float() / 255).softmax(dim=-1).topk(most)
                classes += [tuple(model.class_names[k] for k in row) for row in found[1].tolist()]
                probabilities += map(tuple, found[0].tolist())
    if not np.isfinite(probabilities).all():
        raise ValueError("the model's scores are NaN or infinite")
    return Guesses(tuple(names), tuple(classes), tuple(probabilities), tuple(skipped))


def write_guesses(path: Path, guesses: Guesses) -> None:
    """One line an image, whole or not at all."""
    numbers = range(1, 1 + len(guesses.classes[0]))
    header = ["file", *(f"class_{n}" for n in numbers), *(f"probability_{n}" for n in numbers)]
    found = zip(guesses.files, guesses.classes, guesses.probabilities, strict=True)
    lines = [(name, *known, *(f"{value:.6f}" for value in likely)) for name, known, likely in found]
    write_file(path, csv_table(header, lines))


def _say(console: Console | None, text: str) -> None:
    if console is not None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
