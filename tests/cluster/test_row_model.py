"""What a deduplicating dispatcher sends: rows by hand, by definition, and the price of none."""

import pytest
import torch

from topoep_titan.cluster import Cluster, ModelDims, modelled_time
from topoep_titan.cluster.cost_model import unit_costs
from topoep_titan.cluster.row_model import DISPATCHERS, modelled_row_time, row_traffic, rows_to
from topoep_titan.errors import InputError
from topoep_titan.planning.plan import contiguous_mains, cut_assignments, unbalanced_plan
from topoep_titan.planning.workloads import load_of, skew

CLUSTER = Cluster("2x2", 2, 2, 400e12, 50e9, 200e9, 0.0, 0.0, 30.0)
DIMS = ModelDims(2048, 768)


def test_two_tokens_by_hand():
    """Rank 0 sends token A to experts on ranks 0, 2, 3 and 3, token B to ranks 1, 1, 2 and 3."""
    main_E = contiguous_mains(4, 8)  # two experts a rank
    ids_TK = torch.tensor([[0, 4, 6, 7], [2, 3, 5, 6]])
    nothing = torch.zeros(0, 4, dtype=torch.int64)
    plan = unbalanced_plan(load_of(torch.stack([ids_TK] + [ids_TK * 0] * 3), 8), main_E, 0)
    cost = unit_costs(CLUSTER, DIMS)
    # Loads 1, 2, 2, 3. Rows to rank 3 are two (A and B) instead of three assignments; the relay of
    # rank 0 in the other node is rank 2, which keeps its own and passes two on to rank 3.
    ports = {"alltoall": (5, 2), "dedup": (4, 1), "dedup-node": (2, 2)}  # far, near
    for dispatcher, (far, near) in ports.items():
        time = modelled_row_time(
            plan.expert_G, [ids_TK, nothing, nothing, nothing], main_E=main_E, cluster=CLUSTER,
            dims=DIMS, dispatcher=dispatcher,
        )  # fmt: skip
        assert time.token == cost.token_far * far + cost.token_near * near, dispatcher
        assert (time.compute, time.replica, time.plan) == (3 * cost.assignment, 0, 0)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_traffic_by_definition(dispatcher):
    cluster = CLUSTER.resized(6, 3)
    far_RR, near_RR = (torch.zeros(6, 6, dtype=torch.int64) for _ in range(2))
    rows = []
    for source in range(6):
        generator = torch.Generator().manual_seed(source)
        rank_TK = torch.randint(0, 6, (20 + source, 4), generator=generator)
        rows.append(rows_to(rank_TK, cluster, dispatcher))
        for ranks in rank_TK.tolist():
            targets = ranks if dispatcher == "alltoall" else set(ranks)
            if dispatcher != "dedup-node":
                hops = [(source, target) for target in targets]
            else:
                relay_of = {target: target // 3 * 3 + source % 3 for target in targets}
                hops = [(source, relay) for relay in set(relay_of.values())]
                hops += [(relay, target) for target, relay in relay_of.items()]
            for a, b in hops:
                if a != b:
                    (near_RR if a // 3 == b // 3 else far_RR)[a, b] += 1
    counted = row_traffic(torch.stack(rows), cluster, dispatcher)
    assert torch.equal(counted[0], far_RR)
    assert torch.equal(counted[1], near_RR)


def test_without_deduplication_it_is_the_cost_model():
    cluster = CLUSTER.resized(8, 4)
    ids_RTK = skew(16, 4, 8, 64, router_skew=-1, seed=0).long()
    main_E = contiguous_mains(8, 16)
    plan = unbalanced_plan(load_of(ids_RTK, 16), main_E, 1)
    slots = [cut_assignments(plan, ids_RTK[rank], rank) for rank in range(8)]
    kwargs = {"main_E": main_E, "cluster": cluster, "dims": DIMS}
    assert modelled_row_time(
        plan.expert_G, slots, dispatcher="alltoall", **kwargs
    ) == modelled_time(plan.expert_G, plan.assignments_RG, **kwargs)


def test_refuses_what_it_cannot_price():
    slots = [torch.zeros(1, 1, dtype=torch.int64)] * 4
    expert_G = torch.arange(4, dtype=torch.int32)
    kwargs = {"main_E": torch.arange(4), "cluster": CLUSTER, "dims": DIMS}
    with pytest.raises(InputError, match="unknown dispatcher 'relay'"):
        modelled_row_time(expert_G, slots, dispatcher="relay", **kwargs)
    with pytest.raises(InputError, match="3 tensors of slots for the 4 ranks"):
        modelled_row_time(expert_G, slots[:3], dispatcher="dedup", **kwargs)
