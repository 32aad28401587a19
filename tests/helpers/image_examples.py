"""Made images for tests: smooth coloured pictures, class folders, tars and bad files.

A class has a colour, so that a tiny model can learn it; every image of it differs a little.
"""

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("apple", "pear", "plum")
_COLOURS = {"apple": (200, 60, 50), "pear": (70, 190, 60), "plum": (60, 70, 200)}


def picture(kind: str = "apple", number: int = 0, size: tuple[int, int] = (40, 48)) -> Image.Image:
    """A smooth wave in the colour of its class; `size` is height and width."""
    random = np.random.default_rng((CLASSES.index(kind), number))
    rows, columns = np.mgrid[: size[0], : size[1]] / max(size)
    phase, waves = random.uniform(0, 6, 3), random.uniform(2, 9, (3, 2))
    wave = np.sin(waves[:, 0, None, None] * rows + waves[:, 1, None, None] * columns
                  + phase[:, None, None])  # fmt: skip
    colour = np.array(_COLOURS[kind])[:, None, None]
    return Image.fromarray((colour + 50 * wave).clip(0, 255).astype(np.uint8).transpose(1, 2, 0))


def encoded(image: Image.Image, kind: str = "PNG", **settings: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **settings)
    return stream.getvalue()


def members(count: int = 4, size: tuple[int, int] = (40, 48)) -> dict[str, bytes]:
    """Good images of three classes by name."""
    return {
        f"{kind}/{number}.png": encoded(picture(kind, number, size))
        for kind in CLASSES
        for number in range(count)
    }


def bad_members() -> dict[str, bytes]:
    """Files that look like images by name and are none."""
    jpeg = encoded(picture("pear", 9), "JPEG")
    return {
        "apple/cut.jpg": jpeg[: len(jpeg) * 9 // 10],
        "pear/empty.png": b"",
        "plum/words.jpg": b"This is not an image.",
    }


def write_folder(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def write_tar(path: Path, files: dict[str, bytes] | list[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in files.items() if isinstance(files, dict) else files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def write_data_set(folder: Path, train: int = 4, val: int = 2) -> Path:
    """`train` and `val` class folders."""
    write_folder(folder / "train", members(train))
    write_folder(folder / "val", members(val))
    return folder
