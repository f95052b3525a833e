"""One run, one folder: whose it is (``config.toml``), and whether it is new, resumable or done."""

import fcntl
import os
from pathlib import Path
from typing import Any, Literal, TextIO

import tomli
import tomli_w

from topoep_titan.errors import InputError
from topoep_titan.results import write_atomically

CONFIG, RESULT = "config.toml", "result.json"
LOCK, LOG = ".lock", "train.log"  # may be there before the run is


def run_folder(outputs: Path, name: str) -> Path:
    """``outputs/name``. Raises InputError for a name that leaves ``outputs``, or cannot be made."""
    if not stays_inside(name) or not name.isprintable():
        raise InputError(f"the name of a run is {name!r}; give a relative one without '..'")
    folder = outputs / name
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:
        raise InputError(f"the name of a run cannot be a folder's ({error.strerror})") from None
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"{folder} cannot be made ({there} is no folder, or read-only)")
    return folder


def stays_inside(path: str) -> bool:
    """Whether ``path`` names something below the folder that it is relative to."""
    parts = Path(path).parts
    return bool(parts) and not Path(path).is_absolute() and ".." not in parts


def read_config(folder: Path) -> dict[str, Any]:
    """Raises InputError when the file is not TOML any more."""
    try:
        return tomli.loads((folder / CONFIG).read_text())
    except (OSError, tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(
            f"{folder / CONFIG} cannot be read ({error}); choose another name, or remove the folder"
        ) from None


def run_state(folder: Path, table: dict[str, Any]) -> Literal["new", "resume", "finished"]:
    """What starting the resolved recipe ``table`` in ``folder`` would do; nothing is written.

    Raises InputError when the folder holds another recipe's run, or something else.
    """
    if not folder.exists() or not {path.name for path in folder.iterdir()} - {LOCK, LOG}:
        return "new"
    if not (folder / CONFIG).exists():
        raise InputError(
            f"{folder} exists and is not a run (it has no {CONFIG}); choose another name"
        )
    # Through TOML and back, so that both sides went the same way.
    different = _first_difference(read_config(folder), tomli.loads(tomli_w.dumps(table)))
    if different:
        key, there, here = different
        last = (folder / "checkpoint" / f"step-{there}").resolve()  # torchtitan wants it absolute
        if key == "training.steps" and here > there and last.exists():
            raise InputError(
                f"{folder} is a run of {there} steps; to train on to {here}, give another name and "
                f"--checkpoint.initial-load-path {last} (the schedule is then that of {here} steps)"
            )
        raise InputError(
            f"{folder} holds a run of another recipe: '{key}' was {there!r}, now {here!r}; "
            "choose another name, or remove the folder"
        )
    return "finished" if (folder / RESULT).exists() else "resume"


def open_run(folder: Path, table: dict[str, Any]) -> TextIO:
    """Make the folder, write the resolved recipe into it, and lock it until the file is closed.

    Raises InputError when another process trains there, and when it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not (folder / CONFIG).exists():
            write_atomically(folder / CONFIG, tomli_w.dumps(table))
    except BlockingIOError:
        raise InputError(
            f"{folder} is in use: another process trains there; wait for it, or end it"
        ) from None
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written ({error.strerror}); choose another name"
        ) from None
    return lock


def _first_difference(there: dict, here: dict, path: str = "") -> tuple[str, Any, Any] | None:
    for key in sorted(there.keys() | here.keys()):
        old, new = there.get(key), here.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found = _first_difference(old, new, f"{path}{key}.")
            if found:
                return found
        elif old != new:
            return f"{path}{key}", old, new
    return None
