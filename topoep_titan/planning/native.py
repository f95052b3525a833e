"""Calls the compiled CPU planners: cluster and widths become integer prices, tensors become a Plan.

Same signatures and bit for bit the same plans as the Python references beside it.
"""

import dataclasses
from functools import cache

import torch
from topoep_kernels import ops
from torch import Tensor

from topoep_titan.cluster import Cluster, ModelDims
from topoep_titan.cluster.cost_model import UnitCosts, unit_costs
from topoep_titan.planning.joint import BALANCE_WEIGHT, ROUNDS, TABLE
from topoep_titan.planning.plan import Plan


def topoep(
    load_RE: Tensor,
    *,
    main_E: Tensor,
    cluster: Cluster,
    model_dims: ModelDims,
    replica_slots: int,
) -> Plan:
    """`planning.topoep.topoep`, compiled. Raises ValueError for a malformed load or placement."""
    costs = unit_costs(cluster, model_dims)
    return Plan(
        *ops.plan_topoep(
            load_RE,
            main_E,
            replica_slots=replica_slots,
            ranks_per_node=cluster.ranks_per_node,
            token_bytes=model_dims.token_bytes,
            expert_bytes=model_dims.expert_bytes,
            token_far=costs.token_far,
            token_near=costs.token_near,
        )
    )


def joint(
    load_RE: Tensor,
    *,
    main_E: Tensor,
    cluster: Cluster,
    model_dims: ModelDims,
    replica_slots: int,
    balance_weight: int = BALANCE_WEIGHT,
    rows: int = len(TABLE),
    rounds: int = ROUNDS,
    costs: UnitCosts | None = None,
) -> Plan:
    """`planning.joint.joint`, compiled. Raises ValueError for a malformed load or placement."""
    costs = costs or unit_costs(cluster, model_dims)
    return Plan(
        *ops.plan_joint(
            load_RE,
            main_E,
            replica_slots=replica_slots,
            ranks_per_node=cluster.ranks_per_node,
            token_bytes=model_dims.token_bytes,
            expert_bytes=model_dims.expert_bytes,
            prices=dataclasses.astuple(costs),
            balance_weight=balance_weight,
            table=recipes(rows),
            rounds=rounds,
        )
    )


def pick_slots(
    plan: Plan, ids_TK: Tensor, rank: int, cluster: Cluster, costs: UnitCosts, dispatcher: str
) -> Tensor:
    """`row_slots.pick_slots`, compiled. Raises ValueError when the plan is for other ids."""
    return ops.pick_slots(
        ids_TK,
        plan.expert_G,
        plan.assignments_RG[rank],
        rank=rank,
        ranks=cluster.ranks,
        ranks_per_node=cluster.ranks_per_node,
        experts=int(plan.expert_G.max()) + 1,
        relayed=dispatcher == "dedup-node",
        token_far=costs.token_far,
        token_near=costs.token_near,
    )


@cache
def recipes(rows: int) -> Tensor:
    """int32 (rows, 5): the first rows of the joint planner's table."""
    return torch.tensor([dataclasses.astuple(recipe) for recipe in TABLE[:rows]], dtype=torch.int32)
