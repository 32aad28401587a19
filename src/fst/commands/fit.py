"""`fst.fit`: samples in, a trained model out, for people without a training loop."""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from fst.base import Model
from fst.commands.train import choose_device, train
from fst.data import DataError, PointFunctions, PointSample, write_points
from fst.data.conversion import bounding_box
from fst.recipes import find, own
from fst.terminal import Terminal
from fst.training.run_folder import RunFolder
from fst.types import Domain, check_argument


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
    with tempfile.TemporaryDirectory() as folder, ExitStack() as after:
        run = Path(folder) / "run" if out is None else Path(out)
        RunFolder.require_free(run)
        if isinstance(samples, str | Path):
            if domain is not None or splits is not None:
                raise ValueError(
                    f"a file has its own domain and splits, got domain={domain} and splits={splits}"
                )
            path = Path(samples)
        else:
            check_argument("samples", samples, Iterable | PointFunctions)
            if isinstance(samples, list | tuple) and not samples:
                raise ValueError("samples must hold at least one PointSample, got none")
            path = run.with_name(run.name + "-data") / "points.h5"
            if path.exists():
                raise DataError(f"{path}: exists; remove it, or choose another out")
            if domain is None and isinstance(samples, list | tuple):
                domain = bounding_box(samples)
            path.parent.mkdir(parents=True, exist_ok=True)
            after.callback(_discard_without_run, path, run)
            write_points(path, samples, domain, splits=splits)
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


def _discard_without_run(data: Path, run: Path) -> None:
    """Remove data that no run was started with; a run that failed may be resumed with them."""
    if not (run / "recipe.json").is_file():
        data.unlink(missing_ok=True)
        with suppress(OSError):  # it may hold something else
            data.parent.rmdir()
