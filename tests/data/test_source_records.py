"""What is known to break corpora, case by case (the numbers are those of the docstrings).

Cases that are a property of another file's subject are tested there: 20 and 21 with the remote
files, 22 to 28 with the loader and the set, 29 with the vocabularies, 30 and 31 with preparing.
"""

import gzip
import hashlib
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.config import load_config
from data.errors import DataError
from data.inputs import list_inputs
from data.prepare import prepare
from data.read import check_records, read_input, read_records_of
from data.spool import forget, text_of

DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'


@pytest.fixture
def read(tmp_path):
    """read(dataset, {file: content}, **source) -> (texts by input, records of the inputs)."""

    def run(dataset: str, files: dict[str, bytes], top: str = "", source: str = ""):
        mirror, work = tmp_path / "mirror", tmp_path / "work"
        work.mkdir(exist_ok=True)
        for name, content in files.items():
            (mirror / name).parent.mkdir(parents=True, exist_ok=True)
            (mirror / name).write_bytes(content)
        path = tmp_path / "case.toml"
        path.write_text(
            "seq_len = 8\nseed = 1\nvalidation_fraction = 0.5\nshard_tokens = 100\n"
            f"{top}\n[tokenizer]\ntrain_vocab_size = 300\n\n"
            f'[[sources]]\nname = "case"\ntokens = 1000\ndataset = "{dataset}"\n'
            f'mirror = "{mirror}"\n{source}\n'
        )
        config = load_config(path)
        items, _ = list_inputs(config)
        for item in items:
            read_input(item, config, work)
        forget()
        records = read_records_of(items, work)
        texts = [
            [text_of(work, item.stem, row) for row in range(record["counts"]["documents"])]
            for item, record in zip(items, records)
        ]
        check = lambda allow: check_records(records, config, work, allow)  # noqa: E731
        run.check, run.config = check, path
        return texts, records

    return run


def lines(*records, end: bytes = b"\n") -> bytes:
    return b"".join(
        (r if isinstance(r, bytes) else json.dumps(r, ensure_ascii=False).encode()) + end
        for r in records
    )


def parquet(rows: list[dict], schema: pa.Schema | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), sink)
    return sink.getvalue().to_pybytes()


PES2O = "data/v2/train-{:05d}-of-00020.json.gz"


def pes2o(read, *contents: bytes, **options):
    """Texts and record of each .json.gz file."""
    files = {PES2O.format(i): gzip.compress(content) for i, content in enumerate(contents)}
    return read("pes2o", files, **options)


def test_case_1_script_datasets_are_read_as_files(read):
    listed = (
        b"https://olmo-data.org/dolma-v1_7/books/books-0000.json.gz\n"
        b"https://olmo-data.org/dolma-v1_7/pes2o/pes2o-0000.json.gz\n"  # a source of its own
    )
    book = gzip.compress(lines({"text": "a book", "source": "books"}))
    files = {"urls/v1_7.txt": listed, "dolma-v1_7/books/books-0000.json.gz": book}
    texts, records = read("dolma", files, source='variant = "v1_7"')
    assert texts == [["a book"]]
    assert records[0]["origin"].startswith("allenai/dolma")


def test_dolma_records_of_other_sources_are_excluded(read):
    rows = [{"text": f"from {source}", "source": source} for source in ("pes2o", "c4", "flan_v2")]
    texts, records = read("dolma", {"v/a.json.gz": gzip.compress(lines(*rows))})
    assert texts == [["from c4"]]
    assert records[0]["counts"]["excluded"] == 2


def test_cases_2_3_new_columns_in_a_later_file(read):
    first = {"text": "一", "id": "1", "language_score": 0.9}
    second = {"text": "二", "id": "2", "language_score": 0.9, "wordlist_ratio": 0.8}
    files = {
        f"data/cmn_Hani/train/00{i}.parquet": parquet([r]) for i, r in ((0, first), (1, second))
    }
    assert read("fineweb2", files)[0] == [["一"], ["二"]]
    assert pes2o(read, lines({"text": "a"}, {"text": "b", "attributes": {"x": [1]}}))[0] == [
        ["a", "b"]
    ]


def test_cases_4_5_null_then_string_and_odd_dates(read):
    rows = [{"text": "a", "created": None}] * 1 + [{"text": "b", "created": "2020"}]
    rows += [{"text": "c", "created": ""}, {"text": "d", "created": "2020-01-01"}]
    assert pes2o(read, lines(*rows))[0] == [["a", "b", "c", "d"]]


def test_case_6_one_broken_line(read):
    texts, records = pes2o(read, lines({"text": "a"}, b'{"text": "br', {"text": "b"}, b"[1]"))
    assert texts == [["a", "b"]]
    broken, list_ = records[0]["quarantine"]
    assert (broken["line"], list_["line"]) == (2, 4)
    assert broken["reason"].startswith("not JSON: Unterminated string")
    assert list_["reason"] == "not a JSON object"
    assert broken["sha256"] == hashlib.sha256(b'{"text": "br').hexdigest()
    assert "train-00000-of-00020.json.gz" in broken["file"]


def test_case_7_bom_blank_lines_crlf_and_nul(read):
    long = "x" * 200
    content = b"\xef\xbb\xbf" + lines({"text": "a"}, b"", b"  ", {"text": "b"}, end=b"\r\n")
    content += lines({"text": f"{long}\0"}, b'{"text": "raw \0' + long.encode() + b'"}')
    texts, records = pes2o(read, content)
    assert texts == [["a", "b", f"{long}\ufffd", f"raw \ufffd{long}"]]
    assert records[0]["counts"]["repaired"] == 2
    assert records[0]["counts"]["quarantined"] == 0


def test_case_8_invalid_utf8(read):
    good = "y" * 150
    content = lines(b'{"text": "' + good.encode() + b'\x8b"}', b'{"text": "caf\xe9"}')
    texts, records = pes2o(read, content)
    assert texts == [[f"{good}\ufffd"]]
    (entry,) = records[0]["quarantine"]  # one of four characters: not UTF-8 at all
    assert entry["reason"] == "1 of 4 characters are NUL or not valid UTF-8"
    texts, records = pes2o(read, content, top='bad_characters = "quarantine"')
    assert texts == [[]]
    assert records[0]["counts"]["quarantined"] == 2
    raw = pa.array([good.encode() + b"\xff"], pa.binary()).view(pa.string())
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": raw}), sink)
    files = {"sample/10BT/000.parquet": sink.getvalue().to_pybytes()}
    assert read("fineweb", files)[0] == [[f"{good}\ufffd"]]


def test_case_9_lone_surrogates(read):
    text = "z" * 150
    content = lines(b'{"text": "\\ud83d' + text.encode() + b'"}', b'{"text": "\\ud83d\\ude00 ok"}')
    assert pes2o(read, content)[0] == [[f"\ufffd{text}", "😀 ok"]]


def test_case_10_only_a_newline_byte_ends_a_record(read):
    rows = [{"text": "a\u2028b\u0085c\x0bd"}, {"text": "e"}]
    assert pes2o(read, lines(*rows))[0] == [["a\u2028b\u0085c\x0bd", "e"]]


def test_case_11_a_long_line(read):
    texts, _ = pes2o(read, lines({"text": "word " * 2_000_000}, {"text": "next"}))
    assert [len(text) for text in texts[0]] == [10_000_000, 4]


def test_a_line_beyond_the_limit_is_not_held(read, monkeypatch):
    monkeypatch.setattr("data.records.LONGEST_LINE", 2**20)
    texts, records = pes2o(read, lines({"text": "x" * 5_000_000}, {"text": "next"}))
    assert texts == [["next"]]
    assert records[0]["quarantine"][0]["reason"] == "line longer than 1048576 bytes"


def test_case_12_truncated_gz(read, tmp_path):
    rows = [{"text": f"document {i} {i * 7919 % 1000003}"} for i in range(20_000)]
    whole = gzip.compress(lines(*rows))
    texts, records = read("pes2o", {PES2O.format(0): whole[: len(whole) // 2]})
    assert 5_000 < len(texts[0]) < 15_000
    assert texts[0] == [row["text"] for row in rows[: len(texts[0])]]
    assert records[0]["partial"].startswith("broken off behind line")
    with pytest.raises(DataError, match=r"broken off .* good\. .*--allow-partial"):
        read.check(False)
    read.check(True)
    with pytest.raises(DataError, match="broken off"):
        prepare(read.config, tmp_path / "out")
    assert prepare(read.config, tmp_path / "out", allow_partial=True).sources[0]["inputs"][0][
        "partial"
    ]


def test_case_13_empty_and_multi_member_gz(read):
    two = gzip.compress(lines({"text": "a"})) + gzip.compress(lines({"text": "b"}))
    texts, records = read("pes2o", {PES2O.format(0): b"", PES2O.format(1): two})
    assert texts == [[], ["a", "b"]]
    assert records[0]["quarantine"][0]["reason"] == "empty file"
    read.check(False)  # reported, no reason to fail


@pytest.mark.parametrize("keep", [0.5, 0.0])
def test_case_14_corrupt_parquet(read, keep):
    content = parquet([{"text": "a" * 1000}] * 10)
    cut = content[: int(keep * len(content))] + b"garbage"
    good = parquet([{"text": "b"}])
    files = {"sample/10BT/000.parquet": cut, "sample/10BT/001.parquet": good}
    texts, records = read("fineweb", files)
    assert texts == [[], ["b"]]
    assert "parquet broken" in records[0]["quarantine"][0]["reason"]
    with pytest.raises(DataError, match="parquet broken"):
        read.check(False)


def test_a_parquet_file_without_the_column_is_named(read):
    _, records = read("fineweb", {"sample/10BT/000.parquet": parquet([{"content": "a"}])})
    assert records[0]["partial"] == "no column 'text'; there are ['content']"


def test_case_15_empty_and_null_texts(read):
    rows = [{"text": ""}, {"text": None}, {"id": "no text"}, {"text": " \n\u3000"}, {"text": 7}]
    texts, records = pes2o(read, lines(*rows), top="near_dedup = true")
    assert texts == [[]]
    assert records[0]["counts"]["empty"] == 4
    assert records[0]["quarantine"][0]["reason"] == "text is int, not text"


def test_case_16_ids_are_no_keys(read):
    rows = [{"id": "1", "text": "a"}, {"id": "1", "text": "b"}, {"id": "2", "text": "a"}]
    texts, records = pes2o(read, lines(*rows))
    assert texts == [["a", "b"]]
    assert records[0]["counts"]["duplicates"] == 1


def test_case_17_dapo_a_hundred_times(read):
    rows = [
        {"prompt": [{"content": f"{DAPO_PREFIX}{i} + {i}?{DAPO_SUFFIX}", "role": "user"}]}
        for i in range(30)
    ]
    rows = [row | {"extra_info": {"index": f"{n}"}} for n, row in enumerate(rows * 100)]
    files = {"data/dapo-math-17k.parquet": parquet(rows)}
    texts, records = read("dapo", files)
    assert texts[0] == [row["prompt"][0]["content"] for row in rows[:30]]  # as published
    assert records[0]["counts"]["duplicates"] == 2_970
    assert read("dapo", files, source="strip_template = true")[0][0][:2] == ["0 + 0?", "1 + 1?"]


def test_dapo_prompts_that_are_no_single_message(read):
    rows = [{"prompt": []}, {"prompt": None}, {"prompt": [{"content": "a", "role": "user"}] * 2}]
    schema = pa.schema(
        {"prompt": pa.list_(pa.struct({"content": pa.string(), "role": pa.string()}))}
    )
    texts, records = read("dapo", {"data/a.parquet": parquet(rows, schema)})
    assert texts == [[]]
    assert records[0]["counts"]["quarantined"] == 3


def test_case_18_repeats_across_files_go_too(read, tmp_path):
    rows = [{"text": f"document number {i}"} for i in range(40)]
    again = [{"text": f"document  number\n{i}"} for i in range(0, 60, 2)]  # 20 of them known
    pes2o(read, lines(*rows), lines(*again))
    manifest = prepare(read.config, tmp_path / "out")
    assert sum(split["documents"] for split in manifest.splits.values()) == 50
    counts = json.loads((tmp_path / "out" / "statistics.json").read_text())
    assert counts["duplicates"] == [[20]]


def test_starcoder_header_goes_and_placeholders_stay(read):
    rows = [
        {"content": "<reponame>a/b<filename>c.py<gh_stars>10-100\nimport re\n# <EMAIL> <KEY>\n"},
        {"content": "<gh_stars>0\nx <reponame> y"},
    ]
    texts, _ = read("starcoderdata", {"python/a.parquet": parquet(rows)})
    assert texts == [["import re\n# <EMAIL> <KEY>\n", "x <reponame> y"]]


def test_zstandard_lines(read):
    rows = [{"text": f"document {i} {i * 7919 % 1000003}"} for i in range(20_000)]
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(lines(*rows))
    content = sink.getvalue().to_pybytes()
    name = "data/v3/train-0000-of-0136.zst"
    texts, _ = read("pes2o", {name: content}, source='variant = "v3"')
    assert texts[0] == [row["text"] for row in rows]
    broken = {name: content[: len(content) // 2]}
    texts, records = read("pes2o", broken, source='variant = "v3"')
    assert 5_000 < len(texts[0]) < 15_000
    assert records[0]["partial"].startswith("broken off behind line")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('variant = "zho_Hans-CN"', "has no variant"),
        ('revision = "main"', "give 40 hex digits"),
        ('variant = "rus_Cyrl"', r"no data/rus_Cyrl/train/\*.parquet in the mirror"),
    ],
)
def test_wrong_sources_are_refused(read, source, message):
    with pytest.raises(DataError, match=message):
        read("fineweb2", {"data/cmn_Hani/train/0.parquet": b""}, source=source)


def test_a_list_that_names_an_absent_file(read):
    files = {"urls/v1_6-sample.txt": b"https://olmo-data.org/a/b.json.gz\n"}
    with pytest.raises(DataError, match=r"lists a/b\.json\.gz, which"):
        read("dolma", files)
