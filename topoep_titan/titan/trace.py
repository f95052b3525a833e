"""The routing of every step on disk, for the simulator and for placement.

``trace/step-%06d.npz`` holds ``ids``, int16 (layers, R, T, K): the experts of each token of each
rank of one expert-parallel group, the first one, over all MoE layers in the model's order; and
``microbatch_tokens``, how T divides into microbatches, since each microbatch is planned by itself;
and ``ranks_per_node``, of the group's NVLink domains.
"""

import os
import re
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.tools.utils import device_type

from topoep_titan.titan.routed_experts import ReplicatedRoutedExperts


def write_trace(
    model_parts: list[nn.Module], folder: Path, step: int, *, microbatches: int
) -> None:
    """Write what the layers traced in the ``microbatches`` of ``step``; collective over all ranks.

    Rank 0 receives the ids of the contributing ranks, each once, and writes them. A pipeline stage
    learns its shapes from a run of its own before the first microbatch: left out.
    """
    layers = _drain(model_parts, microbatches)
    table = {
        number: (ranks, [tuple(t.shape) for t in traced], per_node)
        for number, ranks, traced, per_node in layers
    }
    tables: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(tables, table)
    # Every data-parallel replica has a group for each layer; pipeline stages have other layers.
    first = {
        number: min(t[number] for t in tables if number in t)
        for number in sorted(set().union(*tables))
    }
    mine = {number: torch.cat(traced) for number, _, traced, _ in layers}
    me = dist.get_rank()
    stacked = []
    for number, (ranks, shapes, _) in first.items():
        if me == 0:
            stacked.append([_receive(rank, mine.get(number), shapes) for rank in ranks])
        elif me in ranks:
            dist.send(mine[number].view(torch.uint8), 0)  # NCCL has no int16
    if me == 0:
        ids = np.stack([np.stack([part.cpu().numpy() for part in parts]) for parts in stacked])
        _, shapes, ranks_per_node = next(iter(first.values()))
        path = folder / "trace" / f"step-{step:06d}.npz"
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f".{os.getpid()}.npz")
        tokens = np.array([t for t, _ in shapes])
        np.savez(temporary, ids=ids, microbatch_tokens=tokens, ranks_per_node=ranks_per_node)
        temporary.replace(path)


def _drain(
    model_parts: list[nn.Module], last: int
) -> list[tuple[int, list[int], list[Tensor], int]]:
    """(layer number, global ranks of its expert-parallel group, traced ids, ranks of a node) of
    each layer here."""
    layers = []
    for part in model_parts:
        for name, module in part.named_modules():
            if isinstance(module, ReplicatedRoutedExperts):
                number = int(re.search(r"layers\.(\d+)\.", name).group(1))
                ranks = (
                    dist.get_process_group_ranks(module.group)
                    if module.group is not None
                    else [dist.get_rank()]
                )
                traced, per_node = module.trace[-last:], module.cluster.ranks_per_node
                layers.append((number, ranks, traced, per_node))
                module.trace = []
    return layers


def _receive(rank: int, own_TK: Tensor | None, shapes: list[tuple[int, int]]) -> Tensor:
    """int16 (T, K) of ``rank``, on rank 0."""
    if rank == 0:
        return own_TK
    tokens, top_k = sum(t for t, _ in shapes), shapes[0][1]
    buffer = torch.empty(tokens, 2 * top_k, dtype=torch.uint8, device=device_type)
    dist.recv(buffer, rank)
    return buffer.view(torch.int16)
