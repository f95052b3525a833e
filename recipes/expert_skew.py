"""How uneven are the experts of a trained router, by layer and over microbatches?

    make train NAME=traced ARGS="--topoep.record-trace --training.steps 100"
    python -m recipes.expert_skew --trace outputs/traced/trace

TopoEP paper, Figure 2: Qwen3-30B-A3B on DAPO-Math and StarCoderData: busiest over mean expert (mean
7.34 and 7.08), and the share of the eight busiest experts that changes between microbatches. Ours
is what a recorded run of any size shows.
"""

import sys
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from recipes.common import PUBLISHED, answer, curve, value
from topoep_titan.errors import InputError
from topoep_titan.simulator.traces import recorded

BUSIEST = 8


def main() -> int:
    if "--trace" not in sys.argv[:-1]:
        print("expert_skew: give --trace outputs/NAME/trace of a recorded run", file=sys.stderr)
        return 2
    at = sys.argv.index("--trace")
    folder = Path(sys.argv[at + 1])
    del sys.argv[at : at + 2]
    return answer(
        lambda: question(folder),
        figure="TopoEP Fig. 2",
        kind="measured",
        text="How uneven are the experts of a trained router, by layer and over microbatches?",
        name="expert_skew",
    )


def question(folder: Path) -> dict:
    load_BLE = torch.stack(
        [
            torch.stack([load_RE.sum(0) for load_RE in microbatch.load_LRE])
            for microbatch in recorded(folder, experts_of(folder))
        ]
    ).double()
    microbatches, layers, experts = load_BLE.shape
    uneven_BL = load_BLE.amax(2) / load_BLE.mean(2)
    late_L = uneven_BL[-microbatches // 4 :].mean(0)  # the last quarter: the router has learned
    busiest = min(BUSIEST, experts // 4)
    top_BLK = load_BLE.topk(busiest, dim=2).indices
    turnover = [
        1 - fmean(
            len(set(now.tolist()) & set(then.tolist())) / busiest
            for now, then in zip(top_BLK[b], top_BLK[b - 1])
        )
        for b in range(1, microbatches)
    ]  # fmt: skip
    published = PUBLISHED["figure_2"]
    return {
        "values": [
            value("max/mean expert load, mean of layers (DAPO-Math published)",
                  published["expert_max_over_mean_mean"][0], float(late_L.mean()), why=WHY),
            value("the same, busiest layer", published["expert_max_over_mean_peak"][0],
                  float(uneven_BL.max()), why=WHY),
            value(f"change among the {busiest} busiest experts between microbatches",
                  100 * published["turnover"][0], 100 * fmean(turnover), "%", why=WHY),
        ],
        "conditions": f"{microbatches} recorded microbatches of {layers} MoE layers and {experts} "
        "experts, natural routing; max/mean over the last quarter of them.",
        "tables": [],
        "curves": [
            curve("by layer", "max/mean expert load", list(range(layers)), late_L.tolist()),
            curve("by microbatch", "mean of layers", list(range(microbatches)),
                  uneven_BL.mean(1).tolist()),
        ],
        "axes": ["", "max/mean"],
    }  # fmt: skip


def experts_of(folder: Path) -> int:
    """The trace does not name its experts: the least power of two that holds its ids."""
    paths = sorted(folder.glob("step-*.npz"))
    if not paths:
        raise InputError(f"no trace in {folder}; train with topoep.record_trace = true")
    most = max(int(np.load(path)["ids"].max()) for path in paths)
    return 1 << most.bit_length()


WHY = "a small model after a short run; the paper profiles the released 30B checkpoint"

if __name__ == "__main__":
    sys.exit(main())
