"""Where do assignments run: on their own node, and on replicas?

    python -m recipes.execution_location

TopoEP paper, Figure 16 (router_skew -4, two slots): the fraction of assignments whose source and
execution rank are on different nodes, and the fraction that replicas serve.
"""

import sys
from statistics import fmean

from recipes.common import (
    MODELS,
    PUBLISHED,
    SLOTS,
    TITLES,
    answer,
    matched_seeds,
    model_named,
    paper_cluster,
    progress,
    skewed,
    value,
)
from topoep_titan.planning import PLANNERS
from topoep_titan.planning.plan import contiguous_mains
from topoep_titan.planning.quality import plan_quality
from topoep_titan.simulator.replay import plan_layer


def main() -> int:
    return answer(
        question,
        figure="TopoEP Fig. 16",
        kind="computed from plans",
        text="Where do assignments run: on their own node, and on replicas?",
        name="execution_location",
    )


def question() -> dict:
    rows, inter, served = [], {}, {}
    for name in MODELS:
        model, cluster = model_named(name), paper_cluster(model_named(name))
        loads = [skewed(model, -4.0, seed).load_LRE[0] for seed in matched_seeds(model)]
        main_E = contiguous_mains(model.expert_parallel, model.experts)
        for planner in progress(tuple(PLANNERS), len(PLANNERS), TITLES[name]):
            qualities = [
                plan_quality(
                    plan_layer(load_RE, planner, main_E, cluster, model, SLOTS),
                    main_E=main_E, cluster=cluster, model_dims=model.dims,
                )
                for load_RE in loads
            ]  # fmt: skip
            inter[name, planner] = fmean(q.inter_node_fraction for q in qualities)
            served[name, planner] = fmean(q.replica_served_fraction for q in qualities)
            rows.append([TITLES[name], planner, inter[name, planner], served[name, planner]])
    published = PUBLISHED["figure_16"]
    glm = MODELS[1]
    values = [
        value(f"{TITLES[name]}: across nodes, no balancing", 100 * fraction,
              100 * inter[name, "none"], "%")
        for name, fraction in zip(MODELS, published["megatron_inter_node"])
    ]  # fmt: skip
    values += [
        value("GLM-4.5-Air: across nodes, topoep", 100 * published["glm_topoep_inter_node"],
              100 * inter[glm, "topoep"], "%"),
        value("GLM-4.5-Air: served by replicas, topoep",
              100 * published["glm_topoep_replica_served"], 100 * served[glm, "topoep"], "%"),
        value("GLM-4.5-Air: across nodes, eplb (exact load here)",
              100 * published["glm_eplb_inter_node"], 100 * inter[glm, "eplb"], "%", why=EPLB),
        value("GLM-4.5-Air: served by replicas, eplb", 100 * published["glm_eplb_replica_served"],
              100 * served[glm, "eplb"], "%", why=EPLB),
        value("all: across nodes, topoep, least", 100 * published["topoep_inter_node_least"],
              100 * min(inter[name, "topoep"] for name in MODELS), "%"),
        value("all: across nodes, topoep, most", 100 * published["topoep_inter_node_most"],
              100 * max(inter[name, "topoep"] for name in MODELS), "%"),
        value("all: served by replicas, topoep, least",
              100 * published["topoep_replica_served_least"],
              100 * min(served[name, "topoep"] for name in MODELS), "%"),
        value("all: served by replicas, topoep, most",
              100 * published["topoep_replica_served_most"],
              100 * max(served[name, "topoep"] for name in MODELS), "%"),
    ]  # fmt: skip
    return {
        "values": values,
        "conditions": "router_skew -4, five draws as uneven as the paper's, 2 slots, 4,096 tokens "
        f"a rank. Published labels that stay open: {published['ambiguous']}.",
        "tables": [
            {"caption": "Fractions of assignments.",
             "columns": ["model", "planner", "across nodes", "served by replicas"], "rows": rows}
        ],
        "curves": [],
    }  # fmt: skip


EPLB = "tokens go to the nearest copy within its share here; the paper's split is not told"

if __name__ == "__main__":
    sys.exit(main())
