"""Which of a source's tokens use which instance, so that few rows travel; a plan gives the counts.

A plan says how many of a source's assignments each instance of an expert executes. Under a
deduplicating dispatcher it matters which: an assignment that runs where its token goes anyway adds
no row. `kernels/csrc/planner/row_slots.h` computes the same slots.

Letters: R ranks, M nodes of g ranks, G slots, T tokens of one rank, K top-k, N tokens of the source
that chose one expert, I its instances that execute some of them.
"""

import numpy as np
import torch
from torch import Tensor

from topoep_titan.cluster import Cluster
from topoep_titan.cluster.cost_model import UnitCosts
from topoep_titan.planning.plan import Plan


def pick_slots(
    plan: Plan, ids_TK: Tensor, rank: int, cluster: Cluster, costs: UnitCosts, dispatcher: str
) -> Tensor:
    """int16 (T, K): the slot of each assignment of source ``rank``, as many in each as planned.

    Assignments with one instance come first. Then expert by expert, most assignments first, lowest
    id on ties: each instance but the last, by ascending slot, takes its count of tokens with the
    lowest (price of the row it would add here, less the lowest such price at a later instance),
    lowest token on ties; the last takes the rest. A row is priced by the link it would cross; it
    costs nothing where the token already goes, nor on the source itself.
    """
    counts_G = plan.assignments_RG[rank].numpy()
    expert_G, ids = plan.expert_G.numpy(), ids_TK.numpy()
    used_G = np.flatnonzero(counts_G)
    slots_of: dict[int, list[int]] = {}
    for slot in used_G.tolist():
        slots_of.setdefault(int(expert_G[slot]), []).append(slot)
    first_E = np.full(int(expert_G.max()) + 1, -1)
    first_E[expert_G[used_G[::-1]]] = used_G[::-1]
    slot_TK = first_E[ids]

    split = [expert for expert, slots in slots_of.items() if len(slots) > 1]
    split.sort(key=lambda expert: (-counts_G[slots_of[expert]].sum(), expert))
    visits = _Visits(len(ids), rank, expert_G.size // cluster.ranks, cluster, costs, dispatcher)
    token_TK = np.broadcast_to(np.arange(len(ids))[:, None], ids.shape)
    alone_TK = ~np.isin(ids, split)
    visits.add(token_TK[alone_TK], slot_TK[alone_TK])
    for expert in split:
        here_TK = ids == expert
        slots, token_N = slots_of[expert], token_TK[here_TK]
        price_NI = np.stack([visits.price_of_row(token_N, slot) for slot in slots], 1)
        slot_N = _deal(price_NI, slots, counts_G[slots])
        slot_TK[here_TK] = slot_N
        visits.add(token_N, slot_N)
    return torch.from_numpy(slot_TK.astype(np.int16))


class _Visits:
    """Where each token of the source goes so far, and what going elsewhere would cost."""

    def __init__(
        self, tokens: int, rank: int, per_rank: int, cluster: Cluster, costs: UnitCosts,
        dispatcher: str,
    ):  # fmt: skip
        self.rank, self.per_rank, self.cluster = rank, per_rank, cluster
        self.costs, self.relayed = costs, dispatcher == "dedup-node"
        self.ranks_TR = np.zeros((tokens, cluster.ranks), dtype=bool)
        self.ranks_TR[:, rank] = True
        self.nodes_TM = np.zeros((tokens, cluster.nodes), dtype=bool)
        self.nodes_TM[:, cluster.node_of(rank)] = True

    def add(self, token_N: np.ndarray, slot_N: np.ndarray) -> None:
        rank_N = slot_N // self.per_rank
        self.ranks_TR[token_N, rank_N] = True
        self.nodes_TM[token_N, rank_N // self.cluster.ranks_per_node] = True

    def price_of_row(self, token_N: np.ndarray, slot: int) -> np.ndarray:
        """int64 (N,): picoseconds on the links, if each of these tokens also used ``slot``."""
        target = slot // self.per_rank
        node, per_node = self.cluster.node_of(target), self.cluster.ranks_per_node
        far, near = self.costs.token_far, self.costs.token_near
        if self.relayed:  # one row to the node's relay, and one from there unless it executes
            near = 0 if target % per_node == self.rank % per_node else near
            price_N = near + np.where(self.nodes_TM[token_N, node], 0, far)
        else:
            price_N = np.full(token_N.shape, near if self._at_home(node) else far)
        return np.where(self.ranks_TR[token_N, target], 0, price_N)

    def _at_home(self, node: int) -> bool:
        return node == self.cluster.node_of(self.rank)


def _deal(price_NI: np.ndarray, slots: list[int], count_I: np.ndarray) -> np.ndarray:
    """int64 (N,): a slot for each token, ``count_I`` tokens to each instance."""
    slot_N = np.full(len(price_NI), slots[-1])
    left = np.arange(len(price_NI))
    for i, slot in enumerate(slots[:-1]):
        regret = price_NI[left, i] - price_NI[left, i + 1 :].min(1)
        taken = np.argsort(regret, kind="stable")[: count_I[i]]
        slot_N[left[taken]] = slot
        left = np.delete(left, taken)
    return slot_N
