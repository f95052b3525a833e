"""What does a replica on the wrong node cost?

    python -m recipes.replica_placement

TopoEP paper, Figure 3: two nodes send N = 4,096 tokens each to an expert of Qwen3-30B-A3B that
lives on node 1. Both placements give the busiest rank N tokens; one moves tokens between nodes, the
other parameters and gradients.
"""

import sys

import torch

from recipes.common import PUBLISHED, answer, value
from topoep_titan.cluster import ModelDims
from topoep_titan.planning.plan import Plan
from topoep_titan.simulator.traffic import copy_ports, token_ports

DIMS = ModelDims(2048, 768)
N, MIB = 4096, 2**20
MAIN_E = torch.tensor([0, 1, 2, 3])  # expert 2 is the paper's E: its main is rank 2, on node 1


def main() -> int:
    return answer(
        question,
        figure="TopoEP Fig. 3",
        kind="computed",
        text="What does a replica on the wrong node cost?",
        name="replica_placement",
    )


def question() -> dict:
    on_node_1 = traffic(replica_rank=3, executed={(0, 2): N, (3, 3): N})
    on_node_0 = traffic(replica_rank=1, executed={(0, 1): N, (3, 2): N})
    published = PUBLISHED["figure_3"]
    return {
        "values": [
            value("replica on node 1: tokens between nodes", published["tokens"], on_node_1[0],
                  "MiB", within=0.0),
            value("replica on node 0: parameters between nodes", published["parameters"],
                  on_node_0[1], "MiB", within=0.0),
            value("replica on node 0: gradients between nodes", published["gradients"],
                  on_node_0[2], "MiB", within=0.0),
        ],
        "conditions": "bf16, four token passes (dispatch and combine, forward and backward), two "
        "parameter pulls (forward, and again in backward), one gradient push.",
        "tables": [],
        "curves": [],
    }  # fmt: skip


def traffic(replica_rank: int, executed: dict[tuple[int, int], int]) -> tuple[float, float, float]:
    """MiB between the nodes: tokens, parameters, gradients."""
    expert_G = torch.tensor([0, -1, 1, -1, 2, -1, 3, -1], dtype=torch.int32)
    expert_G[2 * replica_rank + 1] = 2
    assignments_RG = torch.zeros(4, 8, dtype=torch.int32)
    for (source, rank), tokens in executed.items():
        assignments_RG[source, 2 * rank + (rank == replica_rank)] = tokens
    plan = Plan(expert_G, assignments_RG)
    rows = token_ports(plan, ranks_per_node=2, tokens=N, dispatcher="alltoall").far_R.max()
    copies = copy_ports(plan, MAIN_E, ranks_per_node=2).far_R.max()
    expert = float(copies) * DIMS.expert_bytes / MIB
    return 4 * float(rows) * DIMS.token_bytes / MIB, 2 * expert, expert


if __name__ == "__main__":
    sys.exit(main())
