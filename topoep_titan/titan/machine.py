"""What this machine has for training, and what it lacks and why: devices, libraries, transports."""

import os
import platform
import shutil
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from topoep_kernels.library import BUILD_COMMAND, cpu_library, find

from topoep_titan.execution.one_sided import missing_for
from topoep_titan.titan.deepep import deepep_missing
from topoep_titan.titan.device import on_cpu
from topoep_titan.titan.float8 import (
    float8_experts_missing,
    float8_missing,
    has_float8_matmuls,
)

PACKAGES = ("torch", "torchtitan", "torchao", "numpy")


def machine_report() -> dict[str, Any]:
    """Plain values. Each check is ``{"ok": bool, "what": text}``; ``ok`` false names the reason."""
    return {
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in PACKAGES},
        "devices": _devices(),
        "peer_groups": peer_groups(),
        "checks": {
            "kernels: CPU library": _cpu_library(),
            "kernels: CUDA library": _device_library("libtopoep_cuda.so", "nvcc"),
            "kernels: GIN library": _device_library("libtopoep_gin.so", "nvcc and NCCL's headers"),
            "network: NCCL": _nccl(),
            "transport: collective": _check(dist.is_available(), "torch.distributed is not built"),
            "transport: symm_mem": _transport("symm_mem"),
            "transport: gin": _transport("gin"),
            "float8: linears": _float8(float8_missing(), has_float8_matmuls()),
            "float8: experts": _float8(float8_experts_missing(), not on_cpu()),
            "dispatcher: deepep": _check(deepep_missing() is None, f"needs {deepep_missing()}"),
        },
    }


def peer_groups() -> list[list[int]]:
    """Groups of this machine's GPUs that all map each other's memory, over NVLink or PCIe."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    groups: list[list[int]] = []
    for gpu in range(count):
        for group in groups:
            if all(torch.cuda.can_device_access_peer(gpu, other) for other in group):
                group.append(gpu)
                break
        else:
            groups.append([gpu])
    return groups


def _devices() -> list[str]:
    if not torch.accelerator.is_available():
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return [f"CPU, {os.cpu_count()} cores, {memory / 2**30:.0f} GiB"]
    if not torch.cuda.is_available():
        return [f"{torch.accelerator.current_accelerator()}, {torch.accelerator.device_count()}"]
    every = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"{each.name}, {each.total_memory / 2**30:.1f} GiB" for each in every]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _check(ok: bool, why: str, what: str = "available") -> dict[str, Any]:
    return {"ok": ok, "what": what if ok else why}


def _cpu_library() -> dict[str, Any]:
    try:
        return _check(True, "", cpu_library()._name)
    except ImportError as error:
        return _check(False, f"{error}; planners then run in Python")


def _device_library(name: str, needs: str) -> dict[str, Any]:
    if path := find(name):
        return _check(True, "", str(path))
    if shutil.which("nvcc") is None:
        return _check(False, f"not built: it needs {needs}, and nvcc is not on PATH")
    return _check(False, f"not built: with {needs}, `{BUILD_COMMAND}` builds it")


def _nccl() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return _check(False, "no CUDA device; ranks talk through gloo")
    if not dist.is_nccl_available():
        return _check(False, "torch was built without NCCL")
    return _check(True, "", "NCCL " + ".".join(map(str, torch.cuda.nccl.version())))


def _transport(name: str) -> dict[str, Any]:
    missing = missing_for(name)
    return _check(missing is None, f"needs {missing}")


def _float8(missing: str | None, on_device: bool) -> dict[str, Any]:
    if missing:
        return _check(False, f"needs {missing}")
    return _check(on_device, "no device with float8 matmuls; emulated on the CPU")
