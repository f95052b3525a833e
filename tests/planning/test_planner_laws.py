"""Every planner keeps the contract on every kind of load; TopoEP equals a dense brute force.

Letters: R ranks, E experts, S replica slots a rank, M nodes, q[s, x, r] assignments of source s to
expert x executed on rank r (dense, for small inputs only).
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from topoep_titan.cluster import ModelDims, load_cluster
from topoep_titan.cluster.cost_model import unit_costs
from topoep_titan.planning import FREE_PLANNERS, PLANNERS, REFERENCE, check_load, check_plan
from topoep_titan.planning.plan import MAX_ASSIGNMENTS, contiguous_mains

H800 = load_cluster("h800_4x8")
TINY = ModelDims(hidden=8, moe_intermediate=1)  # a replica costs as much as 2 crossing assignments
QWEN3 = ModelDims(hidden=2048, moe_intermediate=768)  # as much as 1,152


def uniform(rng, ranks, main_E):
    return np.full((ranks, main_E.size), int(rng.integers(1, 50)))


def single_hot_expert(rng, ranks, main_E):
    load = rng.integers(0, 20, (ranks, main_E.size))
    load[:, rng.integers(main_E.size)] += 3000
    return load


def hot_main_rank(rng, ranks, main_E):
    load = rng.integers(0, 20, (ranks, main_E.size))
    load[:, main_E == rng.integers(ranks)] *= 100
    return load


def equal_ranks_skewed_inside(rng, ranks, main_E):
    load = np.zeros((ranks, main_E.size), dtype=np.int64)
    for rank in range(ranks):  # one expert of each main group has it all
        load[:, np.flatnonzero(main_E == rank)[0]] = 100
    return load


def power_law(rng, ranks, main_E):
    return rng.poisson(4000 / (1 + rng.permutation(main_E.size)), (ranks, main_E.size))


def ragged_sources(rng, ranks, main_E):
    load = rng.integers(0, 200, (ranks, main_E.size))
    return load * rng.integers(0, 4, (ranks, 1))  # some ranks have no tokens at all


def empty_experts(rng, ranks, main_E):
    return rng.integers(0, 500, (ranks, main_E.size)) * (rng.random(main_E.size) < 0.3)


def all_to_one_expert(rng, ranks, main_E):
    load = np.zeros((ranks, main_E.size), dtype=np.int64)
    load[:, rng.integers(main_E.size)] = MAX_ASSIGNMENTS // ranks  # the largest load accepted
    return load


def nothing(rng, ranks, main_E):
    return np.zeros((ranks, main_E.size), dtype=np.int64)


PATTERNS = (
    uniform, single_hot_expert, hot_main_rank, equal_ranks_skewed_inside, power_law,
    ragged_sources, empty_experts, all_to_one_expert, nothing,
)  # fmt: skip


@st.composite
def problems(draw):
    """(load_RE, keyword arguments of a planner): R = 1, one node, nodes of one rank, E = R, S = 0
    and S above all use are among them."""
    nodes, ranks_per_node = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ranks = nodes * ranks_per_node
    experts = ranks * draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    main_E = contiguous_mains(ranks, experts)
    if draw(st.booleans()):
        main_E = main_E[torch.from_numpy(rng.permutation(experts))]
    load = draw(st.sampled_from(PATTERNS))(rng, ranks, main_E.numpy())
    return torch.from_numpy(load.astype(draw(st.sampled_from([np.int32, np.int64])))), {
        "main_E": main_E,
        "cluster": H800.resized(ranks, ranks_per_node),
        "model_dims": draw(st.sampled_from([TINY, QWEN3])),
        "replica_slots": draw(st.sampled_from([0, 1, 2, 3, 20])),
    }


@settings(max_examples=150, deadline=None)
@given(problems())
def test_every_planner_keeps_the_laws(problem):
    load_RE, arguments = problem
    slots = arguments["replica_slots"]
    check_load(load_RE, arguments["main_E"], slots)
    untouched = load_RE.clone()
    for name, planner in PLANNERS.items():
        try:
            plan = planner(load_RE, **arguments)
            check_plan(plan, load_RE, arguments["main_E"], slots)
        except Exception as error:
            error.add_note(f"planner {name}")
            raise
        again = REFERENCE[name](load_RE.clone(), **arguments)  # the compiled one's specification
        assert torch.equal(plan.expert_G, again.expert_G), name
        assert torch.equal(plan.assignments_RG, again.assignments_RG), name
        assert torch.equal(load_RE, untouched), name
        if not slots or load_RE.shape[0] == 1:
            assert plan.num_replicas == 0, name


@settings(max_examples=50, deadline=None)
@given(problems())
def test_published_forms_conserve_assignments(problem):
    load_RE, arguments = problem
    ranks, experts = load_RE.shape
    for planner in FREE_PLANNERS.values():
        plan = planner(load_RE, **arguments)
        slots = (plan.expert_G.numel() - experts) // ranks  # moonep-free takes what it needs
        assert slots >= arguments["replica_slots"]
        check_plan(plan, load_RE, arguments["main_E"], slots, mains_fixed=False)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_topoep_equals_a_dense_brute_force(problem):
    load_RE, arguments = problem
    plan = PLANNERS["topoep"](load_RE, **arguments)
    q, hosts = brute_force_topoep(load_RE.numpy(), **arguments)
    ranks = load_RE.shape[0]
    rank_G = np.arange(plan.expert_G.numel()) // (plan.expert_G.numel() // ranks)
    planned_q, planned_hosts = np.zeros_like(q), np.zeros_like(hosts)
    for slot, expert in enumerate(plan.expert_G.tolist()):
        if expert >= 0:
            planned_hosts[expert, rank_G[slot]] = True
            planned_q[:, expert, rank_G[slot]] = plan.assignments_RG[:, slot].numpy()
    np.testing.assert_array_equal(planned_hosts, hosts)
    np.testing.assert_array_equal(planned_q, q)


def brute_force_topoep(load, *, main_E, cluster, model_dims, replica_slots):
    """The paper's sections 4.2 and 4.3 on dense arrays: every pair is scored, then sorted."""
    ranks, experts = load.shape
    node = np.arange(ranks) // cluster.ranks_per_node
    main = main_E.numpy()
    hosts = main[:, None] == np.arange(ranks)  # x[e, r]
    capacity = experts // ranks + replica_slots
    demand = np.stack([load[node == d].sum(0) for d in range(cluster.nodes)])
    benefit = 2 * demand * model_dims.token_bytes - model_dims.expert_bytes  # equation 9
    for gain, x, d in sorted(
        (-benefit[d, x], x, d) for d in range(cluster.nodes) for x in range(experts)
    ):
        free = [r for r in range(ranks) if node[r] == d and hosts[:, r].sum() < capacity]
        if gain < 0 and node[main[x]] != d and free:
            hosts[x, min(free, key=lambda r: (hosts[:, r].sum(), r))] = True
    q = np.zeros((ranks, experts, ranks), dtype=np.int64)
    for s, x in np.ndindex(ranks, experts):
        near = np.flatnonzero(hosts[x] & (node == node[s]))
        chosen = near if near.size else np.flatnonzero(hosts[x])
        q[s, x, chosen] = load[s, x] // chosen.size
        for i in range(load[s, x] % chosen.size):
            q[s, x, chosen[(s + i) % chosen.size]] += 1
    cost = unit_costs(cluster, model_dims)
    per_token = np.where(node[:, None] == node, cost.token_near, cost.token_far)
    np.fill_diagonal(per_token, 0)
    for d in range(cluster.nodes):
        while step := brute_force_step(q, hosts, np.flatnonzero(node == d), capacity, per_token):
            x, busiest, target, moved = step
            q[:, x, busiest] -= moved
            q[:, x, target] += moved
            hosts[x, target] = True
    return q, hosts


def brute_force_step(q, hosts, domain, capacity, per_token):
    """The best of all (expert, target) pairs of the busiest rank (equation 10), or None."""
    load = q.sum((0, 1))
    busiest = max(domain, key=lambda r: (load[r], -r))
    scored = []
    for x in range(hosts.shape[0]):
        for target in domain:
            delta = min(q[:, x, busiest].sum(), (load[busiest] - load[target]) // 2)
            if delta <= 0 or not (hosts[x, target] or hosts[:, target].sum() < capacity):
                continue
            moved, left = np.zeros(len(load), dtype=np.int64), delta
            for s in range(len(load)):
                moved[s] = min(left, q[s, x, busiest])
                left -= moved[s]
            communication = (moved * per_token[:, target]).sum()
            key = (-delta, load[target], not hosts[x, target], communication, x, target)
            scored.append((key, moved))
    if not scored:
        return None
    (*_, x, target), moved = min(scored, key=lambda candidate: candidate[0])
    return x, busiest, target, moved


@pytest.mark.parametrize("pattern", [uniform, equal_ranks_skewed_inside])
@pytest.mark.parametrize("name", ["ultraep", "moonep", "moonep-free"])
def test_balanced_ranks_move_nothing(name, pattern):
    main_E = contiguous_mains(8, 32)
    load = pattern(np.random.default_rng(0), 8, main_E.numpy()).astype(np.int64)
    plan = {**PLANNERS, **FREE_PLANNERS}[name](
        torch.from_numpy(load), main_E=main_E, cluster=H800.resized(8, 4), model_dims=QWEN3,
        replica_slots=2,
    )  # fmt: skip
    assert plan.num_replicas == 0
