"""``python -m data.inspect DIR [--index N]``: what is in a set, and one sequence as text.

Printed: tokens by source, then sequence N of the split (in storage order) document by document.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from data.encode import decode, load_encoder
from data.errors import DataError
from data.shards import SPLITS, Manifest, ShardSet, open_shards, read_manifest


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
    first_sequence = shards.first_sequence(manifest.seq_len)
    if not 0 <= index < first_sequence[-1]:
        raise DataError(f"no sequence {index}; the split has 0 to {first_sequence[-1] - 1}")
    shard = int(np.searchsorted(first_sequence, index, side="right")) - 1
    start = int(index - first_sequence[shard]) * manifest.seq_len
    stop = start + manifest.seq_len
    encoder = load_encoder(shards.directory / manifest.tokenizer["file"], manifest.tokenizer["eos"])
    first_D, source_D = shards.first[shard], shards.source[shard]
    low = int(np.searchsorted(first_D, start, side="right")) - 1
    high = int(np.searchsorted(first_D, stop, side="left"))
    lines = [f"sequence {index}: {manifest.seq_len} tokens, {high - low} documents"]
    for document in range(low, high):
        begin = max(start, int(first_D[document]))
        end = min([stop, *map(int, first_D[document + 1 : document + 2])])
        name = manifest.sources[int(source_D[document])]["name"]
        place = f"from its token {begin - int(first_D[document])}"
        lines.append(f"--- {name}, {end - begin} tokens {place}")
        lines.append(decode(encoder, shards.tokens[shard][begin:end]))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
