"""How documents lie in a shard: end to end, or whole in windows; and positions out of offsets.

A *pair* is an input token and its label, the next token of the same document: a document of n
tokens gives n - 1 pairs, and its EOS is never an input, as in torchtitan. Windows are cut in the
stream of pairs, so no label crosses from one document to the next.

Letters: D documents, N tokens of the stream, L pairs of a window, B bins.
"""

import bisect
from dataclasses import dataclass

import numpy as np

PADDING = -1  # source of a run of EOS that fills a window (best_fit); its labels are masked


@dataclass(frozen=True)
class Pack:
    """Whole documents end to end. A document's last token is its EOS."""

    tokens_N: np.ndarray  # uint32 (N,)
    first_D: np.ndarray  # int64 (D,): ascending, 0 first: the token at which a document starts
    source_D: np.ndarray  # int64 (D,): index into the manifest's sources; PADDING

    @property
    def pairs(self) -> int:
        """Without padding."""
        length_D = np.diff(np.append(self.first_D, self.tokens_N.size)) - 1
        return int(length_D[self.source_D != PADDING].sum())


def concat(ids_D: list[np.ndarray], source_D: list[int]) -> Pack:
    """Lay the documents end to end. Wastes nothing; windows may cut documents."""
    length_D = np.array([ids.size for ids in ids_D], dtype=np.int64)
    return Pack(
        tokens_N=np.concatenate(ids_D).astype(np.uint32),
        first_D=np.cumsum(length_D) - length_D,
        source_D=np.array(source_D, dtype=np.int64),
    )


def best_fit(ids_D: list[np.ndarray], source_D: list[int], length: int, eos_id: int) -> Pack:
    """Best-fit decreasing: no document that fits a window of ``length`` pairs is ever cut.

    Longer ones start a window, fill as many as they can, and share their last. The rest of a
    window is padding (a run of k + 1 EOS has k pairs). The shard's windows of ``length`` pairs are
    exactly the bins; other lengths can be cut too, without that promise.
    """
    pairs_D = [ids.size - 1 for ids in ids_D]
    bins_B: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room, -bin), ascending: the fullest that fits comes first
    for document in sorted(range(len(ids_D)), key=lambda document: (-pairs_D[document], document)):
        pairs = pairs_D[document]
        at = bisect.bisect_left(free, (pairs, -len(bins_B)))
        if pairs > length or at == len(free):
            number, room = len(bins_B), -pairs % length if pairs > length else length - pairs
            bins_B.append([])
        else:
            room, number = free.pop(at)
            number, room = -number, room - pairs
        bins_B[number].append(document)
        if room:
            bisect.insort(free, (room, -number))
    room_of = {-number: room for room, number in free}
    ids_all, source_all = [], []
    for number in sorted(range(len(bins_B)), key=lambda number: min(bins_B[number])):
        ids_all += [ids_D[document] for document in bins_B[number]]
        source_all += [source_D[document] for document in bins_B[number]]
        if room := room_of.get(number):
            ids_all.append(np.full(room + 1, eos_id, dtype=np.uint32))
            source_all.append(PADDING)
    return concat(ids_all, source_all)


def pair_starts(first_D: np.ndarray) -> np.ndarray:
    """int64 (D,): number of each document's first pair; each has one pair less than tokens."""
    return first_D - np.arange(first_D.size)


def places(first_D: np.ndarray, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 (L,) each: document and position of the elements ``start .. start + length - 1``.

    ``first_D``: where each document starts, in pairs or in tokens. A document that began before
    the window restarts at position 0, as in torchtitan's packing: the window is all that attention
    sees of it.
    """
    low = np.searchsorted(first_D, start, side="right")
    high = np.searchsorted(first_D, start + length, side="left")
    inside = first_D[low:high] - start
    begun_L = np.bincount(inside, minlength=length)  # several where a document has no pair
    begins_L = np.zeros(length, dtype=np.int64)
    begins_L[inside] = inside
    return low - 1 + np.cumsum(begun_L), np.arange(length) - np.maximum.accumulate(begins_L)
