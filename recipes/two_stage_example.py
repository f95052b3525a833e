"""What do the two stages of topoep do to one hot expert?

    python -m recipes.two_stage_example

TopoEP paper, Figure 9: two nodes of two GPUs; eight assignments of GPU 0 and GPU 2's own select
expert E4, whose main is GPU 2. Stage 1 replicates it on GPU 0 (loads 14 and 6 in that node), stage
2 on GPU 1, which levels the two at 10.
"""

import dataclasses
import sys

import torch

from recipes.common import answer, value
from topoep_titan.cluster import ModelDims, load_cluster
from topoep_titan.planning import REFERENCE
from topoep_titan.planning.quality import plan_quality

# Two experts a rank: E0, E1 | E2, E3 | E4, E5 | E6, E7. GPU 0 has six assignments of its own
# experts beside the eight to E4, GPU 1 six; node 1 has what its mains hold without GPU 0's.
LOAD_RE = torch.tensor(
    [
        [3, 3, 0, 0, 8, 0, 0, 0],
        [0, 0, 6, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 6, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 6, 0],
    ]
)
DIMS = ModelDims(1024, 1)  # a token of 2,048 bytes, an expert of 6,144: eight tokens pay a copy
MAIN_E = torch.arange(8) // 2


def main() -> int:
    return answer(
        question,
        figure="TopoEP Fig. 9",
        kind="computed from plans",
        text="What do the two stages of topoep do to one hot expert?",
        name="two_stage_example",
    )


def question() -> dict:
    cluster = dataclasses.replace(load_cluster("h800_2x8"), nodes=2, ranks_per_node=2)
    given = {"main_E": MAIN_E, "cluster": cluster, "model_dims": DIMS}
    before, after = (
        REFERENCE[name](LOAD_RE, **given, replica_slots=1) for name in ("none", "topoep")
    )
    load_R = after.assignments_RG.sum(0).view(4, 3).sum(1).tolist()
    hosts = (after.expert_G.view(4, 3) == 4).any(1).nonzero().flatten().tolist()
    inter = [plan_quality(plan, **given).inter_node_fraction for plan in (before, after)]
    return {
        "values": [
            value("load of GPU 0 after refinement", 10, load_R[0], within=0.0),
            value("load of GPU 1 after refinement", 10, load_R[1], within=0.0),
            value("instances of E4", 3, len(hosts), within=0.0),
            value("assignments between nodes, before", 8, inter[0] * 32, within=1e-9),
            value("assignments between nodes, after", 0, inter[1] * 32, within=0.0),
        ],
        "conditions": "the figure's loads; its sizes are not told: an expert weighs three tokens.",
        "tables": [],
        "curves": [],
    }


if __name__ == "__main__":
    sys.exit(main())
