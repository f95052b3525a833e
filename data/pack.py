"""How documents lie in a token stream: concatenation, and positions out of stored offsets.

Letters: D documents, N tokens of the stream, L tokens of a window.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Pack:
    """Whole documents end to end. A document's last token is its EOS."""

    tokens_N: np.ndarray  # uint32 (N,)
    first_D: np.ndarray  # int64 (D,): ascending, 0 first: the token at which a document starts
    source_D: np.ndarray  # int64 (D,): index into the manifest's sources


def concat(ids_D: list[np.ndarray], source_D: list[int]) -> Pack:
    """Lay the documents end to end. Wastes nothing; windows may cut documents."""
    length_D = np.array([ids.size for ids in ids_D], dtype=np.int64)
    return Pack(
        tokens_N=np.concatenate(ids_D).astype(np.uint32),
        first_D=np.cumsum(length_D) - length_D,
        source_D=np.array(source_D, dtype=np.int64),
    )


def positions(first_D: np.ndarray, start: int, length: int) -> np.ndarray:
    """int64 (L,): place of the tokens ``start .. start + length - 1`` in their documents.

    A document that began before the window restarts at 0, as in torchtitan's packing: the
    window is all that attention sees of it.
    """
    low, high = np.searchsorted(first_D, (start, start + length), side="left")
    begins_L = np.zeros(length, dtype=np.int64)
    begins_L[first_D[low:high] - start] = first_D[low:high] - start
    return np.arange(length) - np.maximum.accumulate(begins_L)
