"""``python -m data.prepare CONFIG.toml --out DIR``: from a config to a finished shard set.

Stages: read -> tokenizer -> shards -> manifest. Killed at any point, the same command continues
behind the last whole shard and ends with the same bytes: every file appears whole, ``.progress/``
remembers what is done, and the manifest, without which a set does not open, comes last.
All documents are held in memory: a demo-sized corpus, not yet one shard per task.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from data import shards
from data.config import Config, load_config, source_parts
from data.documents import Corpus, collect
from data.encode import EOS, Encoder, load_encoder, train_tokenizer
from data.errors import DataError
from data.order import order_sha256
from data.shards import Manifest, Shard, write_manifest, write_whole
from data.write import write_shards

TRAINING_BYTES_A_TOKEN = 4  # of the budget: about what the tokenizer will reach


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m data.prepare", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    try:
        prepare(options.config, options.out)
    except DataError as error:
        print(f"data.prepare: {error}", file=sys.stderr)
        return 2
    return 0


def prepare(config_path: Path, out: Path) -> Manifest:
    """Build the set, or continue, or say that it is there. Raises DataError."""
    config = load_config(config_path)
    with _only_one(out):
        if (out / "manifest.json").exists():
            return _finished(config, out)
        corpus, missing = _read(config)
        _start_or_continue(config, corpus, out)
        encoder = _tokenizer(config, corpus, out)
        written = {split: _written(config, corpus, split, encoder, out) for split in shards.SPLITS}
        manifest = _manifest(config, corpus, missing, encoder, written)
        if corpus.quarantine:
            lines = [json.dumps(entry, ensure_ascii=False) for entry in corpus.quarantine]
            write_whole(out / "quarantine.jsonl", ("\n".join(lines) + "\n").encode())
        write_manifest(out, manifest)
        shutil.rmtree(out / ".progress")
    _summary(manifest, out)
    return manifest


def _finished(config: Config, out: Path) -> Manifest:
    manifest = shards.read_manifest(out)
    if manifest.config != config.as_dict():
        different = [
            key for key, value in config.as_dict().items() if manifest.config.get(key) != value
        ]
        raise DataError(
            f"{out} holds a set made with another {', '.join(different)}; give another --out, or "
            f"remove it: rm -r {out}"
        )
    for shard in manifest.shards:
        shards.check_sizes(out, manifest, shard)
    shutil.rmtree(out / ".progress", ignore_errors=True)  # killed right behind the manifest
    print(f"{out} is finished already (verify it: python -m data.verify {out})")
    return manifest


def _read(config: Config) -> tuple[Corpus, list[str]]:
    began = time.perf_counter()
    sources, missing = [], []
    for source in config.sources:
        parts, lacking = source_parts(source)
        sources.append(parts)
        if lacking:
            missing.append(f"{source.name}: {lacking}")
            print(f"read: MISSING of source {missing[-1]}", flush=True)
    corpus = collect(sources, config.seed, config.validation_fraction)
    size = sum(part["bytes"] for parts in corpus.inputs for part in parts)
    seconds = time.perf_counter() - began
    for source, counts in zip(config.sources, corpus.counts):
        print(f"read: {source.name}: " + ", ".join(f"{n:,} {what}" for what, n in counts.items()))
    print(
        f"read: {size / 1e6:.1f} MB in {seconds:.1f} s, {size / 1e6 / seconds:.1f} MB/s", flush=True
    )
    if not corpus.train or not corpus.validation:
        raise DataError(
            f"the sources gave {len(corpus.train)} documents to train and {len(corpus.validation)} "
            "to validate; add text, or raise validation_fraction"
        )
    return corpus, missing


def _start_or_continue(config: Config, corpus: Corpus, out: Path) -> None:
    """Keep what a killed run left, if it was making the same set of the same documents."""
    progress = out / ".progress"
    plan = json.dumps(
        {"format": shards.FORMAT, "config": config.as_dict(), "documents": corpus.sha256},
        indent=1,
    ).encode()
    if (progress / "plan.json").exists() and (progress / "plan.json").read_bytes() == plan:
        print(f"continue: {len(list(progress.glob('*-*.json')))} shards are done", flush=True)
        return
    if progress.exists():
        print("start over: the unfinished set here has another config or other documents")
    for file in out.iterdir():
        if file != progress:
            file.unlink()
    shutil.rmtree(progress, ignore_errors=True)
    progress.mkdir()
    write_whole(progress / "plan.json", plan)


def _tokenizer(config: Config, corpus: Corpus, out: Path) -> Encoder:
    path = out / "tokenizer.json"
    if not path.exists():
        if config.tokenizer.file:
            load_encoder(Path(config.tokenizer.file), config.tokenizer.eos)  # before it is copied
            content = Path(config.tokenizer.file).read_bytes()
        else:
            began = time.perf_counter()
            texts = list(_training_texts(config, corpus))
            content = train_tokenizer(texts, config.tokenizer.train_vocab_size).encode()
            size, seconds = sum(map(len, texts)), time.perf_counter() - began
            print(f"tokenizer: {size / 1e6:.1f} M characters in {seconds:.1f} s", flush=True)
        write_whole(path, content)
    return load_encoder(path, config.tokenizer.eos or EOS)


def _training_texts(config: Config, corpus: Corpus) -> Iterator[str]:
    left = [TRAINING_BYTES_A_TOKEN * source.tokens for source in config.sources]
    for document in corpus.train:
        if left[document.source] > 0:
            left[document.source] -= len(document.text.encode())
            yield document.text


def _written(
    config: Config, corpus: Corpus, split: str, encoder: Encoder, out: Path
) -> list[tuple[Shard, dict]]:
    budgets = [source.tokens for source in config.sources]
    if split == "validation":  # in proportion, at least one document of each source
        share = config.validation_fraction / (1 - config.validation_fraction)
        budgets = [max(1, round(tokens * share)) for tokens in budgets]
    written = write_shards(
        getattr(corpus, split),
        budgets,
        encoder,
        out,
        split,
        seq_len=config.seq_len,
        shard_tokens=config.shard_tokens,
    )
    return list(written)


def _manifest(
    config: Config,
    corpus: Corpus,
    missing: list[str],
    encoder: Encoder,
    written: dict[str, list[tuple[Shard, dict]]],
) -> Manifest:
    rows = [shard for split in shards.SPLITS for shard, _ in written[split]]
    splits = {}
    for split in shards.SPLITS:
        own = [shard for shard, _ in written[split]]
        sequences = sum(shard.sequences for shard in own)
        splits[split] = {
            "tokens": sum(shard.tokens for shard in own),
            "documents": sum(shard.documents for shard in own),
            "sequences": sequences,
            "order_sha256": order_sha256(sequences, config.seed),
        }
    ends = {
        split: written[split][-1][1] for split in shards.SPLITS
    }  # states behind the last shards
    sources = []
    for index, source in enumerate(config.sources):
        sources.append(
            {
                "name": source.name,
                "stands_in_for": source.stands_in_for,
                "inputs": corpus.inputs[index],
                "read": corpus.counts[index],
                "budget": source.tokens,
                "documents": {split: end["documents"][index] for split, end in ends.items()},
                "tokens": {split: end["tokens"][index] for split, end in ends.items()},
            }
        )
    manifest = Manifest(
        format=shards.FORMAT,
        name=config.name,
        seq_len=config.seq_len,
        vocab_size=encoder.vocab_size,
        largest_id=max(shard.largest_id for shard in rows),
        eos_id=encoder.eos_id,
        tokenizer={
            "file": "tokenizer.json",
            "sha256": encoder.sha256,
            "eos": config.tokenizer.eos or EOS,
            "trained": config.tokenizer.file is None,
        },
        splits=splits,
        shards=rows,
        sources=sources,
        missing=missing,
        documents_sha256=corpus.sha256,
        config=config.as_dict(),
        versions={
            "python": platform.python_version(),
            **{package: metadata.version(package) for package in ("numpy", "tokenizers")},
        },
        chain={},
    )
    return dataclasses.replace(manifest, chain=shards.chain_of(manifest))


@contextlib.contextmanager
def _only_one(out: Path) -> Iterator[None]:
    """Make the directory ours: a new one, an unfinished set or a finished one, and one process."""
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file; give a new directory as --out")
    out.mkdir(parents=True, exist_ok=True)
    folder = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(f"another data.prepare is writing {out}; wait for it") from None
    else:
        known = (out / "manifest.json").exists() or (out / ".progress").exists()
        if not known and any(out.iterdir()):
            raise DataError(f"{out} holds other files; give a new directory as --out")
        yield
    finally:
        os.close(folder)


def _summary(manifest: Manifest, out: Path) -> None:
    for what in manifest.missing:
        print(f"note: MISSING of {what}")
    for source in manifest.sources:
        train = source["tokens"]["train"]
        if train < source["budget"]:
            print(f"note: {source['name']} ended at {train:,} of {source['budget']:,} tokens")
    print(
        f"{out}: "
        + ", ".join(
            f"{split} {values['tokens']:,} tokens in {values['sequences']:,} sequences of "
            f"{manifest.seq_len}"
            for split, values in manifest.splits.items()
        )
        + f"; sha256 {manifest.sha256}"
    )


if __name__ == "__main__":
    sys.exit(main())
