"""The binding refuses what the compiled planners must never see, and says how to build them."""

import dataclasses
import runpy
import shutil

import pytest
import torch
from topoep_kernels import KernelsMissing, library, ops

from tests.native_library import ROOT, build_or_skip
from topoep_titan.cluster import ModelDims, load_cluster
from topoep_titan.cluster.cost_model import unit_costs
from topoep_titan.planning.joint import BALANCE_WEIGHT, ROUNDS
from topoep_titan.planning.joint import TABLE as RECIPES
from topoep_titan.planning.native import recipes

PRICES = (100, 160, 40, 9_000, 2_000, 0)
TABLE = torch.tensor([[3, 6, 1, 20, 0]], dtype=torch.int32)


@pytest.fixture(scope="module", autouse=True)
def _library():
    build_or_skip()


def plan_joint(load_RE, main_E, **changes):
    settings = {
        "replica_slots": 1, "ranks_per_node": 2, "token_bytes": 16, "expert_bytes": 48,
        "prices": PRICES, "balance_weight": 60,
        "table": TABLE, "rounds": 10, **changes,
    }  # fmt: skip
    return ops.plan_joint(load_RE, main_E, **settings)


def plan_topoep(load_RE, main_E, **changes):
    settings = {
        "replica_slots": 1, "ranks_per_node": 2, "token_bytes": 16, "expert_bytes": 48,
        "token_far": 160, "token_near": 40, **changes,
    }  # fmt: skip
    return ops.plan_topoep(load_RE, main_E, **settings)


@pytest.mark.parametrize("plan", [plan_topoep, plan_joint])
@pytest.mark.parametrize(
    ("load_RE", "main_E", "changes", "message"),
    [
        (torch.ones(4, 8), torch.arange(8) // 2, {}, "int32 or int64"),
        (torch.ones(4, 6).int(), torch.arange(6) // 2, {}, "ranks divide experts"),
        (torch.ones(4, 8).int(), torch.arange(8) // 2, {"ranks_per_node": 3}, "ranks_per_node"),
        (torch.ones(4, 8).int(), torch.arange(8) // 2, {"ranks_per_node": 0}, "ranks_per_node"),
        (torch.ones(4, 8).int(), torch.arange(8) // 2, {"replica_slots": -1}, "replica_slots"),
        (torch.ones(4, 8).int(), torch.arange(4), {}, "main_E must be"),
        (torch.ones(4, 8).int(), torch.zeros(8), {}, "E/R experts on every rank"),
        (torch.ones(4, 8).int(), torch.arange(8) // 2 + 1, {}, "E/R experts on every rank"),
        (torch.ones(4, 8).int(), torch.arange(8) // 2 - 1, {}, "E/R experts on every rank"),
        (-torch.ones(4, 8).int(), torch.arange(8) // 2, {}, "negative count"),
        (torch.full((4, 8), 2**27), torch.arange(8) // 2, {}, "more than 2"),
        (torch.full((4, 8), 2**40), torch.arange(8) // 2, {}, "more than 2"),
    ],
)
def test_malformed_input_is_refused(plan, load_RE, main_E, changes, message):
    with pytest.raises(ValueError, match=message):
        plan(load_RE, main_E, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prices": (2**60, 0, 0, 0, 0, 0)}, "exceed"),
        ({"prices": (-1, 0, 0, 0, 0, 0)}, "negative"),
        ({"balance_weight": -1}, "balance_weight"),
        ({"rounds": -1}, "rounds"),
        ({"table": torch.tensor([[3, 9, 1, 20, 0]], dtype=torch.int32)}, "table"),
        ({"table": torch.tensor([[3, 6, 1, 20]], dtype=torch.int32)}, "table"),
    ],
)
def test_joint_refuses_settings_out_of_range(changes, message):
    with pytest.raises(ValueError, match=message):
        plan_joint(torch.ones(4, 8).int(), torch.arange(8) // 2, **changes)


@pytest.mark.parametrize("plan", [plan_topoep, plan_joint])
def test_views_and_both_integer_types_give_one_plan(plan):
    load_RE = torch.randint(0, 300, (4, 8), generator=torch.Generator().manual_seed(1))
    main_E = torch.arange(8) // 2
    expected = plan(load_RE, main_E)
    transposed = load_RE.T.contiguous().T  # same values, other strides
    for other in (load_RE.int(), transposed):
        for a, b in zip(plan(other, main_E.int()), expected, strict=True):
            assert torch.equal(a, b)


def test_the_gpu_bench_searches_as_the_planner_does():
    bench = runpy.run_path(str(ROOT / "kernels" / "bench" / "gpu.py"))["JOINT"]
    costs = unit_costs(load_cluster("h800_4x8"), ModelDims(2048, 768))
    assert bench["prices"] == dataclasses.astuple(costs)
    assert torch.equal(bench["table"], recipes(len(RECIPES)))
    assert (bench["balance_weight"], bench["rounds"]) == (BALANCE_WEIGHT, ROUNDS)


def test_a_missing_library_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("TOPOEP_KERNELS_LIB", str(tmp_path))
    with pytest.raises(KernelsMissing, match="cmake -S kernels"):
        library.cpu_library.__wrapped__()


def test_a_broken_library_is_not_taken_for_a_missing_one(monkeypatch, tmp_path):
    (tmp_path / "libtopoep_cpu.so").write_bytes(b"not a library")
    monkeypatch.setenv("TOPOEP_KERNELS_LIB", str(tmp_path))
    with pytest.raises(ImportError, match="cannot be loaded") as caught:
        library.cpu_library.__wrapped__()
    assert not isinstance(caught.value, KernelsMissing)


def test_a_library_of_other_sources_is_refused(tmp_path, monkeypatch):
    for folder in ("csrc", "include"):
        shutil.copytree(ROOT / "kernels" / folder, tmp_path / folder)
    monkeypatch.setattr(library, "SOURCES", tmp_path)
    assert library._load("libtopoep_cpu.so").topoep_plan_joint  # CMake's hash is Python's
    with (tmp_path / "csrc" / "planner" / "planner.cpp").open("a") as source:
        source.write("// one more line\n")
    with pytest.raises(ImportError, match=r"built from other sources .* again: cmake"):
        library._load("libtopoep_cpu.so")
    monkeypatch.setattr(library, "SOURCES", tmp_path / "wheel")  # nothing to compare with
    assert library._load("libtopoep_cpu.so").topoep_plan_joint
