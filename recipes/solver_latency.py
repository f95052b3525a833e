"""How long does a plan take, with more ranks and with more experts?

    python -m recipes.solver_latency

TopoEP paper, Figure 11: mean latency of its CUDA solver on an H800 at E=640 against EP size, and at
R=32 against experts. Here the compiled planners on one core of this machine; where a committed GPU
measurement exists (results/bench_planner_cuda.json), its rows are shown beside them.
"""

import json
import sys
import time
from collections.abc import Callable
from statistics import median

from topoep_kernels.library import is_built
from torch import Tensor

from recipes.common import PUBLISHED, ROOT, TOKENS, answer, curve, progress, value
from topoep_titan.cluster import ModelDims, load_cluster
from topoep_titan.errors import InputError
from topoep_titan.planning import NATIVE
from topoep_titan.planning.plan import Plan, contiguous_mains
from topoep_titan.planning.workloads import load_of, skew

WARM_UPS, REPEATS = 5, 50
RANKS, EXPERTS = (8, 16, 32, 64, 128), (64, 128, 256, 384, 512, 640, 768, 1024)
DIMS = ModelDims(2048, 768)
GPU_ROWS = ROOT / "results" / "bench_planner_cuda.json"


def main() -> int:
    return answer(
        question,
        figure="TopoEP Fig. 11",
        kind="measured on one core of this machine",
        text="How long does a plan take, with more ranks and with more experts?",
        name="solver_latency",
    )


def question() -> dict:
    if not is_built("cpu"):
        raise InputError("the compiled planners are not built; install with `pip install -e .`")
    cells = [(640, ranks) for ranks in RANKS] + [(experts, 32) for experts in EXPERTS]
    microseconds: dict[tuple[str, int, int], float] = {}
    for experts, ranks in progress(cells, len(cells), "cells"):
        load_RE = load_of(skew(experts, 8, ranks, TOKENS, router_skew=-2.0, seed=0), experts)
        problem = {
            "main_E": contiguous_mains(ranks, experts),
            "cluster": load_cluster("h800_4x8").resized(ranks),
            "model_dims": DIMS,
            "replica_slots": 2,
        }
        for name, planner in NATIVE.items():
            microseconds[name, experts, ranks] = median_us(planner, load_RE, problem)
    curves = [
        curve("E = 640, by ranks", name, list(RANKS), [microseconds[name, 640, r] for r in RANKS])
        for name in NATIVE
    ]
    curves += [
        curve("R = 32, by experts", name, list(EXPERTS),
              [microseconds[name, e, 32] for e in EXPERTS])
        for name in NATIVE
    ]  # fmt: skip
    published = PUBLISHED["figure_11"]
    ends = [published["ranks_8"], published["ranks_128"]]
    label = "topoep on an H800, published"
    curves.append(curve("E = 640, by ranks", label, [8, 128], ends, published=True))
    values = [
        value("topoep, E 640, EP 8", published["ranks_8"], microseconds["topoep", 640, 8], "us"),
        value("topoep, E 640, EP 128", published["ranks_128"], microseconds["topoep", 640, 128],
              "us"),
        value("joint, E 640, EP 8", None, microseconds["joint", 640, 8], "us"),
        value("joint, E 640, EP 128", None, microseconds["joint", 640, 128], "us"),
    ]  # fmt: skip
    gpu = "GPU: not yet run"
    if GPU_ROWS.exists():
        rows = json.loads(GPU_ROWS.read_text())["rows"]
        gpu = "GPU: results/bench_planner_cuda.json"
        values += [
            value(f"{row['planner']} on a GPU, E {row['experts']}, EP {row['ranks']}", None,
                  row["plan_us"], "us")
            for row in rows if row["implementation"] == "cuda"
        ]  # fmt: skip
    return {
        "values": values,
        "conditions": "router_skew -2, seed 0, 2 slots, nodes of 8, processor time of one thread, "
        f"median of {REPEATS} calls after {WARM_UPS}, while other jobs ran; a host planner also "
        f"pays for copies and synchronisation, which are not in it. {gpu}. Published labels that "
        f"stay open: {published['ambiguous']}.",
        "tables": [
            {"caption": "Median microseconds of one plan.", "columns": ["planner", "E", "R", "us"],
             "rows": [[*key, us] for key, us in microseconds.items()]}
        ],
        "curves": curves,
        "axes": ["", "microseconds"],
    }  # fmt: skip


def median_us(planner: Callable[..., Plan], load_RE: Tensor, problem: dict) -> float:
    """Processor time, which other jobs on the core do not lengthen much."""
    spent = []
    for _ in range(WARM_UPS + REPEATS):
        started = time.process_time_ns()
        planner(load_RE, **problem)
        spent.append((time.process_time_ns() - started) / 1e3)
    return median(spent[WARM_UPS:])


if __name__ == "__main__":
    sys.exit(main())
