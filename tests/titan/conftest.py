"""A tiny corpus of real text (Python's own sources) and ranks that train on it."""

import sysconfig
from pathlib import Path

import pytest

from data.prepare import main as prepare
from tests.ranks import RankPool

CONFIG = """
seq_len = 64
seed = 1
validation_fraction = 0.2
shard_tokens = 100_000

[tokenizer]
train_vocab_size = 512

[[sources]]
name = "python"
tokens = 60_000
files = "{folder}/*.py"
licence = "PSF-2.0"
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A folder with ``data/``, shards of 512 token ids; runs go beside it."""
    folder = tmp_path_factory.mktemp("training")
    sources = folder / "sources"
    sources.mkdir()
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.glob("*.py"))[:60]:
        (sources / path.name).write_bytes(path.read_bytes())
    config = folder / "corpus.toml"
    config.write_text(CONFIG.format(folder=sources))
    assert prepare([str(config), "--out", str(folder / "data")]) == 0
    return folder


@pytest.fixture(scope="session")
def trainers():
    pool = RankPool(4, fresh=True)
    yield pool
    pool.close()
