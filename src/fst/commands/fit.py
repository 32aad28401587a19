"""`fst.fit`: samples in, a trained model out, for people without a training loop."""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fst.base import Model
from fst.commands.device import choose_device
from fst.commands.train import train
from fst.data import PointFunctions, PointSample, write_points
from fst.data.conversion import bounding_box
from fst.recipes import find, own
from fst.terminal import Terminal
from fst.types import Domain


def fit(
    samples: Iterable[PointSample] | PointFunctions | str | Path,
    domain: Domain | None = None,
    *,
    minutes: float | None = None,
    out: str | Path | None = None,
    recipe: str = "own/fst",
    splits: Mapping[str, Sequence[int]] | None = None,
    device: str | None = None,
    quiet: bool = False,
) -> Model:
    """The model with the best validation error of a run of `fst train`, in `eval()` mode.

    `samples` are as `write_points` takes them, or its file; without a `domain` it is the smallest
    box that holds all points of a list of samples. Sizes and steps follow from the data
    and the device, and `minutes` bounds the training. The run is kept in `out`, if given.
    """
    asked = find(recipe)
    if asked.task != own.TASK:
        raise ValueError(f"recipe must be one of own/..., which take your own points, got {recipe}")
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder if out is None else out)
        if isinstance(samples, str | Path):
            if domain is not None or splits is not None:
                raise ValueError(
                    f"a file has its own domain and splits, got domain={domain} and splits={splits}"
                )
            path = Path(samples)
        else:
            path = (kept if out is None else kept.with_name(kept.name + "-data")) / "points.h5"
            if domain is None and isinstance(samples, list | tuple) and samples:
                domain = bounding_box(samples)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_points(path, samples, domain, splits=splits)
        run = kept / "run" if out is None else kept
        choice = own.choose(asked, path, choose_device(device))
        train(
            choice.recipe,
            run,
            data=path,
            device=device,
            minutes=minutes,
            most_minutes=choice.minutes,
            reasons=choice.reasons,
            console=Terminal(quiet=quiet),
        )
        return Model.from_pretrained(run / "best")
