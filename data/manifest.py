"""The manifest and the statistics of a finished set, out of what the tasks recorded."""

import dataclasses
import platform
from importlib import metadata
from typing import Any

import numpy as np

from data import shards
from data.config import Config
from data.inputs import Input
from data.order import order_sha256
from data.plan import Plan
from data.shards import SPLITS, Manifest
from data.sources import DATASETS
from data.write import Written


def make_manifest(
    config: Config,
    items: list[Input],
    records: list[dict],
    missing: list[str],
    plan: Plan,
    parts: list[Written],
) -> Manifest:
    rows = [part.shard for part in parts]
    splits = {}
    for split in SPLITS:
        own = [part for part in parts if part.shard.split == split]
        sequences = sum(part.shard.sequences for part in own)
        splits[split] = {
            "tokens": sum(sum(part.tokens) for part in own),
            "documents": sum(sum(part.documents) for part in own),
            "sequences": sequences,
            "order_sha256": order_sha256(sequences, config.seed),
        }
    sources = []
    for index, source in enumerate(config.sources):
        read = [record for item, record in zip(items, records) if item.source == index]
        counts = [record["counts"] for record in read]
        inputs = [
            {key: record[key] for key in ("origin", "licence", "sha256", "partial")}
            | {"bytes": record["counts"]["bytes"], "documents": record["counts"]["documents"]}
            for record in read
        ]
        dataset = DATASETS.get(source.dataset)
        sources.append(
            {
                "name": source.name,
                "stands_in_for": dataset.repo if config.stand_ins and dataset else source.name,
                "inputs": inputs,
                "read": {key: sum(c[key] for c in counts) for key in counts[0]} if counts else {},
                "budget": source.tokens,
                "documents": _of_source(parts, "documents", index),
                "tokens": _of_source(parts, "tokens", index),
            }
        )
    manifest = Manifest(
        format=shards.FORMAT,
        name=config.name,
        seq_len=config.seq_len,
        vocab_size=parts[0].vocab_size,
        largest_id=max(shard.largest_id for shard in rows),
        eos_id=parts[0].eos_id,
        tokenizer={
            "file": "tokenizer.json",
            "sha256": plan.tokenizer_sha256,
            "eos": plan.eos,
            "trained": config.tokenizer.train_vocab_size is not None,
        },
        splits=splits,
        shards=rows,
        sources=sources,
        missing=missing,
        documents_sha256=plan.documents_sha256,
        config=config.as_dict(),
        versions={
            "python": platform.python_version(),
            **{package: metadata.version(package) for package in ("numpy", "tokenizers")},
        },
        chain={},
    )
    return dataclasses.replace(manifest, chain=shards.chain_of(manifest))


def statistics(
    config: Config, manifest: Manifest, plan: Plan, parts: list[Written]
) -> dict[str, Any]:
    """What the report shows: plain numbers, by source in the config's order."""
    train = [part for part in parts if part.shard.split == "train"]
    pairs = sum(shard.tokens - shard.documents for shard in manifest.shards)
    padding = sum(shard.padding for shard in manifest.shards)
    return {
        "sources": [source.name for source in config.sources],
        "read": [source["read"] for source in manifest.sources],
        "duplicates": plan.duplicates,  # [of][survivor's source], between inputs
        "near_duplicates": plan.near_duplicates,
        "bytes_a_token": plan.bytes_a_token,
        "cut": np.sum([part.cut for part in train], axis=0).tolist(),
        "lengths": np.sum([part.lengths for part in train], axis=0).tolist(),
        "text_bytes": np.sum([part.bytes for part in train], axis=0).tolist(),
        "fill": 1 - padding / pairs,
    }


def _of_source(parts: list[Written], what: str, index: int) -> dict[str, int]:
    return {
        split: sum(getattr(part, what)[index] for part in parts if part.shard.split == split)
        for split in SPLITS
    }
