"""From text files to a verified set: what is kept, what is dropped, and killed at every stage."""

import errno
import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from data import inspect, merge, prepare, verify
from data.encode import EOS, MAX_IDS, decode, encode, load_encoder, train_tokenizer
from data.errors import DataError
from data.inputs import Input
from data.loader import ShardLoader
from data.read import _opened
from data.records import read_records
from data.shards import open_shards, read_manifest
from data.tasks import Bar, report, run_tasks

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
seq_len = 16
seed = 3
validation_fraction = 0.2
shard_tokens = 400
max_quarantined = 0.05

[tokenizer]
train_vocab_size = 300

[[sources]]
name = "hand"
tokens = {tokens}
files = "{folder}/texts/*.txt"
licence = "CC0-1.0"
"""


@pytest.fixture
def config(tmp_path):
    """40 files of pronounceable text, and the ones that go wrong elsewhere."""
    (tmp_path / "texts").mkdir()
    draw = random.Random(0)
    words = [
        "".join(draw.choice("bdfgklmn") + draw.choice("aeiou") for _ in range(3)) for _ in "x" * 50
    ]
    texts = {f"{i:02d}": " ".join(draw.choices(words, k=30)) for i in range(40)}
    texts |= {
        "control": f"before {EOS} after {EOS}{EOS}",
        "chinese": "集群里的专家\u2028并行 \u0085 e\u0301",
        "twin-a": "the same\n\n text\u00e9",
        "twin-b": "the  same text" + "e\u0301",  # differs in spaces and in Unicode form
        "empty": " \n\t ",
    }
    for name, text in texts.items():
        (tmp_path / "texts" / f"{name}.txt").write_text(text, newline="")
    (tmp_path / "texts" / "latin1.txt").write_bytes("caf\u00e9".encode("latin-1"))
    path = tmp_path / "tiny.toml"
    path.write_text(CONFIG.format(folder=tmp_path, tokens=100_000))
    return path


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_round_trip(config, tmp_path, capsys):
    out = tmp_path / "out"
    assert prepare.main([str(config), "--out", str(out)]) == 0
    assert verify.main([str(out)]) == 0  # one EOS a document, and at its end
    written = {
        p.read_bytes().decode()
        for p in (config.parent / "texts").iterdir()
        if "latin" not in p.name
    }
    manifest = read_manifest(out)
    read = manifest.sources[0]["read"]
    assert read.pop("bytes") == sum(len(text.encode()) for text in written - {" \n\t "})
    assert read == {
        "records": 46, "quarantined": 1, "excluded": 0, "empty": 1, "repaired": 0,
        "duplicates": 1, "documents": 43,
    }  # fmt: skip
    assert "latin1.txt" in (out / "quarantine.jsonl").read_text()
    encoder, decoded = load_encoder(out / "tokenizer.json", EOS), []
    for split in ("train", "validation"):
        shards = open_shards(out, split)
        for tokens, first_D in zip(shards.tokens, shards.first):
            for ids in np.split(tokens, first_D[1:]):
                decoded.append(decode(encoder, ids[:-1]))
    assert len(decoded) == len(set(decoded)) == 43
    assert set(decoded) < written  # byte for byte, U+2028, U+0085 and decomposed accents too
    capsys.readouterr()
    assert inspect.main([str(out), "--index", "1"]) == 0
    assert "files of hand (CC0-1.0)" in capsys.readouterr().out
    assert inspect.main([str(out), "--index", "100000"]) == 2


def test_finished_or_other_or_foreign(config, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = [str(config), "--out", str(out)]
    assert prepare.main(arguments) == 0
    before = contents(out)
    assert prepare.main(arguments) == 0
    assert "finished already" in capsys.readouterr().out
    config.write_text(config.read_text().replace("seed = 3", "seed = 4"))
    assert prepare.main(arguments) == 2
    assert "made with another seed" in capsys.readouterr().err
    assert contents(out) == before
    foreign = tmp_path / "texts"
    assert prepare.main([str(config), "--out", str(foreign)]) == 2
    assert "holds other files" in capsys.readouterr().err


KILLED = """
import os, signal, sys
from pathlib import Path
from data import prepare
replace = Path.replace
def killed(self, target):
    if Path(target).name == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)  # the temporary file is there, the file is not
    return replace(self, target)
Path.replace = killed
prepare.prepare(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def killed_at(file: str, config: Path, out: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(config), str(out), file],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(
    "stage",
    [
        "00000.text",
        "00000.json",
        "train.order",
        "plan.json",
        "train-00001.documents",
        "train-00001.json",
        "manifest.json",
    ],
)
def test_killed_and_run_again_gives_the_same_bytes(config, tmp_path, stage):
    whole, out = tmp_path / "whole", tmp_path / "out"
    prepare.prepare(config, whole)
    assert len(read_manifest(whole).shards) == 11
    killed_at(stage, config, out)
    with pytest.raises(DataError, match=r"manifest.json is missing"):
        open_shards(out, "train")
    prepare.prepare(config, out)
    assert contents(out) == contents(whole)


def test_unfinished_set_of_another_corpus_is_not_continued(config, tmp_path):
    out, fresh = tmp_path / "out", tmp_path / "fresh"
    killed_at("train-00001.json", config, out)
    first = config.parent / "texts" / "00.txt"
    first.write_text(first.read_text().replace(" ", "  "))  # even where its digest stays
    prepare.prepare(config, out)
    prepare.prepare(config, fresh)
    assert contents(out) == contents(fresh)


def test_disk_full_says_so_and_the_same_command_goes_on(config, tmp_path, monkeypatch, capsys):
    whole, out = tmp_path / "whole", tmp_path / "out"
    prepare.prepare(config, whole)
    fsync, calls = os.fsync, []

    def full(handle):
        calls.append(handle)
        if len(calls) == 20:  # in the middle of the shards
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    assert prepare.main([str(config), "--out", str(out), "--workers", "1"]) == 2
    assert re.search(r"No space left .* GB free\); make room", capsys.readouterr().err)
    assert not list(out.rglob(".*.partial"))
    monkeypatch.undo()
    prepare.prepare(config, out)
    assert contents(out) == contents(whole)


def test_processes_and_cluster_tasks_give_the_same_bytes(config, tmp_path, capsys):
    whole, many, parts = tmp_path / "whole", tmp_path / "many", tmp_path / "parts"
    prepare.prepare(config, whole)
    prepare.prepare(config, many, workers=2)
    assert contents(many) == contents(whole)
    arguments = [str(config), "--out", str(parts)]
    assert merge.main(arguments) == 2
    assert "1 of 1 inputs are not read" in capsys.readouterr().err
    for part in ("0/2", "1/2"):  # there is one input: the second has nothing to do
        assert prepare.main([*arguments, "--task", part]) == 0
    assert merge.main(arguments) == 0
    assert prepare.main([*arguments, "--task", "1/2"]) == 0
    assert merge.main(arguments) == 2
    assert "6 of 11 shards are not made, the first is task 0" in capsys.readouterr().err
    assert prepare.main([*arguments, "--task", "0/2"]) == 0
    assert merge.main(arguments) == 0
    assert contents(parts) == contents(whole)
    assert prepare.main([*arguments, "--task", "2/2"]) == 2


def test_best_fit_cuts_nothing_and_says_what_it_wastes(config, tmp_path):
    text = config.read_text().replace("seq_len = 16", 'seq_len = 256\npacking = "best_fit"')
    config.write_text(text.replace("shard_tokens = 400", "shard_tokens = 4_000"))
    out = tmp_path / "out"
    manifest = prepare.prepare(config, out)
    verify.verify(out)
    fill = json.loads((out / "statistics.json").read_text())["fill"]
    assert 0.5 < fill < 1.0
    loader = ShardLoader(out, "train", 1, 0, 1, 1, 256, infinite=False)
    starts = sum(int((batch.positions_BL == 0).sum()) for batch in loader)
    padding = sum(int((source_D < 0).sum()) for source_D in loader.shards.source)
    assert starts == manifest.splits["train"]["documents"] + padding  # none continued


def test_budget_stops_a_source(config, tmp_path):
    config.write_text(CONFIG.format(folder=tmp_path, tokens=500))
    manifest = prepare.prepare(config, tmp_path / "out")
    train = manifest.splits["train"]["tokens"]
    longest = 30 * 6 + 30  # no document has more bytes, so none more tokens
    assert 500 <= train < 500 + longest
    assert manifest.sources[0]["tokens"]["train"] == train


def test_ids_are_cut_and_end_in_one_eos(config, tmp_path):
    prepare.prepare(config, tmp_path / "out")
    encoder = load_encoder(tmp_path / "out" / "tokenizer.json", EOS)
    long, control, empty = encode(encoder, ["\u00ff" * 5000, EOS, ""])  # ÿ: two bytes, unseen
    assert long.size == MAX_IDS + 1
    assert long[-1] == encoder.eos_id
    assert (control == encoder.eos_id).sum() == 1
    assert decode(encoder, control[:-1]) == EOS
    assert empty.tolist() == [encoder.eos_id]


def test_added_tokens_that_are_not_marked_special_stay_text_too(tmp_path):
    tokenizer = Tokenizer.from_str(train_tokenizer(["some text to think about"], 300))
    tokenizer.add_tokens(["<think>"])
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    think = tokenizer.token_to_id("<think>")
    assert tokenizer.encode("a <think>").ids[-1] == think  # what the file alone would do
    encoder = load_encoder(tmp_path / "tokenizer.json", EOS)
    (ids,) = encode(encoder, ["a <think>"])
    assert think not in ids
    assert decode(encoder, ids[:-1]) == "a <think>"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("seq_len = 16", "seq_length = 16", "unknown key 'seq_length'; did you mean 'seq_len'?"),
        ("seed = 3", 'seed = "3"', "seed is '3'; give"),
        ("seed = 3\n", "", "seed is missing"),
        ("validation_fraction = 0.2", "validation_fraction = 1.5", "fraction between 0 and 1"),
        ("shard_tokens = 400", "shard_tokens = 16", "holds no sequence of seq_len 16"),
        ("train_vocab_size = 300", "train_vocab_size = 256", "at least 257"),
        ("train_vocab_size = 300", 'file = "x.json"', "file and eos go together"),
        ('licence = "CC0-1.0"', "", "files and licence go together"),
        ('name = "hand"', 'nme = "hand"', "did you mean 'name'?"),
        ("/texts/", "/nothing/", "no file matches"),
        ("max_quarantined = 0.05", "max_quarantined = 0.01", "1 of 46 records are bad"),
        ("max_quarantined = 0.05", 'packing = "best"', "give concat or best_fit"),
        ("train_vocab_size = 300", 'model = "qwen"', "give one of: qwen3, glm4.5, deepseek-v2"),
        ('licence = "CC0-1.0"', 'dataset = "dolma"', "or `files` and `licence`"),
    ],
)
def test_wrong_config(config, tmp_path, capsys, before, after, message):
    text = config.read_text()
    assert before in text
    config.write_text(text.replace(before, after))
    assert prepare.main([str(config), "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


def test_a_process_that_dies_is_named():
    with pytest.raises(DataError, match=r"read: a process died .* fewer --workers"):
        run_tasks("read", "MB", [(9,), (9,)], os._exit, [1.0, 1.0], workers=2)


def test_progress_by_hand():
    bar = Bar("read", "MB", total=10.0, tasks=4)
    bar.finish_one()
    line = bar.line(2.5, 0, bar._began + 5.0)  # half a megabyte a second, 7.5 left
    assert line == "read: 1/4 tasks, 2.5/10.0 MB, 0.5 MB/s, 0:15 left"
    bar = Bar("read", "MB", total=None, tasks=4, budget=2.0)  # 4.2 bytes of text a token
    line = bar.line(2.5, 4.2e6, bar._began + 5.0)
    assert line == "read: 0/4 tasks, 2.5 MB, 0.5 MB/s, text for about 1.0/2.0 Mtok"


def part(size: float) -> None:
    report(size / 2, text=100)
    report(size / 4)


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_advances_within_tasks_and_adds_up(monkeypatch, capsys, workers):
    """Two tasks of 4 report 3 of it; the rest counts when they end."""
    shown = []
    monkeypatch.setattr(Bar, "show", lambda bar, *done: shown.append(done))
    run_tasks("read", "MB", [(4.0,), (4.0,)], part, [4.0, 4.0], workers=workers)
    assert "read: 2 tasks, 8.0 MB in " in capsys.readouterr().out
    assert shown[-1] == (8.0, 200.0)
    if workers == 1:
        assert [size for size, _ in shown] == [2.0, 3.0, 4.0, 6.0, 7.0, 8.0]


def test_reading_reports_every_byte_of_a_file(tmp_path, monkeypatch):
    path, sizes = tmp_path / "lines.json.gz", []
    lines = [json.dumps({"text": random.Random(i).randbytes(100).hex()}) for i in range(20_000)]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    monkeypatch.setattr("data.read.report", sizes.append)
    item = Input(0, 0, path.name, str(path), "here", "CC0-1.0", cap=2**30)
    with _opened(item, None) as file:
        records = list(read_records(file, item.name, ("text",)))
    assert len(records) == 20_000
    assert len(sizes) > 2  # as it is read, a mebibyte at a time
    assert round(sum(sizes) * 1e6) == path.stat().st_size
