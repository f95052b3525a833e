"""Which one-sided transports this machine can run, and what it lacks otherwise.

``symm_mem`` reads and writes peer-mapped memory over NVLink (TMA kernels); ``gin`` puts and signals
between nodes through NCCL's device API. Both implement ``transport.Transport`` with
``one_sided = True``: ``pull`` and ``push`` address the buffers of ``buffers.py`` directly, between
fences. Their device code belongs to the kernels; ``loopback.py`` is their stand-in for tests.
"""

import importlib.util
from pathlib import Path

import torch

LIBRARIES = {"symm_mem": "libtopoep_cuda.so", "gin": "libtopoep_gin.so"}


def missing_for(transport: str) -> str | None:
    """What this machine lacks for ``transport`` ("symm_mem" or "gin"), or None."""
    if not torch.cuda.is_available():
        return "a CUDA device"
    library = LIBRARIES[transport]
    spec = importlib.util.find_spec("topoep_kernels")
    folders = spec.submodule_search_locations if spec else []
    if not any((Path(folder) / library).exists() for folder in folders):
        return f"{library} beside the topoep_kernels package (built where nvcc is)"
    return "a host side that drives the library's kernels: not written yet"
