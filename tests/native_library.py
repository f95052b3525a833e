"""The compiled CPU library for tests: built when it is missing, skipped only without a compiler."""

import shutil
import subprocess
from pathlib import Path

import pytest
from topoep_kernels.library import BUILD_COMMAND, KernelsMissing, cpu_library

ROOT = Path(__file__).resolve().parents[1]


def build_or_skip() -> None:
    try:
        cpu_library()
    except KernelsMissing:
        if not (shutil.which("cmake") and (shutil.which("c++") or shutil.which("g++"))):
            pytest.skip("the CPU library is not built, and there is no CMake or C++ compiler")
        subprocess.run(BUILD_COMMAND, shell=True, cwd=ROOT, check=True)
