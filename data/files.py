"""Files that appear whole or not at all, and what a full disk looks like to the user."""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from data.errors import DataError


def write_whole(path: Path, content: bytes) -> str:
    """Temporary file, fsync, rename, fsync of the directory. Returns the SHA-256 of the content.

    Raises DataError when the disk is full; the temporary file is gone then.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        space_left_or_say(error, path.parent)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return hashlib.sha256(content).hexdigest()


def space_left_or_say(error: OSError, folder: Path) -> None:
    """Raise DataError when ``error`` means that no more, or nothing, can be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = shutil.disk_usage(folder).free
        raise DataError(
            f"{folder}: {os.strerror(error.errno)} ({free / 1e9:.2f} GB free); make room and run "
            "the same command, it goes on where it stopped"
        ) from None
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        raise DataError(
            f"{folder} cannot be written ({os.strerror(error.errno)}); give a folder that can"
        ) from None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time in what follows; the others wait."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
