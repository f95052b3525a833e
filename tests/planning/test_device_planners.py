"""The GPU planners, run thread by thread, agree with the Python specifications bit for bit."""

import numpy as np
import pytest
import torch
from topoep_kernels import planners

from tests.kernels.simt_machine import SCHEDULES, counters, schedule
from tests.native_library import build_or_skip
from tests.planning.test_native import a_cell
from topoep_titan.cluster import Cluster, ModelDims
from topoep_titan.cluster.cost_model import unit_costs
from topoep_titan.planning import NATIVE, REFERENCE
from topoep_titan.planning.plan import Plan


@pytest.fixture(scope="module", autouse=True)
def _library():
    build_or_skip()


def device_topoep(load_RE, *, main_E, cluster, model_dims, replica_slots) -> Plan:
    costs = unit_costs(cluster, model_dims)
    return Plan(
        *planners.plan_topoep(
            load_RE.int(), planners.order_mains(main_E), replica_slots=replica_slots,
            ranks_per_node=cluster.ranks_per_node, token_bytes=model_dims.token_bytes,
            expert_bytes=model_dims.expert_bytes, token_far=costs.token_far,
            token_near=costs.token_near,
        )
    )  # fmt: skip


DEVICE = {"topoep": device_topoep}


@pytest.mark.parametrize("name", DEVICE)
def test_bit_identical_to_the_reference_in_every_schedule(name):
    replicas = 0
    for seed in range(60):
        cell = a_cell(seed)
        load_RE = cell.pop("load_RE")
        expected = REFERENCE[name](load_RE, **cell)
        for order in SCHEDULES:
            with schedule(order, seed):
                plan = DEVICE[name](load_RE, **cell)
            assert torch.equal(plan.expert_G, expected.expert_G), (seed, order)
            assert torch.equal(plan.assignments_RG, expected.assignments_RG), (seed, order)
        replicas += expected.num_replicas
    assert replicas > 80  # the cells do ask for replicas


def skewed(ranks, experts, per_node, width, seed=7):
    rng = np.random.default_rng(seed)
    popularity = np.exp(rng.normal(0, 2, experts))
    load_RE = rng.multinomial(32_768, popularity / popularity.sum(), size=ranks)
    return torch.tensor(load_RE, dtype=torch.int32), {
        "main_E": torch.arange(experts) // (experts // ranks),
        "cluster": Cluster("x", ranks // per_node, per_node, 400e12, 50e9, 200e9, 0.0, 0.0, 30.0),
        "model_dims": ModelDims(2048, width),
        "replica_slots": 2,
    }


@pytest.mark.parametrize("name", DEVICE)
@pytest.mark.parametrize("width", [768, 20_000])  # replicas from stage 1; from stage 2 alone
@pytest.mark.parametrize(
    ("ranks", "experts", "per_node"),
    [
        (32, 640, 8),
        (128, 1024, 8),  # as many domains as a cluster holds
        (512, 1024, 8),  # more
        (512, 1024, 64),  # a domain's columns do not fit into shared memory
        (72, 144, 72),  # one domain
        (8, 64, 1),  # every rank a domain
    ],
)
def test_published_sizes_too(name, ranks, experts, per_node, width):
    """Against the compiled CPU planner: the Python specification would take minutes."""
    load_RE, cell = skewed(ranks, experts, per_node, width)
    expected = NATIVE[name](load_RE, **cell)
    with schedule("random", ranks):
        plan = DEVICE[name](load_RE, **cell)
    assert (expected.num_replicas > 0) == (width == 768 or per_node > 1)
    assert torch.equal(plan.expert_G, expected.expert_G)
    assert torch.equal(plan.assignments_RG, expected.assignments_RG)


@pytest.mark.parametrize(("shape", "steps"), [((32, 640, 8), 480), ((128, 1024, 8), 1100)])
def test_serial_steps_of_refinement_stay_within_budget(shape, steps):
    """Collectives and barriers of the busiest block, one after the other: what its latency is made
    of. A load without stage 1 replicas makes the most moves."""
    load_RE, cell = skewed(*shape, 20_000)
    assert device_topoep(load_RE, **cell).num_replicas > 40
    assert 0 < counters()["longest"] <= steps
