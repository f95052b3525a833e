"""Compiled planners and kernels behind plain C ABIs, loaded on first use; no torchtitan in here."""

from topoep_kernels.library import BUILD_COMMAND, KernelsMissing, cpu_library

__all__ = ["BUILD_COMMAND", "KernelsMissing", "cpu_library"]
