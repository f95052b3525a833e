"""Plan drawn or recorded expert sets, the way a deduplicating dispatcher would carry them.

Letters: R ranks, M nodes, T tokens of one rank, K top-k, E experts, X = R + M.
"""

import torch
from torch import Tensor

from topoep_titan.cluster import Cluster, ModelDims
from topoep_titan.cluster.row_model import row_traffic, rows_to
from topoep_titan.errors import InputError
from topoep_titan.planning import planner_named
from topoep_titan.planning.plan import Plan, cut_assignments
from topoep_titan.planning.rows import plan_in_rows
from topoep_titan.planning.workloads import load_of

DISPATCHERS = ("dedup", "dedup-node")


def check_sets(ids_RTK: Tensor, load_RE: Tensor) -> None:
    """Raise InputError unless these sets (`recorded.check_routing`) are what ``load_RE`` counts."""
    ranks, experts = load_RE.shape
    if ids_RTK.ndim != 3 or len(ids_RTK) != ranks:
        raise InputError(
            f"expert ids of shape {tuple(ids_RTK.shape)} do not go with a load of {ranks} ranks; "
            "give (ranks, tokens, top-k), as `topoep workload --ids-out` writes"
        )
    if int(ids_RTK.max()) >= experts or not torch.equal(load_of(ids_RTK, experts), load_RE):
        raise InputError("the expert ids do not add up to the load; give both of one draw")


def plan_sets(
    name: str,
    ids_RTK: Tensor,
    load_RE: Tensor,
    *,
    dispatcher: str,
    main_E: Tensor,
    cluster: Cluster,
    model_dims: ModelDims,
    replica_slots: int,
) -> tuple[Plan, Tensor]:
    """The plan of planner ``name``, ``joint`` in rows; and int64 (R, X), each rank's rows under it.

    The other planners count assignments, and their tokens are cut in order (`Plan`'s cut rule).
    """
    settings = {"main_E": main_E, "cluster": cluster, "model_dims": model_dims}
    if name == "joint":
        plan, slots = plan_in_rows(
            list(ids_RTK), load_RE, dispatcher=dispatcher, replica_slots=replica_slots, **settings
        )
    else:
        plan = planner_named(name)(load_RE, replica_slots=replica_slots, **settings)
        slots = [cut_assignments(plan, ids_TK, rank) for rank, ids_TK in enumerate(ids_RTK)]
    per_rank = plan.expert_G.numel() // cluster.ranks
    rows = [rows_to(slot_TK.long() // per_rank, cluster, dispatcher) for slot_TK in slots]
    return plan, torch.stack(rows)


def rows_by_link(rows_RX: Tensor, cluster: Cluster, dispatcher: str) -> dict[str, int]:
    """Rows on the wire in one dispatch, of all ranks together, by class of link."""
    far_RR, near_RR = row_traffic(rows_RX, cluster, dispatcher)
    return {"far": int(far_RR.sum()), "near": int(near_RR.sum())}
