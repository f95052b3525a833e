"""Files of Debian packages, without root and without changing the system.

apt-get gets its own state and cache below ours and the system's sources and keys; a package is
downloaded once, never installed, and read straight from its archive.
"""

import functools
import gzip
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from data.errors import DataError


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "topoep-titan" / "debian"


def unavailable() -> str | None:
    """Why this machine cannot give Debian packages, or None when it can."""
    lacking = [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]
    return f"{' and '.join(lacking)} not found (not a Debian system)" if lacking else None


def fetch(packages: list[str]) -> None:
    """Bring the packages into the cache. Raises DataError when apt-get cannot."""
    wanted = [package for package in packages if not archive(package).is_file()]
    if not wanted:
        return
    print(f"fetch: {', '.join(wanted)} from the system's Debian sources", flush=True)
    _update_lists()
    with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
        _apt_get("download", *wanted, cwd=scratch)
        for file in Path(scratch).glob("*.deb"):
            file.replace(archive(file.name.split("_")[0]))


def archive(package: str) -> Path:
    return cache_folder() / f"{package}.deb"


def version(package: str) -> str:
    """As the archive itself says."""
    return _dpkg_deb("--field", str(archive(package)), "Version").decode().strip()


def members(package: str, pattern: str) -> Iterator[tuple[str, bytes]]:
    """(path, content) of the regular files whose path matches, sorted; .gz is unpacked."""
    found = []
    process = subprocess.Popen(
        ["dpkg-deb", "--fsys-tarfile", str(archive(package))], stdout=subprocess.PIPE
    )
    with process, tarfile.open(fileobj=process.stdout, mode="r|") as tar:
        for member in tar:
            if member.isfile() and re.search(pattern, member.name):
                content = tar.extractfile(member).read()
                if member.name.endswith(".gz"):
                    content = gzip.decompress(content)
                found.append((member.name.removeprefix("./"), content))
        process.stdout.read()  # the padding, so that dpkg-deb ends in peace
    if process.returncode or not found:
        raise DataError(
            f"{archive(package)}: no file matches {pattern!r} (dpkg-deb exit "
            f"{process.returncode}); remove the archive and run again"
        )
    yield from sorted(found)


@functools.cache  # once in a run
def _update_lists() -> None:
    for place in ("apt/state/lists/partial", "apt/cache/archives/partial"):
        (cache_folder() / place).mkdir(parents=True, exist_ok=True)
    _apt_get("update", cwd=cache_folder())


def _apt_get(*arguments: str, cwd: str | Path) -> None:
    folder = cache_folder() / "apt"
    settings = (
        f"Dir::State={folder}/state",
        "Dir::State::status=/dev/null",  # what the system has installed does not matter
        f"Dir::Cache={folder}/cache",
        "APT::Sandbox::User=",  # the folder belongs to us, not to the user _apt
    )
    command = ["apt-get", "--quiet=2", *(f"--option={setting}" for setting in settings)]
    done = subprocess.run(
        [*command, *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit {done.returncode}"]
        raise DataError(
            f"apt-get {' '.join(arguments)}: {said[0]}; check the network and the system's package "
            "sources and run again, or take the source out of the config"
        )


def _dpkg_deb(*arguments: str) -> bytes:
    done = subprocess.run(["dpkg-deb", *arguments], capture_output=True, check=False)
    if done.returncode:
        raise DataError(f"dpkg-deb {' '.join(arguments)}: {done.stderr.decode().strip()}")
    return done.stdout
