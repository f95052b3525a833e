"""Text to token ids: a byte-level BPE trained on the corpus, or any model's tokenizer.json.

Every document becomes at most 4,095 ids and exactly one EOS. Text never becomes an added token:
``<|endoftext|>`` or ``<think>`` written in a document is encoded as ordinary text, otherwise a web
page could end documents of its own or teach the model a user's turn.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

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


def load_encoder(path: Path, eos: str) -> Encoder:
    """Raises DataError when the file is no tokenizer or lacks the EOS token."""
    try:
        content = Path(path).read_bytes()
        table = json.loads(content)
        # <think>, <tool_call> and their like are not marked special in many models' files
        for token in table["added_tokens"]:
            token["special"] = True
        tokenizer = Tokenizer.from_str(json.dumps(table))
    except OSError as error:
        raise DataError(f"tokenizer {path}: {error.strerror}; give a tokenizer.json") from None
    except Exception as error:  # the library raises plain Exception for a malformed file
        raise DataError(
            f"tokenizer {path} cannot be read ({error}); give a tokenizer.json"
        ) from None
    eos_id = tokenizer.token_to_id(eos)
    if eos_id is None:
        raise DataError(
            f"tokenizer {path} has no token {eos!r}; set its EOS token as tokenizer.eos"
        )
    tokenizer.encode_special_tokens = True  # a property of the program, not stored in the file
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocab_size = max(tokenizer.get_vocab().values()) + 1  # ids may have holes
    return Encoder(tokenizer, eos_id, vocab_size, hashlib.sha256(content).hexdigest())


def encode(encoder: Encoder, texts: list[str]) -> list[np.ndarray]:
    """uint32 (at most 4,096,) each: ids, cut, and one EOS.

    Ids are cut, never text decoded and encoded again: that would break characters whose bytes are
    several tokens. Raises DataError when a text still encodes to the EOS.
    """
    encodings = encoder.tokenizer.encode_batch_fast(
        [text[:MAX_CHARACTERS] for text in texts], add_special_tokens=False
    )
    documents = []
    for encoding in encodings:
        ids = np.array([*encoding.ids[:MAX_IDS], encoder.eos_id], dtype=np.uint32)
        if (ids[:-1] == encoder.eos_id).any():
            raise DataError(
                f"text encodes to the EOS (id {encoder.eos_id}); mark it as a special token in "
                "tokenizer.json"
            )
        documents.append(ids)
    return documents


def decode(encoder: Encoder, ids: np.ndarray) -> str:
    """Control tokens included; a character cut at the edge shows as U+FFFD."""
    return encoder.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
