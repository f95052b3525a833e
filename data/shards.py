"""The shard format: memory-mapped token streams, document offsets, and a manifest that proves them.

A shard set is a directory:

    train-00000.tokens      uint32, little-endian: whole documents, each with one EOS last
    train-00000.documents   int64, little-endian, (D, 2): first token, index of the source
    validation-00000.*      the held-out split
    tokenizer.json          what made the ids
    manifest.json           everything below; written last, so a set without one does not open

Why a flat stream: windows are cut when loading (of pairs, see data/pack.py, inside a shard), so
one set serves every sequence length. Why stored offsets: documents and positions come from them,
never from a scan for EOS. A document of source -1 is padding, a run of EOS (best_fit).

Letters: D documents of a shard, N tokens of a shard.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

import numpy as np

from data.errors import DataError
from data.files import write_whole
from data.pack import PADDING, Pack

FORMAT = 2
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Shard:
    """One row of the manifest."""

    split: str
    file: str
    offsets: str  # the file of document offsets
    tokens: int
    documents: int  # padding included
    padding: int  # pairs
    sequences: int  # windows of the manifest's seq_len
    largest_id: int
    bytes: int
    sha256: str
    offsets_sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a shard set is made of, and the chain of digests that ties it together."""

    format: int
    name: str  # of the config that made it
    seq_len: int  # the default; every length that leaves a window can be cut
    vocab_size: int
    largest_id: int
    eos_id: int
    tokenizer: dict[str, Any]  # file, sha256, trained
    splits: dict[
        str, dict[str, Any]
    ]  # tokens, documents, sequences, order_sha256 of (seed, seq_len)
    shards: list[Shard]
    sources: list[dict[str, Any]]  # name, licence, inputs with digests, counts, tokens
    missing: list[str]  # sources of the config that this machine could not give, and why
    documents_sha256: str  # of the kept documents' digests, in order
    config: dict[str, Any]
    versions: dict[str, str]
    chain: dict[str, str]  # inputs -> documents -> shards; see chain_of

    @property
    def sha256(self) -> str:
        """The identity of the set: the last link covers tokens, offsets, tokenizer and origin."""
        return self.chain["shards"]


@dataclass(frozen=True)
class ShardSet:
    """One split, memory-mapped."""

    directory: Path
    manifest: Manifest
    tokens: list[np.ndarray]  # uint32 (N,) each
    first: list[np.ndarray]  # int64 (D,) each: first token of every document
    source: list[np.ndarray]  # int64 (D,) each: index into manifest.sources


def open_shards(directory: str | Path, split: str, *, vocab_size: int | None = None) -> ShardSet:
    """Map one split. Checks the manifest, presence and sizes; ``verify`` reads every byte.

    Raises DataError for a missing, foreign or damaged set, an unknown split, and ids that do not
    fit a model's ``vocab_size``.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    shards = [shard for shard in manifest.shards if shard.split == split]
    if not shards:
        raise DataError(
            f"{directory} has no split {split!r}; it has: {', '.join(sorted(manifest.splits))}"
        )
    if vocab_size is not None and manifest.largest_id >= vocab_size:
        raise DataError(
            f"{directory} holds token id {manifest.largest_id}, the model's vocabulary ends at "
            f"{vocab_size - 1}; prepare the data with the model's own tokenizer"
        )
    tokens, first, source = [], [], []
    for shard in shards:
        check_sizes(directory, manifest, shard)
        tokens.append(np.memmap(directory / shard.file, dtype="<u4", mode="r"))
        rows = np.fromfile(directory / shard.offsets, dtype="<i8").reshape(-1, 2)
        first.append(np.ascontiguousarray(rows[:, 0]))
        source.append(np.ascontiguousarray(rows[:, 1]))
    return ShardSet(directory, manifest, tokens, first, source)


def read_manifest(directory: Path) -> Manifest:
    """Raises DataError when there is none, or when it is not one of ours."""
    path = Path(directory) / "manifest.json"
    try:
        table = json.loads(path.read_text())
        if not isinstance(table, dict) or table.get("format") != FORMAT:
            found = table.get("format") if isinstance(table, dict) else table
            raise DataError(
                f"{path} has format {found!r}, this program reads {FORMAT}; {rebuild(directory)}"
            )
        shards = [_typed(Shard(**shard)) for shard in table["shards"]]
        manifest = _typed(Manifest(**{**table, "shards": shards}))
        _check_contents(manifest)
        return manifest
    except OSError:
        raise DataError(
            f"no shard set at {directory} (manifest.json is missing); {rebuild(directory)}"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}); {rebuild(directory)}") from None


def _typed(row: Any) -> Any:
    """The dataclass again. Raises TypeError when a value is not what its field says."""
    for field in dataclasses.fields(row):
        value, expected = getattr(row, field.name), get_origin(field.type) or field.type
        if not isinstance(value, expected) or isinstance(value, bool):
            raise TypeError(f"{field.name} is {value!r}, not {expected.__name__}")
    return row


def _check_contents(manifest: Manifest) -> None:
    """Raises KeyError or TypeError for what is not there inside of tables, or empty."""
    for key in ("file", "sha256"):
        if not isinstance(manifest.tokenizer[key], str):
            raise TypeError(f"tokenizer.{key} is {manifest.tokenizer[key]!r}, not str")
    for source in manifest.sources:
        if not isinstance(source, dict) or not source.keys() >= {"name", "inputs"}:
            raise TypeError(f"a source is {source!r}, not a table with name and inputs")
    for shard in manifest.shards:
        if shard.tokens < 1 or shard.documents < 1 or shard.bytes != 4 * shard.tokens:
            raise TypeError(
                f"{shard.file} has {shard.tokens} tokens of {shard.documents} documents in "
                f"{shard.bytes} bytes"
            )


def verify(directory: str | Path) -> Manifest:
    """Read every byte of every split; raise DataError at the first thing that does not hold.

    Checked: the digests of tokenizer, shards and offsets, the chain, the largest id, and that each
    document ends in the one EOS it has.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    check_file(directory, manifest, manifest.tokenizer["file"], manifest.tokenizer["sha256"])
    largest = 0
    for shard in manifest.shards:
        check_sizes(directory, manifest, shard)
        check_file(directory, manifest, shard.file, shard.sha256)
        check_file(directory, manifest, shard.offsets, shard.offsets_sha256)
        tokens_N = np.fromfile(directory / shard.file, dtype="<u4")
        rows_D2 = np.fromfile(directory / shard.offsets, dtype="<i8").reshape(-1, 2)
        if rows_D2[0, 0] != 0 or not np.array_equal(
            tokens_N == manifest.eos_id, _expected_eos(rows_D2, tokens_N.size)
        ):
            raise DataError(
                f"{directory / shard.file}: EOS (id {manifest.eos_id}) must end each of the "
                f"{shard.documents} documents and occur nowhere else; "
                f"{rebuild(directory, manifest)}"
            )
        largest = max(largest, int(tokens_N.max()))
    expected = chain_of(manifest)
    for what, stored, found in (
        ("the largest token id", manifest.largest_id, largest),
        *((f"chain link {link!r}", manifest.chain.get(link), expected[link]) for link in expected),
    ):
        if stored != found:
            raise DataError(
                f"{directory / 'manifest.json'}: {what} should be {stored}, found {found}; "
                f"{rebuild(directory, manifest)}"
            )
    return manifest


def _expected_eos(rows_D2: np.ndarray, tokens: int) -> np.ndarray:
    """bool (N,): the last token of each document, and all of padding."""
    first_D, source_D = rows_D2[:, 0], rows_D2[:, 1]
    ends_D = np.append(first_D[1:], tokens)
    eos_N = np.repeat(source_D == PADDING, ends_D - first_D)
    eos_N[ends_D - 1] = True
    return eos_N


def chain_of(manifest: Manifest) -> dict[str, str]:
    """Each link digests what it adds and the link before, so no part can change unnoticed."""
    inputs = _digest(
        manifest.config, [[source["name"], source["inputs"]] for source in manifest.sources]
    )
    documents = _digest(inputs, manifest.documents_sha256)
    shards = _digest(
        documents,
        [manifest.format, manifest.vocab_size, manifest.eos_id, manifest.tokenizer["sha256"]],
        [dataclasses.asdict(shard) for shard in manifest.shards],
    )
    return {"inputs": inputs, "documents": documents, "shards": shards}


def write_shard(directory: Path, split: str, number: int, pack: Pack, seq_len: int) -> Shard:
    """Write tokens and offsets, each whole or not at all."""
    stem = f"{split}-{number:05d}"
    tokens = pack.tokens_N.astype("<u4").tobytes()
    offsets = np.stack([pack.first_D, pack.source_D], axis=1).astype("<i8").tobytes()
    return Shard(
        split=split,
        file=f"{stem}.tokens",
        offsets=f"{stem}.documents",
        tokens=pack.tokens_N.size,
        documents=pack.first_D.size,
        padding=int(pack.tokens_N.size - pack.first_D.size - pack.pairs),
        sequences=sequences_in(pack.tokens_N.size, pack.first_D.size, seq_len),
        largest_id=int(pack.tokens_N.max()),
        bytes=len(tokens),
        sha256=write_whole(directory / f"{stem}.tokens", tokens),
        offsets_sha256=write_whole(directory / f"{stem}.documents", offsets),
    )


def sequences_in(tokens: int, documents: int, seq_len: int) -> int:
    """Windows of seq_len pairs; a document has one pair less than tokens."""
    return (tokens - documents) // seq_len


def write_manifest(directory: Path, manifest: Manifest) -> None:
    text = json.dumps(dataclasses.asdict(manifest), indent=1, ensure_ascii=False) + "\n"
    write_whole(directory / "manifest.json", text.encode())


def check_sizes(directory: Path, manifest: Manifest, shard: Shard) -> None:
    """Raise DataError when a file of the shard is missing or has another size than recorded."""
    for file, expected in ((shard.file, shard.bytes), (shard.offsets, 16 * shard.documents)):
        path = directory / file
        found = f"{path.stat().st_size:,} bytes" if path.is_file() else "no file"
        if found != f"{expected:,} bytes":
            raise DataError(
                f"{path}: expected {expected:,} bytes, found {found}; "
                f"{rebuild(directory, manifest)}"
            )


def check_file(directory: Path, manifest: Manifest, file: str, expected: str) -> None:
    """Raise DataError unless the file's SHA-256 is the recorded one."""
    try:
        with (directory / file).open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(
            f"{directory / file}: {error.strerror}; {rebuild(directory, manifest)}"
        ) from None
    if found != expected:
        raise DataError(
            f"{directory / file}: expected SHA-256 {expected}, found {found}; "
            f"{rebuild(directory, manifest)}"
        )


def rebuild(directory: Path, manifest: Manifest | None = None) -> str:
    """The remedy of every message about a damaged set."""
    name = manifest.name if manifest else "demo"
    clear = f"rm -r {directory} && " if Path(directory).exists() else ""
    return (
        f"build it: {clear}python -m data.prepare toml_configs/data/{name}.toml --out {directory}"
    )


def _digest(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
