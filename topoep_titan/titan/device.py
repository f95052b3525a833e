"""All that torchtitan 0.3.0 needs to train on a CPU with gloo; none of it acts where a GPU is.

``install`` is the one real patch: torchtitan copies its device's name and module at import and has
no seam for them, so it must run before any other torchtitan module is imported.
"""

import functools
import logging
import os
import resource
import sys
import types
import warnings
from collections.abc import Callable

import torch


def on_cpu() -> bool:
    return not torch.accelerator.is_available()


def install() -> None:
    """Make torchtitan's device the CPU where there is no accelerator; idempotent."""
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # torchao's registrations
    import torchtitan.tools.utils as utils

    if not on_cpu() or utils.device_type == "cpu":
        return
    late = {"torchtitan.trainer", "torchtitan.components.metrics", "torchtitan.distributed.utils"}
    if late & sys.modules.keys():
        raise RuntimeError(f"device.install() must run before {sorted(late & sys.modules.keys())}")
    utils.device_type, utils.device_module = "cpu", _CpuModule("topoep_cpu_device")
    # Known and handled: parameters are drawn whole (init.py), and the router is fp32 here anyway.
    for message in ("DTensor manual_seed", "DTensor random operators", "In CPU autocast"):
        warnings.filterwarnings("ignore", message=message)


def share_cores() -> None:
    """Ranks on a CPU share its cores; with more threads than their share they fight for them."""
    if on_cpu():
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // (local_ranks() or 1)))


def local_ranks() -> int | None:
    """Ranks on this machine under torchrun, None outside it."""
    value = os.environ.get("LOCAL_WORLD_SIZE")
    return int(value) if value else None


class _CpuModule(types.ModuleType):
    """The part of torch.cuda's surface that torchtitan calls, answered for the CPU."""

    def __getattr__(self, name: str):  # set_device, synchronize, device_count, Stream, ...
        return getattr(torch.cpu, name)

    @staticmethod
    def current_device() -> int:  # torch.cpu returns a string, which barrier() rejects
        return 0

    @staticmethod
    def get_device_name(device=None) -> str:
        return "CPU"

    @staticmethod
    def get_device_properties(device=None):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return types.SimpleNamespace(total_memory=total, name="CPU")

    @staticmethod
    def memory_stats(device=None) -> dict[str, int]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
        keys = ("active_bytes.all.peak", "reserved_bytes.all.peak")
        return dict.fromkeys(keys, peak) | {"num_alloc_retries": 0, "num_ooms": 0}

    @staticmethod
    def reset_peak_memory_stats(device=None) -> None:
        pass

    @staticmethod
    def empty_cache() -> None:
        pass


def gloo_safe(parallelize: Callable) -> Callable:
    """Wrap a ModelSpec's parallelize_fn: gloo has no PREMUL_SUM, so FSDP must reduce by SUM.

    And a pipeline stage sends contiguous rows both ways, which point-to-point calls insist on:
    under TP they would be a reduce-scatter's strided view.
    """
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule

    @functools.wraps(parallelize)
    def wrapped(model, **kwargs):
        model = parallelize(model, **kwargs)
        if dist.get_backend() == "gloo":
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
        if model.lm_head is None:  # another stage follows
            model.register_forward_hook(lambda module, inputs, output: output.contiguous())
        if model.tok_embeddings is None:  # it sends the gradient of its input back
            model.register_forward_pre_hook(
                lambda module, inputs: (_ContiguousGradient.apply(inputs[0]), *inputs[1:])
            )
        return model

    return wrapped


class _ContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.contiguous()
