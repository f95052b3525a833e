"""Exact duplicates out over all inputs, and the survivors in the order of the corpus.

One pass over the sorted digest files of the reading stage: a slice of the digest's range at a
time, so memory is bounded by ``memory``, whatever the corpus. A digest is uniform, so its bits also
give the order (first half, exclusive-or'd with the seed's mask: slices come out in order) and the
split (second half): a document stays in its split when sources, budgets or the seed change.

Letters: D documents of a slice.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.files import space_left_or_say
from data.read import DIGEST

MEMORY = 256 * 2**20  # bytes of a slice, sorting included
BYTES_A_ROW = 120  # of a slice while it is sorted: its columns, the order, a copy
ORDER = np.dtype([("input", "<u4"), ("row", "<u4"), ("source", "<u4"), ("bytes", "<u4")])


@dataclass
class Survivors:
    """What the pass counted. The orders are in the files ``train.order``, ``validation.order``."""

    duplicates: np.ndarray  # int64 (sources, sources): [of, survivor's], between inputs
    near_duplicates: np.ndarray  # the same, of those that are no exact duplicates
    documents_sha256: str  # of the digests in order, train then validation


def survivors(
    folder: Path,
    stems: list[str],
    source_of: list[int],
    sources: int,
    near: list[np.ndarray] | None,
    seed: int,
    validation_fraction: float,
    *,
    memory: int = MEMORY,
) -> Survivors:
    """Write the orders and count. The first document in the order of the inputs survives.

    ``near``: what near-dedup drops besides (``near_duplicates``), or None.
    """
    duplicates = np.zeros((sources, sources), dtype=np.int64)
    near_duplicates = np.zeros((sources, sources), dtype=np.int64)
    held_below = int(validation_fraction * 2**64)
    source_I = np.array(source_of)
    digests = {"train": hashlib.sha256(), "validation": hashlib.sha256()}
    paths = {split: folder / f".{split}.order.partial" for split in digests}
    try:
        with open(paths["train"], "wb") as train, open(paths["validation"], "wb") as validation:
            files = {"train": train, "validation": validation}
            for rows_D in _slices(folder, stems, seed, memory):
                new_D = np.append(True, _differ(rows_D))
                first_D = np.maximum.accumulate(np.where(new_D, np.arange(rows_D.size), 0))
                source_D = source_I[rows_D["input"]]
                again_D = ~new_D
                survivor_D = source_D[first_D[again_D]]
                np.add.at(duplicates, (source_D[again_D], survivor_D), 1)
                keep_D = new_D
                if near:
                    gone_D = _gone(rows_D, near)
                    keep_D = new_D & (gone_D < 0)
                    only_D = new_D & (gone_D >= 0)
                    pairs = source_D[only_D], source_I[gone_D[only_D]]
                    np.add.at(near_duplicates, pairs, 1)
                order_D = np.lexsort((rows_D["rest"], rows_D["key"] ^ _mask(seed)))
                kept_D = order_D[keep_D[order_D]]
                held_D = rows_D["rest"][kept_D] < np.uint64(held_below)
                for split, chosen in (("train", kept_D[~held_D]), ("validation", kept_D[held_D])):
                    out = np.zeros(chosen.size, dtype=ORDER)
                    for field in ("input", "row", "bytes"):
                        out[field] = rows_D[field][chosen]
                    out["source"] = source_D[chosen]
                    files[split].write(out.tobytes())
                    digests[split].update(rows_D["key"][chosen].tobytes())
                    digests[split].update(rows_D["rest"][chosen].tobytes())
    except OSError as error:
        space_left_or_say(error, folder)
        raise
    for split, path in paths.items():
        path.replace(folder / f"{split}.order")
    both = "|".join(digest.hexdigest() for digest in digests.values())
    return Survivors(duplicates, near_duplicates, hashlib.sha256(both.encode()).hexdigest())


_ROW = np.dtype([*DIGEST.descr, ("input", "<u4")])


def _slices(folder: Path, stems: list[str], seed: int, memory: int) -> Iterator[np.ndarray]:
    """_ROW (D,) of each slice, sorted by (digest, input, row); slices in the corpus's order."""
    mapped = [_mapped(folder / f"{stem}.digests") for stem in stems]
    total = sum(rows.size for rows in mapped)
    bits = max(0, (max(1, total * BYTES_A_ROW // memory) - 1).bit_length())
    top = int(_mask(seed)) >> (64 - bits) if bits else 0
    for number in range(1 << bits):
        low = (number ^ top) << (64 - bits)
        ends = np.array([low, low + (1 << (64 - bits)) - 1], dtype=np.uint64)
        parts = []
        for index, rows in enumerate(mapped):
            start = np.searchsorted(rows["key"], ends[0], side="left")
            stop = np.searchsorted(rows["key"], ends[1], side="right")
            part = np.zeros(int(stop - start), dtype=_ROW)
            for field in DIGEST.names:
                part[field] = rows[field][start:stop]
            part["input"] = index
            parts.append(part)
        rows_D = np.concatenate(parts)
        if rows_D.size:
            keys = (rows_D["row"], rows_D["input"], rows_D["rest"], rows_D["key"])
            yield rows_D[np.lexsort(keys)]


def _gone(rows_D: np.ndarray, near: list[np.ndarray]) -> np.ndarray:
    """int32 (D,): what ``near`` says of each row."""
    gone_D = np.empty(rows_D.size, dtype=np.int32)
    for number in np.unique(rows_D["input"]):
        here_D = rows_D["input"] == number
        gone_D[here_D] = near[number][rows_D["row"][here_D]]
    return gone_D


def _differ(rows_D: np.ndarray) -> np.ndarray:
    """bool (D - 1,): a row's digest is another than that of the row before."""
    key_D, rest_D = rows_D["key"], rows_D["rest"]
    return (key_D[1:] != key_D[:-1]) | (rest_D[1:] != rest_D[:-1])


def _mask(seed: int) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.sha256(b"order %d" % seed).digest()[:8]))


def _mapped(path: Path) -> np.ndarray:
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=DIGEST)
    return np.memmap(path, dtype=DIGEST, mode="r")
