"""A damaged set says which file, what was expected, what was found, and how to rebuild."""

import json

import pytest

from data.errors import DataError
from data.shards import open_shards, verify

REMEDY = r"python -m data.prepare toml_configs/data/demo.toml --out"


@pytest.fixture
def directory(make_set):
    return make_set([[[1, 2, 3], [4, 5]], [[6, 7, 8, 9]]])


def test_a_sound_set(directory):
    manifest = verify(directory)
    assert [shard.tokens for shard in manifest.shards] == [7, 5]
    shards = open_shards(directory, "train")
    assert [tokens.tolist() for tokens in shards.tokens] == [[1, 2, 3, 0, 4, 5, 0], [6, 7, 8, 9, 0]]
    assert [first.tolist() for first in shards.first] == [[0, 4], [0]]


def test_missing_shard(directory):
    (directory / "train-00001.tokens").unlink()
    with pytest.raises(
        DataError, match=rf"train-00001.tokens: expected 20 bytes.*no file.*{REMEDY}"
    ):
        open_shards(directory, "train")


@pytest.mark.parametrize(
    ("file", "expected"), [("train-00000.tokens", 28), ("train-00000.documents", 32)]
)
def test_truncated_shard(directory, file, expected):
    path = directory / file
    path.write_bytes(path.read_bytes()[:-4])
    message = rf"{file}: expected {expected} bytes, found {expected - 4} bytes.*{REMEDY}"
    with pytest.raises(DataError, match=message):
        open_shards(directory, "train")


@pytest.mark.parametrize("file", ["train-00001.tokens", "train-00000.documents", "tokenizer.json"])
def test_one_flipped_bit(directory, file):
    path = directory / file
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{file}: expected SHA-256 .* found .*{REMEDY}"):
        verify(directory)


def test_a_manifest_that_was_edited(directory):
    path = directory / "manifest.json"
    table = json.loads(path.read_text())
    path.write_text(json.dumps(table | {"vocab_size": 7}))
    with pytest.raises(DataError, match="chain link 'shards'"):
        verify(directory)
    path.write_text(json.dumps(table | {"format": 99}))
    with pytest.raises(DataError, match="format 99, this program reads 2"):
        open_shards(directory, "train")
    for wrong in (
        {"largest_id": "7"},
        {"splits": []},
        {"shards": [{**table["shards"][0], "bytes": 0.5}]},
    ):
        path.write_text(json.dumps(table | wrong))
        with pytest.raises(DataError, match=r"is damaged .* is .*, not (int|dict)"):
            open_shards(directory, "train")
    shard = table["shards"][0]
    for wrong in (
        {"tokenizer": {"sha256": "0"}},
        {"sources": [1]},
        {"shards": [shard | {"tokens": 0, "bytes": 0}]},
    ):
        path.write_text(json.dumps(table | wrong))
        with pytest.raises(DataError, match=r"is damaged \('file'|a source is 1|has 0 tokens"):
            verify(directory)
    path.write_text(path.read_text()[:50])
    with pytest.raises(DataError, match="is damaged"):
        open_shards(directory, "train")
    path.unlink()
    with pytest.raises(DataError, match=rf"no shard set at .*manifest.json is missing.*{REMEDY}"):
        open_shards(directory, "train")


def test_an_eos_inside_a_document(make_set):
    with pytest.raises(DataError, match=r"EOS .* must end each"):
        verify(make_set([[[1, 0, 2]]]))
