"""A shard set written from given documents, without prepare, tokenizer or network."""

import dataclasses

import numpy as np
import pytest

from data import shards
from data.files import write_whole
from data.pack import best_fit, concat
from data.shards import Manifest, write_manifest, write_shard

EOS = 0


@pytest.fixture
def make_set(tmp_path):
    """make_set([[documents of a shard], ...], seq_len) -> directory. EOS (0) is appended here."""

    def make(
        shard_documents: list[list[list[int]]], seq_len: int = 4, name: str = "set", bins=False
    ):
        directory = tmp_path / name
        directory.mkdir()
        rows = []
        for number, documents in enumerate(shard_documents):
            ids = [np.array([*document, EOS], dtype=np.uint32) for document in documents]
            fit = best_fit(ids, [0] * len(ids), seq_len, EOS)
            pack = fit if bins else concat(ids, [0] * len(ids))
            rows.append(write_shard(directory, "train", number, pack, seq_len))
        digest = write_whole(directory / "tokenizer.json", b"{}")
        manifest = Manifest(
            format=shards.FORMAT,
            name="demo",
            seq_len=seq_len,
            vocab_size=1000,
            largest_id=max(row.largest_id for row in rows),
            eos_id=EOS,
            tokenizer={"file": "tokenizer.json", "sha256": digest, "trained": False},
            splits={"train": {}},
            shards=rows,
            sources=[{"name": "hand", "inputs": []}],
            missing=[],
            documents_sha256="",
            config={},
            versions={},
            chain={},
        )
        write_manifest(directory, dataclasses.replace(manifest, chain=shards.chain_of(manifest)))
        return directory

    return make
