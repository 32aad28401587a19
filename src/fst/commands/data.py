"""What `fst data burgers`, `fst data darcy` and `fst data check` do.

Enters: the command line's settings. Leaves: files, or a description of a file, and a few lines of
text. Errors about files are `DataError`s; showing them is the command line's business.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fst.commands.device import parse_device
from fst.data import burgers as burgers_law
from fst.data.burgers_data import BurgersData
from fst.data.check import Description, check_file, check_folder
from fst.data.darcy_data import DarcyData
from fst.data.errors import DataError
from fst.data.image_check import check_images, holds_images
from fst.data.neuraloperator_files import file_name as darcy_file_name
from fst.data.pdebench import file_name as burgers_file_name
from fst.terminal import Terminal


def burgers(
    *,
    out: Path,
    viscosity: tuple[float, ...] = (0.01,),
    all_viscosities: bool = False,
    training: int = 2000,
    validation: int = 100,
    test: int = 84,
    points: int = 1024,
    times: int = 201,
    final_time: float = 2.0,
    seed: int = 0,
    batch_size: int | None = None,
    device: str | None = None,
    force: bool = False,
) -> None:
    """Make Burgers trajectories in PDEBench's file layout, one file for each viscosity.

    A run that was interrupted goes on where it stopped. The same seed gives the same data whatever
    the batch size.

    Args:
        out: Folder for the files 1D_Burgers_Sols_Nu*.hdf5.
        viscosity: Viscosities to make files for.
        all_viscosities: Make the twelve viscosities of PDEBench (about 22 GB).
        training: Training trajectories in each file.
        validation: Validation trajectories in each file.
        test: Test trajectories in each file.
        points: Cells of the grid.
        times: Saved times, the initial one included.
        final_time: The last saved time.
        seed: Seed of the initial conditions.
        batch_size: Trajectories solved at once; chosen by device when not given.
        device: Where to solve: cpu or cuda; a GPU where there is one.
        force: Replace files that exist and discard unfinished ones.
    """
    console = Terminal()
    viscosities = tuple(burgers_law.VISCOSITIES) if all_viscosities else viscosity
    with _settings():
        chosen = parse_device(device)
        _check_batch_size(batch_size)
        data = BurgersData(
            viscosities=viscosities,
            training=training,
            validation=validation,
            test=test * len(viscosities),
            points=points,
            times=times,
            final_time=final_time,
            seed=seed,
        )
    for nu in viscosities:
        path = out / burgers_file_name(nu)
        made = data.make(
            path,
            nu,
            test,
            device=chosen,
            console=console,
            batch_size=batch_size,
            force=force,
        )
        _say(console, path, made)


def darcy(
    *,
    out: Path,
    resolution: int = 128,
    fine: int = 1024,
    training: int = 5000,
    test: int = 1000,
    seed: int = 0,
    batch_size: int | None = None,
    device: str | None = None,
    force: bool = False,
) -> None:
    """Make Darcy samples in NeuralOperator's file layout, a training and a test file.

    A run that was interrupted goes on where it stopped. The same seed gives the same data whatever
    the batch size.

    Args:
        out: Folder for darcy_train_*.pt and darcy_test_*.pt.
        resolution: Points of each axis of the stored grid; it must divide fine.
        fine: Intervals of each axis of the grid that samples are solved on.
        training: Samples of the training file; recipes draw training and validation from it.
        test: Samples of the test file.
        seed: Seed of the coefficient fields.
        batch_size: Samples between two records of progress; chosen by device when not given.
        device: Where to solve: cpu or cuda; a GPU where there is one.
        force: Replace files that exist and discard unfinished ones.
    """
    console = Terminal()
    with _settings():
        chosen = parse_device(device)
        _check_batch_size(batch_size)
        data = DarcyData(
            resolution=resolution,
            fine=fine,
            training=training,
            validation=0,
            test=test,
            training_file=training,
            seed=seed,
        )
    for which in ("train", "test"):
        path = out / darcy_file_name(which, resolution)
        made = data.make(
            path,
            which,
            device=chosen,
            console=console,
            batch_size=batch_size,
            force=force,
        )
        _say(console, path, made)


def check(path: Path, /) -> None:
    """Read a data file, or every data file of a folder, from end to end and describe it.

    Recognises PDEBench trajectories, NeuralOperator Darcy samples, fst points and images in class
    folders or tars, and reports damage, wrong layouts, NaN and, in a folder, trajectories on
    different grids or images of different classes.

    Args:
        path: The file or folder to read.
    """
    console = Terminal()
    found: Iterable[Description]
    if holds_images(path):
        found = check_images(path)
    else:
        found = check_folder(path) if path.is_dir() else [check_file(path)]
    for description in found:
        table = Table(title=f"{description.path.name}: {description.layout}", show_header=False)
        for name, value in description.facts:
            table.add_row(name, value)
        console.print(table)


@contextmanager
def _settings() -> Iterator[None]:
    """A setting that makes no sense is the user's error: one line, no traceback."""
    try:
        yield
    except ValueError as error:
        raise DataError(str(error)) from error


def _check_batch_size(batch_size: int | None) -> None:
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")


def _say(console: Console, path: Path, made: bool) -> None:
    size = path.stat().st_size / 1e6
    console.print(f"{path}: {'written' if made else 'there already'}, {size:,.1f} MB")
