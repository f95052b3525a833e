"""The six datasets of the corpus: where their files lie, what a record holds, how it is cleaned.

Read as files, never by the hub's dataset scripts: two of the six are script-based, which
``datasets`` 4 refuses, and its JSON reader drops a whole file for one bad line. Only the columns
named here are read, so a column that appears in a later file changes nothing.

A cleaner gets one record and returns its text, or None when the record belongs to another source.
It raises Rejected with the reason when the record is not what the dataset promises.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Rejected(Exception):
    """A record or a file that goes to quarantine; the message is the reason."""

    def __init__(self, reason: str, content: bytes = b""):
        super().__init__(reason)
        self.content = content  # of a line that could not be read, for its digest


@dataclass(frozen=True)
class Dataset:
    """``files`` maps a variant to a glob below the repository, or below a mirror of it."""

    repo: str  # on the hub
    licence: str
    variant: str  # the default
    variants: str  # regular expression of what there is
    files: Callable[[str], str]
    columns: tuple[str, ...]  # top level; everything else is left unread
    clean: Callable[[dict[str, Any]], str | None]
    revision: str | None = None  # pin of ours; None: the config's, or the newest
    listed: bool = False  # the files lie elsewhere, a text file of the repository lists their URLs
    gated: bool = False


def plain_text(record: dict[str, Any]) -> str:
    return string_of(record, "text")


def code(record: dict[str, Any]) -> str:
    """StarCoderData: without the header tags; placeholders of personal data stay."""
    return _STARCODER_HEADER.sub("", string_of(record, "content"))


def dolma_text(record: dict[str, Any]) -> str | None:
    """Dolma contains peS2o, The Stack and FLAN, which are sources of their own or none of ours."""
    source = record.get("source")
    if isinstance(source, str) and _IN_DOLMA.match(source.lower()):
        return None
    return string_of(record, "text")


def dapo_prompt(record: dict[str, Any]) -> str:
    """The one user message as published; the answer is not part of the text."""
    prompt = record.get("prompt")
    try:
        (message,) = prompt
        return string_of(message, "content")
    except (TypeError, ValueError, AttributeError):
        raise Rejected(f"prompt is not one message: {str(prompt)[:80]!r}") from None


def without_template(prompt: str) -> str:
    """A DAPO prompt without the fixed instruction before and behind the problem."""
    return _DAPO_SUFFIX.sub("", _DAPO_PREFIX.sub("", prompt))


def string_of(record: dict[str, Any], key: str) -> str:
    """The field, "" when it is null or absent (the caller counts empty texts)."""
    value = record.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise Rejected(f"{key} is {type(value).__name__}, not text")
    return value


def _fineweb_files(variant: str) -> str:
    if variant.startswith("sample-"):
        return f"{variant.replace('-', '/', 1)}/*.parquet"
    return "data/*/*.parquet" if variant == "default" else f"data/{variant}/*.parquet"


def _pes2o_files(variant: str) -> str:
    return f"data/{variant}/train-*-of-*.{'zst' if variant == 'v3' else 'json.gz'}"


_STARCODER_HEADER = re.compile(r"\A(?:<(?:reponame|filename|gh_stars)>[^<\n]*)+\n?")
_IN_DOLMA = re.compile(r"pes2o|s2orc|s2ag|s2\b|stack-dedup|the-stack|starcoder|tulu|flan")
_DAPO_PREFIX = re.compile(r"\ASolve the following math problem step by step\.[^\n]*\n\n")
_DAPO_SUFFIX = re.compile(
    r"\n\nRemember to put your answer on its own line after \"Answer:\"\.\s*\Z"
)

# Folders of Dolma's file list that hold other sources (v1_7).
DOLMA_EXCLUDED = {"pes2o", "starcoder", "tulu_flan"}

DATASETS = {
    "fineweb": Dataset(
        repo="HuggingFaceFW/fineweb",
        licence="ODC-By-1.0 and Common Crawl terms of use",
        variant="sample-10BT",
        variants=r"sample-(10|100|350)BT|CC-MAIN-\d{4}-\d{2}|default",
        files=_fineweb_files,
        columns=("text",),
        clean=plain_text,
    ),
    "fineweb2": Dataset(
        repo="HuggingFaceFW/fineweb-2",
        licence="ODC-By-1.0 and Common Crawl terms of use",
        variant="cmn_Hani",
        variants=r"[a-z]{3}_[A-Z][a-z]{3}",
        files=lambda variant: f"data/{variant}/train/*.parquet",
        columns=("text",),
        clean=plain_text,
    ),
    "dolma": Dataset(
        repo="allenai/dolma",
        licence="ODC-By-1.0",
        variant="v1_6-sample",
        variants=r"v1_(5|6|7)(-sample|r1|r1-sample|r2-sample)?",
        files=lambda variant: f"urls/{variant}.txt",
        columns=("text", "source"),
        clean=dolma_text,
        revision="7f48140530a023e9ea4c5cfb141160922727d4d3",
        listed=True,
    ),
    "starcoderdata": Dataset(
        repo="bigcode/starcoderdata",
        licence="The Stack terms of use; licences of the single files",
        variant="python",
        variants=r"[a-z][a-z0-9+#-]*",
        files=lambda variant: f"{variant}/*.parquet",
        columns=("content",),
        clean=code,
        gated=True,
    ),
    "pes2o": Dataset(
        repo="allenai/peS2o",
        licence="ODC-By-1.0",
        variant="v2",
        variants=r"v[123]",
        files=_pes2o_files,
        columns=("text",),
        clean=plain_text,
    ),
    "dapo": Dataset(
        repo="BytedTsinghua-SIA/DAPO-Math-17k",
        licence="Apache-2.0",
        variant="default",
        variants="default",
        files=lambda _: "data/*.parquet",
        columns=("prompt",),
        clean=dapo_prompt,
    ),
}
