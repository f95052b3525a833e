"""What to prepare, read strictly from TOML: unknown and missing keys are errors."""

import dataclasses
import difflib
import glob
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

from data.clean import whole
from data.demo import SOURCES
from data.documents import Part
from data.errors import DataError


@dataclass(frozen=True)
class TokenizerConfig:
    """Either ``train_vocab_size`` or ``file`` and its ``eos`` token."""

    train_vocab_size: int | None = None
    file: str | None = None
    eos: str | None = None


@dataclass(frozen=True)
class SourceConfig:
    """A source of ``data/demo.py`` by name, or text files with their licence."""

    name: str
    tokens: int  # budget of the train split
    files: str | None = None  # glob, relative to the working directory; UTF-8, one document each
    licence: str | None = None

    @property
    def stands_in_for(self) -> str:
        return SOURCES[self.name].stands_in_for if self.files is None else self.name


@dataclass(frozen=True)
class Config:
    name: str  # the file's
    seq_len: int
    seed: int
    validation_fraction: float
    shard_tokens: int
    tokenizer: TokenizerConfig
    sources: tuple[SourceConfig, ...]

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
    return config


def source_parts(source: SourceConfig) -> tuple[list[Part], str | None]:
    """The source's files, and why some are missing on this machine (None: complete)."""
    if source.files is None:
        return SOURCES[source.name].parts()
    paths = sorted(
        path for path in map(Path, glob.glob(source.files, recursive=True)) if path.is_file()
    )
    if not paths:
        raise DataError(
            f"source {source.name!r}: no file matches {source.files!r}; correct `files`"
        )
    files = ((path.name, path.read_bytes()) for path in paths)
    return [Part(f"files of {source.name}", source.licence, files, whole)], None


def _filled(kind: type, table: Any, where: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if not isinstance(table, dict):
        raise DataError(f"config {where}: expected a table, found {table!r}")
    for key, value in table.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(fields)}"
            raise DataError(f"config {where}: unknown key {key!r}; {hint}")
        expected = {int: int, float: (int, float), str: str}.get(
            _plain_type(fields[key].type), object
        )
        if not isinstance(value, expected) or isinstance(value, bool):
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
    tokenizer = config.tokenizer
    if (tokenizer.train_vocab_size is None) == (tokenizer.file is None):
        raise DataError(f"config {path}: [tokenizer] needs train_vocab_size or file, exactly one")
    if (tokenizer.file is None) != (tokenizer.eos is None):
        raise DataError(f"config {path}: [tokenizer] file and eos go together")
    if tokenizer.train_vocab_size is not None and tokenizer.train_vocab_size < 257:
        raise DataError(
            f"config {path}: train_vocab_size is {tokenizer.train_vocab_size}; 256 bytes and EOS "
            "need at least 257"
        )
    names = [source.name for source in config.sources]
    for source in config.sources:
        if names.count(source.name) > 1:
            raise DataError(f"config {path}: source {source.name!r} occurs twice")
        if source.tokens < 1:
            raise DataError(
                f"config {path}: source {source.name!r} has tokens = {source.tokens}; "
                "give at least 1"
            )
        if source.files is None and source.name not in SOURCES:
            raise DataError(
                f"config {path}: unknown source {source.name!r}; give `files` and `licence` "
                f"for your own text, or one of: {', '.join(SOURCES)}"
            )
        if (source.files is None) != (source.licence is None):
            raise DataError(f"config {path}: source {source.name!r}: files and licence go together")
