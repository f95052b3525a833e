"""The joint planner in rows: what a deduplicating dispatcher sends is what a plan costs.

With such a dispatcher a token's experts share rows, hidden vectors on the wire, within a rank and
within a node. A replica then removes a row only together with all others that the token needs
there, and a plan cannot be priced from counts. What a plan costs depends on which tokens use which
instances, and that only the tokens' own rank knows. So planning takes two steps:

    propose_rows   Every rank derives the same candidates from the counts: no replicas, then the
                   joint planner's plan at each row of ``PRICES``, which guess how much of a
                   crossing assignment is a row. It lets its tokens pick instances
                   (`planning.row_slots`) and counts their rows under each candidate.
    (all-gather of those counts, by the caller)
    finish_rows    Every rank prices each candidate exactly, and takes the cheapest, the first on
                   ties. So no plan is slower than no replicas, and none is chosen when what
                   placement left to gain does not pay for copies.

Letters: R ranks, M nodes, E experts, G slots, T tokens of one rank, K top-k, C candidates,
X = R + M rows to each rank and to each node.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from topoep_kernels.library import is_built
from torch import Tensor

from topoep_titan.cluster import Cluster, ModelDims
from topoep_titan.cluster.cost_model import UnitCosts, unit_costs
from topoep_titan.cluster.row_model import rows_to, time_of_rows
from topoep_titan.errors import InputError
from topoep_titan.planning import native
from topoep_titan.planning.joint import BALANCE_WEIGHT, joint
from topoep_titan.planning.plan import Plan, unbalanced_plan
from topoep_titan.planning.row_slots import pick_slots

# Per cent of the price of a far assignment, of a near one, and of a copy. The plain prices, then
# five chosen by forward selection from 40 on the coupled presets, placed and contiguous, and on
# skewed loads, seeds 10 and 11; those came within 0.3 % of the best of all 40.
PRICES = (
    (100, 100, 100),
    (100, 100, 300),
    (100, 40, 100),
    (35, 100, 300),
    (35, 40, 100),
    (10, 100, 50),
)
MOST_SLOTS = 2**15  # slots are int16


@dataclass(frozen=True)
class Proposal:
    """What one rank knows about each candidate; ``rows_CX`` is what the others need of it."""

    plans: tuple[Plan, ...]  # C, the same on every rank
    slots: tuple[Tensor, ...]  # C of int16 (T, K): of this rank's assignments
    rows_CX: Tensor  # int64: rows of this rank's tokens to each rank, then to each node


def propose_rows(
    ids_TK: Tensor,
    load_RE: Tensor,
    *,
    rank: int,
    dispatcher: str,
    main_E: Tensor,
    cluster: Cluster,
    model_dims: ModelDims,
    replica_slots: int,
    balance_weight: int = BALANCE_WEIGHT,
) -> Proposal:
    """The candidates, and this rank's rows under each.

    ``ids_TK``: the experts of this rank's tokens. ``load_RE`` and the rest: as every planner's.
    Raises InputError for more slots than int16 numbers.
    """
    plans = _candidates(load_RE, main_E, cluster, model_dims, replica_slots, balance_weight)
    return _proposal(plans, ids_TK, rank, dispatcher, cluster, model_dims)


def finish_rows(
    proposal: Proposal,
    rows_RCX: Tensor,
    *,
    dispatcher: str,
    main_E: Tensor,
    cluster: Cluster,
    model_dims: ModelDims,
) -> tuple[Plan, Tensor]:
    """The cheapest candidate, and the slots (T, K) of this rank's assignments under it, int16.

    ``rows_RCX``: the ``rows_CX`` of all ranks. The plan is bit-identical on all ranks.
    """
    best = _cheapest(proposal.plans, rows_RCX, dispatcher, main_E, cluster, model_dims)
    return proposal.plans[best], proposal.slots[best]


def plan_in_rows(
    ids_of_ranks: Sequence[Tensor],
    load_RE: Tensor,
    *,
    dispatcher: str,
    main_E: Tensor,
    cluster: Cluster,
    model_dims: ModelDims,
    replica_slots: int,
    balance_weight: int = BALANCE_WEIGHT,
) -> tuple[Plan, list[Tensor]]:
    """Both steps for all ranks in one process: the Plan, and the slots of each rank's assignments.

    ``ids_of_ranks``: (T, K) of each rank.
    """
    plans = _candidates(load_RE, main_E, cluster, model_dims, replica_slots, balance_weight)
    proposals = [
        _proposal(plans, ids_TK, rank, dispatcher, cluster, model_dims)
        for rank, ids_TK in enumerate(ids_of_ranks)
    ]
    rows_RCX = torch.stack([proposal.rows_CX for proposal in proposals])
    best = _cheapest(plans, rows_RCX, dispatcher, main_E, cluster, model_dims)
    return plans[best], [proposal.slots[best] for proposal in proposals]


def _candidates(
    load_RE: Tensor,
    main_E: Tensor,
    cluster: Cluster,
    model_dims: ModelDims,
    replica_slots: int,
    balance_weight: int,
) -> tuple[Plan, ...]:
    """No replicas, then the joint planner at each row of ``PRICES``, each different plan once."""
    slots = load_RE.shape[1] + load_RE.shape[0] * replica_slots
    if slots > MOST_SLOTS:
        raise InputError(
            f"{slots} slots are more than the {MOST_SLOTS} that int16 numbers; use fewer "
            "replica_slots"
        )
    costs, planner = unit_costs(cluster, model_dims), native.joint if is_built("cpu") else joint
    plans = [unbalanced_plan(load_RE, main_E, replica_slots)]
    for per_cent in PRICES:
        plan = planner(
            load_RE,
            main_E=main_E,
            cluster=cluster,
            model_dims=model_dims,
            replica_slots=replica_slots,
            balance_weight=balance_weight,
            costs=_scaled(costs, *per_cent),
        )
        if not any(_same(plan, other) for other in plans):
            plans.append(plan)
    return tuple(plans)


def _same(one: Plan, other: Plan) -> bool:
    return torch.equal(one.assignments_RG, other.assignments_RG) and torch.equal(
        one.expert_G, other.expert_G
    )


def _proposal(
    plans: tuple[Plan, ...],
    ids_TK: Tensor,
    rank: int,
    dispatcher: str,
    cluster: Cluster,
    model_dims: ModelDims,
) -> Proposal:
    pick = native.pick_slots if is_built("cpu") else pick_slots
    costs = unit_costs(cluster, model_dims)
    slots = [pick(plan, ids_TK, rank, cluster, costs, dispatcher) for plan in plans]
    per_rank = plans[0].expert_G.numel() // cluster.ranks
    rows = [rows_to(slot_TK.long() // per_rank, cluster, dispatcher) for slot_TK in slots]
    return Proposal(plans, tuple(slots), torch.stack(rows))


def _cheapest(
    plans: Sequence[Plan],
    rows_RCX: Tensor,
    dispatcher: str,
    main_E: Tensor,
    cluster: Cluster,
    model_dims: ModelDims,
) -> int:
    """Index of the candidate with the lowest time, the first on ties."""
    times = []
    for c, plan in enumerate(plans):
        load_R = plan.assignments_RG.long().sum(0).view(cluster.ranks, -1).sum(1)
        time = time_of_rows(
            plan.expert_G, load_R, rows_RCX[:, c],
            main_E=main_E, cluster=cluster, dims=model_dims, dispatcher=dispatcher,
        )  # fmt: skip
        times.append(time.total)
    return times.index(min(times))


def _scaled(costs: UnitCosts, far: int, near: int, copy: int) -> UnitCosts:
    return replace(
        costs,
        token_far=costs.token_far * far // 100,
        token_near=costs.token_near * near // 100,
        copy_far=costs.copy_far * copy // 100,
        copy_near=costs.copy_near * copy // 100,
    )
