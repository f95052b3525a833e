"""DeepSeek's EPLB: replicate the experts with the largest load per copy, pack copies onto ranks.

Source: github.com/deepseek-ai/EPLB at d52c72d; the paper's baseline [5] of section 6.1. Its authors
leave two things open: when the load is measured (a moving average of the user's) and which token
goes to which copy. Here ``estimate_RE`` is the load that places (the exact one if absent), copies
of an expert share its load evenly, as the placement assumes, and tokens go to the nearest copy
within that share.

``eplb`` keeps main instances where they are, as this project's contract asks: the R*S redundant
copies alone are packed. ``eplb_free`` is the published form, which moves every expert.

Loads per copy are compared as exact fractions, ties go to the lower index (the original compares
floats in an unstable sort). Letters: R ranks, E experts, S replica slots a rank.
"""

import heapq
import math
from collections import Counter
from fractions import Fraction

from torch import Tensor

from topoep_titan.cluster import Cluster, ModelDims
from topoep_titan.planning.plan import Plan
from topoep_titan.planning.quotas import (
    even_shares,
    mains_by_rank,
    nearest_first,
    plan_from_quotas,
)


def eplb(
    load_RE: Tensor,
    *,
    main_E: Tensor,
    cluster: Cluster,
    model_dims: ModelDims,
    replica_slots: int,
    hierarchical: bool = False,
    estimate_RE: Tensor | None = None,
) -> Plan:
    """EPLB with pinned mains; ``hierarchical`` keeps the copies of an expert on its main's node.

    A copy without a rank that has a free slot and lacks the expert is dropped.
    """
    ranks = load_RE.shape[0]
    weight = (load_RE if estimate_RE is None else estimate_RE).sum(0).tolist()
    hosted = mains_by_rank(main_E, ranks)
    span = cluster.ranks_per_node if hierarchical else ranks
    for first in range(0, ranks, span):
        _add_copies(hosted[first : first + span], weight, replica_slots)
    return plan_from_quotas(
        load_RE,
        hosted,
        main_E.numel() // ranks + replica_slots,
        _even_quotas(hosted, load_RE.sum(0).tolist()),
        nearest_first(cluster.ranks_per_node),
    )


def eplb_free(
    load_RE: Tensor,
    *,
    main_E: Tensor,
    cluster: Cluster,
    model_dims: ModelDims,
    replica_slots: int,
    groups: int = 1,
    estimate_RE: Tensor | None = None,
) -> Plan:
    """EPLB as published: any expert may sit anywhere, ``groups`` of experts stay on one node.

    A rank that is given an expert twice (issue 22 of the original) holds it once, with both shares.
    """
    ranks, experts = load_RE.shape
    weight = (load_RE if estimate_RE is None else estimate_RE).sum(0).tolist()
    per_rank = experts // ranks + replica_slots
    physical = rebalance(weight, ranks * per_rank, groups, cluster.nodes, ranks)
    total = load_RE.sum(0).tolist()
    shares_of = {x: iter(even_shares(total[x], n)) for x, n in Counter(physical).items()}
    quota_of: dict[int, Counter] = {x: Counter() for x in range(experts)}
    for slot, expert in enumerate(physical):
        quota_of[expert][slot // per_rank] += next(shares_of[expert])
    hosted = [
        list(dict.fromkeys(physical[rank * per_rank : (rank + 1) * per_rank]))
        for rank in range(ranks)
    ]
    return plan_from_quotas(
        load_RE, hosted, per_rank, quota_of, nearest_first(cluster.ranks_per_node)
    )


def rebalance(weight: list[int], physical: int, groups: int, nodes: int, ranks: int) -> list[int]:
    """The logical expert in each of ``physical`` slots: the original's ``rebalance_experts``.

    Hierarchical when ``groups`` divide over the nodes: pack groups to nodes, replicate inside each
    node, pack its copies to its ranks. Otherwise global: the same with one group and one node.
    """
    if groups % nodes:
        groups = nodes = 1
    size = len(weight) // groups
    group_weight = [sum(weight[group * size : (group + 1) * size]) for group in range(groups)]
    slots = []
    for on_node in pack(group_weight, nodes):
        experts = [x for group in on_node for x in range(group * size, (group + 1) * size)]
        local = [weight[x] for x in experts]
        copies = replicate(local, physical // nodes)
        share = _shares(local, Counter(copies))
        for on_rank in pack([share[copy] for copy in copies], ranks // nodes):
            slots += [experts[copies[i]] for i in on_rank]
    return slots


def pack(weight: list[int], packs: int) -> list[list[int]]:
    """Items in ``packs`` packs of equal number: heaviest first, to the lightest pack with room."""
    room = len(weight) // packs
    if room == 1:
        return [[item] for item in range(packs)]
    packed: list[list[int]] = [[] for _ in range(packs)]
    filled = [0] * packs
    for item in sorted(range(len(weight)), key=lambda i: -weight[i]):
        lightest = min(
            (pack for pack in range(packs) if len(packed[pack]) < room), key=lambda p: filled[p]
        )
        packed[lightest].append(item)
        filled[lightest] += weight[item]
    return packed


def replicate(weight: list[int], copies: int, most: int | None = None) -> list[int]:
    """Every expert once, then again and again the one with the largest weight per copy.

    With ``most``, an expert has at most that many copies and one without weight no second.
    """
    chosen = list(range(len(weight)))
    count = [1] * len(weight)
    heap = [(Fraction(-w), x) for x, w in enumerate(weight) if most is None or w]
    heapq.heapify(heap)
    while heap and len(chosen) < copies:
        _, x = heapq.heappop(heap)
        if count[x] == most:
            continue
        count[x] += 1
        chosen.append(x)
        heapq.heappush(heap, (Fraction(-weight[x], count[x]), x))
    return chosen


def _shares(weight: list[int], count: Counter) -> list[int]:
    """Weight per copy of each expert, over one common denominator."""
    scale = math.lcm(*count.values())
    return [w * scale // count[x] for x, w in enumerate(weight)]


def _add_copies(hosted: list[list[int]], weight: list[int], replica_slots: int) -> None:
    """Replicate the experts of these ranks and put each copy on the least loaded rank."""
    ranks = range(len(hosted))
    experts = sorted(x for on_rank in hosted for x in on_rank)
    full = len(hosted[0]) + replica_slots
    local = [weight[x] for x in experts]
    copies = replicate(local, len(experts) + len(ranks) * replica_slots, most=len(ranks))
    share = dict(zip(experts, _shares(local, Counter(copies))))
    filled = [sum(share[x] for x in on_rank) for on_rank in hosted]
    extra = [experts[i] for i in copies[len(experts) :]]
    for x in sorted(extra, key=lambda x: (-share[x], x)):
        fitting = [r for r in ranks if len(hosted[r]) < full and x not in hosted[r]]
        if fitting:
            lightest = min(fitting, key=lambda r: filled[r])
            hosted[lightest].append(x)
            filled[lightest] += share[x]


def _even_quotas(hosted: list[list[int]], total: list[int]) -> dict[int, dict[int, int]]:
    ranks_of: dict[int, list[int]] = {}
    for rank, on_rank in enumerate(hosted):
        for x in on_rank:
            ranks_of.setdefault(x, []).append(rank)
    return {x: dict(zip(on, even_shares(total[x], len(on)))) for x, on in ranks_of.items()}
