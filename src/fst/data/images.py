"""Which images there are: class folders, tars and tar shards, found without decoding an image.

Enters: a folder, or a tar. Leaves: names and, on request, the bytes of any image; for a split also
class names (sorted) and labels. Nothing is ever unpacked: a tar is indexed once by its headers, and
an image is a seek and a read in a file opened for it, which is safe in threads and after a fork.
"""

import os
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Self

import numpy as np
from jaxtyping import Int

from fst.data.files import DataError, reading
from fst.terminal import printable

SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
_LAYOUTS = "{split}/CLASS/*.jpg, {split}.tar or {split}-*.tar with CLASS/*.jpg inside"
_NAMED = 8  # names in a message; the rest is counted
_BLOCK = 512  # of a tar


@dataclass(frozen=True)
class Skipped:
    """What was left out, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} {self.reason}"


@dataclass(frozen=True)
class ImageFiles(ABC):
    """Images by number: their names, with / between folders, and their bytes.

    `problems` says what was already left out when they were found.
    """

    source: Path
    names: tuple[str, ...]
    problems: tuple[Skipped, ...]

    def __len__(self) -> int:
        return len(self.names)

    @abstractmethod
    def read(self, row: int) -> bytes: ...

    @abstractmethod
    def title(self, row: int) -> str:
        """The name that tells a person where the image lies."""


@dataclass(frozen=True)
class FolderFiles(ImageFiles):
    """Image files under one folder, those of its folders included."""

    def read(self, row: int) -> bytes:
        path = self.source / self.names[row]
        if path.exists() and not path.is_file():  # a pipe would be waited for without end
            raise OSError("it is not a regular file")
        return path.read_bytes()

    def title(self, row: int) -> str:
        folder = self.source.name  # empty for the current folder
        return f"{folder}/{self.names[row]}" if folder else self.names[row]


@dataclass(frozen=True)
class TarFiles(ImageFiles):
    """Image files inside tars: which tar, where it starts there, and how long it is."""

    archives: tuple[Path, ...]
    spans: Int[np.ndarray, "n 3"]

    def read(self, row: int) -> bytes:
        archive, offset, size = self.spans[row].tolist()
        with self.archives[archive].open("rb") as file:
            file.seek(offset)
            content: bytes = file.read(size)
            return content

    def title(self, row: int) -> str:
        return f"{self.archives[self.spans[row, 0]].name}: {self.names[row]}"


@dataclass(frozen=True)
class LabelledImages:
    """Some rows of image files with their classes."""

    files: ImageFiles
    rows: Int[np.ndarray, " n"]
    labels: Int[np.ndarray, " n"]
    class_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.files.names[row] for row in self.rows)

    @property
    def counts(self) -> Int[np.ndarray, " k"]:
        return np.bincount(self.labels, minlength=len(self.class_names))

    def take(self, which: Int[np.ndarray, " m"]) -> Self:
        return replace(self, rows=self.rows[which], labels=self.labels[which])


def find_images(path: Path) -> ImageFiles:
    """Every image of a folder, in or below it, or of a tar, in the order of the names."""
    if not path.is_dir() and not path.is_file():
        raise DataError(f"{path}: there is no such folder or tar")
    files = _open_folder(path) if path.is_dir() else _open_tars(path, [path])
    if len(files) == 0:
        raise DataError(f"{path}: holds no image ({', '.join(sorted(SUFFIXES))}){_found(files)}")
    return files


def has_images(folder: Path) -> bool:
    """Whether there is an image in or below a folder; stops at the first."""
    return any(True for _ in _walk(folder, folder))


def has_split(path: Path, split: str) -> bool:
    """Whether a folder holds this split in any layout."""
    return bool(_sources(path, split))


def find_split(path: Path, split: str) -> LabelledImages:
    expected = _LAYOUTS.format(split=split)
    near = path.exists() and path.stem.startswith(split)  # the split itself, not what holds it
    hint = f"; is the folder above it meant, {path.absolute().parent}?" if near else ""
    if not path.is_dir():
        what = "is a file" if path.exists() else "there is no such folder"
        raise DataError(f"{path}: {what}; expected a folder with {expected}{hint}")
    sources = _sources(path, split)
    if not sources:
        there = listed(sorted(entry.name for entry in path.iterdir())) or "nothing"
        raise DataError(
            f"{path}: holds no {split} images; expected {expected}; it holds {there}{hint}"
        )
    kinds = {source.is_dir() for source in sources} | {s.stem == split for s in sources}
    if len(sources) > 1 and len(kinds) > 1:
        raise DataError(
            f"{path}: holds {split} images more than once ({listed([s.name for s in sources])}); "
            "keep one of them"
        )
    if sources[0].is_dir():
        files = _open_folder(sources[0])
        return label(replace(files, problems=_empty_classes(files)), split)
    source = sources[0] if len(sources) == 1 else path / f"{split}-*.tar"
    return label(_open_tars(source, sources), split)


def label(files: ImageFiles, split: str = "") -> LabelledImages:
    """Classes from the names: the first folder, below a folder with the name of the split."""
    classes, rows, stray = [], [], []
    for row, name in enumerate(files.names):
        folders = name.split("/")[:-1]
        folders = folders[1:] if folders and folders[0] == split else folders
        if folders:
            classes.append(folders[0])
            rows.append(row)
        else:
            stray.append(files.title(row))
    unique, labels = np.unique(np.array(classes, dtype=str), return_inverse=True)
    names = tuple(unique.tolist())
    if not names:
        what = f"images, but none in a class folder: {listed(stray)}" if stray else "no image"
        raise DataError(f"{files.source}: holds {what}; expected CLASS/*.jpg{_found(files)}")
    if len(names) == 1:
        raise DataError(
            f"{files.source}: holds one class only, {names[0]!r} ({listed(files.names[:1])}); "
            f"expected a folder for each of at least two classes{_found(files)}"
        )
    problems = *files.problems, *(Skipped(title, "lies in no class folder") for title in stray)
    return LabelledImages(replace(files, problems=problems), np.array(rows), labels, names)


def require_classes(images: LabelledImages, expected: Sequence[str], of: str) -> None:
    """The classes must be those of the training images; `of` names where these lie."""
    missing = [name for name in expected if name not in set(images.class_names)]
    unknown = [name for name in images.class_names if name not in set(expected)]
    if missing or unknown:
        parts = [f"it lacks {listed(missing)}"] if missing else []
        parts += [f"it has {listed(unknown)} besides"] if unknown else []
        raise DataError(f"{images.files.source}: holds other classes than {of}: {'; '.join(parts)}")


def listed(items: Sequence[object]) -> str:
    """A few items for a message, and the number of those left out."""
    shown = ", ".join(printable(str(item)) for item in items[:_NAMED])
    return shown + (f" and {len(items) - _NAMED:,} more" if len(items) > _NAMED else "")


def _sources(path: Path, split: str) -> list[Path]:
    folder, tar = path / split, path / f"{split}.tar"
    found = [folder] if folder.is_dir() else []
    found += [tar] if tar.is_file() else []
    return found + sorted(path.glob(f"{split}-*.tar"))


def _is_image(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix.lower() in SUFFIXES and not any(map(_is_hidden, path.parts))


def _is_hidden(part: str) -> bool:
    """Names with a leading dot are what file managers and notebooks leave behind."""
    return part.startswith(".") and part not in (".", "..")


def _open_folder(folder: Path) -> ImageFiles:
    return FolderFiles(folder, tuple(sorted(_walk(folder, folder))), ())


def _empty_classes(files: ImageFiles) -> tuple[Skipped, ...]:
    """A class folder without an image is no class, and that is said."""
    folder, found = files.source, {name.split("/", 1)[0] for name in files.names}
    entries = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    empty = [name for name in entries if name not in found and not name.startswith(".")]
    return tuple(Skipped(f"{folder.name}/{name}", "holds no image") for name in empty)


def _walk(root: Path, folder: Path) -> Iterable[str]:
    for path, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        # The folders of the first level may be links, as class folders often are.
        if path == str(root):
            linked = [name for name in folders if (root / name).is_symlink()]
            for name in linked:
                yield from _walk(root, root / name)
        inside = Path(path).relative_to(root)
        yield from ((inside / name).as_posix() for name in files if _is_image(name))


def _open_tars(source: Path, archives: Sequence[Path]) -> TarFiles:
    found: list[tuple[str, int, int, int]] = []
    problems: list[Skipped] = []
    for number, archive in enumerate(archives):
        state = archive.stat()
        members, wrong = _index(archive, state.st_mtime_ns, state.st_size)
        problems += wrong
        found += [(name, number, *span) for name, span in members.items()]
    found.sort()
    names = tuple(name for name, *_ in found)
    spans = np.array([span for _, *span in found], dtype=np.int64).reshape(-1, 3)
    return TarFiles(source, names, tuple(problems), tuple(archives), spans)


@lru_cache(maxsize=64)
def _index(
    archive: Path, modified: int, length: int
) -> tuple[dict[str, tuple[int, int]], tuple[Skipped, ...]]:
    """Offset and size of each image of a tar, from its headers; and what is wrong with the tar."""
    del modified  # of the cache's key: a tar that was changed is indexed anew
    members: dict[str, tuple[int, int]] = {}
    cut: list[Skipped] = []
    end, following = 0, 0
    if _is_compressed(archive):
        raise DataError(f"{archive}: is compressed, and images are read in place; decompress it")
    with reading(archive, "an uncompressed tar of images"), tarfile.open(archive, "r:") as tar:
        try:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # a million of them is memory
                # With a negative size the next header would be one that was read before.
                if member.size < 0 or tar.offset <= following:
                    raise DataError(f"{archive}: the size of {member.name!r} in it is impossible")
                following = tar.offset
                end = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
                if not (member.isreg() and _is_image(member.name)) or member.issparse():
                    continue
                # Without what would lead out of the tar; it is only ever a name here.
                parts = (part for part in member.name.split("/") if part not in ("", ".", ".."))
                # As in any tar, the last member of a name is the one that counts.
                members.pop(name := "/".join(parts), None)
                if member.offset_data + member.size <= length:
                    members[name] = member.offset_data, member.size
                else:
                    cut.append(Skipped(f"{archive.name}: {name}", "the tar ends inside it"))
        except tarfile.ReadError:
            pass  # the end is missing; that is found and said below
    with archive.open("rb") as file:  # a block of zeros marks the end of a tar
        file.seek(end)
        ends = file.read(_BLOCK) == bytes(_BLOCK)
    if not ends:
        reason = f"ends too early or is damaged after {len(members):,} images: used up to there"
        cut.append(Skipped(archive.name, reason))
    return members, tuple(cut)


def is_tar(path: Path) -> bool:
    """Whether a file begins as a tar does, or one that is compressed."""
    with reading(path, "a tar of images"), path.open("rb") as file:
        return file.read(_BLOCK)[257:262] == b"ustar" or _is_compressed(path)


def _is_compressed(archive: Path) -> bool:
    """Whether a file begins as those of gzip, bzip2, xz and zstd do."""
    with reading(archive, "a tar of images"), archive.open("rb") as file:
        return file.read(6).startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"))


def _found(files: ImageFiles) -> str:
    """What was left out, to be added to a message that it may explain."""
    return f"; {listed(files.problems)}" if files.problems else ""
