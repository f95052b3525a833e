"""Plans made in device memory, here by the GPU kernels in the SIMT machine, change no bit of a
layer."""

import pytest
import torch

from tests.execution.layer_cases import gloo_bits, on_virtual_ranks, run_share
from tests.native_library import build_or_skip
from topoep_titan.cluster import Cluster, ModelDims
from topoep_titan.planning import DevicePlanner, device_planner, make_planner
from topoep_titan.planning.plan import contiguous_mains

CASES = [("topoep", "alltoall"), ("topoep", "dedup-node"), ("joint", "alltoall")]


@pytest.fixture(scope="module", autouse=True)
def _library():
    build_or_skip()


@pytest.mark.parametrize(("planner", "dispatcher"), CASES)
def test_virtual_ranks_compute_the_same_bits(planner, dispatcher):
    host, device = (
        on_virtual_ranks(4, 2, run_share, dispatcher, 2, name, "hot", torch.float32)
        for name in (planner, f"{planner} on the device")
    )
    for (leaves, out_TD, record, _), (others, other_TD, other, engine) in zip(host, device):
        assert isinstance(engine.planner, DevicePlanner)
        assert record.plan.num_replicas > 0
        assert torch.equal(record.plan.expert_G, other.plan.expert_G)
        assert torch.equal(record.plan.assignments_RG, other.plan.assignments_RG)
        assert torch.equal(record.load_RE, other.load_RE)
        assert torch.equal(out_TD, other_TD)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(leaves, others))


@pytest.mark.ranks
def test_processes_compute_the_same_bits(four_ranks):
    host, device = (
        four_ranks.run(gloo_bits, torch.float32, "alltoall", 2, name, "hot")
        for name in ("joint", "joint on the device")
    )
    assert host == device


def test_the_host_plans_what_the_device_does_not():
    def settings(ranks_per_node: int) -> dict:
        cluster = Cluster("x", 2, ranks_per_node, 4e14, 5e10, 2e11, 0.0, 0.0, 30.0)
        return {
            "main_E": contiguous_mains(cluster.ranks, cluster.ranks), "cluster": cluster,
            "model_dims": ModelDims(64, 64), "replica_slots": 1,
        }  # fmt: skip

    cpu = torch.device("cpu")
    assert device_planner("eplb", cpu, **settings(2)) is None
    assert device_planner("joint", cpu, **settings(97)) is None
    assert isinstance(device_planner("joint", cpu, **settings(96)), DevicePlanner)
    assert not isinstance(make_planner("joint", "alltoall", **settings(2)), DevicePlanner)
