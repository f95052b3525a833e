"""Stage 1, one task an input: records in, cleaned texts, digests and (optionally) signatures out.

What a task leaves in the working folder, NNNNN being the input's number, D its documents:

    NNNNN.text      UTF-8, the documents end to end
    NNNNN.ends      int64 (D,): where each one ends
    NNNNN.digests   DIGEST (D,): sorted by digest, for the merge of all inputs
    NNNNN.minhash   uint32 (D, 125), with near-dedup
    NNNNN.json      counts, quarantine, and the stamp of the file that was read; written last

Repeats inside one input are dropped here already, so DAPO's hundred copies of each row are never
stored. The digest of a document is the SHA-256 of its text in NFC with runs of whitespace as one
space: texts that differ only there are one document. The text itself is kept as it was.
"""

import array
import contextlib
import glob
import hashlib
import io
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data.config import Config
from data.errors import DataError
from data.files import space_left_or_say, write_whole
from data.inputs import Input
from data.near import Signer
from data.records import decoded, read_records, repaired
from data.remote import HttpFile, endpoint
from data.sources import DATASETS, Rejected, without_template
from data.tasks import report

DIGEST = np.dtype(
    [
        ("key", "<u8"),  # bytes 0 to 7 of the digest as a number: order of the corpus
        ("rest", "<u8"),  # bytes 8 to 15: validation or train
        ("row", "<u4"),
        ("bytes", "<u4"),  # of the text
    ]
)
SEEN_AT_MOST = 2**20  # digests held while reading; what is forgotten, the merge still finds
QUARANTINE_AT_MOST = 10_000  # entries of one input; the rest is counted
_SPACES = bytes.maketrans(
    b"\t\n\r\x0b\x0c\x1c\x1d\x1e\x1f", b" " * 9
)  # with _WIDE_SPACE: str.isspace
_WIDE_SPACE = re.compile("[\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")
REPORTED = 2**20  # bytes of text between two reports of progress
MARGIN = 20  # records: below this many no fraction of bad ones fails a run


@dataclass
class Counts:
    """Of one input. ``documents`` is what is left for the merge."""

    records: int = 0
    quarantined: int = 0
    excluded: int = 0  # belong to another source
    empty: int = 0
    repaired: int = 0  # documents with replaced characters
    duplicates: int = 0  # inside this input
    documents: int = 0
    bytes: int = 0  # of text, before duplicates go


def read_input(item: Input, config: Config, folder: Path) -> None:
    """Raises DataError when the file cannot be opened or the disk is full."""
    source = config.sources[item.source]
    counts, quarantine = Counts(), []
    stamp = item.stamp()
    digests, ends, taken, seen = [], array.array("q"), hashlib.sha256(), set()
    signer = Signer() if config.near_dedup else None
    partial, reported = None, 0  # why the file could not be read to its end; bytes of text
    with _Spool(folder, item.stem, signer is not None) as spool:
        try:
            for text in _texts(item, config, counts, quarantine):
                raw = text.encode()
                counts.bytes += len(raw)
                if counts.bytes - reported >= REPORTED:
                    report(0, text=counts.bytes - reported)
                    reported = counts.bytes
                taken.update(b"%d:" % len(raw))
                taken.update(raw)
                digest = digest_of(text)
                if digest in seen:
                    counts.duplicates += 1
                else:
                    if len(seen) >= SEEN_AT_MOST:
                        seen.clear()
                    seen.add(digest)
                    spool.text.write(raw)
                    if signer:
                        spool.minhash.write(signer.signature(text).tobytes())
                    ends.append(spool.text.tell())
                    digests.append((*_halves(digest), counts.documents, len(raw)))
                    counts.documents += 1
                if spool.text.tell() >= item.cap:
                    break
        except Rejected as rejected:
            partial = str(rejected)
            quarantine.append({"file": item.origin, "line": 0, "reason": partial, "sha256": ""})
        if counts.records == 0 and partial is None:
            quarantine.append(
                {"file": item.origin, "line": 0, "reason": "empty file", "sha256": ""}
            )
        spool.keep()
    rows = np.array(digests, dtype=DIGEST)
    rows.sort(order=("key", "rest", "row"))
    write_whole(folder / f"{item.stem}.ends", np.array(ends, dtype="<i8").tobytes())
    write_whole(folder / f"{item.stem}.digests", rows.tobytes())
    record = {
        "origin": item.origin,
        "licence": item.licence,
        "sha256": taken.hexdigest(),
        "counts": vars(counts),
        "partial": partial,
        "quarantine": quarantine,
        "source": source.name,
        "stamp": stamp,
    }
    write_whole(folder / f"{item.stem}.json", json.dumps(record, ensure_ascii=False).encode())


def done(item: Input, folder: Path) -> bool:
    """Whether the input was read, and is still the file that was read."""
    path = folder / f"{item.stem}.json"
    if not path.exists():
        return False
    record = json.loads(path.read_text())
    return record["stamp"] == item.stamp() and record["origin"] == item.origin


def digest_of(text: str) -> bytes:
    """The first 16 bytes of SHA-256: among 10**12 documents two agree by chance once in 10**14."""
    if not text.isascii():
        text = _WIDE_SPACE.sub(" ", unicodedata.normalize("NFC", text))
    value_N = np.frombuffer(text.encode().translate(_SPACES), dtype=np.uint8)
    keep_N = value_N != ord(" ")
    keep_N[1:] |= value_N[:-1] != ord(" ")  # the first of a run; str.split takes four times as long
    return hashlib.sha256(value_N[keep_N].tobytes().strip(b" ")).digest()[:16]


def _texts(item: Input, config: Config, counts: Counts, quarantine: list[dict]) -> Iterator[str]:
    """Cleaned texts that are not empty; books everything else."""
    source = config.sources[item.source]
    for place, line, record in _records(item, config):
        counts.records += 1
        try:
            if isinstance(record, Rejected):
                raise record
            text = record if isinstance(record, str) else DATASETS[source.dataset].clean(record)
            if text is None:
                counts.excluded += 1
                continue
            text, bad = repaired(text, config.bad_characters)
        except Rejected as rejected:
            counts.quarantined += 1
            if len(quarantine) < QUARANTINE_AT_MOST:
                digest = hashlib.sha256(_content(record)).hexdigest()
                quarantine.append(
                    {"file": place, "line": line, "reason": str(rejected), "sha256": digest}
                )
            continue
        if source.strip_template:
            text = without_template(text)
        counts.repaired += bad > 0
        if text.isspace() or not text:
            counts.empty += 1
        else:
            yield text


def _records(item: Input, config: Config) -> Iterator[tuple[str, int, object]]:
    source = config.sources[item.source]
    if source.files is not None:
        for path in sorted(glob.glob(item.place, recursive=True)):
            if os.path.isfile(path):
                content = Path(path).read_bytes()
                report(len(content) / 1e6)
                text = decoded(content.removeprefix(b"\xef\xbb\xbf"))
                yield f"{item.origin}: {os.path.basename(path)}", 0, text
        return
    with _opened(item, config) as file:
        if not item.name.endswith(".parquet") and not file.peek(1):
            return
        for line, record in read_records(file, item.name, DATASETS[source.dataset].columns):
            yield item.origin, line, record


@contextlib.contextmanager
def _opened(item: Input, config: Config) -> Iterator[BinaryIO]:
    if "://" in item.place:
        ours = item.place.startswith(endpoint())
        repo = DATASETS[config.sources[item.source].dataset].repo if ours else None
        raw = HttpFile(item.place, repo)
    elif os.path.isfile(item.place):
        raw = io.FileIO(item.place)
    else:
        raise DataError(f"{item.place} is gone; correct `mirror`, or bring the file back")
    with raw, io.BufferedReader(_Counted(raw), buffer_size=2**20) as file:
        yield file


class _Counted(io.RawIOBase):
    """A file that reports what is read of it."""

    def __init__(self, raw: io.RawIOBase):
        self._raw = raw
        self.seek, self.tell = raw.seek, raw.tell

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        count = self._raw.readinto(buffer)
        report(count / 1e6)
        return count


class _Spool:
    """The two files that grow while reading; they get their names when both are whole."""

    def __init__(self, folder: Path, stem: str, signed: bool):
        names = [f"{stem}.text", f"{stem}.minhash"][: 1 + signed]
        self._paths = {folder / f".{name}.partial": folder / name for name in names}
        self._folder, self._stack = folder, contextlib.ExitStack()

    def __enter__(self):
        self._files = [self._stack.enter_context(path.open("wb")) for path in self._paths]
        self.text, self.minhash = self._files[0], self._files[-1]
        return self

    def keep(self) -> None:
        for file, (temporary, path) in zip(self._files, self._paths.items()):
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)

    def __exit__(self, kind, error, trace) -> None:
        with contextlib.suppress(OSError):  # closing flushes: in vain on a full disk
            self._stack.close()
        for temporary in self._paths:
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            space_left_or_say(error, self._folder)


def _content(record: object) -> bytes:
    """What the digest of a quarantined record is of: its line, its file, or its columns."""
    if isinstance(record, Rejected):
        return record.content
    text = record if isinstance(record, str) else json.dumps(record, sort_keys=True, default=str)
    return text.encode(errors="surrogateescape")


def _halves(digest: bytes) -> tuple[int, int]:
    return int.from_bytes(digest[:8]), int.from_bytes(digest[8:])


def read_records_of(items: list[Input], folder: Path) -> list[dict]:
    return [json.loads((folder / f"{item.stem}.json").read_text()) for item in items]


def check_records(
    input_records: list[dict], config: Config, folder: Path, allow_partial: bool
) -> None:
    """Raises DataError for files that broke off, and for sources with too many bad records."""
    records, bad = Counter(), Counter()
    for record in input_records:
        if record["partial"] and not allow_partial:
            raise DataError(
                f"{record['origin']}: {record['partial']}; {record['counts']['documents']:,} "
                "documents before it are good. Fetch the file again and run the same command, or "
                "accept what there is with --allow-partial"
            )
        records[record["source"]] += record["counts"]["records"]
        bad[record["source"]] += record["counts"]["quarantined"]
    for name, count in records.items():
        if count >= MARGIN and bad[name] > config.max_quarantined * count:
            raise DataError(
                f"source {name!r}: {bad[name]:,} of {count:,} records are bad, more than "
                f"max_quarantined = {config.max_quarantined}; see {folder / 'quarantine.jsonl'}, "
                "repair the source or raise the limit"
            )
