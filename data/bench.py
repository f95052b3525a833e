"""``python -m data.bench [--json FILE]``: how fast the pipeline is, as ratios to a reference here.

CPU seconds of one process (user and system), so a busy machine changes little; each row names its
reference, measured in the same run on the same text. Whole runs count without the interpreter's
start and the loading of the tokenizer, which is a row of its own. Their targets, 3 MB/s and 8 with
tiktoken, are for two cores; tasks are independent, so a core's is half. The text is Python's own
standard library and, where they were built (make demo-data), the stand-ins of the demo.
"""

import argparse
import dataclasses
import gzip
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from data import pypi
from data.encode import Encoder, encode, load_encoder, train_tokenizer
from data.errors import DataError
from data.loader import ShardLoader
from data.near import Signer
from data.read import digest_of
from data.records import read_records
from data.shards import read_manifest
from data.sources import DATASETS, Rejected
from data.texts import standard_library
from data.vocabularies import VOCABULARIES, tokenizer_of

STAND_INS = Path("outputs/data/stand-ins")
SAMPLE_BYTES = 6_000_000  # for the single steps
CORPUS_BYTES = 16_000_000  # for the whole pipeline
SEQ_LEN, BATCH = 4_096, 8
MODEL = "qwen3"


@dataclasses.dataclass(frozen=True)
class Row:
    what: str
    value: float
    unit: str
    reference: str
    ratio: float | None  # value over the reference's
    target: str


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m data.bench", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the rows there too")
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            rows, facts = measure(Path(scratch))
    except DataError as error:
        print(f"data.bench: {error}", file=sys.stderr)
        return 2
    for row in rows:
        ratio = f"{row.ratio:8.2f} x {row.reference}" if row.ratio else ""
        print(f"{row.what:<34}{row.value:>10.2f} {row.unit:<8} target {row.target:<12}{ratio}")
    for key, value in facts.items():
        print(f"{key}: {value}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        table = {"rows": [dataclasses.asdict(row) for row in rows], **facts}
        options.json.write_text(json.dumps(table, indent=1) + "\n")
    return 0


def measure(scratch: Path) -> tuple[list[Row], dict]:
    texts = _texts(CORPUS_BYTES)
    sample, size = [], 0
    for text in texts:
        if size < SAMPLE_BYTES:
            sample.append(text)
            size += len(text.encode())
    size /= 1e6
    encoder, tokenizer = _encoder(sample, scratch)
    raw = [text.encode() for text in sample]
    plain = size / _seconds(lambda: [hashlib.sha256(text).digest() for text in raw])
    exact = size / _seconds(lambda: [digest_of(text) for text in sample])
    signer = Signer()
    near = size / _seconds(lambda: [signer.signature(text) for text in sample])
    slow = size / _seconds(lambda: encode(dataclasses.replace(encoder, fast=None), sample))
    rows = [
        Row("exact dedup, a core", exact, "MB/s", "SHA-256 alone", exact / plain, ">= 150"),
        Row("encode, tokenizers", slow, "MB/s", "", None, "reported"),
    ]
    best = slow
    if encoder.fast:
        best = size / _seconds(lambda: encode(encoder, sample))
        rows.append(Row("encode, tiktoken", best, "MB/s", "tokenizers", best / slow, "reported"))
    rows.append(Row("near-dedup signatures", near, "MB/s", "tokenizers", near / slow, "> 1 x"))
    rows += _pipeline(texts, tokenizer, bool(encoder.fast), scratch)
    rows.append(_loader(scratch / "once"))
    facts = {
        "text_megabytes": round(sum(len(text.encode()) for text in texts) / 1e6, 1),
        "tokenizer": tokenizer.get("model", "BPE of 8,192 trained here"),
        "tiktoken": bool(encoder.fast),
        "same_shards_with_1_2_4_workers": _same_shards(scratch),
        "processor": _processor(),
        "python": sys.version.split()[0],
    }
    return rows, facts


def _texts(limit: int) -> list[str]:
    texts, size = [], 0
    for text in _all_texts():
        size += len(text.encode())
        texts.append(text)
        if size > limit:
            break
    # another order than by source, the same on every machine
    return sorted(texts, key=lambda text: digest_of(text))


def _all_texts():
    """A fifth from each mirror at most, the rest Python's own."""
    for name in ("fineweb", "fineweb2", "dolma", "starcoderdata-rust"):
        size = 0
        for path in sorted((STAND_INS / name).rglob("*.[pj]*")):
            dataset = DATASETS[name.partition("-")[0]]
            if path.name == "origins.json":
                continue
            with path.open("rb") as file:
                for _, record in read_records(file, path.name, dataset.columns):
                    text = None if isinstance(record, Rejected) else dataset.clean(record)
                    if text and size < CORPUS_BYTES / 5:
                        size += len(text.encode())
                        yield text
    for _, content in standard_library():
        text = content.decode(errors="replace")
        if text.strip():
            yield text


def _encoder(sample: list[str], scratch: Path) -> tuple[Encoder, dict]:
    """Qwen3's where its package is in the cache, otherwise one trained here."""
    name = VOCABULARIES[MODEL].package.partition("==")[0].replace("-", "_")
    path = scratch / "tokenizer.json"
    if any(pypi.cache_folder().glob(f"{name}-*.whl")):
        path.write_bytes(tokenizer_of(MODEL))
        eos, wanted = VOCABULARIES[MODEL].eos, {"model": MODEL}
    else:
        path.write_text(train_tokenizer(sample, 8_192))
        eos, wanted = "<|endoftext|>", {"train_vocab_size": 8_192}
    return load_encoder(path, eos), wanted


def _pipeline(texts: list[str], tokenizer: dict, fast: bool, scratch: Path) -> list[Row]:
    """Whole runs of data.prepare in processes of their own: CPU seconds and peak memory."""
    size = sum(len(text.encode()) for text in texts) / 1e6
    _mirror(texts, scratch / "one", 1)
    _mirror(texts, scratch / "four", 4)
    eos = VOCABULARIES[MODEL].eos if "model" in tokenizer else "<|endoftext|>"
    for name in ("one", "four"):
        _config(scratch / f"{name}.toml", scratch / name, scratch / "tokenizer.json", eos)
    rows = []
    load = f"load_encoder({str(scratch / 'tokenizer.json')!r}, {eos!r}"
    start = "import data.prepare; from data.encode import load_encoder; "
    baseline, _ = _run(["-c", f"{start}{load}, fast=False)"], fast)
    seconds, memory = _run(_prepare(scratch, "one", "slow"), fast=False)
    rows.append(Row("start and tokenizer, once", baseline, "s", "", None, "reported"))
    rows.append(
        Row(
            "end to end, a core, tokenizers",
            size / (seconds - baseline),
            "MB/s",
            "",
            None,
            ">= 1.5",
        )
    )
    slow = rows[-1].value
    quick, _ = _run(_prepare(scratch, "one", "once"), fast)
    if fast:
        baseline, _ = _run(["-c", f"{start}{load})"], fast)
        value = size / (quick - baseline)
        rows.append(
            Row("end to end, a core, tiktoken", value, "MB/s", "tokenizers", value / slow, ">= 4")
        )
    _, larger = _run(_prepare(scratch, "four", "larger"), fast)
    rows.append(Row("peak memory", memory, "MB", "", None, "< 1000"))
    ratio = larger / memory
    rows.append(Row("peak memory, corpus x 4", larger, "MB", "corpus x 1", ratio, "about 1"))
    for workers in (2, 4):
        _run([*_prepare(scratch, "one", f"workers{workers}"), "--workers", str(workers)], fast)
    return rows


def _prepare(scratch: Path, name: str, out: str) -> list[str]:
    config = str(scratch / f"{name}.toml")
    return ["-m", "data.prepare", config, "--out", str(scratch / out), "--workers", "1"]


def _run(arguments: list[str], fast: bool) -> tuple[float, float]:
    """(CPU seconds, peak megabytes) of a Python process; without ``fast`` tiktoken is hidden."""
    if not fast and arguments[0] == "-m":
        hide = "import sys, runpy; sys.modules['tiktoken'] = None; sys.argv = sys.argv[1:]; "
        arguments = [
            "-c",
            f"{hide}runpy.run_module('data.prepare', run_name='__main__')",
            *arguments[1:],
        ]
    report = (
        "import resource, subprocess, sys; "
        "code = subprocess.call([sys.executable, *sys.argv[1:]]); "
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); "
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3, code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", report, *arguments], capture_output=True, text=True, check=True
    )
    seconds, memory, code = done.stdout.splitlines()[-1].split()
    if code != "0":
        raise DataError(f"data.prepare failed: {done.stderr.strip()}")
    return float(seconds), float(memory)


def _mirror(texts: list[str], folder: Path, copies: int) -> None:
    """peS2o's container, eight files; copies differ in their first line."""
    (folder / "data/v2").mkdir(parents=True)
    for number in range(8):
        lines = [
            json.dumps({"text": f"{copy}\n{text}" if copy else text}, ensure_ascii=False)
            for copy in range(copies)
            for text in texts[number::8]
        ]
        content = gzip.compress("\n".join(lines).encode(), 1)
        (folder / "data/v2" / f"train-{number:05d}-of-00008.json.gz").write_bytes(content)


def _config(path: Path, mirror: Path, tokenizer: Path, eos: str) -> None:
    path.write_text(
        f"seq_len = {SEQ_LEN}\nseed = 1\nvalidation_fraction = 0.02\nshard_tokens = 1_000_000\n"
        f'[tokenizer]\nfile = "{tokenizer}"\neos = "{eos}"\n'
        '[[sources]]\nname = "bench"\ndataset = "pes2o"\n'
        f'tokens = 1_000_000_000\nmirror = "{mirror}"\n'
    )


def _loader(directory: Path) -> Row:
    loader = ShardLoader(directory, "train", 1, 0, 1, BATCH, SEQ_LEN)
    stream, batches = iter(loader), max(40, len(loader))
    tokens_N = loader.shards.tokens[0]

    def copies() -> None:
        for start in range(0, batches * BATCH):
            first = start * SEQ_LEN % max(1, tokens_N.size - SEQ_LEN)
            np.array(tokens_N[first : first + SEQ_LEN], dtype=np.int64)

    tokens = batches * BATCH * SEQ_LEN / 1e6
    rate = tokens / _seconds(lambda: [next(stream) for _ in range(batches)])
    reference = tokens / _seconds(copies)
    name = "copying the ids alone"
    return Row("loader, a worker", rate, "Mtok/s", name, rate / reference, ">= 1")


def _same_shards(scratch: Path) -> bool:
    sets = [read_manifest(scratch / name) for name in ("slow", "once", "workers2", "workers4")]
    digests = [[shard.sha256 for shard in one.shards] for one in sets]
    return all(one == digests[0] for one in digests)


def _seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return max(time.process_time() - began, 1e-9)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{os.cpu_count()} x {line.partition(':')[2].strip()}"
    return f"{os.cpu_count()} cores"


if __name__ == "__main__":
    sys.exit(main())
