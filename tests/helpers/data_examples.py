"""Small data for the tests of `fst.data`: files of a few rows, written in a moment."""

from pathlib import Path

import h5py
import numpy as np
import torch

from fst.data import BurgersData, DarcyData, PointSample
from fst.data.burgers_data import file_name
from fst.types import Domain

TIMES, POINTS = 21, 64

BURGERS = BurgersData(
    viscosities=(0.1,),
    training=6,
    validation=3,
    test=2,
    points=POINTS,
    times=TIMES,
    final_time=0.5,
    supervision_grid=(5, 16),
    validation_grid=(5, 16),
)
DARCY = DarcyData(
    resolution=16, fine=32, training=6, validation=3, test=4, training_file=12,
    validation_grid=(5, 5),
)  # fmt: skip
DOMAIN = Domain((0.0, -1.0), (2.0, 1.0))


def trajectories(rows: int, times: int = TIMES, points: int = POINTS) -> np.ndarray:
    """Numbers that say where they belong: row + time/100 + cell/100,000."""
    row, time, cell = np.ogrid[:rows, :times, :points]
    return (row + time / 100 + cell / 100_000).astype(np.float32)


def write_published(
    folder: Path, viscosity: float = 0.1, rows: int = 30, times: int = TIMES, points: int = POINTS
) -> Path:
    """A file as PDEBench publishes it: no splits, no law, one time coordinate too many."""
    path = folder / file_name(viscosity)
    with h5py.File(path, "w") as file:
        file["tensor"] = trajectories(rows, times, points)
        file["x-coordinate"] = ((np.arange(points) + 0.5) / points).astype(np.float32)
        step = BURGERS.final_time / (times - 1)
        file["t-coordinate"] = (np.arange(times + 1) * step).astype(np.float32)
        file.attrs["Nu"] = viscosity
    return path


def write_fields(path: Path, rows: int = 12, resolution: int = 16) -> dict[str, torch.Tensor]:
    """A file as NeuralOperator publishes it."""
    generator = torch.Generator().manual_seed(rows)
    content = {
        "x": torch.rand(rows, resolution, resolution, generator=generator) > 0.5,
        "y": torch.randn(rows, resolution, resolution, generator=generator),
    }
    torch.save(content, path)
    return content


def point_samples(count: int = 20, seed: int = 0) -> list[PointSample]:
    """Samples of 3 to 8 observations and 2 to 11 queries, two value channels, one target."""
    random = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        observed, queried = random.integers(3, 9), random.integers(2, 12)
        samples.append(
            PointSample(
                positions=random.uniform((0, -1), (2, 1), (observed, 2)),
                values=random.normal(size=(observed, 2)),
                queries=random.uniform((0, -1), (2, 1), (queried, 2)),
                targets=random.normal(3, 2, size=(queried, 1)),
                condition=random.uniform(1, 2, size=1),
            )
        )
    return samples
