"""The layer time when a dispatcher deduplicates: token ports count rows, vectors on the wire.

    alltoall     a row for each assignment
    dedup        a row for each token and rank that executes some of its assignments
    dedup-node   a row for each token and node, to the relay (the rank of that node with the
                 source's local index), and from the relay one for each rank of its node

So which token goes where matters, not only how many: the law takes every assignment's slot. All
else is the closed form of `cluster.cost_model`. What stays on a rank costs nothing, also where the
relay itself executes, and a row to the own node needs no first hop.

Letters: R ranks, M nodes of g ranks, X = R + M, G slots, T tokens of one rank, K top-k.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from topoep_titan.cluster.cost_model import (
    LayerTime,
    ModelDims,
    copies_between,
    link_masks,
    port_time,
    unit_costs,
)
from topoep_titan.cluster.topology import Cluster
from topoep_titan.errors import InputError

DISPATCHERS = ("alltoall", "dedup", "dedup-node")


def modelled_row_time(
    expert_G: Tensor,
    slots_of_ranks: Sequence[Tensor],
    *,
    main_E: Tensor,
    cluster: Cluster,
    dims: ModelDims,
    dispatcher: str,
) -> LayerTime:
    """Price the slots (T, K) that execute each source rank's assignments, forward and backward.

    ``expert_G``: the expert in each slot. Raises InputError for an unknown dispatcher, and unless
    there is one tensor of slots for each rank of the cluster.
    """
    if len(slots_of_ranks) != cluster.ranks:
        raise InputError(
            f"{len(slots_of_ranks)} tensors of slots for the {cluster.ranks} ranks of cluster "
            f"{cluster.name!r}; give one for each rank"
        )
    ranks, per_rank = cluster.ranks, expert_G.numel() // cluster.ranks
    executing = [slot_TK.long() // per_rank for slot_TK in slots_of_ranks]
    rows_RX = torch.stack([rows_to(rank_TK, cluster, dispatcher) for rank_TK in executing])
    load_R = sum(torch.bincount(rank_TK.flatten(), minlength=ranks) for rank_TK in executing)
    return time_of_rows(
        expert_G, load_R, rows_RX, main_E=main_E, cluster=cluster, dims=dims, dispatcher=dispatcher
    )


def time_of_rows(
    expert_G: Tensor,
    load_R: Tensor,
    rows_RX: Tensor,
    *,
    main_E: Tensor,
    cluster: Cluster,
    dims: ModelDims,
    dispatcher: str,
) -> LayerTime:
    """Price the assignments that each rank executes and the ``rows_to`` of every source rank."""
    far_RR, near_RR = row_traffic(rows_RX, cluster, dispatcher)
    copies_RR = copies_between(expert_G, main_E, cluster.ranks)
    return port_time(load_R, far_RR, near_RR, copies_RR, cluster, unit_costs(cluster, dims))


def rows_to(rank_TK: Tensor, cluster: Cluster, dispatcher: str) -> Tensor:
    """int64 (R + M,): rows of one source to each rank, then to each node.

    Without deduplication rows to a rank are assignments, and so are rows to a node.
    """
    if dispatcher not in DISPATCHERS:
        raise InputError(f"unknown dispatcher {dispatcher!r}; choose one of {DISPATCHERS}")
    if dispatcher == "alltoall":
        rows_R = torch.bincount(rank_TK.flatten(), minlength=cluster.ranks)
        return torch.cat([rows_R, rows_R.view(cluster.nodes, -1).sum(1)])
    visited_TR = torch.zeros(len(rank_TK), cluster.ranks, dtype=torch.bool)
    visited_TR.scatter_(1, rank_TK, True)
    visited_TM = visited_TR.view(-1, cluster.nodes, cluster.ranks_per_node).any(2)
    return torch.cat([visited_TR.sum(0), visited_TM.sum(0)])


def row_traffic(rows_RX: Tensor, cluster: Cluster, dispatcher: str) -> tuple[Tensor, Tensor]:
    """int64 (R, R) twice: rows that each rank sends to each, across nodes and within one."""
    rows_RR, rows_RM = rows_RX[:, : cluster.ranks], rows_RX[:, cluster.ranks :]
    far, near = link_masks(cluster.ranks, cluster.ranks_per_node)
    if dispatcher != "dedup-node":
        return rows_RR * far, rows_RR * near
    # From rank r to its relay in each node: the rank there with the same local index.
    local_R = torch.arange(cluster.ranks) % cluster.ranks_per_node
    same_local = local_R[:, None] == local_R[None, :]
    far_RR = rows_RM.repeat_interleave(cluster.ranks_per_node, 1) * (same_local & far)
    # A relay passes on what all sources of its local index have for the ranks of its node.
    near_RR = (same_local.long() @ rows_RR) * near
    return far_RR, near_RR
