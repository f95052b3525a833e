"""Stage 2: from what was read to a list of shards, each of which is then one task.

Duplicates go, the tokenizer is made, the budgets are applied, and the documents are dealt to the
shards in the corpus's order. Nothing is encoded for that but a sample of each source: its tokens a
byte estimate the length of the other documents. So budgets and shard sizes are met within the
estimate's error (exactly, where a source has at most SAMPLE documents), and in exchange no shard
depends on another.

Letters: D documents of a split, in order.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.config import Config
from data.dedup import MEMORY, ORDER, survivors
from data.encode import EOS, MAX_IDS, Encoder, encode, load_encoder, train_tokenizer
from data.errors import DataError
from data.files import write_whole
from data.inputs import Input
from data.near import near_duplicates
from data.shards import SPLITS
from data.spool import text_of
from data.vocabularies import VOCABULARIES, tokenizer_of

SAMPLE = 256  # documents of each source
TRAINING_BYTES_A_TOKEN = 4  # of the budget: about what the tokenizer will reach


@dataclass(frozen=True)
class Plan:
    """``shards``: rows of ``{split}.plan`` that a shard takes, and its number in the split."""

    shards: list[dict[str, Any]]  # split, number, start, stop
    stems: list[str]  # of the inputs
    inputs_sha256: list[str]  # of their texts
    eos: str
    tokenizer_sha256: str
    documents_sha256: str
    duplicates: list[list[int]]  # [source of the dropped one, source of the survivor]
    near_duplicates: list[list[int]]
    bytes_a_token: list[float]  # by source, of the sample
    sha256: str  # of all that a shard depends on


def make_plan(items: list[Input], records: list[dict], config: Config, folder: Path) -> Plan:
    """Write tokenizer.json, ``{split}.plan`` and plan.json into ``folder``. Raises DataError."""
    stems = [item.stem for item in items]
    source_of = [item.source for item in items]
    near = near_duplicates(folder, stems, MEMORY) if config.near_dedup else None
    found = survivors(
        folder,
        stems,
        source_of,
        len(config.sources),
        near,
        config.seed,
        config.validation_fraction,
    )
    orders = {split: _read_order(folder / f"{split}.order") for split in SPLITS}
    if not all(order_D.size for order_D in orders.values()):
        raise DataError(
            f"the sources gave {orders['train'].size} documents to train and "
            f"{orders['validation'].size} to validate; add text, or raise validation_fraction"
        )
    encoder, eos = _tokenizer(config, orders["train"], stems, folder)
    shards, parts, ratios = [], [], np.zeros(len(config.sources))
    for split, order_D in orders.items():
        tokens_D, ratio = _estimated(order_D, len(config.sources), stems, folder, encoder)
        ratios = ratio if split == "train" else ratios
        taken = _within_budgets(order_D["source"], tokens_D, _budgets(config, split))
        content = order_D[taken].tobytes()
        parts.append(hashlib.sha256(content).hexdigest())
        write_whole(folder / f"{split}.plan", content)
        for number, (start, stop) in enumerate(_cut(tokens_D[taken], config.shard_tokens)):
            shards.append({"split": split, "number": number, "start": start, "stop": stop})
    inputs = [record["sha256"] for record in records]
    identity = [config.as_dict(), inputs, encoder.sha256, found.documents_sha256, parts, shards]
    plan = Plan(
        shards=shards,
        stems=stems,
        inputs_sha256=inputs,
        eos=eos,
        tokenizer_sha256=encoder.sha256,
        documents_sha256=found.documents_sha256,
        duplicates=found.duplicates.tolist(),
        near_duplicates=found.near_duplicates.tolist(),
        bytes_a_token=[round(float(ratio), 4) for ratio in ratios],
        sha256=hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
    )
    write_whole(folder / "plan.json", json.dumps(vars(plan), indent=1).encode())
    return plan


def read_plan(folder: Path) -> Plan | None:
    path = folder / "plan.json"
    return Plan(**json.loads(path.read_text())) if path.exists() else None


def _read_order(path: Path) -> np.ndarray:
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=ORDER)
    return np.memmap(path, dtype=ORDER, mode="r")


def _budgets(config: Config, split: str) -> list[int]:
    budgets = [source.tokens for source in config.sources]
    if split == "train":
        return budgets
    # in proportion, at least one document of each source
    share = config.validation_fraction / (1 - config.validation_fraction)
    return [max(1, round(tokens * share)) for tokens in budgets]


def _tokenizer(
    config: Config, order_D: np.ndarray, stems: list[str], folder: Path
) -> tuple[Encoder, str]:
    path, wanted = folder / "tokenizer.json", config.tokenizer
    if wanted.model:
        content, eos = tokenizer_of(wanted.model), VOCABULARIES[wanted.model].eos
    elif wanted.file:
        load_encoder(Path(wanted.file), wanted.eos)  # refused before it is copied
        content, eos = Path(wanted.file).read_bytes(), wanted.eos
    else:
        texts = _training_texts(config, order_D, stems, folder)
        content, eos = train_tokenizer(texts, wanted.train_vocab_size).encode(), EOS
    write_whole(path, content)
    return load_encoder(path, eos), eos


def _training_texts(config: Config, order_D: np.ndarray, stems: list[str], folder: Path):
    left = [TRAINING_BYTES_A_TOKEN * source.tokens for source in config.sources]
    for row in order_D:
        if left[row["source"]] > 0:
            left[row["source"]] -= int(row["bytes"])
            yield text_of(folder, stems[row["input"]], int(row["row"]))
        elif max(left) <= 0:
            return


def _estimated(
    order_D: np.ndarray, sources: int, stems: list[str], folder: Path, encoder: Encoder
) -> tuple[np.ndarray, np.ndarray]:
    """int32 (D,) tokens of each document with its EOS; bytes a token of each source's sample."""
    tokens_D = np.zeros(order_D.size, dtype=np.int32)
    ratios = np.zeros(sources)
    for source in range(sources):
        own = np.flatnonzero(order_D["source"] == source)
        if not own.size:
            continue
        sample, size_D = own[:SAMPLE], order_D["bytes"][own].astype(np.int64)
        texts = [text_of(folder, stems[r["input"]], int(r["row"])) for r in order_D[sample]]
        length = np.array([ids.size for ids in encode(encoder, texts)])
        whole = length <= MAX_IDS  # a cut document says nothing about bytes a token
        size, count = size_D[: sample.size][whole].sum(), (length[whole] - 1).sum()
        ratios[source] = size / count if count else size_D[0] / MAX_IDS
        tokens_D[own] = np.minimum(size_D / ratios[source] + 1, MAX_IDS + 1).astype(np.int32)
        tokens_D[sample] = length
    return tokens_D, ratios


def _within_budgets(source_D: np.ndarray, tokens_D: np.ndarray, budgets: list[int]) -> np.ndarray:
    """bool (D,): the document that reaches a source's budget is the last one taken of it."""
    taken = np.zeros(source_D.size, dtype=bool)
    for source, budget in enumerate(budgets):
        own = np.flatnonzero(source_D == source)
        before = np.cumsum(tokens_D[own], dtype=np.int64) - tokens_D[own]
        taken[own[before < budget]] = True
    return taken


def _cut(tokens_D: np.ndarray, shard_tokens: int) -> list[tuple[int, int]]:
    """(start, stop) of each shard; it ends with the document that reaches ``shard_tokens``."""
    total_D, shards, start = np.cumsum(tokens_D, dtype=np.int64), [], 0
    while start < total_D.size:
        before = int(total_D[start - 1]) if start else 0
        stop = int(np.searchsorted(total_D, before + shard_tokens)) + 1
        shards.append((start, min(stop, total_D.size)))
        start = shards[-1][1]
    return shards
