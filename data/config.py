"""What to prepare, read strictly from TOML: unknown and missing keys are errors."""

import dataclasses
import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

from data.errors import DataError
from data.sources import DATASETS
from data.vocabularies import VOCABULARIES

CHOICES = {"packing": ("concat", "best_fit"), "bad_characters": ("replace", "quarantine")}


@dataclass(frozen=True)
class TokenizerConfig:
    """``train_vocab_size``, or ``model``, or ``file`` and its ``eos`` token."""

    train_vocab_size: int | None = None
    model: str | None = None  # a name of data/vocabularies.py
    file: str | None = None
    eos: str | None = None


@dataclass(frozen=True)
class SourceConfig:
    """One of the six datasets, from the hub or a mirror, or text files with their licence."""

    name: str
    tokens: int  # budget of the train split
    dataset: str | None = None  # a name of data/sources.py
    variant: str | None = None  # of the dataset; by default the one data/sources.py names
    mirror: str | None = None  # folder with the hub's files under the hub's names; None: the hub
    revision: str | None = None  # 40 hex digits; None: the hub's newest, recorded in the manifest
    strip_template: bool = False  # DAPO: the problem without the fixed sentences around it
    files: str | None = None  # glob, relative to the working directory; UTF-8, one document each
    licence: str | None = None  # of `files`


@dataclass(frozen=True)
class Config:
    name: str  # the file's
    seq_len: int
    seed: int
    validation_fraction: float
    shard_tokens: int
    tokenizer: TokenizerConfig
    sources: tuple[SourceConfig, ...]
    packing: str = "concat"
    near_dedup: bool = False
    bad_characters: str = "replace"  # NUL, invalid UTF-8, lone surrogates
    max_quarantined: float = 0.01  # of a source's records; more fails the run
    stand_ins: str | None = None  # folder: mirrors of Debian's and PyPI's texts, written first

    def as_dict(self) -> dict[str, Any]:
        """As JSON gives it back."""
        return dataclasses.asdict(self) | {"sources": [dataclasses.asdict(s) for s in self.sources]}


def load_config(path: Path) -> Config:
    """Raises DataError with the file, the key, its value and what is expected."""
    try:
        table = tomli.loads(Path(path).read_text())
    except OSError as error:
        raise DataError(
            f"config {path} cannot be read ({error.strerror}); the demo's is "
            "toml_configs/data/demo.toml"
        ) from None
    except tomli.TOMLDecodeError as error:
        raise DataError(f"config {path}: {error}") from None
    table["name"] = Path(path).stem
    rows = table.get("sources")
    if not isinstance(rows, list) or not rows:
        raise DataError(f"config {path}: no [[sources]]; give at least one")
    config = _filled(Config, table, str(path))
    tokenizer = _filled(TokenizerConfig, table["tokenizer"], f"{path}, [tokenizer]")
    sources = tuple(
        _filled(SourceConfig, row, f"{path}, source {number}") for number, row in enumerate(rows, 1)
    )
    config = dataclasses.replace(config, tokenizer=tokenizer, sources=sources)
    _check(config, path)
    _check_tokenizer(config.tokenizer, path)
    for source in config.sources:
        _check_source(source, path)
    return config


def _filled(kind: type, table: Any, where: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if not isinstance(table, dict):
        raise DataError(f"config {where}: expected a table, found {table!r}")
    for key, value in table.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(fields)}"
            raise DataError(f"config {where}: unknown key {key!r}; {hint}")
        wanted = _plain_type(fields[key].type)
        expected = {int: int, float: (int, float), str: str, bool: bool}.get(wanted, object)
        if not isinstance(value, expected) or (isinstance(value, bool) and wanted is not bool):
            raise DataError(f"config {where}: {key} is {value!r}; give {fields[key].type}")
    for key, field in fields.items():
        if key not in table and field.default is dataclasses.MISSING:
            raise DataError(f"config {where}: {key} is missing")
    return kind(**table)


def _plain_type(annotation: Any) -> type:
    """int of ``int | None``."""
    return getattr(annotation, "__args__", (annotation,))[0]


def _check(config: Config, path: Path) -> None:
    for key in ("seq_len", "shard_tokens"):
        if getattr(config, key) < 1:
            raise DataError(f"config {path}: {key} is {getattr(config, key)}; give at least 1")
    if config.shard_tokens <= config.seq_len:
        raise DataError(
            f"config {path}: shard_tokens {config.shard_tokens} holds no sequence of seq_len "
            f"{config.seq_len}; raise it"
        )
    if config.seed < 0:
        raise DataError(f"config {path}: seed is {config.seed}; give 0 or more")
    if not 0 < config.validation_fraction < 1:
        raise DataError(
            f"config {path}: validation_fraction is {config.validation_fraction}; give a fraction "
            "between 0 and 1"
        )
    if not 0 <= config.max_quarantined <= 1:
        raise DataError(
            f"config {path}: max_quarantined is {config.max_quarantined}; give a fraction"
        )
    for key, choices in CHOICES.items():
        if getattr(config, key) not in choices:
            raise DataError(
                f"config {path}: {key} is {getattr(config, key)!r}; give {' or '.join(choices)}"
            )
    names = [source.name for source in config.sources]
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"config {path}: source {name!r} occurs twice")


def _check_tokenizer(tokenizer: TokenizerConfig, path: Path) -> None:
    given = [tokenizer.train_vocab_size, tokenizer.model, tokenizer.file]
    if sum(value is not None for value in given) != 1:
        raise DataError(
            f"config {path}: [tokenizer] needs train_vocab_size, model or file, exactly one"
        )
    if (tokenizer.file is None) != (tokenizer.eos is None):
        raise DataError(f"config {path}: [tokenizer] file and eos go together")
    if tokenizer.model is not None and tokenizer.model not in VOCABULARIES:
        raise DataError(
            f"config {path}: tokenizer.model is {tokenizer.model!r}; give one of: "
            f"{', '.join(VOCABULARIES)}"
        )
    if tokenizer.train_vocab_size is not None and tokenizer.train_vocab_size < 257:
        raise DataError(
            f"config {path}: train_vocab_size is {tokenizer.train_vocab_size}; 256 bytes and EOS "
            "need at least 257"
        )


def _check_source(source: SourceConfig, path: Path) -> None:
    where = f"config {path}: source {source.name!r}"
    if source.tokens < 1:
        raise DataError(f"{where} has tokens = {source.tokens}; give at least 1")
    if (source.dataset is None) == (source.files is None):
        raise DataError(
            f"{where}: give `dataset`, one of {', '.join(DATASETS)}, or `files` and `licence` for "
            "your own text"
        )
    if (source.files is None) != (source.licence is None):
        raise DataError(f"{where}: files and licence go together")
    if source.dataset is None:
        return
    if source.dataset not in DATASETS:
        near = difflib.get_close_matches(source.dataset, DATASETS, n=1) or list(DATASETS)
        raise DataError(
            f"{where}: unknown dataset {source.dataset!r}; did you mean {', '.join(near)}?"
        )
    variants = DATASETS[source.dataset].variants
    if source.variant is not None and not re.fullmatch(variants, source.variant):
        raise DataError(
            f"{where}: {source.dataset} has no variant {source.variant!r}; it matches {variants}"
        )
    if source.revision is not None and not re.fullmatch(r"[0-9a-f]{40}", source.revision):
        raise DataError(f"{where}: revision is {source.revision!r}; give 40 hex digits")
