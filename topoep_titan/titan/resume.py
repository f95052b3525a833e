"""From which checkpoint a run goes on: the newest one whose every file is there and unchanged.

A checkpoint without ``.metadata`` was never finished (it is written last) and does not count. Sizes
are held against it; up to VERIFY_LIMIT bytes also every stored tensor against its CRC-32.
"""

import io
import re
import zipfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader

from topoep_titan.errors import InputError

VERIFY_LIMIT = 2 * 2**30  # bytes; reading more would hold up a start for too long


@dataclass(frozen=True)
class Resume:
    step: int | None  # of the checkpoint to load; None: there is none yet
    notes: tuple[str, ...]  # newer ones that cannot be used, and why


def resume_from(folder: Path, load_step: int = -1) -> Resume:
    """``folder``: with ``step-N`` in it. ``load_step``: the one that is wanted, -1 for the newest.

    Raises InputError when the wanted one is missing or damaged, or every finished one is damaged:
    a run never starts again from nothing by itself.
    """
    steps = {}
    for path in folder.glob("step-*"):
        if match := re.fullmatch(r"step-(\d+)", path.name):
            steps[int(match.group(1))] = path
    if load_step != -1:
        wrong = damage(steps[load_step]) if load_step in steps else "there is no such checkpoint"
        if wrong:
            raise InputError(f"checkpoint.load_step is {load_step}: {wrong} (in {folder})")
        return Resume(load_step, ())
    notes, finished = [], False
    for step in sorted(steps, reverse=True):
        if not (steps[step] / ".metadata").exists():
            notes.append(f"{steps[step]}: its save was interrupted")
            continue
        wrong = damage(steps[step])
        if wrong is None:
            return Resume(step, tuple(notes))
        notes.append(f"{steps[step]} is damaged: {wrong}")
        finished = True
    if finished:
        raise InputError(
            f"no checkpoint of {folder} can be used ({'; '.join(notes)}); bring back its files, or "
            f"start from the beginning: rm -r {folder}"
        )
    return Resume(None, tuple(notes))


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a finished checkpoint's files; None when nothing is."""
    try:
        stored = FileSystemReader(checkpoint).read_metadata().storage_data.values()
    except Exception as error:  # a damaged pickle raises whatever it likes
        return f".metadata cannot be read ({type(error).__name__})"
    pieces = defaultdict(list)
    for info in stored:
        pieces[info.relative_path].append((info.offset, info.length))
    for name, spans in sorted(pieces.items()):
        path, needed = checkpoint / name, max(offset + length for offset, length in spans)
        if not path.exists():
            return f"{name} is missing"
        if path.stat().st_size < needed:
            return f"{name} has {path.stat().st_size:,} of {needed:,} bytes"
    if sum(length for spans in pieces.values() for _, length in spans) <= VERIFY_LIMIT:
        for name, spans in sorted(pieces.items()):
            with (checkpoint / name).open("rb") as file:
                for offset, length in sorted(spans):
                    file.seek(offset)
                    if not _unchanged(file.read(length)):
                        return f"{name} was changed (bytes {offset:,} to {offset + length:,})"
    return None


def _unchanged(stored: bytes) -> bool:
    """Every tensor is stored by torch.save: a ZIP archive, with a CRC-32 of each of its members."""
    try:
        return zipfile.ZipFile(io.BytesIO(stored)).testzip() is None
    except zipfile.BadZipFile:
        return False
