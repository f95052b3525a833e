"""Which operations hide behind which, in one MoE layer?

    python -m recipes.pipeline_timeline

TopoEP paper, Figures 7 and 8: two chunks on a compute and a communication stream. Ours is the
simulated timeline of one layer of Qwen3-30B-A3B under topoep at router_skew -4, with Figure 15's
constants: what it would hide if the streams did not disturb each other.
"""

import sys

from recipes.common import SLOTS, TOKENS, answer, model_named, paper_cluster, skewed, value
from topoep_titan.planning.plan import contiguous_mains
from topoep_titan.simulator.calibration import backends
from topoep_titan.simulator.layer import layer_costs
from topoep_titan.simulator.replay import plan_layer
from topoep_titan.simulator.step import stage_tasks
from topoep_titan.simulator.timeline import finish, run

SEED = 2  # of the draws as uneven as the paper's, the one whose topoep plan is levelled


def main() -> int:
    return answer(
        question,
        figure="TopoEP Figs. 7 and 8",
        kind="simulated",
        text="Which operations hide behind which, in one MoE layer?",
        name="pipeline_timeline",
    )


def question() -> dict:
    model = model_named("qwen3_30b_a3b_5l")
    cluster, backend = paper_cluster(model), backends("figure_15").chunked
    load_RE = skewed(model, -4.0, SEED).load_LRE[0]
    main_E = contiguous_mains(*load_RE.shape)
    plan = plan_layer(load_RE, "topoep", main_E, cluster, model, SLOTS)
    costs = layer_costs(
        plan, main_E=main_E, cluster=cluster, dims=model.dims, backend=backend, tokens=TOKENS,
        planned=True,
    )  # fmt: skip
    attention = model.attention_flops(TOKENS) / cluster.flops
    tasks = stage_tasks([costs], backend, attention)
    spans = run(tasks)
    serial = finish(run(stage_tasks([costs], backend, attention, overlap=False)))
    busiest = int(costs.expert_R.argmax())
    bars = [
        {
            "lane": f"{task.name.split('0.')[0]}, {task.stream}",
            "label": task.name.split(".")[1],
            "start": 1e3 * float(spans[task.name].start_R[busiest]),
            "end": 1e3 * float(spans[task.name].end_R[busiest]),
        }
        for task in tasks
        if "." in task.name
    ]
    overlapped = finish(spans)
    return {
        "values": [
            value("one layer, forward and backward, two chunks overlapped", None, 1e3 * overlapped,
                  "ms"),
            value("the same operations one after the other", None, 1e3 * serial, "ms"),
            value("hidden", None, 100 * (1 - overlapped / serial), "%",
                  why="the paper draws the schedule without times; its steps show none hidden "
                  "(see Figure 12)"),
        ],
        "conditions": "the busiest rank's times, milliseconds; a schedule without contention "
        "between streams. `measured_timeline` has a real layer on CPU ranks; on GPUs: not yet run.",
        "tables": [],
        "curves": [],
        "bars": bars,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
