"""The joint planner: a worked example by hand, the price law, and never slower than no replicas."""

import numpy as np
import pytest
import torch

from topoep_titan.cluster import Cluster, ModelDims, load_cluster, modelled_time
from topoep_titan.cluster.cost_model import UnitCosts, unit_costs
from topoep_titan.planning import PLANNERS, REFERENCE, check_plan
from topoep_titan.planning.joint import joint, split
from topoep_titan.planning.joint_build import Pair, Recipe, build, list_pairs
from topoep_titan.planning.joint_level import level
from topoep_titan.planning.joint_ports import (
    Problem,
    Slots,
    find_peaks,
    make_problem,
    ports_of,
    total_time,
)
from topoep_titan.planning.joint_relieve import relieve
from topoep_titan.planning.plan import contiguous_mains, unbalanced_plan

COSTS = UnitCosts(assignment=4, token_far=8, token_near=2, copy_far=400, copy_near=100, plan=0)


def two_by_two() -> tuple[Problem, torch.Tensor, torch.Tensor]:
    """Two domains of two ranks, one main a rank, one slot; ranks 0 and 1 are domain 0."""
    load_RE = torch.tensor([[60, 20, 10, 10], [40, 40, 10, 10], [50, 10, 20, 20], [70, 10, 10, 10]])
    main_E = contiguous_mains(4, 4)
    cluster = Cluster("hand", 2, 2, 400e12, 50e9, 200e9, 0.0, 0.0, 0.0)
    return make_problem(load_RE, main_E, cluster, COSTS, 1, 0), load_RE, main_E


def test_candidate_by_hand():
    problem, load_RE, main_E = two_by_two()
    # A far copy costs 400, half of it 25 far assignments: only domain 1's 120 for expert 0 qualify.
    pairs = list_pairs(problem)
    assert pairs == [Pair(domain=1, expert=0, demand=120)]

    # Bringing expert 0 makes the domains execute 180 and 220; the mean is 200 a domain, so 20 of
    # expert 0 go back: 120 at home, 100 in domain 1. Domain 1: the 100 land on rank 2 (both mains
    # execute 50; lowest rank), which sheds its own 50 of expert 2 to rank 3. Domain 0: rank 0 sheds
    # 20 of its 120 to rank 1. Every rank executes 100.
    recipe = Recipe(copies=3, share=8, whole=1, select_far=5, fill_far=0)
    slots = build(problem, pairs, recipe)
    assert (slots.expert_N, slots.quota_N) == ([-1, 0, 0, 2], [0, 20, 100, 50])

    # Rank 2 takes 50 of expert 0 from itself, so all 20 that leave domain 1 come from rank 3, onto
    # rank 0 (rank 1's quota is its own). Rank 3 receives 20 of expert 2 and 20 of expert 3: far
    # port 40. Rank 3 sends 100 - 20 own - 30 far = 50 near, rank 2 receives 100 - 50 own = 50.
    # Rank 0 sends a far and a near copy of expert 0, rank 2 receives one far and sends one near.
    peaks = find_peaks(problem, ports_of(problem, slots), range(4))
    assert (peaks.load, peaks.far, peaks.near, peaks.copies) == (100, 40, 50, 500)
    assert total_time(problem, peaks) == 4 * 100 + 8 * 40 + 2 * 50 + 500

    plan = split(problem, slots, load_RE, main_E)
    check_plan(plan, load_RE, main_E, replica_slots=1)
    assert plan.expert_G.tolist() == [0, -1, 1, 0, 2, 0, 3, 2]
    assert plan.assignments_RG[:, [0, 3, 5]].tolist() == [  # expert 0 on ranks 0, 1 and 2
        [60, 0, 0],
        [20, 20, 0],
        [0, 0, 50],
        [20, 0, 50],
    ]


def test_levelled_start_by_hand():
    problem, *_ = two_by_two()
    # The ranks execute 220, 80, 50, 50. Rank 1 of the same domain misses 20 of the mean and comes
    # first, though it is not the emptiest; then ranks 2 and 3 take 50 each.
    slots = level(problem)
    assert (slots.expert_N, slots.quota_N) == ([-1, 0, 0, 0], [0, 20, 50, 50])

    # At 95 it misses less than a tenth: the emptiest goes first, and comes up to the mean; rank 3
    # takes its 55, rank 1 what is left.
    load_RE = torch.tensor([[220, 95, 40, 45]] + [[0] * 4] * 3)
    cluster = Cluster("hand", 2, 2, 400e12, 50e9, 200e9, 0.0, 0.0, 0.0)
    slots = level(make_problem(load_RE, contiguous_mains(4, 4), cluster, COSTS, 1, 0))
    assert (slots.expert_N, slots.quota_N) == ([-1, 0, 0, 0], [0, 5, 60, 55])


def test_relief_halves_the_gap_by_hand():
    """Expert 0 has its main on rank 0 and a replica on rank 1; all its work comes from outside."""
    load_RE = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 0], [40, 0, 0, 0], [40, 0, 0, 0]])
    cluster = Cluster("hand", 2, 2, 400e12, 50e9, 200e9, 0.0, 0.0, 0.0)
    dear = UnitCosts(1, token_far=8, token_near=2, copy_far=10**6, copy_near=0, plan=0)
    problem = make_problem(load_RE, contiguous_mains(4, 4), cluster, dear, 1, 0)
    slots = Slots(expert_N=[-1, 0, -1, -1], quota_N=[0, 10, 0, 0], outside_N=[0, 0, 0, 0])
    # Rank 0 receives 70 and rank 1 ten: half the gap of 60 moves; no far copy is worth its price.
    peaks = relieve(problem, slots, rounds=5)
    assert (slots.expert_N, slots.quota_N[1]) == ([-1, 0, -1, -1], 40)
    assert (peaks.load, peaks.far) == (40, 40)  # the sources send 40 each as well


def skewed_load(seed: int, ranks: int, experts: int, tokens: int) -> torch.Tensor:
    """Log-normal popularity, ragged sources: every third rank holds half as much."""
    rng = np.random.default_rng(seed)
    popularity = np.exp(rng.normal(0, rng.uniform(0.5, 3), experts))
    tokens_R = [tokens // (1 + (rank % 3 == 2)) for rank in range(ranks)]
    rows = [rng.multinomial(count, popularity / popularity.sum()) for count in tokens_R]
    return torch.tensor(np.stack(rows))


def a_cluster(nodes: int, ranks_per_node: int) -> Cluster:
    return load_cluster("h800_4x8").resized(nodes * ranks_per_node, ranks_per_node)


@pytest.mark.parametrize("seed", range(8))
def test_internal_price_is_the_modelled_time(seed):
    cluster, dims = a_cluster(2 + seed % 3, 1 + seed % 4), ModelDims(2048, 768)
    experts = 3 * cluster.ranks
    main_E = torch.randperm(experts, generator=torch.Generator().manual_seed(seed)) // 3
    load_RE = skewed_load(seed, cluster.ranks, experts, 30_000)
    problem = make_problem(load_RE, main_E, cluster, unit_costs(cluster, dims), 2, 60)
    pairs = list_pairs(problem)
    recipe = Recipe(copies=3, share=6, whole=seed % 2, select_far=30, fill_far=40 * (seed % 3))
    slots = build(problem, pairs, recipe)
    for rounds in (0, 1, 20):
        peaks = relieve(problem, slots, rounds)
        plan = split(problem, slots, load_RE, main_E)
        check_plan(plan, load_RE, main_E, replica_slots=2)
        time = modelled_time(
            plan.expert_G, plan.assignments_RG, main_E=main_E, cluster=cluster, dims=dims
        )
        assert plan.num_replicas > 0
        assert total_time(problem, peaks) == time.total


def total_of(name: str, load_RE: torch.Tensor, cluster: Cluster, **settings) -> int:
    dims, main_E = ModelDims(2048, 768), contiguous_mains(*load_RE.shape)
    plan = PLANNERS[name](
        load_RE, main_E=main_E, cluster=cluster, model_dims=dims, replica_slots=2, **settings
    )
    check_plan(plan, load_RE, main_E, replica_slots=2)
    return modelled_time(
        plan.expert_G, plan.assignments_RG, main_E=main_E, cluster=cluster, dims=dims
    ).total


@pytest.mark.parametrize("shape", [(4, 8), (1, 8), (8, 1), (2, 4)])
def test_never_slower_than_no_replicas_and_faster_than_topoep_on_skew(shape):
    cluster = a_cluster(*shape)
    ratios = []
    for seed in range(6):
        load_RE = skewed_load(seed, cluster.ranks, 4 * cluster.ranks, 32_768)
        total = total_of("joint", load_RE, cluster)
        assert total <= total_of("none", load_RE, cluster)
        ratios.append(total / total_of("topoep", load_RE, cluster))
    assert np.exp(np.log(ratios).mean()) < 0.95, ratios


@pytest.mark.parametrize("name", ["joint reference", "joint"])
def test_balanced_or_empty_load_needs_no_replica(name):
    planner = REFERENCE["joint"] if "reference" in name else PLANNERS["joint"]
    main_E = contiguous_mains(8, 16)
    for load_RE in (torch.full((8, 16), 100), torch.zeros(8, 16, dtype=torch.int64)):
        plan = planner(
            load_RE, main_E=main_E, cluster=a_cluster(2, 4), model_dims=ModelDims(2048, 768),
            replica_slots=2,
        )  # fmt: skip
        expected = unbalanced_plan(load_RE, main_E, 2)
        assert torch.equal(plan.expert_G, expected.expert_G)
        assert torch.equal(plan.assignments_RG, expected.assignments_RG)


def test_planning_time_is_charged():
    """The gain of this load's plan is below a planning time of ten seconds: no replica then."""
    dims, main_E = ModelDims(2048, 768), contiguous_mains(8, 16)
    load_RE = skewed_load(0, 8, 16, 32_768)
    cheap = a_cluster(2, 4)
    dear = Cluster(**{**vars(cheap), "plan_us": 10e6})
    plans = [
        joint(load_RE, main_E=main_E, cluster=cluster, model_dims=dims, replica_slots=2)
        for cluster in (cheap, dear)
    ]
    assert plans[0].num_replicas > 0
    assert plans[1].num_replicas == 0


def test_taste_for_balance_levels_the_ranks():
    cluster, main_E = a_cluster(4, 4), contiguous_mains(16, 64)
    worst = []
    for weight in (0, 300):
        imbalance = 0.0
        for seed in range(6):
            load_RE = skewed_load(seed, 16, 64, 32_768)
            plan = PLANNERS["joint"](
                load_RE, main_E=main_E, cluster=cluster, model_dims=ModelDims(2048, 768),
                replica_slots=2, balance_weight=weight,
            )  # fmt: skip
            load_R = plan.assignments_RG.long().view(16, 16, -1).sum((0, 2)).double()
            imbalance += float(load_R.max() / load_R.mean())
        worst.append(imbalance)
    assert worst[1] < worst[0]
