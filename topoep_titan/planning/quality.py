"""What a plan achieves: balance, locality, replicas and modelled time."""

from dataclasses import dataclass

import torch
from torch import Tensor

from topoep_titan.cluster import Cluster, ModelDims, modelled_time
from topoep_titan.cluster.cost_model import LayerTime
from topoep_titan.planning.plan import Plan


@dataclass(frozen=True)
class PlanQuality:
    """Of a load without assignments: ratio 1 and fractions 0."""

    max_over_mean: float  # busiest over mean rank load
    inter_node_fraction: float  # of assignments: executed on another node than their source's
    replica_served_fraction: float  # of assignments: executed off their expert's main rank
    num_replicas: int
    modelled: LayerTime


def plan_quality(
    plan: Plan, *, main_E: Tensor, cluster: Cluster, model_dims: ModelDims
) -> PlanQuality:
    """Measure a plan on a cluster of R = ``plan.assignments_RG.shape[0]`` ranks."""
    ranks = plan.assignments_RG.shape[0]
    assignments_RG = plan.assignments_RG.long()
    sent_RR = assignments_RG.view(ranks, ranks, -1).sum(2)  # (source, executing rank)
    total = max(int(sent_RR.sum()), 1)
    node_R = torch.arange(ranks) // cluster.ranks_per_node
    rank_G = torch.arange(plan.expert_G.numel()) // (plan.expert_G.numel() // ranks)
    on_main_G = rank_G == main_E.long()[plan.expert_G.long()]  # an empty slot executes nothing
    busiest = int(sent_RR.sum(0).max())
    return PlanQuality(
        max_over_mean=busiest * ranks / total if busiest else 1.0,
        inter_node_fraction=int(sent_RR[node_R[:, None] != node_R].sum()) / total,
        replica_served_fraction=int(assignments_RG[:, ~on_main_G].sum()) / total,
        num_replicas=plan.num_replicas,
        modelled=modelled_time(
            plan.expert_G, plan.assignments_RG, main_E=main_E, cluster=cluster, dims=model_dims
        ),
    )
