"""Measure planners on the standard cells: quality of the plan, time of the call, lower bound.

A cell is a model's MoE shape on a group of ranks; its workload is drawn once and planned by every
planner. Letters: R ranks, E experts, S replica slots a rank.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from topoep_kernels.library import is_built
from torch import Tensor

from topoep_titan.cluster import Cluster, ModelDims
from topoep_titan.errors import InputError
from topoep_titan.planning import FREE_PLANNERS, NATIVE, REFERENCE
from topoep_titan.planning.bounds import MILP_EXPERTS, MILP_RANKS, milp_bound, relaxed_bound
from topoep_titan.planning.joint import BALANCE_WEIGHT
from topoep_titan.planning.plan import Plan, contiguous_mains
from topoep_titan.planning.quality import plan_quality
from topoep_titan.planning.workloads import load_of, skew, zipf

TOKENS = 4096  # of one rank and microbatch, as the paper trains
ROUTER_SKEWS = (0.0, -0.5, -1.0, -2.0, -4.0)
WARM_UPS, REPEATS = 20, 200  # as the paper times its solver (Figure 11)
SLOW_US, SLOW_REPEATS = 5000.0, 5  # a call above 5 ms is timed five times without warm-up
MILP_SECONDS = 60.0  # of one search


@dataclass(frozen=True)
class Cell:
    experts: int
    top_k: int
    hidden: int
    moe_intermediate: int
    ranks: int
    ranks_per_node: int


CELLS = {
    # The paper's groups (Table 1).
    "qwen3": Cell(128, 8, 2048, 768, 32, 8),
    "glm": Cell(128, 8, 4096, 1408, 16, 8),
    "deepseek": Cell(160, 6, 5120, 1536, 16, 8),
    # The workload of its Figures 10 and 11, and the other two models on the whole testbed.
    "e640": Cell(640, 8, 2048, 768, 32, 8),
    "glm-32": Cell(128, 8, 4096, 1408, 32, 8),
    "deepseek-32": Cell(160, 6, 5120, 1536, 32, 8),
    # One node of eight; many domains; two large ones (NVL32, NVL72).
    "qwen3-8": Cell(128, 8, 2048, 768, 8, 8),
    "e640-8x8": Cell(640, 8, 2048, 768, 64, 8),
    "e640-16x8": Cell(640, 8, 2048, 768, 128, 8),
    "e640-2x32": Cell(640, 8, 2048, 768, 64, 32),
    "e576-2x72": Cell(576, 8, 2048, 768, 144, 72),
    # Planning time against ranks and experts (the paper's Figure 11).
    "time-8": Cell(640, 8, 2048, 768, 8, 8),
    "time-32": Cell(640, 8, 2048, 768, 32, 8),
    "time-128": Cell(640, 8, 2048, 768, 128, 8),
    "time-1024": Cell(1024, 8, 2048, 768, 32, 8),
    # Small enough for the rank-level bound.
    "tiny-2x4": Cell(16, 4, 2048, 768, 8, 4),
    "tiny-2x4-32": Cell(32, 4, 2048, 768, 8, 4),
    "tiny-4x2": Cell(16, 4, 2048, 768, 8, 2),
    "tiny-4x4": Cell(32, 4, 2048, 768, 16, 4),
    "tiny-2x8": Cell(64, 8, 2048, 768, 16, 8),
}
TINY_CELLS = tuple(name for name in CELLS if name.startswith("tiny-"))  # added by --bounds
TIME_CELLS = tuple(name for name in CELLS if name.startswith("time-"))  # compiled, skew -2 only
# Only when named; their bounds, which take minutes, only with --bounds.
WIDE_CELLS = ("e640-8x8", "e640-16x8", "e640-2x32", "e576-2x72")
DEFAULT_CELLS = tuple(name for name in CELLS if name not in (*TINY_CELLS, *WIDE_CELLS))
WORKLOADS = [*(("skew", router_skew) for router_skew in ROUTER_SKEWS), ("zipf", None)]


@dataclass(frozen=True)
class Contestant:
    planner: str
    implementation: Literal["reference", "native", "cuda"]
    function: Callable[..., Plan]
    bounded: bool = True  # pinned mains and S slots: the lower bounds hold
    balance_weight: int | None = None  # None: not a setting of the planner


def contestants(balance_weights: Sequence[int] = (BALANCE_WEIGHT,)) -> list[Contestant]:
    """Everything that can plan on this machine; `joint` once for each balance weight."""

    def entrants(planners: dict, implementation: str, bounded: bool = True) -> list[Contestant]:
        return [
            Contestant(
                name, implementation, partial(planner, **settings), bounded, *settings.values()
            )
            for name, planner in planners.items()
            for settings in (
                [{"balance_weight": weight} for weight in balance_weights]
                if name == "joint"
                else [{}]
            )
        ]

    native = NATIVE if is_built("cpu") else {}
    return [
        *entrants(REFERENCE, "reference"),
        *entrants(native, "native"),
        *entrants(FREE_PLANNERS, "reference", bounded=False),
    ]


def bench_rows(
    cluster: Cluster,
    cells: Sequence[str],
    planners: Sequence[str] | None = None,
    slots: Sequence[int] = (2,),
    seeds: Sequence[int] = (0,),
    balance_weights: Sequence[int] = (BALANCE_WEIGHT,),
    with_milp: bool = False,
    fastest: bool = False,
) -> Iterator[dict[str, Any]]:
    """One row for each cell, workload, seed, number of slots and planner, as they are measured.

    ``cluster`` gives the rates; its size follows the cell. ``bound_us`` is the relaxed bound, or
    the MILP's where ``with_milp`` and the cell is small enough; ``best_us`` the best solution that
    the MILP's search found, else None. Both are None for the published forms, which they do not
    cover, and for wide cells without ``with_milp``. ``fastest`` leaves out the Python specification
    of a planner that is compiled. Raises InputError for an unknown cell or planner.
    """
    everyone = contestants(balance_weights)
    chosen = [c for c in everyone if planners is None or c.planner in planners]
    if fastest:
        compiled = {c.planner for c in chosen if c.implementation == "native"}
        chosen = [c for c in chosen if c.implementation == "native" or c.planner not in compiled]
    _check_names("planner", planners or (), [c.planner for c in everyone])
    _check_names("cell", cells, list(CELLS))
    for name in cells:
        cell = CELLS[name]
        group = cluster.resized(cell.ranks, cell.ranks_per_node)
        timing = name in TIME_CELLS
        planning = [c for c in chosen if c.implementation == "native"] if timing else chosen
        for workload, router_skew in [("skew", -2.0)] if timing else WORKLOADS:
            for seed in seeds:
                load_RE = _draw(cell, router_skew, seed)
                for replica_slots in slots:
                    problem = {
                        "main_E": contiguous_mains(cell.ranks, cell.experts),
                        "cluster": group,
                        "model_dims": ModelDims(cell.hidden, cell.moe_intermediate),
                        "replica_slots": replica_slots,
                    }
                    if name in WIDE_CELLS and not with_milp:
                        bounds = {"bound_us": None, "best_us": None}
                    else:
                        bounds = _bounds(load_RE, problem, with_milp)
                    for contestant in planning:
                        yield {
                            "planner": contestant.planner,
                            "implementation": contestant.implementation,
                            **vars(cell),
                            "replica_slots": replica_slots,
                            "workload": workload,
                            "router_skew": router_skew,
                            "seed": seed,
                            **_measure(contestant, load_RE, problem),
                            **(bounds if contestant.bounded else dict.fromkeys(bounds)),
                            "balance_weight": contestant.balance_weight,
                        }


def timed(call: Callable[[], Plan]) -> tuple[Plan, float]:
    """The plan and the median time of a call in microseconds."""

    def once() -> float:
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) / 1e3

    plan = call()
    if once() > SLOW_US:
        return plan, statistics.median(once() for _ in range(SLOW_REPEATS))
    for _ in range(WARM_UPS):
        call()
    return plan, statistics.median(once() for _ in range(REPEATS))


def _draw(cell: Cell, router_skew: float | None, seed: int) -> Tensor:
    shape = cell.experts, cell.top_k, cell.ranks, TOKENS
    if router_skew is None:
        return load_of(zipf(*shape, seed=seed), cell.experts)
    return load_of(skew(*shape, router_skew=router_skew, seed=seed), cell.experts)


def _bounds(load_RE: Tensor, problem: dict[str, Any], with_milp: bool) -> dict[str, float | None]:
    ranks, experts = load_RE.shape
    if not (with_milp and ranks <= MILP_RANKS and experts <= MILP_EXPERTS):
        return {"bound_us": relaxed_bound(load_RE, **problem) / 1e6, "best_us": None}
    found = milp_bound(load_RE, **problem, time_limit=MILP_SECONDS)
    return {
        "bound_us": found.total / 1e6,
        "best_us": None if found.best is None else found.best / 1e6,
    }


def _measure(contestant: Contestant, load_RE: Tensor, problem: dict[str, Any]) -> dict[str, Any]:
    plan, plan_us = timed(lambda: contestant.function(load_RE, **problem))
    quality = plan_quality(
        plan,
        main_E=problem["main_E"],
        cluster=problem["cluster"],
        model_dims=problem["model_dims"],
    )
    return {
        "max_over_mean": quality.max_over_mean,
        "inter_node_fraction": quality.inter_node_fraction,
        "replica_served_fraction": quality.replica_served_fraction,
        "modelled_us": quality.modelled.as_us(),
        "plan_us": plan_us,
    }


def _check_names(kind: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise InputError(f"unknown {kind} {name!r}; choose from: {', '.join(known)}")
