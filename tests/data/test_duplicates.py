"""Duplicates: the exact law against plain Python, memory, and planted near-copies by language."""

import gzip
import hashlib
import json
import random
import tracemalloc
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.config import load_config
from data.dedup import BYTES_A_ROW, ORDER, survivors
from data.inputs import list_inputs
from data.near import Signer, near_duplicates, shingles
from data.prepare import prepare
from data.read import DIGEST, digest_of, read_input


def test_digest_ignores_spaces_and_unicode_form_alone():
    assert digest_of("a  b\n") == digest_of(" a\tb") == hashlib.sha256(b"a b").digest()[:16]
    assert digest_of("e\u0301\u3000x") == digest_of("\u00e9 x")
    assert digest_of("x\u00b2") != digest_of("x2")  # NFKC would merge formulas
    assert digest_of("ab") != digest_of("a b")


@given(st.text(st.sampled_from([*map(chr, range(0x100)), *"\u1680\u2003\u2028\u3000é家"])))
def test_digest_is_that_of_the_words(text):
    words = " ".join(unicodedata.normalize("NFC", text).split())
    assert digest_of(text) == hashlib.sha256(words.encode()).digest()[:16]


def write_digests(folder, digests_of_inputs: list[list[bytes]]) -> list[str]:
    stems = []
    for number, digests in enumerate(digests_of_inputs):
        rows = np.array(
            [(int.from_bytes(d[:8]), int.from_bytes(d[8:]), i, 10) for i, d in enumerate(digests)],
            dtype=DIGEST,
        )
        rows.sort(order=("key", "rest", "row"))
        stems.append(f"{number:05d}")
        (folder / f"{stems[-1]}.digests").write_bytes(rows.tobytes())
    return stems


def test_first_survives_and_the_order_is_that_of_the_digests(tmp_path):
    draw = random.Random(0)
    pool = [draw.randbytes(16) for _ in range(300)]
    inputs = [draw.sample(pool, 150), [], draw.sample(pool, 200), pool[:50]]
    source_of, seed, fraction = [0, 0, 1, 1], 7, 0.25
    stems = write_digests(tmp_path, inputs)
    mask = int.from_bytes(hashlib.sha256(b"order 7").digest()[:8])
    first, hits = {}, np.zeros((2, 2), int)
    for number, digests in enumerate(inputs):
        for row, digest in enumerate(digests):
            if digest in first:
                hits[source_of[number], source_of[first[digest][0]]] += 1
            else:
                first[digest] = (number, row)
    in_order = sorted(first, key=lambda d: (int.from_bytes(d[:8]) ^ mask, d[8:]))
    held = [d for d in in_order if int.from_bytes(d[8:]) / 2**64 < fraction]
    for memory in (2**30, 64 * BYTES_A_ROW):  # one slice; eight
        found = survivors(tmp_path, stems, source_of, 2, None, seed, fraction, memory=memory)
        assert found.duplicates.tolist() == hits.tolist()
        for split, expected in (
            ("validation", held),
            ("train", [d for d in in_order if d not in set(held)]),
        ):
            rows = np.fromfile(tmp_path / f"{split}.order", ORDER)
            assert [(int(r["input"]), int(r["row"])) for r in rows] == [first[d] for d in expected]
            assert rows["source"].tolist() == [source_of[first[d][0]] for d in expected]


def test_memory_stays_within_the_limit_set(tmp_path):
    draw = np.random.default_rng(0)
    stems, rows, limit = [], 100_000, 2**20
    for number in range(3):  # 300,000 rows would take 36 MB
        digests = np.zeros(rows, dtype=DIGEST)
        for field in ("key", "rest"):
            digests[field] = draw.integers(0, 2**64, rows, dtype=np.uint64)
        digests["row"] = np.arange(rows)
        digests.sort(order=("key", "rest"))
        stems.append(f"{number:05d}")
        (tmp_path / f"{stems[-1]}.digests").write_bytes(digests.tobytes())
    tracemalloc.start()
    survivors(tmp_path, stems, [0, 0, 0], 1, None, 1, 0.1, memory=limit)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * limit
    kept = sum((tmp_path / f"{split}.order").stat().st_size for split in ("train", "validation"))
    assert kept == 3 * rows * ORDER.itemsize


# --- near-duplicates ---------------------------------------------------------------------------


def english(draw, count):
    return [draw.choice(WORDS) for _ in range(count)]


def chinese(draw, count):
    return [chr(draw.randrange(0x4E00, 0x5600)) for _ in range(count)]


def code(draw, count):
    return [draw.choice([*WORDS[:300], *"(){}=+.,:;[]"]) for _ in range(count)]


WORDS = ["".join(random.Random(i).choices("abcdefghijklmnop", k=3 + i % 7)) for i in range(3000)]
KINDS = {"english": (english, " "), "chinese": (chinese, ""), "code": (code, " ")}


def five_grams(tokens: list[str]) -> set[tuple[str, ...]]:
    return {tuple(tokens[i : i + 5]) for i in range(len(tokens) - 4)}


def similarity(one: list[str], other: list[str]) -> float:
    a, b = five_grams(one), five_grams(other)
    return len(a & b) / len(a | b)


def edited(draw, tokens, make, edits):
    tokens = list(tokens)
    for _ in range(edits):
        tokens[draw.randrange(len(tokens))] = make(draw, 1)[0]
    return tokens


def dropped(tmp_path, documents: list[str]) -> list[bool]:
    """What near-dedup drops of a mirror that holds these documents."""
    file = tmp_path / "mirror" / "data/v2/train-00000-of-00001.json.gz"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(
        gzip.compress("".join(json.dumps({"text": d}) + "\n" for d in documents).encode())
    )
    path = tmp_path / "near.toml"
    path.write_text(
        "seq_len = 8\nseed = 1\nvalidation_fraction = 0.5\nshard_tokens = 100\nnear_dedup = true\n"
        "[tokenizer]\ntrain_vocab_size = 300\n[[sources]]\nname = 'a'\ntokens = 10\n"
        f"dataset = 'pes2o'\nmirror = '{tmp_path}/mirror'\n"
    )
    config = load_config(path)
    (item,), _ = list_inputs(config)
    read_input(item, config, tmp_path)
    (survivor_D,) = near_duplicates(tmp_path, [item.stem], 4_096)  # several parts of each band
    return (survivor_D >= 0).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_planted_copies_are_found(tmp_path, kind):
    make, space = KINDS[kind]
    draw = random.Random(kind)
    originals = [make(draw, draw.randrange(100, 400)) for _ in range(150)]
    copies = [edited(draw, tokens, make, max(1, len(tokens) // 60)) for tokens in originals]
    alike = [similarity(a, b) for a, b in zip(originals, copies)]
    drop = dropped(tmp_path, [space.join(tokens) for tokens in originals + copies])
    assert not any(drop[:150])
    wanted = [gone for gone, value in zip(drop[150:], alike) if value >= 0.8]
    assert len(wanted) > 100
    assert sum(wanted) >= 0.97 * len(wanted)
    wrong = [value for gone, value in zip(drop[150:], alike) if gone and value < 0.8]
    assert len(wrong) <= 0.01 * sum(drop)


def test_shared_boilerplate_makes_no_duplicates(tmp_path):
    """Three quarters of every document are the same notice: similar, but below the threshold."""
    draw = random.Random(0)
    notice = english(draw, 210)
    documents = [notice + english(draw, 70) for _ in range(120)]
    assert 0.55 < similarity(*documents[:2]) < 0.65
    copies = [edited(draw, tokens, english, 4) for tokens in documents[:20]]
    drop = dropped(tmp_path, [" ".join(tokens) for tokens in documents + copies])
    assert not any(drop[:120])
    assert sum(drop[120:]) >= 19


def test_chinese_is_cut_by_character_and_nothing_is_a_case_of_its_own():
    assert shingles("集群里的专家并行").size == 4  # eight characters
    assert shingles("v1集群里的").size == 1  # one word and four characters
    assert shingles("one two").size == 1
    assert shingles("").size == 0
    assert (Signer().signature("") == 0xFFFFFFFF).all()


def test_near_dedup_reaches_the_set_and_its_report(tmp_path):
    draw = random.Random(1)
    originals = [english(draw, 200) for _ in range(40)]
    texts = originals + [edited(draw, tokens, english, 2) for tokens in originals[:10]]
    dropped(tmp_path, [" ".join(tokens) for tokens in texts])
    manifest = prepare(tmp_path / "near.toml", tmp_path / "out")
    counts = json.loads((tmp_path / "out" / "statistics.json").read_text())
    assert counts["near_duplicates"] == [[10]]
    assert manifest.sources[0]["read"]["documents"] == 50
    assert "10" in (tmp_path / "out" / "report.html").read_text()
