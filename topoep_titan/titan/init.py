"""Layout-invariant initialisation: the same parameters on any number of ranks.

On a CPU mesh DTensor has no random-number tracker: every rank draws the same numbers for its own
shard, so shards (experts, router rows) come out as copies of each other and every rank looks
perfectly balanced. Instead, each parameter is drawn whole from a seed made of its name, and a rank
keeps its own slice. Pipeline stages agree too, since names do not depend on the stage.
"""

import functools
import zlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.protocols.module import Module


def make_layout_invariant(model_config: Module.Config, seed: int) -> None:
    """Wrap every ``param_init`` in the tree: it draws the whole parameter, seeded by its name."""
    for name, config, _, _ in model_config.traverse(Module.Config, recurse=True):
        if config.param_init:
            config.param_init = {
                key: fn
                if getattr(fn, "__name__", "") == "skip_param_init"
                else _draw_whole(fn, zlib.crc32(f"{seed}/{name}.{key}".encode()))
                for key, fn in config.param_init.items()
            }


def _draw_whole(fn: Callable[[Tensor], object], seed: int) -> Callable[[Tensor], None]:
    fn = getattr(fn, "whole_parameter_fn", fn)  # re-seeding replaces an earlier wrap

    @functools.wraps(fn if not isinstance(fn, functools.partial) else fn.func)
    def init(parameter: Tensor) -> None:
        devices = [parameter.device] if parameter.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            if not isinstance(parameter, DTensor):
                fn(parameter)
                return
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            fn(whole)
            mesh = parameter.device_mesh
            replicated = [Replicate()] * mesh.ndim
            parameter.copy_(DTensor.from_local(whole, mesh, replicated, run_check=False))

    init.whole_parameter_fn = fn
    return init
