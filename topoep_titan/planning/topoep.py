"""TopoEP as published (paper, sections 4.1 to 4.3): the readable specification.

Stage 1 brings an expert into a domain where the exposed token traffic outweighs one parameter
pull (equation 9), routes every (source, expert) demand to instances of its own domain where there
are any, and stage 2 levels the rank loads inside each domain (equation 10). What the paper leaves
open (ties, remainders, who moves) is fixed here, integers only, so that all ranks agree bit for
bit.
"""

import torch
from torch import Tensor

from topoep_titan.cluster import Cluster, ModelDims
from topoep_titan.cluster.cost_model import unit_costs
from topoep_titan.planning.plan import Plan, unbalanced_plan


def topoep(
    load_RE: Tensor,
    *,
    main_E: Tensor,
    cluster: Cluster,
    model_dims: ModelDims,
    replica_slots: int,
) -> Plan:
    """Replicate and reroute by the paper's two stages. ``cluster`` has R = load_RE.shape[0] ranks.

    The input is trusted; validate what a user gave with ``plan.check_load`` first.
    """
    slots = _Slots(load_RE, main_E, replica_slots, cluster.ranks_per_node)
    for domain in range(cluster.nodes):
        _place_across_domains(slots, domain, load_RE, main_E, model_dims)
    assignments_RG = _route(slots, load_RE)
    for domain in range(cluster.nodes):
        _refine(slots, domain, assignments_RG, cluster, model_dims)
    return Plan(torch.tensor(slots.expert_G, dtype=torch.int32), assignments_RG.int())


class _Slots:
    """Who sits where: ``expert_G`` and, for each (expert, rank), the slot of the instance."""

    def __init__(self, load_RE: Tensor, main_E: Tensor, replica_slots: int, ranks_per_node: int):
        self.expert_G: list[int] = unbalanced_plan(load_RE, main_E, replica_slots).expert_G.tolist()
        self.per_rank = len(self.expert_G) // load_RE.shape[0]
        self.mains = self.per_rank - replica_slots
        self.ranks_per_node = ranks_per_node
        self.slot_of = {  # (expert, rank) -> slot
            (expert, slot // self.per_rank): slot
            for slot, expert in enumerate(self.expert_G)
            if expert >= 0
        }

    def domain_ranks(self, domain: int) -> range:
        return range(domain * self.ranks_per_node, (domain + 1) * self.ranks_per_node)

    def occupied(self, rank: int) -> int:
        replicas = self.expert_G[rank * self.per_rank + self.mains : (rank + 1) * self.per_rank]
        return sum(expert >= 0 for expert in replicas)

    def has_free(self, rank: int) -> bool:
        return self.mains + self.occupied(rank) < self.per_rank

    def place(self, expert: int, rank: int) -> int:
        slot = rank * self.per_rank + self.mains + self.occupied(rank)
        self.expert_G[slot] = expert
        self.slot_of[expert, rank] = slot
        return slot

    def instances(self, expert: int) -> list[int]:
        return [slot for slot, hosted in enumerate(self.expert_G) if hosted == expert]


def _place_across_domains(
    slots: _Slots, domain: int, load_RE: Tensor, main_E: Tensor, dims: ModelDims
) -> None:
    """Stage 1: positive benefits in descending order, onto the least occupied rank with a slot."""
    ranks = slots.domain_ranks(domain)
    demand_E = load_RE[ranks.start : ranks.stop].sum(0)
    benefit_E = (2 * dims.token_bytes * demand_E - dims.expert_bytes).tolist()
    outside_E = (main_E // slots.ranks_per_node != domain).tolist()
    candidates = [x for x, gain in enumerate(benefit_E) if outside_E[x] and gain > 0]
    for expert in sorted(candidates, key=lambda x: (-benefit_E[x], x)):
        free = [rank for rank in ranks if slots.has_free(rank)]
        if not free:
            return
        slots.place(expert, min(free, key=lambda rank: (slots.occupied(rank), rank)))


def _route(slots: _Slots, load_RE: Tensor) -> Tensor:
    """int64 (R, G): split each demand evenly over the instances of the source's domain, else all.

    The remainder goes one each to instances s mod n, s mod n + 1, ... of source s.
    """
    ranks, experts = load_RE.shape
    assignments_RG = torch.zeros(ranks, len(slots.expert_G), dtype=torch.int64)
    for expert in range(experts):
        everywhere = slots.instances(expert)
        for source, demand in enumerate(load_RE[:, expert].tolist()):
            near = slots.domain_ranks(source // slots.ranks_per_node)
            chosen = [slot for slot in everywhere if slot // slots.per_rank in near] or everywhere
            share, remainder = divmod(demand, len(chosen))
            for i, slot in enumerate(chosen):
                extra = (i - source) % len(chosen) < remainder
                assignments_RG[source, slot] = share + extra
    return assignments_RG


def _refine(
    slots: _Slots, domain: int, assignments_RG: Tensor, cluster: Cluster, dims: ModelDims
) -> None:
    """Stage 2: move half gaps from the busiest rank of the domain until nothing can be moved."""
    ranks = slots.domain_ranks(domain)
    load = {
        rank: int(assignments_RG[:, rank * slots.per_rank : (rank + 1) * slots.per_rank].sum())
        for rank in ranks
    }
    costs = unit_costs(cluster, dims)

    def moved_from(slot: int, delta: int) -> Tensor:
        """int64 (R,): sources give up assignments in ascending rank until ``delta`` are moved."""
        end_R = assignments_RG[:, slot].cumsum(0).clamp(max=delta)
        return end_R.diff(prepend=end_R.new_zeros(1))

    def communication(moved_R: Tensor, target: int) -> int:
        per_token = torch.full_like(moved_R, costs.token_far)
        per_token[ranks.start : ranks.stop] = costs.token_near
        per_token[target] = 0
        return int((moved_R * per_token).sum())

    while True:
        busiest = min(ranks, key=lambda rank: (-load[rank], rank))
        best = None
        for slot in range(busiest * slots.per_rank, (busiest + 1) * slots.per_rank):
            expert = slots.expert_G[slot]
            used = int(assignments_RG[:, slot].sum())
            for target in ranks:
                hosts = (expert, target) in slots.slot_of
                delta = min(used, (load[busiest] - load[target]) // 2)
                if delta <= 0 or not (hosts or slots.has_free(target)):
                    continue
                moved_R = moved_from(slot, delta)
                cost = communication(moved_R, target)
                key = (-delta, load[target], not hosts, cost, expert, target)
                if best is None or key < best[0]:
                    best = key, slot, moved_R
        if best is None:
            return
        (negative_delta, _, is_new, _, expert, target), slot, moved_R = best
        landing = slots.place(expert, target) if is_new else slots.slot_of[expert, target]
        assignments_RG[:, slot] -= moved_R
        assignments_RG[:, landing] += moved_R
        load[busiest] += negative_delta
        load[target] -= negative_delta
