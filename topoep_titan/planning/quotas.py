"""From a baseline's decisions to a Plan: who hosts what, who executes how much, who sends it.

Most planners decide a quota for each instance of an expert and leave open which source sends what;
the splits below are the three rules that their authors use.

Letters: R ranks, E experts, S replica slots a rank, G slots, I instances of one expert in ascending
rank, N sources.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from topoep_titan.planning.plan import Plan

# (demand_R, quota_I, rank_I) -> sent_RI, int64; rows sum to the demand. Quotas sum to the demand.
Split = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def plan_from_quotas(
    load_RE: Tensor,
    hosted: list[list[int]],
    slots_per_rank: int,
    quota_of: Mapping[int, Mapping[int, int]],
    split: Split,
) -> Plan:
    """Build the Plan.

    ``hosted[rank]``: the experts of a rank in slot order, at most ``slots_per_rank``.
    ``quota_of[expert][rank]``: assignments that the instance executes; only for experts with
    several instances, an absent rank means 0.
    """
    ranks, experts = load_RE.shape
    load = load_RE.numpy()
    expert_G = np.full(ranks * slots_per_rank, -1, dtype=np.int32)
    assignments_RG = np.zeros((ranks, expert_G.size), dtype=np.int32)
    slots_of: list[list[int]] = [[] for _ in range(experts)]
    for rank, on_rank in enumerate(hosted):
        for slot, expert in enumerate(on_rank, start=rank * slots_per_rank):
            expert_G[slot] = expert
            slots_of[expert].append(slot)
    for expert, slots in enumerate(slots_of):
        if len(slots) == 1:
            assignments_RG[:, slots[0]] = load[:, expert]
            continue
        rank_I = np.array(slots) // slots_per_rank
        quota_I = np.array([quota_of[expert].get(rank, 0) for rank in rank_I.tolist()])
        assignments_RG[:, slots] = split(load[:, expert], quota_I, rank_I)
    return Plan(torch.from_numpy(expert_G), torch.from_numpy(assignments_RG))


def mains_by_rank(main_E: Tensor, ranks: int) -> list[list[int]]:
    """The main experts of each rank in ascending id: where every pinned placement starts."""
    hosted: list[list[int]] = [[] for _ in range(ranks)]
    for expert, rank in enumerate(main_E.tolist()):
        hosted[rank].append(expert)
    return hosted


def even_shares(total: int, parts: int) -> list[int]:
    """``total`` in ``parts`` shares that differ by at most 1, larger ones first."""
    share, larger = divmod(total, parts)
    return [share + (i < larger) for i in range(parts)]


def in_source_order(demand_R: np.ndarray, quota_I: np.ndarray, rank_I: np.ndarray) -> np.ndarray:
    """The sources in rank order on one line, cut by the quotas in rank order (MoonEP)."""
    return _overlap(demand_R, quota_I)


def own_rank_then_proportional(
    demand_R: np.ndarray, quota_I: np.ndarray, rank_I: np.ndarray
) -> np.ndarray:
    """Own rank up to the quota, the rest in proportion to what the quotas leave (UltraEP, FlexMoE).

    Largest remainders first, ties to the lower rank. Rounding is per source: an instance may
    execute up to R assignments more or less than its quota.
    """
    sent_RI = _own_rank(demand_R, quota_I, rank_I)
    rest_R, left_I = demand_R - sent_RI.sum(1), quota_I - sent_RI.sum(0)
    if not rest_R.any():
        return sent_RI
    exact_RI = rest_R[:, None] * left_I  # times left_I.sum()
    floor_RI = exact_RI // left_I.sum()
    by_remainder_RI = np.argsort(-(exact_RI % left_I.sum()), axis=1, kind="stable")
    missing_R = rest_R - floor_RI.sum(1)
    extra_RI = np.zeros_like(floor_RI)
    one_more = np.arange(rank_I.size) < missing_R[:, None]
    np.put_along_axis(extra_RI, by_remainder_RI, one_more.astype(floor_RI.dtype), axis=1)
    return sent_RI + floor_RI + extra_RI


def nearest_first(ranks_per_node: int) -> Split:
    """Own rank up to the quota, then own node, then anywhere; each in rank order.

    Quotas are met exactly. For given quotas no split sends fewer assignments between ranks, or
    between nodes.
    """

    def split(demand_R: np.ndarray, quota_I: np.ndarray, rank_I: np.ndarray) -> np.ndarray:
        sent_RI = _own_rank(demand_R, quota_I, rank_I)
        node_I = rank_I // ranks_per_node
        for node in np.unique(node_I):
            on_node = node_I == node
            rows = slice(node * ranks_per_node, (node + 1) * ranks_per_node)
            rest, left = demand_R[rows] - sent_RI[rows].sum(1), quota_I - sent_RI.sum(0)
            sent_RI[rows, on_node] += _overlap(rest, left[on_node])
        return sent_RI + _overlap(demand_R - sent_RI.sum(1), quota_I - sent_RI.sum(0))

    return split


def _own_rank(demand_R: np.ndarray, quota_I: np.ndarray, rank_I: np.ndarray) -> np.ndarray:
    sent_RI = np.zeros((demand_R.size, rank_I.size), dtype=np.int64)
    sent_RI[rank_I, np.arange(rank_I.size)] = np.minimum(demand_R[rank_I], quota_I)
    return sent_RI


def _overlap(demand_N: np.ndarray, quota_I: np.ndarray) -> np.ndarray:
    """int64 (N, I): two lines of consecutive intervals from 0; how much of each pair coincides."""
    end_N, end_I = demand_N.cumsum(), quota_I.cumsum()
    last = np.minimum(end_N[:, None], end_I)
    first = np.maximum((end_N - demand_N)[:, None], end_I - quota_I)
    return np.maximum(last - first, 0)
