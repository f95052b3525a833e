"""The joint planner in rows: picks by hand, its laws on drawn routing, compiled as specified."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.native_library import build_or_skip
from topoep_titan.cluster import Cluster, ModelDims, load_cluster
from topoep_titan.cluster.cost_model import unit_costs
from topoep_titan.cluster.row_model import modelled_row_time
from topoep_titan.errors import InputError
from topoep_titan.planning import RowPlanner, make_planner, native, rows
from topoep_titan.planning.coupled import PRESETS, coupled
from topoep_titan.planning.plan import (
    Plan,
    check_plan,
    check_slots,
    contiguous_mains,
    cut_assignments,
    unbalanced_plan,
)
from topoep_titan.planning.row_slots import pick_slots
from topoep_titan.planning.rows import finish_rows, plan_in_rows, propose_rows
from topoep_titan.planning.workloads import load_of, skew

DEDUP = ("dedup", "dedup-node")
# A 64th of Qwen3's 4,096 tokens a rank, and all other prices cut to that scale.
CLUSTER = replace(load_cluster("h800_4x8"), flops=400e12 / 64, plan_us=30 / 64)
DIMS = ModelDims(2048, 12)


@pytest.fixture(scope="module", autouse=True)
def _library():
    build_or_skip()


@pytest.mark.parametrize("pick", [pick_slots, native.pick_slots])
def test_tokens_that_are_there_anyway_go_first(pick):
    """Two ranks. Expert 0 has its main on rank 0 and a replica on rank 1, the home of expert 1; the
    source is rank 0 of another node, and must send two of its four tokens to the replica."""
    cluster = Cluster("2x2", 2, 2, 400e12, 50e9, 200e9, 0.0, 0.0, 0.0)
    expert_G = torch.tensor([2, -1, 3, -1, 0, -1, 1, 0], dtype=torch.int32)
    assignments_RG = torch.zeros(4, 8, dtype=torch.int32)
    assignments_RG[0] = torch.tensor([2, 0, 0, 0, 2, 0, 2, 2])
    plan = Plan(expert_G, assignments_RG)
    ids_TK = torch.tensor([[0, 2], [1, 0], [0, 2], [0, 1]])
    costs = unit_costs(cluster, ModelDims(64, 64))
    for dispatcher in DEDUP:  # tokens 1 and 3 visit rank 3 for expert 1
        slot_TK = pick(plan, ids_TK, 0, cluster, costs, dispatcher)
        assert slot_TK.dtype == torch.int16
        assert slot_TK.tolist() == [[4, 0], [6, 7], [4, 0], [7, 6]]


def routed(preset: str, seed: int = 0) -> torch.Tensor:
    """int64 (32, 64, K)."""
    structure = replace(PRESETS[preset], document=8)
    ids_TK = coupled(structure, layers=1, tokens=32 * 64, seed=seed)[0].long()
    return ids_TK.view(32, 64, -1)


def price(plan: Plan, slots: list, main_E: torch.Tensor, dispatcher: str) -> int:
    return modelled_row_time(
        plan.expert_G, slots, main_E=main_E, cluster=CLUSTER, dims=DIMS, dispatcher=dispatcher
    ).total


@pytest.mark.parametrize("dispatcher", DEDUP)
@pytest.mark.parametrize("preset", ["top2", "top6", "hot8"])
def test_laws_on_coupled_routing(preset, dispatcher):
    """Lawful, the same on every rank, faster than no replicas, not slower than joint by the cut."""
    ids_RTK, main_E = routed(preset), contiguous_mains(32, 128)
    load_RE = load_of(ids_RTK, 128)
    settings = {"dispatcher": dispatcher, "main_E": main_E, "cluster": CLUSTER, "model_dims": DIMS}
    proposals = [
        propose_rows(ids_TK, load_RE, rank=rank, replica_slots=2, **settings)
        for rank, ids_TK in enumerate(ids_RTK)
    ]
    rows_RCX = torch.stack([proposal.rows_CX for proposal in proposals])
    plans, slots = zip(*(finish_rows(proposal, rows_RCX, **settings) for proposal in proposals))
    for rank, (plan, slot_TK) in enumerate(zip(plans, slots)):
        assert torch.equal(plan.expert_G, plans[0].expert_G)
        assert torch.equal(plan.assignments_RG, plans[0].assignments_RG)
        check_slots(plan, slot_TK, rank)
        assert torch.equal(plan.expert_G[slot_TK.long()].long(), ids_RTK[rank])
    check_plan(plans[0], load_RE, main_E, replica_slots=2)

    chosen = price(plans[0], slots, main_E, dispatcher)
    none = unbalanced_plan(load_RE, main_E, 2)
    cut = [cut_assignments(none, ids_TK, rank) for rank, ids_TK in enumerate(ids_RTK)]
    assert plans[0].num_replicas > 0
    assert chosen < price(none, cut, main_E, dispatcher)
    joint = native.joint(load_RE, main_E=main_E, cluster=CLUSTER, model_dims=DIMS, replica_slots=2)
    cut = [cut_assignments(joint, ids_TK, rank) for rank, ids_TK in enumerate(ids_RTK)]
    assert chosen <= price(joint, cut, main_E, dispatcher)


@pytest.mark.parametrize("dispatcher", DEDUP)
def test_level_routing_gets_no_replica(dispatcher):
    ids_RTK = skew(64, 2, 8, 64, router_skew=0, seed=0).long()
    cluster = CLUSTER.resized(8, 4)
    plan, slots = plan_in_rows(
        list(ids_RTK), load_of(ids_RTK, 64), dispatcher=dispatcher,
        main_E=contiguous_mains(8, 64), cluster=cluster, model_dims=ModelDims(2048, 768),
        replica_slots=2,
    )  # fmt: skip
    assert plan.num_replicas == 0
    check_slots(plan, slots[3], 3)


def drawn(seed: int) -> dict:
    """A small case of ragged ranks, shape and prices drawn from ``seed``, edges included."""
    rng = np.random.default_rng(seed)
    per_node, nodes, mains = (int(rng.integers(1, high)) for high in (4, 4, 4))
    ranks, experts = per_node * nodes, per_node * nodes * mains
    top_k = int(rng.integers(1, min(experts, 6) + 1))
    popularity = rng.normal(0, rng.uniform(0, 4), experts)
    ids = [
        torch.tensor(
            np.argsort(popularity + rng.gumbel(size=(tokens, experts)), axis=1)[:, :top_k].copy()
        )
        for tokens in rng.integers(0, 200, ranks) * (rng.random(ranks) > 0.2)
    ]
    return {
        "ids_of_ranks": ids,
        "load_RE": torch.stack([torch.bincount(i.flatten(), minlength=experts) for i in ids]),
        "dispatcher": DEDUP[seed % 2],
        "main_E": torch.tensor(rng.permutation(np.arange(experts) // mains)),
        "cluster": Cluster("drawn", nodes, per_node, 1e12, 50e9, 200e9, 0.0, 0.0, 0.01),
        "model_dims": ModelDims(int(rng.choice([8, 64])), int(rng.choice([1, 4]))),
        "replica_slots": int(rng.integers(0, 4)),
    }


def test_compiled_picks_are_the_specified_ones():
    split = 0
    for seed in range(60):
        case = drawn(seed)
        ids, dispatcher = case.pop("ids_of_ranks"), case.pop("dispatcher")
        costs = unit_costs(case["cluster"], case["model_dims"])
        plan = native.joint(**case, rows=1, rounds=20)
        for rank, ids_TK in enumerate(ids):
            arguments = (plan, ids_TK, rank, case["cluster"], costs, dispatcher)
            expected_TK, slot_TK = pick_slots(*arguments), native.pick_slots(*arguments)
            assert torch.equal(slot_TK, expected_TK), (seed, rank)
            check_slots(plan, slot_TK, rank)
            used_E = torch.bincount(plan.expert_G[plan.assignments_RG[rank] > 0])
            split += int((used_E > 1).sum())
    assert split > 100  # experts with several instances to deal to


def test_without_the_library_the_plan_is_the_same(monkeypatch):
    case = drawn(21)
    plan, slots = plan_in_rows(**case)
    monkeypatch.setattr(rows, "is_built", lambda device_type: False)
    other, other_slots = plan_in_rows(**case)
    assert plan.num_replicas > 0
    assert torch.equal(plan.expert_G, other.expert_G)
    assert torch.equal(plan.assignments_RG, other.assignments_RG)
    for slot_TK, other_TK in zip(slots, other_slots):
        assert torch.equal(slot_TK, other_TK)


def test_only_joint_under_deduplication_plans_in_rows():
    settings = {
        "main_E": contiguous_mains(32, 128), "cluster": CLUSTER, "model_dims": DIMS,
        "replica_slots": 2,
    }  # fmt: skip
    assert isinstance(make_planner("joint", "dedup-node", **settings), RowPlanner)
    for name, dispatcher in (("joint", "alltoall"), ("topoep", "dedup"), ("none", "dedup-node")):
        assert not isinstance(make_planner(name, dispatcher, **settings), RowPlanner)


def test_refuses_bad_input():
    case = drawn(3)
    ids, load_RE = case.pop("ids_of_ranks"), case.pop("load_RE")
    with pytest.raises(InputError, match="more than the 32768 that int16 numbers"):
        propose_rows(ids[0], load_RE, rank=0, **{**case, "replica_slots": 2**15})
    with pytest.raises(ValueError, match="counts are not those of the ids"):
        propose_rows(ids[0][1:], load_RE, rank=0, **case)
