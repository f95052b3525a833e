"""Texts of the reading stage by (input, row): mapped, so any document costs one page or two."""

import functools
from pathlib import Path

import numpy as np

OPEN_AT_MOST = 256  # inputs mapped at a time


def text_of(folder: Path, stem: str, row: int) -> str:
    text, ends = _mapped(folder, stem)
    start = int(ends[row - 1]) if row else 0
    return text[start : int(ends[row])].tobytes().decode()


def forget() -> None:
    """After the reading stage wrote anew."""
    _mapped.cache_clear()


@functools.lru_cache(OPEN_AT_MOST)
def _mapped(folder: Path, stem: str) -> tuple[np.ndarray, np.ndarray]:
    text = np.memmap(folder / f"{stem}.text", dtype=np.uint8, mode="r")
    return text, np.memmap(folder / f"{stem}.ends", dtype="<i8", mode="r")
