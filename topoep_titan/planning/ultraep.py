"""UltraEP's quota search: the lowest level that one pass of exports inside a domain can reach.

Source: UltraEP (arXiv 2606.04101) and its release, reference [34] of the paper. Mains are pinned
and replicas stay inside the NVLink domain of the main. For a level T, ranks above T export in the
order of their load, their experts in the order of theirs, each to the rank with most room; the
search finds the smallest T for which this works. Tokens take the copy on their own rank first and
split the rest in proportion to the quotas.

Adaptations: the release's full search, by bisection where it probes four levels at once, without
its minimum of 1,024 assignments an export, which would forbid every export of a small microbatch. A
domain is a node, or the whole group with ``one_domain`` (the release ends at 72 ranks).
"""

from collections import Counter, defaultdict
from dataclasses import dataclass

from torch import Tensor

from topoep_titan.cluster import Cluster, ModelDims
from topoep_titan.planning.plan import Plan
from topoep_titan.planning.quotas import (
    mains_by_rank,
    own_rank_then_proportional,
    plan_from_quotas,
)


@dataclass(frozen=True)
class Export:
    expert: int
    rank: int  # where the replica goes
    amount: int


def ultraep(
    load_RE: Tensor,
    *,
    main_E: Tensor,
    cluster: Cluster,
    model_dims: ModelDims,
    replica_slots: int,
    one_domain: bool = False,
) -> Plan:
    """Level each domain as far as S replica slots a rank allow."""
    ranks, experts = load_RE.shape
    total = load_RE.sum(0).tolist()
    hosted = mains_by_rank(main_E, ranks)
    quota_of = {x: Counter({rank: total[x]}) for x, rank in enumerate(main_E.tolist())}
    span = ranks if one_domain else cluster.ranks_per_node
    for first in range(0, ranks, span):
        domain = range(first, first + span)
        for export in _search({rank: hosted[rank] for rank in domain}, total, replica_slots):
            hosted[export.rank].append(export.expert)
            quota_of[export.expert][export.rank] = export.amount
            quota_of[export.expert][int(main_E[export.expert])] -= export.amount
    slots_per_rank = experts // ranks + replica_slots
    return plan_from_quotas(load_RE, hosted, slots_per_rank, quota_of, own_rank_then_proportional)


def _search(mains: dict[int, list[int]], total: list[int], replica_slots: int) -> list[Export]:
    """Exports of the smallest level between the domain's mean and its busiest rank that works."""
    load = {rank: sum(total[x] for x in on_rank) for rank, on_rank in mains.items()}
    low, high = -(-sum(load.values()) // len(load)), max(load.values())
    best: list[Export] = []  # at the busiest rank's level nothing moves
    while low < high:
        level = (low + high) // 2
        exports = _exports(level, mains, load, total, replica_slots)
        if exports is None:
            low = level + 1
        else:
            best, high = exports, level
    return best


def _exports(
    level: int,
    mains: dict[int, list[int]],
    load: dict[int, int],
    total: list[int],
    replica_slots: int,
) -> list[Export] | None:
    """What brings every rank of the domain to at most ``level``; None if one pass cannot."""
    room = {rank: level - on_rank for rank, on_rank in load.items() if on_rank < level}
    guests: dict[int, set[int]] = defaultdict(set)
    exports = []
    for source in sorted(load, key=lambda rank: (-load[rank], rank)):
        need = load[source] - level
        for expert in sorted(mains[source], key=lambda x: (-total[x], x)):
            available = total[expert] - 1  # the main keeps one assignment, as in the release
            while need > 0 and available > 0:
                targets = [
                    rank
                    for rank in room
                    if room[rank] and len(guests[rank]) < replica_slots
                    and expert not in guests[rank]
                ]  # fmt: skip
                if not targets:
                    break
                target = max(targets, key=lambda rank: (room[rank], -rank))
                amount = min(need, room[target], available)
                guests[target].add(expert)
                exports.append(Export(expert, target, amount))
                room[target] -= amount
                available -= amount
                need -= amount
        if need > 0:
            return None
    return exports
