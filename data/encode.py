"""Text to token ids: a byte-level BPE trained on the corpus, or any model's tokenizer.json.

Where tiktoken is installed and the tokenizer is one that it can express, it encodes instead, to
the same ids and several times as fast.

Every document becomes at most 4,095 ids and exactly one EOS. Text never becomes an added token:
``<|endoftext|>`` or ``<think>`` written in a document is encoded as ordinary text, otherwise a web
page could end documents of its own or teach the model a user's turn.
"""

import functools
import hashlib
import json
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data.errors import DataError

MAX_IDS = 4_095  # and EOS: 4,096 tokens, the sequence length of the recipes
MAX_CHARACTERS = 32 * MAX_IDS  # cut first: time and memory of a 60 MB line stay bounded
EOS = "<|endoftext|>"  # of the tokenizer trained here


@dataclass(frozen=True)
class Encoder:
    tokenizer: Tokenizer
    eos_id: int
    vocab_size: int  # largest id + 1
    sha256: str  # of the tokenizer.json
    fast: Any = None  # tiktoken's encoding of the same ids
    nfc: bool = False  # what `fast` leaves to its caller


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> str:
    """The tokenizer.json of a byte-level BPE; the same texts in the same order give the same."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # any byte can be encoded
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()


def load_encoder(path: Path, eos: str, *, fast: bool = True) -> Encoder:
    """Raises DataError when the file is no tokenizer or lacks the EOS token."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"tokenizer {path}: {error.strerror}; give a tokenizer.json") from None
    try:
        return _encoder(content, eos, fast)
    except DataError as error:
        raise DataError(f"tokenizer {path}{error}") from None


@functools.lru_cache(2)  # a worker encodes many shards with one tokenizer
def _encoder(content: bytes, eos: str, fast: bool) -> Encoder:
    try:
        table = json.loads(content)
        # <think>, <tool_call> and their like are not marked special in many models' files
        for token in table["added_tokens"]:
            token["special"] = True
        tokenizer = Tokenizer.from_str(json.dumps(table))
    except Exception as error:  # the library raises plain Exception for a malformed file
        raise DataError(f" cannot be read ({error}); give a tokenizer.json") from None
    eos_id = tokenizer.token_to_id(eos)
    if eos_id is None:
        raise DataError(f" has no token {eos!r}; set its EOS token as tokenizer.eos")
    tokenizer.encode_special_tokens = True  # a property of the program, not stored in the file
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocab_size = max(tokenizer.get_vocab().values()) + 1  # ids may have holes
    encoding = tiktoken_of(table) if fast else None
    nfc = (table.get("normalizer") or {}).get("type") == "NFC"
    sha256 = hashlib.sha256(content).hexdigest()
    return Encoder(tokenizer, eos_id, vocab_size, sha256, encoding, nfc)


def tiktoken_of(table: dict[str, Any]) -> Any:
    """tiktoken's encoding of a byte-level BPE, or None when it is absent or cannot express it.

    It merges whatever two tokens make the one of the lowest rank. That is what the list of merges
    says when ids rise along it: of the ways to make a token, merging by rank reaches only one.
    """
    try:
        import tiktoken
    except ImportError:
        return None
    steps = table.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    model, normalizer = table["model"], table.get("normalizer")
    if [step.get("type") for step in steps] != ["Split", "ByteLevel"]:
        return None
    split, bytes_step = steps
    pattern = split["pattern"].get("Regex")
    vocab = model["vocab"]
    merged = [
        vocab["".join(pair if isinstance(pair, list) else pair.split(" "))]
        for pair in model["merges"]
    ]
    if (
        not pattern
        or split["behavior"] != "Isolated"
        or split["invert"]
        or bytes_step["use_regex"]
        or bytes_step["add_prefix_space"]
        or (normalizer is not None and normalizer["type"] != "NFC")
        or merged != sorted(merged)
        or len(vocab) != 256 + len(set(merged))
    ):
        return None
    byte_of = {character: value for value, character in byte_alphabet().items()}
    ranks = {bytes(byte_of[c] for c in token): rank for token, rank in vocab.items()}
    return tiktoken.Encoding("corpus", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable character of each byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in plain]
    return {value: chr(value) for value in plain} | {
        value: chr(256 + place) for place, value in enumerate(others)
    }


def encode(encoder: Encoder, texts: list[str]) -> list[np.ndarray]:
    """uint32 (at most 4,096,) each: ids, cut, and one EOS.

    Ids are cut, never text decoded and encoded again: that would break characters whose bytes are
    several tokens. Raises DataError when a text still encodes to the EOS.
    """
    documents = []
    for ids in _ids([text[:MAX_CHARACTERS] for text in texts], encoder):
        ids = np.array([*ids[:MAX_IDS], encoder.eos_id], dtype=np.uint32)
        if (ids[:-1] == encoder.eos_id).any():
            raise DataError(
                f"text encodes to the EOS (id {encoder.eos_id}); mark it as a special token in "
                "tokenizer.json"
            )
        documents.append(ids)
    return documents


def _ids(texts: list[str], encoder: Encoder) -> Iterable[list[int]]:
    if encoder.fast:
        for text in texts:
            yield encoder.fast.encode_ordinary(
                unicodedata.normalize("NFC", text) if encoder.nfc else text
            )
    else:
        for encoding in encoder.tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            yield encoding.ids


def decode(encoder: Encoder, ids: np.ndarray) -> str:
    """Control tokens included; a character cut at the edge shows as U+FFFD."""
    return encoder.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
