"""What a plan achieves: balance, locality, replicas and modelled time."""

from dataclasses import dataclass

import torch
from torch import Tensor

from topoep_titan.cluster import Cluster, ModelDims, modelled_time
from topoep_titan.cluster.cost_model import LayerTime
from topoep_titan.cluster.row_model import time_of_rows
from topoep_titan.planning.plan import Plan


@dataclass(frozen=True)
class PlanQuality:
    """Of a load without assignments: ratios 1 and fractions 0."""

    max_over_mean_before: float  # busiest over mean rank load, every assignment on its main
    max_over_mean: float  # the same under the plan
    inter_node_fraction: float  # of assignments: executed on another node than their source's
    replica_served_fraction: float  # of assignments: executed off their expert's main rank
    num_replicas: int
    modelled: LayerTime


def plan_quality(
    plan: Plan,
    *,
    main_E: Tensor,
    cluster: Cluster,
    model_dims: ModelDims,
    dispatcher: str = "alltoall",
    rows_RX: Tensor | None = None,
) -> PlanQuality:
    """Measure a plan on a cluster of R = ``plan.assignments_RG.shape[0]`` ranks.

    ``rows_RX``: what every rank sends under a deduplicating ``dispatcher``, as
    `cluster.row_model.rows_to` counts; the modelled time then counts rows.
    """
    ranks = plan.assignments_RG.shape[0]
    assignments_RG = plan.assignments_RG.long()
    sent_RR = assignments_RG.view(ranks, ranks, -1).sum(2)  # (source, executing rank)
    total = max(int(sent_RR.sum()), 1)
    node_R = torch.arange(ranks) // cluster.ranks_per_node
    rank_G = torch.arange(plan.expert_G.numel()) // (plan.expert_G.numel() // ranks)
    main_G = main_E.long()[plan.expert_G.long()]  # of an empty slot anything: it executes nothing
    on_main_G = rank_G == main_G
    if rows_RX is None:
        modelled = modelled_time(
            plan.expert_G, plan.assignments_RG, main_E=main_E, cluster=cluster, dims=model_dims
        )
    else:
        modelled = time_of_rows(
            plan.expert_G, sent_RR.sum(0), rows_RX,
            main_E=main_E, cluster=cluster, dims=model_dims, dispatcher=dispatcher,
        )  # fmt: skip
    before_R = torch.zeros(ranks, dtype=torch.int64).index_add_(0, main_G, assignments_RG.sum(0))
    return PlanQuality(
        max_over_mean_before=_max_over_mean(before_R),
        max_over_mean=_max_over_mean(sent_RR.sum(0)),
        inter_node_fraction=int(sent_RR[node_R[:, None] != node_R].sum()) / total,
        replica_served_fraction=int(assignments_RG[:, ~on_main_G].sum()) / total,
        num_replicas=plan.num_replicas,
        modelled=modelled,
    )


def _max_over_mean(load_R: Tensor) -> float:
    total = int(load_R.sum())
    return int(load_R.max()) * load_R.numel() / total if total else 1.0
