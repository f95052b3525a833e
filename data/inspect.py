"""``python -m data.inspect DIR [--index N]``: what is in a set, and one sequence as text.

Printed: tokens by source, then sequence N of the split (in storage order) document by document.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from data.encode import decode, load_encoder
from data.errors import DataError
from data.pack import PADDING, pair_starts, places
from data.shards import (
    SPLITS,
    Manifest,
    ShardSet,
    open_shards,
    read_manifest,
    sequences_in,
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m data.inspect", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--split", default="train", choices=SPLITS)
    parser.add_argument("--index", type=int, default=0, help="of a sequence, in storage order")
    options = parser.parse_args(arguments)
    try:
        print(describe(read_manifest(options.directory)))
        print(sequence_text(open_shards(options.directory, options.split), options.index))
    except DataError as error:
        print(f"data.inspect: {error}", file=sys.stderr)
        return 2
    return 0


def describe(manifest: Manifest) -> str:
    """Tokens and documents by source, and where they come from."""
    lines = [
        f"{manifest.name}: sha256 {manifest.sha256}",
        f"vocabulary {manifest.vocab_size:,}, EOS {manifest.eos_id}, "
        f"tokenizer {'trained on this corpus' if manifest.tokenizer['trained'] else 'given'}",
    ]
    for split, counts in manifest.splits.items():
        lines.append(
            f"{split}: {counts['tokens']:,} tokens, {counts['documents']:,} documents, "
            f"{counts['sequences']:,} sequences of {manifest.seq_len}"
        )
    for source in manifest.sources:
        train, held_out = (source["tokens"][split] for split in SPLITS)
        lines.append(
            f"  {source['name']:<10} {train:>12,} train {held_out:>9,} validation tokens, "
            f"stands in for {source['stands_in_for']}"
        )
        for part in source["inputs"]:
            lines.append(f"    {part['origin']} ({part['licence']}), {part['bytes'] / 1e6:.1f} MB")
    lines += [f"  MISSING of {what}" for what in manifest.missing]
    return "\n".join(lines)


def sequence_text(shards: ShardSet, index: int) -> str:
    """Sequence ``index`` decoded. Raises DataError when there are not so many."""
    manifest = shards.manifest
    length = manifest.seq_len
    counts = [
        sequences_in(tokens.size, first_D.size, length)
        for tokens, first_D in zip(shards.tokens, shards.first)
    ]
    if not 0 <= index < sum(counts):
        raise DataError(f"no sequence {index}; the split has 0 to {sum(counts) - 1}")
    shard = 0
    while index >= counts[shard]:
        index, shard = index - counts[shard], shard + 1
    start = index * length
    document_L, _ = places(pair_starts(shards.first[shard]), start, length)
    encoder = load_encoder(shards.directory / manifest.tokenizer["file"], manifest.tokenizer["eos"])
    lines = [f"{length} pairs of shard {shard}, {len(set(document_L))} documents"]
    for document in sorted(set(document_L)):
        place_L = (np.arange(start, start + length) + document_L)[document_L == document]
        source = int(shards.source[shard][document])
        name = "padding" if source == PADDING else manifest.sources[source]["name"]
        first = int(place_L[0] - shards.first[shard][document])
        lines.append(f"--- {name}, {place_L.size} inputs from its token {first}")
        lines.append(decode(encoder, shards.tokens[shard][place_L[0] : place_L[-1] + 2]))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
