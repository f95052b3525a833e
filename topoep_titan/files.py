"""The arrays that users hand to our commands and get from them: ``.npy`` and ``.npz`` files.

A file that is damaged or of another kind is one InputError, whatever numpy raises on it.
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from topoep_titan.errors import InputError
from topoep_titan.results import write_atomically

T = TypeVar("T")


def read_array(path: Path, remedy: str = "save one array with numpy.save") -> np.ndarray:
    """The array of a ``.npy`` file. Raises InputError, which ends in ``remedy``."""

    def read() -> np.ndarray:
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.ndarray):
            raise ValueError("it is an archive of arrays")
        return loaded

    return _read(path, read, "a .npy file of numbers", remedy)


def read_archive(
    path: Path, keys: tuple[str, ...], *, optional: tuple[str, ...] = (), of: str, remedy: str
) -> dict[str, np.ndarray]:
    """These arrays of a ``.npz`` file. Raises InputError, also when one of ``keys`` is not there.

    ``of``: what the file should be; ``remedy``: how to get one.
    """

    def read() -> dict[str, np.ndarray]:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise ValueError("it is one array, not an archive")
        with loaded:
            found = {key: loaded[key] for key in (*keys, *optional) if key in keys or key in loaded}
        if raw := [key for key, array in found.items() if not isinstance(array, np.ndarray)]:
            raise ValueError(f"{raw[0]} is no array")
        return found

    return _read(path, read, of, remedy)


def _read(path: Path, read: Callable[[], T], of: str, remedy: str) -> T:
    if path.exists() and not path.is_file():  # reading a device or a pipe may never end
        raise InputError(f"{path} is not a regular file; {remedy}")
    try:
        return read()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error}); {remedy}") from None
    except MemoryError:
        reason = "its header claims more than memory holds"
    except Exception as error:  # numpy, zipfile, zlib and tokenize each have kinds of their own
        reason = " ".join(str(error).split()) or type(error).__name__
    raise InputError(f"{path} is not {of} ({reason}); {remedy}")


def write_arrays(path: Path, arrays: np.ndarray | dict[str, np.ndarray]) -> None:
    """One array as ``.npy``, several as ``.npz``: the whole file or nothing. Raises InputError."""
    buffer = io.BytesIO()
    if isinstance(arrays, dict):
        np.savez(buffer, **arrays)
    else:
        np.save(buffer, arrays)
    try:
        write_atomically(path, buffer.getvalue())
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror})") from None


def check_output(path: Path | None, *others: Path | None) -> None:
    """Before the work is done: a result must have a place to go, and overwrite no other file of
    the command."""
    if path and (path.is_dir() or not path.parent.is_dir()):
        reason = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise InputError(f"output {path} {reason}; give a file in an existing folder")
    if path and any(other and path.resolve() == other.resolve() for other in others):
        raise InputError(f"output {path} is another file of this command; give another path")
