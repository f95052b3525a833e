"""Where do the gains of planning come from as the group grows, and where do they end?

    python -m recipes.scale_study

No figure of the papers. Modelled throughput of one MoE layer of Qwen3-30B-A3B's widths with as many
experts as ranks ask for (640, or one a rank), EP 8 to 4,096 on three machines with ideal backends,
router_skew -2; planning is charged with the cluster file's constant.
"""

import sys
import time

import torch

from recipes.common import answer, curve, progress, value
from topoep_titan.cluster import ModelDims, load_cluster
from topoep_titan.planning import PLANNERS
from topoep_titan.planning.plan import contiguous_mains
from topoep_titan.planning.quality import plan_quality
from topoep_titan.planning.workloads import load_of, skew
from topoep_titan.simulator.calibration import backends
from topoep_titan.simulator.layer import layer_costs
from topoep_titan.simulator.step import stage_tasks
from topoep_titan.simulator.timeline import finish, run

CLUSTERS = ("h800_4x8", "gb200_nvl72", "mi300x_8x8")
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
NAMES = ("none", "topoep", "joint")
DIMS, TOP_K, TOKENS, SLOTS = ModelDims(2048, 768), 8, 4096, 2
SECONDS = 10.0  # a planner that takes longer for one plan is left out of the larger groups


def main() -> int:
    return answer(
        question,
        figure="Scale study",
        kind="simulated, ideal backends",
        text="Where do the gains of planning end as the group grows?",
        name="scale_study",
    )


def question() -> dict:
    rows, curves, slow = [], [], {}
    gains: dict[tuple[str, str], dict[int, float]] = {}
    for ranks in progress(RANKS, len(RANKS), "groups"):
        experts = 640 if ranks <= 128 else max(1024, ranks)
        load_RE = sampled_load(experts, ranks)
        main_E = contiguous_mains(ranks, experts)
        for name in CLUSTERS:
            cluster = load_cluster(name)
            per_node = next(n for n in (cluster.ranks_per_node, 64, 32, 16, 8) if ranks % n == 0)
            group = cluster.resized(ranks, min(per_node, ranks))
            seconds = {}
            for planner in NAMES:
                if slow.get(planner, 0.0) > SECONDS:
                    continue
                started = time.process_time()
                plan = PLANNERS[planner](
                    load_RE, main_E=main_E, cluster=group, model_dims=DIMS, replica_slots=SLOTS
                )
                slow[planner] = time.process_time() - started
                backend = backends().chunked
                costs = layer_costs(
                    plan, main_E=main_E, cluster=group, dims=DIMS, backend=backend,
                    tokens=TOKENS, planned=planner != "none",
                )  # fmt: skip
                seconds[planner] = finish(run(stage_tasks([costs], backend, 0.0)))
                quality = plan_quality(plan, main_E=main_E, cluster=group, model_dims=DIMS)
                gain = seconds["none"] / seconds[planner]
                gains.setdefault((name, planner), {})[ranks] = gain
                rows.append([name, ranks, experts, planner, quality.max_over_mean,
                             quality.inter_node_fraction, 1e3 * float(costs.expert_R.max()),
                             1e3 * float(costs.token_R.max()), 1e3 * float(costs.copy_R.max()),
                             1e3 * seconds[planner], gain])  # fmt: skip
    for (name, planner), by_ranks in gains.items():
        if planner != "none":
            curves.append(curve(name, planner, list(by_ranks), list(by_ranks.values())))
    values = []
    for name in CLUSTERS:
        for planner in ("topoep", "joint"):
            by_ranks = gains[name, planner]
            most = max(by_ranks, key=by_ranks.get)
            last = max(by_ranks)
            values += [
                value(f"{name}: {planner} over none, most (EP {most})", None, by_ranks[most], "x"),
                value(f"{name}: {planner} over none, EP {last}", None, by_ranks[last], "x"),
            ]
    left_out = {p: f"{t:.0f} s a plan" for p, t in slow.items() if t > SECONDS}
    return {
        "values": values,
        "conditions": "one MoE layer, forward and backward, two chunks overlapped, 4,096 tokens a "
        "rank, top-8, experts of 9 MiB, 2 slots, router_skew -2, seed 0; 640 experts to EP 128, "
        "then 1,024 or one a rank; the loads of 8 ranks are repeated. Nodes of 8 "
        "(h800, mi300x) and of 64 for gb200, whose 72 do not divide these groups. Placement: see "
        f"coupling_scale. Left out of larger groups: {left_out or 'none'}. {READING}",
        "tables": [
            {"caption": "Milliseconds of one layer.",
             "columns": ["cluster", "EP", "experts", "planner", "max/mean", "across nodes",
                         "experts, forward", "one token pass", "one pull", "layer", "over none"],
             "rows": rows}
        ],
        "curves": curves,
        "axes": ["EP ranks", "layer time of none over the planner's"],
    }  # fmt: skip


def sampled_load(experts: int, ranks: int) -> torch.Tensor:
    drawn = min(ranks, 8)
    load = load_of(skew(experts, TOP_K, drawn, TOKENS, router_skew=-2.0, seed=0), experts)
    return load.repeat(ranks // drawn, 1)


READING = (
    "Reading: in one NVLink domain gains grow with its size (gb200, 7.5 at EP 64). Across domains "
    "joint levels the ranks at every size, and copies end the gain: every domain pulls a hot "
    "expert from its one main instance, forward and again backward, and pushes its gradient there. "
    "That is a third of joint's layer at EP 64 and nine tenths at EP 4,096 (h800), where levelled "
    "experts are 1 % of it. The ratio still rises, since without planning the busiest rank has 304 "
    "times the mean load."
)

if __name__ == "__main__":
    sys.exit(main())
