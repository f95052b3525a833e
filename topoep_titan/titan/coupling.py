"""How far tokens travel under the experts' placement: per MoE layer, over all ranks.

Counted on the last microbatch before a step is logged, on main instances: what a deduplicating
dispatcher sends when no replica serves anything.
"""

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.tools.utils import device_type

from topoep_titan.placement import placement_quality
from topoep_titan.titan.routed_experts import routed_layers

COUPLING = (
    "rows_per_token",  # distinct ranks of a token's experts
    "nodes_per_token",  # distinct nodes
    "locality",  # share of assignments whose expert is on the token's rank
)


def gather_coupling(model_parts: list[nn.Module], num_layers: int) -> dict[int, dict[str, float]]:
    """COUPLING of each MoE layer that ran; the mean over ranks. Collective."""
    totals = torch.zeros(num_layers, 1 + len(COUPLING), dtype=torch.float64)
    for layer, module in routed_layers(model_parts):
        ids_TK, module.last_ids_TK = module.last_ids_TK, None
        if ids_TK is not None and len(ids_TK):
            cluster, rank = module.cluster, module.transport.rank
            quality = placement_quality(
                ids_TK.cpu(), module.main_E, ranks=cluster.ranks,
                ranks_per_node=cluster.ranks_per_node, source_T=torch.full((len(ids_TK),), rank),
            )  # fmt: skip
            values = [1.0, quality.rows, quality.nodes, quality.locality]
            totals[layer] = torch.tensor(values, dtype=torch.float64)
    totals = totals.to(device_type)
    dist.all_reduce(totals)
    return {
        layer: dict(zip(COUPLING, (value / count for value in values)))
        for layer, (count, *values) in enumerate(totals.tolist())
        if count
    }
