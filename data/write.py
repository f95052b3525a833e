"""Stage 3, one task a shard: gather its documents, encode, pack, write.

Behind the shard a record is written: its row of the manifest, what it holds of each source, and the
plan it belongs to. Without the record the shard is made again; no shard knows of another.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.config import Config
from data.dedup import ORDER
from data.encode import MAX_IDS, encode, load_encoder
from data.files import write_whole
from data.pack import best_fit, concat
from data.plan import Plan
from data.shards import Shard, write_shard
from data.spool import text_of
from data.tasks import report

DOCUMENTS_A_CALL = 64  # of the tokenizer
LENGTHS = 14  # powers of two in a histogram: 1, 2 to 3, ... 4,096 to 8,191


@dataclass(frozen=True)
class Written:
    """What a shard holds. Lists go by source."""

    shard: Shard
    vocab_size: int
    eos_id: int
    documents: list[int]
    tokens: list[int]
    cut: list[int]  # documents of MAX_IDS tokens or more
    bytes: list[int]  # of the texts, uncut
    lengths: list[list[int]]  # documents whose token count has i + 1 bits


def write_one(number: int, plan: Plan, config: Config, work: Path, out: Path) -> None:
    """Make shard ``number`` of the plan. Raises DataError when the disk is full."""
    entry = plan.shards[number]
    order_D = _rows(entry, work)
    encoder = load_encoder(work / "tokenizer.json", plan.eos)
    ids_D = []
    for start in range(0, order_D.size, DOCUMENTS_A_CALL):
        rows = order_D[start : start + DOCUMENTS_A_CALL]
        texts = [text_of(work, plan.stems[row["input"]], int(row["row"])) for row in rows]
        encoded = encode(encoder, texts)
        report(sum(ids.size for ids in encoded) / 1e6)
        ids_D += encoded
    source_D = order_D["source"].astype(np.int64)
    if config.packing == "best_fit":
        pack = best_fit(ids_D, source_D.tolist(), config.seq_len, encoder.eos_id)
    else:
        pack = concat(ids_D, source_D.tolist())
    sources = len(config.sources)
    length_D = np.array([ids.size for ids in ids_D])

    def by_source(values_D: np.ndarray) -> list[int]:
        return np.bincount(source_D, weights=values_D, minlength=sources).astype(int).tolist()

    bits_D = np.frexp(length_D)[1] - 1
    lengths = np.zeros((sources, LENGTHS), dtype=int)
    np.add.at(lengths, (source_D, bits_D), 1)
    written = Written(
        shard=write_shard(out, entry["split"], entry["number"], pack, config.seq_len),
        vocab_size=encoder.vocab_size,
        eos_id=encoder.eos_id,
        documents=by_source(np.ones_like(length_D)),
        tokens=by_source(length_D),
        cut=by_source(length_D == MAX_IDS + 1),
        bytes=by_source(order_D["bytes"]),
        lengths=lengths.tolist(),
    )
    record = {"plan": plan.sha256, "written": dataclasses.asdict(written)}
    write_whole(_record(work, entry), json.dumps(record).encode())


def written(number: int, plan: Plan, work: Path) -> Written | None:
    """What the record says, if the shard was made, and by this plan."""
    path = _record(work, plan.shards[number])
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    if record["plan"] != plan.sha256:
        return None
    row = record["written"]
    return Written(**row | {"shard": Shard(**row["shard"])})


def _rows(entry: dict, work: Path) -> np.ndarray:
    count = entry["stop"] - entry["start"]
    path = work / f"{entry['split']}.plan"
    return np.fromfile(path, ORDER, count, offset=entry["start"] * ORDER.itemsize)


def _record(work: Path, entry: dict) -> Path:
    return work / f"{entry['split']}-{entry['number']:05d}.json"
