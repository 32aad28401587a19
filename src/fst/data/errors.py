"""The one error a user meets when a data file cannot be used: it names the file and what was wrong.

`reading` and `writing` turn what the operating system, HDF5 and PyTorch raise into it.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py

from fst.io import FileError


class DataError(FileError):
    """A data file is missing, damaged, of another layout, or cannot be written."""


@contextmanager
def reading(path: Path, expected: str) -> Iterator[None]:
    """Name the file, and what it was expected to be, when reading it fails."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file; expected {expected}") from error
    except MemoryError:
        raise
    # A damaged file can make HDF5, zip and pickle readers raise almost anything.
    except Exception as error:
        raise DataError(f"{path}: cannot be read as {expected} ({_first_line(error)})") from error


@contextmanager
def reading_hdf5(path: Path, expected: str) -> Iterator[h5py.File]:
    """An HDF5 file to read, if all that it holds lies in it.

    HDF5 would follow links to other files, and read data from any file that a given one names.
    """
    with reading(path, expected):
        if path.exists() and not path.is_file():  # a pipe would be waited for without end
            raise DataError(f"{path}: is not a regular file; expected {expected}")
        with h5py.File(path, "r") as file:
            outside = file.visititems_links(_if_outside) or file.visititems(_if_outside)
            if outside is not None:
                raise DataError(f"{path}: {outside} lies in another file, which is not read")
            yield file


def _if_outside(name: str, item: object) -> str | None:
    """The name of what is not in the file itself; an answer ends the visit."""
    stored = isinstance(item, h5py.Dataset) and (item.external or item.is_virtual)
    return name if stored or isinstance(item, h5py.ExternalLink) else None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file when the disk is full, read-only, or lost."""
    try:
        yield
    except DataError:
        raise
    # HDF5 reports a failed write as OSError or RuntimeError, with the system's reason in its text.
    except (OSError, RuntimeError) as error:
        raise DataError(f"{path}: cannot be written ({_reason(error)})") from error


def is_locked(error: Exception) -> bool:
    """Whether HDF5 found the file in another writer's hands."""
    return isinstance(error, BlockingIOError) or "unable to lock file" in str(error)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "no space left on the disk"
    if is_locked(error):
        return "another process is writing it"
    return _first_line(error)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
