"""Which files a source consists of: found on the hub or in a mirror, in a fixed order.

One Input is one task of the reading stage. ``cap`` bounds how much text is taken from each file,
so that a small budget does not read a terabyte: the files of a source share what it needs.
"""

import fnmatch
import glob
import json
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

from data.config import Config, SourceConfig
from data.errors import DataError
from data.remote import HttpFile, hub_files, hub_url, open_url
from data.sources import DATASETS, DOLMA_EXCLUDED, Dataset

BYTES_READ_A_TOKEN = 8  # tokens have 3.5 to 5 bytes; the rest is for what dedup removes
SMALLEST_CAP = 64 * 2**20  # bytes of text: below this a file is read whole


@dataclass(frozen=True)
class Input:
    number: int  # over all sources; also the order in which duplicates survive
    source: int
    name: str  # below the repository or the mirror
    place: str  # path or URL; of own text files the glob
    origin: str  # for the manifest
    licence: str
    cap: int  # bytes of UTF-8

    @property
    def stem(self) -> str:
        return f"{self.number:05d}"

    def stamp(self) -> list[int]:
        """Size and time of a local file: when they change, it is read again."""
        paths = sorted(glob.glob(self.place, recursive=True)) if "://" not in self.place else []
        stats = [os.stat(path) for path in paths]
        return [value for stat in stats for value in (stat.st_size, stat.st_mtime_ns)]


def list_inputs(config: Config) -> tuple[list[Input], list[str]]:
    """All inputs, and what the stand-ins lack on this machine. Raises DataError.

    Every source is looked up, and for the hub opened, before anything is read: a missing token
    shows at once.
    """
    inputs, missing = [], []
    for index, source in enumerate(config.sources):
        if source.files is not None:
            found = _own_files(source)
        elif source.mirror is not None:
            found = _mirror_files(source, missing)
        else:
            found = _hub_files(source)
        if not found and not missing:
            raise DataError(f"source {source.name!r} has no file")
        need = BYTES_READ_A_TOKEN * source.tokens
        cap = max(SMALLEST_CAP, -(-need // max(1, len(found))))
        for name, place, origin, licence in found:
            inputs.append(Input(len(inputs), index, name, place, origin, licence, cap))
    return inputs, missing


Found = list[tuple[str, str, str, str]]  # name, place, origin, licence


def _own_files(source: SourceConfig) -> Found:
    if not any(Path(path).is_file() for path in glob.iglob(source.files, recursive=True)):
        raise DataError(
            f"source {source.name!r}: no file matches {source.files!r}; correct `files`"
        )
    return [(source.files, source.files, f"files of {source.name}", source.licence)]


def _mirror_files(source: SourceConfig, missing: list[str]) -> Found:
    dataset, root = DATASETS[source.dataset], Path(source.mirror)
    if not root.is_dir():
        raise DataError(f"source {source.name!r}: no mirror at {root}; correct `mirror`")
    origins = {}  # of stand-ins: where each file's text really comes from
    if (root / "origins.json").exists():
        origins = json.loads((root / "origins.json").read_text())
        missing += [f"{source.name}: {reason}" for reason in origins.get("missing", [])]
    names = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    pattern = _pattern(source, dataset)
    if dataset.listed and pattern in names:
        listed = (root / pattern).read_text()
        wanted = {urlparse(url).path.lstrip("/") for url in _urls(listed)}
        if absent := sorted(wanted - names):
            raise DataError(
                f"source {source.name!r}: {pattern} lists {absent[0]}, which {root} lacks; "
                "complete the mirror, or shorten the list"
            )
        names = wanted
    else:
        pattern = "*.json.gz" if dataset.listed else pattern
        names = {name for name in names if fnmatch.fnmatch(name, pattern)}
        if not names and not origins.get("missing"):
            raise DataError(f"source {source.name!r}: no {pattern} in the mirror {root}")
    found = []
    for name in sorted(names):
        stand_in = origins.get("files", {}).get(name, {})
        origin = stand_in.get("origin", f"{dataset.repo}, mirrored: {name}")
        found.append((name, str(root / name), origin, stand_in.get("licence", dataset.licence)))
    return found


def _hub_files(source: SourceConfig) -> Found:
    dataset = DATASETS[source.dataset]
    pattern = _pattern(source, dataset)
    revision, names = hub_files(dataset.repo, source.revision or dataset.revision)
    names = [name for name in names if fnmatch.fnmatch(name, pattern)]
    if not names:
        raise DataError(
            f"source {source.name!r}: {dataset.repo} at {revision} has no {pattern}; "
            "correct `variant` or `revision`"
        )
    places = {name: hub_url(dataset.repo, revision, name) for name in names}
    if dataset.listed:
        with open_url(places[pattern], dataset.repo) as file:
            urls = _urls(file.read().decode())
        places = {urlparse(url).path.lstrip("/"): url for url in urls}
    # A file's address, not the server's root, which may answer 404 for ever (OLMo-core#565).
    HttpFile(next(iter(places.values())), None if dataset.listed else dataset.repo).close()
    return [
        (name, place, f"{dataset.repo}@{revision}: {name}", dataset.licence)
        for name, place in places.items()
    ]


def _pattern(source: SourceConfig, dataset: Dataset) -> str:
    return dataset.files(source.variant or dataset.variant)


def _urls(text: str) -> list[str]:
    urls = [line.strip() for line in text.splitlines() if line.strip()]
    return [url for url in urls if not DOLMA_EXCLUDED.intersection(urlparse(url).path.split("/"))]
