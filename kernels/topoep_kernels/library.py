"""Finds and loads the compiled libraries.

An editable install keeps the Python files in the tree and puts the libraries into site-packages, so
they are looked for over the package's ``__path__``. ``TOPOEP_KERNELS_LIB`` names another folder.
A library that was built from other sources than those in the tree is refused: its functions may
take other arguments, which ctypes cannot see.
"""

import ctypes
import hashlib
import os
from functools import cache
from pathlib import Path

import topoep_kernels

BUILD_COMMAND = "cmake -S kernels -B build/dev -G Ninja && cmake --build build/dev"
SOURCES = Path(__file__).resolve().parents[1]  # kernels/, where the tree is at hand


class KernelsMissing(ImportError):
    """The compiled library is not built."""


@cache
def cpu_library() -> ctypes.CDLL:
    """``libtopoep_cpu.so``. Raises KernelsMissing; ImportError for a damaged or outdated one."""
    return _load("libtopoep_cpu.so")


@cache
def cuda_library() -> ctypes.CDLL:
    """``libtopoep_cuda.so``. Raises KernelsMissing; ImportError for a damaged or outdated one."""
    return _load("libtopoep_cuda.so")


@cache
def is_built(device_type: str) -> bool:
    """Whether the library for "cpu" or "cuda" is there. One that does not load raises."""
    try:
        cuda_library() if device_type == "cuda" else cpu_library()
    except KernelsMissing:
        return False
    return True


def find(name: str) -> Path | None:
    """The library's file, if it is there."""
    return next((folder / name for folder in _folders() if (folder / name).exists()), None)


def _folders() -> list[Path]:
    override = os.environ.get("TOPOEP_KERNELS_LIB")
    return [Path(folder) for folder in ([override] if override else topoep_kernels.__path__)]


def _load(name: str) -> ctypes.CDLL:
    path = find(name)
    if path is None:
        searched = ", ".join(map(str, _folders()))
        raise KernelsMissing(
            f"{name} is not in {searched}; build it with `pip install -e .` or "
            f"`{BUILD_COMMAND}`, or name the folder that holds it in TOPOEP_KERNELS_LIB"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(
            f"{path} cannot be loaded ({error}); build it again: {BUILD_COMMAND}"
        ) from None
    if (expected := _sources()) and _built_from(library) != expected:
        raise ImportError(
            f"{path} was built from other sources than {SOURCES}; build it again: {BUILD_COMMAND}"
        )
    return library


def _sources() -> str | None:
    """What CMake hands to csrc/sources.cpp. None for a wheel, which holds the library alone."""
    suffixes = {".cpp", ".cu", ".h"}
    files = [p for f in ("csrc", "include") for p in (SOURCES / f).rglob("*")]
    files = sorted((p for p in files if p.suffix in suffixes), key=Path.as_posix)
    hashes = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
    return hashlib.sha256(hashes.encode()).hexdigest() if files else None


def _built_from(library: ctypes.CDLL) -> str | None:
    try:
        function = library.topoep_sources
    except AttributeError:  # older than this check
        return None
    function.restype = ctypes.c_char_p
    return function().decode()
