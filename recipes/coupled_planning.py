"""Does planning in rows beat both of its parts? Modelled layer times on the coupled presets.

    python -m recipes.coupled_planning [--presets hot5] [--seeds 0 1 2] [--world 1] [--out FILE]

Parts: the published rule (`topoep`) with contiguous experts, by its own all-to-all or by the
deduplicating dispatcher, whichever is faster; and placement with deduplication, without replicas.
Against them: `joint` in rows on the placed experts, its candidates priced with every rank's tokens.
Beside them: no balancing at all, and `joint` in assignments with the cut rule. Nothing is trained,
sent or timed. Experts are placed by 8,192 tokens of another draw of the same router. The planner's
row prices were chosen in world 1 (another draw of its tokens); any other world is a router that
they were never fitted to, in which hotN no longer means exactly N times.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from topoep_titan.cluster import Cluster, ModelDims, load_cluster
from topoep_titan.cluster.row_model import modelled_row_time
from topoep_titan.placement import BALANCE_WEIGHT, place
from topoep_titan.planning import PLANNERS, Plan
from topoep_titan.planning.coupled import PRESETS, coupled, coupling_for
from topoep_titan.planning.plan import contiguous_mains, cut_assignments
from topoep_titan.planning.rows import plan_in_rows
from topoep_titan.planning.workloads import load_of
from topoep_titan.results import provenance, write_atomically

WORKLOADS = PRESETS | {"top8 hard": coupling_for(128, 8, hard=True)}
HOT = ("hot5", "hot8", "hot10")
EXPERTS, TOKENS, SLOTS, FIT_TOKENS = 128, 4096, 2, 8192
# The two published models with 128 experts, on the paper's groups.
MODELS = {"qwen3 4x8": (ModelDims(2048, 768), 32), "glm 2x8": (ModelDims(4096, 1408), 16)}
DEDUP = ("dedup-node", "dedup")
FIT_SEEDS = 1000  # a sample's seed is its workload's plus this
NODE_WEIGHT = 4  # bw_near / bw_far of h800_4x8


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--presets", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--world", type=int, default=1, help="seed of the router drawn from")
    parser.add_argument("--out", type=Path, default=Path("results/coupled_planning.json"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[dict] = []
    for preset in options.presets:
        for seed in options.seeds:
            for row in cells(preset, seed, options.world):
                rows.append(row)
                what = ("preset", "model", "seed", "dispatcher", "over_better_part")
                print(json.dumps({key: row[key] for key in what}), flush=True)
        result = {"kind": "modelled", "rates": "h800_4x8", "slots": SLOTS, "tokens": TOKENS,
                  "world": options.world,
                  "rows": rows, "summary": summary(rows), **provenance()}  # fmt: skip
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(options.out, json.dumps(result) + "\n")
    show(result["summary"])
    print(f"numbers: {options.out}")
    return 0


def cells(preset: str, seed: int, world: int) -> Iterator[dict[str, Any]]:
    """One row for each model and dispatcher; times in microseconds by term."""
    workload = WORKLOADS[preset]
    most = max(ranks for _, ranks in MODELS.values())
    ids_TK, fit_TK = (
        coupled(workload, layers=1, tokens=tokens, seed=draw, world_seed=world)[0].long()
        for tokens, draw in ((most * TOKENS, seed), (FIT_TOKENS, seed + FIT_SEEDS))
    )
    for model, (dims, ranks) in MODELS.items():
        ids = list(ids_TK.view(most, TOKENS, -1)[:ranks])
        cluster = load_cluster("h800_4x8").resized(ranks, 8)
        placed_E = place(
            fit_TK, experts=EXPERTS, ranks=ranks, ranks_per_node=8, node_weight=NODE_WEIGHT,
            balance_weight=BALANCE_WEIGHT,
        )  # fmt: skip
        for dispatcher in DEDUP:
            times, found = _times(ids, placed_E, cluster, dims, dispatcher)
            parts = ("topoep", "topoep dedup", "placed none")
            better = min(times[part]["total"] for part in parts)
            yield {
                "preset": preset, "model": model, "seed": seed, "dispatcher": dispatcher,
                "modelled_us": times, **found,
                "over_better_part": times["placed joint rows"]["total"] / better,
            }  # fmt: skip


def _times(
    ids: list[Tensor], placed_E: Tensor, cluster: Cluster, dims: ModelDims, dispatcher: str
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """(modelled time of each way, what joint in rows did)."""
    load_RE = load_of(torch.stack(ids), EXPERTS)
    contiguous_E = contiguous_mains(cluster.ranks, EXPERTS)

    def price(plan: Plan, slots: list[Tensor], main_E: Tensor, by: str) -> dict[str, float]:
        return modelled_row_time(
            plan.expert_G, slots, main_E=main_E, cluster=cluster, dims=dims, dispatcher=by
        ).as_us()

    def by_cut(planner: str, main_E: Tensor, by: str) -> dict[str, float]:
        plan = PLANNERS[planner](
            load_RE, main_E=main_E, cluster=cluster, model_dims=dims, replica_slots=SLOTS
        )
        slots = [cut_assignments(plan, ids_TK, rank) for rank, ids_TK in enumerate(ids)]
        return price(plan, slots, main_E, by)

    plan, slots = plan_in_rows(
        ids, load_RE, dispatcher=dispatcher, main_E=placed_E, cluster=cluster, model_dims=dims,
        replica_slots=SLOTS,
    )  # fmt: skip
    times = {
        "none": by_cut("none", contiguous_E, dispatcher),
        "topoep": by_cut("topoep", contiguous_E, "alltoall"),
        "topoep dedup": by_cut("topoep", contiguous_E, dispatcher),
        "placed none": by_cut("none", placed_E, dispatcher),
        "placed joint": by_cut("joint", placed_E, dispatcher),
        "placed joint rows": price(plan, slots, placed_E, dispatcher),
    }
    load_R = plan.assignments_RG.long().sum(0).view(cluster.ranks, -1).sum(1)
    load_E = load_RE.sum(0)
    return times, {
        "hottest_over_mean": int(load_E.max()) * EXPERTS / int(load_E.sum()),
        "max_over_mean": int(load_R.max()) * cluster.ranks / int(load_R.sum()),
        "num_replicas": plan.num_replicas,
    }


def summary(rows: list[dict]) -> list[dict]:
    """Per preset, model and dispatcher the geometric means over the seeds; then over all hot
    presets, and the worst of all other cells."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["preset"], row["model"], row["dispatcher"]), []).append(row)
    table = []
    for (preset, model, dispatcher), group in groups.items():
        ways = {
            way: _geometric(row["modelled_us"][way]["total"] for row in group)
            for way in group[0]["modelled_us"]
        }
        table.append(
            {"preset": preset, "model": model, "dispatcher": dispatcher, "us": ways,
             "over_better_part": _geometric(row["over_better_part"] for row in group),
             "max_over_mean": statistics.fmean(row["max_over_mean"] for row in group),
             "num_replicas": statistics.fmean(row["num_replicas"] for row in group)}
        )  # fmt: skip
    for dispatcher in DEDUP:
        mine = [row for row in rows if row["dispatcher"] == dispatcher]
        hot = [row["over_better_part"] for row in mine if row["preset"] in HOT]
        rest = [row["over_better_part"] for row in mine if row["preset"] not in HOT]
        table.append(
            {"dispatcher": dispatcher, "hot_geometric_mean": _geometric(hot) if hot else None,
             "others_worst": max(rest, default=None)}
        )  # fmt: skip
    return table


def _geometric(values) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def show(table: list[dict]) -> None:
    for row in table:
        if "preset" not in row:
            print(
                f"{row['dispatcher']}: hot presets, geometric mean {row['hot_geometric_mean']}, "
                f"worst other cell {row['others_worst']}"
            )
            continue
        ways = "  ".join(f"{way} {us / 1000:.2f}" for way, us in row["us"].items())
        print(
            f"{row['preset']:9} {row['model']:9} {row['dispatcher']:10} "
            f"{row['over_better_part']:.3f}  ms: {ways}  "
            f"max/mean {row['max_over_mean']:.2f}, {row['num_replicas']:.0f} replicas"
        )


if __name__ == "__main__":
    sys.exit(main())
