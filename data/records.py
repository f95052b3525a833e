"""Records out of a container: JSON lines (.json.gz, .zst, plain), parquet, or whole text files.

Yields ``(line, record)``, where ``record`` is a dict of the wanted columns, or a Rejected with the
reason. Lines end at the byte ``\\n`` and nowhere else: U+2028 and U+0085 are text. A file that
breaks off in the middle gives its good records first and then raises Rejected.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from data.sources import Rejected

LONGEST_LINE = 256 * 2**20  # bytes; a longer one is quarantined without being held
PIECE = 2**16  # bytes read at a time: as much is lost of a zstd file before a broken place
ROWS_A_BATCH = 256  # of parquet

_SURROGATE = re.compile("[\ud800-\udfff]")

Record = dict[str, Any] | Rejected


def read_records(file: BinaryIO, name: str, columns: tuple[str, ...]) -> Iterator[tuple[int, Any]]:
    """``file`` is open at its start; the container follows from the end of its name."""
    if name.endswith(".parquet"):
        return _parquet_rows(file, columns)
    return ((line, _parsed(raw)) for line, raw in _lines(_unpacked(file, name)) if raw)


def repaired(text: str, bad_characters: str) -> tuple[str, int]:
    """The text as valid Unicode without NUL, and how many characters were replaced by U+FFFD.

    Raises Rejected when ``bad_characters`` is "quarantine" and there is one, and when more than
    one in a hundred is bad: such a text is in another encoding.
    """
    fixed, bad = text, 0
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            fixed, bad = _SURROGATE.subn("\ufffd", text)
    if "\0" in fixed:
        bad += fixed.count("\0")
        fixed = fixed.replace("\0", "\ufffd")
    if bad and (bad_characters == "quarantine" or bad * 100 > len(fixed)):
        raise Rejected(f"{bad} of {len(fixed)} characters are NUL or not valid UTF-8")
    return fixed, bad


def decoded(raw: bytes) -> str:
    """Bytes that are not UTF-8 become lone surrogates, which ``repaired`` counts and replaces."""
    return raw.decode("utf-8", errors="surrogateescape")


def _parsed(raw: bytes) -> Record:
    if len(raw) > LONGEST_LINE:
        return Rejected(f"line longer than {LONGEST_LINE} bytes", raw)
    try:
        record = json.loads(
            decoded(raw), strict=False
        )  # raw control characters are no reason to refuse
    except (json.JSONDecodeError, RecursionError) as error:
        return Rejected(f"not JSON: {error}", raw)
    return record if isinstance(record, dict) else Rejected("not a JSON object", raw)


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(number from 1, content) without the line's end, a BOM at the start, and blank lines."""
    number, held, size = 0, [], 0  # held: pieces of the line that is not complete yet
    while piece := _piece(stream, number):
        *whole, rest = piece.split(b"\n")
        for line in whole:
            number += 1
            yield number, _stripped(b"".join([*held, line]), number)
            held, size = [], 0
        if size <= LONGEST_LINE:  # what follows of a longer line is not needed to refuse it
            held.append(rest)
            size += len(rest)
    if size:
        yield number + 1, _stripped(b"".join(held), number + 1)


def _piece(stream: BinaryIO, number: int) -> bytes:
    try:
        return stream.read1(PIECE)  # not read: it would lose what lies before a broken place
    except (EOFError, zlib.error, gzip.BadGzipFile, pa.ArrowException) as error:
        raise Rejected(f"broken off behind line {number}: {error}") from None
    except OSError as error:
        if error.errno is not None:  # the disk, not the file's content
            raise
        raise Rejected(f"broken off behind line {number}: {error}") from None


def _stripped(line: bytes, number: int) -> bytes:
    return (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip(b" \t\r\n")


def _unpacked(file: BinaryIO, name: str) -> BinaryIO:
    if name.endswith(".gz"):
        return gzip.GzipFile(fileobj=file)  # several members too
    if name.endswith((".zst", ".zstd")):
        return pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")
    return file


def _parquet_rows(file: BinaryIO, columns: tuple[str, ...]) -> Iterator[tuple[int, Record]]:
    row = 0
    try:
        parquet = pq.ParquetFile(file)
        present = [name for name in columns if name in parquet.schema_arrow.names]
        missing = [name for name in columns if name not in present]
        if missing:
            raise Rejected(f"no column {missing[0]!r}; there are {parquet.schema_arrow.names}")
        for batch in parquet.iter_batches(ROWS_A_BATCH, columns=present, use_threads=False):
            values = [_values(batch.column(name)) for name in present]
            for cells in zip(*values):
                row += 1
                yield row, dict(zip(present, cells))
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise Rejected(f"parquet broken behind row {row}: {error}") from None
    except OSError as error:
        if error.errno is not None:  # the disk or the network, not the file's content
            raise
        raise Rejected(f"parquet broken behind row {row}: {error}") from None


def _values(column: pa.Array) -> list[Any]:
    """Strings as bytes made text by us: Arrow does not check that they are UTF-8."""
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        raw = column.cast(pa.binary() if pa.types.is_string(column.type) else pa.large_binary())
        return [None if cell is None else decoded(cell) for cell in raw.to_pylist()]
    return column.to_pylist()
