"""``topoep doctor [RECIPE]``: what this machine has, and whether a recipe fits its device.

With a recipe: whether it fits, parameters, layout, and each pipeline rank's memory by term; exit
code 2 when the job is wrong or does not fit. Without: what the machine has. With
``--write-cluster``: measures this machine's rates into a TOML.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from topoep_titan.titan import device

device.install()  # before anything else of torchtitan is imported

from topoep_titan.errors import InputError
from topoep_titan.titan.checks import check_data, check_job
from topoep_titan.titan.config import cluster_name
from topoep_titan.titan.job import load_job
from topoep_titan.titan.machine import machine_report
from topoep_titan.titan.memory import RankMemory, memory_of_ranks, parameter_counts
from topoep_titan.titan.probe import write_cluster
from topoep_titan.titan.trainer import TopoEPTrainer

GIB = 2**30
# Of one device, as the driver reports it, by the first word of a cluster's name.
DEVICE_GIB = {
    "h800": 79.1,  # H100 and H800 SXM of 80 GB
    "h100": 79.1,
    "gb200": 184.3,  # 186 GB
    "mi300x": 192.0,
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="topoep doctor",
        description="What this machine has, and whether a recipe fits its device. After RECIPE, "
        "--section.key value as for train.py.",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", type=Path, nargs="?", help="toml_configs/X.toml")
    parser.add_argument("--nproc", type=int, help="processes (default: the recipe's)")
    parser.add_argument(
        "--device-memory", type=float, metavar="GIB", help="of one device (default: the cluster's)"
    )
    parser.add_argument("--write-cluster", type=Path, metavar="FILE", help="measure rates into it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, settings = parser.parse_known_args(argv)
    try:
        if options.write_cluster:
            return write_cluster(options.write_cluster, options.nproc)
        report: dict[str, Any] = {}
        if options.recipe:
            report["job"] = job_report(options, settings)
        elif settings:
            raise InputError(f"{settings[0]} needs a recipe before it; see topoep doctor --help")
        if options.json or not options.recipe:
            report["machine"] = machine_report()
    except InputError as error:
        print(f"topoep: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report) if options.json else _text(report))
    job = report.get("job")
    if job and job["fits"] is False:
        print(f"topoep: {_does_not_fit(job)}", file=sys.stderr)
        return 2
    return 0


def job_report(options: argparse.Namespace, settings: list[str]) -> dict[str, Any]:
    """Plain values. Raises InputError for what ``train.py --check`` refuses, but missing data."""
    config = load_job(options.recipe, settings)
    nproc = options.nproc or config.nproc
    check_job(config, nproc, with_data=False)
    ranks = memory_of_ranks(config, nproc)
    total, active = parameter_counts(config)
    memory = options.device_memory or _device_gib(config, nproc)
    return {
        "recipe": config.recipe,
        "processes": nproc,
        "layout": _layout(config, nproc),
        "parameters": total,
        "active_parameters": active,
        "memory": [_as_bytes(rank) for rank in ranks],
        "device_bytes": memory and round(memory * GIB),
        "fits": memory and max(rank.total for rank in ranks) <= memory * GIB,
        "data": _data(config),
    }


def _layout(config: TopoEPTrainer.Config, nproc: int) -> dict[str, int]:
    parallelism = config.parallelism
    tensor, pipeline = parallelism.tensor_parallel_degree, parallelism.pipeline_parallel_degree
    replicate = parallelism.data_parallel_replicate_degree
    shard = nproc // (tensor * pipeline * replicate)
    expert = parallelism.expert_parallel_degree
    return {
        "pipeline": pipeline,
        "replicate": replicate,
        "shard": shard,
        "tensor": tensor,
        "expert": expert,
        "expert_groups": shard * tensor // expert * replicate * pipeline,
        "experts_a_rank": config.model.num_experts // expert,
        "tokens_a_step": _tokens_a_step(config, shard * replicate),
    }


def _tokens_a_step(config: TopoEPTrainer.Config, data_parallel: int) -> int:
    training = config.training
    sequences = max(training.global_batch_size, training.local_batch_size * data_parallel)
    return sequences * training.seq_len


def _device_gib(config: TopoEPTrainer.Config, nproc: int) -> float | None:
    """Of the cluster that the recipe names; else of this machine's GPU, or a rank's share of its
    memory; None when unknown."""
    kind = Path(cluster_name(config.topoep.cluster)).stem.split("_")[0]
    named = config.topoep.cluster != "auto"
    if torch.cuda.is_available() and not (named and kind in DEVICE_GIB):
        return torch.cuda.get_device_properties(0).total_memory / GIB
    if kind in DEVICE_GIB:
        return DEVICE_GIB[kind]
    if kind in ("cpu", "emulated"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / nproc / GIB
    return None


def _data(config: TopoEPTrainer.Config) -> str:
    try:
        check_data(config, verify_data=False)
    except InputError as error:
        return str(error)
    return "ok"


def _as_bytes(rank: RankMemory) -> dict[str, int]:
    return {**vars(rank), "total": rank.total}


def _does_not_fit(job: dict[str, Any]) -> str:
    most = max(job["memory"], key=lambda rank: rank["total"])
    terms = sorted((term for term in most if term != "total"), key=most.get)
    return (
        f"{job['recipe']} needs {most['total'] / GIB:.1f} GiB a rank, more than the "
        f"{job['device_bytes'] / GIB:.1f} GiB of its device (largest: {terms[-1]}, {terms[-2]}); "
        "use more processes, fewer layers, a smaller batch, or full activation checkpointing"
    )


def _text(report: dict[str, Any]) -> str:
    if "machine" not in report:
        return "\n".join(_job_lines(report["job"]))
    machine = report["machine"]
    lines = [", ".join(f"{name} {version}" for name, version in machine["versions"].items())]
    lines += [f"device: {each}" for each in machine["devices"]]
    groups = machine["peer_groups"]
    lines.append(f"GPUs that map each other's memory: {groups or 'none (no CUDA device)'}")
    for name, check in machine["checks"].items():
        lines.append(f"{'ok     ' if check['ok'] else 'missing'} {name}: {check['what']}")
    return "\n".join(lines)


def _job_lines(job: dict[str, Any]) -> list[str]:
    layout, memory = job["layout"], job["memory"]
    device, most = job["device_bytes"], max(rank["total"] for rank in memory) / GIB
    verdict = {True: "fits", False: "does NOT fit", None: "not judged: give --device-memory GIB"}
    known = f" of the {device / GIB:.1f} GiB of its device" if device else ""
    lines = [
        f"{verdict[job['fits']]}: {job['recipe']} needs {most:.1f} GiB a rank{known}",
        f"data: {job['data']}",
        "",
        f"{job['recipe']}: {job['parameters']:,} parameters, {job['active_parameters']:,} active",
        f"{job['processes']} processes: " + ", ".join(f"{k} {v:,}" for k, v in layout.items()),
        "",
        "GiB a rank      " + "".join(f"{f'stage {i}':>10}" for i in range(len(memory))),
    ]
    for term in memory[0]:
        estimated = " ~" if term in ("activations", "logits") else ""
        values = "".join(f"{rank[term] / GIB:10.3f}" for rank in memory)
        lines.append(f"{term + estimated:<16}{values}")
    return [*lines, "(~ estimated; CUDA context and NCCL are not counted)"]
