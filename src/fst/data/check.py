"""Reading data from end to end, to say what they are or what is wrong with them.

Enters: a data file of any layout, a folder of them, or images in class folders or tars. Leaves: a
description, in words and numbers. Every number is read, and every image decoded, once.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from jaxtyping import Float

from fst.data import burgers_data, darcy_data, images, point_files, point_samples
from fst.data.files import DataError, Provenance, reading_hdf5
from fst.data.image_data import TRAIN, VAL
from fst.data.image_decoding import looked_through
from fst.data.images import Skipped, listed
from fst.data.point_data import PointData
from fst.data.samples import RunningMoments
from fst.data.source import SPLITS, Partition

_PATTERNS = ("*.hdf5", "*.h5", "*.pt")


@dataclass(frozen=True)
class Description:
    """What good data hold: their layout in words, then named facts for a table."""

    path: Path
    layout: str
    facts: tuple[tuple[str, str], ...]
    grid: tuple[int, ...] | None = None


class _Ranges(RunningMoments):
    """Least, greatest, mean and standard deviation of each named channel, block by block."""

    def __init__(self, *names: str) -> None:
        super().__init__(len(names))
        self.names = names
        self.least, self.greatest = np.full(len(names), np.inf), np.full(len(names), -np.inf)

    def see(self, block: Float[np.ndarray, "n c"]) -> None:
        super().see(block)
        self.least = np.minimum(self.least, block.min(axis=0))
        self.greatest = np.maximum(self.greatest, block.max(axis=0))

    def __str__(self) -> str:
        columns = zip(self.names, self.least, self.greatest, self.mean, self.std, strict=True)
        lines = [
            f"{name}: " * bool(name)
            + f"{least:.4g} to {greatest:.4g}, mean {mean:.4g}, standard deviation {std:.4g}"
            for name, least, greatest, mean, std in columns
        ]
        return "\n".join(lines) or "none"


def check(path: Path) -> Iterator[Description]:
    """Recognise what a path holds, read all of it, and describe it; or raise a `DataError`."""
    if not path.is_dir():
        return check_images(path) if path.suffix == ".tar" else iter([check_file(path)])
    split = any(images.has_split(path, name) for name in (TRAIN, VAL))
    return check_images(path) if split or images.has_images(path) else check_folder(path)


def check_file(path: Path) -> Description:
    """Recognise a file's layout, read all of it, and describe it; or raise a `DataError`."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    if h5py.is_hdf5(path):
        with reading_hdf5(path, "an HDF5 data file") as file:
            is_points = file.attrs.get("format") == point_files.FORMAT
        return _check_points(path) if is_points else _check_trajectories(path)
    if path.suffix == ".pt":
        return _check_fields(path)
    raise DataError(
        f"{path}: is neither HDF5 (PDEBench trajectories or fst points) "
        "nor a .pt file of NeuralOperator"
    )


def check_folder(folder: Path) -> Iterator[Description]:
    """Check every data file of a folder; trajectories must all be on one grid."""
    paths = sorted(path for pattern in _PATTERNS for path in folder.glob(pattern))
    if not paths:
        raise DataError(f"{folder}: holds no data file ({', '.join(_PATTERNS)})")
    first: Description | None = None
    for path in paths:
        description = check_file(path)
        if description.grid is not None:
            first = first or description
            if description.grid != first.grid:
                raise DataError(
                    f"{path}: holds a {description.grid} grid (times, cells), "
                    f"but {first.path.name} beside it a {first.grid} grid"
                )
        yield description


def _check_trajectories(path: Path) -> Description:
    file = burgers_data.open_trajectories(path)
    seen = _Ranges("")
    for (block,) in file.blocks(np.arange(file.rows)):
        seen.see(block.reshape(-1, 1).numpy())
    times, cells = file.grid
    facts = (
        ("trajectories", f"{file.rows:,}"),
        ("times", f"{times}, {file.times[0]:g} to {file.times[-1]:g}"),
        ("cells", f"{cells}, {file.cells[0]:g} to {file.cells[-1]:g}"),
        ("values", str(seen)),
        ("splits", _splits(file.partition)),
        *_provenance_facts(file.provenance),
    )
    return Description(path, "PDEBench trajectories", facts, file.grid)


def _check_fields(path: Path) -> Description:
    file = darcy_data.open_fields(path)
    reflected = file.rows is not None
    inputs, solutions = _Ranges(""), _Ranges("")
    for high, block in file.blocks(np.arange(len(file))):
        inputs.see(high.reshape(-1, 1).float().numpy())
        solutions.see(block.reshape(-1, 1).numpy())
    facts = (
        ("samples", f"{len(file):,}" + (", each with 4 reflections" if reflected else "")),
        ("grid", f"{file.resolution} × {file.resolution}"),
        ("share of high coefficients", f"{inputs.mean[0]:.4f}"),
        ("solutions", str(solutions)),
        *_provenance_facts(file.provenance),
    )
    return Description(path, "NeuralOperator Darcy samples", facts)


def _check_points(path: Path) -> Description:
    file = point_files.read_points(path)
    partition, named = file.partition or PointData().drawn(len(file)), file.partition is not None
    if named:
        point_files.check_trainable(path, partition, len(file))
    if empty := [name for name in SPLITS if len(getattr(partition, name)) == 0]:
        warnings.warn(
            f"{path}: holds no samples for {' and '.join(empty)}: fst train needs training and "
            "validation, fst evaluate and fst compare the test",
            stacklevel=2,
        )
    values, targets, conditions = (
        _Ranges(*map(str, labels)) for labels in (file.values, file.targets, file.condition)
    )
    learnable = point_samples.TargetCheck(file)
    for rows in file.blocks():
        values.see(file.observations(rows).values)
        queried = file.queries(rows)
        targets.see(queried.values)
        learnable.see(rows, queried)
        conditions.see(file.conditions(rows))
    learnable.finish(learned=False)
    learnable.warn()
    facts = (
        ("samples", f"{len(file):,}"),
        ("domain", f"{file.domain.low} to {file.domain.high}"),
        ("axes", ", ".join(map(str, file.axes))),
        ("values", str(values)),
        ("targets", str(targets)),
        ("condition", str(conditions)),
        ("observations a sample", _sizes(file.observation_offsets)),
        ("queries a sample", _sizes(file.query_offsets)),
        ("splits", ("" if named else "none named, drawn by seed: ") + _splits(partition)),
    )
    return Description(path, "fst points", facts)


def _splits(partition: Partition | None) -> str:
    if partition is None:
        return "none named, drawn by seed"
    return ", ".join(f"{len(getattr(partition, name)):,} {name}" for name in SPLITS)


def _provenance_facts(provenance: Provenance | None) -> tuple[tuple[str, str], ...]:
    if provenance is None:
        return (("provenance", "none stored: not made by fst"),)
    return tuple((name, str(value)) for name, value in provenance.items())


def _sizes(offsets: np.ndarray) -> str:
    sizes = np.diff(offsets)
    low, high = int(sizes.min()), int(sizes.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def check_images(path: Path) -> Iterator[Description]:
    """Read and decode every image; differing classes of two splits are a `DataError` at the end."""
    names = [name for name in (TRAIN, VAL) if path.is_dir() and images.has_split(path, name)]
    found = [images.find_split(path, name) for name in names]
    inside = path.stem.partition("-")[0] if path.is_file() else ""  # train.tar may hold train/CLASS
    for split in found or [images.label(images.find_images(path), inside)]:
        yield _check_split(split)
    if len(found) == 2:
        images.require_classes(found[1], found[0].class_names, str(found[0].files.source))


def _check_split(split: images.LabelledImages) -> Description:
    blocks = looked_through(split.files, split.rows, lambda image: image.size)
    seen = [size for block in blocks for size in block]
    sizes = [size for size in seen if not isinstance(size, Skipped)]
    skipped = [*split.files.problems, *(item for item in seen if isinstance(item, Skipped))]
    good = set(split.labels[[not isinstance(item, Skipped) for item in seen]].tolist())
    lost = [name for number, name in enumerate(split.class_names) if number not in good]
    counts = split.counts
    bad = listed([f"{item.name} ({item.reason})" for item in skipped])
    facts = [
        ("images", f"{len(sizes):,}"),
        ("classes", f"{len(split.class_names)}: {listed(split.class_names)}"),
        ("files a class", f"{counts.min():,} to {counts.max():,}"),
        ("skipped", f"{len(skipped):,}: {bad}" if skipped else "none"),
    ]
    if sizes:
        low, high = min(map(min, sizes)), max(map(max, sizes))
        facts.insert(3, ("sides", f"{low:,} to {high:,} pixels"))
    if lost:
        facts.append(("classes without a good image", listed(lost)))
    return Description(split.files.source, "images in classes", tuple(facts))
