"""A run's records, one line each, appended as steps end: a killed run loses nothing.

A run that resumes first forgets what it had logged past its checkpoint. Needs no torch.
"""

import json
from pathlib import Path
from typing import Any


class StepLog:
    """``steps.jsonl`` of a run's folder."""

    def __init__(self, folder: Path):
        self.path = folder / "steps.jsonl"

    def append(self, record: dict[str, Any]) -> None:
        with self.path.open("a+b") as file:
            torn = file.tell() and (file.seek(-1, 2), file.read(1))[1] != b"\n"
            file.write(b"\n" * torn + json.dumps(record).encode() + b"\n")

    def forget_from(self, step: int) -> None:
        """Cut the file at the first record of ``step`` or a later one."""
        if not self.size():
            return
        keep = 0
        with self.path.open("r+b") as file:
            for line in file:
                record = _record(line)
                if record and record["step"] >= step:
                    break
                keep += len(line)
            file.truncate(keep)

    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def after(self, offset: int) -> tuple[list[dict[str, Any]], int]:
        """(records past a byte offset, as they were written, the offset past them)."""
        if self.size() <= offset:
            return [], offset
        with self.path.open("rb") as file:
            file.seek(offset)
            lines, _, _ = file.read().rpartition(b"\n")  # the last may be being written
        records = [record for line in lines.splitlines() if (record := _record(line))]
        return records, offset + len(lines) + bool(lines)

    def read(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """(training records, validation records), each in ascending step."""
        training, validation = {}, {}
        for record in self.after(0)[0]:
            if "note" in record:
                continue
            kind = validation if "validation_loss" in record else training
            kind[record["step"]] = record
        return [[kind[step] for step in sorted(kind)] for kind in (training, validation)]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except ValueError:
        return None  # torn by a kill, and its step was logged again
