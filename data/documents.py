"""From files to the documents of a corpus: decoded, exact duplicates out, split, and in order.

The digest of a document is the SHA-256 of its text in NFC with runs of whitespace as one space:
two files that differ only there are one document. The text itself is kept as it was.
"""

import hashlib
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Part:
    """Files of one origin that are cleaned in one way."""

    origin: str  # for the manifest: package and version
    licence: str
    files: Iterable[tuple[str, bytes]]  # (name, content), in a fixed order
    clean: Callable[[str], list[str]]  # text of a file -> its documents


@dataclass(frozen=True)
class Document:
    source: int
    text: str
    digest: bytes  # 32 bytes, see above


@dataclass
class Corpus:
    """What the sources gave. ``train`` and ``validation`` are in the order of packing."""

    train: list[Document] = field(default_factory=list)
    validation: list[Document] = field(default_factory=list)
    inputs: list[list[dict[str, Any]]] = field(default_factory=list)  # by source: origin, sha256, …
    counts: list[dict[str, int]] = field(default_factory=list)  # by source
    quarantine: list[dict[str, str]] = field(default_factory=list)  # file, reason

    @property
    def sha256(self) -> str:
        documents = (self.train, self.validation)
        digests = [b"".join(document.digest for document in split) for split in documents]
        return hashlib.sha256(b"|".join(digests)).hexdigest()


def collect(sources: list[list[Part]], seed: int, validation_fraction: float) -> Corpus:
    """Read every source. Of equal documents the first in the order of the sources stays.

    The held-out split is chosen by the document's digest alone, so that a document stays in its
    split when sources, budgets or the seed change. A file that is not UTF-8 goes to quarantine.
    """
    corpus, seen = Corpus(), set()
    for source, parts in enumerate(sources):
        counts = {"files": 0, "quarantined": 0, "empty": 0, "duplicates": 0, "documents": 0}
        corpus.counts.append(counts)
        corpus.inputs.append([])
        for part in parts:
            for text in _texts(part, corpus):
                digest = digest_of(text)
                if digest == _EMPTY:
                    counts["empty"] += 1
                elif digest in seen:
                    counts["duplicates"] += 1
                else:
                    seen.add(digest)
                    counts["documents"] += 1
                    held_out = _fraction(b"validation", digest) < validation_fraction
                    split = corpus.validation if held_out else corpus.train
                    split.append(Document(source, text, digest))
    for split in (corpus.train, corpus.validation):
        split.sort(key=lambda document: hashlib.sha256(b"%d:" % seed + document.digest).digest())
    return corpus


def _texts(part: Part, corpus: Corpus) -> Iterator[str]:
    """The part's texts, cleaned; books what was read with the last source of the corpus."""
    counts, read, size = corpus.counts[-1], hashlib.sha256(), 0
    for name, content in part.files:
        counts["files"] += 1
        size += len(content)
        read.update(f"{name}\0{len(content)}\0".encode() + content)
        try:
            yield from part.clean(content.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            counts["quarantined"] += 1
            corpus.quarantine.append({"file": f"{part.origin}: {name}", "reason": f"{error}"})
    corpus.inputs[-1].append(
        {"origin": part.origin, "licence": part.licence, "bytes": size, "sha256": read.hexdigest()}
    )


def digest_of(text: str) -> bytes:
    return hashlib.sha256(" ".join(unicodedata.normalize("NFC", text).split()).encode()).digest()


_EMPTY = digest_of("")


def _fraction(salt: bytes, digest: bytes) -> float:
    """Uniform in [0, 1)."""
    return int.from_bytes(hashlib.sha256(salt + digest).digest()[:7]) / 2**56
