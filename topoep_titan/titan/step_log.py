"""A run's records, one line each, appended as steps end: a killed run loses nothing.

A run that resumes logs some steps again; the last record of a step counts. Needs no torch.
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

    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def after(self, offset: int) -> tuple[list[dict[str, Any]], int]:
        """(records past a byte offset, as they were written, the offset past them)."""
        if self.size() <= offset:
            return [], offset
        with self.path.open("rb") as file:
            file.seek(offset)
            lines, _, _ = file.read().rpartition(b"\n")  # the last may be being written
        records = []
        for line in lines.splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                continue  # torn by a kill, and its step was logged again
        return records, offset + len(lines) + bool(lines)

    def read(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """(training records, validation records), each in ascending step."""
        training, validation = {}, {}
        for record in self.after(0)[0]:
            kind = validation if "validation_loss" in record else training
            kind[record["step"]] = record
        return [[kind[step] for step in sorted(kind)] for kind in (training, validation)]
