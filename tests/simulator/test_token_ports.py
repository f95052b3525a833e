"""What ports carry: four ranks by hand in every dispatcher, then expectation against a count."""

import numpy as np
import pytest
import torch

from topoep_titan.cluster import ModelDims, load_cluster
from topoep_titan.errors import InputError
from topoep_titan.planning import PLANNERS
from topoep_titan.planning.plan import Plan, contiguous_mains, unbalanced_plan
from topoep_titan.planning.workloads import load_of, skew
from topoep_titan.simulator.traffic import copy_ports, token_ports

# Two nodes of two ranks, one expert a rank; rank 0's tokens leave, the others' stay in the node.
IDS_RTK = torch.tensor(
    [[[1, 2], [2, 3]], [[1, 0], [1, 0]], [[2, 3], [2, 3]], [[3, 2], [3, 2]]], dtype=torch.int16
)


@pytest.mark.parametrize(
    ("dispatcher", "far_R", "near_R"),
    [
        ("alltoall", [3, 0, 2, 1], [2, 2, 2, 2]),
        ("dedup", [3, 0, 2, 1], [2, 2, 2, 2]),
        # One row of each token to node 1, both to rank 2, which hands the second on to rank 3.
        ("dedup-node", [2, 0, 2, 0], [2, 2, 3, 3]),
    ],
)
def test_ports_by_hand(dispatcher, far_R, near_R):
    plan = unbalanced_plan(load_of(IDS_RTK, 4), contiguous_mains(4, 4), 0)
    ports = token_ports(plan, ranks_per_node=2, tokens=2, dispatcher=dispatcher, ids_RTK=IDS_RTK)
    assert ports.far_R.tolist() == far_R
    assert ports.near_R.tolist() == near_R
    with pytest.raises(InputError, match="choose one of: alltoall"):
        token_ports(plan, ranks_per_node=2, tokens=2, dispatcher="telepathy")


def test_copies_by_hand():
    """Expert 0 is copied to rank 1 of its node and to ranks 2 and 3 of the other."""
    expert_G = torch.tensor([0, -1, 1, 0, 2, 0, 3, 0], dtype=torch.int32)
    plan = Plan(expert_G, torch.zeros(4, 8, dtype=torch.int32))
    ports = copy_ports(plan, contiguous_mains(4, 4), ranks_per_node=2)
    assert ports.far_R.tolist() == [2, 0, 1, 1]
    assert ports.near_R.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("planner", ["none", "topoep", "joint"])
@pytest.mark.parametrize("router_skew", [0.0, -2.0])
def test_expected_rows_are_near_the_count(planner, router_skew):
    """Independent choices: within 5 % of the count on the busiest port."""
    cluster = load_cluster("h800_2x8")
    ids_RTK = skew(128, 8, 16, 1024, router_skew=router_skew, seed=0)
    load_RE = load_of(ids_RTK, 128)
    plan = PLANNERS[planner](
        load_RE, main_E=contiguous_mains(16, 128), cluster=cluster,
        model_dims=ModelDims(2048, 768), replica_slots=2,
    )  # fmt: skip
    for dispatcher in ("dedup", "dedup-node"):
        given = {"ranks_per_node": 8, "tokens": 1024, "dispatcher": dispatcher}
        expected, counted = token_ports(plan, **given), token_ports(plan, **given, ids_RTK=ids_RTK)
        busiest = [[ports.far_R.max(), ports.near_R.max()] for ports in (expected, counted)]
        np.testing.assert_allclose(busiest[0], busiest[1], rtol=0.05)
