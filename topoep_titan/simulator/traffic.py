"""A plan -> what each rank's ports carry in one token pass, and in one pull of the replicas.

Every rank has two ports: its NIC ("far", across nodes) and its NVLink port ("near"). A port works
in both directions at once, so its load is the larger of what it sends and what it receives.

Dispatchers: ``alltoall`` sends a row per assignment, ``dedup`` one per (token, rank),
``dedup-node`` one per (token, node) to the rank of the same local index there, which hands it on
inside its node.

Counts alone do not say which assignments belong to one token. ``expected_rows`` takes a token's
choices as independent, which holds for the ``skew`` and ``zipf`` workloads; ``counted_rows`` counts
them from the ids, for traces whose experts are coupled.

Letters: R ranks, M nodes, G slots, E experts, T tokens of a rank, K top-k.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from topoep_titan.cluster.cost_model import copies_between
from topoep_titan.errors import InputError
from topoep_titan.planning.plan import Plan, cut_assignments

DISPATCHERS = ("alltoall", "dedup", "dedup-node")


@dataclass(frozen=True)
class Ports:
    """float64 (R,): what each rank's port carries, in rows or in expert copies."""

    far_R: np.ndarray
    near_R: np.ndarray


def token_ports(
    plan: Plan, *, ranks_per_node: int, tokens: int, dispatcher: str, ids_RTK: Tensor | None = None
) -> Ports:
    """Rows of one dispatch; a combine carries the same rows the other way.

    ``ids_RTK`` makes the rows of the dedup dispatchers exact. Raises InputError for an unknown
    dispatcher.
    """
    if dispatcher not in DISPATCHERS:
        raise InputError(
            f"dispatcher {dispatcher!r} is unknown; choose one of: {', '.join(DISPATCHERS)}"
        )
    ranks = plan.assignments_RG.shape[0]
    nodes = ranks // ranks_per_node
    if dispatcher == "alltoall":
        rows_RR = plan.assignments_RG.numpy().reshape(ranks, ranks, -1).sum(2, dtype=np.float64)
        return row_ports(rows_RR, None, ranks_per_node)
    if ids_RTK is None:
        rows_RR, rows_RM = expected_rows(plan, tokens, nodes)
    else:
        rows_RR, rows_RM = counted_rows(plan, ids_RTK, nodes)
    return row_ports(rows_RR, rows_RM if dispatcher == "dedup-node" else None, ranks_per_node)


def row_ports(rows_RR: np.ndarray, rows_RM: np.ndarray | None, ranks_per_node: int) -> Ports:
    """Rows from rank to rank; with ``rows_RM``, what leaves a node goes once to each node."""
    ranks = len(rows_RR)
    nodes = ranks // ranks_per_node
    node_R = np.arange(ranks) // ranks_per_node
    far_RR = node_R[:, None] != node_R
    if rows_RM is None:
        return Ports(_busier(rows_RR * far_RR), _busier(_off_diagonal(rows_RR * ~far_RR)))
    # The rank with the same local index in the other node takes the row and hands it on there.
    own_M = np.arange(nodes) == node_R[:, None]
    by_local_MLM = (rows_RM * ~own_M).reshape(nodes, ranks_per_node, nodes)
    far_R = np.maximum(by_local_MLM.sum(2), by_local_MLM.sum(0).T).reshape(ranks)
    by_source = rows_RR.reshape(nodes, ranks_per_node, ranks).sum(0)  # (local index, executing)
    handed_RR = np.tile(by_source, (nodes, 1)) * ~far_RR
    return Ports(far_R, _busier(_off_diagonal(handed_RR)))


def copy_ports(plan: Plan, main_E: Tensor, *, ranks_per_node: int) -> Ports:
    """Expert copies of one pull; a push carries the gradients the other way."""
    ranks = plan.assignments_RG.shape[0]
    copies_RR = copies_between(plan.expert_G, main_E, ranks).numpy().astype(np.float64)
    node_R = np.arange(ranks) // ranks_per_node
    far_RR = node_R[:, None] != node_R
    return Ports(_busier(copies_RR * far_RR), _busier(copies_RR * ~far_RR))


def expected_rows(plan: Plan, tokens: int, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """float64 (R, R) and (R, M): expected rows from a rank to each rank and to each node.

    A token reaches a rank unless it chose none of its experts: of T tokens, 1 - prod(1 - a/T) do,
    with a the assignments to each of the rank's experts.
    """
    assignments_RG = plan.assignments_RG.numpy()
    ranks = assignments_RG.shape[0]
    share_RG = np.minimum(assignments_RG / tokens, 1 - 1e-12)
    rows_RR = -tokens * np.expm1(np.log1p(-share_RG).reshape(ranks, ranks, -1).sum(2))
    return rows_RR, _by_node(share_RG, plan, tokens, nodes)


def counted_rows(plan: Plan, ids_RTK: Tensor, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """float64 (R, R) and (R, M): the same rows, counted after cutting every source's tokens."""
    ranks = ids_RTK.shape[0]
    per_rank = plan.expert_G.numel() // ranks
    rows_RR, rows_RM = np.zeros((ranks, ranks)), np.zeros((ranks, nodes))
    for source in range(ranks):
        rank_TK = cut_assignments(plan, ids_RTK[source], source).numpy() // per_rank
        rows_RR[source] = distinct_places(rank_TK, ranks)
        rows_RM[source] = distinct_places(rank_TK // (ranks // nodes), nodes)
    return rows_RR, rows_RM


def distinct_places(place_TK: np.ndarray, places: int) -> np.ndarray:
    """(places,): tokens that visit each place."""
    visited = np.zeros((place_TK.shape[0], places), dtype=bool)
    np.put_along_axis(visited, place_TK, True, axis=1)
    return visited.sum(0)


def _by_node(share_RG: np.ndarray, plan: Plan, tokens: int, nodes: int) -> np.ndarray:
    """(R, M). Instances of an expert on one node take different tokens, so their shares add."""
    expert_G = plan.expert_G.numpy().astype(np.int64)
    slots, room = expert_G.size, int(expert_G.max()) + 2
    place_G = np.arange(slots) // (slots // nodes) * room + expert_G + 1  # empty slots: no share
    order_G = np.argsort(place_G, kind="stable")
    places, first = np.unique(place_G[order_G], return_index=True)
    share = np.minimum(np.add.reduceat(share_RG[:, order_G], first, axis=1), 1 - 1e-12)
    _, first = np.unique(places // room, return_index=True)
    return -tokens * np.expm1(np.add.reduceat(np.log1p(-share), first, axis=1))


def _busier(traffic_RR: np.ndarray) -> np.ndarray:
    return np.maximum(traffic_RR.sum(0), traffic_RR.sum(1))


def _off_diagonal(traffic_RR: np.ndarray) -> np.ndarray:
    traffic_RR = traffic_RR.copy()
    np.fill_diagonal(traffic_RR, 0.0)
    return traffic_RR
