"""What `fst data burgers`, `fst data darcy` and `fst data check` do.

Enters: the command line's settings. Leaves: files, or a description of a file, and a few lines of
text. What needs PyTorch is imported when a command runs, so that help is answered at once.
"""

from pathlib import Path
from typing import Any

from rich.table import Table
from tyro.conf import Positional

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
    from fst.data.burgers import VISCOSITIES
    from fst.data.burgers_data import BurgersData

    viscosities = VISCOSITIES if all_viscosities else viscosity
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
    _make(data, out, device, batch_size, force)


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
        batch_size: Samples solved at once; chosen by device when not given.
        device: Where to solve: cpu or cuda; a GPU where there is one.
        force: Replace files that exist and discard unfinished ones.
    """
    from fst.data.darcy_data import DarcyData

    data = DarcyData(
        resolution=resolution,
        fine=fine,
        training=training,
        validation=0,
        test=test,
        training_file=training,
        seed=seed,
    )
    _make(data, out, device, batch_size, force)


def check(path: Positional[Path], /) -> None:
    """Read a data file, or every data file of a folder, from end to end and describe it.

    Recognises PDEBench trajectories, NeuralOperator Darcy samples, fst points and images in class
    folders or tars, and reports damage, wrong layouts, NaN and, in a folder, trajectories on
    different grids or images of different classes.

    Args:
        path: The file or folder to read.
    """
    from fst.data.check import check as found_in

    console = Terminal()
    for description in found_in(path):
        table = Table(title=f"{description.path.name}: {description.layout}", show_header=False)
        for name, value in description.facts:
            table.add_row(name, value)
        console.print(table)


def _make(data: Any, out: Path, device: str | None, batch_size: int | None, force: bool) -> None:
    """Every file of these data, and a line about each."""
    from fst.types import parse_device

    console, chosen = Terminal(), parse_device(device)
    how: dict[str, Any] = {"console": console, "batch_size": batch_size, "force": force}
    for path, part in data.parts(out).items():
        made = data.make(path, *part, device=chosen, **how)
        size = path.stat().st_size / 1e6
        console.print(f"{path}: {'written' if made else 'there already'}, {size:,.1f} MB")
