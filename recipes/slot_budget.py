"""How many replica slots does a planner need to level the ranks?

    python -m recipes.slot_budget

TopoEP paper, Figure 10: 32 ranks, 640 experts, top-8. Its workload is not told; the five draws (of
sixty, router_skew -4) whose max/mean without balancing is nearest to its 8.39 stand in for it.
"""

import sys
from statistics import fmean

from recipes.common import PUBLISHED, TOKENS, answer, curve, progress, value
from topoep_titan.cluster import ModelDims, load_cluster
from topoep_titan.planning import PLANNERS
from topoep_titan.planning.plan import contiguous_mains
from topoep_titan.planning.quality import plan_quality
from topoep_titan.planning.workloads import load_of, skew

SHAPE = 640, 8, 32  # experts, top-k, ranks
DIMS = ModelDims(2048, 768)  # Qwen3's; the figure names none
CANDIDATES, DRAWS = 60, 3
NAMES = ("none", "eplb", "fastermoe", "flexmoe", "topoep", "joint")


def main() -> int:
    return answer(
        question,
        figure="TopoEP Fig. 10",
        kind="computed from plans",
        text="How many replica slots does a planner need to level the ranks?",
        name="slot_budget",
    )


def question() -> dict:
    published = PUBLISHED["figure_10"]
    cluster, main_E = load_cluster("h800_4x8"), contiguous_mains(32, 640)
    loads = [load_of(skew(*SHAPE, TOKENS, router_skew=-4.0, seed=s), 640) for s in nearest_seeds()]
    curves, rows = [], []
    for planner in progress(NAMES, len(NAMES), "planners"):
        means = []
        for slots in (1, 2, 3, 4):
            plans = [
                PLANNERS[planner](
                    load, main_E=main_E, cluster=cluster, model_dims=DIMS, replica_slots=slots
                )
                for load in loads
            ]
            means.append(
                fmean(
                    plan_quality(
                        plan, main_E=main_E, cluster=cluster, model_dims=DIMS
                    ).max_over_mean
                    for plan in plans
                )
            )
        curves.append(curve("", planner, [1, 2, 3, 4], means))
        rows.append([planner, *means])
    ours = {row[0]: row[1:] for row in rows}
    curves += [
        curve("", "topoep, published", [1, 2, 3, 4], published["topoep"], published=True),
        curve("", "flexmoe, published", [1, 2],
              [published["flexmoe_1_slot"], published["flexmoe_2_slots"]], published=True),
        curve("", "fastermoe, published", [2, 4], published["fastermoe"], published=True),
        curve("", "eplb, published", [2, 4], published["eplb"], published=True),
    ]  # fmt: skip
    values = [
        value("no balancing", published["none"], ours["none"][0]),
        *(value(f"topoep, {n} slots", published["topoep"][n - 1], ours["topoep"][n - 1], why=WHY)
          for n in (1, 2, 3, 4)),
        value("joint, 1 slot (the best published is flexmoe)", published["flexmoe_1_slot"],
              ours["joint"][0]),
        value("joint, 2 slots (the best published is topoep)", published["topoep"][1],
              ours["joint"][1]),
    ]  # fmt: skip
    return {
        "values": values,
        "conditions": "E 640, top-8, 4 nodes of 8, 4,096 tokens a rank, expert and token sizes of "
        f"Qwen3; {DRAWS} draws at router_skew -4 nearest to the published max/mean. No band: the "
        "workload is unknown.",
        "tables": [
            {"caption": "Max/mean rank load by replica slots a rank.",
             "columns": ["planner", "1", "2", "3", "4"], "rows": rows}
        ],
        "curves": curves,
        "axes": ["replica slots a rank", "max/mean"],
    }  # fmt: skip


def nearest_seeds() -> list[int]:
    published = PUBLISHED["figure_10"]["none"]
    distance = {}
    for seed in progress(range(CANDIDATES), CANDIDATES, "draws"):
        ids = skew(SHAPE[0], SHAPE[1], 1, TOKENS, router_skew=-4.0, seed=seed)
        load_R = load_of(ids, 640).view(32, -1).sum(1).double()
        distance[seed] = abs(float(load_R.max() / load_R.mean()) - published)
    return sorted(distance, key=distance.get)[:DRAWS]


WHY = "topoep spends its slots on traffic first, and on which draws that starves balance differs"

if __name__ == "__main__":
    sys.exit(main())
