"""Finds and loads the compiled libraries.

An editable install keeps the Python files in the tree and puts the libraries into site-packages, so
they are looked for over the package's ``__path__``. ``TOPOEP_KERNELS_LIB`` names another folder.
"""

import ctypes
import os
from functools import cache
from pathlib import Path

import topoep_kernels

BUILD_COMMAND = "cmake -S kernels -B build/dev -G Ninja && cmake --build build/dev"


class KernelsMissing(ImportError):
    """The compiled library is not built."""


@cache
def cpu_library() -> ctypes.CDLL:
    """``libtopoep_cpu.so``. Raises KernelsMissing, or ImportError when it cannot be loaded."""
    return _load("libtopoep_cpu.so")


@cache
def cuda_library() -> ctypes.CDLL:
    """``libtopoep_cuda.so``. Raises KernelsMissing, or ImportError when it cannot be loaded."""
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
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(
            f"{path} cannot be loaded ({error}); build it again: {BUILD_COMMAND}"
        ) from None
