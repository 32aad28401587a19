"""Decoding every image of a data set once, to say what it is and which files are bad.

Enters: a folder with `train` and `val`, a folder of class folders, or a tar. Leaves: a description
of each split.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fst.data.check import Description
from fst.data.image_data import TRAIN, VAL
from fst.data.image_decoding import ImageError, decoding, default_threads, read
from fst.data.images import (
    LabelledImages,
    Skipped,
    find_images,
    find_split,
    has_images,
    has_split,
    label,
    listed,
    require_classes,
)

_BLOCK = 512


def holds_images(path: Path) -> bool:
    """Whether a path is meant as images: a tar, splits of images, or class folders."""
    if not path.is_dir():
        return path.suffix == ".tar"
    return any(has_split(path, split) for split in (TRAIN, VAL)) or has_images(path)


def check_images(path: Path) -> Iterator[Description]:
    """Read and decode every image; differing classes of two splits are a `DataError` at the end."""
    splits = [split for split in (TRAIN, VAL) if path.is_dir() and has_split(path, split)]
    if not splits:
        yield _check(label(find_images(path)))
        return
    found = [find_split(path, split) for split in splits]
    for images in found:
        yield _check(images)
    if len(found) == 2:
        require_classes(found[1], found[0].class_names, str(found[0].files.source))


def _check(images: LabelledImages) -> Description:
    seen = _decoded(images)
    sizes = [size for size in seen if not isinstance(size, Skipped)]
    skipped = [*images.files.problems, *(item for item in seen if isinstance(item, Skipped))]
    decoded = [not isinstance(item, Skipped) for item in seen]
    good = set(images.labels[decoded].tolist())
    lost = [name for number, name in enumerate(images.class_names) if number not in good]
    counts = images.counts
    bad = listed([f"{item.name} ({item.reason})" for item in skipped])
    facts = [
        ("images", f"{len(sizes):,}"),
        ("classes", f"{len(images.class_names)}: {listed(images.class_names)}"),
        ("files a class", f"{counts.min():,} to {counts.max():,}"),
        ("skipped", f"{len(skipped):,}: {bad}" if skipped else "none"),
    ]
    if sizes:
        low, high = min(map(min, sizes)), max(map(max, sizes))
        facts.insert(3, ("sides", f"{low:,} to {high:,} pixels"))
    if lost:
        facts.append(("classes without a good image", listed(lost)))
    return Description(images.files.source, "images in classes", tuple(facts))


def _decoded(images: LabelledImages) -> list[tuple[int, int] | Skipped]:
    """The size of each image, or what is wrong with it."""

    def one(row: int) -> tuple[int, int] | Skipped:
        try:
            with decoding(read(images.files, row)) as image:
                return image.size
        except ImageError as error:
            return Skipped(images.files.title(row), str(error))

    seen: list[tuple[int, int] | Skipped] = []
    with ThreadPoolExecutor(default_threads()) as pool:
        rows = images.rows.tolist()
        # A block at a time: work that is queued all at once cannot be interrupted.
        for start in range(0, len(rows), _BLOCK):
            seen += pool.map(one, rows[start : start + _BLOCK])
    return seen
