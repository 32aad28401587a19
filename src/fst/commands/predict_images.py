"""`fst predict --images`: a trained classifier names what images show.

An image, a folder of images or a tar of images enters; one line an image leaves, as a .csv file:
the file, the most probable classes (five, or all where there are fewer), and their probabilities.
Images are cut as in the test of the run. Those that cannot be decoded are named and left out.
"""

import csv
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from fst.classifiers import Classifier
from fst.commands.device import parse_device
from fst.commands.predict import load_any
from fst.data.files import DataError, writing
from fst.data.image_decoding import View, decoded
from fst.data.images import SUFFIXES, FolderFiles, ImageFiles, Skipped, find_images, is_tar
from fst.evaluation.protocol import measuring
from fst.io import parse_json, write_atomically
from fst.terminal import printable, spreadsheet

BATCH_SIZE = 64
MOST = 5


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

    `run` is a run folder, a folder of `save_pretrained`, or hf://owner/name for the hub.
    """
    check_output(out, force)
    files = open_images(images)
    model = load_classifier(run)
    view = View.evaluation(model.image_size, find_resize(run, model))
    guesses = ask(model.to(parse_device(device)), files, view)
    for item in guesses.skipped:
        print(printable(f"fst: skipped {item.name}: {item.reason}"), file=sys.stderr)
    if not guesses.files:
        raise DataError(f"{images}: holds no image that can be decoded")
    write_guesses(out, guesses)
    if console is not None:
        left_out = f" ({len(guesses.skipped):,} skipped)" if guesses.skipped else ""
        images_word = "image" if len(guesses.files) == 1 else "images"
        text = f"{len(guesses.files):,} {images_word}{left_out}: {out}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    return guesses


def load_classifier(run: Path | str) -> Classifier:
    """The best weights of a run folder, or any other model that `from_pretrained` finds."""
    model = load_any(run)
    if not isinstance(model, Classifier):
        raise ValueError(
            f"{run} holds a {type(model).__name__}, which takes --observations and --queries; "
            "--images is for classifiers"
        )
    return model


def find_resize(run: Path | str, model: Classifier) -> int:
    """The short side before the crop: the run's own, or the paper's 256 for every 224."""
    for path in (Path(run) / "recipe.json", Path(run) / "best" / "recipe.json"):
        try:
            return int(parse_json(path.read_text())["data"]["resize"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return round(min(model.image_size) * 256 / 224)


def open_images(path: Path) -> ImageFiles:
    """A folder, a tar, or one image."""
    if path.is_file() and path.suffix.lower() in SUFFIXES:
        return FolderFiles(source=path.parent, names=(path.name,), problems=())
    if path.is_file() and path.suffix.lower() != ".tar" and not is_tar(path):
        raise DataError(f"{path}: is neither a tar nor an image ({', '.join(sorted(SUFFIXES))})")
    return find_images(path)


def ask(model: Classifier, files: ImageFiles, view: View) -> Guesses:
    """Guesses in float32, a few images at a time."""
    device, most = next(model.parameters()).device, min(MOST, len(model.class_names))
    names: list[str] = []
    classes: list[tuple[str, ...]] = []
    probabilities: list[tuple[float, ...]] = []
    skipped = list(files.problems)
    with measuring(model):
        for which, pixels, missing in decoded(files, np.arange(len(files)), view):
            names += [files.names[row] for row in which]
            skipped += missing
            for part in pixels.split(BATCH_SIZE):
                found = model(part.to(device).float() / 255).softmax(dim=-1).topk(most)
                classes += [tuple(model.class_names[k] for k in row) for row in _rows(found[1])]
                probabilities += map(tuple, _rows(found[0]))
    if not np.isfinite(probabilities).all():
        raise ValueError("the model's scores are NaN or infinite")
    return Guesses(tuple(names), tuple(classes), tuple(probabilities), tuple(skipped))


def write_guesses(path: Path, guesses: Guesses) -> None:
    """One line an image, whole or not at all."""
    numbers = range(1, 1 + len(guesses.classes[0]))
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(
        ["file", *(f"class_{n}" for n in numbers), *(f"probability_{n}" for n in numbers)]
    )
    for name, classes, found in zip(
        guesses.files, guesses.classes, guesses.probabilities, strict=True
    ):
        words = map(spreadsheet, (name, *classes))
        lines.writerow([*words, *(f"{value:.6f}" for value in found)])
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.getvalue().encode())


def check_output(path: Path, force: bool) -> None:
    """Raise before any work is done if the answers could not be written."""
    if path.suffix != ".csv":
        raise DataError(f"{path}: the classes of images are written as .csv")
    if path.is_dir():
        raise DataError(f"{path}: is a folder; name a file")
    if path.exists() and not force:
        raise DataError(f"{path}: exists; use --force to replace it")


def _rows(tensor: torch.Tensor) -> list[list[Any]]:
    return tensor.cpu().tolist()
