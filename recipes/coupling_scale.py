"""How far does correlated placement carry as the group grows?

    python -m recipes.coupling_scale

No figure of the papers; beside ``scale_study``, which asks the same of planners. One MoE layer of
Qwen3-30B-A3B's widths on routing with planted co-selection, without replicas: experts contiguous
(coupling off) against placed nodes first (on), rows deduplicated by node and rank in both.
"""

import dataclasses
import sys

import numpy as np
import torch
from torch import Tensor

from recipes.common import answer, curve, progress, value
from topoep_titan.cluster import Cluster, ModelDims, load_cluster
from topoep_titan.placement import place
from topoep_titan.placement.sets import Effort
from topoep_titan.planning.coupled import coupled, coupling_for
from topoep_titan.planning.plan import contiguous_mains, unbalanced_plan
from topoep_titan.planning.workloads import load_of
from topoep_titan.simulator.calibration import backends
from topoep_titan.simulator.layer import layer_costs, port_seconds
from topoep_titan.simulator.step import stage_tasks
from topoep_titan.simulator.timeline import finish, run
from topoep_titan.simulator.traffic import distinct_places, row_ports

CLUSTERS = ("h800_4x8", "gb200_nvl72", "mi300x_8x8")
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
DIMS, TOP_K, TOKENS = ModelDims(2048, 768), 8, 4096
DRAWN = 4  # ranks whose tokens are drawn; the others repeat them
FIT_TOKENS, FIT_SEED, TEST_SEED = 16384, 0, 1
BALANCE_WEIGHT = 100
EFFORT = Effort(starts=0, moves=0, kicks=0)  # at 1,024 experts more finds nothing, in minutes


def main() -> int:
    return answer(
        question,
        figure="Scale study, coupling",
        kind="simulated, ideal backends",
        text="How far does correlated placement carry as the group grows?",
        name="coupling_scale",
    )


def question() -> dict:
    rows, gains = [], {}
    for ranks in progress(RANKS, len(RANKS), "groups"):
        experts = 640 if ranks <= 128 else max(1024, ranks)
        coupling = coupling_for(experts, TOP_K)
        fit_TK = coupled(coupling, layers=1, tokens=FIT_TOKENS, seed=FIT_SEED)[0]
        ids_RTK = coupled(coupling, layers=1, tokens=DRAWN * TOKENS, seed=TEST_SEED)[0]
        ids_RTK = ids_RTK.view(DRAWN, TOKENS, TOP_K)
        for name in CLUSTERS:
            cluster = group_of(name, ranks)
            weight = max(1, round(cluster.bw_near / cluster.bw_far))
            placed_E = place(
                fit_TK, experts=experts, ranks=ranks, ranks_per_node=cluster.ranks_per_node,
                node_weight=weight, balance_weight=BALANCE_WEIGHT, effort=EFFORT,
            )  # fmt: skip
            off = layer(ids_RTK, contiguous_mains(ranks, experts), cluster, experts)
            on = layer(ids_RTK, placed_E, cluster, experts)
            gains.setdefault(name, {})[ranks] = off["layer"] / on["layer"]
            for label, found in (("off", off), ("on", on)):
                rows.append([name, ranks, experts, label, *found.values(),
                             off["layer"] / found["layer"]])  # fmt: skip
    values = []
    for name, by_ranks in gains.items():
        most = max(by_ranks, key=by_ranks.get)
        values += [
            value(f"{name}: placed over contiguous, most (EP {most})", None, by_ranks[most], "x"),
            value(f"{name}: placed over contiguous, EP {RANKS[-1]}", None, by_ranks[RANKS[-1]],
                  "x"),
        ]  # fmt: skip
    return {
        "values": values,
        "conditions": "one MoE layer, forward and backward, two chunks overlapped, 4,096 tokens a "
        "rank, top-8, no replicas; coupled routing, 640 experts to EP 128, then 1,024 or one a "
        f"rank; the tokens of {DRAWN} ranks are repeated; placements fitted on {FIT_TOKENS:,} "
        f"tokens of another draw. Nodes of 8 (h800, mi300x), of 64 for gb200. {READING}",
        "tables": [
            {"caption": "Milliseconds of one layer, and rows a token.",
             "columns": ["cluster", "EP", "experts", "coupling", "rows to other nodes",
                         "rows to ranks", "max/mean", "experts, forward", "one token pass",
                         "layer", "over off"],
             "rows": rows}
        ],
        "curves": [
            curve("", name, [*by_ranks], [*by_ranks.values()]) for name, by_ranks in gains.items()
        ],
        "axes": ["EP ranks", "layer time, contiguous over placed"],
    }  # fmt: skip


def group_of(name: str, ranks: int) -> Cluster:
    cluster = load_cluster(name)
    per_node = next(n for n in (cluster.ranks_per_node, 64, 32, 16, 8) if ranks % n == 0)
    return cluster.resized(ranks, min(per_node, ranks))


def layer(ids_RTK: Tensor, main_E: Tensor, cluster: Cluster, experts: int) -> dict[str, float]:
    """What one placement sends and takes. Only ``DRAWN`` sources differ: only they are counted."""
    ranks, nodes = cluster.ranks, cluster.nodes
    repeats = ranks // DRAWN
    plan = unbalanced_plan(load_of(ids_RTK, experts).repeat(repeats, 1), main_E, 0)
    rank_RTK = main_E[ids_RTK.long()].numpy()
    rows_RR, rows_RM = (
        np.tile([distinct_places(rank_TK // size, count) for rank_TK in rank_RTK], (repeats, 1))
        for size, count in ((1, ranks), (cluster.ranks_per_node, nodes))
    )
    backend = backends().chunked
    costs = layer_costs(
        plan, main_E=main_E, cluster=cluster, dims=DIMS,
        backend=dataclasses.replace(backend, dispatcher="alltoall"), tokens=TOKENS, planned=False,
    )  # fmt: skip
    ports = row_ports(rows_RR, rows_RM, cluster.ranks_per_node)
    token_R = port_seconds(ports, DIMS.token_bytes, cluster, backend)
    costs = dataclasses.replace(costs, token_R=token_R)
    own = np.arange(ranks) // cluster.ranks_per_node
    far = rows_RM.sum() - rows_RM[np.arange(ranks), own].sum()
    return {
        "far": float(far) / (ranks * TOKENS),
        "rows": float(rows_RR.sum()) / (ranks * TOKENS),
        "max_over_mean": float(costs.expert_R.max() / costs.expert_R.mean()),
        "expert": 1e3 * float(costs.expert_R.max()),
        "token": 1e3 * float(token_R.max()),
        "layer": 1e3 * finish(run(stage_tasks([costs], backend, 0.0))),
    }


READING = (
    "Reading: within one NVLink domain nothing is gained, since token passes hide behind experts, "
    "and up to 7 % lost, since experts that are chosen together load their ranks less evenly. The "
    "gain starts where the pass between nodes outlasts the experts (EP 64 in nodes of 8, EP 256 in "
    "nodes of 64): rows to other nodes nearly halve, and stay so with one expert a rank, since a "
    "node still holds experts of one kind. It ends near 1.7, as the tokens that follow no pattern "
    "are left, and loads of single ranks grow."
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
