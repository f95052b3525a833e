"""The compiled planners agree with the Python specifications bit for bit."""

import numpy as np
import pytest
import torch

from tests.native_library import build_or_skip
from topoep_titan.cluster import Cluster, ModelDims
from topoep_titan.planning import NATIVE, PLANNERS, REFERENCE, implementation


@pytest.fixture(scope="module", autouse=True)
def _library():
    build_or_skip()


def a_cell(seed: int) -> dict:
    """A small load of a shape, spread and raggedness drawn from ``seed``, edges included."""
    rng = np.random.default_rng(seed)
    per_node, nodes, mains = (int(rng.integers(1, high)) for high in (5, 5, 4))
    ranks, experts = per_node * nodes, per_node * nodes * mains
    popularity = rng.exponential(1, experts) ** rng.uniform(0, 4) + 1e-9
    tokens_R = rng.integers(0, rng.choice([2, 50, 2_000, 30_000]), ranks)
    tokens_R *= rng.random(ranks) > 0.2  # some sources are empty
    load_RE = np.stack([rng.multinomial(n, popularity / popularity.sum()) for n in tokens_R])
    if seed % 9 == 0:  # everything on one expert
        load_RE[:] = 0
        load_RE[:, rng.integers(experts)] = tokens_R
    main_E = np.arange(experts) // mains
    return {
        "load_RE": torch.tensor(load_RE, dtype=torch.int32 if seed % 2 else torch.int64),
        "main_E": torch.tensor(rng.permutation(main_E) if seed % 3 else main_E),
        "cluster": Cluster(
            "drawn", nodes, per_node, float(rng.choice([1e12, 400e12])), 50e9, 200e9, 0.0, 0.0,
            float(rng.choice([0, 1])),
        ),
        "model_dims": ModelDims(int(rng.choice([8, 64, 2048])), int(rng.choice([1, 4, 64]))),
        "replica_slots": int(rng.integers(0, 4)),
    }  # fmt: skip


@pytest.mark.parametrize("name", NATIVE)
def test_bit_identical_to_the_reference(name):
    replicas = 0
    for seed in range(400):
        cell = a_cell(seed)
        load_RE = cell.pop("load_RE")
        expected = REFERENCE[name](load_RE, **cell)
        plan = NATIVE[name](load_RE, **cell)
        assert torch.equal(plan.expert_G, expected.expert_G), seed
        assert torch.equal(plan.assignments_RG, expected.assignments_RG), seed
        replicas += expected.num_replicas
    assert replicas > 500  # the cells do ask for replicas


@pytest.mark.parametrize(
    "settings", [{"balance_weight": 0}, {"balance_weight": 150}, {"rows": 2}, {"rounds": 3}]
)
def test_joint_is_bit_identical_under_its_settings(settings):
    for seed in range(200, 225):
        cell = a_cell(seed)
        load_RE = cell.pop("load_RE")
        expected = REFERENCE["joint"](load_RE, **cell, **settings)
        plan = NATIVE["joint"](load_RE, **cell, **settings)
        assert torch.equal(plan.expert_G, expected.expert_G), seed
        assert torch.equal(plan.assignments_RG, expected.assignments_RG), seed


@pytest.mark.parametrize("name", NATIVE)
def test_a_larger_shape_too(name):
    rng = np.random.default_rng(7)
    popularity = np.exp(rng.normal(0, 2, 128))
    cell = {
        "main_E": torch.arange(128) // 4,
        "cluster": Cluster("4x8", 4, 8, 400e12, 50e9, 200e9, 0.0, 0.0, 30.0),
        "model_dims": ModelDims(2048, 768),
        "replica_slots": 2,
    }
    load_RE = torch.tensor(rng.multinomial(32_768, popularity / popularity.sum(), size=32))
    expected, plan = REFERENCE[name](load_RE, **cell), NATIVE[name](load_RE, **cell)
    assert torch.equal(plan.expert_G, expected.expert_G)
    assert torch.equal(plan.assignments_RG, expected.assignments_RG)


def test_one_copy_pays_by_hand():
    """Rank 1's 289 on a copy: 793 * 184 + 491,520 + 10**6 = 1,637,432 against
    1,082 * 184 + 289 * 5,120 = 1,678,768 without.
    """
    cell = {
        "main_E": torch.tensor([0, 1]),
        "cluster": Cluster("2x1", 2, 1, 400e12, 50e9, 200e9, 0.0, 0.0, 1.0),
        "model_dims": ModelDims(64, 64),
        "replica_slots": 1,
        "balance_weight": 0,
    }
    load_RE = torch.tensor([[793, 0], [289, 0]])
    for planner in (REFERENCE["joint"], NATIVE["joint"]):
        plan = planner(load_RE, **cell)
        assert plan.expert_G.tolist() == [0, -1, 1, 0]
        assert plan.assignments_RG.tolist() == [[793, 0, 0, 0], [0, 0, 0, 289]]


def test_callers_can_tell_the_implementation():
    assert implementation("none") == "reference"
    for name in NATIVE:
        used = PLANNERS[name]
        assert implementation(name) == ("native" if used is NATIVE[name] else "reference")
