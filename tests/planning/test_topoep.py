"""The paper's Figure 9 by hand, then the law on skewed loads."""

import pytest
import torch

from topoep_titan.cluster import Cluster, ModelDims
from topoep_titan.planning import PLANNERS, check_plan
from topoep_titan.planning.plan import Plan, PlanError, contiguous_mains, cut_assignments
from topoep_titan.planning.topoep import _place_across_domains, _route, _Slots

DIMS = ModelDims(hidden=8, moe_intermediate=1)  # S_tok 16, |W| 48 bytes: two tokens pay


def two_by_two() -> Cluster:
    return Cluster("fig9", 2, 2, 400e12, 50e9, 200e9, 0.0, 0.0, 0.0)


def figure_9() -> torch.Tensor:
    """GPU 0 runs 3 of E0, 3 of E1 and 8 of E4 (main on GPU 2); GPU 1 runs 6 of its own experts."""
    load_RE = torch.zeros(4, 8, dtype=torch.int64)
    load_RE[0, [0, 1, 4]] = torch.tensor([3, 3, 8])
    load_RE[1, [2, 3]] = 3
    return load_RE


def rank_loads(assignments_RG: torch.Tensor) -> list[int]:
    return assignments_RG.view(4, 4, -1).sum((0, 2)).tolist()


def crossing(assignments_RG: torch.Tensor) -> int:
    sent = assignments_RG.view(4, 4, -1).sum(2).view(2, 2, 2, 2)
    return int(sent[0, :, 1].sum() + sent[1, :, 0].sum())


def test_figure_9_both_stages():
    load_RE, main_E = figure_9(), contiguous_mains(4, 8)
    slots = _Slots(load_RE, main_E, replica_slots=1, ranks_per_node=2)
    for domain in range(2):
        _place_across_domains(slots, domain, load_RE, main_E, DIMS)
    after_stage_1 = _route(slots, load_RE)
    assert slots.expert_G == [0, 1, 4, 2, 3, -1, 4, 5, -1, 6, 7, -1]  # E4' on GPU 0
    assert rank_loads(after_stage_1) == [14, 6, 0, 0]

    plan = PLANNERS["topoep"](
        load_RE, main_E=main_E, cluster=two_by_two(), model_dims=DIMS, replica_slots=1
    )
    check_plan(plan, load_RE, main_E, 1)
    assert plan.expert_G.tolist() == [0, 1, 4, 2, 3, 4, 4, 5, -1, 6, 7, -1]  # and E4'' on GPU 1
    assert rank_loads(plan.assignments_RG) == [10, 10, 0, 0]
    assert int(plan.assignments_RG[0, 5]) == 4  # four E4 tokens over NVLink
    assert crossing(plan.assignments_RG) == 0
    assert plan.num_replicas == 2


def test_cut_rule_by_hand():
    # Source 0 has four assignments of expert 0: the first three in token order run on its main.
    plan = Plan(
        expert_G=torch.tensor([0, -1, 1, 0], dtype=torch.int32),
        assignments_RG=torch.tensor([[3, 0, 2, 1], [0, 0, 0, 0]], dtype=torch.int32),
    )
    ids_TK = torch.tensor([[0], [1], [0], [1], [0], [0]])
    assert cut_assignments(plan, ids_TK, rank=0).flatten().tolist() == [0, 2, 0, 2, 0, 3]


@pytest.mark.parametrize("name", PLANNERS)
@pytest.mark.parametrize("slots", [0, 1, 3])
def test_every_planner_keeps_the_laws(name, slots):
    generator = torch.Generator().manual_seed(slots)
    for _ in range(20):
        load_RE = torch.randint(0, 40, (4, 8), generator=generator)
        load_RE[:, 5] *= 20  # a hot expert
        main_E = torch.randperm(8, generator=generator) // 2
        plan = PLANNERS[name](
            load_RE, main_E=main_E, cluster=two_by_two(), model_dims=DIMS, replica_slots=slots
        )
        check_plan(plan, load_RE, main_E, slots)


def plan_of(expert_G, assignments_RG) -> Plan:
    return Plan(
        torch.tensor(expert_G, dtype=torch.int32), torch.tensor(assignments_RG, dtype=torch.int32)
    )


@pytest.mark.parametrize(
    ("plan", "law"),
    [
        (plan_of([0, 1, 1], [[5, 0, 0], [0, 0, 0]]), "capacity"),
        (plan_of([1, -1, 0, -1], [[0, 0, 5, 0], [1, 0, 0, 0]]), "mains fixed"),
        (plan_of([0, 0, 1, -1], [[5, 0, 0, 0], [0, 0, 1, 0]]), "one instance"),
        (plan_of([0, 1, 1, -1], [[5, 0, 0, 0], [0, 2, -1, 0]]), "non-negative"),
        (plan_of([0, -1, 1, -1], [[4, 1, 0, 0], [0, 0, 1, 0]]), "reachability"),
        (plan_of([0, -1, 1, 0], [[5, 0, 0, 0], [0, 0, 0, 0]]), "conservation: rank 1 has 1"),
    ],
)
def test_check_plan_names_the_law(plan, law):
    load_RE = torch.tensor([[5, 0], [0, 1]])
    with pytest.raises(PlanError, match=law):
        check_plan(plan, load_RE, torch.tensor([0, 1]), replica_slots=1)
