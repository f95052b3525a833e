"""Compiled planners and kernels behind plain C ABIs, loaded on first use."""

from topoep_kernels.library import KernelsMissing, cpu_library

__all__ = ["KernelsMissing", "cpu_library"]
