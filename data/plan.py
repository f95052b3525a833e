"""Stage 2: from what was read to a list of shards, each of which is then one task.

Duplicates go, the tokenizer is made, the budgets are applied, and the documents are dealt to the
shards in the corpus's order. Nothing is encoded for that but a sample of each source: its tokens a
byte estimate the length of the other documents. So budgets and shard sizes are met within the
estimate's error (exactly, where a source has at most SAMPLE documents), and in exchange no shard
depends on another.

Letters: D documents of a split, in order; B of a block of them.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.config import Config
from data.dedup import MEMORY, ORDER, survivors
from data.encode import EOS, MAX_IDS, Encoder, encode, load_encoder, train_tokenizer
from data.errors import DataError
from data.files import space_left_or_say, write_whole
from data.inputs import Input
from data.near import near_duplicates
from data.shards import SPLITS
from data.spool import text_of
from data.vocabularies import VOCABULARIES, tokenizer_of

SAMPLE = 256  # documents of each source
BLOCK = 2**20  # rows that are looked at together: 16 MiB of them
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
    shards, parts = [], []
    for split, order_D in orders.items():
        estimate = _sampled(order_D, len(config.sources), stems, folder, encoder)
        if split == "train":
            ratios = estimate.bytes_a_token
        digest, cuts = _deal(
            order_D,
            estimate,
            _budgets(config, split),
            config.shard_tokens,
            folder / f"{split}.plan",
        )
        parts.append(digest)
        shards += [
            {"split": split, "number": number, "start": start, "stop": stop}
            for number, (start, stop) in enumerate(cuts)
        ]
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
        bytes_a_token=[round(ratio, 4) for ratio in ratios],
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


@dataclass(frozen=True)
class _Estimate:
    """Tokens of a document from its bytes; exact for those that were sampled."""

    bytes_a_token: list[float]  # by source; 0 where it has no document
    exact: dict[int, int]  # position in the order: tokens with the EOS

    def tokens_of(self, rows_B: np.ndarray, first: int) -> np.ndarray:
        """int64 (B,) for a block of the order that starts at position ``first``."""
        ratio_B = np.array(self.bytes_a_token)[rows_B["source"]]
        tokens_B = np.minimum(rows_B["bytes"] / ratio_B + 1, MAX_IDS + 1).astype(np.int64)
        for position, tokens in self.exact.items():
            if first <= position < first + rows_B.size:
                tokens_B[position - first] = tokens
        return tokens_B


def _sampled(
    order_D: np.ndarray, sources: int, stems: list[str], folder: Path, encoder: Encoder
) -> _Estimate:
    """Encode the first documents of each source."""
    positions: list[list[int]] = [[] for _ in range(sources)]
    for first, rows_B in _blocks(order_D):
        for source in range(sources):
            own = np.flatnonzero(rows_B["source"] == source)[: SAMPLE - len(positions[source])]
            positions[source] += (first + own).tolist()
        if all(len(sample) == SAMPLE for sample in positions):
            break
    ratios, exact = [0.0] * sources, {}
    for source, sample in enumerate(positions):
        if not sample:
            continue
        rows = order_D[sample]
        texts = [text_of(folder, stems[r["input"]], int(r["row"])) for r in rows]
        length = np.array([ids.size for ids in encode(encoder, texts)])
        whole = length <= MAX_IDS  # a cut document says nothing about bytes a token
        size, count = int(rows["bytes"][whole].sum(dtype=np.int64)), int((length[whole] - 1).sum())
        ratios[source] = size / count if count else int(rows["bytes"][0]) / MAX_IDS
        exact |= zip(sample, length.tolist())
    return _Estimate(ratios, exact)


def _deal(
    order_D: np.ndarray, estimate: _Estimate, budgets: list[int], shard_tokens: int, path: Path
) -> tuple[str, list[tuple[int, int]]]:
    """Write the rows that the budgets take; their SHA-256, and (start, stop) of each shard.

    The document that reaches a source's budget is the last one taken of it, the one that reaches
    ``shard_tokens`` the last one of its shard. Block by block, so memory does not grow with the
    corpus.
    """
    digest, shards = hashlib.sha256(), []
    given = [0] * len(budgets)  # tokens of a source so far
    rows = total = start = before = 0  # rows and tokens taken; where the open shard began
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            for first, rows_B in _blocks(order_D):
                tokens_B = estimate.tokens_of(rows_B, first)
                taken_B = np.zeros(rows_B.size, dtype=bool)
                for source, budget in enumerate(budgets):
                    own = np.flatnonzero(rows_B["source"] == source)
                    upto = given[source] + np.cumsum(tokens_B[own])
                    taken_B[own[upto - tokens_B[own] < budget]] = True
                    given[source] = int(upto[-1]) if own.size else given[source]
                content = rows_B[taken_B].tobytes()
                digest.update(content)
                file.write(content)
                total_B = total + np.cumsum(tokens_B[taken_B])
                while (i := int(np.searchsorted(total_B, before + shard_tokens))) < total_B.size:
                    shards.append((start, rows + i + 1))
                    start, before = shards[-1][1], int(total_B[i])
                rows += total_B.size
                total = int(total_B[-1]) if total_B.size else total
                if all(had >= budget for had, budget in zip(given, budgets)):
                    break
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        partial.unlink(missing_ok=True)
        space_left_or_say(error, path.parent)
        raise
    partial.replace(path)
    return digest.hexdigest(), shards + [(start, rows)] * (start < rows)


def _blocks(order_D: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(position of its first row, rows)."""
    for first in range(0, order_D.size, BLOCK):
        yield first, order_D[first : first + BLOCK]
