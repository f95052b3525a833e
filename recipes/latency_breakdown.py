"""Where does the time of an MoE layer go, and what constants make the simulator agree?

    python -m recipes.latency_breakdown

TopoEP paper, Figure 15 (router_skew -4, Qwen3-30B-A3B and GLM-4.5-Air). The figure's values fix the
constants of ``toml_configs/calibrations/figure_15.toml`` by the closed formulas of ``fit``; every
other simulated figure uses them unchanged.
"""

import sys
from dataclasses import astuple
from statistics import fmean, geometric_mean

import numpy as np

from recipes.common import (
    DRAWS,
    PUBLISHED,
    SLOTS,
    TITLES,
    TOKENS,
    answer,
    matched_seeds,
    model_named,
    paper_cluster,
    skewed,
    value,
)
from topoep_titan.planning.plan import Plan, contiguous_mains
from topoep_titan.simulator.calibration import CALIBRATION_FOLDER, Backends, backends
from topoep_titan.simulator.layer import breakdown, layer_costs
from topoep_titan.simulator.replay import backend_of, plan_layer
from topoep_titan.simulator.traffic import copy_ports, token_ports

NAMES = ("qwen3_30b_a3b_5l", "glm4_5_air_5l")
PLANNERS = ("megatron", "topoep")
PARTS = ("expert", "token", "replica")
SOLVER_US = 360.0  # Figure 11: labels 357 to 369 at R=32, and the paper charges its solver
Layer = tuple[str, str, Plan]  # model, planner, its plan of one layer


def main() -> int:
    return answer(
        question,
        figure="TopoEP Fig. 15",
        kind="simulated, constants fitted to this figure",
        text="Where does the time of an MoE layer go?",
        name="latency_breakdown",
    )


def question() -> dict:
    layers = planned_layers()
    constants = fit(layers)
    (CALIBRATION_FOLDER / "figure_15.toml").write_text(to_toml(constants))
    ours = measure(layers, backends("figure_15"))
    values = []
    for name in NAMES:
        for direction, index in (("forward", 0), ("backward", 1)):
            for part in ("expert", "token"):
                pair = PUBLISHED["figure_15"][name][f"{part}_{direction}"]
                for planner, published in zip(PLANNERS, pair):
                    what = f"{TITLES[name]} {direction}, {part}, {planner}"
                    values.append(value(what, published, ours[name, planner, index, part], "ms"))
        published = fmean(PUBLISHED["figure_15"][name]["replica"])
        what = f"{TITLES[name]}, replica management, topoep"
        values.append(value(what, published, ours[name, "topoep", 0, "replica"], "ms"))
    return {
        "values": values,
        "conditions": f"router_skew -4, {DRAWS} draws as uneven as the paper's, rates of h800_4x8 "
        "with the constants of toml_configs/calibrations/figure_15.toml; what stays open: "
        + PUBLISHED["figure_15"]["open"]["ambiguous"],
        "tables": [],
        "curves": [],
    }


def planned_layers() -> list[Layer]:
    layers = []
    for name in NAMES:
        model = model_named(name)
        for seed in matched_seeds(model):
            load_RE = skewed(model, -4.0, seed).load_LRE[0]
            main_E = contiguous_mains(*load_RE.shape)
            for planner in PLANNERS:
                plan = plan_layer(load_RE, planner, main_E, paper_cluster(model), model, SLOTS)
                layers.append((name, planner, plan))
    return layers


def measure(layers: list[Layer], chosen: Backends) -> dict[tuple[str, str, int, str], float]:
    """(model, planner, 0 forward or 1 backward, part) -> milliseconds, mean over layers."""
    found: dict[tuple[str, str, int, str], list[float]] = {}
    for name, planner, plan in layers:
        model, backend = model_named(name), backend_of(planner, chosen)
        costs = layer_costs(
            plan, main_E=contiguous_mains(model.expert_parallel, model.experts),
            cluster=paper_cluster(model), dims=model.dims, backend=backend, tokens=TOKENS,
            planned=planner == "topoep",
        )  # fmt: skip
        for index, direction in enumerate(breakdown(costs, backend)):
            for part, seconds in zip(PARTS, astuple(direction)):
                found.setdefault((name, planner, index, part), []).append(1e3 * seconds)
    return {key: fmean(milliseconds) for key, milliseconds in found.items()}


def fit(layers: list[Layer]) -> dict[str, dict[str, float]]:
    """The constants of both backends, each from one formula over the figure's values."""
    published = PUBLISHED["figure_15"]
    models = [model_named(name) for name in NAMES]
    ideal = measure(layers, backends())
    widths = np.array([model.moe_intermediate for model in models])
    plain, chunked = (
        {
            part: np.array([published[name][part][index] for name in NAMES])
            for part in ("expert_forward", "expert_backward", "token_forward", "token_backward")
        }
        for index in (0, 1)
    )
    slower = [
        figure["expert_forward"] / [ideal[name, planner, 0, "expert"] for name in NAMES]
        for figure, planner in ((plain, "megatron"), (chunked, "topoep"))
    ]
    # time = scale * (1 + F0/F) * ideal: F0 from the ratio of the two models, mean of the backends.
    ratio = geometric_mean(both[0] / both[1] for both in slower)
    half_width = (ratio - 1) / (1 / widths[0] - ratio / widths[1])
    scales = [geometric_mean(both / (1 + half_width / widths)) for both in slower]

    # A plain pass takes mean + excess * (busiest - mean) of its ports; forward has two passes.
    mean, most = ports(layers, "megatron", "alltoall", "token")
    excess = fmean((plain["token_forward"] / 2 - mean) / (most - mean))
    # Chunked: near_scale and a constant per operation, four of them in each direction.
    mean, most = ports(layers, "topoep", "dedup-node", "token")
    both = (chunked["token_forward"] + chunked["token_backward"]) / 2
    near_scale, operation = line(2 * (mean + excess * (most - mean)), both)
    # Replicas: a scale and a constant per pull.
    mean, most = ports(layers, "topoep", "", "copy")
    managed = np.array([fmean(published[name]["replica"]) for name in NAMES])
    copy_scale, pull = line(mean + excess * (most - mean), managed)

    def backward(figure, part):
        return geometric_mean(figure[f"{part}_backward"] / figure[f"{part}_forward"])

    return {
        "plain": {
            "compute_scale": scales[0],
            "half_width": half_width,
            "compute_backward": backward(plain, "expert") / 2,
            "token_backward": backward(plain, "token"),
            "excess": excess,
        },
        "chunked": {
            "compute_scale": scales[1],
            "half_width": half_width,
            "compute_backward": backward(chunked, "expert") / 2,
            "near_scale": near_scale,
            "token_backward": backward(chunked, "token"),
            "excess": excess,
            "token_op_us": operation / 4 * 1e3,
            "copy_scale": copy_scale,
            "copy_op_us": pull * 1e3,
            "plan_us": SOLVER_US,
        },
    }


def ports(layers: list[Layer], planner: str, dispatcher: str, kind: str) -> np.ndarray:
    """Ideal milliseconds of one pass: (mean, most) over ranks, each of both models."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
    for name, by, plan in layers:
        if by != planner:
            continue
        model, cluster = model_named(name), paper_cluster(model_named(name))
        per_node = cluster.ranks_per_node
        if kind == "token":
            carried = token_ports(
                plan, ranks_per_node=per_node, tokens=TOKENS, dispatcher=dispatcher
            )
            size = model.dims.token_bytes
        else:
            main_E = contiguous_mains(model.expert_parallel, model.experts)
            carried = copy_ports(plan, main_E, ranks_per_node=per_node)
            size = model.dims.expert_bytes
        busy_R = np.maximum(carried.far_R / cluster.bw_far, carried.near_R / cluster.bw_near)
        found[name].append((1e3 * size * busy_R.mean(), 1e3 * size * busy_R.max()))
    return np.array([np.mean(found[name], axis=0) for name in NAMES]).T


def line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Slope and intercept through the two models' points."""
    slope = (y[1] - y[0]) / (x[1] - x[0])
    return slope, y[0] - slope * x[0]


def to_toml(constants: dict[str, dict[str, float]]) -> str:
    lines = [
        "# How far the paper's testbed falls short of the rates of h800_4x8.toml, from the values",
        "# of its Figure 15 (recipes/published.toml). Written by",
        "# `python -m recipes.latency_breakdown`, whose `fit` holds the formula of each",
        "# constant. `excess` is shared, `plan_us` is the",
        "# solver latency of Figure 11. Effective constants: they absorb what the paper does not",
        "# tell, such as how a time was averaged over ranks.",
    ]
    for backend, table in constants.items():
        lines += ["", f"[{backend}]", *(f"{key} = {float(f'{v:.4g}')}" for key, v in table.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
