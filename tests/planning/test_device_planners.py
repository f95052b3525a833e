"""The GPU planners, run thread by thread, agree with the Python specifications bit for bit."""

import dataclasses

import numpy as np
import pytest
import torch
from topoep_kernels import ops, planners

from tests.kernels.simt_machine import SCHEDULES, chains, counters, schedule
from tests.native_library import build_or_skip
from tests.planning.test_native import a_cell
from topoep_titan.cluster import Cluster, ModelDims
from topoep_titan.cluster.cost_model import unit_costs
from topoep_titan.planning import NATIVE, REFERENCE, device_planner
from topoep_titan.planning.joint import TABLE
from topoep_titan.planning.native import recipes
from topoep_titan.planning.plan import Plan


@pytest.fixture(scope="module", autouse=True)
def _library():
    build_or_skip()


def on_device(name: str, load_RE, **cell) -> Plan:
    return device_planner(name, load_RE.device, **cell)(load_RE)


@pytest.mark.parametrize(("name", "cells", "least"), [("topoep", 60, 80), ("joint", 16, 40)])
def test_bit_identical_to_the_reference_in_every_schedule(name, cells, least):
    replicas = 0
    for seed in range(cells):
        cell = a_cell(seed)
        load_RE = cell.pop("load_RE")
        expected = REFERENCE[name](load_RE, **cell)
        for order in SCHEDULES:
            with schedule(order, seed):
                plan = on_device(name, load_RE, **cell)
            assert torch.equal(plan.expert_G, expected.expert_G), (seed, order)
            assert torch.equal(plan.assignments_RG, expected.assignments_RG), (seed, order)
        replicas += expected.num_replicas
    assert replicas > least  # the cells do ask for replicas


@pytest.mark.parametrize("settings", [{"balance_weight": 0}, {"balance_weight": 150, "rounds": 1}])
def test_joint_under_its_settings(settings):
    for seed in (1, 4, 6, 13, 20):
        cell = a_cell(seed) | settings
        load_RE = cell.pop("load_RE")
        expected, plan = NATIVE["joint"](load_RE, **cell), on_device("joint", load_RE, **cell)
        assert torch.equal(plan.expert_G, expected.expert_G), seed
        assert torch.equal(plan.assignments_RG, expected.assignments_RG), seed


def test_every_recipe_alone():
    """Without relief, so that what their launch builds shows in the plan; and no recipe at all."""
    load_RE, cell = skewed(32, 128, 8, 768)
    dims = cell["model_dims"]
    settings = {
        "replica_slots": 2, "ranks_per_node": 8, "token_bytes": dims.token_bytes,
        "expert_bytes": dims.expert_bytes, "balance_weight": 60, "rounds": 0,
        "prices": dataclasses.astuple(unit_costs(cell["cluster"], dims)),
    }  # fmt: skip
    for table in (*recipes(len(TABLE)).split(1), recipes(0).view(0, 5)):
        expected = ops.plan_joint(load_RE, cell["main_E"], table=table, **settings)
        for order in SCHEDULES:
            with schedule(order):
                plan = planners.plan_joint(
                    load_RE, planners.order_mains(cell["main_E"]), table=table, **settings
                )
            assert all(torch.equal(a, b) for a, b in zip(plan, expected, strict=True)), table


def test_prices_and_promises_are_read_when_they_are_complete():
    """Cells whose plan changes when one warp reads a start's peaks before another wrote them."""
    nearly_none = a_cell(122)
    cases = [
        ("reverse", nearly_none.pop("load_RE"), nearly_none),
        ("forward", *skewed(24, 48, 4, 5_000, seed=0)),  # one start of many is relieved
    ]
    for order, load_RE, cell in cases:
        expected = NATIVE["joint"](load_RE, **cell)
        with schedule(order):
            plan = on_device("joint", load_RE, **cell)
        assert torch.equal(plan.expert_G, expected.expert_G)
        assert torch.equal(plan.assignments_RG, expected.assignments_RG)


def test_what_the_device_does_not_plan_is_refused():
    load_RE, cell = skewed(97, 97, 97, 768)
    with pytest.raises(ValueError, match="97 a node"):
        planners.plan_joint(
            load_RE, planners.order_mains(cell["main_E"]), replica_slots=1, ranks_per_node=97,
            token_bytes=1, expert_bytes=1, prices=(1,) * 6, balance_weight=0, table=recipes(7),
            rounds=1,
        )  # fmt: skip


JOINT_STEPS = (60, 6, 15, 5, 230, 680, 7_100, 165)  # at most, of 32 ranks and 640 experts


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


FROM_STAGE_1, FROM_STAGE_2 = 768, 20_000  # expert widths: where topoep's replicas come from
SHAPES = [
    (32, 640, 8),
    (128, 1024, 8),  # as many domains as a cluster holds
    (512, 1024, 8),  # more
    (512, 1024, 64),  # a domain's columns do not fit into shared memory
    (72, 144, 72),  # one domain
    (8, 64, 1),  # every rank a domain
]
CELLS = [("topoep", *shape, width) for shape in SHAPES for width in (FROM_STAGE_1, FROM_STAGE_2)]
CELLS += [
    ("joint", 32, 640, 8, 768), ("joint", 72, 144, 72, 768), ("joint", 16, 64, 1, 768),
    ("joint", 80, 160, 40, 768),  # ranks beside those of a full warp
    ("joint", 24, 960, 8, 20_000),  # more pairs than are kept
]  # fmt: skip


@pytest.mark.parametrize(("name", "ranks", "experts", "per_node", "width"), CELLS)
def test_published_sizes_too(name, ranks, experts, per_node, width):
    """Against the compiled CPU planner: the Python specification would take minutes."""
    load_RE, cell = skewed(ranks, experts, per_node, width)
    expected = NATIVE[name](load_RE, **cell)
    with schedule("random", ranks):
        plan = on_device(name, load_RE, **cell)
    assert (expected.num_replicas > 0) == (width == FROM_STAGE_1 or per_node > 1)
    assert torch.equal(plan.expert_G, expected.expert_G)
    assert torch.equal(plan.assignments_RG, expected.assignments_RG)


@pytest.mark.parametrize(("shape", "steps"), [((32, 640, 8), 480), ((128, 1024, 8), 1100)])
def test_serial_steps_of_refinement_stay_within_budget(shape, steps):
    """Barriers and warp collectives that follow one another: what its latency is made of. A load
    without stage 1 replicas makes the most moves."""
    load_RE, cell = skewed(*shape, FROM_STAGE_2)
    assert on_device("topoep", load_RE, **cell).num_replicas > 40
    assert 0 < counters()["longest"] <= steps


def test_serial_steps_of_joint_stay_within_budget():
    """Of every launch: topoep's three phases, sums, pairs, starts, relief, write."""
    load_RE, cell = skewed(32, 640, 8, 768)
    with schedule("forward"):
        assert on_device("joint", load_RE, **cell).num_replicas > 40
        steps = chains()
    assert len(steps) == len(JOINT_STEPS)
    assert all(0 < step <= most for step, most in zip(steps, JOINT_STEPS)), steps
