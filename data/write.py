"""Documents to shards: encoded in order within the sources' budgets, resumable behind any shard.

Behind each shard a record is written: the shard's row of the manifest, and the state to go on from
(next document, documents and tokens taken of each source).

Letters: D documents of a shard.
"""

import copy
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data.documents import Document
from data.encode import Encoder, encode
from data.pack import concat
from data.shards import Shard, write_shard, write_whole

DOCUMENTS_A_CALL = 64  # of the tokenizer


def write_shards(
    documents: list[Document],
    budgets: list[int],
    encoder: Encoder,
    out: Path,
    split: str,
    *,
    seq_len: int,
    shard_tokens: int,
) -> Iterator[tuple[Shard, dict]]:
    """Each shard of the split, those that are done first, with the state behind it.

    ``budgets``: tokens of each source; the document that reaches it is the last one taken.
    """
    state = {"next": 0, "documents": [0] * len(budgets), "tokens": [0] * len(budgets)}
    number = 0
    while (path := _record(out, split, number)).exists():  # its shard is therefore whole
        record = json.loads(path.read_text())
        state = record["state"]
        yield Shard(**record["shard"]), copy.deepcopy(state)
        number += 1
    stream = _encoded(documents, budgets, state, encoder)
    while True:
        began = time.perf_counter()
        ids_D, source_D = _one_shard(stream, state, shard_tokens)
        if not ids_D:
            return
        shard = write_shard(out, split, number, concat(ids_D, source_D), seq_len)
        record = {"shard": dataclasses.asdict(shard), "state": state}
        write_whole(_record(out, split, number), json.dumps(record).encode())
        seconds = time.perf_counter() - began
        print(
            f"shards: {shard.file}: {shard.documents:,} documents, {shard.tokens:,} tokens, "
            f"{shard.tokens / 1e6 / seconds:.2f} Mtok/s",
            flush=True,
        )
        yield shard, copy.deepcopy(state)
        number += 1


def _encoded(
    documents: list[Document], budgets: list[int], state: dict, encoder: Encoder
) -> Iterator[tuple[int, int, np.ndarray]]:
    """(position, source, ids) from the state's next document on, while its source has budget.

    Whether a document is taken depends on those before it alone, so the result does not depend on
    where a run was interrupted.
    """

    def wanted(position: int) -> bool:
        source = documents[position].source
        return state["tokens"][source] < budgets[source]

    for start in range(state["next"], len(documents), DOCUMENTS_A_CALL):
        group = range(start, min(start + DOCUMENTS_A_CALL, len(documents)))
        group = [position for position in group if wanted(position)]  # spares the work
        texts = [documents[position].text for position in group]
        for position, ids in zip(group, encode(encoder, texts)):
            if wanted(position):  # the budget may have gone within the group
                yield position, documents[position].source, ids


def _one_shard(stream: Iterator, state: dict, shard_tokens: int) -> tuple[list, list[int]]:
    """Ids and sources of the next documents until the shard is full; moves the state on."""
    ids_D, source_D, size = [], [], 0
    for position, source, ids in stream:
        ids_D.append(ids)
        source_D.append(source)
        size += ids.size
        state["next"] = position + 1
        state["documents"][source] += 1
        state["tokens"][source] += ids.size
        if size >= shard_tokens:
            break
    return ids_D, source_D


def _record(out: Path, split: str, number: int) -> Path:
    return out / ".progress" / f"{split}-{number:05d}.json"
