"""MoonEP: every rank computes exactly the mean load, wherever the tokens are.

Source: github.com/MoonshotAI/MoonEP (reference [1] of the paper). Step 1 matches home groups (the
experts of one rank) that have too much with ranks that have too little, until all are level; each
rank receives from one home group at most, so it never needs more than E/R slots. Step 2 cuts each
matched amount into experts, largest first. Tokens fill the instances in source order, without
regard to where they are.

``moonep`` stops at S replica slots a rank: what no longer fits stays at home, and balance is then
not perfect. ``moonep_free`` is the published form, with as many slots as it needs. Uneven totals:
the first ranks take one assignment more.
"""

from collections import Counter

from torch import Tensor

from topoep_titan.cluster import Cluster, ModelDims
from topoep_titan.planning.plan import Plan
from topoep_titan.planning.quotas import (
    even_shares,
    in_source_order,
    mains_by_rank,
    plan_from_quotas,
)


def moonep(
    load_RE: Tensor,
    *,
    main_E: Tensor,
    cluster: Cluster,
    model_dims: ModelDims,
    replica_slots: int,
) -> Plan:
    """Level every rank as far as S replica slots allow."""
    return _plan(load_RE, main_E, most_slots=replica_slots, least_slots=replica_slots)


def moonep_free(
    load_RE: Tensor,
    *,
    main_E: Tensor,
    cluster: Cluster,
    model_dims: ModelDims,
    replica_slots: int,
) -> Plan:
    """Level every rank exactly; the plan has more than S slots a rank where it needs them."""
    mains = main_E.numel() // load_RE.shape[0]
    return _plan(load_RE, main_E, most_slots=mains, least_slots=replica_slots)


def _plan(load_RE: Tensor, main_E: Tensor, most_slots: int, least_slots: int) -> Plan:
    ranks, experts = load_RE.shape
    mains = experts // ranks
    hosted = mains_by_rank(main_E, ranks)
    remaining = load_RE.sum(0).tolist()  # of each expert, still at home
    quota_of: dict[int, Counter] = {x: Counter() for x in range(experts)}
    for home, matched in enumerate(_match(hosted, remaining)):
        group = hosted[home][:mains]
        _cut_into_experts(group, matched, remaining, hosted, quota_of, mains + most_slots)
    for x, home in enumerate(main_E.tolist()):
        quota_of[x][home] = remaining[x]
    slots_per_rank = max(mains + least_slots, *(len(on_rank) for on_rank in hosted))
    return plan_from_quotas(load_RE, hosted, slots_per_rank, quota_of, in_source_order)


def _match(hosted: list[list[int]], total: list[int]) -> list[dict[int, int]]:
    """``[home][rank]``: how much of a home group each rank takes. At most R - 1 steps."""
    ranks = range(len(hosted))
    level = even_shares(sum(total), len(hosted))
    surplus = [sum(total[x] for x in hosted[rank]) - level[rank] for rank in ranks]
    matched: list[dict[int, int]] = [{} for _ in ranks]
    while True:
        home = max(ranks, key=lambda r: surplus[r])
        rank = min(ranks, key=lambda r: surplus[r])
        if surplus[home] <= 0:
            return matched
        # The receiver is filled completely: the giver may fall below the level and receive later.
        matched[home][rank] = -surplus[rank]
        surplus[home] += surplus[rank]
        surplus[rank] = 0


def _cut_into_experts(
    group: list[int],
    matched: dict[int, int],
    remaining: list[int],
    hosted: list[list[int]],
    quota_of: dict[int, Counter],
    slots_per_rank: int,
) -> None:
    """The largest unmet amount takes the largest remaining expert, until all is met."""
    while matched:
        rank = max(matched, key=lambda r: (matched[r], -r))
        full = len(hosted[rank]) == slots_per_rank
        fitting = [x for x in group if remaining[x] and (not full or x in hosted[rank])]
        if not fitting:
            del matched[rank]  # no slot left: the rest stays at home
            continue
        x = max(fitting, key=lambda x: remaining[x])
        taken = min(matched[rank], remaining[x])
        if x not in hosted[rank]:
            hosted[rank].append(x)
        quota_of[x][rank] += taken
        remaining[x] -= taken
        matched[rank] -= taken
        if not matched[rank]:
            del matched[rank]
