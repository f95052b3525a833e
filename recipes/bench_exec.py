"""Does balancing pay on this machine? Measured steps of stacked MoE layers over gloo ranks.

    python -m recipes.bench_exec [--only a b c c0] [--chunks 1] [--out results/bench_exec.json]

(a) uniform routing, two ranks: what looking costs when there is nothing to balance.
(b) router_skew -4, two ranks of one quota each: how much of the load ratio becomes speed.
(c) an emulated cluster, 2 nodes x 2 ranks over a 1 Gbit/s link: planners x dispatchers.

Steps of all modes alternate within one run; a ratio is the median over paired rounds, with its
range; figures of several seed blocks are geometric means. Every mode's output and gradients are
compared first (1e-5). Losses are not involved. Root only; elsewhere it says why it is skipped.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path

from recipes.emulated_cluster import Emulation, missing, run_ranks
from topoep_titan.results import provenance, write_atomically

LAYERS = {
    "layers": 4, "tokens": 2048, "hidden": 256, "moe_intermediate": 256, "experts": 16,
    "top_k": 4, "replica_slots": 2, "cluster": "emulated_2x2",
    "ranks_per_node": 2, "seeds": [0, 10, 20],
}  # fmt: skip
ONE_NODE = Emulation(nodes=1, ranks_per_node=2, rate="none", quota=45)
CLUSTER = Emulation(nodes=2, ranks_per_node=2, rate="1gbit", quota=25)
PAIR = [["none", "alltoall"], ["joint", "alltoall"]]
EVEN = [*PAIR, ["joint", "dedup-node"]]
GRID = [[p, d] for d in ("alltoall", "dedup-node") for p in ("none", "eplb", "topoep", "joint")]

# name: (question, emulation, router_skew, paired rounds, modes: the first is what others are over)
BENCHES = {
    "a": ("uniform routing, two ranks", ONE_NODE, 0, 15, PAIR),
    "b": ("router_skew -4, two ranks", ONE_NODE, -4, 7, PAIR),
    "c": ("router_skew -4, 2 x 2 ranks", CLUSTER, -4, 5, GRID),
    "c0": ("uniform routing, 2 x 2 ranks", CLUSTER, 0, 15, EVEN),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(BENCHES), default=list(BENCHES))
    parser.add_argument("--chunks", type=int, choices=(1, 2), default=1)
    parser.add_argument("--note", default="", help="said in the result, e.g. what else was running")
    parser.add_argument("--out", type=Path, default=Path("results/bench_exec.json"))
    options = parser.parse_args(arguments)
    reason = missing()
    if reason:
        print(f"bench-exec: skipped: {reason}")
        return 0
    results = []
    for name in options.only:
        question, emulation, router_skew, rounds, modes = BENCHES[name]
        spec = {
            **LAYERS,
            "chunks": options.chunks,
            "router_skew": router_skew,
            "rounds": rounds,
            "modes": modes,
        }
        blocks = measure(emulation, spec)
        rows = table(blocks)
        results.append(
            {"name": name, "question": question, "emulation": dataclasses.asdict(emulation),
             "settings": spec, "rows": rows, "blocks": blocks}
        )  # fmt: skip
        print(f"\n({name}) {question}, quota {emulation.quota} %, chunks {options.chunks}")
        show(rows)
        result = {"kind": "measured", "note": options.note, **provenance(), "benches": results}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(options.out, json.dumps(result, indent=1) + "\n")
    print(f"\nnumbers: {options.out}")
    return 0


def measure(emulation: Emulation, spec: dict, timeout: float = 1800) -> list[dict]:
    """Blocks as `recipes.bench_rank` writes them. Raises RuntimeError when a rank fails."""
    with tempfile.TemporaryDirectory() as folder:
        job, out = Path(folder) / "spec.json", Path(folder) / "result.json"
        job.write_text(json.dumps(spec))
        command = [sys.executable, "-m", "recipes.bench_rank", str(job), str(out)]
        run_ranks(emulation, command, Path(folder), timeout)
        return json.loads(out.read_text())


def table(blocks: list[dict]) -> list[dict]:
    """One row a mode: its speed-up over the first mode, and what it planned and sent."""
    rows = []
    for i, mode in enumerate(blocks[0]["modes"]):
        ratios = [_ratios(block["modes"][0], block["modes"][i]) for block in blocks]
        medians = [statistics.median(ratio) for ratio in ratios]
        same = [block["modes"][i] for block in blocks]
        rows.append(
            {
                "planner": mode["planner"],
                "dispatcher": mode["dispatcher"],
                "speedup": math.exp(statistics.fmean(map(math.log, medians))),
                "speedup_of_blocks": medians,
                "range_of_blocks": [[min(ratio), max(ratio)] for ratio in ratios],
                # What levelling alone allows: the busiest rank's load before and after.
                "load_ratio_of_blocks": [
                    block["modes"][0]["max_over_mean"] / block["modes"][i]["max_over_mean"]
                    for block in blocks
                ],
                **{
                    key: statistics.fmean(block[key] for block in same)
                    for key in ("max_over_mean", "num_replicas", "plan_us", "token_share",
                                "token_far_rows", "parameter_far_bytes", "gradient_far_bytes")
                },
                "seconds": statistics.fmean(statistics.median(b["seconds"]) for b in same),
            }
        )  # fmt: skip
    return rows


def show(rows: list[dict]) -> None:
    print(
        f"{'planner':8} {'dispatcher':10} {'speed-up':>8}  {'by block [range]':44} "
        f"{'max/mean':>8} {'load x':>6} {'far rows':>8} {'copies':>6} {'tokens':>6} {'step s':>6}"
    )
    for row in rows:
        blocks = " ".join(
            f"{median:.2f} [{low:.2f}-{high:.2f}]"
            for median, (low, high) in zip(row["speedup_of_blocks"], row["range_of_blocks"])
        )
        print(
            f"{row['planner']:8} {row['dispatcher']:10} {row['speedup']:8.2f}  {blocks:44} "
            f"{row['max_over_mean']:8.2f} {statistics.fmean(row['load_ratio_of_blocks']):6.2f} "
            f"{row['token_far_rows']:8.0f} {row['num_replicas']:6.1f} "
            f"{row['token_share']:6.0%} {row['seconds']:6.2f}"
        )

    both = {(row["planner"], row["dispatcher"]): row["speedup"] for row in rows}
    parts = [("joint", "alltoall"), ("none", "dedup-node"), ("joint", "dedup-node")]
    if both.keys() >= set(parts):
        balanced, deduplicated, together = (both[part] for part in parts)
        print(
            "joint + dedup-node over the better of joint + alltoall and none + dedup-node: "
            f"{together / max(balanced, deduplicated):.2f}"
        )


def _ratios(base: dict, mode: dict) -> list[float]:
    return [one / other for one, other in zip(base["seconds"], mode["seconds"])]


if __name__ == "__main__":
    sys.exit(main())
