"""What a plan achieves, in the figures that every report uses."""

from dataclasses import dataclass

import torch
from torch import Tensor

from topoep_titan.planning.plan import Plan


@dataclass(frozen=True)
class PlanMeasures:
    max_over_mean_before: float  # busiest over mean rank load, every assignment on its main
    max_over_mean: float  # the same under the plan
    inter_node_fraction: float  # of assignments: executed on another node than their source's
    replica_served_fraction: float  # of assignments: executed in a replica slot
    num_replicas: int


def measure_plan(plan: Plan, load_RE: Tensor, main_E: Tensor, ranks_per_node: int) -> PlanMeasures:
    """Figures of one plan (paper, Figures 10, 13 and 16). All fractions of no assignments are 0."""
    ranks, experts = load_RE.shape
    mains = experts // ranks
    sent_RRP = plan.assignments_RG.long().view(ranks, ranks, -1)
    total = int(sent_RRP.sum())
    before_R = torch.zeros(ranks, dtype=torch.int64)
    before_R.index_add_(0, main_E.long(), load_RE.sum(0).long())
    node = torch.arange(ranks) // ranks_per_node
    far = node[:, None] != node[None, :]
    return PlanMeasures(
        max_over_mean_before=_max_over_mean(before_R),
        max_over_mean=_max_over_mean(sent_RRP.sum((0, 2))),
        inter_node_fraction=int((sent_RRP.sum(2) * far).sum()) / max(total, 1),
        replica_served_fraction=int(sent_RRP[:, :, mains:].sum()) / max(total, 1),
        num_replicas=plan.num_replicas,
    )


def _max_over_mean(load_R: Tensor) -> float:
    total = int(load_R.sum())
    return int(load_R.max()) * load_R.numel() / total if total else 1.0
