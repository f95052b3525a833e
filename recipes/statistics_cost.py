"""What the statistics of expert placement cost in a step: their share of one MoE layer's time.

    python -m recipes.statistics_cost [--out results/statistics_cost.json]

One rank, Qwen3-30B-A3B's routing (128 experts, top-8, 4,096 tokens) at a width that a CPU bears,
1/8 of the model's. Forward and backward of the layer against what a call of it adds for placement:
the expert sets of a few tokens kept, and the load summed. The statistics do not grow with the
width, the layer does, so the share is an upper bound for the real one on this machine. Medians of
rounds that alternate.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from topoep_titan.execution.lane import ThreadLane
from topoep_titan.execution.layer import Engine, run_layer
from topoep_titan.execution.loopback import Loopback
from topoep_titan.placement.statistics import SetSample
from topoep_titan.planning.plan import contiguous_mains, unbalanced_plan
from topoep_titan.planning.workloads import skew
from topoep_titan.results import provenance, write_atomically

E, K, T, D, F = 128, 8, 4096, 256, 96
SAMPLE, A_CALL = 8192, 17  # tokens: of a refresh on one rank, and of a call (8,192 in 500 steps)
ROUNDS = 15


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results/statistics_cost.json"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    layer, gathered = [], []
    ids_TK = skew(E, K, 1, T, router_skew=0, seed=0)[0].long()
    sample, load_E = SetSample(SAMPLE, A_CALL, 0), torch.zeros(E, dtype=torch.int64)
    step = _layer(ids_TK)
    for _ in range(ROUNDS):
        started = time.perf_counter()
        record = step()
        ended = time.perf_counter()
        sample.add(ids_TK)
        load_E += record.load_RE.sum(0)
        gathered.append(time.perf_counter() - ended)
        layer.append(ended - started)
    share = statistics.median(gathered) / statistics.median(layer)
    result = {
        "kind": "measured", "shape": {"E": E, "K": K, "T": T, "D": D, "F": F},
        "layer_ms": statistics.median(layer) * 1e3,
        "statistics_us": statistics.median(gathered) * 1e6, "share": share, **provenance(),
    }  # fmt: skip
    write_atomically(options.out, json.dumps(result, indent=1) + "\n")
    print(f"statistics: {share:.3%} of a layer's forward and backward; numbers: {options.out}")
    return 0


def _layer(ids_TK: torch.Tensor):
    """A call of the layer, forward and backward; returns its record."""
    draw = torch.Generator().manual_seed(0)
    shapes = ((E, F, D), (E, D, F), (E, F, D))
    weights = tuple((torch.randn(s, generator=draw) / 10).requires_grad_() for s in shapes)
    x_TD = torch.randn(T, D, generator=draw, requires_grad=True)
    scores_TK, main_E = torch.rand(T, K, generator=draw), contiguous_mains(1, E)
    counts_E = torch.bincount(ids_TK.flatten(), minlength=E)
    engine = Engine(
        planner=lambda load_RE: unbalanced_plan(load_RE, main_E, 0), main_E=main_E,
        replica_slots=0, dispatcher="dedup", chunks=1, compute_dtype=torch.float32,
        transport=Loopback().transport(), lane=ThreadLane(),
    )  # fmt: skip

    def step():
        out_TD, record = run_layer(x_TD, scores_TK, ids_TK, counts_E, weights, engine)
        out_TD.sum().backward()
        return record

    return step


if __name__ == "__main__":
    sys.exit(main())
