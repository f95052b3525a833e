"""The demo corpus: real text that ships with Debian and with Python, for four of the six sources.

English prose, Chinese text, Python and C++ code stand in for FineWeb, FineWeb-2 and StarCoderData,
which need the network and hundreds of gigabytes. No text is part of this repository: it is read
from the machine, or downloaded into a cache, when the corpus is built.
"""

import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from data import debian
from data.clean import manual_page, sections, whole
from data.documents import Part

PYTHON = f"CPython {sys.version.split()[0]}"


@dataclass(frozen=True)
class Package:
    """Files of a Debian package. The licence is what its copyright file says of them."""

    name: str
    licence: str
    pattern: str
    clean: Callable[[str], list[str]]

    def part(self) -> Part:
        origin = f"Debian {self.name} {debian.version(self.name)}"
        return Part(origin, self.licence, debian.members(self.name, self.pattern), self.clean)


@dataclass(frozen=True)
class Source:
    stands_in_for: str
    packages: tuple[Package, ...] = ()
    own: Callable[[], Part] | None = None  # what Python itself ships

    def parts(self) -> tuple[list[Part], str | None]:
        """The parts, and what is missing on a machine that has no Debian packages."""
        parts = [self.own()] if self.own else []
        missing = debian.unavailable() if self.packages else None
        if not missing:
            debian.fetch([package.name for package in self.packages])
            parts += [package.part() for package in self.packages]
        return parts, missing


def standard_library() -> Part:
    """Python's own modules, without tests, generated tables and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}

    def files() -> Iterator[tuple[str, bytes]]:
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root)
            # config-* and _sysconfigdata* are generated and hold this machine's paths
            generated = name.parts[0].startswith(("config-", "_sysconfigdata"))
            if not generated and not skipped.intersection(name.parts):
                yield name.as_posix(), path.read_bytes()

    return Part(f"{PYTHON} standard library", "PSF-2.0", files(), whole)


def language_reference() -> Part:
    """The chapters of Python's language reference that ``help()`` shows."""
    files = ((name, text.encode()) for name, text in sorted(topics.items()))
    return Part(f"{PYTHON} pydoc_data", "PSF-2.0", files, sections)


SOURCES = {
    "english": Source(
        "FineWeb",
        (
            Package("jargon-text", "public domain", r"/jargon\.txt\.gz$", sections),
            Package("git-doc", "GPL-2.0-only", r"/git-doc/.*\.txt$", sections),
        ),
        language_reference,
    ),
    "chinese": Source(
        "FineWeb-2 cmn_Hani",
        (
            Package("debian-reference-zh-cn", "GPL-2.0-or-later", r"\.zh-cn\.txt\.gz$", sections),
            Package(
                "manpages-zh",
                "GFDL-1.2-or-later; some pages GPL-2.0",
                r"/man/zh_CN/.*\.gz$",
                manual_page,
            ),
        ),
    ),
    "python": Source("StarCoderData python", own=standard_library),
    "cpp": Source(
        "StarCoderData cpp",
        (Package("libabsl-dev", "Apache-2.0", r"\.(h|inc)$", whole),),
    ),
}
