"""``topoep simulate``: what a training step takes under each planner, on any cluster file."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from topoep_titan.cluster import Cluster, load_cluster
from topoep_titan.cluster.cost_model import check_prices
from topoep_titan.errors import InputError
from topoep_titan.results import write_result
from topoep_titan.simulator.calibration import Backends, backends
from topoep_titan.simulator.models import MODELS, Model, model_named
from topoep_titan.simulator.paper_step import (
    CALIBRATION,
    CLUSTER,
    matched_seeds,
    skewed,
    unexplained,
)
from topoep_titan.simulator.paper_step import TOKENS as PAPER_TOKENS
from topoep_titan.simulator.record import run_result
from topoep_titan.simulator.replay import (
    CONTESTANTS,
    Replay,
    backend_of,
    check_contestants,
    replay,
)
from topoep_titan.simulator.traces import Microbatch, recorded, synthetic

MOST_TOKENS = 2**20  # of a rank and microbatch
SILENT_SECONDS = 3.0  # before progress is shown


def simulate_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--cluster", default="h800_4x8", help="name or .toml file (default: %(default)s)")
    add("--model", required=True, help=f"one of: {', '.join(MODELS)}")
    add("--planner", required=True, help=f"one or more, by commas, of: {', '.join(CONTESTANTS)}")
    add("--ranks", type=int, help="expert-parallel ranks (default: the paper's, or the trace's)")
    add("--ranks-per-node", type=int, help="default: the trace's, else the cluster's")
    add("--replica-slots", type=int, default=2, help="a rank (default: %(default)s)")
    add("--workload", choices=("skew", "zipf", "coupled"), help="default: skew")
    add("--router-skew", type=float, default=-4.0, help="of skew (default: %(default)s)")
    add("--tokens-per-rank", type=int, default=4096, help="of a workload (default: %(default)s)")
    add("--microbatches", type=int, default=1, help="a step accumulates (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--trace", type=Path, help="replay outputs/NAME/trace of a training run instead")
    add("--calibration", help="constants of a measured machine (figure_15, or a .toml file)")
    add(
        "--paper-step", action="store_true",
        help="the paper's step: Figure 15's constants, nothing hidden, draws as uneven as its own, "
        "and what Megatron-LM's throughput leaves unexplained; vary planner, slots, --router-skew",
    )  # fmt: skip
    add("--no-overlap", action="store_true", help="nothing hides behind anything")
    add("--exact-rows", action="store_true", help="count deduplicated rows from the ids (slow)")
    add("--out", type=Path, help="write OUT/PLANNER/result.json, which `topoep report` overlays")
    add("--json", action="store_true", help="print one JSON object")


def simulate(arguments: argparse.Namespace) -> int:
    model = model_named(arguments.model)
    planners = check_contestants(arguments.planner.split(","))
    for option in ("replica_slots", "tokens_per_rank", "microbatches", "seed"):
        least = 0 if option in ("replica_slots", "seed") else 1
        given = getattr(arguments, option)
        if not least <= given <= MOST_TOKENS:
            name = "--" + option.replace("_", "-")
            raise InputError(f"{name} is {given}; give an integer from {least} to {MOST_TOKENS}")
    out = arguments.out
    if out and out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file; give a folder")
    torch.set_num_threads(1)
    rest = _paper_step(arguments, model) if arguments.paper_step else 0.0
    chosen = backends(arguments.calibration)
    microbatches = list(_progress(_microbatches(arguments, model), "microbatches"))
    cluster = _cluster(arguments, microbatches[0])
    for microbatch in microbatches:
        check_prices(
            cluster, model.dims, assignments=microbatch.tokens * cluster.ranks * model.top_k,
            copies=cluster.ranks * arguments.replica_slots,
        )  # fmt: skip
    results = [
        replay(
            microbatches, planner=planner, model=model, cluster=cluster, backends=chosen,
            replica_slots=arguments.replica_slots, accumulated=arguments.microbatches,
            overlap=not arguments.no_overlap, exact_rows=arguments.exact_rows, rest=rest,
        )
        for planner in _progress(planners, "planners")
    ]  # fmt: skip
    if out:
        _write(results, out, arguments, model, cluster, chosen, microbatches)
    report = {
        "cluster": cluster.name,
        "nodes": cluster.nodes,
        "ranks_per_node": cluster.ranks_per_node,
        "model": model.name,
        "layers": len(microbatches[0].load_LRE),
        "microbatches": len(microbatches),
        "calibration": arguments.calibration,
        "unexplained_us": 1e6 * rest,
        "rows": [_row(result) for result in results],
    }
    print(json.dumps(report) if arguments.json else _text(report, cluster))
    return 0


def _paper_step(arguments: argparse.Namespace, model: Model) -> float:
    """Set the options that the paper's step fixes; the seconds of it that nothing explains.

    Raises InputError where one of them was given.
    """
    fixed = {
        "cluster": CLUSTER, "workload": None, "trace": None, "calibration": None, "ranks": None,
        "tokens_per_rank": PAPER_TOKENS, "microbatches": 1, "seed": 0, "exact_rows": False,
        "no_overlap": False,
    }  # fmt: skip
    given = [name for name, value in fixed.items() if getattr(arguments, name) != value]
    if given:
        raise InputError(
            f"--paper-step fixes --{given[0].replace('_', '-')}; leave one of them out"
        )
    arguments.calibration, arguments.no_overlap = CALIBRATION, True
    return unexplained(model, [skewed(model, -4.0, seed) for seed in matched_seeds(model)])


def _microbatches(arguments: argparse.Namespace, model: Model) -> Iterator[Microbatch]:
    if arguments.trace:
        if arguments.workload or arguments.ranks:
            raise InputError("--trace has its own routing and ranks; leave out --workload, --ranks")
        for microbatch in recorded(arguments.trace, model.experts):
            layers, top_k = len(microbatch.ids_LRTK), microbatch.ids_LRTK[0].shape[2]
            if (layers, top_k) != (model.moe_layers, model.top_k):
                raise InputError(
                    f"{arguments.trace} holds {layers} layers of top-{top_k}; the model has "
                    f"{model.moe_layers} layers of top-{model.top_k}; give the model that was "
                    "trained"
                )
            yield microbatch
        return
    if arguments.paper_step:
        yield from (skewed(model, arguments.router_skew, seed) for seed in matched_seeds(model))
        return
    ranks = model.expert_parallel if arguments.ranks is None else arguments.ranks
    if ranks < 1 or model.experts % ranks:
        raise InputError(
            f"{ranks} ranks do not divide the {model.experts} experts of {model.name}; "
            "give a divisor"
        )
    yield synthetic(
        arguments.workload or "skew", layers=model.moe_layers, experts=model.experts,
        top_k=model.top_k, ranks=ranks, tokens=arguments.tokens_per_rank, seed=arguments.seed,
        router_skew=arguments.router_skew,
    )  # fmt: skip


def _cluster(arguments: argparse.Namespace, first: Microbatch) -> Cluster:
    """The named links for the group of the routing, in nodes as asked for, or as recorded."""
    ranks, per_node = len(first.load_LRE[0]), arguments.ranks_per_node
    if per_node is not None and not 1 <= per_node <= ranks:
        raise InputError(f"--ranks-per-node is {per_node}; give an integer from 1 to {ranks}")
    cluster = load_cluster(arguments.cluster).resized(ranks, per_node or first.ranks_per_node)
    if arguments.trace and not (per_node or first.ranks_per_node):
        print(
            f"topoep: the trace does not say how many ranks shared a node; taking "
            f"{cluster.ranks_per_node} of {ranks} (--ranks-per-node says otherwise)",
            file=sys.stderr,
        )
    return cluster


def _write(
    results: list[Replay],
    out: Path,
    arguments: argparse.Namespace,
    model: Model,
    cluster: Cluster,
    chosen: Backends,
    microbatches: list[Microbatch],
) -> None:
    routing = "natural" if arguments.trace else arguments.workload or "skew"
    if routing == "skew":
        routing = f"skew {arguments.router_skew:g}"
    config = {
        "cluster": dataclasses.asdict(cluster),
        "calibration": arguments.calibration,
        "replica_slots": arguments.replica_slots,
        "accumulated_microbatches": arguments.microbatches,
        "overlap": not arguments.no_overlap,
        "paper_step": arguments.paper_step,
        "seed": arguments.seed,
    }
    each = arguments.microbatches * cluster.ranks
    for result in results:
        folder = out / result.planner
        run = run_result(
            result, model=model.name, dispatcher=backend_of(result.planner, chosen).dispatcher,
            routing=routing, ranks=cluster.ranks, tokens=[each * m.tokens for m in microbatches],
            config={**config, "planner": result.planner},
        )  # fmt: skip
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_result(run, folder / "result.json")
        except OSError as error:
            raise InputError(
                f"cannot write to {folder} ({error.strerror}); give another folder"
            ) from None
    print(f"{len(results)} results in {out}", file=sys.stderr)


def _row(result: Replay) -> dict[str, Any]:
    names = ("max_over_mean_before", "max_over_mean", "inter_node_fraction",
             "replica_served_fraction", "num_replicas")  # fmt: skip
    return {
        "planner": result.planner,
        **{name: result.mean(name) for name in names},
        "modelled_us": result.modelled_us,
        "simulated_us": result.simulated_us,
        "tokens_per_second": result.tokens_per_second,
    }


def _text(report: dict[str, Any], cluster: Cluster) -> str:
    lines = [
        f"{report['model']} on {cluster.nodes} x {cluster.ranks_per_node} ranks of {cluster.name}, "
        f"{report['layers']} MoE layers, simulated",
        f"{'planner':12}{'max/mean':>16}{'inter':>8}{'replica':>9}{'MoE':>11}{'step':>11}"
        f"{'tokens/s':>13}{'ratio':>8}",
    ]
    first = report["rows"][0]["tokens_per_second"]
    for row in report["rows"]:
        us = row["simulated_us"]
        balance = f"{row['max_over_mean_before']:.2f} -> {row['max_over_mean']:.2f}"
        lines.append(
            f"{row['planner']:12}{balance:>16}{row['inter_node_fraction']:8.1%}"
            f"{row['replica_served_fraction']:9.1%}{us['moe'] / 1e3:8.2f} ms"
            f"{us['total'] / 1e3:8.2f} ms{row['tokens_per_second']:13,.0f}"
            f"{row['tokens_per_second'] / first:8.3f}"
        )
    names = {row["planner"] for row in report["rows"]}
    return "\n".join([*lines, *_notes(report, names)])


def _notes(report: dict[str, Any], names: set[str]) -> list[str]:
    """Under what conditions the numbers hold."""
    notes = ["ratio: tokens/s over the first row's."]
    if report["unexplained_us"]:
        notes.append(
            "The paper's step: constants of its Figure 15, nothing hidden, "
            f"{report['microbatches']} draws as uneven as its own; of every step "
            f"{report['unexplained_us'] / 1e3:.0f} ms are what Megatron-LM's published throughput "
            "leaves unexplained."
        )
    elif report["calibration"]:
        notes.append(f"MoE layers with the constants of {report['calibration']}.")
    else:
        notes.append(
            "UNCALIBRATED: ideal backends at the rates of the cluster file, so gains are larger "
            "than on any real one. --paper-step: what the paper measured on its own."
        )
    if {"megatron", "none"} <= names:
        notes.append(
            "megatron and none balance nothing: megatron sends a row per assignment, in one chunk, "
            "so nothing overlaps; none deduplicates rows by node and rank, in two chunks."
        )
    return notes


def _progress(items: Iterable, what: str) -> Iterator:
    """The items; how many are done, on a terminal, once it takes long."""
    started, shown = time.monotonic(), False
    for index, item in enumerate(items):
        yield item
        if sys.stderr.isatty() and time.monotonic() - started > SILENT_SECONDS:
            shown = True
            print(f"\r\033[K{what}: {index + 1}", end="", file=sys.stderr, flush=True)
    if shown:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
