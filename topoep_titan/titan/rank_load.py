"""What every rank of the expert-parallel groups executed: per MoE layer, before and under plans.

Letters: L MoE layers, R ranks of a group, E experts.
"""

import re

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.tools.utils import device_type

from topoep_titan.execution.layer import LayerRecord
from topoep_titan.titan.routed_experts import ReplicatedRoutedExperts

LOADS = ("rank_load_before", "rank_load")  # of each rank over the mean rank
CELL = 12  # pixels of one rank and layer
# RGB: at 1, at the most, at 0, and between the halves
LEVEL, BUSY, IDLE, GAP = (250, 250, 248), (221, 115, 48), (59, 134, 209), (91, 101, 112)


def gather_rank_loads(
    model_parts: list[nn.Module], num_layers: int
) -> dict[int, dict[str, list[float]]]:
    """LOADS of each MoE layer, over the recorded microbatches and all groups.

    Reads the records of the routed experts, so call it before they are drained. Collective.
    """
    layers = {
        int(re.search(r"layers\.(\d+)\.", name).group(1)): module
        for part in model_parts
        for name, module in part.named_modules()
        if isinstance(module, ReplicatedRoutedExperts)
    }
    ranks = torch.tensor(max((m.transport.ranks for m in layers.values()), default=0))
    ranks = ranks.to(device_type)
    dist.all_reduce(ranks, op=dist.ReduceOp.MAX)  # a pipeline stage may have no MoE layer
    totals = torch.zeros(num_layers, 2, int(ranks), dtype=torch.int64)
    for layer, module in layers.items():
        if module.transport.rank == 0:  # every rank of the group recorded the same plans
            for record in module.records:
                totals[layer] += executed(record, int(ranks))
    totals = totals.to(device_type)
    dist.all_reduce(totals)
    return {
        layer: {
            name: (load_R / load_R.mean()).round(decimals=3).tolist()
            for name, load_R in zip(LOADS, both.double())
        }
        for layer, both in enumerate(totals.cpu())
        if both.any()
    }


def executed(record: LayerRecord, ranks: int) -> Tensor:
    """int64 (2, R): assignments of each rank if all ran on their mains, and under the plan."""
    load_E, main_E = record.load_RE.sum(0).long().cpu(), record.main_E.long().cpu()
    before_R = torch.zeros(ranks, dtype=torch.int64).index_add_(0, main_E, load_E)
    after_R = record.plan.assignments_RG.long().sum(0).view(ranks, -1).sum(1).cpu()
    return torch.stack([before_R, after_R])


def picture(layers: list[dict[str, list[float]]]) -> np.ndarray:
    """uint8 (height, width, 3): a row a layer, a column a rank; before the plan on the left."""
    halves = [np.array([layer[name] for layer in layers]) for name in LOADS]
    most = max(2.0, *(half.max() for half in halves))
    gap_L1 = np.ones((len(layers), 1))
    load = np.concatenate([halves[0], gap_L1, halves[1]], axis=1)[..., None]
    over, under = (load - 1).clip(0) / (most - 1), (1 - load).clip(0)
    level, busy, idle = (np.array(colour) for colour in (LEVEL, BUSY, IDLE))
    colours = level + over * (busy - level) + under * (idle - level)
    colours[:, halves[0].shape[1]] = GAP
    return colours.round().astype(np.uint8).repeat(CELL, 0).repeat(CELL, 1)
