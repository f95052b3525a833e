"""Near-duplicates: MinHash over 5-grams that know Chinese, candidates by bands, all verified.

A token is a Han, kana or hangul character, a word, or a symbol: with whole words alone a Chinese
sentence would be one token and a changed character would change all its shingles. Signatures are
datasketch's (125 permutations, scheme affine32), kept beside the texts, so they are computed once
and in parallel. Two documents are candidates when one of 25 bands of 5 values agrees: at Jaccard
0.8 that misses one pair in 20,000. A candidate counts only when its exact Jaccard similarity,
from the texts, reaches 0.8: boilerplate alone makes nobody a duplicate.

Letters: D documents of an input, P permutations, N shingles of a document.
"""

import functools
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

PERMUTATIONS, BANDS, SCHEME, SEED = 125, 25, "affine32", 1
ROWS = PERMUTATIONS // BANDS
THRESHOLD = 0.8  # Jaccard similarity of the shingle sets
ESTIMATE = THRESHOLD - 0.2  # of the signatures (deviation 0.036): below it no text is read
SHINGLE = 5  # tokens
LONGEST = 1_000_000  # characters looked at
PIECE = 4_096  # shingles at a time: 2 MB of permuted values
REPRESENTATIVES = 32  # of one band value that a document is compared with
_TOKEN = re.compile(
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]|\w+|[^\w\s]"
)
_HAN = re.compile(r"([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff])")
_MIX = (
    0x9E3779B97F4A7C15,
    0xBF58476D1CE4E5B9,
    0x94D049BB133111EB,
    0xD6E8FEB86659FD93,
    0xA0761D6478BD642F,
)


class Signer:
    """datasketch's permutations, set up once for all documents of a task."""

    def __init__(self):
        from datasketch import MinHash  # needs scipy: imported only where near-dedup is on

        self._empty = MinHash(PERMUTATIONS, seed=SEED, scheme=SCHEME, hashfunc=int)

    def signature(self, text: str) -> np.ndarray:
        """uint32 (P,); of a text without tokens all ones, which matches nobody."""
        minhash = self._empty.copy()
        shingles_N = shingles(text)
        for start in range(0, shingles_N.size, PIECE):
            minhash.update_batch((shingles_N[start : start + PIECE] >> np.uint64(32)).tolist())
        return minhash.hashvalues.astype("<u4")


def shingles(text: str) -> np.ndarray:
    """uint64 (N,), sorted, no two alike; a text shorter than a shingle is one shingle."""
    tokens = [zlib.crc32(token.encode()) for token in _tokens(text[:LONGEST])]
    if not tokens:
        return np.zeros(0, dtype=np.uint64)
    tokens += [0] * (SHINGLE - len(tokens))
    token_N = np.array(tokens, dtype=np.uint64)
    count = token_N.size - SHINGLE + 1
    value_N = np.zeros(count, dtype=np.uint64)
    for place, factor in enumerate(_MIX):
        value_N = (value_N + token_N[place : place + count]) * np.uint64(factor)
        value_N ^= value_N >> np.uint64(29)
    return np.unique(value_N)


def near_duplicates(folder: Path, stems: list[str], memory: int) -> list[np.ndarray]:
    """int32 (D,) for each input: -1 = stays, otherwise the input of its survivor.

    The first document of a cluster in the order of the inputs survives. ``memory``: bytes of band
    keys held at a time.
    """
    corpus = _Corpus(folder, stems)
    parent: dict[int, int] = {}

    def root(document: int) -> int:
        while (above := parent.get(document, document)) != document:
            parent[document] = parent.get(above, above)
            document = above
        return document

    for group in _same_band(corpus, memory):
        representatives: list[int] = []
        for document in group:
            for other in representatives[-REPRESENTATIVES:]:
                first, second = sorted((root(document), root(other)))
                if first == second:
                    break
                if corpus.alike(other, document):
                    parent[second] = first
                    break
            else:
                representatives.append(document)
    gone = [np.full(len(signature_DP), -1, dtype=np.int32) for signature_DP in corpus.signatures]
    for document in parent:
        number, row = corpus.place(document)
        gone[number][row] = corpus.place(root(document))[0]
    return gone


class _Corpus:
    """Documents by one number over all inputs; texts and signatures memory-mapped."""

    def __init__(self, folder: Path, stems: list[str]):
        self._folder, self._stems = folder, stems
        self.signatures = [
            _mapped(folder / f"{stem}.minhash", "<u4").reshape(-1, PERMUTATIONS) for stem in stems
        ]
        self.first = np.cumsum([0, *(signature.shape[0] for signature in self.signatures)])
        self._different: set[tuple[int, int]] = set()
        self._shingles = functools.lru_cache(4_096)(self._shingles_of)

    def place(self, document: int) -> tuple[int, int]:
        number = int(np.searchsorted(self.first, document, side="right")) - 1
        return number, document - int(self.first[number])

    def alike(self, one: int, other: int) -> bool:
        if (one, other) in self._different:  # asked again by another band
            return False
        (number, row), (number2, row2) = self.place(one), self.place(other)
        agree = (self.signatures[number][row] == self.signatures[number2][row2]).mean()
        if agree >= ESTIMATE and jaccard(self._shingles(one), self._shingles(other)) >= THRESHOLD:
            return True
        if len(self._different) < 2**20:
            self._different.add((one, other))
        return False

    def _shingles_of(self, document: int) -> np.ndarray:
        from data.spool import text_of

        number, row = self.place(document)
        return shingles(text_of(self._folder, self._stems[number], row))


def jaccard(one_N: np.ndarray, other_N: np.ndarray) -> float:
    """Of two sorted sets."""
    common = np.intersect1d(one_N, other_N, assume_unique=True).size
    return common / max(1, one_N.size + other_N.size - common)


def _same_band(corpus: _Corpus, memory: int) -> Iterator[list[int]]:
    """Documents (ascending) that agree in a band; a group may come several times."""
    documents = int(corpus.first[-1])
    parts = max(1, -(-documents * 16 // memory))
    for band in range(BANDS):
        for part in range(parts):
            keys, ids = [], []
            for first, signature_DP in zip(corpus.first, corpus.signatures):
                if not signature_DP.shape[0]:
                    continue
                rows_DR = signature_DP[:, band * ROWS : (band + 1) * ROWS].astype(np.uint64)
                key_D = np.zeros(rows_DR.shape[0], dtype=np.uint64)
                for place, factor in enumerate(_MIX):
                    key_D = (key_D + rows_DR[:, place]) * np.uint64(factor)
                    key_D ^= key_D >> np.uint64(29)
                here = (key_D % np.uint64(parts) == part) & (rows_DR != 0xFFFFFFFF).any(1)
                keys.append(key_D[here])
                ids.append(np.flatnonzero(here) + first)
            key_D, id_D = np.concatenate(keys), np.concatenate(ids)
            order = np.lexsort((id_D, key_D))
            key_D, id_D = key_D[order], id_D[order]
            edge = np.flatnonzero(np.append(True, key_D[1:] != key_D[:-1]))
            length = np.diff(np.append(edge, key_D.size))
            for start, count in zip(edge[length > 1], length[length > 1]):
                yield id_D[start : start + count].tolist()


def _tokens(text: str) -> list[str]:
    if text.isascii():
        return _TOKEN.findall(text)
    # \w+ would swallow a run of Han characters together with the word before it
    return _TOKEN.findall(_HAN.sub(r" \1 ", text))


def _mapped(path: Path, dtype: str) -> np.ndarray:
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")
