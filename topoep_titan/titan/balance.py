"""How level the experts' load is, whatever ranks they are on: per MoE layer, over all ranks."""

import re

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.tools.utils import device_type

from topoep_titan.models.router import BalancedRouter
from topoep_titan.titan.routed_experts import ReplicatedRoutedExperts

BALANCE = (
    "expert_max_over_mean",  # busiest expert over the mean one: 1 is level, E / K collapsed
    "aux_loss",  # the layer's auxiliary loss, coefficient included; 0 where there is none
)


def gather_balance(
    model_parts: list[nn.Module], num_layers: int, *, steps: int
) -> dict[int, dict[str, float]]:
    """BALANCE of each MoE layer over the last ``steps`` steps; drains the routers' ``aux_sum``.

    Reads the records of the routed experts, so call it before they are drained. Collective.
    """
    layers = {}
    for part in model_parts:
        for name, module in part.named_modules():
            if isinstance(module, BalancedRouter | ReplicatedRoutedExperts):
                layer = int(re.search(r"layers\.(\d+)\.", name).group(1))
                layers.setdefault(layer, {})[type(module).__name__] = module
    experts = [each["ReplicatedRoutedExperts"].main_E.numel() for each in layers.values()]
    width = torch.tensor(max(experts, default=0), device=device_type)
    dist.all_reduce(width, op=dist.ReduceOp.MAX)  # a pipeline stage may have no MoE layer
    totals = torch.zeros(num_layers, 1 + int(width), dtype=torch.float64)
    for layer, modules in layers.items():
        router, routed = modules["BalancedRouter"], modules["ReplicatedRoutedExperts"]
        totals[layer, 0], router.aux_sum = float(router.aux_sum) / steps, 0.0
        if routed.transport.rank == 0:  # every rank of the group recorded the same load
            for record in routed.records:
                totals[layer, 1:] += record.load_RE.sum(0).cpu()
    totals = totals.to(device_type)
    dist.all_reduce(totals)
    return {
        layer: {
            "expert_max_over_mean": float(load_E.max() / load_E.mean()),
            "aux_loss": float(aux),
        }
        for layer, (aux, load_E) in enumerate((row[0], row[1:]) for row in totals.cpu())
        if load_E.any()
    }
