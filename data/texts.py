"""The stand-ins' texts: which packages, which files of them, and how they become documents."""

import io
import json
import re
import subprocess
import sys
import sysconfig
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from data import debian, pypi
from data.clean import manual_page, novel, paper, sections, whole
from data.errors import DataError

PYTHON = f"CPython {sys.version.split()[0]}"
PROBLEMS = 1_500  # of the mathematics stand-in
MATH_PACKAGE, MATH_LICENCE = "mathgenerator==1.5.0", "MIT"


@dataclass(frozen=True)
class Text:
    """Files of a Debian package, or of Python. The licence is what the package says of them."""

    origin: str
    licence: str
    clean: Callable[[str], list[str]]
    package: str | None = None
    pattern: str = ""
    own: Callable[[], Iterable[tuple[str, bytes]]] | None = None
    unpack: Callable[[Iterable[tuple[str, bytes]]], Iterable[tuple[str, bytes]]] = iter

    def described(self) -> str:
        """With the version."""
        return f"{self.origin} {debian.version(self.package)}" if self.package else self.origin

    def documents(self) -> Iterator[tuple[str, str]]:
        """(path, text); what is not UTF-8 is left out."""
        files = debian.members(self.package, self.pattern) if self.package else self.own()
        for path, content in self.unpack(files):
            try:
                text = content.decode("utf-8-sig")
            except UnicodeDecodeError:
                continue
            for number, document in enumerate(self.clean(text)):
                yield (f"{path}#{number}" if number else path), document


def packaged(
    package: str, licence: str, pattern: str, clean: Callable, unpack: Callable = iter
) -> Text:
    return Text(f"Debian {package}", licence, clean, package, pattern, None, unpack)


def problems() -> tuple[str, str, list[tuple[str, str]]]:
    """Origin, licence and (problem, answer) rows of a seeded generator, no two problems alike."""
    wheel = pypi.wheel(MATH_PACKAGE)
    done = subprocess.run(
        [sys.executable, "-c", _GENERATE, str(PROBLEMS)],
        env={"PYTHONPATH": str(wheel), "PYTHONHASHSEED": "0", "PATH": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:]
        raise DataError(f"{MATH_PACKAGE} fails: {said}; take the source dapo out of the config")
    rows = [tuple(row) for row in json.loads(done.stdout.splitlines()[-1])]
    return f"PyPI {MATH_PACKAGE.replace('==', ' ')}, seed 0", MATH_LICENCE, rows


# In a process of its own: the package draws from the global generator. A few of its makers fail
# or take long for some draws of theirs; those draws are left out.
_GENERATE = """
import json, random, sys
from mathgenerator import getGenList
random.seed(0)
makers = [(entry[1], entry[2]) for entry in getGenList()]
rows = {}
for draw in range(20 * int(sys.argv[1])):
    title, maker = makers[draw % len(makers)]
    try:
        problem, answer = maker()
    except Exception:
        continue
    rows.setdefault(f"{title}. {problem}", str(answer))
    if len(rows) == int(sys.argv[1]):
        break
print(json.dumps(list(rows.items())))
"""


def standard_library() -> Iterator[tuple[str, bytes]]:
    """Python's own modules, without tests, generated tables and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        # config-* and _sysconfigdata* are generated and hold this machine's paths
        generated = name.parts[0].startswith(("config-", "_sysconfigdata"))
        if not generated and not skipped.intersection(name.parts):
            yield f"cpython/{name.as_posix()}", path.read_bytes()


def language_reference() -> Iterator[tuple[str, bytes]]:
    """The chapters of Python's language reference that ``help()`` shows."""
    for name, text in sorted(topics.items()):
        yield f"cpython/pydoc_data/{name}", text.encode()


def java_sources(files: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
    """Out of the src.zip of each demonstration."""
    for path, content in files:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith(".java"):
                    yield f"{path.split('/')[-2]}/{name}", archive.read(name)


def r_strings(files: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
    """The character vectors of an R package's lazy-load database, one text a line each.

    The file is a row of objects: uncompressed length (4 bytes), then a zlib stream that holds R's
    XDR serialisation, where a string is flags 0x...09, length (4 bytes), bytes.
    """
    for path, content in files:
        number = 0
        while len(content) > 4:
            stream = zlib.decompressobj()
            data, content = stream.decompress(content[4:]), stream.unused_data
            lines = []
            for match in re.finditer(rb"\x00\x04\x00\x09(....)", data, re.DOTALL):
                length = int.from_bytes(match[1])
                if length < 2**20:
                    lines.append(data[match.end() : match.end() + length])
            if len(lines) > 1000:  # a novel, not an index
                yield f"{path}/{number}", b"\n".join(lines)
            number += 1


DOC = r"/doc/.*\.(Rnw|Rmd)(\.gz)?$"
GPL = "GPL-2.0-or-later"
STAND_INS = {
    "fineweb": (
        packaged("jargon-text", "public domain", r"/jargon\.txt\.gz$", sections),
        packaged("git-doc", "GPL-2.0-only", r"/git-doc/.*\.txt$", sections),
        Text(f"{PYTHON} pydoc_data", "PSF-2.0", sections, own=language_reference),
    ),
    "fineweb2": (
        packaged("debian-reference-zh-cn", GPL, r"\.zh-cn\.txt\.gz$", sections),
        packaged(
            "manpages-zh",
            "GFDL-1.2-or-later; some pages GPL-2.0",
            r"/man/zh_CN/.*\.gz$",
            manual_page,
        ),
    ),
    "dolma": (
        packaged("r-cran-janeaustenr", "public domain", r"/data/Rdata\.rdb$", novel, r_strings),
    ),
    "starcoderdata-python": (
        Text(f"{PYTHON} standard library", "PSF-2.0", whole, own=standard_library),
    ),
    "starcoderdata-cpp": (packaged("libabsl-dev", "Apache-2.0", r"\.(h|inc)$", whole),),
    "starcoderdata-rust": (
        packaged("rust-src", "MIT OR Apache-2.0", r"/library/(core|alloc|std)/src/.*\.rs$", whole),
    ),
    "starcoderdata-java": (
        packaged("openjdk-17-demo", "BSD-3-Clause", r"/src\.zip$", whole, java_sources),
    ),
    "pes2o": (
        packaged("r-cran-strucchange", "GPL", DOC, paper),
        packaged("r-cran-zoo", GPL, DOC, paper),
        packaged("r-cran-vcd", "GPL-2.0-only", DOC, paper),
        packaged("r-cran-sandwich", "GPL-2.0-only", DOC, paper),
        packaged("r-cran-spdep", GPL, DOC, paper),
    ),
}
