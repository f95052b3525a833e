"""Do the operations that the two-chunk schedule puts side by side run side by side?

    python -m recipes.measured_timeline

TopoEP paper, Figures 7 and 8, measured: the profile of one MoE layer, forward and backward, under
``topoep`` on two gloo ranks of this machine. Order is the result, not time: two ranks with two
threads each share whatever cores are free.
"""

import re
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from recipes.common import answer, value
from topoep_titan.cluster import ModelDims, load_cluster
from topoep_titan.execution.lane import ThreadLane
from topoep_titan.execution.layer import Engine, run_layer
from topoep_titan.execution.transport import CollectiveTransport
from topoep_titan.planning import make_planner
from topoep_titan.planning.plan import contiguous_mains
from topoep_titan.planning.workloads import skew

RANKS, EXPERTS, TOP_K, TOKENS, SLOTS = 2, 16, 4, 2048, 2
DIMS = ModelDims(512, 512)
WARM, STEPS = 3, 10
FORWARD, BACKWARD = 0, -1  # a name occurs once in each
# (what, one operation, another, which of its occurrences)
SIDE_BY_SIDE = (
    ("forward: chunk 2 arrives while chunk 1 is computed", "dispatch c2", "experts c1", FORWARD),
    ("forward: chunk 1 returns while chunk 2 is computed", "combine c1", "experts c2", FORWARD),
    ("backward: chunk 2 arrives during Dgrad of chunk 1", "dispatch c2", "Dgrad c1", BACKWARD),
    ("backward: chunk 1 returns during its Wgrad", "combine c1", "Wgrad c1", BACKWARD),
)
Span = tuple[float, float]  # microseconds
Spans = dict[str, list[Span]]  # operation -> when it ran, in order


def main() -> int:
    return answer(
        question,
        figure="TopoEP Figs. 7 and 8, measured",
        kind="measured on two gloo ranks of this machine",
        text="Do the operations that the schedule puts side by side run side by side?",
        name="measured_timeline",
    )


def question() -> dict:
    steps = measured()
    values = [
        value(what, 1.0, sum(overlap(step, *pair) for step in steps) / len(steps), "of the steps")
        for what, *pair in SIDE_BY_SIDE
    ]
    middle = sorted(steps, key=length)[len(steps) // 2]
    return {
        "values": values,
        "conditions": f"one layer of {EXPERTS} experts, top-{TOP_K}, widths {DIMS.hidden} and "
        f"{DIMS.moe_intermediate}, {TOKENS} tokens a rank at router_skew -4, {SLOTS} slots, fp32, "
        f"all-to-all dispatcher; rank 0 of {RANKS}, {STEPS} steps after {WARM}; drawn is the step "
        "of median length. On GPUs: not yet run.",
        "tables": [],
        "curves": [],
        "bars": bars(middle),
    }


def measured() -> list[Spans]:
    """Rank 0's operations in each step."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (folder,), nprocs=RANKS)
        return torch.load(Path(folder) / "steps.pt")


def overlap(step: Spans, one: str, other: str, which: int) -> bool:
    (begin, end), (start, stop) = step[one][which], step[other][which]
    return max(begin, start) < min(end, stop)


def length(step: Spans) -> float:
    every = [span for spans in step.values() for span in spans]
    return max(end for _, end in every) - min(begin for begin, _ in every)


def bars(step: Spans) -> list[dict]:
    """Of the timeline: forward and backward, computation and communication."""
    first = min(spans[0][0] for spans in step.values())
    backward = min(step[name][-1][0] for name in ("pull again", "dispatch c1") if name in step)
    found = []
    for name, spans in step.items():
        computes = name.split()[0] in ("experts", "Dgrad", "Wgrad")
        short = name.lower().replace("experts", "expert").replace(" c", "")
        for begin, end in spans:
            direction = "backward" if begin >= backward else "forward"
            found.append({
                "lane": f"{direction}, {'compute' if computes else 'comm'}", "label": short,
                "start": (begin - first) / 1e3, "end": (end - first) / 1e3,
            })  # fmt: skip
    order = ("forward, compute", "forward, comm", "backward, compute", "backward, comm")
    return sorted(found, key=lambda bar: (order.index(bar["lane"]), bar["start"]))


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    step = _layer(rank)
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    steps = []
    for number in range(WARM + STEPS):
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU], experimental_config=threads) as profiler:
            step()
        spans: Spans = {}
        for event in profiler.events():
            if re.fullmatch(r"(dispatch|combine|experts|Dgrad|Wgrad) c\d|pull( again)?|push",
                            event.name):  # fmt: skip
                span = event.time_range.start, event.time_range.end
                spans.setdefault(event.name, []).append(span)
        if number >= WARM:
            steps.append({name: sorted(times) for name, times in spans.items()})
    if rank == 0:
        torch.save(steps, Path(folder) / "steps.pt")
    dist.barrier()
    dist.destroy_process_group()


def _layer(rank: int):
    """One step of one layer: forward and backward."""
    cluster = load_cluster("cpu_local").resized(RANKS, 1)
    main_E = contiguous_mains(RANKS, EXPERTS)
    engine = Engine(
        planner=make_planner(
            "topoep", "alltoall", main_E=main_E, cluster=cluster, model_dims=DIMS,
            replica_slots=SLOTS,
        ),
        main_E=main_E, replica_slots=SLOTS, dispatcher="alltoall", chunks=2,
        compute_dtype=torch.float32, transport=CollectiveTransport(dist.group.WORLD, 1),
        lane=ThreadLane(),
    )  # fmt: skip
    ids_TK = skew(EXPERTS, TOP_K, RANKS, TOKENS, router_skew=-4.0, seed=0)[rank].long()
    draw = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(TOKENS, DIMS.hidden, generator=draw)
    scores_TK = torch.rand(ids_TK.shape, generator=draw)
    weights = tuple(
        torch.randn(EXPERTS // RANKS, *shape, generator=draw).mul_(0.02).requires_grad_()
        for shape in ((DIMS.moe_intermediate, DIMS.hidden), (DIMS.hidden, DIMS.moe_intermediate),
                      (DIMS.moe_intermediate, DIMS.hidden))
    )  # fmt: skip
    counts_E = torch.bincount(ids_TK.flatten(), minlength=EXPERTS)

    def step() -> None:
        x = x_TD.clone().requires_grad_()
        out_TD, _ = run_layer(x, scores_TK, ids_TK, counts_E, weights, engine)
        out_TD.backward(x_TD)

    return step


if __name__ == "__main__":
    sys.exit(main())
