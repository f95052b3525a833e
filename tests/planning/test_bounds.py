"""Bounds against a case done by hand, every plan of a tiny group, and every planner."""

import dataclasses
from itertools import product

import numpy as np
import pytest
import torch

from topoep_titan.cluster import ModelDims, load_cluster, modelled_time
from topoep_titan.cluster.cost_model import unit_costs
from topoep_titan.errors import InputError
from topoep_titan.planning import PLANNERS
from topoep_titan.planning.bounds import MILP_GAP, milp_bound, relaxed_bound
from topoep_titan.planning.plan import contiguous_mains
from topoep_titan.planning.quality import plan_quality

H800 = load_cluster("h800_4x8")
QWEN3 = ModelDims(hidden=2048, moe_intermediate=768)


def arguments(load_RE, ranks_per_node, slots, plan_us=H800.plan_us):
    ranks, experts = load_RE.shape
    cluster = dataclasses.replace(H800, plan_us=plan_us).resized(ranks, ranks_per_node)
    return {
        "main_E": contiguous_mains(ranks, experts), "cluster": cluster, "model_dims": QWEN3,
        "replica_slots": slots,
    }  # fmt: skip


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_one_hot_expert_by_hand(ranks_per_node):
    """Each rank has 20,000 assignments of expert 0: best is a copy on rank 1 and no token moves."""
    load_RE = torch.tensor([[20_000, 0], [20_000, 0]])
    given = arguments(load_RE, ranks_per_node, slots=1)
    costs = unit_costs(given["cluster"], QWEN3)
    copy = costs.copy_far if ranks_per_node == 1 else costs.copy_near
    best = 20_000 * costs.assignment + copy + costs.plan
    bound = milp_bound(load_RE, **given, time_limit=10)
    assert bound.closed
    assert best * (1 - MILP_GAP) <= bound.total <= best
    assert relaxed_bound(load_RE, **given) <= best


@pytest.mark.parametrize("load", [[[3, 0], [4, 2]], [[2, 1], [3, 3]], [[0, 5], [0, 4]]])
def test_no_plan_of_a_tiny_group_is_below(load):
    # In 500s: a copy is worth 1,152 crossing assignments, so some loads copy and others do not.
    load_RE = 500 * torch.tensor(load)
    given = arguments(load_RE, 1, slots=1, plan_us=0.0)
    best = min(every_total(load, given))
    bound = milp_bound(load_RE, **given, time_limit=10)
    assert bound.closed
    assert relaxed_bound(load_RE, **given) <= bound.total
    assert bound.total <= best


def every_total(load, given):
    """Both experts on both ranks (every placement is a case of it) and every split in 500s."""
    expert_G = torch.tensor([0, 1, 1, 0])  # rank 0: main 0, copy of 1; rank 1: main 1, copy of 0
    amounts = [range(n + 1) for row in load for n in row]  # executed on the own expert's main
    for kept in product(*amounts):
        on_main = np.array(kept).reshape(2, 2)
        away = np.array(load) - on_main
        q = torch.tensor(np.stack([on_main[:, 0], away[:, 1], on_main[:, 1], away[:, 0]], 1)) * 500
        used_G = torch.where(q.sum(0) > 0, expert_G, -1)
        used_G[[0, 2]] = torch.tensor([0, 1])
        yield modelled_time(
            used_G, q, main_E=given["main_E"], cluster=given["cluster"], dims=QWEN3
        ).total


@pytest.mark.parametrize("ranks_per_node", [2, 4, 8])
def test_no_planner_is_below_its_bound(ranks_per_node):
    rng = np.random.default_rng(ranks_per_node)
    for exponent in (1, 3):
        popularity = rng.random(16) ** exponent
        load_RE = torch.from_numpy(rng.poisson(6000 * popularity, (8, 16)))
        given = arguments(load_RE, ranks_per_node, slots=2)
        relaxed = relaxed_bound(load_RE, **given)
        bound = milp_bound(load_RE, **given, time_limit=0.5)
        assert 0 < relaxed <= bound.total
        for name, planner in PLANNERS.items():
            plan = planner(load_RE, **given)
            measures = {key: given[key] for key in ("main_E", "cluster", "model_dims")}
            assert plan_quality(plan, **measures).modelled.total >= bound.total, name


def test_edges():
    load_RE = torch.tensor([[9000, 10], [9000, 10]])
    none = arguments(load_RE, 1, slots=0)
    expected = plan_quality(
        PLANNERS["none"](load_RE, **none), main_E=none["main_E"], cluster=none["cluster"],
        model_dims=QWEN3,
    ).modelled.total  # fmt: skip
    assert relaxed_bound(load_RE, **none) == expected  # without slots there is one plan
    assert relaxed_bound(load_RE * 0, **arguments(load_RE, 1, slots=2)) == 0
    big = torch.ones(32, 128, dtype=torch.int64)
    with pytest.raises(InputError, match="32 ranks and 128 experts is out of reach"):
        milp_bound(big, **arguments(big, 8, slots=2), time_limit=1)
