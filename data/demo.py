"""Stand-ins for the six datasets: real text of Debian, PyPI and Python in their exact containers.

The pipeline reads these mirrors as it would read the hub's files: the same names, schemas and
compressions, DAPO's rows a hundred times each. No text is part of this repository; packages are
downloaded into a cache when the corpus is built. ``origins.json`` in each mirror says where the
text of each file comes from, and what this machine could not get.
"""

import gzip
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data import debian
from data.files import locked, write_whole
from data.texts import STAND_INS, Text, problems

REPEATS = 100  # of each DAPO row, as published (DAPO issue 36)
PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'
WHEN = "2026-01-01T00:00:00Z"  # of all records: the files must be the same on every machine


def write_stand_ins(folder: Path) -> None:
    """The mirrors below ``folder``, unless they are there. Raises DataError without a network."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent):
        recipe = json.dumps(
            {name: [text.origin for text in texts] for name, texts in STAND_INS.items()}
            | {"missing": debian.unavailable()}
        )
        mark = folder / "recipe.json"
        if mark.exists() and mark.read_text() == recipe:
            return
        shutil.rmtree(folder, ignore_errors=True)
        for name, texts in STAND_INS.items():
            _mirror(name, texts, folder / name)
        _math(folder / "dapo")
        write_whole(mark, recipe.encode())


def _mirror(name: str, texts: tuple[Text, ...], folder: Path) -> None:
    """One file of the dataset for each origin."""
    lacking = debian.unavailable()
    present = [text for text in texts if not (lacking and text.package)]
    debian.fetch([text.package for text in present if text.package])
    files = {}
    for number, text in enumerate(present):
        rows = [
            _RECORD[name.partition("-")[0]](path, document) for path, document in text.documents()
        ]
        file = _file_of(name).format(number, len(present))
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        if file.endswith(".parquet"):
            _write_parquet(folder / file, rows, _SCHEMA[name.partition("-")[0]])
        else:
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (folder / file).write_bytes(gzip.compress(lines.encode(), 6, mtime=0))
        files[file] = {"origin": text.described(), "licence": text.licence}
    _origins(folder, files, [lacking] if len(present) < len(texts) else [])


def _math(folder: Path) -> None:
    origin, licence, rows = problems()
    table = [_dapo(index, problem, answer) for index, (problem, answer) in enumerate(rows)]
    (folder / "data").mkdir(parents=True)
    once = pa.Table.from_pylist(table, schema=_SCHEMA["dapo"])
    file = "data/dapo-math-17k.parquet"
    with pq.ParquetWriter(folder / file, _SCHEMA["dapo"], compression="zstd") as writer:
        for _ in range(REPEATS):
            writer.write_table(once)
    _origins(folder, {file: {"origin": origin, "licence": licence}}, [])


def _file_of(name: str) -> str:
    dataset, _, language = name.partition("-")
    return f"{language}/train-{{:05d}}-of-{{:05d}}.parquet" if language else _FILE[dataset]


def _origins(folder: Path, files: dict, missing: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"files": files, "missing": missing}, indent=1, ensure_ascii=False)
    write_whole(folder / "origins.json", text.encode())


def _write_parquet(path: Path, rows: list[dict], schema: pa.Schema) -> None:
    table = pa.Table.from_pylist(rows, schema=schema)
    pq.write_table(table, path, compression="zstd", row_group_size=1_000)


def _fineweb(path: str, text: str) -> dict:
    return {
        "text": text,
        "id": f"<file:{path}>",
        "dump": "stand-in",
        "url": f"file:///{path}",
        "date": WHEN,
        "file_path": path,
        "language": "en",
        "language_score": 1.0,
        "token_count": len(text) // 4,
    }


def _fineweb2(path: str, text: str) -> dict:
    row = _fineweb(path, text) | {"language": "cmn", "language_script": "Hani"}
    row |= {"minhash_cluster_size": 1, "top_langs": '{"cmn_Hani_score": 1.0}'}
    return {key: row[key] for key in _SCHEMA["fineweb2"].names}


def _dolma(path: str, text: str) -> dict:
    row = {"id": path, "text": text, "added": WHEN, "created": "", "source": "books"}
    return row | {"metadata": {"title": path.rpartition("/")[2]}}


def _starcoder(path: str, text: str) -> dict:
    repo = path.split("/")[0]
    return {
        "max_stars_repo_path": path,
        "max_stars_repo_name": repo,
        "max_stars_count": None,
        "id": path,
        "content": f"<reponame>{repo}<filename>{path}<gh_stars>0\n{text}",
    }


def _pes2o(path: str, text: str) -> dict:
    row = {"added": WHEN, "created": WHEN[:4], "id": path, "source": "s2orc/train"}
    return row | {"text": text, "version": "v2"}


def _dapo(index: int, problem: str, answer: str) -> dict:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": f"{PREFIX}{problem}{SUFFIX}", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"stand-in-{index}"},
    }


_S, _I, _F = pa.string(), pa.int64(), pa.float64()
_WEB = {"text": _S, "id": _S, "dump": _S, "url": _S, "date": _S, "file_path": _S, "language": _S}
_SCHEMA = {
    "fineweb": pa.schema(_WEB | {"language_score": _F, "token_count": _I}),
    "fineweb2": pa.schema(
        _WEB
        | {"language_score": _F, "language_script": _S, "minhash_cluster_size": _I, "top_langs": _S}
    ),
    "starcoderdata": pa.schema(
        {
            "max_stars_repo_path": _S,
            "max_stars_repo_name": _S,
            "max_stars_count": _I,
            "id": _S,
            "content": _S,
        }
    ),
    "dapo": pa.schema(
        {
            "data_source": _S,
            "prompt": pa.list_(pa.struct({"content": _S, "role": _S})),
            "ability": _S,
            "reward_model": pa.struct({"ground_truth": _S, "style": _S}),
            "extra_info": pa.struct({"index": _S}),
        }
    ),
}
_RECORD = {
    "fineweb": _fineweb,
    "fineweb2": _fineweb2,
    "dolma": _dolma,
    "pes2o": _pes2o,
    "starcoderdata": _starcoder,
}
_FILE = {
    "fineweb": "sample/10BT/{:03d}_00000.parquet",
    "fineweb2": "data/cmn_Hani/train/{:03d}_00000.parquet",
    "dolma": "books/books-{:04d}.json.gz",
    "pes2o": "data/v2/train-{:05d}-of-{:05d}.json.gz",
}
