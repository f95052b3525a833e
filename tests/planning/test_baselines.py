"""Each baseline against its authors' numbers or a case done by hand."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch

from topoep_titan.cluster import Cluster, ModelDims, load_cluster
from topoep_titan.planning import FREE_PLANNERS, PLANNERS, check_plan, eplb, ultraep
from topoep_titan.planning.eplb import rebalance
from topoep_titan.planning.plan import contiguous_mains
from topoep_titan.planning.quotas import (
    in_source_order,
    nearest_first,
    own_rank_then_proportional,
)
from topoep_titan.planning.workloads import load_of, zipf

DIMS = ModelDims(hidden=1000, moe_intermediate=1)  # S_tok 2,000 bytes, |W| 6,000 bytes


def cluster(nodes: int, ranks_per_node: int) -> Cluster:
    """One assignment computes for 18 us, crosses in 4 us; a copy takes 6 us, near or far."""
    return Cluster("by hand", nodes, ranks_per_node, 1e9, 1e9, 1e9, 0.0, 0.0, 0.0)


def plan_with(planner, load, *, nodes, slots, **options):
    load_RE = torch.tensor(load)
    ranks, experts = load_RE.shape
    return planner(
        load_RE, main_E=contiguous_mains(ranks, experts), cluster=cluster(nodes, ranks // nodes),
        model_dims=DIMS, replica_slots=slots, **options,
    )  # fmt: skip


def rank_loads(plan) -> list[int]:
    ranks = plan.assignments_RG.shape[0]
    return plan.assignments_RG.view(ranks, ranks, -1).sum((0, 2)).tolist()


# --- EPLB


def test_eplb_reproduces_the_example_of_its_readme():
    """github.com/deepseek-ai/EPLB: 12 experts in 4 groups, 16 slots, 2 nodes, 8 GPUs."""
    layers = (
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    )
    printed = (
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    )
    for weight, slots in zip(layers, printed):
        assert rebalance(weight, physical=16, groups=4, nodes=2, ranks=8) == slots


def test_eplb_global_equals_the_level_reported_for_it():
    """vllm-ascend pull request 3042: EPLB's busiest of 8 devices with 2 slots has 232."""
    weight = [600, 560, 120, 120, 20, 10, 10, 10]
    slots = rebalance(weight, physical=16, groups=1, nodes=1, ranks=8)
    count = Counter(slots)
    loads = [sum(Fraction(weight[x], count[x]) for x in slots[r : r + 2]) for r in range(0, 16, 2)]
    assert round(max(loads)) == 232


def test_eplb_places_by_the_estimate_and_splits_the_load():
    # Expert 0 was hot, expert 3 is: a stale estimate copies the wrong one.
    load = [[1, 1, 1, 20], [1, 1, 1, 20], [1, 1, 1, 20], [1, 1, 1, 20]]
    stale = torch.tensor(load).flip(1)
    exact = plan_with(PLANNERS["eplb"], load, nodes=2, slots=1)
    # 80 over four copies of expert 3; the last slot, on rank 3, takes half of expert 0.
    assert rank_loads(exact) == [22, 24, 24, 22]
    assert int(exact.assignments_RG[0, 1]) == 20  # and rank 0 keeps its own
    old = plan_with(PLANNERS["eplb"], load, nodes=2, slots=1, estimate_RE=stale)
    assert rank_loads(old) == [3, 3, 5, 81]  # expert 0 four times, half of expert 1 on rank 0


def test_eplb_hierarchical_stays_on_the_node_of_the_main():
    load = [[1, 1, 1, 20]] * 4
    plan = plan_with(eplb, load, nodes=2, slots=1, hierarchical=True)
    assert plan.expert_G.tolist() == [0, 1, 1, 0, 2, 3, 3, 2]
    assert rank_loads(plan) == [4, 4, 42, 42]


# --- FasterMoE


def test_fastermoe_shadows_while_the_predicted_time_falls():
    # A token costs 18 + 2*4 = 26 us of its expert's total B, a shadow 2*6 = 12 us more.
    # B = 40, 30, 30, 2: time(0) = 1040, time(1) = 792, time(2) = 804: one shadow.
    load = [[10, 20, 15, 2], [30, 10, 15, 0]]
    plan = plan_with(PLANNERS["fastermoe"], load, nodes=2, slots=2)
    assert plan.expert_G.tolist() == [0, 1, -1, -1, 2, 3, 0, -1]
    assert plan.assignments_RG.tolist() == [
        [10, 20, 0, 0, 15, 2, 0, 0],
        [0, 10, 0, 0, 15, 0, 30, 0],
    ]
    assert plan_with(PLANNERS["fastermoe"], load, nodes=2, slots=0).num_replicas == 0


# --- FlexMoE


def test_flexmoe_expands_until_a_copy_costs_more_than_it_saves():
    # Expert 0: 24 assignments of rank 1. Rank 0 takes 24*(18 + 2*4) = 624 us, with a copy on rank 1
    # 12*(18 + 8) + 2*6 = 324. Expert 1: nothing left to gain.
    load = [[0, 4, 0, 0], [24, 0, 0, 4]]
    plan = plan_with(PLANNERS["flexmoe"], load, nodes=2, slots=1)
    assert plan.expert_G.tolist() == [0, 1, -1, 2, 3, 0]
    assert rank_loads(plan) == [16, 16]
    # Half of a single assignment is still one on the busiest rank: nothing to save.
    assert plan_with(PLANNERS["flexmoe"], [[0, 0], [1, 0]], nodes=2, slots=1).num_replicas == 0


def test_flexmoe_expands_the_lowest_of_equally_hot_experts():
    # Two experts of 24 on rank 0, and one free slot on rank 1, where their tokens are.
    plan = plan_with(PLANNERS["flexmoe"], [[0, 0, 0, 0], [24, 24, 0, 4]], nodes=2, slots=1)
    assert plan.expert_G.tolist() == [0, 1, -1, 2, 3, 0]


def test_flexmoe_swaps_copies_that_are_nearer_to_each_others_mains():
    # A near copy takes 1 us, a far one 6. Expert 2 of rank 2 (its own 18 assignments, 324 us) goes
    # to rank 1, the lowest of equals, as rank 0 then binds (expert 0: 12 * (18 + 8) = 312 us).
    # Expert 0 goes to rank 3: 6 * 26 + 2*6 = 168. Each copy is then on the other's node; the swap
    # costs no time.
    near = Cluster("by hand", 2, 2, 1e9, 1e9, 6e9, 0.0, 0.0, 0.0)
    load_RE = torch.tensor([[0] * 4, [0] * 4, [12, 0, 18, 0], [0] * 4])
    plan = PLANNERS["flexmoe"](
        load_RE, main_E=contiguous_mains(4, 4), cluster=near, model_dims=DIMS, replica_slots=1
    )
    assert plan.expert_G.tolist() == [0, -1, 1, 0, 2, -1, 3, 2]


# --- UltraEP


def test_ultraep_lets_the_lowest_of_equally_loaded_ranks_choose_first():
    # Ranks 0 and 1 have 40 each, level 20; ranks 2 and 3 have equal room, the lower is taken first.
    plan = plan_with(ultraep, [[10, 10, 0, 0]] * 4, nodes=1, slots=1)
    assert plan.expert_G.tolist() == [0, -1, 1, -1, 2, 0, 3, 1]


@pytest.mark.parametrize(
    ("one_domain", "loads"), [(False, [48, 48, 16, 16]), (True, [32, 32, 32, 32])]
)
def test_ultraep_reaches_the_mean_of_the_domain(one_domain, loads):
    # Expert 0 (96) is on rank 0, expert 4 (32) on rank 2: nodes of two ranks with means 48 and 16.
    load = [[24, 0, 0, 0, 8, 0, 0, 0]] * 4
    plan = plan_with(ultraep, load, nodes=2, slots=2, one_domain=one_domain)
    check_plan(plan, torch.tensor(load), contiguous_mains(4, 8), 2)
    assert rank_loads(plan) == loads


# --- MoonEP


def test_moonep_levels_exactly_and_stops_at_its_slots():
    # Home groups 30, 6, 0, 0 of two experts each: level 9. Ranks 2 and 3 take 9 of group 0 each,
    # rank 1 takes 3; expert 0 (16) and 1 (14) are cut largest first.
    load = [[4, 4, 2, 1, 0, 0, 0, 0], [4, 4, 1, 0, 0, 0, 0, 0]]
    load += [[4, 3, 1, 0, 0, 0, 0, 0], [4, 3, 1, 0, 0, 0, 0, 0]]
    perfect = plan_with(PLANNERS["moonep"], load, nodes=2, slots=1)
    assert rank_loads(perfect) == [9, 9, 9, 9]
    assert perfect.expert_G.tolist() == [0, 1, -1, 2, 3, 0, 4, 5, 0, 6, 7, 1]
    # One slot is not enough where a receiver needs two experts of its home group.
    short = plan_with(PLANNERS["moonep"], [[4, 4, 4, 0, 0, 0]] * 2, nodes=1, slots=1)
    assert rank_loads(short) == [16, 8]
    free = plan_with(FREE_PLANNERS["moonep-free"], [[4, 4, 4, 0, 0, 0]] * 2, nodes=1, slots=1)
    assert rank_loads(free) == [12, 12]
    assert free.expert_G.numel() == 6 + 2 * 2  # two slots a rank


# --- who sends it

DEMAND_R = np.array([5, 1, 4, 2])  # two nodes of two ranks
RANK_I = np.array([0, 3])


def test_splits_by_hand():
    quota_I = np.array([4, 8])
    assert in_source_order(DEMAND_R, quota_I, RANK_I).tolist() == [[4, 1], [0, 1], [0, 4], [0, 2]]
    # Own: rank 0 keeps 4, rank 3 its 2. Node 0 has no quota left, node 1 takes 4, the rest crosses.
    assert nearest_first(2)(DEMAND_R, quota_I, RANK_I).tolist() == [[4, 1], [0, 1], [0, 4], [0, 2]]
    quota_I = np.array([7, 5])
    assert nearest_first(2)(DEMAND_R, quota_I, RANK_I).tolist() == [[5, 0], [1, 0], [1, 3], [0, 2]]
    # Own: 5 and 2. Left 2 and 3 of 5: rank 1 has 0.4 and 0.6, rank 2 has 1.6 and 2.4.
    split = own_rank_then_proportional(DEMAND_R, quota_I, RANK_I)
    assert split.tolist() == [[5, 0], [0, 1], [2, 2], [0, 2]]


def test_published_eplb_balances_the_standard_workload():
    """Official EPLB, global, fed the exact load: at most 1.01 of the mean on a Zipf load."""
    load_RE = load_of(zipf(640, 8, 32, 512, seed=7), 640)
    plan = FREE_PLANNERS["eplb-free"](
        load_RE, main_E=contiguous_mains(32, 640), cluster=load_cluster("h800_4x8"),
        model_dims=DIMS, replica_slots=2,
    )  # fmt: skip
    loads = rank_loads(plan)
    assert max(loads) * 32 <= 1.01 * sum(loads)
