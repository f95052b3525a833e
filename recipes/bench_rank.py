"""What one rank of `recipes.bench_exec` runs: stacked MoE layers under several modes, timed.

    python -m recipes.bench_rank SPEC.json RESULT.json      (RANK and so on in the environment)

Letters: R ranks, E experts, T tokens of this rank, K top-k, D width, F expert width. A mode is a
planner and a dispatcher. Every round runs every mode once, in an order that turns with the round;
a step is forward and backward through all layers, between two barriers. Rank 0 writes the result.
"""

import json
import math
import resource
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from topoep_titan.cluster import ModelDims, load_cluster
from topoep_titan.execution.lane import ThreadLane
from topoep_titan.execution.layer import Engine, run_layer
from topoep_titan.execution.transport import CollectiveTransport
from topoep_titan.planning import make_planner
from topoep_titan.planning.plan import contiguous_mains
from topoep_titan.planning.quality import plan_quality
from topoep_titan.planning.workloads import skew


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    blocks = [_Block(spec, seed).measure() for seed in spec["seeds"]]
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(blocks))
    dist.barrier()
    dist.destroy_process_group()


class _Block:
    """One set of routings: layer l draws its own bias and tokens from ``seed + l``."""

    def __init__(self, spec: dict, seed: int):
        self.spec, self.seed = spec, seed
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.cluster = load_cluster(spec["cluster"]).resized(self.ranks, spec["ranks_per_node"])
        experts, tokens, width = spec["experts"], spec["tokens"], spec["hidden"]
        self.main_E = contiguous_mains(self.ranks, experts)
        self.dims = ModelDims(width, spec["moe_intermediate"])
        self.ids = [
            skew(
                experts, spec["top_k"], self.ranks, tokens,
                router_skew=spec["router_skew"], seed=seed + layer,
            )[self.rank].long()
            for layer in range(spec["layers"])
        ]  # fmt: skip
        draw = torch.Generator().manual_seed(1000 * seed + self.rank)
        self.x_TD = torch.randn(tokens, width, generator=draw)
        self.grad_TD = torch.randn(tokens, width, generator=draw)
        self.scores = [torch.rand(ids.shape, generator=draw) for ids in self.ids]
        mains, inner = experts // self.ranks, spec["moe_intermediate"]
        self.weights = [
            tuple(
                torch.randn(mains, *shape, generator=draw).div_(shape[-1] ** 0.5).requires_grad_()
                for shape in ((inner, width), (width, inner), (inner, width))
            )
            for _ in self.ids
        ]

    def measure(self) -> dict:
        modes = [tuple(mode) for mode in self.spec["modes"]]
        engines = {mode: self._engine(*mode) for mode in modes}
        rows = {mode: {"seconds": []} for mode in modes}
        reference = None
        for mode in modes:  # warms up, and checks before anything is timed
            tensors, records = self._step(engines[mode])
            reference = reference or tensors
            error = max(
                ((ours - theirs).abs().max() / theirs.abs().max()).item()
                for ours, theirs in zip(tensors, reference)
            )
            assert error < 1e-5, f"{mode} differs from {modes[0]} by {error}"
            rows[mode] |= self._described(engines[mode], records)
        for round_number in range(self.spec["rounds"]):
            for mode in modes if round_number % 2 == 0 else modes[::-1]:
                engine = engines[mode]
                dist.barrier()
                engine.transport.token_seconds = 0.0
                started = time.perf_counter()
                self._step(engine)
                dist.barrier()
                rows[mode]["seconds"].append(time.perf_counter() - started)
                rows[mode].setdefault("token_seconds", []).append(engine.transport.token_seconds)
        for row in rows.values():
            seconds = torch.tensor(row.pop("token_seconds"), dtype=torch.float64)
            dist.all_reduce(seconds)
            row["token_share"] = statistics.median((seconds / self.ranks).tolist())
            row["token_share"] /= statistics.median(row["seconds"])
        return {
            "seed": self.seed,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # rank 0
            "modes": [dict(zip(("planner", "dispatcher"), m)) | row for m, row in rows.items()],
        }

    def _engine(self, planner: str, dispatcher: str) -> Engine:
        slots = self.spec["replica_slots"] if planner != "none" else 0
        return Engine(
            planner=make_planner(
                planner, dispatcher, main_E=self.main_E, cluster=self.cluster,
                model_dims=self.dims, replica_slots=slots,
            ),
            main_E=self.main_E,
            replica_slots=slots,
            dispatcher=dispatcher,
            chunks=self.spec["chunks"],
            compute_dtype=torch.float32,
            transport=_Timed(dist.group.WORLD, self.cluster.ranks_per_node),
            lane=ThreadLane(),
        )  # fmt: skip

    def _step(self, engine: Engine) -> tuple[list[Tensor], list]:
        """Forward and backward: (output and gradients, the layers' records)."""
        x_TD = self.x_TD.clone().requires_grad_()
        leaves = [x_TD, *(weight for weights in self.weights for weight in weights)]
        for leaf in leaves:
            leaf.grad = None
        hidden_TD, records = x_TD, []
        for layer, (ids_TK, scores_TK, weights) in enumerate(
            zip(self.ids, self.scores, self.weights)
        ):
            counts_E = torch.bincount(ids_TK.flatten(), minlength=self.spec["experts"])
            out_TD, record = run_layer(
                hidden_TD, scores_TK, ids_TK, counts_E, weights, engine, layer
            )
            hidden_TD = (hidden_TD + out_TD) * math.sqrt(0.5)
            records.append(record)
        hidden_TD.backward(self.grad_TD)
        return [hidden_TD.detach(), *(leaf.grad for leaf in leaves)], records

    def _described(self, engine: Engine, records: list) -> dict:
        """What was planned (means over the layers) and sent (one step, all ranks)."""
        qualities = [
            plan_quality(
                record.plan,
                main_E=self.main_E,
                cluster=self.cluster,
                model_dims=self.dims,
                dispatcher=engine.dispatcher,
                rows_RX=record.rows_RX,
            )
            for record in records
        ]
        sent = engine.transport.traffic.drain()
        totals = torch.tensor(list(sent.values()))
        dist.all_reduce(totals)
        total = dict(zip(sent, totals.tolist()))  # (kind, link): [rows, bytes]
        return {
            "max_over_mean_before": _mean(q.max_over_mean_before for q in qualities),
            "max_over_mean": _mean(q.max_over_mean for q in qualities),
            "num_replicas": _mean(q.num_replicas for q in qualities),
            "plan_us": statistics.median(record.plan_seconds for record in records) * 1e6,
            "token_far_rows": total["token", "far"][0],
            "parameter_far_bytes": total["parameter", "far"][1],
            "gradient_far_bytes": total["gradient", "far"][1],
            "buffer_bytes": engine.buffers.nbytes,
        }


class _Timed(CollectiveTransport):
    """Adds up the seconds in exchanges of token rows, waiting for peers included."""

    token_seconds = 0.0

    def exchange(self, *parcels):
        started = time.perf_counter()
        arrived = super().exchange(*parcels)
        self.token_seconds += time.perf_counter() - started
        return arrived


def _mean(values) -> float:
    return statistics.fmean(values)


if __name__ == "__main__":
    main()
